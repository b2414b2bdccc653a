//! Writing VDI, dynamic and static.

use super::piece::Piece;
use super::placed::{TableWriter, write_placed};
use crate::error::{Blame, Result};
use crate::vdi::BLOCK;
use isobath_storage::{IoBuf, Storage};
use std::path::Path;

const SECTOR: u64 = 512;

/// The offset of the block map.
const MAP_AT: u64 = SECTOR;

/// The maximum number of blocks of an image that QEMU opens.
const MOST_BLOCKS: u64 = 0x1fff_ff80;

/// Options of a VDI.
#[derive(Clone, Copy, Debug)]
pub struct VdiOptions {
    /// Whether all blocks are allocated; otherwise only those that are written.
    pub fixed: bool,
    /// The UUIDs of the image and of its contents.
    pub ids: [u128; 2],
}

pub(crate) struct WriteVdi {
    options: VdiOptions,
    /// The disk's size in bytes.
    size: u64,
    map: TableWriter<4>,
    /// The offset of the first block in the file.
    data: u64,
    /// The number of allocated blocks.
    allocated: u32,
    /// The block written last.
    last: Option<u64>,
}

impl WriteVdi {
    pub(crate) fn new(name: &Path, size: u64, options: VdiOptions) -> Result<Self> {
        let blocks = size.div_ceil(BLOCK);
        if blocks > MOST_BLOCKS {
            let reason = format!("a VDI has a disk of at most {} bytes", MOST_BLOCKS * BLOCK);
            return Err(Blame(name).unsupported("disk size", size, reason));
        }
        let data = MAP_AT + (blocks * 4).next_multiple_of(SECTOR);
        let map = TableWriter::new(MAP_AT, [0xff; 4]);
        Ok(Self { options, size, map, data, allocated: 0, last: None })
    }

    /// Allocates `block` at the end of the file.
    async fn allocate<S: Storage>(&mut self, storage: &S, block: u64) -> Result<()> {
        self.map.set(storage, block, self.allocated.to_le_bytes()).await?;
        self.allocated += 1;
        Ok(())
    }

    pub(crate) async fn write<S: Storage>(
        &mut self,
        storage: &S,
        pieces: Vec<Piece>,
    ) -> Result<()> {
        let mut placed = Vec::new();
        for Piece { at, bytes } in pieces {
            let block = at / BLOCK;
            let place = if self.options.fixed {
                block
            } else {
                if self.last != Some(block) {
                    self.allocate(storage, block).await?;
                    self.last = Some(block);
                }
                u64::from(self.allocated) - 1
            };
            placed.push((self.data + place * BLOCK + at % BLOCK, bytes));
        }
        write_placed(storage, placed).await
    }

    fn header(&self) -> Vec<u8> {
        let mut header = vec![0; SECTOR as usize];
        let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
        // For human readers.
        put(0, b"<<< Isobath Virtual Disk Image >>>\n");
        put(64, &0xbeda_107f_u32.to_le_bytes());
        put(68, &0x0001_0001_u32.to_le_bytes());
        // The length of the header from here on, in bytes.
        put(72, &0x180_u32.to_le_bytes());
        let kind: u32 = if self.options.fixed { 2 } else { 1 };
        put(76, &kind.to_le_bytes());
        put(340, &(MAP_AT as u32).to_le_bytes());
        put(344, &(self.data as u32).to_le_bytes());
        put(360, &(SECTOR as u32).to_le_bytes());
        put(368, &self.size.to_le_bytes());
        put(376, &(BLOCK as u32).to_le_bytes());
        put(384, &(self.size.div_ceil(BLOCK) as u32).to_le_bytes());
        put(388, &self.allocated.to_le_bytes());
        put(392, &self.options.ids[0].to_le_bytes());
        put(408, &self.options.ids[1].to_le_bytes());
        header
    }

    pub(crate) async fn finish<S: Storage>(mut self, storage: &S) -> Result<()> {
        let blocks = self.size.div_ceil(BLOCK);
        if self.options.fixed {
            for block in 0..blocks {
                self.allocate(storage, block).await?;
            }
        }
        let header = self.header();
        // The file consists of whole blocks.
        storage.set_len(self.data + u64::from(self.allocated) * BLOCK).await?;
        self.map.finish(storage, blocks).await?;
        storage.flush().await?;
        storage.write_at(0, IoBuf::copy_of(&header)).await?;
        Ok(storage.flush().await?)
    }
}
