//! Writing an image from the start of its disk to the end.

use crate::error::Result;
use crate::piece::Piece;
use crate::write_vhdx::{VhdxOptions, WriteVhdx};
use crate::write_vmdk::{VmdkOptions, WriteVmdk, deflate};
use isobath_storage::Storage;
use std::sync::Arc;

enum Kind {
    Vmdk(WriteVmdk),
    Vhdx(WriteVhdx),
}

/// Writes an image into an empty file. Nothing is a valid image before [`finish`](Self::finish) returns.
pub struct Writer<S> {
    storage: Arc<S>,
    kind: Kind,
}

impl<S: Storage> Writer<S> {
    /// A stream-optimized VMDK with a disk of `size` bytes, a multiple of 512.
    ///
    /// # Errors
    /// If the disk is too large for the format.
    pub fn vmdk(storage: Arc<S>, size: u64, options: VmdkOptions) -> Result<Self> {
        let kind = Kind::Vmdk(WriteVmdk::new(storage.identity().name, size, options)?);
        Ok(Self { storage, kind })
    }

    /// A dynamic VHDX with a disk of `size` bytes, a multiple of 512.
    ///
    /// # Errors
    /// If the disk is too large for the format, or the block size is not valid.
    pub fn vhdx(storage: Arc<S>, size: u64, options: VhdxOptions) -> Result<Self> {
        let kind = Kind::Vhdx(WriteVhdx::new(storage.identity().name, size, options)?);
        Ok(Self { storage, kind })
    }

    /// Whether pieces are compressed, so that it pays to [prepare](Self::prepare) several at once.
    pub fn compresses(&self) -> bool {
        matches!(self.kind, Kind::Vmdk(_))
    }

    /// Compresses a piece if the format does. Zeroes need not be written.
    pub fn prepare(&self, at: u64, bytes: &[u8]) -> Option<Piece> {
        if bytes.iter().all(|byte| *byte == 0) {
            return None;
        }
        let bytes = match self.kind {
            Kind::Vmdk(_) => deflate(at, bytes),
            Kind::Vhdx(_) => bytes.to_vec(),
        };
        Some(Piece { at, bytes })
    }

    /// Writes pieces. All of them, over all calls, are in ascending order.
    ///
    /// # Errors
    /// If the storage fails, or the file becomes too large for the format.
    pub async fn write(&mut self, pieces: Vec<Piece>) -> Result<()> {
        match &mut self.kind {
            Kind::Vmdk(vmdk) => vmdk.write(&*self.storage, pieces).await,
            Kind::Vhdx(vhdx) => vhdx.write(&*self.storage, pieces).await,
        }
    }

    /// Writes the tables and headers, durably.
    ///
    /// # Errors
    /// If the storage fails, or the file becomes too large for the format.
    pub async fn finish(self) -> Result<()> {
        match self.kind {
            Kind::Vmdk(vmdk) => vmdk.finish(&*self.storage).await,
            Kind::Vhdx(vhdx) => vhdx.finish(&*self.storage).await,
        }
    }
}
