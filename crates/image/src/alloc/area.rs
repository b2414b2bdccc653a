//! Areas: clusters that are free according to the file's refcounts (refcount 0) but are never allocated. A
//! direct-access index has one, and so does a journal.
//!
//! QEMU assumes that everything after the last cluster in use is zero, so an index's area must be followed by a cluster
//! in use that is never moved: a refcount block. A journal's area is gone before QEMU may open the image.

use super::{AllocState, Allocator};
use crate::Result;
use isobath_qcow2::{HostCluster, HostOffset, RefcountTableEntry};
use isobath_storage::Storage;
use isobath_sync::AsyncMutexGuard;
use std::ops::Range;

/// Clusters searched for an area before it is put at the end.
const LOOKED_AT: u64 = 64 << 10;

impl<S: Storage> Allocator<S> {
    /// The first cluster past everything ever used, and its offset.
    pub async fn end(&self) -> Result<(HostCluster, HostOffset)> {
        let state = self.lock().await;
        let cluster = HostCluster::new(state.never_used);
        let offset = self.geometry.host_cluster_start(cluster);
        let offset = offset.ok_or_else(|| self.full("it cannot grow any more".into()))?;
        Ok((cluster, offset))
    }

    /// Keeps these clusters from being allocated from now on, if they lie in the file.
    pub async fn keep_area(&self, area: Range<u64>) {
        let mut state = self.state().await;
        if area.end <= state.never_used {
            state.areas.push(area);
        }
    }

    /// Finds `count` adjacent free clusters, past everything ever used if there are none soon before that, and keeps
    /// them.
    pub async fn reserve_area(&self, count: u64) -> Result<Range<u64>> {
        let mut state = self.lock().await;
        let first = state.first_maybe_free;
        let end = state.never_used.min(first + LOOKED_AT);
        let mut start = first;
        for cluster in first..end {
            self.shrink_cache(&mut state);
            let free = !state.is_kept(cluster) && self.refcount_in(&mut state, cluster).await? == 0;
            if !free {
                start = cluster + 1;
            } else if cluster + 1 - start == count {
                break;
            }
        }
        if end.saturating_sub(start) < count {
            start = self.free_behind(&mut state, count).await?;
        }
        let area = start..start + count;
        self.refuse_tables(area.clone())?;
        self.need_room(&mut state, area.end).await?;
        state.never_used = state.never_used.max(area.end);
        state.areas.push(area.clone());
        Ok(area)
    }

    /// The first of `count` adjacent clusters past everything ever used. Those that are counted, since they were in the
    /// file before it was truncated, stay as they are.
    pub(super) async fn free_behind(
        &self,
        state: &mut AsyncMutexGuard<'_, AllocState>,
        count: u64,
    ) -> Result<u64> {
        let mut start = state.never_used;
        let mut cluster = start;
        while cluster < start + count {
            let (index, _) = self.geometry.refcount_position(HostCluster::new(cluster));
            if !self.has_block(state, index)? {
                cluster = (index + 1) * self.geometry.refcount_block_entries();
                continue;
            }
            self.shrink_cache(state);
            if self.refcount_in(state, cluster).await? > 0 {
                start = cluster + 1;
            }
            cluster += 1;
        }
        Ok(start)
    }

    /// The journal has this area from now on, which is of no use for guest data whatever an entry of a damaged image
    /// says.
    pub fn set_journal_area(&self, area: Range<u64>) {
        self.own.write().journal = area.clone();
        self.marked.add(area);
    }

    /// Takes a free cluster of an area.
    pub async fn take_kept(&self, cluster: HostCluster) -> Result<()> {
        let mut state = self.lock().await;
        self.refuse_tables(cluster.get()..cluster.get() + 1)?;
        if self.refcount_in(&mut state, cluster.get()).await? > 0 {
            return Err(self.corrupt(format!("host cluster {cluster} of a zone is in use twice")));
        }
        self.reserve(&mut state, cluster.get(), 1)?;
        self.layer.give_out((cluster.get() + 1) << self.geometry.cluster_bits());
        Ok(())
    }

    /// Keeps these clusters from being allocated, including those past everything ever used, until freed clusters are
    /// [allocated again](Self::keep_freed).
    pub async fn set_aside(&self, clusters: Range<u64>) {
        let mut state = self.state().await;
        state.never_used = state.never_used.max(clusters.end);
        state.freed.get_or_insert_default().extend(clusters);
    }

    /// Adds a reference to a cluster that was [set aside](Self::set_aside).
    pub async fn claim(&self, cluster: HostCluster) -> Result<()> {
        let mut state = self.lock().await;
        self.refuse_tables(cluster.get()..cluster.get() + 1)?;
        let (index, _) = self.geometry.refcount_position(cluster);
        if !self.has_block(&state, index)? {
            if index as usize >= state.table.len() {
                self.grow_table(&mut state, cluster.get() + 1).await?;
            }
            // Its refcount block goes elsewhere.
            let home = self.find_free(&mut state).await?;
            if !self.has_block(&state, index)? {
                self.take_space(&state, home..home + 1).await?;
                self.create_block(&mut state, index, home)?;
                self.count_own(&mut state, home)?;
            }
        }
        let count = self.refcount_in(&mut state, cluster.get()).await?;
        self.reserve(&mut state, cluster.get(), count + 1)?;
        self.layer.give_out((cluster.get() + 1) << self.geometry.cluster_bits());
        Ok(())
    }

    /// Whether these clusters are kept.
    pub async fn is_kept(&self, area: &Range<u64>) -> bool {
        self.state().await.areas.contains(area)
    }

    /// Makes them available for allocation again.
    pub async fn forget_area(&self, area: &Range<u64>) {
        let mut state = self.state().await;
        state.areas.retain(|kept| kept != area);
        state.first_maybe_free = state.first_maybe_free.min(area.start);
    }

    /// Fails if a device has no room for an area, the refcount block after it, and a refcount table that must grow.
    pub async fn need_area(&self, area: &Range<u64>) -> Result<()> {
        let mut state = self.lock().await;
        let (index, _) = self.geometry.refcount_position(HostCluster::new(area.end));
        let mut more = 1;
        if index >= state.table.len() as u64 {
            let clusters = self.geometry.clusters_for(state.table.len() as u64 * 8);
            // It becomes half as long again, and has blocks of its own.
            more += 2 * clusters + 4;
        }
        self.need_room(&mut state, area.end + more).await
    }

    /// Keeps an area that starts at [`end`](Self::end) and puts a refcount block after it. Returns the clusters to be
    /// released once the structure is written and durable.
    pub async fn append_area(&self, area: Range<u64>) -> Result<Vec<HostCluster>> {
        let mut state = self.lock().await;
        if area.start < state.never_used {
            return Err(self.full("it grew while its index was written".into()));
        }
        let home = area.end;
        self.refuse_tables(area.start..home + 1)?;
        state.never_used = home;
        state.areas.push(area);
        self.cover(&mut state, home).await?;
        state.never_used = state.never_used.max(home + 1);
        if self.refcount_in(&mut state, home).await? > 0 {
            // A block was missing here, and was put into the range that it counts.
            return Ok(Vec::new());
        }
        // The first block counts the header, so it always exists.
        self.refcount_in(&mut state, 0).await?;
        let offset = self.geometry.host_cluster_start(HostCluster::new(home));
        let offset = offset.ok_or_else(|| self.full("it cannot grow any more".into()))?;
        let entry = RefcountTableEntry::new(offset, &self.geometry)
            .map_err(|error| self.layer.format_error(error))?;
        let old = match state.blocks.get_mut(&0) {
            Some(block) => block.move_to(offset),
            None => return Err(self.corrupt("its first refcount block is missing".into())),
        };
        if let Some(slot) = state.table.first_mut() {
            *slot = entry;
        }
        state.unlisted.push(0);
        self.count_own(&mut state, home)?;
        let old = self.geometry.host_cluster_of(old);
        self.mark_metadata(home..home + 1);
        self.unmark_metadata(old.get()..old.get() + 1);
        Ok(vec![old])
    }
}
