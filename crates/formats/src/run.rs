//! Ranges of a disk, and where they are stored.

use crate::tables::Block;

/// A range of the disk, and where it is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Its length in guest bytes, at least 1.
    pub length: u64,
    /// Its contents.
    pub kind: RunKind,
}

/// The contents of a range of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunKind {
    /// Zeroes, since the range is not allocated.
    Absent,
    /// Zeroes, marked as such.
    Zero,
    /// Bytes in a file.
    Data {
        /// The file.
        file: usize,
        /// Bytes from its start.
        offset: u64,
    },
    /// A part of a compressed block.
    Deflated {
        /// The file.
        file: usize,
        /// Offset of the compressed block in bytes.
        offset: u64,
        /// Offset of the range in the decompressed block, in bytes.
        within: u64,
    },
}

impl Run {
    pub(crate) const fn zero(length: u64) -> Self {
        Self { length, kind: RunKind::Zero }
    }

    pub(crate) const fn data(file: usize, offset: u64, length: u64) -> Self {
        Self { length, kind: RunKind::Data { file, offset } }
    }

    /// The run from guest byte `at` to the end of `count` blocks of `size` bytes, the first of which contains `at`.
    pub(crate) fn of_blocks(
        file: usize,
        block: Block,
        count: u64,
        size: u64,
        at: u64,
        length: u64,
    ) -> Self {
        let within = at % size;
        let length = length.min(count.saturating_mul(size) - within);
        match block {
            Block::Absent => Self { length, kind: RunKind::Absent },
            Block::Zero => Self::zero(length),
            Block::At(offset) => Self::data(file, offset + within, length),
            Block::Deflated(offset) => {
                Self { length, kind: RunKind::Deflated { file, offset, within } }
            }
        }
    }
}
