//! A disk as exposed by the options of `qemu-nbd`.

use crate::cache::CacheMode;
use crate::compressed::Compressed;
use crate::host::ImageHost;
use isobath_disk::copy::is_zero;
use isobath_disk::{BlockDevice, BlockStatus, LiveDisk, Result, ZeroFlags};
use isobath_storage::IoBuf;
use isobath_sync::AsyncMutexGuard;
use std::sync::Arc;

/// What to do with writes of zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DetectZeroes {
    /// Write them as data.
    Off,
    /// Turn them into zero-writes that keep their space.
    On,
    /// Turn them into zero-writes that may release their space.
    Unmap,
}

impl DetectZeroes {
    pub(super) fn parse(name: &str) -> std::result::Result<Self, String> {
        match name {
            "off" => Ok(Self::Off),
            "on" => Ok(Self::On),
            "unmap" => Ok(Self::Unmap),
            _ => {
                Err(format!("Failed to parse detect_zeroes mode: invalid parameter value: {name}"))
            }
        }
    }
}

/// A part of a disk, from `offset` to its end.
pub(super) struct View {
    pub(super) disk: Arc<LiveDisk<ImageHost>>,
    pub(super) offset: u64,
    pub(super) size: u64,
    pub(super) cache: CacheMode,
    /// Compresses writes, if requested.
    pub(super) compressed: Option<Compressed>,
    /// Whether discards reach the disk.
    pub(super) discards: bool,
    pub(super) detect_zeroes: DetectZeroes,
}

impl View {
    /// Keeps other changes from running concurrently with writes of whole clusters.
    async fn alone(&self) -> Option<AsyncMutexGuard<'_, ()>> {
        match &self.compressed {
            Some(compressed) => Some(compressed.alone().await),
            None => None,
        }
    }

    /// Makes a change durable before it completes, if the cache mode says so.
    async fn changed(&self) -> Result<()> {
        match self.cache {
            CacheMode::Writethrough | CacheMode::Directsync => self.disk.flush().await,
            CacheMode::None | CacheMode::Writeback | CacheMode::Unsafe => Ok(()),
        }
    }
}

impl BlockDevice for View {
    fn size(&self) -> u64 {
        self.size
    }

    fn is_read_only(&self) -> bool {
        self.disk.is_read_only()
    }

    fn preferred_block(&self) -> u32 {
        BlockDevice::preferred_block(&*self.disk)
    }

    async fn read(&self, offset: u64, buf: IoBuf) -> Result<IoBuf> {
        self.disk.read(self.offset + offset, buf).await
    }

    async fn write(&self, offset: u64, buf: IoBuf) -> Result<IoBuf> {
        let at = self.offset + offset;
        let buf = if self.detect_zeroes != DetectZeroes::Off && is_zero(&buf) {
            let may_unmap = self.detect_zeroes == DetectZeroes::Unmap;
            let flags = ZeroFlags { may_unmap, only_fast: false };
            let _alone = self.alone().await;
            self.disk.write_zeroes(at, buf.len() as u64, flags).await?;
            buf
        } else if let Some(compressed) = &self.compressed {
            Box::pin(compressed.write(&*self.disk, at, &buf)).await?;
            buf
        } else {
            self.disk.write(at, buf).await?
        };
        self.changed().await?;
        Ok(buf)
    }

    async fn write_zeroes(&self, offset: u64, length: u64, flags: ZeroFlags) -> Result<()> {
        let flags = ZeroFlags { may_unmap: flags.may_unmap && self.discards, ..flags };
        let _alone = self.alone().await;
        self.disk.write_zeroes(self.offset + offset, length, flags).await?;
        self.changed().await
    }

    async fn discard(&self, offset: u64, length: u64) -> Result<()> {
        if !self.discards {
            return Ok(());
        }
        let _alone = self.alone().await;
        self.disk.discard(self.offset + offset, length).await?;
        self.changed().await
    }

    async fn flush(&self) -> Result<()> {
        if self.cache == CacheMode::Unsafe { Ok(()) } else { self.disk.flush().await }
    }

    async fn block_status(
        &self,
        offset: u64,
        length: u64,
        max_runs: usize,
    ) -> Result<Vec<BlockStatus>> {
        self.disk.block_status(self.offset + offset, length, max_runs).await
    }
}
