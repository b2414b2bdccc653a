//! VMDK, `VMware`'s disk: sparse and stream-optimized images in one file, and descriptors that list flat or sparse
//! extents.

use crate::error::{Blame, Error, Result};
use crate::files::{File, Files};
use crate::le::{le16, le32, le64};
use crate::run::Run;
use crate::tables::{Block, Entries, Table};
use flate2::{Decompress, FlushDecompress, Status};
use isobath_qcow2::text::Shown;
use isobath_storage::{IoBuf, Storage};
use std::path::PathBuf;
use std::sync::Arc;

pub(crate) const SECTOR: u64 = 512;

/// The value of the grain directory's offset that refers to the footer.
pub(crate) const AT_END: u64 = u64::MAX;

/// The maximum length of a descriptor that is read, in bytes.
const MAX_DESCRIPTOR: u64 = (1 << 20) - 1;

/// The maximum number of extents.
const MAX_EXTENTS: usize = 4096;

/// The maximum size of a grain, and of a compressed one.
const MAX_GRAIN: u64 = 1 << 30;
const MAX_COMPRESSED_GRAIN: u64 = 16 << 20;

/// The maximum number of entries in a grain directory, the same as QEMU's.
const MAX_DIRECTORY: u64 = 32 << 20;

/// The location of the descriptor in a sparse image, and its length, as QEMU assumes them.
const EMBEDDED: (u64, u64) = (SECTOR, 20 * SECTOR);

/// The metadata of a VMDK. Strings are as stored, and not trusted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmdkInfo {
    /// The identity of its contents.
    pub content_id: u32,
    /// The identity of its parent's contents; all ones without a parent.
    pub parent_id: u32,
    /// Its subformat's name.
    pub create_type: String,
    /// Its extents, in the order of the disk; at least one.
    pub extents: Vec<VmdkExtent>,
}

/// An extent of a VMDK.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmdkExtent {
    /// The name of its file.
    pub filename: PathBuf,
    /// Its type in the descriptor; empty if the image has no descriptor file.
    pub format: String,
    /// Its size in guest bytes.
    pub virtual_size: u64,
    /// Bytes in a grain; `None` for a flat extent.
    pub cluster_size: Option<u64>,
    /// Whether its grains are compressed.
    pub compressed: bool,
}

/// An extent that a descriptor lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Listed {
    pub(crate) name: String,
    sectors: u64,
    /// Of a flat extent: the sector of the file at which it begins.
    flat: Option<u64>,
    /// Its type, as written.
    kind: String,
}

/// A parsed descriptor file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Descriptor {
    identity: Identity,
    pub(crate) extents: Vec<Listed>,
}

/// The image's metadata in a descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Identity {
    content_id: u32,
    parent_id: u32,
    create_type: String,
}

impl Identity {
    fn of(text: &str) -> Self {
        // Only the leading hexadecimal digits count, as in C.
        let id = |key| {
            let text = value(text, key).map(str::trim_start).unwrap_or_default();
            let digits = text.bytes().take_while(u8::is_ascii_hexdigit).take(8).count();
            u32::from_str_radix(&text[..digits], 16).unwrap_or_default()
        };
        let kind = value(text, "createType").map(|kind| kind.trim().trim_matches('"'));
        Self {
            content_id: id("CID"),
            parent_id: id("parentCID"),
            create_type: kind.unwrap_or_default().to_owned(),
        }
    }
}

/// The extents that a descriptor lists; `None` for an image that is one sparse extent.
pub(crate) async fn extents<S: Storage>(file: &File<S>) -> Result<Option<Descriptor>> {
    let start = file.storage.read_at(0, IoBuf::zeroed(4)).await?;
    let blame = file.blame();
    match &start[..] {
        b"KDMV" => return Ok(None),
        b"COWD" => {
            let reason =
                "sparse extents of ESX servers are not supported; convert it with qemu-img";
            return Err(blame.unsupported("magic", "'COWD'", reason));
        }
        _ => {}
    }
    let length = file.length.min(MAX_DESCRIPTOR);
    let bytes = file.storage.read_at(0, IoBuf::zeroed(length as usize)).await?;
    parse_descriptor(blame, &String::from_utf8_lossy(&bytes)).map(Some)
}

/// The value of `key=` in a descriptor: the rest of its line.
fn value<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.trim().strip_prefix(key)?.trim_start().strip_prefix('='))
}

fn refuse_parent(blame: Blame, text: &str) -> Result<()> {
    let parent = value(text, "parentCID").map(str::trim);
    let orphan = parent.is_none_or(|id| id.eq_ignore_ascii_case("ffffffff"));
    if text.contains("parentFileNameHint") || !orphan {
        let shown = Shown(parent.unwrap_or("none")).to_string();
        let reason = "images with a parent are not supported; convert the chain with qemu-img";
        return Err(blame.unsupported("parentCID", shown, reason));
    }
    Ok(())
}

fn parse_descriptor(blame: Blame, text: &str) -> Result<Descriptor> {
    let text = text.split('\0').next().unwrap_or_default();
    let kind = value(text, "createType").map(|kind| kind.trim().trim_matches('"'));
    let Some(kind) = kind else {
        return Err(blame.invalid("createType", "missing", "this is not a VMDK descriptor"));
    };
    if !matches!(kind, "monolithicFlat" | "twoGbMaxExtentFlat" | "twoGbMaxExtentSparse" | "vmfs") {
        let reason = "only monolithicFlat, twoGbMaxExtentFlat, twoGbMaxExtentSparse and vmfs are \
                      supported in a descriptor file";
        return Err(blame.unsupported("createType", Shown(kind), reason));
    }
    refuse_parent(blame, text)?;
    let mut extents = Vec::new();
    for line in text.lines().map(str::trim) {
        let access = line.split_whitespace().next().unwrap_or_default();
        if !matches!(access, "RW" | "RDONLY" | "NOACCESS") {
            continue;
        }
        let wrong =
            |reason: &str| blame.unsupported("extent", format!("'{}'", Shown(line)), reason);
        let (front, named) = line.split_once('"').ok_or_else(|| wrong("it names no file"))?;
        let (name, back) = named.split_once('"').ok_or_else(|| wrong("its name does not end"))?;
        let mut words = front.split_whitespace().skip(1);
        let sectors = words.next().and_then(|word| word.parse::<u64>().ok());
        let sectors = sectors.filter(|count| *count > 0 && *count <= u64::MAX >> 10);
        let sectors = sectors.ok_or_else(|| wrong("its number of sectors is not valid"))?;
        let offset = back.split_whitespace().next().map(str::parse::<u64>);
        let kind = words.next();
        let flat = match (access, kind, offset) {
            ("RW", Some("FLAT"), Some(Ok(offset))) if offset <= u64::MAX >> 10 => Some(offset),
            ("RW", Some("VMFS"), None) => Some(0),
            ("RW", Some("SPARSE"), None) => None,
            _ => {
                let reason = "only extents 'RW SECTORS FLAT \"NAME\" OFFSET', 'RW SECTORS SPARSE \
                              \"NAME\"' and 'RW SECTORS VMFS \"NAME\"' are supported";
                return Err(wrong(reason));
            }
        };
        if words.next().is_some() || name.is_empty() {
            return Err(wrong("it is malformed"));
        }
        let kind = kind.unwrap_or_default().to_owned();
        extents.push(Listed { name: name.to_owned(), sectors, flat, kind });
        if extents.len() > MAX_EXTENTS {
            let reason = format!("more than {MAX_EXTENTS} are not supported");
            return Err(blame.unsupported("number of extents", extents.len(), reason));
        }
    }
    if extents.is_empty() {
        return Err(blame.invalid("extents", "none", "the descriptor lists no extent"));
    }
    Ok(Descriptor { identity: Identity::of(text), extents })
}

/// A range of the disk in one file.
struct Extent {
    file: usize,
    /// Guest bytes.
    start: u64,
    end: u64,
    kind: Kind,
    /// Its type in the descriptor.
    listed_kind: String,
}

enum Kind {
    Flat { offset: u64 },
    Sparse(Sparse),
}

impl Kind {
    /// Bytes in a grain.
    fn grain(&self) -> Option<u64> {
        match self {
            Self::Flat { .. } => None,
            Self::Sparse(sparse) => Some(sparse.grain),
        }
    }
}

struct Sparse {
    directory: Table,
    /// Entries in a grain table.
    entries: u64,
    /// Bytes in a grain.
    grain: u64,
    /// Entries of 1 stand for zeroes.
    zeroes: bool,
    compressed: bool,
    markers: bool,
}

pub(crate) struct Vmdk {
    identity: Identity,
    /// In the order of the disk, without gaps.
    extents: Vec<Extent>,
}

/// Opens the extents. `files` are the image itself and then the files that it lists, in order.
pub(crate) async fn open<S: Storage>(
    files: &[File<S>],
    listed: Option<Descriptor>,
) -> Result<Vmdk> {
    let mut extents = Vec::new();
    let Some(Descriptor { identity, extents: listed }) = listed else {
        let mut identity = Identity::of("");
        let Some(file) = files.first() else { return Ok(Vmdk { identity, extents }) };
        let (sparse, capacity) = open_sparse(0, file).await?;
        let places = [EMBEDDED, descriptor_place(file).await?];
        for (at, length) in places {
            let length = length.min(file.length.saturating_sub(at)).min(MAX_DESCRIPTOR);
            let bytes = file.storage.read_at(at, IoBuf::zeroed(length as usize)).await?;
            let text = String::from_utf8_lossy(&bytes);
            let text = text.split('\0').next().unwrap_or_default();
            refuse_parent(file.blame(), text)?;
            if identity.create_type.is_empty() {
                identity = Identity::of(text);
            }
        }
        let (kind, listed_kind) = (Kind::Sparse(sparse), String::new());
        extents.push(Extent { file: 0, start: 0, end: capacity, kind, listed_kind });
        return Ok(Vmdk { identity, extents });
    };
    let mut start = 0;
    for (number, (file, listed)) in files.iter().skip(1).zip(listed).enumerate() {
        let number = number + 1;
        let length = listed.sectors * SECTOR;
        let kind = if let Some(sector) = listed.flat {
            let offset = sector * SECTOR;
            file.must_hold("extent", offset, length)?;
            Kind::Flat { offset }
        } else {
            let (sparse, capacity) = open_sparse(number, file).await?;
            if capacity != length {
                let reason = format!("the descriptor gives it {} sectors", listed.sectors);
                return Err(file.blame().invalid("capacity", capacity / SECTOR, reason));
            }
            Kind::Sparse(sparse)
        };
        let end = start + length;
        if i64::try_from(end).is_err() {
            let reason = "the disk is too large";
            return Err(file.blame().invalid("end of the extent", end, reason));
        }
        let listed_kind = listed.kind.clone();
        extents.push(Extent { file: number, start, end, kind, listed_kind });
        start = end;
    }
    Ok(Vmdk { identity, extents })
}

/// The location and length of the descriptor according to a sparse image's header.
async fn descriptor_place<S: Storage>(file: &File<S>) -> Result<(u64, u64)> {
    let header = file.header("VMDK header", 0, 512).await?;
    let place = |at| le64(&header, at).saturating_mul(SECTOR);
    Ok((place(28).min(file.length), place(36)))
}

/// Reads the header of a sparse extent. Returns its tables and its size in guest bytes.
async fn open_sparse<S: Storage>(number: usize, file: &File<S>) -> Result<(Sparse, u64)> {
    let blame = file.blame();
    let mut header = file.header("VMDK header", 0, 512).await?;
    if !header.starts_with(b"KDMV") {
        let value = format!("'{}'", header[..4].escape_ascii());
        return Err(blame.unsupported("magic", value, "this is not a sparse VMDK extent"));
    }
    if le64(&header, 56) == AT_END {
        header = footer(file).await?;
    }
    let version = le32(&header, 4);
    if !matches!(version, 1..=3) {
        return Err(blame.unsupported("version", version, "only 1, 2 and 3 are supported"));
    }
    let flags = le32(&header, 8);
    let capacity = le64(&header, 12);
    let Some(size) = capacity.checked_mul(SECTOR).filter(|size| i64::try_from(*size).is_ok())
    else {
        return Err(blame.invalid("capacity", capacity, "it is too large"));
    };
    if size == 0 {
        return Err(blame.unsupported("capacity", 0, "a sparse extent must have sectors"));
    }
    let compression = le16(&header, 77);
    if compression > 1 {
        let reason = "only 0 (none) and 1 (deflate) are supported";
        return Err(blame.unsupported("compressAlgorithm", compression, reason));
    }
    let compressed = compression == 1;
    let most = if compressed { MAX_COMPRESSED_GRAIN } else { MAX_GRAIN };
    let grain = le64(&header, 20).saturating_mul(SECTOR);
    if grain == 0 || grain > most {
        let reason = format!("a grain has 1 to {} sectors", most / SECTOR);
        return Err(blame.invalid("grainSize", le64(&header, 20), reason));
    }
    let entries = u64::from(le32(&header, 44));
    if entries == 0 || entries > 512 {
        return Err(blame.invalid("numGTEsPerGT", entries, "it must be from 1 to 512"));
    }
    let count = size.div_ceil(grain * entries);
    if count > MAX_DIRECTORY {
        let reason = format!("its grain directory would have more than {MAX_DIRECTORY} entries");
        return Err(blame.invalid("capacity", capacity, reason));
    }
    let overhead = le64(&header, 64).saturating_mul(SECTOR);
    file.must_hold("overHead", overhead, 0)?;
    let offset = le64(&header, 56).saturating_mul(SECTOR);
    if offset == 0 {
        return Err(blame.invalid("gdOffset", 0, "the image has no grain directory"));
    }
    file.must_hold("gdOffset", offset, count * 4)?;
    let directory = Table { file: number, offset, entries: Entries::Le32, block: grain * entries };
    let sparse = Sparse {
        directory,
        entries,
        grain,
        zeroes: flags & 4 != 0,
        compressed,
        markers: flags & 1 << 17 != 0,
    };
    Ok((sparse, size))
}

/// The copy of the header in the footer, which is the last sector but one.
async fn footer<S: Storage>(file: &File<S>) -> Result<IoBuf> {
    let blame = file.blame();
    let end = file.length.next_multiple_of(SECTOR);
    let at = end.saturating_sub(3 * SECTOR);
    let bytes = file.storage.read_at(at, IoBuf::zeroed(3 * SECTOR as usize)).await?;
    let (marker, rest) = bytes.split_at(SECTOR as usize);
    let (header, last) = rest.split_at(SECTOR as usize);
    let is_footer = le32(marker, 8) == 0 && le32(marker, 12) == 3 && header.starts_with(b"KDMV");
    let ends = le64(last, 0) == 0 && le32(last, 8) == 0 && le32(last, 12) == 0;
    if !is_footer || !ends {
        let reason = "there should be a footer marker, the footer and an end-of-stream marker; the \
                      file may be truncated";
        return Err(blame.invalid("footer", format!("at offset {at}"), reason));
    }
    if le64(header, 56) == AT_END {
        let reason = "the footer must say where the grain directory is";
        return Err(blame.invalid("gdOffset", format!("{AT_END:#x}"), reason));
    }
    Ok(IoBuf::copy_of(header))
}

impl Vmdk {
    /// The disk's size in bytes.
    pub(crate) fn size(&self) -> u64 {
        self.extents.last().map_or(0, |extent| extent.end)
    }

    /// Bytes in a grain; `None` if the first extent is flat.
    pub(crate) fn cluster_size(&self) -> Option<u64> {
        self.extents.first().and_then(|extent| extent.kind.grain())
    }

    pub(crate) fn info<S: Storage>(&self, files: &Files<S>) -> VmdkInfo {
        let extents = self.extents.iter().map(|extent| VmdkExtent {
            filename: files.file(extent.file).map(|file| file.name.clone()).unwrap_or_default(),
            format: extent.listed_kind.clone(),
            virtual_size: extent.end - extent.start,
            cluster_size: extent.kind.grain(),
            compressed: matches!(&extent.kind, Kind::Sparse(sparse) if sparse.compressed),
        });
        let Identity { content_id, parent_id, create_type } = self.identity.clone();
        VmdkInfo { content_id, parent_id, create_type, extents: extents.collect() }
    }

    pub(crate) async fn run<S: Storage>(
        &self,
        files: &Files<S>,
        at: u64,
        length: u64,
    ) -> Result<Run> {
        let index = self.extents.partition_point(|extent| extent.end <= at);
        let Some(extent) = self.extents.get(index) else { return Ok(Run::zero(length)) };
        let within = at - extent.start;
        let length = length.min(extent.end - at);
        match &extent.kind {
            Kind::Flat { offset } => Ok(Run::data(extent.file, offset + within, length)),
            Kind::Sparse(sparse) => sparse.run(files, extent.file, within, length).await,
        }
    }

    /// The grain whose compressed data is at `offset`.
    pub(crate) async fn decompressed<S: Storage>(
        &self,
        files: &Files<S>,
        number: usize,
        offset: u64,
    ) -> Result<Arc<Vec<u8>>> {
        if let Some(known) = files.known_block(number, offset) {
            return Ok(known);
        }
        let file = files.file(number)?;
        let extent = self.extents.iter().find(|extent| extent.file == number);
        let Some(Extent { kind: Kind::Sparse(sparse), .. }) = extent else {
            return Err(file.past_end("compressed grain", offset));
        };
        let grain = Arc::new(sparse.decompress(file, offset).await?);
        files.keep_block(number, offset, &grain);
        Ok(grain)
    }
}

impl Sparse {
    async fn run<S: Storage>(
        &self,
        files: &Files<S>,
        number: usize,
        at: u64,
        length: u64,
    ) -> Result<Run> {
        let file = files.file(number)?;
        let span = self.grain * self.entries;
        let decode = |index: u64, entry: u64| match entry * SECTOR {
            0 => Ok(Block::Absent),
            offset => {
                let field = format!("grain directory entry {index}");
                file.must_hold(&field, offset, self.entries * 4)?;
                Ok(Block::At(offset))
            }
        };
        let left = (at % span + length).div_ceil(span);
        let offset = match self.directory.run(files, at / span, left, decode).await? {
            (Block::At(offset), _) => offset,
            (block, count) => return Ok(Run::of_blocks(number, block, count, span, at, length)),
        };
        let length = length.min(span - at % span);
        let table = Table { offset, block: self.grain, ..self.directory };
        let decode = |index: u64, entry: u64| match entry {
            0 => Ok(Block::Absent),
            1 if self.zeroes => Ok(Block::Zero),
            _ => {
                let offset = entry * SECTOR;
                if offset >= file.length {
                    let field = format!("entry {index} of the grain table");
                    return Err(file.past_end(&field, offset));
                }
                Ok(if self.compressed { Block::Deflated(offset) } else { Block::At(offset) })
            }
        };
        let limit = (at % self.grain + length).div_ceil(self.grain);
        let (block, count) = table.run(files, at % span / self.grain, limit, decode).await?;
        Ok(Run::of_blocks(number, block, count, self.grain, at, length))
    }

    async fn decompress<S: Storage>(&self, file: &File<S>, offset: u64) -> Result<Vec<u8>> {
        let wrong = |value: String, reason: String| -> Error {
            let field = format!("compressed grain at offset {offset}");
            file.blame().invalid(&field, value, reason)
        };
        let most = 2 * self.grain;
        let (start, length) = if self.markers {
            let marker = file.storage.read_at(offset, IoBuf::zeroed(12)).await?;
            let length = u64::from(le32(&marker, 8));
            if length == 0 || length > most {
                let reason = format!("a grain's marker has a size from 1 to {most}");
                return Err(wrong(format!("{length} bytes"), reason));
            }
            (offset + 12, length)
        } else {
            (offset, most)
        };
        let length = length.min(file.length.saturating_sub(start));
        let input = file.storage.read_at(start, IoBuf::zeroed(length as usize)).await?;
        let mut grain = vec![0; self.grain as usize];
        let mut inflate = Decompress::new(true);
        let damaged = |reason: &str| wrong(format!("{length} bytes"), reason.to_owned());
        match inflate.decompress(&input, &mut grain, FlushDecompress::Finish) {
            Ok(Status::StreamEnd) => {
                grain.truncate(inflate.total_out() as usize);
                Ok(grain)
            }
            Ok(_) => Err(damaged("it is truncated, or holds more than a grain")),
            Err(_) => Err(damaged("it is damaged")),
        }
    }
}
