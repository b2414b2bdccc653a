//! Writing an image from the start of its disk to the end.

mod piece;
mod placed;
mod qed;
mod vdi;
mod vhdx;
mod vmdk;
mod vpc;

use crate::error::Result;
use isobath_storage::Storage;
pub use piece::{PIECE, Piece};
pub use qed::QedOptions;
use qed::WriteQed;
use std::sync::Arc;
pub use vdi::VdiOptions;
use vdi::WriteVdi;
pub use vhdx::VhdxOptions;
use vhdx::WriteVhdx;
pub use vmdk::{VmdkOptions, VmdkSubformat};
use vmdk::{WriteVmdk, deflate};
pub use vpc::VpcOptions;
use vpc::WriteVpc;

enum Kind<S> {
    Vmdk(WriteVmdk<S>),
    Vhdx(WriteVhdx),
    Vpc(WriteVpc),
    Vdi(WriteVdi),
    Qed(WriteQed),
}

/// Writes an image into an empty file, which is not a valid image until [`finish`](Self::finish) returns.
pub struct Writer<S> {
    storage: Arc<S>,
    size: u64,
    kind: Kind<S>,
}

impl<S: Storage> Writer<S> {
    /// A VMDK with a disk of `size` bytes, a multiple of 512. `extents` are the empty files that
    /// [`VmdkOptions::extents`] names.
    ///
    /// # Errors
    /// If the disk is too large for the format, or empty; or an option is not valid.
    pub fn vmdk(
        storage: Arc<S>,
        extents: Vec<Arc<S>>,
        size: u64,
        options: &VmdkOptions,
    ) -> Result<Self> {
        let kind = Kind::Vmdk(WriteVmdk::new(storage.identity().name, extents, size, options)?);
        Ok(Self { storage, size, kind })
    }

    /// A VHDX with a disk of `size` bytes, a multiple of 512.
    ///
    /// # Errors
    /// If the disk is too large for the format, or an option is not valid.
    pub fn vhdx(storage: Arc<S>, size: u64, options: VhdxOptions) -> Result<Self> {
        let kind = Kind::Vhdx(WriteVhdx::new(storage.identity().name, size, options)?);
        Ok(Self { storage, size, kind })
    }

    /// A VHD with a disk of `size` bytes, a multiple of 512. The disk may be [larger](Self::size) unless its size is
    /// forced.
    ///
    /// # Errors
    /// If the disk is too large for the format.
    pub fn vpc(storage: Arc<S>, size: u64, options: VpcOptions) -> Result<Self> {
        let vpc = WriteVpc::new(storage.identity().name, size, options)?;
        Ok(Self { storage, size: vpc.size(), kind: Kind::Vpc(vpc) })
    }

    /// A VDI with a disk of `size` bytes, a multiple of 512.
    ///
    /// # Errors
    /// If the disk is too large for the format.
    pub fn vdi(storage: Arc<S>, size: u64, options: VdiOptions) -> Result<Self> {
        let kind = Kind::Vdi(WriteVdi::new(storage.identity().name, size, options)?);
        Ok(Self { storage, size, kind })
    }

    /// A QED image with a disk of `size` bytes, a multiple of 512.
    ///
    /// # Errors
    /// If the disk is too large for the tables, or an option is not valid.
    pub fn qed(storage: Arc<S>, size: u64, options: QedOptions) -> Result<Self> {
        let kind = Kind::Qed(WriteQed::new(storage.identity().name, size, options)?);
        Ok(Self { storage, size, kind })
    }

    /// The new disk's size in bytes, at least the requested size.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Whether pieces are compressed, so that [preparing](Self::prepare) several concurrently is worthwhile.
    pub fn compresses(&self) -> bool {
        matches!(&self.kind, Kind::Vmdk(vmdk) if vmdk.compresses())
    }

    /// Compresses a piece if the format uses compression. Pieces of zeroes need not be written.
    pub fn prepare(&self, at: u64, bytes: &[u8]) -> Option<Piece> {
        if bytes.iter().all(|byte| *byte == 0) {
            return None;
        }
        let bytes = if self.compresses() { deflate(at, bytes) } else { bytes.to_vec() };
        Some(Piece { at, bytes })
    }

    /// Writes pieces, which must be in ascending order over all calls.
    ///
    /// # Errors
    /// If the storage fails, or the file becomes too large for the format.
    pub async fn write(&mut self, pieces: Vec<Piece>) -> Result<()> {
        match &mut self.kind {
            Kind::Vmdk(vmdk) => vmdk.write(&*self.storage, pieces).await,
            Kind::Vhdx(vhdx) => vhdx.write(&*self.storage, pieces).await,
            Kind::Vpc(vpc) => vpc.write(&*self.storage, pieces).await,
            Kind::Vdi(vdi) => vdi.write(&*self.storage, pieces).await,
            Kind::Qed(qed) => qed.write(&*self.storage, pieces).await,
        }
    }

    /// Writes the tables and headers, and makes everything durable.
    ///
    /// # Errors
    /// If the storage fails, or the file becomes too large for the format.
    pub async fn finish(self) -> Result<()> {
        match self.kind {
            Kind::Vmdk(vmdk) => vmdk.finish(&*self.storage).await,
            Kind::Vhdx(vhdx) => vhdx.finish(&*self.storage).await,
            Kind::Vpc(vpc) => vpc.finish(&*self.storage).await,
            Kind::Vdi(vdi) => vdi.finish(&*self.storage).await,
            Kind::Qed(qed) => qed.finish(&*self.storage).await,
        }
    }
}
