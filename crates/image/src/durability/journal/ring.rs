//! The area's blocks: where the next record goes, and which records are still needed.

use crate::violated;
use isobath_qcow2::Lsn;
use std::collections::VecDeque;

/// Blocks in use, oldest record first. Records are runs of whole blocks, placed one after the other, and again from the
/// start when the area ends.
pub(super) struct Ring {
    blocks: u64,
    /// Where the next record would go.
    head: u64,
    records: VecDeque<Slot>,
}

struct Slot {
    lsn: Lsn,
    start: u64,
    count: u64,
}

impl Ring {
    pub(super) fn new(blocks: u64) -> Self {
        Self { blocks, head: 0, records: VecDeque::new() }
    }

    pub(super) fn blocks(&self) -> u64 {
        self.blocks
    }

    /// The first of `count` adjacent free blocks.
    pub(super) fn room(&self, count: u64) -> Option<u64> {
        let Some(oldest) = self.records.front().map(|slot| slot.start) else {
            let start = if self.head + count <= self.blocks { self.head } else { 0 };
            return (count <= self.blocks).then_some(start);
        };
        if self.head > oldest {
            if self.head + count <= self.blocks {
                return Some(self.head);
            }
            return (count <= oldest).then_some(0);
        }
        (self.head + count <= oldest).then_some(self.head)
    }

    /// Checks that a record may be written there.
    pub(super) fn check(&self, lsn: Lsn, start: u64, count: u64) {
        if self.records.back().is_some_and(|newest| newest.lsn >= lsn) {
            violated("records have growing LSNs");
        }
        if start + count > self.blocks {
            violated("a record lies in the journal's area");
        }
        let overlaps = |slot: &Slot| slot.start < start + count && start < slot.start + slot.count;
        if self.records.iter().any(overlaps) {
            violated("a record that a recovery may need is not written over");
        }
    }

    /// Takes the blocks of a record, which [`room`](Self::room) has found, and which [`check`](Self::check) has passed.
    pub(super) fn take(&mut self, lsn: Lsn, start: u64, count: u64) {
        self.records.push_back(Slot { lsn, start, count });
        self.head = start + count;
    }

    /// Frees the blocks of records before `lsn`.
    pub(super) fn release(&mut self, lsn: Lsn) {
        while self.records.front().is_some_and(|slot| slot.lsn < lsn) {
            self.records.pop_front();
        }
    }

    /// Blocks that are not free, including those skipped because a record did not fit.
    pub(super) fn used(&self) -> u64 {
        match (self.records.front(), self.records.back()) {
            (Some(oldest), Some(newest)) if newest.start >= oldest.start => {
                newest.start + newest.count - oldest.start
            }
            (Some(oldest), Some(newest)) => {
                self.blocks - oldest.start + newest.start + newest.count
            }
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn records_never_overlap_and_space_comes_back() {
        for blocks in [4, 7, 16, 1024] {
            let mut ring = Ring::new(blocks);
            let mut live: BTreeMap<u64, std::ops::Range<u64>> = BTreeMap::new();
            let mut oldest = 1;
            let mut state = 12345_u64;
            for lsn in 1..5000 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let count = 1 + (state >> 33) % (blocks / 2);
                let start = loop {
                    if let Some(start) = ring.room(count) {
                        break start;
                    }
                    assert!(!live.is_empty(), "an empty area has room");
                    oldest += 1;
                    ring.release(Lsn::new(oldest));
                    live.retain(|lsn, _| *lsn >= oldest);
                };
                let taken = start..start + count;
                assert!(taken.end <= blocks);
                for other in live.values() {
                    assert!(taken.end <= other.start || other.end <= taken.start);
                }
                ring.check(Lsn::new(lsn), start, count);
                ring.take(Lsn::new(lsn), start, count);
                live.insert(lsn, taken);
                let held: u64 = live.values().map(|range| range.end - range.start).sum();
                assert!(ring.used() >= held && ring.used() <= blocks);
            }
        }
    }

    fn two() -> Ring {
        let mut ring = Ring::new(8);
        ring.take(Lsn::new(1), 0, 3);
        ring.take(Lsn::new(2), 3, 3);
        ring
    }

    #[test]
    #[should_panic(expected = "records have growing LSNs")]
    fn a_record_is_newer_than_all_others() {
        two().check(Lsn::new(2), 6, 1);
    }

    #[test]
    #[should_panic(expected = "a record lies in the journal's area")]
    fn no_record_ends_past_the_area() {
        two().check(Lsn::new(3), 6, 3);
    }

    #[test]
    #[should_panic(expected = "a record that a recovery may need is not written over")]
    fn no_record_lies_over_one_that_may_be_needed() {
        two().check(Lsn::new(3), 5, 1);
    }
}
