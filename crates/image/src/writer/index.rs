//! The area of a direct-access index in the image's file.

use super::Qcow2Writer;
use crate::Result;
use isobath_qcow2::{HostCluster, HostOffset};
use isobath_storage::{IoBuf, Storage, ZeroMode};
use std::ops::Range;

/// Bytes written at once.
const PIECE: usize = 1 << 20;

impl<S: Storage> Qcow2Writer<S> {
    /// The place where an index goes: past everything ever used.
    pub async fn index_place(&self) -> Result<(HostCluster, HostOffset)> {
        self.metadata.alloc.end().await
    }

    /// Refuses an area that the image cannot have.
    pub async fn check_index_area(&self, area: &Range<u64>) -> Result<()> {
        self.metadata.alloc.need_area(area).await
    }

    /// Writes an index into its area, durably. Returns clusters to [release](Self::release_clusters) once the header
    /// points to the index. The caller has ensured that no commit runs.
    pub async fn write_index(&self, area: Range<u64>, bytes: &[u8]) -> Result<Vec<HostCluster>> {
        let alloc = &self.metadata.alloc;
        let mut at = area.start << self.geometry().cluster_bits();
        let mut released = alloc.append_area(area).await?;
        released.extend(alloc.write_structure().await?);
        alloc.write_blocks().await?;
        let storage = self.metadata.layer.storage();
        storage.flush().await?;
        for piece in bytes.chunks(PIECE) {
            storage.write_at(at, IoBuf::copy_of(piece)).await?;
            at += piece.len() as u64;
        }
        storage.flush().await?;
        Ok(released)
    }

    /// Releases references to clusters, for a caller that has ensured that nothing durable uses them.
    pub async fn release_clusters(&self, clusters: &[HostCluster]) -> Result<()> {
        self.metadata.alloc.release(clusters).await
    }

    /// Frees the area of an index that nothing refers to, and zeroes it as it was before.
    pub async fn free_index(&self, area: Range<u64>) -> Result<()> {
        let alloc = &self.metadata.alloc;
        if !alloc.is_kept(&area).await {
            return Ok(());
        }
        let storage = self.metadata.layer.storage();
        let size = self.geometry().cluster_size();
        let zero = ZeroMode { may_unmap: true, only_fast: false };
        // QEMU may have taken some of it for data.
        for cluster in area.clone() {
            if alloc.refcount(HostCluster::new(cluster)).await? == 0 {
                storage.write_zeroes(cluster * size, size, zero).await?;
            }
        }
        storage.flush().await?;
        alloc.forget_area(&area).await;
        Ok(())
    }
}
