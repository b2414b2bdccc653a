//! How a block of a layer appears in the file, is checked and disappears, whatever others do at the same time.
//!
//! Everything is a step on what processes share: a [`Word`](super::word::Word) per block, which changes by
//! compare-exchange, and the file. `docs/decisions/0051-a-cache-that-servers-share.md` shows why no order of steps, and
//! no death between two of them, lets a reader take wrong bytes for the layer's; the tests here run all orders.

use super::word::{State, Word};
use std::io;

/// How often a step that others interfere with is repeated.
const ATTEMPTS: usize = 8;

/// What the users of a layer's files share.
pub(super) trait Shared {
    /// The word of a block. What is read afterwards is not older.
    fn load(&self, block: u64) -> Word;

    /// The same, after everything that was read of the file before.
    fn load_after_reads(&self, block: u64) -> Word;

    /// Replaces a word if it is `from`. What was written before is seen by whoever sees the new word, and what is
    /// written afterwards only by those who see it.
    fn replace(&self, block: u64, from: Word, to: Word) -> bool;

    /// Whether the words are those that others see: if not, none of them is replaced.
    fn is_shared(&self) -> bool;

    /// The generation of a word that is changed for the first time.
    fn first(&self) -> u64;

    /// Writes a block to the file.
    fn write(&self, block: u64, bytes: &[u8]) -> io::Result<()>;

    /// Reads a block of the file.
    fn read(&self, block: u64) -> io::Result<Vec<u8>>;

    /// Takes a block out of the file.
    fn punch(&self, block: u64) -> io::Result<()>;
}

/// What a reader may make of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look {
    /// The file holds the layer's bytes, if it still does after they were read: see
    /// [`CachedLayer::still`](super::CachedLayer::still).
    Verified(Stamp),
    /// The file may hold them: see [`CachedLayer::verify`](super::CachedLayer::verify).
    Unverified,
    /// They are to be fetched.
    Absent,
}

/// A moment in the life of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp(u64);

impl Look {
    pub(super) fn at(word: Word) -> Self {
        match word.state() {
            State::Verified => Self::Verified(Stamp(word.generation())),
            State::Unverified => Self::Unverified,
            State::Absent | State::Evicting => Self::Absent,
        }
    }
}

/// Whether a block that was verified has been so ever since. What was read meanwhile is then the layer's.
pub(super) fn still(shared: &impl Shared, block: u64, stamp: Stamp) -> bool {
    Look::at(shared.load_after_reads(block)) == Look::Verified(stamp)
}

/// Puts a block's bytes, which were checked, into the file; `None` if others were in the way.
///
/// # Errors
/// They cannot be written. The block is absent, or what another filler has made of it.
pub(super) fn fill(
    shared: &impl Shared,
    block: u64,
    bytes: &[u8],
    now: u64,
) -> io::Result<Option<Stamp>> {
    for _ in 0..ATTEMPTS {
        let word = shared.load(block);
        match Look::at(word) {
            Look::Verified(stamp) => return Ok(Some(stamp)),
            Look::Absent if word.state() == State::Evicting => return Ok(None),
            Look::Absent | Look::Unverified => {}
        }
        shared.write(block, bytes)?;
        let filled = word.filled(now, shared.first());
        if shared.replace(block, word, filled) {
            return Ok(Some(Stamp(filled.generation())));
        }
        // Somebody has changed the block since, and may have taken out what was just written.
    }
    Ok(None)
}

/// Checks a block that is not verified. One that cannot be read, or does not match, is absent from then on.
pub(super) fn verify(shared: &impl Shared, block: u64, matches: impl Fn(&[u8]) -> bool) -> Look {
    for _ in 0..ATTEMPTS {
        let word = shared.load(block);
        let look = Look::at(word);
        if look != Look::Unverified {
            return look;
        }
        let good = shared.read(block).is_ok_and(|bytes| matches(&bytes));
        let state = if good { State::Verified } else { State::Absent };
        let checked = word.changed(state, shared.first());
        if shared.replace(block, word, checked) {
            return Look::at(checked);
        }
    }
    Look::Absent
}

/// Makes a verified block one that is to be checked again.
pub(super) fn doubt(shared: &impl Shared, block: u64) {
    loop {
        let word = shared.load(block);
        if word.state() != State::Verified {
            return;
        }
        if shared.replace(block, word, word.changed(State::Unverified, shared.first())) {
            return;
        }
    }
}

/// Makes a block absent, whatever it is: the disk may have refused what was written to the file. Whoever is just
/// checking or filling it does so again. An evictor makes it absent itself.
///
/// It would not do to check the block again: as long as the kernel has what the disk refused, it shows the right bytes,
/// but will never try to write them again.
pub(super) fn lose(shared: &impl Shared, block: u64) {
    loop {
        let word = shared.load(block);
        if word.state() == State::Evicting {
            return;
        }
        if shared.replace(block, word, word.changed(State::Absent, shared.first())) {
            return;
        }
        if !shared.is_shared() {
            return;
        }
    }
}

/// Begins the use of a block that nobody uses, and nobody is evicting. It counts as unverified, or as absent if
/// somebody was killed who was evicting it. The word changes in any case, so that the page that has it is written to
/// the disk, or fails to be: the kernel may have refused to write it before, and show what the disk has later.
pub(super) fn renew(shared: &impl Shared, block: u64) {
    let word = shared.load(block);
    let state = match word.state() {
        State::Verified | State::Unverified => State::Unverified,
        State::Absent | State::Evicting => State::Absent,
    };
    // If the map is not ours any more, nobody looks at it.
    shared.replace(block, word, word.changed(state, shared.first()));
}

/// Takes a block out of the file if its word is still this one; whether it was. Whoever calls it has the lock of
/// evictions. An absent block may have bytes in the file, too, which a filler has left that was killed.
///
/// # Errors
/// The file system cannot take it out. It is absent nevertheless.
pub(super) fn evict(shared: &impl Shared, block: u64, word: Word, now: u64) -> io::Result<bool> {
    let evicting = word.changed(State::Evicting, shared.first());
    if !shared.replace(block, word, evicting) {
        return Ok(false);
    }
    let punched = shared.punch(block);
    let gone = match word.state() {
        State::Absent => evicting.changed(State::Absent, shared.first()),
        _ => evicting.evicted(now, shared.first()),
    };
    // Nobody else changes it, unless the map is no longer ours: then nobody looks at it, either.
    shared.replace(block, evicting, gone);
    punched.map(|()| true)
}

/// Ends what an evictor left that was killed. Whoever calls it has the lock of evictions.
///
/// # Errors
/// As of [`evict`].
pub(super) fn finish(shared: &impl Shared, block: u64, now: u64) -> io::Result<()> {
    let word = shared.load(block);
    if word.state() != State::Evicting {
        return Ok(());
    }
    let punched = shared.punch(block);
    shared.replace(block, word, word.evicted(now, shared.first()));
    punched
}

#[cfg(test)]
mod tests {
    //! Every order of the steps of several users of one block, with a death before each of them.
    //!
    //! A user is run again from its beginning for each of its steps, with the answers that it got before, until it asks
    //! for one more. So what is known of it is the list of its answers, and a moment of all users that occurred before
    //! need not be looked at again.

    use super::*;
    use std::cell::RefCell;
    use std::collections::HashSet;
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

    /// The layer's block; a step concerns half of it.
    const RIGHT: [u8; 2] = [3, 4];
    const NOW: u64 = 5;

    #[derive(Clone, Copy)]
    enum Step {
        Load,
        Replace(u64, u64),
        Write(usize, u8),
        Read(usize),
        Punch(usize),
        /// The disk refuses what was written, and the user is told.
        Refuse,
        /// The user has done what follows from that.
        Mended,
    }

    /// The word and the file.
    #[derive(Clone, PartialEq, Eq, Hash, Debug)]
    struct World {
        word: u64,
        file: [u8; 2],
        /// Whether the disk has something else than the file, and will have it for good.
        refused: [bool; 2],
        is_mended: bool,
    }

    impl World {
        fn new(state: State, file: [u8; 2]) -> Self {
            let word = Word::from_bits(0).changed(state, 100).bits();
            Self { word, file, refused: [false; 2], is_mended: false }
        }

        fn take(&mut self, step: Step) -> u64 {
            match step {
                Step::Load => self.word,
                Step::Replace(from, to) => {
                    let is_it = self.word == from;
                    if is_it {
                        self.word = to;
                    }
                    u64::from(is_it)
                }
                Step::Write(half, byte) => {
                    self.file[half] = byte;
                    self.refused[half] = false;
                    0
                }
                Step::Read(half) => self.file[half].into(),
                Step::Punch(half) => {
                    self.file[half] = 0;
                    0
                }
                Step::Refuse => {
                    self.refused = [true; 2];
                    0
                }
                Step::Mended => {
                    self.is_mended = true;
                    0
                }
            }
        }

        fn check(&self) -> Result<(), String> {
            let is_verified = Word::from_bits(self.word).state() == State::Verified;
            if is_verified && self.file != RIGHT {
                return Err(format!("verified, and wrong: {self:?}"));
            }
            if is_verified && self.is_mended && self.refused.contains(&true) {
                return Err(format!("verified, and not what the disk will have: {self:?}"));
            }
            Ok(())
        }
    }

    /// What a user of the block sees: the answers that it got, and the step that it takes next.
    struct Seen<'a> {
        answers: &'a [u64],
        next: RefCell<(usize, Option<Step>)>,
    }

    impl Seen<'_> {
        fn ask(&self, step: Step) -> u64 {
            let mut next = self.next.borrow_mut();
            let Some(answer) = self.answers.get(next.0) else {
                next.1 = Some(step);
                drop(next);
                resume_unwind(Box::new(()));
            };
            next.0 += 1;
            *answer
        }
    }

    impl Shared for Seen<'_> {
        fn load(&self, _: u64) -> Word {
            Word::from_bits(self.ask(Step::Load))
        }

        fn load_after_reads(&self, block: u64) -> Word {
            self.load(block)
        }

        fn replace(&self, _: u64, from: Word, to: Word) -> bool {
            self.ask(Step::Replace(from.bits(), to.bits())) != 0
        }

        fn is_shared(&self) -> bool {
            true
        }

        fn first(&self) -> u64 {
            1
        }

        fn write(&self, _: u64, bytes: &[u8]) -> io::Result<()> {
            for (half, byte) in bytes.iter().enumerate() {
                self.ask(Step::Write(half, *byte));
            }
            Ok(())
        }

        fn read(&self, _: u64) -> io::Result<Vec<u8>> {
            Ok((0..2).map(|half| self.ask(Step::Read(half)) as u8).collect())
        }

        fn punch(&self, _: u64) -> io::Result<()> {
            for half in 0..2 {
                self.ask(Step::Punch(half));
            }
            Ok(())
        }
    }

    /// Does something with the block, and says what was wrong with what it saw.
    type User = fn(&Seen<'_>) -> Result<(), String>;

    fn filler(seen: &Seen<'_>) -> Result<(), String> {
        fill(seen, 0, &RIGHT, NOW).map(drop).map_err(|error| error.to_string())
    }

    fn verifier(seen: &Seen<'_>) -> Result<(), String> {
        match verify(seen, 0, |bytes| bytes == RIGHT) {
            Look::Unverified => Err("it was verified, and is not".to_owned()),
            Look::Verified(_) | Look::Absent => Ok(()),
        }
    }

    const DOUBTER: User = |seen| {
        doubt(seen, 0);
        Ok(())
    };

    /// Hears that the disk has refused what was written.
    const LOSER: User = |seen| {
        seen.ask(Step::Refuse);
        lose(seen, 0);
        seen.ask(Step::Mended);
        Ok(())
    };

    /// Hears of it, and believes what the kernel still shows.
    const BELIEVER: User = |seen| {
        seen.ask(Step::Refuse);
        doubt(seen, 0);
        seen.ask(Step::Mended);
        Ok(())
    };

    /// Ends what was left, and evicts what is there or was left in the file.
    fn evictor(seen: &Seen<'_>) -> Result<(), String> {
        finish(seen, 0, NOW).map_err(|error| error.to_string())?;
        let word = seen.load(0);
        evict(seen, 0, word, NOW).map(drop).map_err(|error| error.to_string())
    }

    fn reader(seen: &Seen<'_>) -> Result<(), String> {
        let Look::Verified(stamp) = Look::at(seen.load(0)) else { return Ok(()) };
        let bytes = seen.read(0).map_err(|error| error.to_string())?;
        if still(seen, 0, stamp) && bytes != RIGHT {
            return Err(format!("a reader takes {bytes:?} for the layer's"));
        }
        Ok(())
    }

    /// Evicts as if it were enough to say that the block is absent before it is taken out.
    fn hasty_evictor(seen: &Seen<'_>) -> Result<(), String> {
        let word = seen.load(0);
        if seen.replace(0, word, word.evicted(NOW, 1)) {
            seen.punch(0).map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    /// Takes the block out before it says so.
    fn late_evictor(seen: &Seen<'_>) -> Result<(), String> {
        let word = seen.load(0);
        seen.punch(0).map_err(|error| error.to_string())?;
        seen.replace(0, word, word.evicted(NOW, 1));
        Ok(())
    }

    fn early_filler(seen: &Seen<'_>) -> Result<(), String> {
        let word = seen.load(0);
        if word.state() == State::Absent && seen.replace(0, word, word.filled(NOW, 1)) {
            seen.write(0, &RIGHT).map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    /// Reads without looking whether the block still is what it was.
    fn trusting_reader(seen: &Seen<'_>) -> Result<(), String> {
        let Look::Verified(_) = Look::at(seen.load(0)) else { return Ok(()) };
        let bytes = seen.read(0).map_err(|error| error.to_string())?;
        if bytes == RIGHT { Ok(()) } else { Err(format!("a reader sees {bytes:?}")) }
    }

    #[derive(Clone, PartialEq, Eq, Hash)]
    struct Moment {
        world: World,
        answers: Vec<Vec<u64>>,
        /// Who was killed.
        dead: Vec<bool>,
    }

    /// Runs all orders from `world` on, in which evictors follow one another: they have a lock.
    fn explore(world: World, users: &[User]) -> Result<usize, String> {
        let count = users.len();
        let start = Moment { world, answers: vec![Vec::new(); count], dead: vec![false; count] };
        let (mut seen, mut left) = (HashSet::new(), vec![start]);
        while let Some(moment) = left.pop() {
            if seen.contains(&moment) {
                continue;
            }
            moment.world.check()?;
            let mut evicts = false;
            for (number, user) in users.iter().enumerate() {
                let is_evictor = std::ptr::fn_addr_eq(*user, evictor as User);
                if moment.dead[number] || is_evictor && evicts {
                    continue;
                }
                let one = Seen { answers: &moment.answers[number], next: RefCell::default() };
                if let Ok(result) = catch_unwind(AssertUnwindSafe(|| user(&one))) {
                    result?;
                    continue;
                }
                let Some(step) = one.next.into_inner().1 else {
                    return Err("a user panics".to_owned());
                };
                evicts |= is_evictor;
                let mut next = moment.clone();
                next.answers[number].push(next.world.take(step));
                left.push(next);
                let mut killed = moment.clone();
                killed.dead[number] = true;
                left.push(killed);
            }
            seen.insert(moment);
        }
        Ok(seen.len())
    }

    fn worlds() -> [World; 5] {
        [
            World::new(State::Absent, [9, 0]),
            World::new(State::Unverified, RIGHT),
            World::new(State::Unverified, [RIGHT[0], 9]),
            World::new(State::Verified, RIGHT),
            World::new(State::Evicting, [0, RIGHT[1]]),
        ]
    }

    #[test]
    fn in_no_order_of_steps_and_deaths_is_a_wrong_block_verified_or_read() {
        let casts: [&[User]; 9] = [
            &[filler, evictor, reader],
            &[filler, filler, evictor],
            &[filler, verifier, evictor],
            &[verifier, DOUBTER, evictor],
            &[reader, DOUBTER, filler],
            &[evictor, evictor, filler],
            &[LOSER, filler, evictor],
            &[LOSER, filler, verifier],
            &[LOSER, verifier, DOUBTER],
        ];
        let mut moments = 0;
        for users in casts {
            for world in worlds() {
                moments += explore(world, users).unwrap();
            }
        }
        assert!(moments > 10_000, "only {moments} moments");
    }

    #[test]
    fn a_step_out_of_order_is_found() {
        let wrong: [&[User]; 6] = [
            &[hasty_evictor, filler],
            &[late_evictor, reader],
            &[early_filler, reader],
            &[evictor, trusting_reader],
            &[BELIEVER, verifier],
            &[BELIEVER, filler],
        ];
        for users in wrong {
            let found = worlds().into_iter().any(|world| explore(world, users).is_err());
            assert!(found);
        }
    }
}
