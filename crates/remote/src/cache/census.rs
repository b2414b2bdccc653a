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

#[cfg(test)]
mod tests {
    use super::super::usage::per_tick;
    use super::super::word::State;
    use super::*;
    use std::collections::BTreeMap;

    /// A cache of blocks that are told apart by numbers, as `tidy` keeps it.
    struct Simulated {
        limit: u64,
        now: u64,
        filled: u64,
        words: BTreeMap<u64, Word>,
        fetched: u64,
        present: u64,
    }

    impl Simulated {
        fn new(limit: u64) -> Self {
            Self { limit, now: 0, filled: 0, words: BTreeMap::new(), fetched: 0, present: 0 }
        }

        fn use_block(&mut self, block: u64) {
            let word = self.words.entry(block).or_insert(Word::from_bits(0));
            if word.state() == State::Verified {
                *word = word.used(self.now).unwrap_or(*word);
                return;
            }
            *word = word.filled(self.now, 1);
            self.fetched += 1;
            self.filled += 1;
            self.present += 1;
            self.now += u64::from(self.filled.is_multiple_of(per_tick(self.limit)));
            if self.present > self.limit - self.limit / 16 {
                self.evict();
            }
        }

        fn evict(&mut self) {
            let need = self.present - (self.limit - self.limit / 8);
            let mut census = Census::new(self.now);
            let present = |word: &&mut Word| word.state() == State::Verified;
            for word in self.words.values_mut().filter(present) {
                census.add(*word);
            }
            let (now, before) = (self.now, self.present);
            let mut victims = census.victims(need, self.limit);
            for word in self.words.values_mut().filter(present) {
                if victims.take(*word) {
                    *word = word.changed(State::Evicting, 1).evicted(now, 1);
                    self.present -= 1;
                }
            }
            assert!(victims.is_done());
            assert_eq!(before - self.present, need);
        }

        /// How many of these are not fetched when they are used.
        fn hits(&mut self, blocks: impl Iterator<Item = u64>) -> u64 {
            let before = self.fetched;
            let mut used = 0;
            for block in blocks {
                self.use_block(block);
                used += 1;
            }
            used - (self.fetched - before)
        }
    }

    #[test]
    fn a_scan_does_not_push_out_what_is_read_repeatedly() {
        let mut cache = Simulated::new(1024);
        let used = || 0..512;
        cache.hits(used());
        cache.now += 2;
        cache.hits(used());
        for block in 10_000..20_000 {
            cache.use_block(block);
        }
        assert_eq!(cache.hits(used()), 512);
        // Nor does a second one of the same blocks, which is more than fits.
        for block in 10_000..20_000 {
            cache.use_block(block);
        }
        assert!(cache.hits(used()) >= 500, "{}", cache.fetched);
    }

    #[test]
    fn what_is_read_repeatedly_during_a_scan_stays_although_it_was_new() {
        let mut cache = Simulated::new(1024);
        for block in 0..10_000 {
            cache.use_block(1_000_000 + block);
            cache.use_block(block % 256);
        }
        assert_eq!(cache.hits(0..256), 256);
    }

    #[test]
    fn what_is_in_use_now_replaces_what_was() {
        let mut cache = Simulated::new(1024);
        for round in 0..20 {
            cache.hits(0..800);
            cache.now += round % 2;
        }
        for _ in 0..20 {
            cache.hits(10_000..10_800);
        }
        assert_eq!(cache.hits(10_000..10_800), 800);
    }

    #[test]
    fn everything_goes_if_everything_must() {
        let mut cache = Simulated::new(64);
        cache.hits(0..50);
        cache.now += 2;
        cache.hits(0..20);
        let mut census = Census::new(cache.now);
        for word in cache.words.values() {
            census.add(*word);
        }
        let mut victims = census.victims(1000, 64);
        assert!(cache.words.values().all(|word| victims.take(*word)) && victims.is_done());
    }
}
