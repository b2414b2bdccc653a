//! What the map of a layer says of one block, in a word that changes as a whole.
//!
//! | bits | |
//! |---|---|
//! | 0-1 | the [`State`] |
//! | 2-3 | how often the block was used again, up to 3; of an absent one, whether it was evicted |
//! | 4-23 | the tick of its last use; of an absent one that was evicted, of that |
//! | 24-63 | the generation, which every change of the state advances |

const USES: u32 = 2;
const TICK: u32 = 4;
const GENERATION: u32 = 24;
/// Most uses that are counted.
pub(super) const MOST_USES: u64 = 3;
/// Ticks are counted modulo this.
pub(super) const TICKS: u64 = 1 << (GENERATION - TICK);
/// Generations are counted modulo this.
pub(super) const GENERATIONS: u64 = 1 << (64 - GENERATION);

/// How many ticks an evicted block is remembered.
const MEMORY: u64 = 128;

/// How many ticks after a use another one counts as another: what is read in many small pieces is used once.
const APART: u64 = 2;

/// What is known of a block in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Nothing; what the file holds there means nothing.
    Absent,
    /// It was there when the files were last in use, and is checked before it is shown.
    Unverified,
    /// The file holds the layer's bytes.
    Verified,
    /// Whoever has the lock of evictions is taking it out of the file. If nobody has, somebody was killed there.
    Evicting,
}

/// The word of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Word(u64);

impl Word {
    pub(super) fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    pub(super) fn bits(self) -> u64 {
        self.0
    }

    pub(super) fn state(self) -> State {
        match self.0 & 3 {
            0 => State::Absent,
            1 => State::Unverified,
            2 => State::Verified,
            _ => State::Evicting,
        }
    }

    pub(super) fn uses(self) -> u64 {
        self.0 >> USES & MOST_USES
    }

    pub(super) fn tick(self) -> u64 {
        self.0 >> TICK & (TICKS - 1)
    }

    pub(super) fn generation(self) -> u64 {
        self.0 >> GENERATION
    }

    /// How many ticks have passed since that of the word.
    pub(super) fn age(self, now: u64) -> u64 {
        now.wrapping_sub(self.tick()) & (TICKS - 1)
    }

    fn with(self, uses: u64, tick: u64) -> Self {
        let rest = self.0 & (3 | !0 << GENERATION);
        Self(rest | uses.min(MOST_USES) << USES | (tick & (TICKS - 1)) << TICK)
    }

    /// The same block in another state. A word that was never changed, as in a map that was cut short and extended
    /// again, gets the generation `first`, which is chosen at random: so it never repeats one that a reader remembers.
    pub(super) fn changed(self, state: State, first: u64) -> Self {
        let next = match self.generation() {
            0 => first % GENERATIONS,
            generation => (generation + 1) % GENERATIONS,
        };
        let state = match state {
            State::Absent => 0,
            State::Unverified => 1,
            State::Verified => 2,
            State::Evicting => 3,
        };
        let generation = next.max(1) << GENERATION;
        Self(self.0 & !(3 | !0 << GENERATION) | generation | state)
    }

    /// The block, filled at a tick. One that was evicted recently counts as used again.
    pub(super) fn filled(self, now: u64, first: u64) -> Self {
        let uses = match self.state() {
            State::Absent => u64::from(self.uses() > 0 && self.age(now) < MEMORY),
            _ => self.uses(),
        };
        self.changed(State::Verified, first).with(uses, now)
    }

    /// The block, evicted at a tick.
    pub(super) fn evicted(self, now: u64, first: u64) -> Self {
        self.changed(State::Absent, first).with(1, now)
    }

    /// The block, used at a tick; `None` if there is nothing to note.
    pub(super) fn used(self, now: u64) -> Option<Self> {
        (self.age(now) >= APART).then(|| self.with(self.uses() + 1, now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_advances_the_generation_and_keeps_the_rest() {
        let first = 77;
        let filled = Word::from_bits(0).filled(TICKS + 5, first);
        assert_eq!((filled.state(), filled.generation()), (State::Verified, 77));
        assert_eq!((filled.tick(), filled.uses(), filled.age(TICKS + 7)), (5, 0, 2));
        assert_eq!((filled.used(5), filled.used(6)), (None, None));
        let used = filled.used(7).unwrap();
        assert_eq!((used.uses(), used.tick(), used.generation()), (1, 7, 77));
        let many = (4..20).fold(used, |word, tick| word.used(2 * tick + 1).unwrap());
        assert_eq!((many.uses(), many.state()), (MOST_USES, State::Verified));
        let doubted = many.changed(State::Unverified, first);
        assert_eq!((doubted.generation(), doubted.uses(), doubted.tick()), (78, MOST_USES, 39));
        let last = Word::from_bits(!0).changed(State::Absent, first);
        assert_eq!(last.generation(), 1, "0 is a word that was never changed");
    }

    #[test]
    fn an_evicted_block_that_comes_back_soon_counts_as_used_again() {
        let word = Word::from_bits(0).filled(9, 1).changed(State::Evicting, 1).evicted(10, 1);
        assert_eq!(word.state(), State::Absent);
        assert_eq!(word.filled(10 + MEMORY - 1, 1).uses(), 1);
        assert_eq!(word.filled(10 + MEMORY, 1).uses(), 0);
    }
}
