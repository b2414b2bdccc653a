//! One refcount block in memory.

use isobath_qcow2::{FormatError, HostOffset, RefcountOrder};
use isobath_storage::IoBuf;
use std::collections::BTreeSet;
use std::ops::Range;

/// The most that is written for one changed refcount.
const PAGE: usize = 4096;

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

    /// A block of zeroes that the file does not have.
    pub(super) fn fresh(offset: HostOffset, length: usize, order: RefcountOrder) -> Self {
        let dirty = (0..length.div_ceil(PAGE)).collect();
        Self { offset, bytes: IoBuf::zeroed(length), order, dirty }
    }

    /// Puts the block elsewhere in the file, which does not have it there yet; returns where it was.
    pub(super) fn move_to(&mut self, offset: HostOffset) -> HostOffset {
        self.dirty = (0..self.bytes.len().div_ceil(PAGE)).collect();
        std::mem::replace(&mut self.offset, offset)
    }

    /// The refcount at `index`; 0 past the end.
    pub(super) fn get(&self, index: usize) -> u64 {
        self.order.read(&self.bytes, index).unwrap_or(0)
    }

    pub(super) fn set(&mut self, index: usize, value: u64) -> Result<(), FormatError> {
        self.order.write(&mut self.bytes, index, value)?;
        let byte = (index << self.order.get()) / 8;
        self.dirty.insert(byte / PAGE);
        Ok(())
    }

    pub(super) fn is_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// Copies of the changed parts with their byte offsets in the file, adjacent ones joined. The
    /// block then counts as clean.
    pub(super) fn take_dirty(&mut self) -> Vec<(u64, IoBuf)> {
        let mut runs: Vec<Range<usize>> = Vec::new();
        for page in std::mem::take(&mut self.dirty) {
            let end = ((page + 1) * PAGE).min(self.bytes.len());
            match runs.last_mut() {
                Some(run) if run.end == page * PAGE => run.end = end,
                _ => runs.push(page * PAGE..end),
            }
        }
        runs.into_iter()
            .map(|run| (self.offset.get() + run.start as u64, IoBuf::copy_of(&self.bytes[run])))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_changed_pages_are_written() {
        let order = RefcountOrder::BITS_16;
        let offset = HostOffset::new(1 << 20);
        let mut block = Block::loaded(offset, IoBuf::zeroed(65536), order);
        assert!(!block.is_dirty());
        for index in [0, 2047, 2048, 3 * 2048, 32767] {
            block.set(index, 7).unwrap();
        }
        let parts: Vec<_> =
            block.take_dirty().iter().map(|(at, b)| (at - (1 << 20), b.len())).collect();
        assert_eq!(parts, [(0, 8192), (12288, 4096), (61440, 4096)]);
        assert!(!block.is_dirty());
        assert_eq!(block.get(3 * 2048), 7);
    }
}
