//! Preallocation of clusters.

use crate::disk::Disk;
use isobath_chain::create::Preallocation;
use isobath_image::placement::{References, write_zeroes};
use isobath_image::references::{data_place, referenced};
use isobath_image::writer::{Qcow2Writer, Writer};
use isobath_image::{Result, invariant};
use isobath_qcow2::{ClusterIndex, ClusterKind, HostOffset, L2Entry};
use isobath_storage::{Host, Storage, ZeroMode};
use std::ops::Range;

impl<H: Host> Disk<H> {
    /// Allocates the clusters of `new` that are not allocated yet; the one where the disk ended only without a backing
    /// file. All of them read as zeroes, except for contents before `kept` in a data file.
    pub(super) async fn preallocate(
        &self,
        writer: &Writer<H::File>,
        qcow2: &Qcow2Writer<H::File>,
        new: Range<u64>,
        mode: Preallocation,
        kept: u64,
    ) -> Result<()> {
        let geometry = qcow2.geometry();
        if self.chain.active().is_encrypted() && geometry.version() < 3 {
            return Err(self.refused(
                "clusters of an encrypted image can be preallocated only in version 3 (compat=1.1)",
            ));
        }
        let size = geometry.cluster_size();
        // The cluster where the disk ended has no place yet, if nothing was written there. With a backing file it would
        // have to be copied first, and in a data file it has its place.
        let header = self.chain.active().header();
        let alone = header.is_some_and(|header| header.backing_file.is_none());
        let alone = alone && !geometry.has_data_file();
        let mut at = if alone { new.start / size } else { new.start.div_ceil(size) };
        let end = new.end.div_ceil(size);
        while at < end {
            // One table at a time.
            let next =
                end.min(at / geometry.l2_entries() * geometry.l2_entries() + geometry.l2_entries());
            writer.commit_if_much(&self.readers).await?;
            self.preallocate_clusters(writer, qcow2, at..next, mode, kept).await?;
            at = next;
        }
        Ok(())
    }

    async fn preallocate_clusters(
        &self,
        writer: &Writer<H::File>,
        qcow2: &Qcow2Writer<H::File>,
        clusters: Range<u64>,
        mode: Preallocation,
        kept: u64,
    ) -> Result<()> {
        let geometry = qcow2.geometry();
        let size = geometry.cluster_size();
        let bytes = clusters.start * size..clusters.end * size;
        let count = clusters.end - clusters.start;
        let _range = writer.ranges.lock(bytes.clone()).await;
        let _pass = self.readers.epoch.enter();
        qcow2.ensure_tables(clusters.clone()).await?;
        let entries = qcow2.entries(clusters.clone()).await?;
        let all = entries.len() as u64 == count;
        invariant(all, self.name(), "there is an entry for each cluster to be preallocated")?;
        let mut wanted = Vec::new();
        for (cluster, entry) in clusters.zip(entries) {
            let kind = entry.kind(&geometry).map_err(|e| qcow2.metadata.layer.format_error(e))?;
            if reads_as_zero(&kind) {
                wanted.push((cluster, kind));
            }
        }
        if wanted.is_empty() {
            return Ok(());
        }
        let mut placement = qcow2.metadata.placement();
        let host = if geometry.has_data_file() {
            bytes.start..bytes.end.min(self.chain.active().visible())
        } else {
            let run = placement.allocate_adjacent(wanted.len() as u64).await?;
            let each = run.count == wanted.len() as u64;
            invariant(each, self.name(), "each preallocated cluster gets a place")?;
            let start = run.start.get() << geometry.cluster_bits();
            start..start + run.count * size
        };
        let data = self.chain.active().data();
        fill(&**data, host.start.max(kept)..host.end, mode).await?;
        let place = |step: u64, cluster: u64| {
            if geometry.has_data_file() { cluster * size } else { host.start + step * size }
        };
        for (step, (cluster, kind)) in (0..).zip(&wanted) {
            let filled = host.contains(&place(step, *cluster));
            invariant(filled, self.name(), "a preallocated cluster lies in what was filled")?;
            qcow2.check_releases(&referenced(&geometry, kind))?;
        }
        let placed = placement.placed_unchecked(vec![host.clone()]);
        for (step, (cluster, kind)) in (0..).zip(wanted) {
            let host = HostOffset::new(place(step, cluster));
            // Zeroes in the file are not zeroes for the guest if the image is encrypted.
            let entry = match (geometry.extended_l2(), self.chain.active().is_encrypted()) {
                (true, false) => L2Entry::subclustered(Some(host), true, u32::MAX, 0),
                (true, true) => L2Entry::subclustered(Some(host), true, 0, u32::MAX),
                (false, false) => L2Entry::data(host, true),
                (false, true) => L2Entry::zero_allocated(host, true),
            };
            let releases = referenced(&geometry, &kind);
            let taken = [geometry.host_cluster_of(host)];
            let taken: &[_] = if geometry.has_data_file() { &[] } else { &taken };
            let made = entry.kind(&geometry).map_err(|e| qcow2.metadata.layer.format_error(e))?;
            // Zeroes at the start of a data file have no place: their entry is that of zeroes without one.
            let references = match data_place(&geometry, &made) {
                Some(_) => placed.references(taken, &releases, false),
                None => References::to_nothing_new(&releases),
            };
            self.record(qcow2, ClusterIndex::new(cluster), entry, references)?;
        }
        Ok(())
    }
}

/// Whether a cluster that no layer below has reads as zeroes.
fn reads_as_zero(kind: &ClusterKind) -> bool {
    matches!(
        kind,
        ClusterKind::Unallocated
            | ClusterKind::ZeroPlain
            | ClusterKind::ZeroAllocated { .. }
            | ClusterKind::Subclusters { allocated: 0, .. }
    )
}

/// Makes a new part of a file read as zeroes, with as much space allocated as `mode` requires.
pub(super) async fn fill<S: Storage>(
    storage: &S,
    range: Range<u64>,
    mode: Preallocation,
) -> Result<()> {
    if range.is_empty() {
        return Ok(());
    }
    if mode != Preallocation::Full {
        let may_unmap = mode == Preallocation::Metadata;
        let zeroes = ZeroMode { may_unmap, only_fast: false };
        return Ok(storage.write_zeroes(range.start, range.end - range.start, zeroes).await?);
    }
    write_zeroes(storage, range).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{CLUSTER, SIZE, disk, disk_of, must_violate, writers};
    use futures_executor::block_on;
    use isobath_chain::create::NewDisk;
    use isobath_image::sabotage::Sabotage;
    use isobath_storage::memory::MemoryHost;

    fn preallocate(disk: &Disk<MemoryHost>, clusters: Range<u64>) -> Result<()> {
        let (writer, qcow2) = writers(disk);
        let mode = Preallocation::Metadata;
        block_on(Box::pin(disk.preallocate_clusters(writer, qcow2, clusters, mode, 0)))
    }

    #[test]
    #[cfg(debug_assertions)]
    fn each_cluster_has_an_entry_and_gets_a_place() {
        for (defect, what) in [
            (Sabotage::LostEntry, "there is an entry for each cluster to be preallocated"),
            (Sabotage::LongRun, "each preallocated cluster gets a place"),
        ] {
            let disk = disk();
            preallocate(&disk, 0..2).unwrap();
            let _broken = defect.begin();
            must_violate(preallocate(&disk, 2..4), what);
        }
    }

    #[test]
    fn a_preallocated_cluster_of_a_data_file_lies_in_the_disk() {
        let disk = disk_of(&NewDisk::new(SIZE).data_file("data"));
        let end = SIZE / CLUSTER;
        preallocate(&disk, end - 1..end).unwrap();
        let filled = "a preallocated cluster lies in what was filled";
        must_violate(preallocate(&disk, end - 2..end + 1), filled);
    }
}
