//! Writes that need new clusters, and their copy-on-write.

use super::finish_writes;
use super::plan::Plan;
use super::target::{CopiedPart, Target, reads_zero};
use crate::disk::Disk;
use crate::parts::Parts;
use futures_util::future::try_join_all;
use isobath_chain::chain::LayerIndex;
use isobath_chain::map::Unit;
use isobath_image::guest_io::{Destination, Written};
use isobath_image::placement::{Placement, References};
use isobath_image::sabotage::{self, Sabotage};
use isobath_image::writer::{Qcow2Writer, Writer};
use isobath_image::{DiskError, Result, always, invariant, violated};
use isobath_qcow2::{ClusterIndex, ClusterKind, HostCluster, HostOffset, L2Entry};
use isobath_storage::{Host, IoBuf};
use isobath_sync::order::in_order;
use std::collections::BTreeSet;
use std::path::Path;

/// Buffers in one vectored write; the kernel takes 1024.
const MAX_VECTOR: usize = 512;

/// Adjacent pieces, written together.
struct Run {
    start: u64,
    end: u64,
    destination: Destination,
    bufs: Vec<IoBuf>,
}

/// Bytes for one place in the data file.
struct Piece {
    host: u64,
    length: u64,
    destination: Destination,
    content: Content,
}

enum Content {
    /// The request's own bytes.
    Own,
    /// The request's own bytes, which are written as part of another buffer.
    Elsewhere,
    /// Other bytes.
    Copied(IoBuf),
}

/// How the request's buffer is put together again.
enum Give {
    /// From the next buffer written.
    Written,
    /// Not from the next buffer written.
    Skip,
    /// This was not written.
    Apart(IoBuf),
}

impl<H: Host> Disk<H> {
    /// Writes while holding whole clusters.
    pub(super) async fn write_allocating(
        &self,
        writer: &Writer<H::File>,
        offset: u64,
        buf: IoBuf,
    ) -> Result<IoBuf> {
        let qcow2 = writer.qcow2().ok_or(DiskError::ReadOnly)?;
        let (buf, shared) = if writer.may_have_journal() { buf.into_stable() } else { (buf, None) };
        let size = qcow2.geometry().cluster_size();
        let end = offset + buf.len() as u64;
        let clusters = offset / size..end.div_ceil(size);
        let _range = writer.ranges.lock(clusters.start * size..clusters.end * size).await;
        let _pass = self.readers.epoch.enter();
        self.check_visible(offset..end)?;
        let written = self.write_clusters(qcow2, offset, buf).await?;
        Ok(shared.unwrap_or(written))
    }

    /// As [`write_allocating`](Self::write_allocating), for a caller that holds the range in whole clusters, is inside
    /// the epoch, and has checked that the range is within the disk.
    pub(super) async fn write_clusters(
        &self,
        qcow2: &Qcow2Writer<H::File>,
        offset: u64,
        buf: IoBuf,
    ) -> Result<IoBuf> {
        let geometry = qcow2.geometry();
        let size = geometry.cluster_size();
        let end = offset + buf.len() as u64;
        let clusters = offset / size..end.div_ceil(size);
        qcow2.ensure_tables(clusters.clone()).await?;
        let mut targets = Vec::with_capacity((clusters.end - clusters.start) as usize);
        let mut planned = Parts::of(offset..end, self.name());
        for (cluster, entry) in self.entries_of(qcow2, clusters).await? {
            let start = cluster * size;
            let written = offset.max(start) - start..end.min(start + size) - start;
            planned.add(start + written.start, written.end - written.start)?;
            let plan = Plan::new(&qcow2.metadata.layer, &geometry, entry, &written)?;
            if let Some(host) = plan.host {
                qcow2.check_place(start, host)?;
            }
            // In an external data file every cluster has a fixed place.
            let host = plan.host.or(geometry.has_data_file().then_some(HostOffset::new(start)));
            let cluster = ClusterIndex::new(cluster);
            let (zeroed, beyond) = (false, false);
            targets.push(Target { cluster, written, plan, host, zeroed, beyond, embedding: None });
        }
        planned.end()?;
        // An embedded mapping to a cluster no longer counts once a record releases the cluster.
        let mut placement = qcow2.metadata.placement();
        let filled = self.fill_targets(qcow2, offset, &mut targets, &mut placement, buf).await;
        if filled.is_err() && sabotage::is(Sabotage::EarlyUnclaim) {
            placement.release_early().await?;
            return filled.map(|(buf, _)| buf);
        }
        let (buf, written) = filled?;
        for target in &targets {
            qcow2.check_releases(&target.plan.releases)?;
        }
        let placed = placement.placed(written);
        for target in &targets {
            if target.plan.changes {
                let host = target.placed(qcow2)?;
                let entry = target.plan.entry(host);
                let taken = [geometry.host_cluster_of(host)];
                let new = target.plan.host.is_none() && !geometry.has_data_file();
                let taken: &[_] = if new { &taken } else { &[] };
                let embedded = target.embedding.is_some();
                let references = placed.references(taken, &target.plan.releases, embedded);
                self.record(qcow2, target.cluster, entry, references)?;
            }
        }
        Ok(buf)
    }

    /// Assigns a host cluster to every target and writes to it. The request begins at `offset`.
    async fn fill_targets(
        &self,
        qcow2: &Qcow2Writer<H::File>,
        offset: u64,
        targets: &mut [Target],
        placement: &mut Placement<'_, H::File>,
        buf: IoBuf,
    ) -> Result<(IoBuf, Vec<Written>)> {
        let geometry = qcow2.geometry();
        let size = geometry.cluster_size();
        let copies =
            try_join_all(targets.iter().map(|target| in_order(self.copies(target, size)))).await?;
        if !geometry.has_data_file() {
            let mut embedded = 0;
            let homeless = targets.iter_mut().zip(&copies).filter(|(t, _)| t.plan.host.is_none());
            for (target, copies) in homeless {
                let from = (target.cluster.get() * size + target.written.start - offset) as usize;
                let own = &buf[from..from + (target.written.end - target.written.start) as usize];
                if self.embed(qcow2, placement, target, copies, own).await? {
                    embedded += 1;
                }
            }
            let mut homeless: Vec<_> = targets
                .iter_mut()
                .filter(|target| target.plan.host.is_none() && target.embedding.is_none())
                .collect();
            let name = qcow2.metadata.layer.name();
            let mut next = 0;
            while next < homeless.len() {
                let run = placement.allocate((homeless.len() - next) as u64).await?;
                for cluster in run.clusters() {
                    let target = always(
                        homeless.get_mut(next),
                        name,
                        "no run is longer than what was asked for",
                    )?;
                    if !sabotage::is(Sabotage::LostPlace) {
                        target.host = geometry.host_cluster_start(cluster);
                    }
                    (target.zeroed, target.beyond) = (run.zeroed, run.beyond);
                    next += 1;
                }
            }
            let claimed = placement.clusters().len() == embedded + homeless.len();
            invariant(claimed, name, "a write claims as many clusters as it needs")?;
            if cfg!(debug_assertions) {
                let places = targets.iter().filter(|t| t.plan.host.is_none()).map(|t| t.host);
                let places = places.flatten().map(|host| geometry.host_cluster_of(host));
                check_places(places, placement.clusters(), name)?;
            }
        }
        let mut pieces: Vec<Piece> = Vec::new();
        for (target, copies) in targets.iter_mut().zip(copies) {
            let host = target.placed(qcow2)?;
            add_pieces(&mut pieces, target, host, copies);
        }
        self.write_pieces(qcow2, pieces, buf).await
    }

    /// What must be written besides a target's own data.
    async fn copies(&self, target: &Target, size: u64) -> Result<Vec<CopiedPart>> {
        let start = target.cluster.get() * size;
        // Zeroes in the file are not zeroes for the guest if the image is encrypted.
        let encrypted = self.chain.active().is_encrypted();
        let mut copies = Vec::new();
        for part in &target.plan.copy {
            let extents = self.extents(start + part.start..start + part.end).await?;
            let zero =
                (reads_zero(&extents) && !encrypted) || sabotage::is(Sabotage::NoCopyOnWrite);
            let length = part.end - part.start;
            let bytes = if zero {
                None
            } else {
                Some(self.read_extents(&extents, IoBuf::zeroed(length as usize)).await?)
            };
            copies.push(CopiedPart { at: part.start, length, bytes });
        }
        Ok(copies)
    }

    /// Writes the pieces concurrently, adjacent ones together; returns the request's buffer, and what was written
    /// where.
    async fn write_pieces(
        &self,
        qcow2: &Qcow2Writer<H::File>,
        pieces: Vec<Piece>,
        mut buf: IoBuf,
    ) -> Result<(IoBuf, Vec<Written>)> {
        let (name, length) = (self.name(), buf.len());
        let mut own = |length: u64| {
            let there = length <= buf.len() as u64;
            invariant(there, name, "the pieces of a write have no more bytes than it has")?;
            Ok::<_, DiskError>(buf.split_to(length as usize))
        };
        let mut writes: Vec<Run> = Vec::new();
        let mut gives = Vec::with_capacity(pieces.len());
        for piece in pieces {
            let bytes = match piece.content {
                Content::Own => {
                    gives.push(Give::Written);
                    own(piece.length)?
                }
                Content::Copied(bytes) => {
                    let whole = bytes.len() as u64 == piece.length;
                    invariant(whole, name, "a piece of a write has as many bytes as its place")?;
                    gives.push(Give::Skip);
                    bytes
                }
                Content::Elsewhere => {
                    gives.push(Give::Apart(own(piece.length)?));
                    continue;
                }
            };
            match writes.last_mut() {
                Some(run)
                    if run.end == piece.host
                        && run.destination == piece.destination
                        && run.bufs.len() < MAX_VECTOR =>
                {
                    run.end += piece.length;
                    run.bufs.push(bytes);
                }
                _ => writes.push(Run {
                    start: piece.host,
                    end: piece.host + piece.length,
                    destination: piece.destination,
                    bufs: vec![bytes],
                }),
            }
        }
        invariant(buf.is_empty(), name, "the pieces of a write have all of its bytes")?;
        let data = qcow2.metadata.guest_io();
        let data = &data;
        let writes = writes
            .into_iter()
            .map(|run| async move { data.write_to(run.destination, run.start, run.bufs).await });
        let (bufs, written): (Vec<_>, Vec<_>) = finish_writes(writes).await?.into_iter().unzip();
        let mut bufs = bufs.into_iter().flatten();
        let mut next = || always(bufs.next(), name, "a write gives back every buffer");
        let mut whole = IoBuf::empty();
        for give in gives {
            match give {
                Give::Written => whole.unsplit(next()?),
                Give::Skip => drop(next()?),
                Give::Apart(bytes) => whole.unsplit(bytes),
            }
        }
        invariant(whole.len() == length, name, "a write gives back its request's buffer")?;
        Ok((whole, written))
    }

    /// Records a cluster's new entry and shows it to readers.
    pub fn record(
        &self,
        qcow2: &Qcow2Writer<H::File>,
        cluster: ClusterIndex,
        entry: L2Entry,
        references: References<'_>,
    ) -> Result<()> {
        let geometry = qcow2.geometry();
        let kind =
            entry.kind(&geometry).map_err(|error| qcow2.metadata.layer.format_error(error))?;
        let layer = self.active_index();
        let size = geometry.cluster_size();
        let unit_bits = self.map.unit_bits();
        if let Some(host) = kind.host_cluster() {
            // One that the image has given may be past what the map can hold.
            if Unit::data(layer, host.get() + size - 1, unit_bits, false).is_none() {
                return Err(qcow2.corrupt(format!(
                    "guest cluster {cluster} is mapped to host offset {host}, which is too large"
                )));
            }
        }
        qcow2.record(cluster, entry, references)?;
        if sabotage::is(Sabotage::StaleMap) {
            return Ok(());
        }
        let start = cluster.get() << geometry.cluster_bits();
        let data = |host: HostOffset, skip: u64, copied: bool| {
            move |from: u64| unit_of(layer, host.get() + skip + from, unit_bits, copied)
        };
        match kind {
            ClusterKind::Unallocated => self.map.update(start..start + size, |_| Unit::ABSENT),
            ClusterKind::ZeroPlain | ClusterKind::ZeroAllocated { .. } => {
                self.map.update(start..start + size, |_| Unit::zero(layer));
            }
            ClusterKind::Data { offset, copied } => {
                self.map.update(start..start + size, data(offset, 0, copied));
            }
            ClusterKind::Compressed(compressed) => {
                self.map.update_compressed(start..start + size, layer, compressed);
            }
            ClusterKind::Subclusters { offset, copied, allocated, zero } => {
                let sub = geometry.subcluster_size();
                for n in 0..geometry.subclusters_per_cluster() {
                    let skip = u64::from(n) * sub;
                    let range = start + skip..start + skip + sub;
                    match offset {
                        Some(offset) if allocated >> n & 1 == 1 => {
                            self.map.update(range, data(offset, skip, copied));
                        }
                        _ if zero >> n & 1 == 1 => self.map.update(range, |_| Unit::zero(layer)),
                        _ if qcow2.alone() => self.map.update(range, |_| Unit::ABSENT),
                        _ => {}
                    }
                }
            }
        }
        Ok(())
    }
}

/// The unit of a cluster of which the map can hold the last byte.
fn unit_of(layer: LayerIndex, host: u64, unit_bits: u32, copied: bool) -> Unit {
    Unit::data(layer, host, unit_bits, copied)
        .unwrap_or_else(|| violated("a cluster with a place in the map has all of it"))
}

/// Checks that the places of new clusters were claimed, each for one of them.
fn check_places(
    places: impl Iterator<Item = HostCluster>,
    claimed: &[HostCluster],
    name: &Path,
) -> Result<()> {
    let mut free: BTreeSet<u64> = claimed.iter().map(|cluster| cluster.get()).collect();
    invariant(free.len() == claimed.len(), name, "a cluster is given out once")?;
    for place in places {
        let taken = free.remove(&place.get());
        invariant(taken, name, "a new cluster of a write has a claimed place of its own")?;
    }
    Ok(())
}

/// Adds a target's pieces in the order of their places; its own data is merged with the data before it if the places
/// are adjacent.
fn add_pieces(
    pieces: &mut Vec<Piece>,
    target: &mut Target,
    host: HostOffset,
    copies: Vec<CopiedPart>,
) {
    let (host, destination) = (host.get(), target.destination());
    // The start of the bytes that are written unchanged.
    let mut plain = 0;
    let (from, mut own) = (target.written.start, target.written.clone());
    if let Some(embedding) = &mut target.embedding {
        let lead = std::mem::replace(&mut embedding.lead, IoBuf::empty());
        plain = lead.len() as u64;
        own = from.max(plain)..target.written.end.max(plain);
        let length = target.written.end.min(plain).saturating_sub(from);
        let elsewhere = Piece { host, length, destination, content: Content::Elsewhere };
        pieces.extend((length > 0).then_some(elsewhere));
        pieces.push(Piece { host, length: plain, destination, content: Content::Copied(lead) });
    }
    let own = Piece {
        host: host + own.start,
        length: own.end - own.start,
        destination,
        content: Content::Own,
    };
    let mut own = Some(own).filter(|own| own.length > 0);
    for CopiedPart { at, length, bytes } in copies {
        if at >= target.written.end
            && let Some(own) = own.take()
        {
            push_own(pieces, own);
        }
        let skip = plain.saturating_sub(at).min(length);
        if skip == length || (bytes.is_none() && target.zeroed) {
            continue;
        }
        let mut bytes = bytes.unwrap_or_else(|| IoBuf::zeroed(length as usize));
        drop(bytes.split_to(skip as usize));
        let (host, length) = (host + at + skip, length - skip);
        pieces.push(Piece { host, length, destination, content: Content::Copied(bytes) });
    }
    if let Some(own) = own {
        push_own(pieces, own);
    }
}

fn push_own(pieces: &mut Vec<Piece>, own: Piece) {
    match pieces.last_mut() {
        Some(last)
            if matches!(last.content, Content::Own)
                && last.host + last.length == own.host
                && last.destination == own.destination =>
        {
            last.length += own.length;
        }
        _ => pieces.push(own),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{careless_disk, disk, must_panic, must_violate, writers};
    use futures_executor::block_on;
    use isobath_storage_test::careless::Slip;

    #[test]
    fn places_are_claimed_for_one_cluster_each() {
        let check = |places: &[u64], claimed: &[u64]| {
            let claimed: Vec<_> = claimed.iter().copied().map(HostCluster::new).collect();
            let places = places.iter().copied().map(HostCluster::new);
            check_places(places, &claimed, Path::new("disk"))
        };
        check(&[8, 7], &[7, 8, 9]).unwrap();
        must_violate(check(&[], &[7, 8, 7]), "a cluster is given out once");
        let own = "a new cluster of a write has a claimed place of its own";
        must_violate(check(&[7, 7], &[7, 8]), own);
        must_violate(check(&[9], &[7, 8]), own);
    }

    #[test]
    fn the_map_has_a_place_for_each_unit_of_a_cluster() {
        let layer = LayerIndex::new(0);
        unit_of(layer, 1 << 16, 16, true);
        let place = "a cluster with a place in the map has all of it";
        must_panic(|| unit_of(layer, u64::MAX, 9, true), place);
    }

    #[test]
    fn pieces_have_the_bytes_of_the_request() {
        let disk = disk();
        let (_, qcow2) = writers(&disk);
        let write = |contents: Vec<(u64, Content)>, length| {
            let (mut host, destination) = (1 << 20, Destination::New);
            let mut pieces = Vec::new();
            for (length, content) in contents {
                pieces.push(Piece { host, length, destination, content });
                host += length;
            }
            block_on(disk.write_pieces(qcow2, pieces, IoBuf::zeroed(length)))
                .map(|(buf, _)| buf.len())
        };
        let copied = |length| Content::Copied(IoBuf::zeroed(length));
        let good = vec![(512, copied(512)), (512, Content::Own), (512, Content::Elsewhere)];
        assert_eq!(write(good, 1024).unwrap(), 1024);
        let no_more = "the pieces of a write have no more bytes than it has";
        must_violate(write(vec![(512, Content::Own), (513, Content::Own)], 1024), no_more);
        must_violate(write(vec![(1025, Content::Elsewhere)], 1024), no_more);
        let all = "the pieces of a write have all of its bytes";
        must_violate(write(vec![(512, Content::Own)], 1024), all);
        let place = "a piece of a write has as many bytes as its place";
        must_violate(write(vec![(512, copied(511)), (8, Content::Own)], 8), place);
    }

    #[test]
    fn a_write_gives_back_what_it_was_given() {
        for (slip, what) in [
            (Slip::LostBuffer, "a write gives back every buffer"),
            (Slip::ShortBuffers, "a write gives back its request's buffer"),
        ] {
            let (disk, slips) = careless_disk();
            slips.set(slip);
            let write = disk.write(0, IoBuf::copy_of(&[1; 4096]));
            must_violate(block_on(Box::pin(write)).map(|buf| buf.len()), what);
        }
    }

    #[test]
    fn a_write_claims_what_it_needs() {
        let disk = disk();
        let (_, qcow2) = writers(&disk);
        let mut placement = qcow2.metadata.placement();
        block_on(placement.allocate(1)).unwrap();
        let filled = disk.fill_targets(qcow2, 0, &mut [], &mut placement, IoBuf::empty());
        let claims = "a write claims as many clusters as it needs";
        must_violate(block_on(Box::pin(filled)).map(drop), claims);
    }
}
