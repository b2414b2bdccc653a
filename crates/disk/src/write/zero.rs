//! Zero-writes.

use super::Qcow2Writer;
use crate::device::ZeroFlags;
use crate::disk::Disk;
use isobath_image::placement::References;
use isobath_image::references::referenced;
use isobath_image::{DiskError, Result, always, invariant, violated};
use isobath_qcow2::{ClusterIndex, ClusterKind, Geometry, HostCluster, L2Entry};
use isobath_storage::{Host, IoBuf, Storage, ZeroMode};
use std::io;
use std::ops::Range;
use std::path::Path;

/// The most zeroes written as data at once, in bytes.
const CHUNK: u64 = 1 << 20;
/// Clusters whose entries change under one lock.
const CLUSTERS_AT_ONCE: u64 = 32 << 10;

impl<H: Host> Disk<H> {
    pub(crate) async fn zero_range(
        &self,
        offset: u64,
        length: u64,
        flags: ZeroFlags,
    ) -> Result<()> {
        let writer = self.writer()?;
        if length == 0 {
            return Ok(());
        }
        let active = self.chain.active();
        let mode = ZeroMode { may_unmap: flags.may_unmap, only_fast: flags.only_fast };
        let Some(qcow2) = writer.qcow2() else {
            let _start = self.keep_detected_raw(writer, offset..offset + length, None).await?;
            let _pass = self.readers.epoch.enter();
            self.check_visible(offset..offset + length)?;
            return zero_file(&**active.storage(), offset, length, mode).await;
        };
        qcow2.note_write(offset..offset + length).await?;
        let geometry = qcow2.geometry();
        let end = offset + length;
        if geometry.version() < 3 && !qcow2.alone() {
            return self.zero_as_data(offset..end, flags).await;
        }
        // The range of one bit or entry; version 2 has neither, but may have no cluster.
        let granule = geometry.subcluster_size();
        let (first, mut last) = (offset.next_multiple_of(granule), end / granule * granule);
        if end == active.visible() {
            last = end.next_multiple_of(granule);
        }
        if first > last {
            return self.zero_part(offset..end, flags).await;
        }
        self.zero_part(offset..first.min(end), flags).await?;
        let step = CLUSTERS_AT_ONCE * geometry.cluster_size();
        let mut at = first;
        while at < last {
            // A first step that ends at a cluster boundary keeps the others aligned.
            let next = last.min(at / step * step + step);
            writer.commit_if_much(&self.readers).await?;
            if !self.zero_entries(at..next, end, mode).await? {
                return Box::pin(self.zero_range(at, end - at, flags)).await;
            }
            at = next;
        }
        self.zero_part(last.min(end)..end, flags).await
    }

    /// Writes zeroes as data: the active layer has them then, whatever is below.
    async fn zero_as_data(&self, range: Range<u64>, flags: ZeroFlags) -> Result<()> {
        if flags.only_fast {
            return Err(DiskError::Unsupported(
                "zeroes can only be written as data here, which would be slow".into(),
            ));
        }
        let mut at = range.start;
        while at < range.end {
            let next = range.end.min(at + CHUNK);
            self.write_range(at, IoBuf::zeroed((next - at) as usize)).await?;
            at = next;
        }
        Ok(())
    }

    /// Makes a part of a granule zero: by its entry, if the active layer has no data there and the rest is known to be
    /// zero, else as data.
    async fn zero_part(&self, part: Range<u64>, flags: ZeroFlags) -> Result<()> {
        if part.is_empty() || self.zero_whole_granule(&part, flags).await? {
            return Ok(());
        }
        self.zero_as_data(part, flags).await
    }

    /// Marks the granule with this part as zero: the active layer has zeroes then, whatever is below. Returns `false`,
    /// without changes, if the layer has data there, or the rest may not be zero.
    async fn zero_whole_granule(&self, part: &Range<u64>, flags: ZeroFlags) -> Result<bool> {
        let writer = self.writer()?;
        let qcow2 = writer.qcow2().ok_or(DiskError::ReadOnly)?;
        let geometry = qcow2.geometry();
        let (size, granule) = (geometry.cluster_size(), geometry.subcluster_size());
        let start = part.start / granule * granule;
        let within = part.end <= start + granule;
        invariant(within, self.name(), "a part of a granule lies in it")?;
        let cluster = start / size;
        {
            // A write in place is in nobody's way: the cluster is not locked for it.
            let _pass = self.readers.epoch.enter();
            if self.has_data(qcow2, start).await? {
                return Ok(false);
            }
        }
        writer.commit_if_much(&self.readers).await?;
        let _range = writer.ranges.lock(cluster * size..(cluster + 1) * size).await;
        let _pass = self.readers.epoch.enter();
        self.check_visible(part.clone())?;
        let end = self.chain.active().visible().min(start + granule);
        if self.has_data(qcow2, start).await? {
            return Ok(false);
        }
        for rest in [start..part.start, part.end..end] {
            let length = rest.end.saturating_sub(rest.start);
            let known = self.status_of(rest.start, length, usize::MAX).await?;
            let zero: u64 = known.iter().filter(|run| run.zero).map(|run| run.length).sum();
            if zero < length {
                return Ok(false);
            }
        }
        if qcow2.data_file_raw() {
            let mode = ZeroMode { may_unmap: false, only_fast: flags.only_fast };
            zero_file(&**self.chain.active().data(), start, end - start, mode).await?;
        }
        self.zero_clusters(qcow2, start..start + granule, false).await?;
        Ok(true)
    }

    /// Whether the active layer has data in the granule at `start`. The caller is inside the epoch.
    async fn has_data(&self, qcow2: &Qcow2Writer<H::File>, start: u64) -> Result<bool> {
        let geometry = qcow2.geometry();
        let size = geometry.cluster_size();
        let entry = qcow2.entry(ClusterIndex::new(start / size)).await?;
        match entry.kind(&geometry) {
            Ok(ClusterKind::Data { .. } | ClusterKind::Compressed(_)) => Ok(true),
            Ok(ClusterKind::Subclusters { allocated, .. }) => {
                Ok(allocated >> (start % size / geometry.subcluster_size()) & 1 == 1)
            }
            Ok(_) => Ok(false),
            Err(error) => Err(qcow2.metadata.layer.format_error(error)),
        }
    }

    /// Marks whole granules as zero in the tables. `end` is the end of the part to be zeroed; the range may extend to
    /// the end of its granule if the disk ends there. Returns `false` if it no longer does.
    async fn zero_entries(&self, range: Range<u64>, end: u64, mode: ZeroMode) -> Result<bool> {
        let writer = self.writer()?;
        let qcow2 = writer.qcow2().ok_or(DiskError::ReadOnly)?;
        let geometry = qcow2.geometry();
        let size = geometry.cluster_size();
        let clusters = range.start / size..range.end.div_ceil(size);
        let _range = writer.ranges.lock(clusters.start * size..clusters.end * size).await;
        let _pass = self.readers.epoch.enter();
        let visible = self.chain.active().visible();
        self.check_visible(range.start..range.end.min(end))?;
        if range.end > end && visible > end {
            return Ok(false);
        }
        if qcow2.data_file_raw() {
            let end = range.end.min(visible);
            let data = &**self.chain.active().data();
            zero_file(data, range.start, end - range.start, mode).await?;
        }
        self.zero_clusters(qcow2, range, mode.may_unmap).await?;
        Ok(true)
    }

    /// As [`zero_entries`](Self::zero_entries), for a caller that holds the range in whole clusters, is inside the
    /// epoch, and has checked that nothing past the disk's end is affected.
    pub(super) async fn zero_clusters(
        &self,
        qcow2: &Qcow2Writer<H::File>,
        range: Range<u64>,
        may_unmap: bool,
    ) -> Result<()> {
        let geometry = qcow2.geometry();
        let (size, granule) = (geometry.cluster_size(), geometry.subcluster_size());
        let whole = range.start.is_multiple_of(granule) && range.end.is_multiple_of(granule);
        invariant(whole, self.name(), "only whole subclusters are marked as zeroes")?;
        let hides = geometry.version() >= 3 || qcow2.alone();
        invariant(hides, self.name(), "what is marked as zeroes hides what is below")?;
        let clusters = range.start / size..range.end.div_ceil(size);
        qcow2.ensure_tables(clusters.clone()).await?;
        for (cluster, entry) in self.entries_of(qcow2, clusters).await? {
            let start = cluster * size;
            let part = range.start.max(start) - start..range.end.min(start + size) - start;
            if geometry.extended_l2() && entry.is_compressed() && part != (0..size) {
                // The entry has no subclusters: make it a plain cluster first.
                self.expand_compressed(qcow2, cluster, &part).await?;
                continue;
            }
            let kind = match entry.kind(&geometry) {
                Ok(kind) => kind,
                Err(error) if part == (0..size) => {
                    super::warn_of_leak(qcow2, cluster, &error);
                    ClusterKind::Unallocated
                }
                Err(error) => return Err(qcow2.metadata.layer.format_error(error)),
            };
            // The next write would go in place to a cluster of a zone with an embedded record.
            let data = qcow2.metadata.guest_io();
            let in_zone = kind.host_cluster().map(|at| geometry.host_cluster_of(at));
            let in_zone = in_zone.is_some_and(|cluster| data.is_in_zone(cluster));
            let may_unmap = (may_unmap || in_zone) && !qcow2.data_file_raw();
            let (new, releases) = zeroed(&geometry, kind, &part, may_unmap);
            if cfg!(debug_assertions) {
                check_zeroed(&geometry, &kind, new, &releases, self.name())?;
            }
            if new != entry {
                let references = References::to_nothing_new(&releases);
                self.record(qcow2, ClusterIndex::new(cluster), new, references)?;
            }
        }
        Ok(())
    }
}

/// Checks that zeroes keep or release each cluster to which the old entry refers.
fn check_zeroed(
    geometry: &Geometry,
    old: &ClusterKind,
    new: L2Entry,
    releases: &[HostCluster],
    name: &Path,
) -> Result<()> {
    let new = always(new.kind(geometry).ok(), name, "an entry of zeroes is valid")?;
    let mut after = referenced(geometry, &new);
    after.extend_from_slice(releases);
    let same = after == referenced(geometry, old);
    invariant(same, name, "zeroes keep or release each cluster that an entry refers to")
}

/// The entry of a cluster in which `part`, whole subclusters, reads as zeroes from now on, and the references released.
fn zeroed(
    geometry: &Geometry,
    kind: ClusterKind,
    part: &Range<u64>,
    may_unmap: bool,
) -> (L2Entry, Vec<HostCluster>) {
    if let ClusterKind::Subclusters { offset, copied, allocated, zero } = kind {
        let size = geometry.subcluster_size();
        let (first, last) = (part.start / size, part.end / size);
        if first >= last || last > u64::from(geometry.subclusters_per_cluster()) {
            violated("a part of a cluster that is zeroed has subclusters of it");
        }
        let mask = (((1_u64 << (last - first)) - 1) << first) as u32;
        let (allocated, zero) = (allocated & !mask, zero | mask);
        return match offset {
            Some(_) if allocated == 0 && (may_unmap || !copied) => {
                (L2Entry::subclustered(None, false, 0, zero), referenced(geometry, &kind))
            }
            _ => (L2Entry::subclustered(offset, copied, allocated, zero), Vec::new()),
        };
    }
    if geometry.extended_l2() {
        return (L2Entry::subclustered(None, false, 0, u32::MAX), referenced(geometry, &kind));
    }
    if geometry.version() < 3 {
        return (L2Entry::unallocated(), referenced(geometry, &kind));
    }
    match kind {
        ClusterKind::Data { offset, copied: true }
        | ClusterKind::ZeroAllocated { offset, copied: true }
            if !may_unmap =>
        {
            (L2Entry::zero_allocated(offset, true), Vec::new())
        }
        _ => (L2Entry::zero_plain(), referenced(geometry, &kind)),
    }
}

/// Writes zeroes to a file. Its refusal of what would be slow is the request's failure, not the storage's.
async fn zero_file<S: Storage>(file: &S, at: u64, length: u64, mode: ZeroMode) -> Result<()> {
    match file.write_zeroes(at, length, mode).await {
        Err(error) if mode.only_fast && error.kind() == io::ErrorKind::Unsupported => {
            Err(DiskError::Unsupported(error.to_string()))
        }
        done => Ok(done?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{CLUSTER, disk, must_panic, must_violate, old_overlay, writers};
    use futures_executor::block_on;
    use futures_util::FutureExt;
    use isobath_qcow2::HostOffset;

    const PLACE: HostOffset = HostOffset::new(5 << 16);

    #[test]
    fn zeroes_are_marked_by_whole_granules_and_hide_what_is_below() {
        let disk = disk();
        let (_, qcow2) = writers(&disk);
        let zero = |range| block_on(Box::pin(disk.zero_clusters(qcow2, range, true)));
        zero(0..CLUSTER).unwrap();
        let whole = "only whole subclusters are marked as zeroes";
        must_violate(zero(512..CLUSTER), whole);
        must_violate(zero(0..CLUSTER - 512), whole);
        let old = old_overlay();
        let (_, qcow2) = writers(&old);
        let zero = block_on(Box::pin(old.zero_clusters(qcow2, 0..CLUSTER, true)));
        must_violate(zero, "what is marked as zeroes hides what is below");
    }

    #[test]
    fn a_part_lies_in_one_granule() {
        let disk = disk();
        let flags = ZeroFlags { may_unmap: true, only_fast: false };
        let zero = |part: Range<u64>| block_on(Box::pin(disk.zero_whole_granule(&part, flags)));
        assert!(zero(512..CLUSTER).unwrap());
        must_violate(zero(512..CLUSTER + 512), "a part of a granule lies in it");
    }

    #[test]
    fn zeroes_over_data_wait_for_their_own_bytes_only() {
        let disk = disk();
        let (writer, _) = writers(&disk);
        let data = IoBuf::copy_of(&vec![1; CLUSTER as usize]);
        let _ = block_on(Box::pin(disk.write_range(0, data))).unwrap();
        let _held = block_on(writer.ranges.lock(0..512));
        let flags = ZeroFlags { may_unmap: true, only_fast: false };
        let zero = |offset| Box::pin(disk.zero_range(offset, 4096, flags)).now_or_never();
        zero(4096).expect("others have no part in these bytes").unwrap();
        assert!(zero(0).is_none(), "another has a part in these bytes");
    }

    #[test]
    fn zeroes_account_for_each_cluster() {
        let geometry = Geometry::new(3, 16, 4, false, false).unwrap();
        let old = ClusterKind::Data { offset: PLACE, copied: true };
        let check = |new, releases: &[u64]| {
            let releases: Vec<_> = releases.iter().copied().map(HostCluster::new).collect();
            check_zeroed(&geometry, &old, new, &releases, Path::new("disk"))
        };
        check(L2Entry::zero_plain(), &[5]).unwrap();
        check(L2Entry::zero_allocated(PLACE, true), &[]).unwrap();
        let all = "zeroes keep or release each cluster that an entry refers to";
        must_violate(check(L2Entry::zero_plain(), &[]), all);
        must_violate(check(L2Entry::zero_plain(), &[6]), all);
        must_violate(check(L2Entry::zero_allocated(PLACE, true), &[5]), all);
        let odd = L2Entry::data(HostOffset::new(512), true);
        must_violate(check(odd, &[5]), "an entry of zeroes is valid");
    }

    #[test]
    fn a_part_has_subclusters() {
        let geometry = Geometry::new(3, 16, 4, true, false).unwrap();
        let kind = ClusterKind::Subclusters { offset: None, copied: false, allocated: 0, zero: 0 };
        let zero = |part| zeroed(&geometry, kind, &part, true);
        assert_eq!(zero(2048..6144).0, L2Entry::subclustered(None, false, 0, 6));
        let has = "a part of a cluster that is zeroed has subclusters of it";
        must_panic(|| zero(2048..2048), has);
        must_panic(|| zero(0..CLUSTER + 2048), has);
    }
}
