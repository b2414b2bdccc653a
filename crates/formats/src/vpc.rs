//! VHD, the disk of Virtual PC and Hyper-V, which QEMU calls "vpc": fixed and dynamic. Its numbers are big-endian.

use crate::error::{Blame, Result};
use crate::files::{File, Files};
use crate::le::{be16, be32, be64};
use crate::run::Run;
use crate::tables::{Block, Entries, Table};
use isobath_storage::Storage;

/// Bytes in a footer.
const FOOTER: usize = 512;

/// The number of sectors of the largest geometry, which all images of at least that size have.
pub(crate) const MAX_GEOMETRY: u64 = 65535 * 16 * 255;

/// The maximum number of sectors of a VHD, 2040 GiB, the same as QEMU's.
pub(crate) const MAX_SECTORS: u64 = 0xff00_0000;

/// Programs whose images have the size given in the footer; those of others have the size of the geometry.
const EXACT: [&[u8]; 6] = [b"win ", b"qem2", b"d2v ", b"CTXS", b"tap\0", b"wa\0\0"];

pub(crate) enum Vpc {
    Fixed,
    Dynamic { table: Table, block: u64, bitmap: u64, end: u64 },
}

/// Reads the footer and the header. Returns the tables and the disk's size in bytes.
pub(crate) async fn open<S: Storage>(file: &File<S>) -> Result<(Vpc, u64)> {
    let blame = file.blame();
    let start = file.header("VHD footer", 0, FOOTER).await?;
    let in_front = start.starts_with(b"conectix");
    let footer = if in_front {
        start
    } else {
        file.header("VHD footer", file.length - FOOTER as u64, FOOTER).await?
    };
    if !footer.starts_with(b"conectix") {
        let value = format!("'{}'", footer[..8].escape_ascii());
        return Err(blame.invalid("footer cookie", value, "this is not a VHD image"));
    }
    verify(blame, "footer checksum", &footer, 64)?;
    let kind = be32(&footer, 60);
    let chs = u64::from(be16(&footer, 56)) * u64::from(footer[58]) * u64::from(footer[59]);
    let current = be64(&footer, 48);
    let exact = EXACT.contains(&&footer[28..32]) || chs == MAX_GEOMETRY;
    let sectors = if exact { current / 512 } else { chs };
    if sectors > MAX_SECTORS {
        return Err(blame.invalid("current size", current, "a VHD image has at most 2040 GiB"));
    }
    let size = sectors * 512;
    match kind {
        2 => {
            // A fixed image is the disk, followed by the footer.
            file.must_hold("current size", size, FOOTER as u64)?;
            Ok((Vpc::Fixed, size))
        }
        3 if in_front => dynamic(file, &footer, size).await,
        4 => Err(blame.unsupported(
            "disk type",
            kind,
            "differencing images are not supported; merge it into its parent first",
        )),
        _ => {
            let reason = if kind == 3 {
                "a dynamic image has a copy of the footer at its start, which is missing"
            } else {
                "only fixed (2) and dynamic (3) images are supported"
            };
            Err(blame.unsupported("disk type", kind, reason))
        }
    }
}

/// The checksum of a structure with its checksum field at `at`: the complement of the sum of all other bytes.
pub(crate) fn checksum(bytes: &[u8], at: usize) -> u32 {
    let sum = |bytes: &[u8]| bytes.iter().fold(0u32, |sum, byte| sum.wrapping_add((*byte).into()));
    !sum(bytes).wrapping_sub(sum(&bytes[at..at + 4]))
}

/// Verifies the checksum at `at`.
fn verify(blame: Blame, field: &str, bytes: &[u8], at: usize) -> Result<()> {
    let expected = checksum(bytes, at);
    let found = be32(bytes, at);
    if found != expected {
        let reason = format!("it should be {expected:#x}; the image is damaged");
        return Err(blame.invalid(field, format!("{found:#x}"), reason));
    }
    Ok(())
}

async fn dynamic<S: Storage>(file: &File<S>, footer: &[u8], size: u64) -> Result<(Vpc, u64)> {
    let blame = file.blame();
    let header = file.header("data offset", be64(footer, 16), 1024).await?;
    if !header.starts_with(b"cxsparse") {
        let value = format!("'{}'", header[..8].escape_ascii());
        return Err(blame.invalid("dynamic header cookie", value, "it should be 'cxsparse'"));
    }
    verify(blame, "dynamic header checksum", &header, 36)?;
    let block = u64::from(be32(&header, 32));
    if !block.is_power_of_two() || block < 512 {
        let reason = "it must be a power of two of at least 512";
        return Err(blame.invalid("block size", block, reason));
    }
    let entries = u64::from(be32(&header, 28));
    if entries * block < size {
        let reason = format!("a disk of {size} bytes needs more");
        return Err(blame.invalid("number of table entries", entries, reason));
    }
    let offset = be64(&header, 16);
    if !offset.is_multiple_of(512) {
        return Err(blame.invalid("table offset", offset, "it must be a multiple of 512"));
    }
    file.must_hold("table offset", offset, entries * 4)?;
    // One bit for each sector, in whole sectors.
    let bitmap = block.div_ceil(8 * 512).next_multiple_of(512);
    let table = Table { file: 0, offset, entries: Entries::Be32, block };
    Ok((Vpc::Dynamic { table, block, bitmap, end: file.length }, size))
}

impl Vpc {
    /// Bytes in a block of a dynamic image.
    pub(crate) const fn block(&self) -> Option<u64> {
        match self {
            Self::Fixed => None,
            Self::Dynamic { block, .. } => Some(*block),
        }
    }

    pub(crate) async fn run<S: Storage>(
        &self,
        files: &Files<S>,
        at: u64,
        length: u64,
    ) -> Result<Run> {
        let Self::Dynamic { table, block: size, bitmap, end } = *self else {
            return Ok(Run::data(0, at, length));
        };
        let file = files.file(0)?;
        let limit = (at % size + length).div_ceil(size);
        let decode = |index: u64, entry: u64| {
            if entry == 0xffff_ffff {
                return Ok(Block::Zero);
            }
            let offset = entry * 512 + bitmap;
            if offset >= end {
                return Err(file.past_end(&format!("block table entry {index}"), offset));
            }
            Ok(Block::At(offset))
        };
        let (block, count) = table.run(files, at / size, limit, decode).await?;
        Ok(Run::of_blocks(0, block, count, size, at, length))
    }
}
