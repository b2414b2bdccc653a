//! Growth of the refcount structure itself.
//!
//! A new block is written and made durable before the table lists it, the one that counts its cluster is listed before
//! it, and a new table is durable before the header points to it. So a crash in between leaves a structure that counts
//! all its own clusters: others that only the new one counted are not referenced either.

use super::block::Block;
use super::{AllocState, Allocator, Run, write_zeroes};
use crate::sabotage::{self, Sabotage};
use crate::{Result, invariant, violated};
use isobath_qcow2::geometry::MAX_REFCOUNT_TABLE_BYTES;
use isobath_qcow2::header::field;
use isobath_qcow2::{HostCluster, HostOffset, RefcountTableEntry};
use isobath_storage::{IoBuf, Storage};
use isobath_sync::AsyncMutexGuard;
use std::ops::Range;

impl<S: Storage> Allocator<S> {
    /// Ensures that a cluster's refcount block is in memory, creating one if there is none.
    pub(super) async fn cover(
        &self,
        state: &mut AsyncMutexGuard<'_, AllocState>,
        cluster: u64,
    ) -> Result<()> {
        let (index, _) = self.geometry.refcount_position(HostCluster::new(cluster));
        if state.blocks.contains_key(&index) {
            return Ok(());
        }
        let present = match state.table.get(index as usize) {
            Some(entry) => {
                entry.offset(&self.geometry).map_err(|e| self.layer.format_error(e))?.is_some()
            }
            None => false,
        };
        if present {
            self.refcount_in(state, cluster).await?;
            return Ok(());
        }
        if index as usize >= state.table.len() {
            // The caller may have found this cluster, and free ones below it.
            state.never_used = state.never_used.max(cluster + 1);
            self.grow_table(state, cluster + 1).await?;
            if state.blocks.contains_key(&index) {
                return Ok(());
            }
        }
        self.need_room(state, cluster + 1).await?;
        self.take_space(state, cluster..cluster + 1).await?;
        self.create_block(state, index, cluster)?;
        self.count_own(state, cluster)?;
        state.never_used = state.never_used.max(cluster + 1);
        Ok(())
    }

    /// Makes the host give free clusters their space, which a structure is about to take: a commit that found none for
    /// it would be final, while the request that needs it now can be repeated. Space that was prepared is there.
    pub(super) async fn take_space(&self, state: &AllocState, clusters: Range<u64>) -> Result<()> {
        let is_free = |cluster: u64| {
            let (index, within) = self.geometry.refcount_position(HostCluster::new(cluster));
            let count = state.blocks.get(&index).map_or(0, |block| block.get(within));
            count == 0 && !state.is_kept(cluster)
        };
        let free = clusters.clone().all(is_free);
        invariant(
            free,
            self.layer.name(),
            "only free clusters are given to the refcount structure",
        )?;
        self.refuse_tables(clusters.clone())?;
        let prepared = &state.prepared;
        if clusters.is_empty() || prepared.start <= clusters.start && clusters.end <= prepared.end {
            return Ok(());
        }
        let count = clusters.end - clusters.start;
        let start = HostCluster::new(clusters.start);
        let start = self.start_of(Run { start, count, zeroed: false, beyond: false })?.get();
        let end = start + count * self.geometry.cluster_size();
        write_zeroes(&**self.layer.storage(), start..end).await
    }

    /// Takes `count` adjacent clusters past everything ever used. The refcount blocks that they need follow them, since
    /// a run may be longer than the range that a block counts.
    pub(super) async fn take_adjacent(
        &self,
        state: &mut AsyncMutexGuard<'_, AllocState>,
        count: u64,
    ) -> Result<Run> {
        loop {
            let (start, missing) = self.find_adjacent(state, count).await?;
            let homes = start + count..start + count + missing.len() as u64;
            if missing.last().is_some_and(|last| *last as usize >= state.table.len()) {
                self.grow_table(state, homes.end).await?;
                continue;
            }
            self.take_space(state, homes).await?;
            return self.take_with_blocks(state, start, count, missing);
        }
    }

    /// Keeps `count` adjacent clusters past everything ever used, which have refcount blocks; `None` on a device, which
    /// does not grow: all of it counts as used.
    pub async fn reserve_zone(&self, count: u64) -> Result<Option<Range<u64>>> {
        if !self.layer.storage().extends_with_zeroes() {
            return Ok(None);
        }
        let mut state = self.lock().await;
        loop {
            let (start, missing) = self.find_adjacent(&mut state, count).await?;
            let area = start..start + count;
            let homes = area.end..area.end + missing.len() as u64;
            self.refuse_tables(area.clone())?;
            if missing.last().is_some_and(|last| *last as usize >= state.table.len()) {
                self.grow_table(&mut state, homes.end).await?;
                continue;
            }
            self.take_space(&state, homes.clone()).await?;
            for (index, home) in missing.into_iter().zip(homes.clone()) {
                self.create_block(&mut state, index, home)?;
            }
            for home in homes.clone() {
                self.count_own(&mut state, home)?;
            }
            state.never_used = state.never_used.max(homes.end);
            state.areas.push(area.clone());
            return Ok(Some(area));
        }
    }

    /// Finds `count` adjacent free clusters, followed by as many more as refcount blocks are missing for all of these.
    /// Returns the start, and the indexes of the missing blocks.
    async fn find_adjacent(
        &self,
        state: &mut AsyncMutexGuard<'_, AllocState>,
        count: u64,
    ) -> Result<(u64, Vec<u64>)> {
        // A device may have no room after the clusters in use, but some before.
        let (behind, first) = (state.never_used, state.first_maybe_free);
        let mut start = if state.has_room(behind + count + 2) { behind } else { first };
        'start: loop {
            let mut missing = Vec::new();
            let mut cluster = start;
            let mut covered = None;
            while cluster < start + count + missing.len() as u64 {
                self.need_room(state, cluster + 1).await?;
                if state.is_kept(cluster) {
                    start = cluster + 1;
                    continue 'start;
                }
                let (index, _) = self.geometry.refcount_position(HostCluster::new(cluster));
                if covered != Some(index) && !self.has_block(state, index)? {
                    missing.push(index);
                }
                covered = Some(index);
                if missing.last() != Some(&index) && self.refcount_in(state, cluster).await? > 0 {
                    start = cluster + 1;
                    continue 'start;
                }
                cluster += 1;
            }
            return Ok((start, missing));
        }
    }

    fn take_with_blocks(
        &self,
        state: &mut AsyncMutexGuard<'_, AllocState>,
        start: u64,
        count: u64,
        missing: Vec<u64>,
    ) -> Result<Run> {
        let homes = start + count..start + count + missing.len() as u64;
        for (index, home) in missing.into_iter().zip(homes.clone()) {
            self.create_block(state, index, home)?;
        }
        let run = self.take(state, start, count)?;
        for home in homes.clone() {
            self.count_own(state, home)?;
        }
        state.never_used = state.never_used.max(homes.end);
        Ok(run)
    }

    /// Whether there is a refcount block at an index.
    pub(super) fn has_block(
        &self,
        state: &AsyncMutexGuard<'_, AllocState>,
        index: u64,
    ) -> Result<bool> {
        if state.blocks.contains_key(&index) {
            return Ok(true);
        }
        let Some(entry) = state.table.get(index as usize) else { return Ok(false) };
        Ok(entry.offset(&self.geometry).map_err(|e| self.layer.format_error(e))?.is_some())
    }

    /// Replaces the refcount table by a longer one, for host clusters up to `end` and for its own.
    pub(super) async fn grow_table(
        &self,
        state: &mut AsyncMutexGuard<'_, AllocState>,
        end: u64,
    ) -> Result<()> {
        let entries = self.geometry.cluster_size() / 8;
        let counted = self.geometry.refcount_block_entries();
        let old_length = state.table.len();
        let end = end.max(state.never_used);
        let mut length = (old_length as u64 * 3 / 2).next_multiple_of(entries);
        loop {
            let clusters = length / entries;
            // The table itself and the blocks that count it come after.
            let reach = end + clusters + clusters.div_ceil(counted) + 2;
            let needed = reach.div_ceil(counted);
            if needed <= length {
                break;
            }
            length = needed.next_multiple_of(entries);
        }
        let limit = MAX_REFCOUNT_TABLE_BYTES / 8;
        if length > limit && end.div_ceil(counted) < limit {
            length = limit;
        }
        if length > limit {
            return Err(self.full(format!(
                "the file would need refcounts for {end} host clusters, more than a refcount table \
                 can hold"
            )));
        }
        let clusters = length / entries;
        let (start, missing) = self.find_adjacent(state, clusters).await?;
        if missing.last().is_some_and(|last| *last >= length) {
            return Err(self.full("its refcount table cannot grow any more".into()));
        }
        self.take_space(state, start..start + clusters + missing.len() as u64).await?;
        // From here on the table in memory is longer, and nothing may return early.
        state.table.resize(length as usize, RefcountTableEntry::unallocated());
        let run = self.take_with_blocks(state, start, clusters, missing)?;
        self.mark_metadata(run.start.get()..run.start.get() + run.count);
        state.own.extend(run.start.get()..run.start.get() + run.count);
        let old = self.geometry.host_cluster_of(state.table_offset).get();
        state.replaced_tables.push(old..old + old_length as u64 / entries);
        state.table_offset = self.start_of(run)?;
        Ok(())
    }

    fn start_of(&self, run: Run) -> Result<HostOffset> {
        self.geometry.host_cluster_start(run.start).ok_or_else(|| {
            self.full(format!("host cluster {} is past the largest possible offset", run.start))
        })
    }

    /// Makes the block at `index` of the table, in the free cluster `home`, whose refcount the
    /// caller raises.
    pub(super) fn create_block(
        &self,
        state: &mut AsyncMutexGuard<'_, AllocState>,
        index: u64,
        home: u64,
    ) -> Result<()> {
        self.refuse_tables(home..home + 1)?;
        let run = Run { start: HostCluster::new(home), count: 1, zeroed: false, beyond: false };
        let offset = self.start_of(run)?;
        let size = self.geometry.cluster_size() as usize;
        let entry = RefcountTableEntry::new(offset, &self.geometry)
            .map_err(|e| self.layer.format_error(e))?;
        if let Some(slot) = state.table.get_mut(index as usize) {
            *slot = entry;
        }
        let block = Block::fresh(offset, size, self.geometry.refcount_order());
        state.blocks.insert(index, block);
        state.unlisted.push(index);
        if state.prepared.contains(&home) {
            state.prepared.start = home + 1;
        }
        self.mark_metadata(home..home + 1);
        Ok(())
    }

    /// Writes new blocks, makes them durable, then lists them in the table (in a new table where it grew, to which the
    /// header then points). This last step is not durable yet. Returns clusters of a replaced table, to be released
    /// once it is.
    pub async fn write_structure(&self) -> Result<Vec<HostCluster>> {
        let mut state = self.state().await;
        if state.unlisted.is_empty() && state.replaced_tables.is_empty() {
            return Ok(Vec::new());
        }
        let storage = self.layer.storage();
        self.publish_own(&mut state)?;
        let indexes = std::mem::take(&mut state.unlisted);
        // All of them: a new block's own cluster may be counted in another.
        let mut parts = self.take_dirty(&mut state)?;
        let replaced = std::mem::take(&mut state.replaced_tables);
        if !replaced.is_empty() {
            parts.push((state.table_offset.get(), state.table_bytes()));
        }
        self.write_all(parts).await?;
        storage.flush().await?;
        if replaced.is_empty() {
            let steps = self.listing_steps(&state, indexes)?;
            drop(state);
            for (step, entries) in steps.into_iter().enumerate() {
                if step > 0 {
                    storage.flush().await?;
                }
                self.write_all(entries).await?;
            }
            return Ok(Vec::new());
        }
        let (at, pointer) = self.point_to_table(&state);
        drop(state);
        storage.write_at(at, pointer).await?;
        for table in &replaced {
            self.unmark_metadata(table.clone());
        }
        Ok(replaced.into_iter().flatten().map(HostCluster::new).collect())
    }

    /// The table entries that list new blocks, in steps: a block is listed only once the one that counts its cluster
    /// is, durably. Most growth takes one step; a run of clusters that several new blocks count takes more.
    pub(super) fn listing_steps(
        &self,
        state: &AllocState,
        mut indexes: Vec<u64>,
    ) -> Result<Vec<Vec<(u64, IoBuf)>>> {
        let mut steps = Vec::new();
        while !indexes.is_empty() {
            let mut entries = Vec::new();
            let mut later = Vec::new();
            for &index in &indexes {
                let entry = state.table.get(index as usize).copied();
                let entry = entry.unwrap_or_else(|| {
                    violated("a new refcount block has a place in the refcount table")
                });
                let offset =
                    entry.offset(&self.geometry).map_err(|e| self.layer.format_error(e))?;
                let Some(offset) = offset else {
                    violated("the refcount table in memory lists each new block")
                };
                let home = self.geometry.host_cluster_of(offset);
                let (counted_by, _) = self.geometry.refcount_position(home);
                let is_counted = counted_by == index || !indexes.contains(&counted_by);
                if !is_counted && !sabotage::is(Sabotage::ListedAtOnce) {
                    later.push(index);
                } else {
                    let at = state.table_offset.get() + index * 8;
                    entries.push((at, IoBuf::copy_of(&entry.raw().to_be_bytes())));
                }
            }
            if entries.is_empty() {
                violated("one of the new refcount blocks is counted by itself or by an old one");
            }
            steps.push(entries);
            indexes = later;
        }
        Ok(steps)
    }

    /// Sets the table's offset in the header in memory. Returns the same change for the header in the file: byte offset
    /// and bytes.
    pub(super) fn point_to_table(&self, state: &AllocState) -> (u64, IoBuf) {
        let clusters = (state.table.len() as u64 * 8) >> self.geometry.cluster_bits();
        let mut header = self.layer.qcow2().header.write();
        header.refcount_table_offset = state.table_offset;
        header.refcount_table_clusters = clusters as u32;
        drop(header);
        // refcount_table_clusters follows refcount_table_offset.
        let mut pointer = IoBuf::zeroed(12);
        pointer[..8].copy_from_slice(&state.table_offset.get().to_be_bytes());
        pointer[8..].copy_from_slice(&(clusters as u32).to_be_bytes());
        (field::REFCOUNT_TABLE_OFFSET as u64, pointer)
    }
}

impl AllocState {
    /// The whole refcount table.
    pub(super) fn table_bytes(&self) -> IoBuf {
        let bytes = self.table.iter().flat_map(|entry| entry.raw().to_be_bytes());
        IoBuf::copy_of(&bytes.collect::<Vec<u8>>())
    }
}
