//! VDI, the disk of `VirtualBox`, dynamic and static.

use crate::error::Result;
use crate::files::{File, Files};
use crate::le::{le32, le64};
use crate::run::Run;
use crate::tables::{Block, Entries, Table};
use isobath_storage::Storage;

/// The size of a block in bytes, the only one that `VirtualBox` writes and QEMU reads.
pub(crate) const BLOCK: u64 = 1 << 20;

/// Entries from here on are special: not allocated (all ones) or zero (one less).
pub(crate) const FIRST_SPECIAL: u64 = 0xffff_fffe;

/// The maximum number of blocks that QEMU accepts.
const MAX_BLOCKS: u32 = 0x3fff_ff80;

pub(crate) struct Vdi {
    pub(crate) table: Table,
    pub(crate) data: u64,
    /// Blocks of the disk.
    pub(crate) blocks: u64,
    /// How many of them the header says to be allocated.
    pub(crate) allocated: u64,
}

/// Reads the header. Returns the tables and the disk's size in bytes.
pub(crate) async fn open<S: Storage>(file: &File<S>) -> Result<(Vdi, u64)> {
    let header = file.header("VDI header", 0, 512).await?;
    let blame = file.blame();
    let field = |at| le32(&header, at);
    if field(64) != 0xbeda_107f {
        let value = format!("{:#x}", field(64));
        return Err(blame.invalid("signature", value, "this is not a VDI image"));
    }
    if field(68) != 0x0001_0001 {
        let value = format!("{}.{}", field(68) >> 16, field(68) & 0xffff);
        return Err(blame.unsupported("version", value, "only version 1.1 is supported"));
    }
    if !matches!(field(76), 1 | 2) {
        let reason = "only dynamic (1) and static (2) images are supported; merge a differencing \
                      image into its parent with VirtualBox first";
        return Err(blame.unsupported("image type", field(76), reason));
    }
    let parents = [("link UUID", 424), ("parent UUID", 440)];
    for (name, at) in parents {
        if header[at..at + 16].iter().any(|byte| *byte != 0) {
            let reason = "it needs another image; merge it with VirtualBox first";
            let value = format!(
                "{:#034x}",
                u128::from(le64(&header, at)) << 64 | u128::from(le64(&header, at + 8))
            );
            return Err(blame.unsupported(name, value, reason));
        }
    }
    if field(360) != 512 {
        return Err(blame.unsupported("sector size", field(360), "only 512 is supported"));
    }
    if u64::from(field(376)) != BLOCK {
        return Err(blame.unsupported("block size", field(376), "only 1 MiB is supported"));
    }
    if field(380) != 0 {
        let reason = "extra bytes in blocks are not supported";
        return Err(blame.unsupported("block extra size", field(380), reason));
    }
    let (map, data) = (u64::from(field(340)), u64::from(field(344)));
    for (name, at) in [("block map offset", map), ("data offset", data)] {
        if !at.is_multiple_of(512) {
            return Err(blame.invalid(name, at, "it must be a multiple of 512"));
        }
    }
    let blocks = field(384);
    if blocks > MAX_BLOCKS {
        return Err(blame.invalid(
            "number of blocks",
            blocks,
            format!("the limit is {MAX_BLOCKS}"),
        ));
    }
    let size = le64(&header, 368);
    if size > u64::from(blocks) * BLOCK {
        let reason = format!("its {blocks} blocks hold less");
        return Err(blame.invalid("disk size", size, reason));
    }
    file.must_hold("block map offset", map, u64::from(blocks) * 4)?;
    let table = Table { file: 0, offset: map, entries: Entries::Le32, block: BLOCK };
    let (blocks, allocated) = (blocks.into(), field(388).into());
    Ok((Vdi { table, data, blocks, allocated }, size.next_multiple_of(512)))
}

impl Vdi {
    pub(crate) async fn run<S: Storage>(
        &self,
        files: &Files<S>,
        at: u64,
        length: u64,
    ) -> Result<Run> {
        let file = files.file(0)?;
        let limit = (at % BLOCK + length).div_ceil(BLOCK);
        let decode = |index: u64, entry: u64| {
            if entry >= FIRST_SPECIAL {
                return Ok(Block::Zero);
            }
            let offset = self.data + entry * BLOCK;
            if offset >= file.length {
                return Err(file.past_end(&format!("block map entry {index}"), offset));
            }
            Ok(Block::At(offset))
        };
        let (block, count) = self.table.run(files, at / BLOCK, limit, decode).await?;
        Ok(Run::of_blocks(0, block, count, BLOCK, at, length))
    }
}
