//! Host clusters: which are free, and the refcounts that say so.
//!
//! Refcounts in memory are ahead of the file in one direction only. A cluster is counted from the moment it is
//! allocated, so that it is not allocated twice; its refcount reaches the file when a change that refers to it is about
//! to become durable ([`publish`](Allocator::publish)). A decrement is applied, in memory too, only once nothing
//! durable refers to the cluster any more (see [`durability`](crate::durability)), so it is always safe to write the
//! published refcounts.

mod ahead;
mod area;
mod block;
mod cut;
mod device;
mod grow;
mod lengthen;
mod marked;
mod own;
mod stage;

pub(crate) use ahead::Growth;
pub use ahead::write_zeroes;
pub(crate) use cut::TailCut;
pub(crate) use stage::{Staged, not_zero};

use crate::layer::Qcow2Layer;
use crate::sabotage::{self, Sabotage};
use crate::{DiskError, MOST_CHECKED, Result, always, lock_order, violated};
use block::Block;
use futures_util::future::try_join_all;
use isobath_qcow2::{Geometry, HostCluster, HostOffset, RefcountTableEntry};
use isobath_storage::{IoBuf, Storage};
use isobath_sync::{AsyncMutex, AsyncMutexGuard};
use lengthen::Length;
use marked::Marked;
use parking_lot::RwLock;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Bytes of clean refcount blocks that may stay in memory.
pub(crate) const CACHE_BYTES: u64 = 16 << 20;

/// A run of adjacent host clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The first.
    pub start: HostCluster,
    /// How many.
    pub count: u64,
    /// Whether the file is known to hold zeroes there.
    pub zeroed: bool,
    /// Whether the run is past the end of the file: writing there makes the file grow.
    pub beyond: bool,
}

impl Run {
    /// Whether the host has given the run its space: zeroes were written there.
    pub fn has_space(&self) -> bool {
        self.zeroed && !self.beyond
    }

    /// The clusters.
    pub fn clusters(&self) -> impl Iterator<Item = HostCluster> + use<> {
        (self.start.get()..self.start.get() + self.count).map(HostCluster::new)
    }
}

/// Allocates and releases the host clusters of one image.
pub struct Allocator<S> {
    layer: Qcow2Layer<S>,
    geometry: Geometry,
    state: AsyncMutex<AllocState>,
    /// Host clusters with the image's own structures: never allocated, never used for guest data.
    own: RwLock<OwnClusters>,
    /// Which of them may not have been such when the image was opened.
    marked: Marked,
    /// Bytes past everything used before that were newly used in place since the last commit.
    grown: AtomicU64,
    /// The end of the file is near.
    is_short: AtomicBool,
    /// Tables were found to be inconsistent.
    contradicted: AtomicBool,
}

struct OwnClusters {
    /// Of tables.
    tables: HashSet<u64>,
    /// The journal's area.
    journal: Range<u64>,
}

struct AllocState {
    table_offset: HostOffset,
    /// The refcount table as it will be; its length fills whole clusters.
    table: Vec<RefcountTableEntry>,
    blocks: BTreeMap<u64, Block>,
    /// Indexes of blocks whose entry in the table is not in the file.
    unlisted: Vec<u64>,
    /// Clusters of tables that larger ones replace once the header points to those.
    replaced_tables: Vec<Range<u64>>,
    /// References that must not be written to the file yet, by cluster.
    unpublished: BTreeMap<u64, u64>,
    /// Those of them that belong to the refcount structure: they are written together with `unlisted`.
    own: Vec<u64>,
    /// Changes that a journal handles, while there is one.
    journaled: Option<Journaled>,
    /// No cluster below this is free.
    first_maybe_free: u64,
    /// No cluster from here on is in use: a file ends before it, and a device is free from there on.
    never_used: u64,
    /// Clusters of a device, which does not grow by being written to.
    room: Option<u64>,
    /// No cluster from here on was in the file when it was opened.
    added_from: u64,
    /// Areas: free in the file, and not given out.
    areas: Vec<Range<u64>>,
    /// Clusters freed while others may read them, which are not allocated; `None` if that is not so.
    freed: Option<BTreeSet<u64>>,
    /// Free clusters that were filled with zeroes.
    prepared: Range<u64>,
    growth: Growth,
    length: Length,
    /// The host byte offset for the next compressed cluster, in a cluster with room left.
    packing: Option<u64>,
}

/// Changes that the next record of a journal must contain, and those in the journal but not yet in place.
#[derive(Default)]
struct Journaled {
    /// Clusters whose published refcount changed since the last record.
    changed: BTreeSet<u64>,
    /// Entries of the refcount table that are only in the journal.
    entries: BTreeSet<u64>,
    /// A new offset of the refcount table is only in the journal.
    moved: bool,
}

impl AllocState {
    /// Whether clusters up to this one are on the device, if the image is on one.
    fn has_room(&self, end: u64) -> bool {
        self.room.is_none_or(|room| end <= room)
    }

    /// Whether a cluster belongs to an area.
    fn is_kept(&self, cluster: u64) -> bool {
        self.areas.iter().any(|area| area.contains(&cluster))
            || self.freed.as_ref().is_some_and(|freed| freed.contains(&cluster))
    }

    /// Where the last area ends.
    fn kept_until(&self) -> u64 {
        let freed = self.freed.iter().flatten().map(|cluster| cluster + 1);
        self.areas.iter().map(|area| area.end).chain(freed).max().unwrap_or(0)
    }

    /// How many references to a cluster are not published yet.
    fn unpublished_references(&self, cluster: u64) -> u64 {
        self.unpublished.get(&cluster).copied().unwrap_or(0)
    }

    fn forget_unpublished(&mut self, cluster: u64) {
        let Entry::Occupied(mut count) = self.unpublished.entry(cluster) else {
            violated("a reference that is written to the file was allocated");
        };
        *count.get_mut() -= 1;
        if *count.get() == 0 {
            count.remove();
        }
    }
}

impl<S: Storage> Allocator<S> {
    /// Reads the refcount table of `layer`, and locates its tables.
    ///
    /// # Errors
    /// If the storage fails, or a table is at an offset where none can be.
    pub async fn open(layer: Qcow2Layer<S>) -> Result<Self> {
        let qcow2 = layer.qcow2();
        let geometry = qcow2.geometry;
        let (table_offset, clusters) = {
            let header = qcow2.header.read();
            (header.refcount_table_offset, u64::from(header.refcount_table_clusters))
        };
        let bytes = clusters << geometry.cluster_bits();
        let length = layer.length().await?;
        if table_offset.checked_add(bytes).is_none_or(|end| end.get() > length) {
            return Err(DiskError::Corrupt {
                image: layer.name().to_owned(),
                reason: format!(
                    "its refcount table (refcount_table_offset {table_offset}, \
                     {clusters} clusters) reaches past the end of the file ({length} bytes)"
                ),
            });
        }
        let raw = layer.read_at(table_offset.get(), IoBuf::zeroed(bytes as usize)).await?;
        let mut table = Vec::with_capacity(bytes as usize / 8);
        for index in 0..bytes as usize / 8 {
            let entry =
                RefcountTableEntry::read(&raw, index).unwrap_or(RefcountTableEntry::unallocated());
            table.push(entry);
        }
        let tables = own::own_clusters(&layer, qcow2, &table).await?;
        let extends = layer.storage().extends_one_at_a_time();
        let state = AllocState {
            table_offset,
            table,
            blocks: BTreeMap::new(),
            unlisted: Vec::new(),
            replaced_tables: Vec::new(),
            unpublished: BTreeMap::new(),
            own: Vec::new(),
            journaled: None,
            // The header's cluster is the first to show that refcounts are wrong.
            first_maybe_free: 0,
            never_used: geometry.clusters_for(length),
            room: None,
            added_from: geometry.clusters_for(length),
            areas: Vec::new(),
            freed: None,
            prepared: 0..0,
            growth: Growth::default(),
            length: if extends {
                Length::new(geometry.clusters_for(length))
            } else {
                Length::left_alone()
            },
            packing: None,
        };
        let alloc = Self {
            layer,
            geometry,
            state: AsyncMutex::ranked(state, lock_order::ALLOCATOR),
            own: RwLock::new(OwnClusters { tables, journal: 0..0 }),
            marked: Marked::new(),
            grown: AtomicU64::new(0),
            is_short: AtomicBool::new(false),
            contradicted: AtomicBool::new(false),
        };
        if !alloc.layer.storage().extends_with_zeroes() {
            alloc.measure_device(length).await?;
        }
        Ok(alloc)
    }

    /// Where a cluster begins that was allocated here.
    pub fn offset_of(&self, cluster: HostCluster) -> Result<HostOffset> {
        let offset = self.geometry.host_cluster_start(cluster);
        always(offset, self.layer.name(), "a cluster that was allocated has an offset")
    }

    /// Whether tables were found to be inconsistent.
    pub fn is_contradicted(&self) -> bool {
        self.contradicted.load(Ordering::Acquire)
    }

    /// Whether a host cluster holds one of the image's own tables, or a part of its journal.
    pub fn is_metadata(&self, cluster: HostCluster) -> bool {
        let own = self.own.read();
        own.tables.contains(&cluster.get()) || own.journal.contains(&cluster.get())
    }

    /// Notes that a run holds a table from now on.
    pub fn mark_metadata(&self, run: Range<u64>) {
        self.own.write().tables.extend(run.clone());
        self.marked.add(run);
    }

    /// Refuses to write guest data over a cluster that has become one of a table or of the journal since the image was
    /// opened: its refcount said that it was free, although an entry maps guest data to it.
    pub fn check_not_marked(&self, clusters: Range<HostCluster>) -> Result<()> {
        let range = (clusters.start.get()..clusters.end.get()).map(HostCluster::new);
        let mut marked = range.filter(|cluster| self.marked.may_have(*cluster));
        match marked.find(|cluster| self.is_metadata(*cluster)) {
            None => Ok(()),
            Some(cluster) => Err(self.corrupt(format!(
                "guest data lies in host cluster {cluster}, which holds one of its own tables or its journal since its \
                 refcount said that it was free"
            ))),
        }
    }

    /// Notes that a run no longer holds a table.
    pub fn unmark_metadata(&self, run: Range<u64>) {
        let mut own = self.own.write();
        for cluster in run {
            own.tables.remove(&cluster);
        }
    }

    /// Takes between 1 and `want` adjacent free clusters.
    pub async fn allocate(&self, want: u64) -> Result<Run> {
        let want = want + u64::from(sabotage::is(Sabotage::LongRun));
        let mut state = self.lock().await;
        let start = self.find_free(&mut state).await?;
        let mut count = 1;
        while count < want
            && state.has_room(start + count + 1)
            && self.is_free(&mut state, start + count).await?
        {
            count += 1;
        }
        self.take(&mut state, start, count)
    }

    /// Takes `count` adjacent clusters past everything ever used.
    pub async fn allocate_adjacent(&self, count: u64) -> Result<Run> {
        let count = count + u64::from(sabotage::is(Sabotage::LongRun));
        let mut state = self.lock().await;
        self.take_adjacent(&mut state, count).await
    }

    /// Allocates `length` bytes for compressed data (at most a cluster), packed after earlier data, and returns the
    /// host offset.
    pub async fn allocate_packed(&self, length: u64) -> Result<HostOffset> {
        let size = self.geometry.cluster_size();
        let mut state = self.lock().await;
        if let Some(at) = state.packing {
            let cluster = at / size;
            let room = size - at % size;
            let shared = self.refcount_in(&mut state, cluster).await?;
            if shared < self.geometry.refcount_order().max() {
                if length <= room {
                    self.reserve(&mut state, cluster, shared + 1)?;
                    state.packing = (length < room).then_some(at + length);
                    return Ok(HostOffset::new(at));
                }
                if state.has_room(cluster + 2) && self.is_free(&mut state, cluster + 1).await? {
                    self.take(&mut state, cluster + 1, 1)?;
                    self.reserve(&mut state, cluster, shared + 1)?;
                    state.packing = Some(at + length);
                    return Ok(HostOffset::new(at));
                }
            }
        }
        let start = self.find_free(&mut state).await?;
        self.take(&mut state, start, 1)?;
        let at = start * size;
        state.packing = (length < size).then_some(at + length);
        Ok(HostOffset::new(at))
    }

    /// Notes that a change refers to allocated clusters, with one reference for each time a cluster is listed: the
    /// references are written to the file together with that change.
    pub async fn publish(&self, clusters: &[HostCluster]) -> Result<()> {
        let mut state = self.state().await;
        for cluster in clusters {
            state.forget_unpublished(cluster.get());
            self.mark(&mut state, cluster.get())?;
        }
        Ok(())
    }

    /// Releases references to clusters, one for each time a cluster is listed. Nothing durable may still use these
    /// references.
    pub async fn release(&self, clusters: &[HostCluster]) -> Result<()> {
        let mut state = self.lock().await;
        for cluster in clusters {
            self.shrink_cache(&mut state);
            self.lower(&mut state, cluster.get()).await?;
            self.mark(&mut state, cluster.get())?;
        }
        Ok(())
    }

    /// Sets whether clusters that are freed from now on keep their contents, for others who may read them.
    pub async fn keep_freed(&self, keep: bool) {
        let mut state = self.state().await;
        if keep {
            state.freed.get_or_insert_default();
        } else if let Some(first) = state.freed.take().and_then(|freed| freed.first().copied()) {
            state.first_maybe_free = state.first_maybe_free.min(first);
        }
    }

    async fn lower(&self, state: &mut AsyncMutexGuard<'_, AllocState>, cluster: u64) -> Result<()> {
        let count = self.refcount_in(state, cluster).await?;
        let held = state.unpublished_references(cluster);
        let less = count.checked_sub(1).filter(|less| *less >= held);
        let Some(less) = less else { return Err(self.unbalanced(cluster)) };
        self.set(state, cluster, less)?;
        if less == 0 {
            state.first_maybe_free = state.first_maybe_free.min(cluster);
            if let Some(freed) = &mut state.freed {
                freed.insert(cluster);
            }
            let size = self.geometry.cluster_size();
            if state.packing.is_some_and(|at| at / size == cluster) {
                state.packing = None;
            }
        }
        Ok(())
    }

    fn unbalanced(&self, cluster: u64) -> DiskError {
        self.corrupt(format!("host cluster {cluster} is in use but its refcount is too low"))
    }

    /// The refcount of a host cluster.
    pub async fn refcount(&self, cluster: HostCluster) -> Result<u64> {
        let mut state = self.lock().await;
        self.refcount_in(&mut state, cluster.get()).await
    }

    /// Whether a reference is the only one to its cluster. Nothing more is packed into the cluster then, so that it
    /// stays the only one.
    pub async fn is_last(&self, cluster: HostCluster) -> Result<bool> {
        let mut state = self.lock().await;
        let last = self.refcount_in(&mut state, cluster.get()).await? == 1;
        let size = self.geometry.cluster_size();
        if last && state.packing.is_some_and(|at| at / size == cluster.get()) {
            state.packing = None;
        }
        Ok(last)
    }

    /// The clusters that will have no reference left when these are released, each once. Nothing more is packed into
    /// them.
    pub async fn freed_by(&self, releases: &[HostCluster]) -> Result<Vec<HostCluster>> {
        let mut state = self.state().await;
        let mut counts: BTreeMap<HostCluster, u64> = BTreeMap::new();
        for cluster in releases {
            *counts.entry(*cluster).or_default() += 1;
        }
        let size = self.geometry.cluster_size();
        let mut freed = Vec::new();
        for (cluster, released) in counts {
            if self.refcount_in(&mut state, cluster.get()).await? == released {
                freed.push(cluster);
                if state.packing.is_some_and(|at| at / size == cluster.get()) {
                    state.packing = None;
                }
            }
        }
        Ok(freed)
    }

    /// Whether any change is not in the file yet.
    pub async fn is_dirty(&self) -> bool {
        let state = self.state().await;
        !state.unlisted.is_empty() || state.blocks.values().any(Block::is_dirty)
    }

    /// Writes every changed part of the blocks; not yet durable.
    pub async fn write_blocks(&self) -> Result<()> {
        let parts = self.take_dirty(&mut self.state().await)?;
        self.write_all(parts).await
    }

    /// The changed parts of the blocks as they are to be written: byte offsets and bytes. The blocks are then clean.
    fn take_dirty(&self, state: &mut AsyncMutexGuard<'_, AllocState>) -> Result<Vec<(u64, IoBuf)>> {
        let state = &mut **state;
        let mut parts = Vec::new();
        for (&index, block) in &mut state.blocks {
            if state.journaled.is_some() && state.unlisted.contains(&index) {
                // The next record contains it.
                continue;
            }
            for run in block.take_dirty() {
                let less = self.counted_in(&state.unpublished, index, block.indexes_in(&run));
                let at = block.offset.get() + run.start as u64;
                let bytes = block.copy_with_less(run, less);
                parts.push((at, bytes.map_err(|error| self.layer.format_error(error))?));
            }
        }
        parts.sort_by_key(|(offset, _)| *offset);
        Ok(parts)
    }

    /// The part of `counts` (by cluster) that concerns some refcounts of the block at `index`, by their position in the
    /// block.
    fn counted_in<'a>(
        &self,
        counts: &'a BTreeMap<u64, u64>,
        index: u64,
        places: Range<usize>,
    ) -> impl Iterator<Item = (usize, u64)> + 'a {
        let first = index * self.geometry.refcount_block_entries();
        let clusters = first + places.start as u64..first + places.end as u64;
        counts.range(clusters).map(move |(cluster, count)| ((cluster - first) as usize, *count))
    }

    async fn write_all(&self, parts: Vec<(u64, IoBuf)>) -> Result<()> {
        let storage = self.layer.storage();
        try_join_all(parts.into_iter().map(|(offset, bytes)| storage.write_at(offset, bytes)))
            .await?;
        Ok(())
    }

    /// Locks the state, which is as it must be between two operations.
    async fn state(&self) -> AsyncMutexGuard<'_, AllocState> {
        let state = self.state.lock().await;
        if cfg!(debug_assertions) {
            self.check_invariants(&state);
        }
        state
    }

    fn check_invariants(&self, state: &AllocState) {
        let refcount = |cluster: u64| {
            let (index, within) = self.geometry.refcount_position(HostCluster::new(cluster));
            state.blocks.get(&index).map(|block| block.get(within))
        };
        for (&cluster, &held) in state.unpublished.iter().take(MOST_CHECKED) {
            match refcount(cluster) {
                None => violated("a block with references that are not in the file is in memory"),
                Some(count) if count < held => {
                    violated("a refcount has the references that are not in the file yet");
                }
                Some(_) if held == 0 => violated("a cluster without such references is not listed"),
                Some(_) => {}
            }
            if cluster >= state.never_used {
                violated("a cluster that is given out was used");
            }
        }
        if !state.own.iter().all(|cluster| state.unpublished.contains_key(cluster)) {
            violated("clusters of the refcount structure are published with it");
        }
        for index in &state.unlisted {
            if !state.blocks.contains_key(index) {
                violated("a block that the table does not list yet is in memory");
            }
        }
        if state.length.is_ahead && state.length.until <= state.added_from {
            violated("a file that was made longer is longer than when it was opened");
        }
        for (number, area) in state.areas.iter().enumerate() {
            if area.end > state.never_used {
                violated("an area lies before what was never used");
            }
            if state.areas[..number].iter().any(|a| a.start < area.end && area.start < a.end) {
                violated("areas do not overlap");
            }
        }
    }

    /// Locks the state, after dropping clean blocks beyond the cache's size.
    async fn lock(&self) -> AsyncMutexGuard<'_, AllocState> {
        let mut state = self.state().await;
        self.shrink_cache(&mut state);
        state
    }

    /// Drops clean blocks beyond the cache's size, half of it at once. Blocks that the current operation relies on must
    /// not be dropped, so this happens before it looks at the first one.
    fn shrink_cache(&self, state: &mut AsyncMutexGuard<'_, AllocState>) {
        let keep = (CACHE_BYTES / self.geometry.cluster_size()).max(4) as usize;
        let state = &mut **state;
        if state.blocks.len() > keep {
            let mut excess = state.blocks.len() - keep / 2;
            let unpublished = &state.unpublished;
            state.blocks.retain(|index, block| {
                let mut ahead = self.counted_in(unpublished, *index, 0..self.entries());
                let drop = excess > 0 && !block.is_dirty() && ahead.next().is_none();
                excess -= usize::from(drop);
                !drop
            });
        }
    }

    /// Refcounts in a block.
    fn entries(&self) -> usize {
        self.geometry.refcount_block_entries() as usize
    }

    /// The image's tables are inconsistent. No more changes may be made, and the caller that wanted one marks the
    /// header.
    pub fn corrupt(&self, reason: String) -> DiskError {
        self.contradicted.store(true, Ordering::Release);
        DiskError::Corrupt { image: self.layer.name().to_owned(), reason }
    }

    /// The request exceeds what the image can hold, or is not possible now.
    fn full(&self, reason: String) -> DiskError {
        DiskError::Refused { image: self.layer.name().to_owned(), reason }
    }

    /// The first free cluster.
    async fn find_free(&self, state: &mut AsyncMutexGuard<'_, AllocState>) -> Result<u64> {
        loop {
            let cluster = state.first_maybe_free;
            self.need_room(state, cluster + 1).await?;
            if self.is_free(state, cluster).await? {
                return Ok(cluster);
            }
            // A block may just have been put there, or the cluster is in use: try the next.
            state.first_maybe_free = cluster + 1;
        }
    }

    /// Whether a cluster is free, after giving it a refcount block if it has none.
    async fn is_free(
        &self,
        state: &mut AsyncMutexGuard<'_, AllocState>,
        cluster: u64,
    ) -> Result<bool> {
        if state.is_kept(cluster) {
            return Ok(false);
        }
        self.cover(state, cluster).await?;
        Ok(self.refcount_in(state, cluster).await? == 0)
    }

    /// Takes free clusters that have refcount blocks.
    fn take(
        &self,
        state: &mut AsyncMutexGuard<'_, AllocState>,
        start: u64,
        count: u64,
    ) -> Result<Run> {
        self.refuse_tables(start..start + count)?;
        for cluster in start..start + count {
            self.reserve(state, cluster, 1)?;
        }
        let end = start + count;
        let prepared = state.prepared.start <= start && end <= state.prepared.end;
        let beyond = start >= state.never_used && self.layer.storage().extends_with_zeroes();
        if start < state.prepared.end && state.prepared.start < end {
            state.prepared.start = end.min(state.prepared.end);
        }
        let zeroed = prepared || beyond;
        if end > state.never_used {
            state.never_used = end;
            if state.length.is_short(end) {
                self.is_short.store(true, Ordering::Relaxed);
            }
        }
        self.layer.give_out(end << self.geometry.cluster_bits());
        if state.first_maybe_free == start {
            state.first_maybe_free = start + count;
        }
        Ok(Run { start: HostCluster::new(start), count, zeroed, beyond })
    }

    async fn refcount_in(
        &self,
        state: &mut AsyncMutexGuard<'_, AllocState>,
        cluster: u64,
    ) -> Result<u64> {
        let (index, within) = self.geometry.refcount_position(HostCluster::new(cluster));
        if let Some(block) = state.blocks.get(&index) {
            return Ok(block.get(within));
        }
        let Some(entry) = state.table.get(index as usize) else { return Ok(0) };
        let Some(offset) = entry.offset(&self.geometry).map_err(|e| self.layer.format_error(e))?
        else {
            return Ok(0);
        };
        let length = self.geometry.cluster_size() as usize;
        let bytes = self.layer.read_at(offset.get(), IoBuf::zeroed(length)).await?;
        let block = Block::loaded(offset, bytes, self.geometry.refcount_order());
        let count = block.get(within);
        state.blocks.insert(index, block);
        if let Err(error) = self.check_block(state, index) {
            state.blocks.remove(&index);
            return Err(error);
        }
        Ok(count)
    }

    /// Adds a reference that is not written to the file yet.
    fn reserve(
        &self,
        state: &mut AsyncMutexGuard<'_, AllocState>,
        cluster: u64,
        count: u64,
    ) -> Result<()> {
        self.set(state, cluster, count)?;
        *state.unpublished.entry(cluster).or_default() += 1;
        Ok(())
    }

    /// Counts a cluster of the refcount structure itself.
    fn count_own(&self, state: &mut AsyncMutexGuard<'_, AllocState>, cluster: u64) -> Result<()> {
        self.reserve(state, cluster, 1)?;
        state.own.push(cluster);
        Ok(())
    }

    /// The references to the structure's new clusters are about to be written to the file.
    fn publish_own(&self, state: &mut AsyncMutexGuard<'_, AllocState>) -> Result<()> {
        for cluster in std::mem::take(&mut state.own) {
            state.forget_unpublished(cluster);
            self.mark(state, cluster)?;
        }
        Ok(())
    }

    /// Sets the refcount of a cluster whose block is in memory.
    fn set(
        &self,
        state: &mut AsyncMutexGuard<'_, AllocState>,
        cluster: u64,
        value: u64,
    ) -> Result<()> {
        let (index, within) = self.geometry.refcount_position(HostCluster::new(cluster));
        let block = self.block(state, index, cluster)?;
        block.set(within, value).map_err(|e| self.layer.format_error(e))
    }

    /// Marks the refcount of a cluster, whose block is in memory, as not yet written to the file.
    fn mark(&self, state: &mut AsyncMutexGuard<'_, AllocState>, cluster: u64) -> Result<()> {
        let (index, within) = self.geometry.refcount_position(HostCluster::new(cluster));
        self.block(state, index, cluster)?.mark(within);
        if let Some(journaled) = &mut state.journaled {
            journaled.changed.insert(cluster);
        }
        Ok(())
    }

    fn block<'a>(
        &self,
        state: &'a mut AsyncMutexGuard<'_, AllocState>,
        index: u64,
        cluster: u64,
    ) -> Result<&'a mut Block> {
        state
            .blocks
            .get_mut(&index)
            .ok_or_else(|| self.corrupt(format!("host cluster {cluster} has no refcount block")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broken::{must_panic, must_violate, qcow2, writer};
    use crate::options::OpenOptions;
    use futures_executor::block_on;
    use futures_util::FutureExt;
    use isobath_storage::memory::MemoryFile;

    /// Runs `test` with the allocator of a new image that has given out a cluster.
    fn with_allocator(
        test: impl FnOnce(&Allocator<MemoryFile>, &mut AsyncMutexGuard<'_, AllocState>),
    ) {
        let writer = writer(&OpenOptions::new());
        let alloc = &qcow2(&writer).metadata.alloc;
        block_on(async {
            alloc.allocate(1).await.unwrap();
            test(alloc, &mut alloc.state().await);
        });
    }

    #[test]
    fn broken_refcounts_are_noticed() {
        type Change = fn(&mut AllocState);
        let cases: [(&str, Change); 9] = [
            ("a block with references that are not in the file is in memory", |state| {
                state.blocks.clear();
            }),
            ("a refcount has the references that are not in the file yet", |state| {
                state.unpublished.values_mut().for_each(|held| *held += 1);
            }),
            ("a cluster without such references is not listed", |state| {
                state.unpublished.values_mut().for_each(|held| *held = 0);
            }),
            ("a cluster that is given out was used", |state| state.never_used = 0),
            ("clusters of the refcount structure are published with it", |state| {
                state.own.push(99);
            }),
            ("a block that the table does not list yet is in memory", |state| {
                state.unlisted.push(99);
            }),
            ("an area lies before what was never used", |state| {
                let end = state.never_used + 1;
                state.areas = std::iter::once(1..end).collect();
            }),
            ("a file that was made longer is longer than when it was opened", |state| {
                (state.length.is_ahead, state.added_from) = (true, state.length.until);
            }),
            ("areas do not overlap", |state| state.areas = vec![1..3, 2..4]),
        ];
        for (what, change) in cases {
            with_allocator(|alloc, state| {
                alloc.check_invariants(state);
                change(state);
                must_panic(|| alloc.check_invariants(state), what);
            });
        }
    }

    #[test]
    fn only_what_was_allocated_is_published_and_has_an_offset() {
        with_allocator(|alloc, state| {
            let other = || state.forget_unpublished(99);
            must_panic(other, "a reference that is written to the file was allocated");
            assert_eq!(alloc.offset_of(HostCluster::new(3)).unwrap().get(), 3 << 16);
            let past = alloc.offset_of(HostCluster::new(u64::MAX));
            must_violate(past, "a cluster that was allocated has an offset");
        });
    }

    #[test]
    fn the_refcount_structure_takes_only_free_clusters() {
        with_allocator(|alloc, state| {
            let taken = |clusters| alloc.take_space(state, clusters).now_or_never().unwrap();
            must_violate(taken(0..1), "only free clusters are given to the refcount structure");
            let end = state.never_used;
            state.areas.push(end..end + 1);
            let kept = alloc.take_space(state, end..end + 1).now_or_never().unwrap();
            must_violate(kept, "only free clusters are given to the refcount structure");
        });
    }

    #[test]
    fn a_new_block_has_its_place_in_the_table() {
        with_allocator(|alloc, state| {
            let listed = "a new refcount block has a place in the refcount table";
            must_panic(|| alloc.listing_steps(state, vec![u64::from(u32::MAX)]), listed);
            let known = "the refcount table in memory lists each new block";
            must_panic(|| alloc.listing_steps(state, vec![1]), known);
            // Each lies where the other counts.
            let counted = alloc.geometry.refcount_block_entries();
            for (index, home) in [(1, 2 * counted), (2, counted)] {
                let offset = alloc.offset_of(HostCluster::new(home)).unwrap();
                state.table[index] = RefcountTableEntry::new(offset, &alloc.geometry).unwrap();
            }
            let circle = "one of the new refcount blocks is counted by itself or by an old one";
            must_panic(|| alloc.listing_steps(state, vec![1, 2]), circle);
            assert_eq!(alloc.listing_steps(state, vec![1]).unwrap().len(), 1);
            let there = "a refcount block that changed is in memory";
            must_violate(alloc.staged_block(state, 1).map(Block::len), there);
        });
    }
}
