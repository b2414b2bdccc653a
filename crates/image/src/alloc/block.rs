//! One refcount block in memory.

use crate::violated;
use isobath_qcow2::{FormatError, HostOffset, RefcountOrder};
use isobath_storage::IoBuf;
use std::collections::BTreeSet;
use std::ops::Range;

/// The most bytes written for one changed refcount.
const PAGE: usize = 4096;
/// The invariant that refcount lookups rely on.
const HAS_ALL: &str = "a refcount is looked up in its own block";

/// A refcount block: its bytes, and which of them the file does not have yet.
pub(super) struct Block {
    pub(super) offset: HostOffset,
    bytes: IoBuf,
    order: RefcountOrder,
    dirty: BTreeSet<usize>,
}

impl Block {
    /// A block with the bytes that the file has.
    pub(super) fn loaded(offset: HostOffset, bytes: IoBuf, order: RefcountOrder) -> Self {
        Self { offset, bytes, order, dirty: BTreeSet::new() }
    }

    /// A block of zeroes that is not in the file yet.
    pub(super) fn fresh(offset: HostOffset, length: usize, order: RefcountOrder) -> Self {
        let dirty = (0..length.div_ceil(PAGE)).collect();
        Self { offset, bytes: IoBuf::zeroed(length), order, dirty }
    }

    /// Moves the block to another offset, where the file does not have it yet; returns its old offset.
    pub(super) fn move_to(&mut self, offset: HostOffset) -> HostOffset {
        self.dirty = (0..self.bytes.len().div_ceil(PAGE)).collect();
        std::mem::replace(&mut self.offset, offset)
    }

    /// The refcount at `index`, which must be in the block.
    pub(super) fn get(&self, index: usize) -> u64 {
        self.order.read(&self.bytes, index).unwrap_or_else(|| violated(HAS_ALL))
    }

    pub(super) fn set(&mut self, index: usize, value: u64) -> Result<(), FormatError> {
        self.order.write(&mut self.bytes, index, value)
    }

    /// Marks the refcount at `index` as not yet written to the file.
    pub(super) fn mark(&mut self, index: usize) {
        self.dirty.insert(self.byte_of(index) / PAGE);
    }

    /// The byte in which the refcount at `index` begins.
    pub(super) fn byte_of(&self, index: usize) -> usize {
        (index << self.order.get()) / 8
    }

    /// The bytes that hold the refcount at `index`, and possibly those of its neighbours.
    pub(super) fn bytes_of(&self, index: usize) -> Range<usize> {
        let start = self.byte_of(index);
        start..start + (1 << self.order.get() >> 3).max(1)
    }

    /// The indexes whose refcounts lie in these bytes.
    pub(super) fn indexes_in(&self, bytes: &Range<usize>) -> Range<usize> {
        let index_of = |byte: usize| (byte * 8) >> self.order.get();
        index_of(bytes.start)..index_of(bytes.end)
    }

    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// A copy of some bytes in which the refcount of each of `less` (an index and a number) is reduced by that number.
    pub(super) fn copy_with_less(
        &self,
        bytes: Range<usize>,
        less: impl Iterator<Item = (usize, u64)>,
    ) -> Result<IoBuf, FormatError> {
        let mut copy = IoBuf::copy_of(&self.bytes[bytes.clone()]);
        let first = self.indexes_in(&bytes).start;
        for (index, less) in less {
            let now = self.order.read(&copy, index - first).unwrap_or_else(|| violated(HAS_ALL));
            let Some(less) = now.checked_sub(less) else {
                violated("a refcount has the references that are not in the file yet");
            };
            self.order.write(&mut copy, index - first, less)?;
        }
        Ok(copy)
    }

    pub(super) fn is_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// The bytes that changed, in whole pages, adjacent ones merged. The block is then clean.
    pub(super) fn take_dirty(&mut self) -> Vec<Range<usize>> {
        let mut runs: Vec<Range<usize>> = Vec::new();
        for page in std::mem::take(&mut self.dirty) {
            let end = ((page + 1) * PAGE).min(self.bytes.len());
            match runs.last_mut() {
                Some(run) if run.end == page * PAGE => run.end = end,
                _ => runs.push(page * PAGE..end),
            }
        }
        runs
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broken::must_panic;

    #[test]
    fn only_changed_pages_are_written() {
        let order = RefcountOrder::BITS_16;
        let offset = HostOffset::new(1 << 20);
        let mut block = Block::loaded(offset, IoBuf::zeroed(65536), order);
        assert!(!block.is_dirty());
        for index in [0, 2047, 2048, 3 * 2048, 32767] {
            block.set(index, 7).unwrap();
            block.mark(index);
        }
        assert_eq!(block.take_dirty(), [0..8192, 12288..16384, 61440..65536]);
        assert!(!block.is_dirty());
        assert_eq!(block.get(3 * 2048), 7);
    }

    #[test]
    fn a_copy_tells_less_at_any_width() {
        for order in 0..=6 {
            let order = RefcountOrder::new(order).unwrap();
            let mut block = Block::fresh(HostOffset::new(1 << 20), 512, order);
            for index in 0..8 {
                block.set(index, 1).unwrap();
            }
            for index in 0..8 {
                let bytes = block.bytes_of(index);
                let indexes = block.indexes_in(&bytes);
                assert!(indexes.contains(&index), "{order:?}");
                let copy = block.copy_with_less(bytes, [(index, 1)].into_iter()).unwrap();
                for (step, other) in indexes.enumerate() {
                    let expected = u64::from(other != index && other < 8);
                    assert_eq!(order.read(&copy, step), Some(expected), "{order:?}");
                }
            }
        }
    }

    #[test]
    fn a_block_has_the_refcounts_that_are_asked_for() {
        let order = RefcountOrder::BITS_16;
        let block = Block::fresh(HostOffset::new(1 << 20), 512, order);
        must_panic(|| block.get(256), "a refcount is looked up in its own block");
        let less = |index| block.copy_with_less(0..512, [(index, 1)].into_iter());
        must_panic(|| less(256), "a refcount is looked up in its own block");
        must_panic(|| less(0), "a refcount has the references that are not in the file yet");
    }
}
