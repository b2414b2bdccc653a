//! Which blocks are evicted.
//!
//! A block that was used at one tick only is *cold*, others are *hot*. The cold ones go first, the oldest before the
//! younger, as long as they take more than their share: so what is read once, however much it is, replaces what else
//! was read once. Of the hot ones, those go that were not used for longest, in proportion to how often they were. A
//! block that comes back soon after it was evicted is hot at once: so a new set of blocks that are in use replaces an
//! old one even if it is larger than the share of the cold ones.

use super::word::Word;

/// Ages are told apart up to this number of ticks.
const AGES: usize = 1024;

/// The part of the limit that cold blocks may keep.
const COLD: u64 = 8;

/// How many blocks there are of each kind and age.
pub(super) struct Census {
    now: u64,
    kinds: [Vec<u64>; 2],
}

impl Census {
    pub(super) fn new(now: u64) -> Self {
        Self { now, kinds: [vec![0; AGES], vec![0; AGES]] }
    }

    /// The kind, cold or hot, and the age of a block.
    fn place(&self, word: Word) -> (usize, usize) {
        let age = word.age(self.now) / word.uses().max(1);
        (usize::from(word.uses() > 0), (age as usize).min(AGES - 1))
    }

    /// Counts a block that is in the file.
    pub(super) fn add(&mut self, word: Word) {
        let (kind, age) = self.place(word);
        if let Some(count) = self.kinds.get_mut(kind).and_then(|ages| ages.get_mut(age)) {
            *count += 1;
        }
    }

    /// How many blocks were counted.
    pub(super) fn blocks(&self) -> u64 {
        self.kinds.iter().flatten().sum()
    }

    /// Those to evict so that there are `need` fewer, in a cache that holds up to `limit` blocks.
    pub(super) fn victims(self, need: u64, limit: u64) -> Victims {
        let [cold, hot] = self.kinds.each_ref().map(|ages| ages.iter().sum::<u64>());
        let first = need.min(cold.saturating_sub(limit / COLD));
        let second = (need - first).min(hot);
        let last = (need - first - second).min(cold - first);
        let from = [first + last, second];
        let mut quota = self.kinds;
        for (ages, mut rest) in quota.iter_mut().zip(from) {
            for count in ages.iter_mut().rev() {
                *count = rest.min(*count);
                rest -= *count;
            }
        }
        Victims { census: Census { now: self.now, kinds: quota } }
    }
}

/// The blocks to evict: so many of each kind and age.
pub(super) struct Victims {
    census: Census,
}

impl Victims {
    /// Whether a block is one of them; asked once for each.
    pub(super) fn take(&mut self, word: Word) -> bool {
        let (kind, age) = self.census.place(word);
        let quota = self.census.kinds.get_mut(kind).and_then(|ages| ages.get_mut(age));
        let Some(quota) = quota.filter(|quota| **quota > 0) else { return false };
        *quota -= 1;
        true
    }

    /// Whether all of them were found.
    pub(super) fn is_done(&self) -> bool {
        self.census.blocks() == 0
    }
}
