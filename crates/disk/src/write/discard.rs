//! Discards.

use crate::device::ZeroFlags;
use crate::disk::Disk;
use isobath_image::references::referenced;
use isobath_image::sabotage::{self, Sabotage};
use isobath_image::tables::References;
use isobath_image::{DiskError, Result};
use isobath_qcow2::{ClusterIndex, ClusterKind, Geometry, L2Entry};
use isobath_storage::{Host, Storage};
use std::ops::Range;

/// Clusters whose entries change under one lock.
const CLUSTERS_AT_ONCE: u64 = 32 << 10;

impl<H: Host> Disk<H> {
    /// Discards the whole clusters in a range. They read as zeroes afterwards; a version 2 overlay, which cannot hide
    /// its backing file's data, is left unchanged.
    pub async fn discard_range(&self, offset: u64, length: u64) -> Result<()> {
        let writer = self.writer()?;
        if length == 0 {
            return Ok(());
        }
        let end = offset + length;
        let Some(qcow2) = writer.qcow2() else {
            let _pass = self.readers.gate.enter();
            self.check_visible(offset..end)?;
            return Ok(self.chain.active().storage().discard(offset, length).await?);
        };
        if qcow2.data_file_raw() {
            let flags = ZeroFlags { may_unmap: true, only_fast: false };
            return self.zero_range(offset, length, flags).await;
        }
        let geometry = qcow2.geometry();
        if geometry.version() < 3 && !qcow2.alone() {
            return Ok(());
        }
        let size = geometry.cluster_size();
        let first = offset.div_ceil(size);
        let last = if end == self.chain.active().size() { end.div_ceil(size) } else { end / size };
        if first >= last {
            return Ok(());
        }
        qcow2.note_write(first * size..end).await?;
        let mut at = first;
        while at < last {
            let next = last.min(at + CLUSTERS_AT_ONCE);
            writer.commit_if_much(&self.readers).await?;
            self.discard_clusters(at..next, end).await?;
            at = next;
        }
        Ok(())
    }

    /// Discards whole clusters; the last may reach past `end` if the disk ends there.
    async fn discard_clusters(&self, mut clusters: Range<u64>, end: u64) -> Result<()> {
        let writer = self.writer()?;
        let qcow2 = writer.qcow2().ok_or(DiskError::ReadOnly)?;
        let geometry = qcow2.geometry();
        let size = geometry.cluster_size();
        let _range = writer.ranges.lock(clusters.start * size..clusters.end * size).await;
        let _pass = self.readers.gate.enter();
        self.check_visible(clusters.start * size..end.min(clusters.end * size))?;
        if clusters.end * size > end && self.chain.active().visible() > end {
            // The disk has grown meanwhile: the last cluster holds more.
            clusters.end -= 1;
        }
        if clusters.is_empty() {
            return Ok(());
        }
        let entries = qcow2.entries(clusters.clone()).await?;
        for (cluster, entry) in clusters.zip(entries) {
            let kind =
                entry.kind(&geometry).map_err(|error| qcow2.metadata.layer.format_error(error))?;
            let new = discarded(&geometry, qcow2.alone());
            let nothing_here = matches!(
                kind,
                ClusterKind::Unallocated | ClusterKind::Subclusters { offset: None, .. }
            );
            if new == entry || (qcow2.alone() && nothing_here) {
                continue;
            }
            qcow2.ensure_tables(cluster..cluster + 1).await?;
            let mut releases = referenced(&geometry, &kind);
            if sabotage::is(Sabotage::EarlyReuse) {
                qcow2.metadata.alloc.release(&std::mem::take(&mut releases)).await?;
            }
            let references = References { released: &releases, ..References::default() };
            self.record(qcow2, ClusterIndex::new(cluster), new, references)?;
            qcow2.metadata.tables.mark_discarded();
        }
        Ok(())
    }
}

/// The entry of a discarded cluster.
fn discarded(geometry: &Geometry, alone: bool) -> L2Entry {
    match (alone, geometry.extended_l2()) {
        (true, _) => L2Entry::unallocated(),
        (false, true) => L2Entry::subclustered(None, false, 0, u32::MAX),
        (false, false) => L2Entry::zero_plain(),
    }
}
