//! Discards.

use super::{Qcow2Writer, warn_of_leak};
use crate::device::ZeroFlags;
use crate::disk::Disk;
use isobath_chain::map::Source;
use isobath_image::placement::References;
use isobath_image::references::referenced;
use isobath_image::sabotage::{self, Sabotage};
use isobath_image::{DiskError, Result, always, invariant};
use isobath_qcow2::{ClusterIndex, Geometry, L2Entry};
use isobath_storage::{Host, IoBuf, Storage};
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
            let _start = self.keep_detected_raw(writer, offset..end, None).await?;
            let _pass = self.readers.epoch.enter();
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
        qcow2.note_write(offset..end).await?;
        let size = geometry.cluster_size();
        let first = offset.div_ceil(size);
        let last = if end == self.chain.active().size() { end.div_ceil(size) } else { end / size };
        if first >= last {
            return Ok(());
        }
        let mut at = first;
        while at < last {
            let next = last.min(at + CLUSTERS_AT_ONCE);
            writer.commit_if_much(&self.readers).await?;
            self.discard_clusters(at..next, end).await?;
            at = next;
        }
        Ok(())
    }

    /// See [`LiveDisk::make_empty`](crate::LiveDisk::make_empty). No request runs meanwhile, and the map is cleared
    /// afterwards.
    pub(crate) async fn make_empty(&self) -> Result<()> {
        let writer = self.writer()?;
        let qcow2 = match writer.qcow2() {
            Some(qcow2) if self.depth() > 1 && !qcow2.data_file_raw() => qcow2,
            _ => return Err(self.refused("only a qcow2 overlay can be emptied")),
        };
        let end = self.size();
        let clusters = end.div_ceil(qcow2.geometry().cluster_size());
        let mut at = 0;
        while at < clusters {
            let next = clusters.min(at + CLUSTERS_AT_ONCE);
            writer.commit_if_much(&self.readers).await?;
            let _range = {
                let size = qcow2.geometry().cluster_size();
                writer.ranges.lock(at * size..next * size).await
            };
            let _pass = self.readers.epoch.enter();
            self.discard_entries(qcow2, at..next, L2Entry::unallocated()).await?;
            at = next;
        }
        Ok(())
    }

    /// Turns the zero clusters of the active layer into what version 2 of the format has: no cluster, where nothing is
    /// below, or a cluster of zeroes.
    ///
    /// # Errors
    /// If the disk is read-only, not a qcow2 image, or has extended L2 entries; or the storage fails.
    pub async fn expand_zeroes(&self) -> Result<()> {
        let writer = self.writer()?;
        let Some(qcow2) = writer.qcow2() else {
            return Err(self.refused("only a qcow2 image has zero clusters"));
        };
        if qcow2.geometry().extended_l2() {
            // A cluster of which a part is zero may hold data besides.
            return Err(self.refused(
                "version 2 has no extended L2 entries: Cannot downgrade an image with them",
            ));
        }
        let (size, end) = (qcow2.geometry().cluster_size(), self.size());
        let step = CLUSTERS_AT_ONCE * size;
        let mut at = 0;
        while at < end {
            let next = end.min(at + step);
            writer.commit_if_much(&self.readers).await?;
            let mut zero = Vec::new();
            {
                let _pass = self.readers.epoch.enter();
                for extent in self.extents(at..next).await? {
                    if matches!(extent.source, Source::Zero(layer) if layer == self.active_index())
                    {
                        zero.push(extent.guest..extent.guest + extent.length);
                    }
                }
            }
            for range in zero {
                let whole = range.start.is_multiple_of(size)
                    && (range.end.is_multiple_of(size) || range.end == end);
                invariant(whole, self.name(), "clusters of zeroes are zero as a whole")?;
                if self.depth() == 1 && qcow2.alone() && !qcow2.data_file_raw() {
                    let clusters = range.start / size..range.end.div_ceil(size);
                    let _range =
                        writer.ranges.lock(clusters.start * size..clusters.end * size).await;
                    let _pass = self.readers.epoch.enter();
                    self.discard_entries(qcow2, clusters, L2Entry::unallocated()).await?;
                } else {
                    self.write_zero_data(range).await?;
                }
            }
            at = next;
        }
        Ok(())
    }

    /// Writes zeroes as data.
    async fn write_zero_data(&self, range: Range<u64>) -> Result<()> {
        let mut at = range.start;
        let mut buf = IoBuf::zeroed((range.end - at).min(1 << 20) as usize);
        while at < range.end {
            let length = (range.end - at).min(buf.len() as u64);
            let part = buf.split_to(length as usize);
            let mut part = self.write(at, part).await?;
            part.unsplit(buf);
            buf = part;
            at += length;
        }
        Ok(())
    }

    /// Discards whole clusters; the last may reach past `end` if the disk ends there.
    async fn discard_clusters(&self, mut clusters: Range<u64>, end: u64) -> Result<()> {
        let writer = self.writer()?;
        let qcow2 = writer.qcow2().ok_or(DiskError::ReadOnly)?;
        let geometry = qcow2.geometry();
        let size = geometry.cluster_size();
        let begins = clusters.end.checked_sub(1).is_some_and(|last| last * size < end);
        invariant(begins, self.name(), "a cluster that is discarded begins in the request")?;
        let hides = geometry.version() >= 3 || qcow2.alone();
        invariant(hides, self.name(), "what is discarded still hides what is below")?;
        let _range = writer.ranges.lock(clusters.start * size..clusters.end * size).await;
        let _pass = self.readers.epoch.enter();
        self.check_visible(clusters.start * size..end.min(clusters.end * size))?;
        if clusters.end * size > end && self.chain.active().visible() > end {
            // The disk has grown meanwhile: the last cluster holds more.
            clusters.end -= 1;
        }
        if clusters.is_empty() {
            return Ok(());
        }
        self.discard_entries(qcow2, clusters, discarded(&geometry, qcow2.alone())).await
    }

    /// Gives whole clusters this entry, and their space back, for a caller that holds the range and is inside the
    /// epoch.
    async fn discard_entries(
        &self,
        qcow2: &Qcow2Writer<H::File>,
        clusters: Range<u64>,
        new: L2Entry,
    ) -> Result<()> {
        let geometry = qcow2.geometry();
        let kind = new.kind(&geometry).ok();
        let kind = always(kind, self.name(), "the entry of a discarded cluster is valid")?;
        let empty = referenced(&geometry, &kind).is_empty();
        invariant(empty, self.name(), "the entry of a discarded cluster refers to nothing")?;
        for (cluster, entry) in self.entries_of(qcow2, clusters).await? {
            if entry == new {
                continue;
            }
            qcow2.ensure_tables(cluster..cluster + 1).await?;
            let mut releases = match entry.kind(&geometry) {
                Ok(kind) => referenced(&geometry, &kind),
                Err(error) => {
                    warn_of_leak(qcow2, cluster, &error);
                    Vec::new()
                }
            };
            if sabotage::is(Sabotage::EarlyReuse) {
                qcow2.release_early(&std::mem::take(&mut releases)).await?;
            }
            let references = References::to_nothing_new(&releases);
            self.record(qcow2, ClusterIndex::new(cluster), new, references)?;
            qcow2.note_discard();
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{CLUSTER, disk, must_violate, old_overlay, writers};
    use futures_executor::block_on;
    use isobath_chain::map::{Map, Slice, Unit};
    use isobath_qcow2::HostOffset;

    #[test]
    fn what_is_discarded_is_in_the_request_and_hides_what_is_below() {
        let disk = disk();
        let discard = |clusters, end| block_on(Box::pin(disk.discard_clusters(clusters, end)));
        discard(0..2, 2 * CLUSTER).unwrap();
        let begins = "a cluster that is discarded begins in the request";
        must_violate(discard(0..3, 2 * CLUSTER), begins);
        must_violate(discard(0..0, CLUSTER), begins);
        let old = old_overlay();
        let discard = block_on(Box::pin(old.discard_clusters(0..1, CLUSTER)));
        must_violate(discard, "what is discarded still hides what is below");
    }

    #[test]
    fn what_is_discarded_is_gone() {
        let disk = disk();
        let (_, qcow2) = writers(&disk);
        let discard = |new| block_on(Box::pin(disk.discard_entries(qcow2, 0..1, new)));
        discard(L2Entry::zero_plain()).unwrap();
        let empty = "the entry of a discarded cluster refers to nothing";
        must_violate(discard(L2Entry::data(HostOffset::new(5 << 16), true)), empty);
        let valid = "the entry of a discarded cluster is valid";
        must_violate(discard(L2Entry::data(HostOffset::new(512), true)), valid);
    }

    #[test]
    fn zeroes_are_whole_clusters() {
        let mut disk = disk();
        block_on(Box::pin(disk.expand_zeroes())).unwrap();
        // Units of a sector, of which one is zero.
        let map = Map::new(9, 1 << 20, disk.active_index());
        let zero = Unit::zero(disk.active_index());
        let units = std::array::from_fn(|n| if n == 3 { zero } else { Unit::ABSENT });
        assert!(map.insert(0, map.generation(0), Slice::new(&units, Vec::new())));
        disk.map = map.into();
        let expanded = block_on(Box::pin(disk.expand_zeroes()));
        must_violate(expanded, "clusters of zeroes are zero as a whole");
    }
}
