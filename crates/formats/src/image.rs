//! An open image, and the disk that it contains.

use crate::error::{Error, Result};
use crate::files::{File, Files};
use crate::run::{Run, RunKind};
use crate::vmdk::VmdkInfo;
use crate::{qed, vdi, vhdx, vmdk, vpc};
use isobath_qcow2::probe::Foreign;
use isobath_storage::{IoBuf, Storage};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A format that this crate reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// `VMware`'s disk.
    Vmdk,
    /// `VirtualBox`'s disk.
    Vdi,
    /// Hyper-V's disk.
    Vhdx,
    /// Virtual PC's disk, VHD.
    Vpc,
    /// QEMU's enhanced disk.
    Qed,
}

impl Format {
    /// All formats.
    pub const ALL: [Self; 5] = [Self::Vmdk, Self::Vdi, Self::Vhdx, Self::Vpc, Self::Qed];

    /// QEMU's name for it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Vmdk => "vmdk",
            Self::Vdi => "vdi",
            Self::Vhdx => "vhdx",
            Self::Vpc => "vpc",
            Self::Qed => "qed",
        }
    }

    /// The format with that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.name() == name)
    }

    /// The detected format, if this crate reads it.
    pub fn detected(found: Foreign) -> Option<Self> {
        Self::from_name(found.name())
    }
}

pub(crate) enum Tables {
    Vmdk(vmdk::Vmdk),
    Vdi(vdi::Vdi),
    Vhdx(vhdx::Vhdx),
    Vpc(vpc::Vpc),
    Qed(qed::Qed),
}

/// An image in another program's format, open for reading.
pub struct Image<S> {
    format: Format,
    pub(crate) size: u64,
    pub(crate) files: Files<S>,
    pub(crate) tables: Tables,
}

impl<S: Storage> Image<S> {
    /// Opens the image `name`, whose file is `storage`. `open_extent` opens the other files that a VMDK's descriptor
    /// names, and decides which are allowed.
    ///
    /// # Errors
    /// If a field is invalid or not supported, or a file cannot be read.
    pub async fn open<E: From<Error>>(
        format: Format,
        name: &Path,
        storage: Arc<S>,
        open_extent: impl AsyncFn(&str) -> std::result::Result<(PathBuf, Arc<S>), E>,
    ) -> std::result::Result<Self, E> {
        let file = File::new(name, storage).await?;
        let mut files = Vec::new();
        let (tables, size) = match format {
            Format::Vdi => vdi::open(&file).await.map(|(it, size)| (Tables::Vdi(it), size))?,
            Format::Vpc => vpc::open(&file).await.map(|(it, size)| (Tables::Vpc(it), size))?,
            Format::Qed => qed::open(&file).await.map(|(it, size)| (Tables::Qed(it), size))?,
            Format::Vhdx => vhdx::open(&file).await.map(|(it, size)| (Tables::Vhdx(it), size))?,
            Format::Vmdk => {
                let listed = vmdk::extents(&file).await?;
                files.push(file);
                for extent in listed.iter().flat_map(|listed| &listed.extents) {
                    let (name, storage) = open_extent(&extent.name).await?;
                    files.push(File::new(&name, storage).await?);
                }
                let vmdk = vmdk::open(&files, listed).await?;
                let size = vmdk.size();
                let tables = Tables::Vmdk(vmdk);
                return Ok(Self { format, size, files: Files::new(files), tables });
            }
        };
        files.push(file);
        let files = Files::new(files);
        Ok(Self { format, size, files, tables })
    }

    /// Its format.
    pub fn format(&self) -> Format {
        self.format
    }

    /// The disk's size in bytes, a multiple of 512.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The size of a block in guest bytes, if the image is divided into blocks.
    pub fn cluster_size(&self) -> Option<u64> {
        match &self.tables {
            Tables::Vmdk(vmdk) => vmdk.cluster_size(),
            Tables::Vdi(_) => Some(vdi::BLOCK),
            Tables::Vhdx(vhdx) => Some(vhdx.block()),
            Tables::Vpc(vpc) => vpc.block(),
            Tables::Qed(qed) => Some(qed.cluster()),
        }
    }

    /// Whether the image is marked as not closed.
    pub fn is_dirty(&self) -> bool {
        matches!(&self.tables, Tables::Qed(qed) if qed.is_dirty())
    }

    /// The metadata of a VMDK; `None` for other formats.
    pub fn vmdk(&self) -> Option<VmdkInfo> {
        match &self.tables {
            Tables::Vmdk(vmdk) => Some(vmdk.info(&self.files)),
            _ => None,
        }
    }

    /// The image's files; the first is the image itself.
    pub fn storages(&self) -> impl Iterator<Item = &Arc<S>> {
        self.files.all().iter().map(|file| &file.storage)
    }

    /// Where the disk's bytes from `at` on are stored, for at most `length` bytes, which must not be 0. Bytes past the
    /// end of the disk are zeroes.
    pub async fn run(&self, at: u64, length: u64) -> Result<Run> {
        if at >= self.size {
            return Ok(Run::zero(length));
        }
        let length = length.min(self.size - at);
        match &self.tables {
            Tables::Vmdk(vmdk) => vmdk.run(&self.files, at, length).await,
            Tables::Vdi(vdi) => vdi.run(&self.files, at, length).await,
            Tables::Vhdx(vhdx) => vhdx.run(&self.files, at, length).await,
            Tables::Vpc(vpc) => vpc.run(&self.files, at, length).await,
            Tables::Qed(qed) => qed.run(&self.files, at, length).await,
        }
    }

    /// Reads the disk's bytes from `at` on. Bytes past the end of the disk are zeroes.
    pub async fn read(&self, mut at: u64, mut rest: IoBuf) -> Result<IoBuf> {
        let mut whole = IoBuf::empty();
        while !rest.is_empty() {
            let run = self.run(at, rest.len() as u64).await?;
            let mut part = rest.split_to(run.length as usize);
            match run.kind {
                RunKind::Absent | RunKind::Zero => part.fill(0),
                RunKind::Data { file, offset } => {
                    part = self.files.file(file)?.storage.read_at(offset, part).await?;
                }
                RunKind::Deflated { file, offset, within } => {
                    let Tables::Vmdk(vmdk) = &self.tables else { continue };
                    let block = vmdk.decompressed(&self.files, file, offset).await?;
                    let within = within as usize;
                    let Some(bytes) = block.get(within..within + part.len()) else {
                        return Err(self.files.file(file)?.blame().invalid(
                            "compressed grain",
                            format!("at offset {offset}, {} bytes", block.len()),
                            "it decompresses to less than a grain; the image is damaged",
                        ));
                    };
                    part.copy_from_slice(bytes);
                }
            }
            at += run.length;
            whole.unsplit(part);
        }
        Ok(whole)
    }
}
