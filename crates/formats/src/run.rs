//! Ranges of a disk, and where they are.

use crate::tables::Block;

/// Where a range of the disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Guest bytes that it covers, at least 1.
    pub length: u64,
    /// What they are.
    pub kind: RunKind,
}

/// What a range of the disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunKind {
    /// Zeroes, because the image has nothing there.
    Absent,
    /// Zeroes.
    Zero,
    /// Bytes of a file of the image, numbered from 0 (the image itself).
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
        /// Bytes from its start to the compressed block.
        offset: u64,
        /// Bytes of the decompressed block before the range.
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

    /// The run from guest byte `at` on in `count` blocks of `size` bytes, the first of which contains `at`.
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
