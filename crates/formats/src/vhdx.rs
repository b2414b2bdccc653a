//! VHDX, Hyper-V's disk, dynamic and fixed, as specified in \[MS-VHDX\].

use crate::error::{Blame, Result};
use crate::files::{File, Files};
use crate::le::{le16, le32, le64};
use crate::run::Run;
use crate::tables::{Block, Entries, Table};
use isobath_storage::{IoBuf, Storage};

pub(crate) const KIB: u64 = 1 << 10;
pub(crate) const MIB: u64 = 1 << 20;

/// Offsets of the two copies of the header (2.2.2).
pub(crate) const HEADERS: [u64; 2] = [64 * KIB, 128 * KIB];

/// Offsets of the two copies of the region table (2.2.3).
pub(crate) const REGION_TABLES: [u64; 2] = [192 * KIB, 256 * KIB];

/// The largest disk, 64 TiB.
pub(crate) const MAX_SIZE: u64 = 64 << 40;

/// The maximum number of entries in the metadata table and in the region table.
const MAX_ENTRIES: u64 = 2047;

/// The largest log that is examined.
const MAX_LOG: u64 = 1 << 30;

/// The number of sectors that a sector bitmap covers (2.5.1.2).
pub(crate) const BITMAP_SECTORS: u64 = 1 << 23;

pub(crate) type Guid = [u8; 16];

/// A GUID as stored: the first three fields are little-endian.
const fn guid(first: u32, second: u16, third: u16, rest: u64) -> Guid {
    let (a, b, c, d) =
        (first.to_le_bytes(), second.to_le_bytes(), third.to_le_bytes(), rest.to_be_bytes());
    [a[0], a[1], a[2], a[3], b[0], b[1], c[0], c[1], d[0], d[1], d[2], d[3], d[4], d[5], d[6], d[7]]
}

pub(crate) const BAT: Guid = guid(0x2DC2_7766, 0xF623, 0x4200, 0x9D64_115E_9BFD_4A08);
pub(crate) const METADATA: Guid = guid(0x8B7C_A206, 0x4790, 0x4B9A, 0xB8FE_575F_050F_886E);
pub(crate) const FILE_PARAMETERS: Guid = guid(0xCAA1_6737, 0xFA36, 0x4D43, 0xB3B6_33F0_AA44_E76B);
pub(crate) const DISK_SIZE: Guid = guid(0x2FA5_4224, 0xCD1B, 0x4876, 0xB211_5DBE_D83B_F4B8);
pub(crate) const DISK_ID: Guid = guid(0xBECA_12AB, 0xB2E6, 0x4523, 0x93EF_C309_E000_C746);
pub(crate) const LOGICAL_SECTOR: Guid = guid(0x8141_BF1D, 0xA96F, 0x4709, 0xBA47_F233_A8FA_AB5F);
pub(crate) const PHYSICAL_SECTOR: Guid = guid(0xCDA3_48C7, 0x445D, 0x4471, 0x9CC9_E988_5251_C556);

pub(crate) struct Vhdx {
    pub(crate) table: Table,
    block: u64,
    /// The number of blocks in a chunk: the entry of a bitmap follows the entries of this many blocks.
    pub(crate) chunk: u64,
    /// The number of entries of the table.
    pub(crate) entries: u64,
    /// What is not a block: the regions in the region table, and the log.
    pub(crate) regions: Vec<Region>,
}

/// Reads headers, region table and metadata. Returns the tables and the disk's size in bytes.
pub(crate) async fn open<S: Storage>(file: &File<S>) -> Result<(Vhdx, u64)> {
    let blame = file.blame();
    let identifier = file.header("file type identifier", 0, 8).await?;
    if !identifier.starts_with(b"vhdxfile") {
        let value = format!("'{}'", identifier.escape_ascii());
        return Err(blame.invalid("file type identifier", value, "this is not a VHDX image"));
    }
    let header = current_header(file).await?;
    refuse_log(file, &header).await?;
    let Regions { bat, metadata, mut all } = regions(file).await?;
    let log = (le64(&header, 72), u64::from(le32(&header, 68)));
    all.extend((log.1 > 0).then_some(log));
    let parameters = Parameters::read(file, metadata).await?;
    let Parameters { block, size, sector } = parameters;
    let chunk = BITMAP_SECTORS * sector / block;
    let blocks = size.div_ceil(block);
    // The last chunk needs no entry for its bitmap.
    let entries = blocks + blocks.saturating_sub(1) / chunk;
    if entries * 8 > bat.1 {
        let reason = format!("{entries} entries of 8 bytes need more");
        return Err(blame.invalid("length of the BAT region", bat.1, reason));
    }
    file.must_hold("offset of the BAT region", bat.0, entries * 8)?;
    let table = Table { file: 0, offset: bat.0, entries: Entries::Le64, block };
    Ok((Vhdx { table, block, chunk, entries, regions: all }, size))
}

/// Whether the checksum at byte 4 is right; it covers the whole structure, with itself as zero.
fn is_sound(bytes: &[u8]) -> bool {
    bytes.len() >= 8 && checksum(bytes) == le32(bytes, 4)
}

/// The checksum of a structure; its field at byte 4 counts as zero.
pub(crate) fn checksum(bytes: &[u8]) -> u32 {
    let head = crc32c::crc32c(bytes.get(..4).unwrap_or_default());
    let hole = crc32c::crc32c_append(head, &[0; 4]);
    crc32c::crc32c_append(hole, bytes.get(8..).unwrap_or_default())
}

/// The valid header with the greater sequence number.
async fn current_header<S: Storage>(file: &File<S>) -> Result<IoBuf> {
    let mut current: Option<IoBuf> = None;
    for at in HEADERS {
        let header = file.header("header", at, 4096).await?;
        if !header.starts_with(b"head") || !is_sound(&header) {
            continue;
        }
        if current.as_ref().is_none_or(|other| le64(other, 8) < le64(&header, 8)) {
            current = Some(header);
        }
    }
    let blame = file.blame();
    let Some(header) = current else {
        let reason = "neither copy has the right signature and checksum; the image is damaged";
        return Err(blame.invalid("header", "not valid", reason));
    };
    if le16(&header, 66) != 1 {
        return Err(blame.unsupported("version", le16(&header, 66), "only version 1 is supported"));
    }
    Ok(header)
}

/// Refuses an image whose log may contain changes, which would be ignored.
async fn refuse_log<S: Storage>(file: &File<S>, header: &[u8]) -> Result<()> {
    let id = &header[48..64];
    let (length, offset) = (u64::from(le32(header, 68)), le64(header, 72));
    if id.iter().all(|byte| *byte == 0) || length == 0 {
        return Ok(());
    }
    let blame = file.blame();
    if length > MAX_LOG {
        return Err(blame.unsupported("log length", length, format!("the limit is {MAX_LOG}")));
    }
    file.must_hold("log offset", offset, length)?;
    let mut at = offset;
    while at < offset + length {
        let window = MIB.min(offset + length - at);
        let bytes = file.storage.read_at(at, IoBuf::zeroed(window as usize)).await?;
        for (n, sector) in bytes.chunks(4096).enumerate() {
            // An entry with the log's GUID (2.3.1.1).
            if sector.starts_with(b"loge") && sector.get(32..48) == Some(id) {
                let place = format!("an entry at {}", at + n as u64 * 4096);
                let reason = "it holds changes that are not in place yet, because the image was \
                              not closed; QEMU's own 'qemu-img check -r all' applies them";
                return Err(blame.unsupported("log", place, reason));
            }
        }
        at += window;
    }
    Ok(())
}

/// Offset and length of a region.
pub(crate) type Region = (u64, u64);

/// The regions in the region table.
struct Regions {
    bat: Region,
    metadata: Region,
    all: Vec<Region>,
}

async fn regions<S: Storage>(file: &File<S>) -> Result<Regions> {
    let blame = file.blame();
    let mut found = None;
    for at in REGION_TABLES {
        let table = file.header("region table", at, 64 << 10).await?;
        if table.starts_with(b"regi") && is_sound(&table) {
            found = Some(table);
            break;
        }
    }
    let Some(table) = found else {
        let reason = "neither copy has the right signature and checksum; the image is damaged";
        return Err(blame.invalid("region table", "not valid", reason));
    };
    let count = u64::from(le32(&table, 8));
    if count > MAX_ENTRIES {
        let reason = format!("the limit is {MAX_ENTRIES}");
        return Err(blame.invalid("number of regions", count, reason));
    }
    let (mut bat, mut metadata) = (None, None);
    let mut all = Vec::new();
    for entry in table[16..].chunks(32).take(count as usize) {
        let region = (le64(entry, 16), u64::from(le32(entry, 24)));
        all.push(region);
        let slot = match &entry[..16] {
            id if *id == BAT => &mut bat,
            id if *id == METADATA => &mut metadata,
            id if le32(entry, 28) & 1 == 1 => {
                let reason = "it is a required region of an unknown kind";
                return Err(blame.unsupported("region", shown(id), reason));
            }
            _ => continue,
        };
        if slot.replace(region).is_some() {
            return Err(blame.invalid("region", shown(&entry[..16]), "it is listed twice"));
        }
        if !region.0.is_multiple_of(MIB) || region.0 < MIB {
            let reason = "it must be a multiple of 1 MiB, and not 0";
            return Err(blame.invalid("offset of a region", region.0, reason));
        }
        file.must_hold("offset of a region", region.0, 1)?;
    }
    let missing = |name: &str| {
        blame.invalid("region table", "incomplete", format!("it has no {name} region"))
    };
    let bat = bat.ok_or_else(|| missing("BAT"))?;
    let metadata = metadata.ok_or_else(|| missing("metadata"))?;
    Ok(Regions { bat, metadata, all })
}

fn shown(id: &[u8]) -> String {
    let (a, b, c) = (le32(id, 0), le16(id, 4), le16(id, 6));
    let rest = crate::le::be64(id, 8);
    format!("{a:08X}-{b:04X}-{c:04X}-{rest:016X}")
}

/// The parsed metadata (2.6.2).
struct Parameters {
    block: u64,
    size: u64,
    sector: u64,
}

impl Parameters {
    async fn read<S: Storage>(file: &File<S>, region: Region) -> Result<Self> {
        let blame = file.blame();
        let table = file.header("metadata table", region.0, 64 << 10).await?;
        if !table.starts_with(b"metadata") {
            let value = format!("'{}'", table[..8].escape_ascii());
            return Err(blame.invalid(
                "metadata table signature",
                value,
                "it should be 'metadata'",
            ));
        }
        let count = u64::from(le16(&table, 10));
        if count > MAX_ENTRIES {
            let reason = format!("the limit is {MAX_ENTRIES}");
            return Err(blame.invalid("number of metadata items", count, reason));
        }
        let (mut parameters, mut size, mut sector) = (None, None, None);
        for entry in table[32..].chunks(32).take(count as usize) {
            let id = &entry[..16];
            let slot = match id {
                id if *id == FILE_PARAMETERS => &mut parameters,
                id if *id == DISK_SIZE => &mut size,
                id if *id == LOGICAL_SECTOR => &mut sector,
                id if *id == DISK_ID || *id == PHYSICAL_SECTOR => continue,
                // User metadata, or an item that is not required.
                _ if le32(entry, 24) & 4 == 0 => continue,
                _ => {
                    let reason = "it is a required item of an unknown kind; images with a parent are \
                                  not supported";
                    return Err(blame.unsupported("metadata item", shown(id), reason));
                }
            };
            let at = region.0 + u64::from(le32(entry, 16));
            let value = file.header("offset of a metadata item", at, 8).await?;
            if slot.replace(value).is_some() {
                return Err(blame.invalid("metadata item", shown(id), "it is listed twice"));
            }
        }
        let missing =
            |name: &str| blame.invalid("metadata table", "incomplete", format!("it has no {name}"));
        let parameters = parameters.ok_or_else(|| missing("file parameters"))?;
        let size = le64(&size.ok_or_else(|| missing("virtual disk size"))?, 0);
        let sector = le32(&sector.ok_or_else(|| missing("logical sector size"))?, 0);
        if le32(&parameters, 4) & 2 != 0 {
            let reason = "differencing images are not supported; merge it into its parent first";
            return Err(blame.unsupported("HasParent", 1, reason));
        }
        let block = u64::from(le32(&parameters, 0));
        check_block(blame, block)?;
        if !matches!(sector, 512 | 4096) {
            return Err(blame.invalid("logical sector size", sector, "it must be 512 or 4096"));
        }
        if !size.is_multiple_of(sector.into()) || size > MAX_SIZE {
            let reason = format!("it must be a multiple of {sector} up to 64 TiB");
            return Err(blame.invalid("virtual disk size", size, reason));
        }
        Ok(Self { block, size, sector: sector.into() })
    }
}

pub(crate) fn check_block(blame: Blame, block: u64) -> Result<()> {
    if !block.is_power_of_two() || !(MIB..=256 * MIB).contains(&block) {
        let reason = "it must be a power of two from 1 MiB to 256 MiB";
        return Err(blame.invalid("block size", block, reason));
    }
    Ok(())
}

impl Vhdx {
    /// Bytes in a block.
    pub(crate) const fn block(&self) -> u64 {
        self.block
    }

    pub(crate) async fn run<S: Storage>(
        &self,
        files: &Files<S>,
        at: u64,
        length: u64,
    ) -> Result<Run> {
        let file = files.file(0)?;
        let first = at / self.block;
        let left = self.chunk - first % self.chunk;
        let limit = (at % self.block + length).div_ceil(self.block).min(left);
        let decode = |index: u64, entry: u64| match entry & 7 {
            // Not present, undefined, zero, and unmapped in two versions.
            0..=3 | 5 => Ok(Block::Zero),
            6 => {
                let offset = entry & !(MIB - 1);
                if offset < MIB || offset >= file.length {
                    return Err(file.past_end(&format!("BAT entry {index}"), offset));
                }
                Ok(Block::At(offset))
            }
            state => {
                let reason = "it is partially present, which only differencing images have, or \
                              not known";
                Err(file.blame().unsupported(&format!("state of BAT entry {index}"), state, reason))
            }
        };
        let index = first + first / self.chunk;
        let (block, count) = self.table.run(files, index, limit, decode).await?;
        Ok(Run::of_blocks(0, block, count, self.block, at, length))
    }
}
