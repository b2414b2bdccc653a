//! QEMU's filter `compress`: all writes are compressed, in whole clusters.

use crate::host::ImageHost;
use isobath_disk::{BlockDevice, Disk, Layer, LiveDisk, Result};
use isobath_storage::{IoBuf, Storage};
use isobath_sync::{AsyncMutex, AsyncMutexGuard};

/// A disk with compressed clusters.
pub(crate) trait WithCompressed: BlockDevice {
    /// Writes one cluster, compressed if that makes it smaller.
    async fn write_compressed(&self, offset: u64, cluster: IoBuf) -> Result<IoBuf>;
}

impl WithCompressed for Disk<ImageHost> {
    async fn write_compressed(&self, offset: u64, cluster: IoBuf) -> Result<IoBuf> {
        Self::write_compressed(self, offset, cluster).await
    }
}

impl WithCompressed for LiveDisk<ImageHost> {
    async fn write_compressed(&self, offset: u64, cluster: IoBuf) -> Result<IoBuf> {
        Self::write_compressed(self, offset, cluster).await
    }
}

/// Compresses all writes.
pub(crate) struct Compressed {
    cluster_size: u64,
    /// Held during every change: a write of a part of a cluster reads the rest and writes the whole cluster.
    alone: AsyncMutex<()>,
}

impl Compressed {
    /// Compression for a disk with this active layer.
    ///
    /// # Errors
    /// If its image cannot hold compressed clusters.
    pub(crate) fn of<S: Storage>(active: Option<&Layer<S>>) -> std::result::Result<Self, String> {
        let geometry = active.and_then(|layer| Some(layer.as_qcow2()?.geometry));
        match geometry.filter(|geometry| !geometry.has_data_file()) {
            Some(_) if active.is_some_and(Layer::is_encrypted) => {
                Err("Compression and encryption not supported at the same time".into())
            }
            Some(geometry) => {
                let cluster_size = geometry.cluster_size();
                Ok(Self { cluster_size, alone: AsyncMutex::default() })
            }
            None => Err("Compression is not supported for this image".into()),
        }
    }

    /// Keeps writes of whole clusters from running concurrently with another change.
    pub(crate) async fn alone(&self) -> AsyncMutexGuard<'_, ()> {
        self.alone.lock().await
    }

    /// Writes `buf` at `offset`, compressed.
    ///
    /// # Errors
    /// As the disk's writes.
    pub(crate) async fn write(
        &self,
        disk: &impl WithCompressed,
        offset: u64,
        buf: &IoBuf,
    ) -> Result<()> {
        let end = offset + buf.len() as u64;
        let mut at = offset;
        while at < end {
            let start = at - at % self.cluster_size;
            let limit = (start + self.cluster_size).min(disk.size());
            let until = end.min(limit);
            let bytes = &buf[(at - offset) as usize..(until - offset) as usize];
            let _alone = self.alone.lock().await;
            let cluster = if bytes.len() as u64 == limit - start {
                IoBuf::copy_of(bytes)
            } else {
                let rest = IoBuf::zeroed((limit - start) as usize);
                let mut cluster = disk.read(start, rest).await?;
                cluster[(at - start) as usize..][..bytes.len()].copy_from_slice(bytes);
                cluster
            };
            disk.write_compressed(start, cluster).await?;
            at = until;
        }
        Ok(())
    }
}
