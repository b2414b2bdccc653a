//! Tracking of changes, for jobs that copy a disk.

use isobath_image::violated;
use isobath_sync::{CheckedMutex, Invariants};
use parking_lot::RwLock;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Parts of a disk that changed since they were last taken.
pub struct DirtyMap {
    /// log2 of the bytes in a part.
    bits: u32,
    state: CheckedMutex<Marks>,
}

struct Marks {
    words: Vec<u64>,
    /// Parts marked.
    count: u64,
    /// Where the search for the next one continues.
    hand: usize,
}

/// Words of a map whose marks are counted again when it is checked.
const MOST_CHECKED: usize = 1024;

impl Invariants for Marks {
    fn check_invariants(&self) {
        if self.hand > 0 && self.hand >= self.words.len() {
            violated("the search for a mark goes on in the map");
        }
        let marked =
            |words: &[u64]| words.iter().map(|word| u64::from(word.count_ones())).sum::<u64>();
        let is_small = self.words.len() <= MOST_CHECKED;
        if is_small && self.count != marked(&self.words) {
            violated("the parts that are counted are those that are marked");
        }
        if self.count > self.words.len() as u64 * 64 {
            violated("no more parts are marked than there are");
        }
    }
}

impl DirtyMap {
    /// For a disk of `size` bytes, in parts of `1 << bits` bytes.
    pub fn new(size: u64, bits: u32) -> Self {
        let words = size.div_ceil(1 << bits).div_ceil(64) as usize;
        Self { bits, state: CheckedMutex::new(Marks { words: vec![0; words], count: 0, hand: 0 }) }
    }

    /// Marks every part that a range touches.
    pub fn mark(&self, offset: u64, length: u64) {
        if length == 0 {
            return;
        }
        let (first, last) = (offset >> self.bits, (offset + length - 1) >> self.bits);
        let state = &mut *self.state.lock();
        for part in first..=last {
            if let Some(word) = state.words.get_mut((part / 64) as usize) {
                let bit = 1 << (part % 64);
                state.count += u64::from(*word & bit == 0);
                *word |= bit;
            }
        }
    }

    /// Unmarks the next adjacent marked parts, at most `most` bytes of them, and returns their range.
    pub fn take(&self, most: u64) -> Option<Range<u64>> {
        let state = &mut *self.state.lock();
        if state.count == 0 {
            return None;
        }
        let count = state.words.len();
        let mut words = (0..count).map(|n| (state.hand + n) % count);
        let Some(word) = words.find(|word| state.words[*word] != 0) else {
            violated("a mark that is counted is found");
        };
        state.hand = word;
        let first = word as u64 * 64 + u64::from(state.words[word].trailing_zeros());
        let most = (most >> self.bits).max(1);
        let mut end = first;
        while end < first + most {
            let Some(word) = state.words.get_mut((end / 64) as usize) else { break };
            let bit = 1 << (end % 64);
            if *word & bit == 0 {
                break;
            }
            *word &= !bit;
            state.count -= 1;
            end += 1;
        }
        Some(first << self.bits..end << self.bits)
    }

    /// Bytes of the parts that are marked.
    pub fn bytes(&self) -> u64 {
        self.state.lock().count << self.bits
    }
}

/// The maps in which changes are tracked.
#[derive(Default)]
pub(super) struct Tracked {
    any: AtomicBool,
    maps: RwLock<Vec<Arc<DirtyMap>>>,
}

impl Tracked {
    fn mark(&self, offset: u64, length: u64) {
        if self.any.load(Ordering::Acquire) {
            for map in &*self.maps.read() {
                map.mark(offset, length);
            }
        }
    }

    /// Marks a change when the returned guard is dropped, so that one that fails or is given up, which may have changed
    /// something, is marked too. It must be dropped before the gate is left: a change of the chain relies on that.
    pub(super) fn mark_after(&self, offset: u64, length: u64) -> MarkAfter<'_> {
        MarkAfter { tracked: self, offset, length }
    }

    pub(super) fn add(&self, map: &Arc<DirtyMap>) {
        self.maps.write().push(Arc::clone(map));
        self.any.store(true, Ordering::Release);
    }

    pub(super) fn remove(&self, map: &Arc<DirtyMap>) {
        let mut maps = self.maps.write();
        maps.retain(|other| !Arc::ptr_eq(other, map));
        self.any.store(!maps.is_empty(), Ordering::Release);
    }
}

/// A change that is marked when this is dropped.
#[must_use = "the change is marked when this is dropped"]
pub(super) struct MarkAfter<'a> {
    tracked: &'a Tracked,
    offset: u64,
    length: u64,
}

impl Drop for MarkAfter<'_> {
    fn drop(&mut self) {
        self.tracked.mark(self.offset, self.length);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::must_panic;

    #[test]
    fn marked_parts_are_taken_once_adjacent_ones_together() {
        let map = DirtyMap::new(1 << 30, 16);
        map.mark(100, 1);
        map.mark(65 << 16, 2 << 16);
        map.mark((66 << 16) + 5, 1);
        assert_eq!(map.bytes(), 3 << 16);
        assert_eq!(map.take(1 << 20), Some(0..1 << 16));
        assert_eq!(map.take(1 << 16), Some(65 << 16..66 << 16));
        map.mark(0, 0);
        assert_eq!(map.take(1 << 20), Some(66 << 16..67 << 16));
        assert_eq!(map.take(1 << 20), None);
    }

    /// What is violated, and the change that does it.
    #[cfg(debug_assertions)]
    type Case = (&'static str, fn(&mut Marks));

    #[test]
    #[cfg(debug_assertions)]
    fn marks_that_do_not_fit_together_are_found() {
        let cases: [Case; 4] = [
            ("the search for a mark goes on in the map", |marks| marks.hand = 1),
            ("the parts that are counted are those that are marked", |marks| marks.count = 1),
            ("the parts that are counted are those that are marked", |marks| marks.words[0] = 1),
            ("no more parts are marked than there are", |marks| {
                marks.words = vec![0; MOST_CHECKED + 1];
                marks.count = 1 << 40;
            }),
        ];
        for (what, change) in cases {
            let map = DirtyMap::new(1 << 20, 16);
            must_panic(|| change(&mut map.state.lock()), what);
        }
    }

    #[test]
    fn a_mark_is_not_lost() {
        // Too many words to count the marks whenever it is unlocked.
        let map = DirtyMap::new(1 << 40, 16);
        map.state.lock().count = 1;
        must_panic(|| map.take(1), "a mark that is counted is found");
    }

    #[test]
    fn marks_past_the_end_are_nobodys() {
        let map = DirtyMap::new(1 << 16, 16);
        map.mark(1 << 40, 1);
        assert_eq!((map.bytes(), map.take(1)), (0, None));
    }
}
