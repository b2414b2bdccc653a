//! The active layer's L1 and L2 tables as its writer knows them.
//!
//! A change is recorded in the *open* batch and seen by every later look-up at once. A commit closes the batch, and
//! only what it holds reaches the file, in the steps that the [`durability`](crate::durability) mode demands; changes
//! made meanwhile go to the next batch. Cached pages of tables always match the file, except for the closed batch
//! during its commit.

mod batch;
mod claim;
mod l1;
mod pages;
mod stage;

pub(crate) use claim::Claim;
pub(crate) use pages::CACHE_BYTES;
pub(crate) use stage::StagedTables;

use crate::alloc::Allocator;
use crate::checksummed::Checksummed;
use crate::layer::Qcow2Layer;
use crate::references::{data_place, referenced};
use crate::restart_log::{ClosedEntries, RestartLog};
use crate::{Result, always, invariant, lock_order, violated};
use batch::Batch;
use futures_util::future::try_join_all;
use isobath_qcow2::{
    ClusterIndex, ClusterKind, Geometry, HostCluster, HostOffset, L1Entry, L2Entry,
};
use isobath_storage::{IoBuf, Storage};
use isobath_sync::order::Rank;
use isobath_sync::{AsyncMutex, CheckedMutex, Invariants};
use pages::Pages;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

/// L1 entries written together: a 512-byte sector of them.
const L1_CHUNK: u64 = 64;

/// The write side of an image's L1 and L2 tables.
pub struct Tables<S> {
    layer: Qcow2Layer<S>,
    geometry: Geometry,
    state: CheckedMutex<TableState>,
    /// Held while a table is created, so that no two are created for one L1 entry.
    growth: AsyncMutex<()>,
    /// Recorded entries are also logged here.
    log: Option<Arc<RestartLog>>,
}

struct TableState {
    open: Batch,
    closed: Option<Batch>,
    pages: Pages,
    /// Raised when a commit ends: a page read from the file before may be out of date.
    generation: u64,
    /// Indexes of L1 entries that are only in a journal.
    journaled_l1: BTreeSet<u64>,
}

impl Invariants for TableState {
    const RANK: Option<Rank> = Some(lock_order::TABLES);

    fn check_invariants(&self) {
        self.pages.check_invariants();
        self.open.check_invariants();
        match &self.closed {
            Some(closed) => {
                closed.check_invariants();
                if closed.fresh.keys().any(|index| self.open.fresh.contains_key(index)) {
                    violated("a new table is made once");
                }
            }
            None if self.pages.has_pinned() => violated("only a commit keeps pages in the cache"),
            None => {}
        }
    }
}

impl TableState {
    fn batches(&self) -> impl DoubleEndedIterator<Item = &Batch> {
        std::iter::once(&self.open).chain(&self.closed)
    }
}

/// What must be released after a finished commit.
#[derive(Default)]
pub struct Released {
    /// References to host clusters that nothing durable holds any more.
    pub clusters: Vec<HostCluster>,
    /// Whether the guest discarded some of them, so that their space should be returned to the host.
    pub discarded: bool,
}

impl<S: Storage> Tables<S> {
    /// The tables of an image that is open for writing.
    pub fn new(layer: Qcow2Layer<S>, log: Option<Arc<RestartLog>>) -> Self {
        let geometry = layer.qcow2().geometry;
        let state = TableState {
            open: Batch::default(),
            closed: None,
            pages: Pages::new(geometry.cluster_size()),
            generation: 0,
            journaled_l1: BTreeSet::new(),
        };
        Self {
            layer,
            geometry,
            state: CheckedMutex::new(state),
            growth: AsyncMutex::ranked((), lock_order::GROWTH),
            log,
        }
    }

    /// Sizes that follow from the header.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn l1_entry(&self, state: &TableState, index: u64) -> L1Entry {
        let changed = state.batches().find_map(|batch| batch.l1.get(&index).copied());
        changed.unwrap_or_else(|| self.layer.qcow2().l1_entry(index))
    }

    fn table_offset(&self, state: &TableState, index: u64) -> Result<Option<HostOffset>> {
        let entry = self.l1_entry(state, index);
        entry.offset(&self.geometry).map_err(|error| self.layer.format_error(error))
    }

    /// Ensures that the L2 table at `l1_index` exists and belongs to the active L1 table alone.
    pub async fn ensure_table(&self, l1_index: u64, alloc: &Allocator<S>) -> Result<()> {
        if self.is_owned(l1_index) {
            return Ok(());
        }
        let _growth = self.growth.lock().await;
        if self.is_owned(l1_index) {
            return Ok(());
        }
        let size = self.geometry.cluster_size() as usize;
        let old = self.table_offset(&self.state.lock(), l1_index)?;
        let bytes = match old {
            Some(old) => self.layer.read_at(old.get(), IoBuf::zeroed(size)).await?,
            None => IoBuf::zeroed(size),
        };
        let run = alloc.allocate(1).await?;
        let mut claim = self.claim();
        claim.add_run(&run);
        let offset = alloc.offset_of(run.start)?;
        let entry = L1Entry::new(offset, true, &self.geometry)
            .map_err(|error| self.layer.format_error(error))?;
        if !run.has_space() {
            // A commit that found no space for the table would be final. This request can be repeated.
            let storage = self.layer.storage();
            storage.write_at(offset.get(), IoBuf::copy_of(&bytes)).await?;
        }
        claim.keep();
        alloc.mark_metadata(run.start.get()..run.start.get() + 1);
        let mut state = self.state.lock();
        state.pages.forget(offset, size as u64);
        state.open.l1.insert(l1_index, entry);
        state.open.fresh.insert(l1_index, (offset, bytes));
        state.open.allocated.push(run.start);
        if let Some(old) = old {
            // A snapshot still uses it: its clusters remain those of a table.
            state.open.releases.push(self.geometry.host_cluster_of(old));
        }
        Ok(())
    }

    fn is_owned(&self, l1_index: u64) -> bool {
        let entry = self.l1_entry(&self.state.lock(), l1_index);
        entry.is_copied() && matches!(entry.offset(&self.geometry), Ok(Some(_)))
    }

    /// Records the new entry of a cluster whose table [exists](Self::ensure_table).
    ///
    /// # Errors
    /// [`DiskError::Internal`](crate::DiskError::Internal) if the entry and its references do not match.
    pub fn record(
        &self,
        cluster: ClusterIndex,
        entry: L2Entry,
        change: References<'_>,
    ) -> Result<()> {
        let name = self.layer.name();
        let kind = entry.kind(&self.geometry).ok();
        let kind = always(kind, name, "an entry that is recorded is valid")?;
        change.check(&self.geometry, &kind, name)?;
        let mut state = self.state.lock();
        let (l1_index, _) = self.geometry.table_position(cluster);
        let owned = self.l1_entry(&state, l1_index);
        invariant(owned.is_copied(), name, "an entry is recorded in a table of the disk alone")?;
        if cfg!(debug_assertions) {
            self.check_released(&state, cluster, change.released);
        }
        if let Some(log) = &self.log {
            log.entry(cluster.get(), entry.bytes(&self.geometry));
        }
        state.open.entries.insert(cluster.get(), entry);
        state.open.allocated.extend_from_slice(change.taken);
        state.open.releases.extend_from_slice(change.released);
        state.open.ordered |= change.data.is_some();
        state.open.needs_record |= !change.embedded;
        Ok(())
    }

    /// Checks that an entry that is to be replaced, if it is in memory, makes the references that end with it.
    fn check_released(&self, state: &TableState, cluster: ClusterIndex, released: &[HostCluster]) {
        let Some(Ok(kind)) =
            self.known_entry(state, cluster).map(|entry| entry.kind(&self.geometry))
        else {
            return;
        };
        let made = referenced(&self.geometry, &kind);
        if !released.iter().all(|cluster| made.contains(cluster)) {
            violated("the references that end are those of the entry that is replaced");
        }
    }

    /// The newest entry of a cluster, if it is in memory.
    fn known_entry(&self, state: &TableState, cluster: ClusterIndex) -> Option<L2Entry> {
        let changed = state.batches().find_map(|batch| batch.entries.get(&cluster.get()).copied());
        if changed.is_some() {
            return changed;
        }
        let (l1_index, l2_index) = self.geometry.table_position(cluster);
        if let Some((_, bytes)) = state.batches().find_map(|batch| batch.fresh.get(&l1_index)) {
            return L2Entry::read(bytes, l2_index, &self.geometry);
        }
        let table = self.table_offset(state, l1_index).ok().flatten()?;
        let size = self.geometry.l2_entry_size();
        let (page, within) = state.pages.position(table.get() + (l2_index * size) as u64);
        L2Entry::read(state.pages.get(page)?, within / size, &self.geometry)
    }

    /// Makes the next commit write a record with everything in the open batch.
    pub fn want_record(&self) {
        self.state.lock().open.needs_record = true;
    }

    /// Whether all changes in the open batch are embedded in data.
    pub fn are_embedded(&self) -> bool {
        self.state.lock().open.is_embedded()
    }

    /// Notes that space released in the open batch should be returned to the host.
    pub fn mark_discarded(&self) {
        self.state.lock().open.discarded = true;
    }

    /// Changes that no commit has taken yet.
    pub fn pending(&self) -> usize {
        let state = self.state.lock();
        state.open.entries.len() + state.open.releases.len()
    }

    /// Closes the open batch for a commit.
    pub fn begin_commit(&self) -> Result<ClosedBatch> {
        let mut state = self.state.lock();
        invariant(
            state.closed.is_none(),
            self.layer.name(),
            "one commit ends before the next begins",
        )?;
        let log = self.log.as_ref().map(|log| log.close_entries());
        let mut batch = std::mem::take(&mut state.open);
        let closed = ClosedBatch {
            allocated: std::mem::take(&mut batch.allocated),
            releases: batch.releases.clone(),
            changes: !batch.is_empty(),
            ordered: batch.ordered || !batch.fresh.is_empty(),
            log,
        };
        state.closed = Some(batch);
        Ok(closed)
    }

    /// Writes the closed batch's new tables, which nothing durable refers to.
    pub async fn write_fresh(&self, _closed: &ClosedBatch) -> Result<()> {
        let tables = self.closed(&self.state.lock())?.complete_tables(&self.geometry);
        self.write_all(tables).await
    }

    /// The batch of the commit in progress.
    fn closed<'a>(&self, state: &'a TableState) -> Result<&'a Batch> {
        always(state.closed.as_ref(), self.layer.name(), "a commit under way has closed its batch")
    }

    /// Writes the closed batch's entries into existing tables, and its L1 entries.
    pub async fn write_updates(&self, closed: &ClosedBatch) -> Result<()> {
        let by_page = self.load_updates(closed).await?;
        let writes = {
            let mut state = self.state.lock();
            let mut writes = self.apply(&mut state, &by_page)?;
            let changed: Vec<u64> =
                state.closed.iter().flat_map(|batch| batch.l1.keys().copied()).collect();
            writes.extend(self.l1_writes(state.closed.as_ref(), changed));
            writes
        };
        self.write_all(writes).await
    }

    async fn write_all(&self, writes: Vec<(u64, IoBuf)>) -> Result<()> {
        let storage = self.layer.storage();
        try_join_all(writes.into_iter().map(|(at, bytes)| storage.write_at(at, bytes))).await?;
        Ok(())
    }

    /// The closed batch's entries in existing tables, by page: offsets in the page, and entries. Their pages are then
    /// in the cache, and stay there until the commit ends.
    async fn load_updates(
        &self,
        _closed: &ClosedBatch,
    ) -> Result<BTreeMap<u64, Vec<(usize, L2Entry)>>> {
        let mut by_page: BTreeMap<u64, Vec<(usize, L2Entry)>> = BTreeMap::new();
        {
            let state = self.state.lock();
            for (at, entry) in self.entry_places(self.closed(&state)?)? {
                let (page, within) = state.pages.position(at);
                let place = within / self.geometry.l2_entry_size();
                by_page.entry(page).or_default().push((place, entry));
            }
        }
        self.load_pages(by_page.keys().copied().collect()).await?;
        Ok(by_page)
    }

    /// The entries of a batch in existing tables, and their offsets in the file.
    fn entry_places(&self, batch: &Batch) -> Result<Vec<(u64, L2Entry)>> {
        let mut places = Vec::with_capacity(batch.entries.len());
        for (&cluster, &entry) in &batch.entries {
            let (l1_index, l2_index) = self.geometry.table_position(ClusterIndex::new(cluster));
            if batch.fresh.contains_key(&l1_index) {
                continue;
            }
            let table = batch.l1.get(&l1_index).copied();
            let table = table.unwrap_or_else(|| self.layer.qcow2().l1_entry(l1_index));
            let table = table.offset(&self.geometry).map_err(|e| self.layer.format_error(e))?;
            let table = always(table, self.layer.name(), "a recorded entry has a table")?;
            places.push((table.get() + (l2_index * self.geometry.l2_entry_size()) as u64, entry));
        }
        Ok(places)
    }

    /// Puts entries into their cached pages; returns the pages.
    fn apply(
        &self,
        state: &mut TableState,
        by_page: &BTreeMap<u64, Vec<(usize, L2Entry)>>,
    ) -> Result<Vec<(u64, IoBuf)>> {
        let mut pages = Vec::with_capacity(by_page.len());
        for (&page, entries) in by_page {
            let name = self.layer.name();
            let bytes = always(
                state.pages.get_mut(page),
                name,
                "a page that a commit changes is in the cache",
            )?;
            for &(index, entry) in entries {
                let written = entry.write(bytes, index, &self.geometry);
                always(written, name, "a page has a place for each entry that it was found by")?;
            }
            pages.push((page, IoBuf::copy_of(bytes)));
        }
        Ok(pages)
    }

    /// The sectors of the L1 table that contain these entries and those of `batch`.
    fn l1_writes(&self, batch: Option<&Batch>, changed: Vec<u64>) -> Vec<(u64, IoBuf)> {
        let qcow2 = self.layer.qcow2();
        let offset = qcow2.header.read().l1_table_offset.get();
        let table = qcow2.l1.read();
        let mut chunks: Vec<u64> = changed.into_iter().map(|index| index / L1_CHUNK).collect();
        chunks.dedup();
        let chunk_bytes = |chunk: u64| {
            let first = chunk * L1_CHUNK;
            let last = (first + L1_CHUNK).min(table.len() as u64);
            if first >= last {
                violated("an L1 entry that changed lies in the L1 table");
            }
            let mut bytes = Vec::with_capacity((last - first) as usize * 8);
            for index in first..last {
                let newer = batch.and_then(|batch| batch.l1.get(&index)).copied();
                let entry = newer.or_else(|| table.get(index as usize)).unwrap_or_default();
                bytes.extend_from_slice(&entry.raw().to_be_bytes());
            }
            (offset + first * 8, IoBuf::copy_of(&bytes))
        };
        chunks.into_iter().map(chunk_bytes).collect()
    }

    /// Ends a commit: the closed batch is durable. The references returned may be released once no
    /// request uses the old mappings.
    pub fn finish_commit(&self, closed: ClosedBatch) -> Released {
        let mut state = self.state.lock();
        let batch = closed.into_batch(state.closed.take());
        for (offset, _) in batch.fresh.values() {
            state.pages.forget(*offset, self.geometry.cluster_size());
        }
        self.finish(&mut state, batch)
    }

    fn finish(&self, state: &mut TableState, batch: Batch) -> Released {
        let mut table = self.layer.qcow2().l1.write();
        for (index, entry) in batch.l1 {
            if table.set(index as usize, entry).is_none() {
                violated("a table is made for a cluster of the disk");
            }
        }
        drop(table);
        state.pages.unpin();
        state.generation += 1;
        Released { clusters: batch.releases, discarded: batch.discarded }
    }

    /// Reads pages into the cache and keeps them there until the commit ends.
    async fn load_pages(&self, pages: Vec<u64>) -> Result<()> {
        let missing: Vec<u64> = {
            let mut state = self.state.lock();
            pages.into_iter().filter(|page| !state.pages.pin(*page)).collect()
        };
        let length = self.state.lock().pages.page_size();
        let reads = missing.iter().map(|page| self.layer.read_at(*page, IoBuf::zeroed(length)));
        let loaded = try_join_all(reads).await?;
        let mut state = self.state.lock();
        for (page, bytes) in missing.into_iter().zip(loaded) {
            state.pages.insert(page, bytes);
            state.pages.pin(page);
        }
        Ok(())
    }

    /// The entry of one cluster.
    pub async fn entry(&self, cluster: ClusterIndex) -> Result<L2Entry> {
        only(&self.entries(cluster, 1).await?, self.layer.name())
    }

    fn read_entry(&self, table: &[u8], index: usize) -> Result<L2Entry> {
        let entry = L2Entry::read(table, index, &self.geometry);
        always(entry, self.layer.name(), "a table is read where it has entries")
    }

    /// The entries of `count` clusters from `first` on, all in one L2 table.
    pub async fn entries(&self, first: ClusterIndex, count: u64) -> Result<Vec<L2Entry>> {
        let (l1_index, l2_index) = self.geometry.table_position(first);
        let size = self.geometry.l2_entry_size();
        loop {
            let (missing, length, generation) = {
                let state = self.state.lock();
                let mut entries = Vec::with_capacity(count as usize);
                let mut missing = Vec::new();
                let fresh = state.batches().find_map(|batch| batch.fresh.get(&l1_index));
                if let Some((_, bytes)) = fresh {
                    for step in 0..count as usize {
                        entries.push(self.read_entry(bytes, l2_index + step)?);
                    }
                } else if let Some(table) = self.table_offset(&state, l1_index)? {
                    for step in 0..count {
                        let at = table.get() + (l2_index as u64 + step) * size as u64;
                        let (page, within) = state.pages.position(at);
                        match state.pages.get(page) {
                            Some(bytes) => entries.push(self.read_entry(bytes, within / size)?),
                            None if missing.last() == Some(&page) => {}
                            None => missing.push(page),
                        }
                    }
                } else {
                    entries.resize(count as usize, L2Entry::unallocated());
                }
                if missing.is_empty() {
                    let clusters = first.get()..first.get() + count;
                    // The newest change of an entry is the last.
                    for batch in state.batches().rev() {
                        for (cluster, changed) in batch.entries.range(clusters.clone()) {
                            entries[(cluster - first.get()) as usize] = *changed;
                        }
                    }
                    return Ok(entries);
                }
                (missing, state.pages.page_size(), state.generation)
            };
            let reads = missing.iter().map(|page| self.layer.read_at(*page, IoBuf::zeroed(length)));
            let loaded = try_join_all(reads).await?;
            let mut state = self.state.lock();
            if state.generation == generation {
                for (page, bytes) in missing.into_iter().zip(loaded) {
                    state.pages.insert(page, bytes);
                }
            }
        }
    }
}

/// The entry that was read for one cluster.
fn only(entries: &[L2Entry], name: &Path) -> Result<L2Entry> {
    let only = match entries {
        [entry] => Some(*entry),
        _ => None,
    };
    always(only, name, "an entry is read for each cluster")
}

/// The effect of an entry's change on references.
#[derive(Clone, Copy, Debug)]
pub struct References<'a> {
    taken: &'a [HostCluster],
    released: &'a [HostCluster],
    data: Option<&'a Checksummed>,
    embedded: bool,
}

impl<'a> References<'a> {
    /// The new entry refers to data that was written for it, which must be durable before the entry. `taken` are the
    /// references that it makes and the old entry did not make, `released` those that the old one made and it does not
    /// make. `embedded` says that the mapping is embedded in the data.
    pub const fn to_data(
        taken: &'a [HostCluster],
        released: &'a [HostCluster],
        data: &'a Checksummed,
        embedded: bool,
    ) -> Self {
        Self { taken, released, data: Some(data), embedded }
    }

    /// The new entry refers to no more than the old one, and not to what is in `released`.
    pub const fn to_nothing_new(released: &'a [HostCluster]) -> Self {
        Self { taken: &[], released, data: None, embedded: false }
    }

    /// The references that the old entry made and the new one does not make.
    pub const fn released(&self) -> &'a [HostCluster] {
        self.released
    }

    /// Checks that they are those of a new entry of this kind.
    fn check(&self, geometry: &Geometry, kind: &ClusterKind, name: &Path) -> Result<()> {
        if !self.taken.is_empty() {
            let made = referenced(geometry, kind);
            let are_made = self.taken.iter().all(|cluster| made.contains(cluster));
            invariant(are_made, name, "a new entry makes the references that are counted for it")?;
        }
        let Some(data) = self.data else { return Ok(()) };
        let is_known = data_place(geometry, kind).is_some_and(|place| data.is_in(&place));
        invariant(is_known, name, "the log knows of the data that a new entry refers to")
    }
}

/// The batch that a commit has closed, and what the commit must do for it. The holder must finish the commit; if it is
/// dropped, the commit has failed, and no other begins.
#[must_use = "the commit is to be finished with it"]
#[derive(Debug)]
pub struct ClosedBatch {
    /// Clusters to which the batch refers, to be published.
    pub allocated: Vec<HostCluster>,
    /// References that the batch ends.
    pub releases: Vec<HostCluster>,
    /// There are entries to write.
    pub changes: bool,
    /// Something must be durable before they are written.
    pub ordered: bool,
    /// Its mappings in the restart log.
    pub(crate) log: Option<ClosedEntries>,
}

impl ClosedBatch {
    /// Its contents, which the tables kept for it.
    fn into_batch(self, kept: Option<Batch>) -> Batch {
        drop(self);
        kept.unwrap_or_else(|| violated("a commit under way has closed its batch"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broken::{assert_violated, must_panic, must_violate, qcow2, writer};
    use crate::options::OpenOptions;
    use futures_executor::block_on;
    use isobath_qcow2::NewImage;
    use isobath_storage::memory::MemoryFile;

    #[test]
    fn broken_tables_are_noticed() {
        let geometry = NewImage::new(1 << 30).plan().unwrap().header().geometry().unwrap();
        let at = HostOffset::new(65536);
        let fresh = || {
            let mut batch = Batch::default();
            batch.l1.insert(0, L1Entry::new(at, true, &geometry).unwrap());
            batch.fresh.insert(0, (at, IoBuf::empty()));
            batch
        };
        let state = || TableState {
            open: fresh(),
            closed: None,
            pages: Pages::new(65536),
            generation: 0,
            journaled_l1: BTreeSet::new(),
        };
        assert_violated("a new table is made once", state(), |state| state.closed = Some(fresh()));
        assert_violated("only a commit keeps pages", state(), |state| {
            state.pages.insert(0, IoBuf::zeroed(4096));
            assert!(state.pages.pin(0));
        });
    }

    /// Runs `test` with the tables of a new image, in which the first one is there.
    fn with_tables(test: impl FnOnce(&Tables<MemoryFile>)) {
        let writer = writer(&OpenOptions::new());
        let metadata = &qcow2(&writer).metadata;
        block_on(metadata.tables.ensure_table(0, &metadata.alloc)).unwrap();
        test(&metadata.tables);
    }

    #[test]
    fn an_entry_is_recorded_as_what_it_is_and_where_its_table_is() {
        with_tables(|tables| {
            let nothing = References::to_nothing_new(&[]);
            let geometry = tables.geometry();
            let first = ClusterIndex::new(0);
            let invalid = L2Entry::read(&512_u64.to_be_bytes(), 0, &geometry).unwrap();
            must_violate(
                tables.record(first, invalid, nothing),
                "an entry that is recorded is valid",
            );
            let elsewhere = geometry.first_cluster_of_l1(1).unwrap();
            let done = tables.record(elsewhere, L2Entry::unallocated(), nothing);
            must_violate(done, "an entry is recorded in a table of the disk alone");
            tables.record(first, L2Entry::zero_plain(), nothing).unwrap();
            let releases = [HostCluster::new(9)];
            let other = References::to_nothing_new(&releases);
            let record = || tables.record(first, L2Entry::unallocated(), other);
            if cfg!(debug_assertions) {
                must_panic(
                    record,
                    "the references that end are those of the entry that is replaced",
                );
            }
        });
    }

    #[test]
    fn a_new_entry_makes_the_references_that_are_counted_and_its_data_is_logged() {
        with_tables(|tables| {
            let (geometry, name) = (tables.geometry(), Path::new("image"));
            let place = HostOffset::new(9 << 16);
            let (taken, nowhere) = ([HostCluster::new(9)], Checksummed::new(Vec::new()));
            let written = Checksummed::new(vec![0..512, place.get()..place.get() + 512]);
            let kind = ClusterKind::Data { offset: place, copied: true };
            References::to_data(&taken, &[], &written, false)
                .check(&geometry, &kind, name)
                .unwrap();
            let unlogged = References::to_data(&taken, &[], &nowhere, false);
            let known = "the log knows of the data that a new entry refers to";
            must_violate(unlogged.check(&geometry, &kind, name), known);
            let taken = [HostCluster::new(8)];
            let other = References::to_data(&taken, &[], &written, false);
            let made = "a new entry makes the references that are counted for it";
            must_violate(other.check(&geometry, &kind, name), made);
        });
    }

    #[test]
    fn a_commit_has_its_batch_and_ends_before_the_next() {
        with_tables(|tables| {
            let closed = tables.begin_commit().unwrap();
            must_violate(tables.begin_commit(), "one commit ends before the next begins");
            tables.state.lock().closed = None;
            let has = "a commit under way has closed its batch";
            must_violate(block_on(tables.write_fresh(&closed)), has);
            must_panic(|| tables.finish_commit(closed), has);
        });
    }

    #[test]
    fn what_a_commit_writes_has_its_place() {
        with_tables(|tables| {
            let entry = L2Entry::unallocated();
            let batch = Batch { entries: BTreeMap::from([(0, entry)]), ..Batch::default() };
            must_violate(tables.entry_places(&batch), "a recorded entry has a table");
            let mut state = tables.state.lock();
            let at = |index| BTreeMap::from([(0, vec![(index, entry)])]);
            let there = "a page that a commit changes is in the cache";
            must_violate(tables.apply(&mut state, &at(0)), there);
            state.pages.insert(0, IoBuf::zeroed(4096));
            assert_eq!(tables.apply(&mut state, &at(511)).unwrap().len(), 1);
            let place = "a page has a place for each entry that it was found by";
            must_violate(tables.apply(&mut state, &at(512)), place);
            let short = tables.read_entry(&[0; 8], 1);
            must_violate(short, "a table is read where it has entries");
            let name = tables.layer.name();
            only(&[entry], name).unwrap();
            must_violate(only(&[], name), "an entry is read for each cluster");
            must_violate(only(&[entry; 2], name), "an entry is read for each cluster");
        });
    }

    #[test]
    fn an_l1_entry_lies_in_the_table() {
        with_tables(|tables| {
            assert_eq!(tables.l1_writes(None, vec![0, 1])[0].1.len(), 16);
            let past = || tables.l1_writes(None, vec![64]);
            must_panic(past, "an L1 entry that changed lies in the L1 table");
            let mut batch = Batch::default();
            batch.l1.insert(2, L1Entry::unallocated());
            let mut state = tables.state.lock();
            let finish = || tables.finish(&mut state, batch);
            must_panic(finish, "a table is made for a cluster of the disk");
            drop(state);
            let dropped = || tables.drop_table(u64::MAX, &[]);
            must_panic(dropped, "a table that is dropped lies within the largest disk");
        });
    }
}
