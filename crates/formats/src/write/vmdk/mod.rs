//! Writing VMDK, as specified in `VMware`'s "Virtual Disk Format 5.0".

mod extents;
mod grains;
mod sparse;
mod stream;

use super::piece::Piece;
use crate::error::{Blame, Result};
use crate::vmdk::SECTOR;
use extents::Extents;
use isobath_storage::Storage;
use sparse::WriteSparse;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use stream::WriteStream;
pub(crate) use stream::deflate;

/// The size of a grain in sectors.
const GRAIN: u64 = super::piece::PIECE as u64 / SECTOR;

/// The number of entries in a grain table.
const ENTRIES: u64 = 512;

/// The size of the descriptor that follows the header in a sparse image, in sectors.
const DESCRIPTOR: u64 = 20;

/// The maximum size of a disk in sectors, 128 TiB. A file's sectors have 32-bit numbers, which may not suffice even for
/// a smaller disk.
const MAX_SECTORS: u64 = u32::MAX as u64 * 64;

/// The files of a VMDK.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum VmdkSubformat {
    /// One file, with the parts that are written.
    #[default]
    MonolithicSparse,
    /// A descriptor, and a file with the whole disk.
    MonolithicFlat,
    /// A descriptor, and files that each cover 2 GiB of the disk, with the parts that are written.
    TwoGbMaxExtentSparse,
    /// A descriptor, and files of 2 GiB with the whole disk.
    TwoGbMaxExtentFlat,
    /// One file, with the parts that are written, compressed.
    StreamOptimized,
}

impl VmdkSubformat {
    /// All subformats.
    pub const ALL: [Self; 5] = [
        Self::MonolithicSparse,
        Self::MonolithicFlat,
        Self::TwoGbMaxExtentSparse,
        Self::TwoGbMaxExtentFlat,
        Self::StreamOptimized,
    ];

    /// Its name, in descriptors and in QEMU.
    pub const fn name(self) -> &'static str {
        match self {
            Self::MonolithicSparse => "monolithicSparse",
            Self::MonolithicFlat => "monolithicFlat",
            Self::TwoGbMaxExtentSparse => "twoGbMaxExtentSparse",
            Self::TwoGbMaxExtentFlat => "twoGbMaxExtentFlat",
            Self::StreamOptimized => "streamOptimized",
        }
    }

    /// The subformat with that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|subformat| subformat.name() == name)
    }

    /// Whether its files contain the whole disk.
    pub const fn is_flat(self) -> bool {
        matches!(self, Self::MonolithicFlat | Self::TwoGbMaxExtentFlat)
    }

    /// The maximum size of an extent in guest bytes, if extents have files of their own.
    const fn extent(self) -> Option<u64> {
        match self {
            Self::MonolithicSparse | Self::StreamOptimized => None,
            Self::MonolithicFlat => Some(u64::MAX),
            Self::TwoGbMaxExtentSparse | Self::TwoGbMaxExtentFlat => Some(2 << 30),
        }
    }
}

/// Options of a VMDK.
#[derive(Clone, Debug)]
pub struct VmdkOptions {
    /// Its files.
    pub subformat: VmdkSubformat,
    /// The content ID. It must not be all ones, which stands for no parent.
    pub content_id: u32,
    /// The disk's controller: `ide`, `buslogic`, `lsilogic` or `legacyESX`.
    pub adapter: &'static str,
    /// The version of `VMware`'s virtual hardware.
    pub hardware_version: String,
    /// The version of `VMware`'s tools in the guest.
    pub tools_version: String,
    /// For a sparse image: whether programs may mark parts as zero.
    pub zeroed_grains: bool,
}

impl VmdkOptions {
    /// The files besides its own that the image `name` with a disk of `size` bytes needs. They are in the same
    /// directory.
    ///
    /// # Errors
    /// If a descriptor cannot hold their names, or the disk is too large.
    pub fn extents(&self, name: &Path, size: u64) -> Result<Vec<PathBuf>> {
        let extents = self.extent_names(name, size)?;
        Ok(extents.into_iter().map(|extent| name.with_file_name(extent)).collect())
    }

    fn extent_names(&self, name: &Path, size: u64) -> Result<Vec<String>> {
        let Some(extent) = self.subformat.extent() else { return Ok(Vec::new()) };
        let blame = Blame(name);
        let file = name.file_name().unwrap_or_default();
        let plain = |name: &&str| !name.chars().any(|c| matches!(c, '"' | ':') || c.is_control());
        let Some(file) = file.to_str().filter(plain) else {
            let reason = "a descriptor cannot name files with quotation marks, colons, control \
                          characters or other encodings than UTF-8 in their names";
            return Err(blame.unsupported("name", file.display(), reason));
        };
        let (front, back) = file.split_at(file.rfind('.').unwrap_or(file.len()));
        let kind = if self.subformat.is_flat() { "f" } else { "s" };
        if extent == u64::MAX {
            return Ok(vec![format!("{front}-flat{back}")]);
        }
        let count = size.div_ceil(extent);
        if count > MAX_EXTENTS {
            let reason = format!("it would need more than {MAX_EXTENTS} extents of 2 GiB");
            return Err(blame.unsupported("disk size", size, reason));
        }
        Ok((1..=count).map(|number| format!("{front}-{kind}{number:03}{back}")).collect())
    }
}

/// The maximum number of an image's files, all of which are open at once.
const MAX_EXTENTS: u64 = 512;

/// The descriptor of an image whose extents are listed in `extents`.
fn descriptor(options: &VmdkOptions, capacity: u64, extents: &str) -> String {
    let VmdkOptions { content_id, adapter, hardware_version, tools_version, .. } = options;
    let (heads, sectors) = if *adapter == "ide" { (16, 63) } else { (255, 63) };
    let cylinders = capacity / (heads * sectors);
    format!(
        "# Disk DescriptorFile\nversion=1\nCID={content_id:08x}\nparentCID=ffffffff\n\
         createType=\"{}\"\n\n# Extent description\n{extents}\n\
         # The Disk Data Base\n#DDB\n\nddb.virtualHWVersion = \"{hardware_version}\"\n\
         ddb.geometry.cylinders = \"{cylinders}\"\nddb.geometry.heads = \"{heads}\"\n\
         ddb.geometry.sectors = \"{sectors}\"\nddb.adapterType = \"{adapter}\"\n\
         ddb.toolsVersion = \"{tools_version}\"\n",
        options.subformat.name()
    )
}

/// The descriptor in a sparse image, in whole sectors.
fn embedded(name: &Path, options: &VmdkOptions, capacity: u64) -> Result<Vec<u8>> {
    let file = name.file_name().unwrap_or_default().to_string_lossy();
    // The name is only informative, but a quotation mark or a newline would change the descriptor's meaning.
    let shown: String =
        file.chars().take(200).map(|c| if c == '"' || c.is_control() { '_' } else { c }).collect();
    let text = descriptor(options, capacity, &format!("RW {capacity} SPARSE \"{shown}\"\n"));
    let mut bytes = text.into_bytes();
    let room = (DESCRIPTOR * SECTOR) as usize;
    if bytes.len() >= room {
        let reason = format!("a descriptor has at most {room} bytes");
        return Err(Blame(name).unsupported("descriptor", bytes.len(), reason));
    }
    bytes.resize(room, 0);
    Ok(bytes)
}

/// The bytes of entries, padded to whole sectors.
fn encode(entries: &[u32]) -> Vec<u8> {
    let mut bytes: Vec<u8> = entries.iter().flat_map(|entry| entry.to_le_bytes()).collect();
    bytes.resize(bytes.len().next_multiple_of(SECTOR as usize), 0);
    bytes
}

pub(crate) enum WriteVmdk<S> {
    Stream(WriteStream),
    Sparse(WriteSparse),
    Extents(Extents<S>),
}

impl<S: Storage> WriteVmdk<S> {
    pub(crate) fn new(
        name: &Path,
        extents: Vec<Arc<S>>,
        size: u64,
        options: &VmdkOptions,
    ) -> Result<Self> {
        let blame = Blame(name);
        let capacity = size / SECTOR;
        if capacity == 0 || capacity > MAX_SECTORS {
            let reason = "a VMDK has a disk from 512 bytes to 128 TiB";
            return Err(blame.unsupported("disk size", size, reason));
        }
        let words =
            [("hwversion", &options.hardware_version), ("toolsversion", &options.tools_version)];
        for (field, word) in words {
            if word.chars().any(|c| c == '"' || c.is_control()) || word.len() > 64 {
                let reason = "it must be a short word without quotation marks";
                return Err(blame.invalid(field, word.escape_debug(), reason));
            }
        }
        let zeroed = options.zeroed_grains;
        Ok(match options.subformat {
            VmdkSubformat::StreamOptimized => {
                let descriptor = embedded(name, options, capacity)?;
                Self::Stream(WriteStream::new(name, capacity, descriptor, zeroed))
            }
            VmdkSubformat::MonolithicSparse => {
                let descriptor = embedded(name, options, capacity)?;
                Self::Sparse(WriteSparse::new(name, capacity, Some(descriptor), zeroed))
            }
            _ => Self::Extents(Extents::new(name, extents, capacity, options)?),
        })
    }

    pub(crate) const fn compresses(&self) -> bool {
        matches!(self, Self::Stream(_))
    }

    pub(crate) async fn write(&mut self, storage: &S, pieces: Vec<Piece>) -> Result<()> {
        match self {
            Self::Stream(stream) => stream.write(storage, pieces).await,
            Self::Sparse(sparse) => sparse.write(storage, pieces).await,
            Self::Extents(extents) => extents.write(pieces).await,
        }
    }

    pub(crate) async fn finish(self, storage: &S) -> Result<()> {
        match self {
            Self::Stream(stream) => stream.finish(storage).await,
            Self::Sparse(sparse) => sparse.finish(storage).await,
            Self::Extents(extents) => extents.finish(storage).await,
        }
    }
}
