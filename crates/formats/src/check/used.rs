//! Ranges of a file that are in use.

use std::collections::BTreeMap;

/// The most ranges that are kept, so that an image does not take all memory: a few hundred MiB.
const MOST: usize = 4 << 20;

/// Numbers that are in use, as ranges that do not touch: a file's clusters, of which most follow each other.
#[derive(Default)]
pub(super) struct Used {
    /// Starts and ends.
    ranges: BTreeMap<u64, u64>,
}

impl Used {
    /// Takes `count` numbers from `first` on. Returns how many were already in use; `None` if there are too many ranges
    /// to go on.
    pub(super) fn take(&mut self, first: u64, count: u64) -> Option<u64> {
        if self.ranges.len() > MOST {
            return None;
        }
        let end = first.saturating_add(count);
        let (mut start, mut stop, mut twice) = (first, end, 0);
        // Those that overlap or touch become one.
        while let Some((&from, &to)) = self.ranges.range(..=end).next_back() {
            if to < first {
                break;
            }
            twice += to.min(end).saturating_sub(from.max(first));
            (start, stop) = (start.min(from), stop.max(to));
            self.ranges.remove(&from);
        }
        self.ranges.insert(start, stop);
        Some(twice)
    }

    /// How many numbers from `first` to below `end` are not in use.
    pub(super) fn free(&self, first: u64, end: u64) -> u64 {
        let used =
            self.ranges.iter().map(|(from, to)| to.min(&end).saturating_sub(*from.max(&first)));
        end.saturating_sub(first) - used.sum::<u64>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::rngs::SmallRng;
    use rand::{RngExt as _, SeedableRng as _};

    #[test]
    fn ranges_are_as_if_each_number_was_noted() {
        let mut rng = SmallRng::seed_from_u64(7);
        for _ in 0..200 {
            let (mut used, mut model) = (Used::default(), [false; 100]);
            for _ in 0..40 {
                let first = rng.random_range(0..90);
                let count = rng.random_range(1..10);
                let range = &mut model[first..first + count];
                let twice = range.iter().filter(|used| **used).count() as u64;
                range.fill(true);
                assert_eq!(used.take(first as u64, count as u64), Some(twice));
                let (from, to) = (rng.random_range(0..50), rng.random_range(50..100));
                let free = model[from..to].iter().filter(|used| !**used).count() as u64;
                assert_eq!(used.free(from as u64, to as u64), free);
            }
        }
    }
}
