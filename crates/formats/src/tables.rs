//! Tables of blocks, which most formats have: entry `n` gives the location of block `n`.

use crate::error::Result;
use crate::files::Files;
use crate::le::{be32, le32, le64};
use isobath_storage::Storage;

/// A table's information on a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Block {
    /// It is not allocated: it reads as zeroes, or, in other programs, from the backing file.
    Absent,
    /// It reads as zeroes.
    Zero,
    /// Its bytes are at this offset in the file.
    At(u64),
    /// Its compressed bytes are at this offset in the file.
    Deflated(u64),
}

/// The encoding of entries.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Entries {
    Le32,
    Be32,
    Le64,
}

impl Entries {
    pub(crate) const fn size(self) -> u64 {
        match self {
            Self::Le32 | Self::Be32 => 4,
            Self::Le64 => 8,
        }
    }
}

/// A table in a file. Its offset is a multiple of the entry size.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Table {
    pub(crate) file: usize,
    pub(crate) offset: u64,
    pub(crate) entries: Entries,
    /// The size of a block in guest bytes.
    pub(crate) block: u64,
}

impl Table {
    fn value(&self, page: &[u8], within: usize) -> u64 {
        match self.entries {
            Entries::Le32 => le32(page, within).into(),
            Entries::Be32 => be32(page, within).into(),
            Entries::Le64 => le64(page, within),
        }
    }

    /// Block `first`, and the number of blocks, 1 to `limit`, that form a contiguous run beginning with it.
    pub(crate) async fn run<S: Storage>(
        &self,
        files: &Files<S>,
        first: u64,
        limit: u64,
        decode: impl Fn(u64, u64) -> Result<Block>,
    ) -> Result<(Block, u64)> {
        let size = self.entries.size();
        let (page, within) = files.page(self.file, self.offset + first * size).await?;
        let block = decode(first, self.value(&page, within))?;
        let here = ((page.len() - within) as u64 / size).min(limit);
        let mut count = 1;
        while count < here {
            let value = self.value(&page, within + (count * size) as usize);
            let expected = match block {
                Block::Absent | Block::Zero => block,
                Block::At(offset) => Block::At(offset + count * self.block),
                Block::Deflated(_) => break,
            };
            // An invalid entry is reported when its own block is looked up.
            if decode(first + count, value).ok() != Some(expected) {
                break;
            }
            count += 1;
        }
        Ok((block, count))
    }
}
