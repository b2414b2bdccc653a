//! Copying data of lower layers into the active layer, so that those layers are no longer needed.

use super::Qcow2Writer;
use super::plan::Plan;
use crate::copy::is_zero;
use crate::disk::Disk;
use isobath_chain::chain::LayerIndex;
use isobath_chain::map::{Extent, Source, guest_range};
use isobath_image::placement::Placement;
use isobath_image::sabotage::{self, Sabotage};
use isobath_image::{DiskError, Result, always, invariant};
use isobath_qcow2::{ClusterIndex, HostOffset};
use isobath_storage::{Host, IoBuf, StorageExt};
use std::ops::Range;
use std::path::Path;

/// The layers that are to be removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Surplus {
    /// The first of them.
    pub start: LayerIndex,
    /// The first layer above that stays.
    pub end: LayerIndex,
    /// Up to here, in guest bytes, the layers below are visible through them.
    pub seen: u64,
    /// Bytes of the disk that the layers below have.
    pub below: u64,
}

/// What must be done for a piece of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Nothing.
    Nothing,
    /// Data must be written.
    Data,
    /// Zeroes must be written.
    Zeroes,
}

/// The work done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pulled {
    /// Bytes read and written.
    pub copied: u64,
    /// Bytes shared with the layers below.
    pub cloned: u64,
}

impl Surplus {
    /// What must be done for an extent.
    pub fn need(&self, extent: &Extent) -> Need {
        let ours = |layer: LayerIndex| layer >= self.start && layer < self.end;
        match extent.source {
            Source::Data { layer, .. } | Source::Compressed { layer, .. } if ours(layer) => {
                Need::Data
            }
            Source::Invalid(layer) if ours(layer) => Need::Data,
            Source::Zero(layer) if ours(layer) && self.below > 0 => Need::Zeroes,
            Source::Absent
                if self.seen < extent.guest + extent.length && self.seen < self.below =>
            {
                Need::Zeroes
            }
            _ => Need::Nothing,
        }
    }
}

impl<H: Host> Disk<H> {
    /// The surplus if the layers from `start` up to `end` are removed.
    pub fn surplus(&self, start: LayerIndex, end: LayerIndex) -> Surplus {
        let sizes = self.chain.layers().filter(|(index, _)| *index >= start && *index < end);
        let seen = sizes.map(|(_, layer)| layer.size()).min().unwrap_or(u64::MAX);
        let below = start.get().checked_sub(1).and_then(|n| self.chain.get(LayerIndex::new(n)));
        Surplus { start, end, seen, below: below.map_or(0, |layer| layer.size()) }
    }

    /// The next part of the disk from `at` on, at most `most` bytes and in whole clusters, in which the surplus layers
    /// have data that others lack; `None` if there is none.
    pub async fn next_surplus(
        &self,
        surplus: Surplus,
        at: u64,
        most: u64,
    ) -> Result<Option<Range<u64>>> {
        let size = u64::from(self.preferred_block());
        let cluster = self.active_qcow2().map_or(size, |q| q.geometry.cluster_size());
        let most = (most / cluster * cluster).max(cluster);
        let found = self.find_surplus(surplus, at, most, cluster).await?;
        if let Some(range) = &found {
            check_found(range, at, most, cluster, self.name())
                .map_err(|error| self.stop_on_internal(error))?;
        }
        Ok(found)
    }

    /// As [`next_surplus`](Self::next_surplus); `most` is whole clusters.
    async fn find_surplus(
        &self,
        surplus: Surplus,
        at: u64,
        most: u64,
        cluster: u64,
    ) -> Result<Option<Range<u64>>> {
        let end = self.size();
        let mut at = at;
        let mut found: Option<Range<u64>> = None;
        while at < end {
            // A part without a table in any layer may still hide data of the layers below.
            let hides = surplus.seen < surplus.below && at < surplus.below;
            let limit = if hides { surplus.seen.clamp(at, end) } else { end };
            let untouched = self.untouched_until(at, limit);
            if untouched > at {
                if found.is_some() {
                    break;
                }
                at = untouched;
                continue;
            }
            let next = end.min((at - at % WINDOW).saturating_add(WINDOW));
            let extents = {
                let _pass = self.readers.epoch.enter();
                self.extents(at..next).await?
            };
            for extent in extents {
                let needed = surplus.need(&extent) != Need::Nothing;
                let range = extent.guest / cluster * cluster
                    ..(extent.guest + extent.length).next_multiple_of(cluster);
                match &mut found {
                    None if needed => found = Some(range),
                    Some(found) if needed && range.start <= found.end => found.end = range.end,
                    Some(found) => return Ok(Some(found.start..found.end.min(found.start + most))),
                    None => {}
                }
                if let Some(found) = &found
                    && found.end - found.start >= most
                {
                    return Ok(Some(found.start..found.start + most));
                }
            }
            at = next;
        }
        Ok(found)
    }

    /// Copies a range of whole clusters that [`next_surplus`](Self::next_surplus) returned into the active layer. The
    /// guest may use the disk meanwhile.
    pub async fn pull(&self, surplus: Surplus, range: Range<u64>) -> Result<Pulled> {
        let writer = self.writer()?;
        let _stop = self.stop_on_panic();
        let qcow2 = writer.qcow2().ok_or(DiskError::ReadOnly)?;
        let below = surplus.start <= surplus.end && surplus.end <= self.active_index();
        invariant(below, self.name(), "layers to be removed are below the active one")?;
        let size = qcow2.geometry().cluster_size();
        let whole = range.start.is_multiple_of(size) && range.end.is_multiple_of(size);
        invariant(whole, self.name(), "whole clusters are pulled")?;
        writer.commit_if_much(&self.readers).await?;
        let _range = writer.ranges.lock(range.clone()).await;
        let _pass = self.readers.epoch.enter();
        let end = range.end.min(self.chain.active().visible());
        let mut pulled = Pulled::default();
        if range.start >= end {
            return Ok(pulled);
        }
        let extents = self.extents(range.start..end).await?;
        let mut rest = &extents[..];
        while let Some(first) = rest.first() {
            let need = surplus.need(first);
            let same = |extent: &&Extent| surplus.need(extent) == need;
            let count = rest.iter().take_while(same).count().max(1);
            let (run, later) = rest.split_at(count);
            rest = later;
            match need {
                Need::Nothing => {}
                Need::Zeroes => self.pull_zeroes(qcow2, &guest_range(run)).await?,
                Need::Data => self.pull_data(qcow2, surplus, run, &mut pulled).await?,
            }
        }
        Ok(pulled)
    }

    async fn pull_data(
        &self,
        qcow2: &Qcow2Writer<H::File>,
        surplus: Surplus,
        run: &[Extent],
        pulled: &mut Pulled,
    ) -> Result<()> {
        let mut copied = 0;
        for (n, extent) in run.iter().enumerate() {
            if let Source::Data { layer, host, .. } = extent.source
                && let Some(source) = self.shareable(layer, &(host..host + extent.length))
                && self.clone_clusters(qcow2, extent.guest, extent.length, source, host).await?
            {
                self.pull_bytes(qcow2, surplus, &run[copied..n], pulled).await?;
                copied = n + 1;
                pulled.cloned += extent.length;
            }
        }
        self.pull_bytes(qcow2, surplus, &run[copied..], pulled).await
    }

    async fn pull_bytes(
        &self,
        qcow2: &Qcow2Writer<H::File>,
        surplus: Surplus,
        run: &[Extent],
        pulled: &mut Pulled,
    ) -> Result<()> {
        let range = guest_range(run);
        if range.is_empty() {
            return Ok(());
        }
        let length = range.end - range.start;
        let buf = self.read_extents(run, IoBuf::zeroed(length as usize)).await?;
        if is_zero(&buf) {
            if surplus.below > 0 {
                self.pull_zeroes(qcow2, &range).await?;
            }
            return Ok(());
        }
        self.write_clusters(qcow2, range.start, buf).await?;
        pulled.copied += length;
        Ok(())
    }

    /// Makes a range zero in the active layer, whatever the layers below contain.
    async fn pull_zeroes(&self, qcow2: &Qcow2Writer<H::File>, range: &Range<u64>) -> Result<()> {
        let geometry = qcow2.geometry();
        let granule = geometry.subcluster_size();
        let mut last = range.end / granule * granule;
        if range.end == self.chain.active().visible() {
            last = range.end.next_multiple_of(granule);
        }
        let first = range.start.next_multiple_of(granule);
        let by_entry = if geometry.version() < 3 || first >= last {
            range.end..range.end
        } else {
            first..last
        };
        let before = range.start..by_entry.start.min(range.end);
        let after = by_entry.end.min(range.end)..range.end;
        check_join(range, &before, &by_entry, &after, self.name())?;
        if !by_entry.is_empty() {
            self.zero_clusters(qcow2, by_entry, false).await?;
        }
        for part in [before, after] {
            let mut at = part.start;
            while at < part.end {
                let length = (part.end - at).min(CHUNK);
                self.write_clusters(qcow2, at, IoBuf::zeroed(length as usize)).await?;
                at += length;
            }
        }
        Ok(())
    }

    /// The file with a layer's data, if in this range the file holds exactly what the layer reads: nothing is newer in
    /// its writer's memory or its journal, or stored in another form.
    pub fn shareable(&self, layer: LayerIndex, range: &Range<u64>) -> Option<&H::File> {
        // The bytes of another program's image are elsewhere in its file.
        let file = self.chain.get(layer).filter(|layer| layer.as_foreign().is_none())?;
        if file.is_encrypted() {
            return None;
        }
        let elsewhere = self.writer_of(layer).is_some_and(|writer| {
            writer.qcow2().is_some_and(|qcow2| !qcow2.metadata.guest_io().is_stored_plain(range))
        });
        let newer = file.is_newer_than_data(range) && !sabotage::is(Sabotage::SharedOldData);
        (!elsewhere && !newer).then(|| &**file.data())
    }

    /// Makes a range share the space of another file's bytes from `at` on; returns `false`, without changes, if that is
    /// not possible.
    pub async fn clone_in(
        &self,
        offset: u64,
        length: u64,
        source: &H::File,
        at: u64,
    ) -> Result<bool> {
        let writer = self.writer()?;
        let _stop = self.stop_on_panic();
        let Some(qcow2) = writer.qcow2() else { return Ok(false) };
        if !sabotage::is(Sabotage::UnmarkedClone) {
            qcow2.note_write(offset..offset + length).await?;
        }
        writer.commit_if_much(&self.readers).await?;
        let size = qcow2.geometry().cluster_size();
        let end = (offset + length).next_multiple_of(size);
        let _range = writer.ranges.lock(offset / size * size..end).await;
        let _pass = self.readers.epoch.enter();
        let cloned = self.clone_clusters(qcow2, offset, length, source, at).await;
        Box::pin(self.or_mark_corrupt(cloned)).await
    }

    /// As [`clone_in`](Self::clone_in), for a caller that holds the range in whole clusters and is inside
    /// the epoch.
    async fn clone_clusters(
        &self,
        qcow2: &Qcow2Writer<H::File>,
        offset: u64,
        length: u64,
        source: &H::File,
        at: u64,
    ) -> Result<bool> {
        let geometry = qcow2.geometry();
        let size = geometry.cluster_size();
        let target = qcow2.metadata.layer.data();
        let Some(block) = target.clone_alignment() else { return Ok(false) };
        let whole = offset.is_multiple_of(size) && length.is_multiple_of(size);
        if qcow2.metadata.layer.is_encrypted() {
            return Ok(false);
        }
        if !whole || geometry.has_data_file() || !at.is_multiple_of(block) || size % block != 0 {
            return Ok(false);
        }
        let clusters = offset / size..(offset + length) / size;
        qcow2.ensure_tables(clusters.clone()).await?;
        let mut plans = Vec::with_capacity((clusters.end - clusters.start) as usize);
        for (cluster, entry) in self.entries_of(qcow2, clusters.clone()).await? {
            let plan = Plan::new(&qcow2.metadata.layer, &geometry, entry, &(0..size))?;
            if let Some(host) = plan.host {
                qcow2.check_place(cluster * size, host)?;
            }
            if let Some(host) = plan.host {
                let (place, io) = (host.get()..host.get() + size, qcow2.metadata.guest_io());
                // A record may have checksums of the data there, or older data that is yet to be written there.
                if io.has_checksums() || !io.is_stored_plain(&place) {
                    return Ok(false);
                }
            }
            plans.push(plan);
        }
        for plan in &plans {
            qcow2.check_releases(&plan.releases)?;
        }
        let mut placement = qcow2.metadata.placement();
        let cloned = self.clone_into_places(qcow2, &plans, &mut placement, source, at).await?;
        let Some(hosts) = cloned else { return Ok(false) };
        let places = hosts.iter().map(|host| host.get()..host.get() + size).collect();
        let placed = placement.placed_unchecked(places);
        for ((cluster, plan), host) in clusters.zip(&plans).zip(hosts) {
            if plan.changes {
                let new = [geometry.host_cluster_of(host)];
                let taken: &[_] = if plan.host.is_none() { &new } else { &[] };
                let references = placed.references(taken, &plan.releases, false);
                self.record(qcow2, ClusterIndex::new(cluster), plan.entry(host), references)?;
            }
        }
        Ok(true)
    }

    /// Assigns a host cluster to each cluster and clones into them; `None` if the host cannot clone.
    async fn clone_into_places(
        &self,
        qcow2: &Qcow2Writer<H::File>,
        plans: &[Plan],
        placement: &mut Placement<'_, H::File>,
        source: &H::File,
        at: u64,
    ) -> Result<Option<Vec<HostOffset>>> {
        let geometry = qcow2.geometry();
        let size = geometry.cluster_size();
        let mut homeless = plans.iter().filter(|plan| plan.host.is_none()).count();
        let mut free: Vec<HostOffset> = Vec::new();
        while homeless > 0 {
            let run = placement.allocate(homeless as u64).await?;
            free.extend(run.clusters().filter_map(|one| geometry.host_cluster_start(one)));
            let left = homeless.checked_sub(run.count as usize);
            homeless = always(left, self.name(), "no run of a clone is longer than was asked for")?;
        }
        let hosts = places(plans.iter().map(|plan| plan.host), free, self.name())?;
        let mut first = 0;
        while first < hosts.len() {
            let mut last = first + 1;
            while last < hosts.len() && hosts[last].get() == hosts[last - 1].get() + size {
                last += 1;
            }
            let (to, length) = (hosts[first].get(), (last - first) as u64 * size);
            let from = at + first as u64 * size;
            if !qcow2.metadata.guest_io().clone_range(source, from, to, length).await? {
                return Ok(None);
            }
            first = last;
        }
        Ok(Some(hosts))
    }
}

/// The place of each cluster of a clone: the one that it keeps, or the next new one.
fn places(
    kept: impl Iterator<Item = Option<HostOffset>>,
    new: Vec<HostOffset>,
    name: &Path,
) -> Result<Vec<HostOffset>> {
    let mut new = new.into_iter();
    let mut places = Vec::new();
    for host in kept {
        let host = host.or_else(|| new.next());
        places.push(always(host, name, "each cluster of a clone has a place")?);
    }
    invariant(new.len() == 0, name, "a clone uses each cluster that it claimed")?;
    Ok(places)
}

/// Checks a part that is to be pulled.
fn check_found(range: &Range<u64>, at: u64, most: u64, cluster: u64, name: &Path) -> Result<()> {
    let whole = range.start.is_multiple_of(cluster) && range.end.is_multiple_of(cluster);
    invariant(whole, name, "a part to be pulled is whole clusters")?;
    let some = range.start < range.end && range.end - range.start <= most;
    invariant(some, name, "a part to be pulled is not empty nor too long")?;
    invariant(range.end > at, name, "a part to be pulled lies ahead of the search")
}

/// Checks that what becomes zero by entries, and what by data before and after, are the range. Entries may reach past
/// its end, where the disk ends.
fn check_join(
    range: &Range<u64>,
    before: &Range<u64>,
    by_entry: &Range<u64>,
    after: &Range<u64>,
    name: &Path,
) -> Result<()> {
    let length = |part: &Range<u64>| part.end.min(range.end).saturating_sub(part.start);
    let joined = length(before) + length(by_entry) + length(after);
    let same = before.start == range.start && joined == range.end - range.start;
    invariant(same, name, "zeroes by entries and by data make up their range")
}

/// Guest bytes examined at once.
const WINDOW: u64 = 64 << 20;
/// The most zeroes written at once, in bytes.
const CHUNK: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{CLUSTER, chain_of, must_violate, writers};
    use futures_executor::block_on;

    #[test]
    fn each_cluster_of_a_clone_has_a_place_of_its_own() {
        let at = |host: u64| HostOffset::new(host);
        let places = |new: &[u64]| {
            let kept = [None, Some(at(1024)), None].into_iter();
            places(kept, new.iter().copied().map(at).collect(), Path::new("disk"))
        };
        assert_eq!(places(&[512, 1536]).unwrap(), [512, 1024, 1536].map(at));
        must_violate(places(&[512]), "each cluster of a clone has a place");
        must_violate(places(&[512, 1536, 2048]), "a clone uses each cluster that it claimed");
    }

    #[test]
    fn zeroes_join() {
        let check = |before, by_entry, after| {
            check_join(&(512..8192), &before, &by_entry, &after, Path::new("disk"))
        };
        check(512..4096, 4096..8192, 8192..8192).unwrap();
        check(512..4096, 4096..65_536, 8192..8192).unwrap();
        check(512..8192, 8192..8192, 8192..8192).unwrap();
        let same = "zeroes by entries and by data make up their range";
        must_violate(check(0..4096, 4096..8192, 8192..8192), same);
        must_violate(check(512..4096, 8192..8192, 8192..8192), same);
        must_violate(check(512..4096, 4096..8192, 4096..8192), same);
    }

    #[test]
    fn whole_clusters_are_pulled_from_layers_below() {
        let disk = chain_of(3);
        let pull = |end, range| {
            let surplus = disk.surplus(LayerIndex::new(0), LayerIndex::new(end));
            block_on(Box::pin(disk.pull(surplus, range)))
        };
        pull(2, 0..CLUSTER).unwrap();
        must_violate(pull(3, 0..CLUSTER), "layers to be removed are below the active one");
        must_violate(pull(2, 0..CLUSTER - 512), "whole clusters are pulled");
        must_violate(pull(2, 512..CLUSTER), "whole clusters are pulled");
    }

    #[test]
    fn a_part_to_be_pulled_can_be_pulled() {
        let check = |range, at| check_found(&range, at, 4 * CLUSTER, CLUSTER, Path::new("disk"));
        check(CLUSTER..2 * CLUSTER, 0).unwrap();
        let whole = "a part to be pulled is whole clusters";
        must_violate(check(CLUSTER..2 * CLUSTER - 512, 0), whole);
        must_violate(check(512..CLUSTER, 0), whole);
        let some = "a part to be pulled is not empty nor too long";
        must_violate(check(CLUSTER..CLUSTER, 0), some);
        must_violate(check(0..5 * CLUSTER, 0), some);
        let ahead = "a part to be pulled lies ahead of the search";
        must_violate(check(0..CLUSTER, CLUSTER), ahead);
    }

    #[test]
    #[cfg(debug_assertions)]
    fn a_clone_gets_as_many_clusters_as_it_asks_for() {
        let disk = chain_of(1);
        let (_, qcow2) = writers(&disk);
        let geometry = qcow2.geometry();
        let layer = &qcow2.metadata.layer;
        let plan =
            Plan::new(layer, &geometry, isobath_qcow2::L2Entry::unallocated(), &(0..CLUSTER))
                .unwrap();
        let _broken = Sabotage::LongRun.begin();
        let mut placement = qcow2.metadata.placement();
        let source = &**layer.storage();
        let plans = [plan];
        let cloned = disk.clone_into_places(qcow2, &plans, &mut placement, source, 0);
        let longer = "no run of a clone is longer than was asked for";
        must_violate(block_on(Box::pin(cloned)), longer);
    }
}
