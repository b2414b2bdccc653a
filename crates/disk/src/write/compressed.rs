//! Compressed clusters: writing them, and turning them into plain ones.

use super::Qcow2Writer;
use crate::disk::Disk;
use isobath_image::guest_io::Destination;
use isobath_image::references::referenced;
use isobath_image::{DiskError, Result, always, invariant};
use isobath_qcow2::compress::compress;
use isobath_qcow2::{ClusterIndex, ClusterKind, Geometry, HostCluster, L2Entry};
use isobath_storage::{Host, IoBuf};
use isobath_sync::order::in_order;
use std::ops::Range;
use std::path::Path;

impl<H: Host> Disk<H> {
    /// Writes one cluster, compressed if that makes it smaller. `offset` is a cluster's start; the buffer holds a
    /// cluster, or the part of the last cluster that is within the disk.
    ///
    /// # Errors
    /// As [`write`](Self::write); [`DiskError::Unsupported`] if the range is not a cluster, or the image cannot
    /// hold compressed clusters.
    pub async fn write_compressed(&self, offset: u64, buf: IoBuf) -> Result<IoBuf> {
        self.check_range(offset, buf.len() as u64)?;
        let _stop = self.stop_on_panic();
        in_order(async { self.or_mark_corrupt(self.compress_range(offset, buf).await).await }).await
    }

    async fn compress_range(&self, offset: u64, buf: IoBuf) -> Result<IoBuf> {
        let writer = self.writer()?;
        let Some(qcow2) = writer.qcow2() else {
            return Err(DiskError::Unsupported("a raw image cannot be compressed".into()));
        };
        let geometry = qcow2.geometry();
        let size = geometry.cluster_size();
        if geometry.has_data_file() {
            return Err(DiskError::Unsupported(
                "an image with an external data file cannot be compressed".into(),
            ));
        }
        if qcow2.metadata.layer.is_encrypted() {
            return Err(DiskError::Unsupported(
                "Compression and encryption not supported at the same time".into(),
            ));
        }
        let reaches_end = offset + buf.len() as u64 == self.size();
        if !offset.is_multiple_of(size) || (buf.len() as u64 != size && !reaches_end) {
            return Err(DiskError::Unsupported(format!(
                "compressed writes must cover whole clusters of {size} bytes"
            )));
        }
        let compression = match qcow2.metadata.layer.header() {
            Some(header) => header.compression_type,
            None => return Err(DiskError::ReadOnly),
        };
        let packed = if buf.len() as u64 == size {
            compress(compression, &buf)
        } else {
            let mut padded = IoBuf::zeroed(size as usize);
            padded[..buf.len()].copy_from_slice(&buf);
            compress(compression, &padded)
        };
        let Some(packed) = packed else { return self.write_range(offset, buf).await };
        qcow2.note_write(offset..offset + buf.len() as u64).await?;
        writer.commit_if_much(&self.readers).await?;
        let cluster = ClusterIndex::new(offset / size);
        let range = writer.ranges.lock(offset..offset + size).await;
        let pass = self.readers.epoch.enter();
        let end = offset + buf.len() as u64;
        self.check_visible(offset..end)?;
        if end < offset + size && end != self.chain.active().visible() {
            // The disk has grown meanwhile: the cluster holds more.
            drop((pass, range));
            return self.write_range(offset, buf).await;
        }
        qcow2.ensure_tables(cluster.get()..cluster.get() + 1).await?;
        let old = qcow2.entry(cluster).await?;
        let kind = old.kind(&geometry).map_err(|error| qcow2.metadata.layer.format_error(error))?;
        let length = packed.len() as u64;
        check_packed(length, size, self.name())?;
        let released = &referenced(&geometry, &kind);
        qcow2.check_releases(released)?;
        let mut placement = qcow2.metadata.placement();
        let host = placement.allocate_packed(length).await?;
        let taken = placement.clusters().to_vec();
        let packed = vec![IoBuf::copy_of(&packed)];
        let (_, written) =
            qcow2.metadata.guest_io().write_to(Destination::New, host.get(), packed).await?;
        let entry = L2Entry::compressed(host, length, geometry.cluster_bits())
            .map_err(|error| qcow2.metadata.layer.format_error(error))?;
        check_claimed(&geometry, entry, &taken, self.name())?;
        let placed = placement.placed([written]);
        self.record(qcow2, cluster, entry, placed.references(&taken, released, false))?;
        Ok(buf)
    }

    /// The error for a host cluster past the largest possible offset.
    fn no_offset(&self, cluster: HostCluster) -> DiskError {
        DiskError::Corrupt {
            image: self.chain.active().name().to_owned(),
            reason: format!("host cluster {cluster} is past the largest possible offset"),
        }
    }

    /// Turns a compressed cluster of an image with subclusters into a plain one in which `zero`, whole subclusters,
    /// reads as zeroes. The caller holds the cluster.
    pub(super) async fn expand_compressed(
        &self,
        qcow2: &Qcow2Writer<H::File>,
        cluster: u64,
        zero: &Range<u64>,
    ) -> Result<()> {
        let geometry = qcow2.geometry();
        let size = geometry.cluster_size();
        let index = ClusterIndex::new(cluster);
        let old = qcow2.entry(index).await?;
        let kind = old.kind(&geometry).map_err(|error| qcow2.metadata.layer.format_error(error))?;
        let is_compressed = matches!(kind, ClusterKind::Compressed(_));
        invariant(is_compressed, self.name(), "only a compressed cluster is expanded")?;
        let start = cluster * size;
        let extents = self.extents(start..start + size).await?;
        let bytes = self.read_extents(&extents, IoBuf::zeroed(size as usize)).await?;
        let released = &referenced(&geometry, &kind);
        qcow2.check_releases(released)?;
        let mut placement = qcow2.metadata.placement();
        let run = placement.allocate(1).await?;
        let Some(host) = geometry.host_cluster_start(run.start) else {
            return Err(self.no_offset(run.start));
        };
        let (_, written) =
            qcow2.metadata.guest_io().write_to(Destination::New, host.get(), vec![bytes]).await?;
        let placed = placement.placed([written]);
        let sub = geometry.subcluster_size();
        let count = (zero.end - zero.start) / sub;
        let mask = (((1_u64 << count) - 1) << (zero.start / sub)) as u32;
        let entry = L2Entry::subclustered(Some(host), true, !mask, mask);
        let taken = [run.start];
        self.record(qcow2, index, entry, placed.references(&taken, released, false))
    }
}

/// Checks that compressed data needs less than a cluster.
fn check_packed(length: u64, cluster: u64, name: &Path) -> Result<()> {
    invariant(0 < length && length < cluster, name, "compressed data is smaller than its cluster")
}

/// Checks that a new entry of a compressed cluster refers to the clusters that were claimed for it.
fn check_claimed(
    geometry: &Geometry,
    entry: L2Entry,
    claimed: &[HostCluster],
    name: &Path,
) -> Result<()> {
    let kind = always(entry.kind(geometry).ok(), name, "the entry of compressed data is valid")?;
    let same = referenced(geometry, &kind) == claimed;
    invariant(same, name, "each cluster that has compressed data was claimed for it")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{CLUSTER, SIZE, disk_of, must_violate, writers};
    use futures_executor::block_on;
    use isobath_chain::create::NewDisk;
    use isobath_qcow2::HostOffset;

    #[test]
    fn compressed_data_needs_less_than_a_cluster() {
        let check = |length| check_packed(length, CLUSTER, Path::new("disk"));
        check(1).unwrap();
        check(CLUSTER - 1).unwrap();
        for length in [0, CLUSTER] {
            must_violate(check(length), "compressed data is smaller than its cluster");
        }
    }

    #[test]
    fn compressed_data_lies_where_it_was_claimed() {
        let geometry = Geometry::new(3, 16, 4, false, false).unwrap();
        let entry = L2Entry::compressed(HostOffset::new((6 << 16) - 700), 1400, 16).unwrap();
        let check = |entry, claimed: &[u64]| {
            let claimed: Vec<_> = claimed.iter().copied().map(HostCluster::new).collect();
            check_claimed(&geometry, entry, &claimed, Path::new("disk"))
        };
        check(entry, &[5, 6]).unwrap();
        let same = "each cluster that has compressed data was claimed for it";
        for claimed in [&[5][..], &[5, 7], &[5, 6, 7]] {
            must_violate(check(entry, claimed), same);
        }
        let odd = L2Entry::data(HostOffset::new(512), true);
        must_violate(check(odd, &[]), "the entry of compressed data is valid");
    }

    #[test]
    fn what_is_expanded_was_compressed() {
        let mut new = NewDisk::new(SIZE);
        new.extended_l2 = true;
        let disk = disk_of(&new);
        let (_, qcow2) = writers(&disk);
        block_on(disk.write(0, IoBuf::zeroed(CLUSTER as usize))).unwrap();
        let expand = block_on(Box::pin(disk.expand_compressed(qcow2, 0, &(0..2048))));
        must_violate(expand, "only a compressed cluster is expanded");
    }
}
