//! Images on block devices, which have a fixed length and do not grow.
//!
//! Space after the last cluster in use is free, with arbitrary contents. A request that finds no room fails before
//! anything has changed: a commit that found none would leave the disk unable to accept writes.

use super::{AllocState, Allocator};
use crate::sabotage::{self, Sabotage};
use crate::{DiskError, Result};
use isobath_qcow2::{Geometry, HostCluster};
use isobath_storage::{Operation, Storage, StorageError};
use isobath_sync::AsyncMutexGuard;
use std::io;

/// On a device that is too short for its disk, an area may take one part in this many of the free space.
const FREE_PARTS: u64 = 8;

/// The clusters of an image whose disk of `size` bytes is fully written.
fn most_clusters(geometry: &Geometry, size: u64) -> u64 {
    let data = size.div_ceil(geometry.cluster_size());
    let l1 = geometry.l1_size_for(size);
    // L2 tables, the L1 table and the header.
    let first = data + l1 + geometry.clusters_for(l1 * 8) + 1;
    let mut all = first;
    loop {
        let blocks = all.div_ceil(geometry.refcount_block_entries());
        let needed = first + blocks + geometry.clusters_for(blocks * 8);
        if needed == all {
            return all;
        }
        all = needed;
    }
}

impl<S: Storage> Allocator<S> {
    /// Finds the end of what is in use on a device of `length` bytes.
    pub(super) async fn measure_device(&self, length: u64) -> Result<()> {
        let mut state = self.state().await;
        let room = length >> self.geometry.cluster_bits();
        state.room = Some(room);
        let mut end = self.own.read().tables.iter().max().map_or(0, |last| last + 1);
        let mut cluster = room;
        while cluster > end {
            let last = cluster - 1;
            let (index, within) = self.geometry.refcount_position(HostCluster::new(last));
            if !self.has_block(&state, index)? {
                // None of its clusters is in use.
                cluster -= (within as u64 + 1).min(cluster);
                continue;
            }
            if self.refcount_in(&mut state, last).await? > 0 {
                end = cluster;
            }
            cluster = last;
            self.shrink_cache(&mut state);
        }
        state.never_used = end.max(1);
        state.added_from = state.never_used;
        Ok(())
    }

    /// How many of `wanted` clusters an area may take without leaving too little for the guest's data. A device that
    /// can hold the whole disk still can beside the area; on a device that is extended as it fills up, the area takes a
    /// small part of the free space.
    pub async fn spare(&self, wanted: u64) -> u64 {
        let state = self.state().await;
        let Some(room) = state.room else { return wanted };
        let all = most_clusters(&self.geometry, self.layer.size());
        let spare = match room.checked_sub(all) {
            Some(spare) => spare,
            None => room.saturating_sub(state.never_used) / FREE_PARTS,
        };
        spare.min(wanted)
    }

    /// Fails if the clusters up to `end` reach past the end of the device, which may have grown since.
    pub(super) async fn need_room(
        &self,
        state: &mut AsyncMutexGuard<'_, AllocState>,
        end: u64,
    ) -> Result<()> {
        if state.has_room(end) || sabotage::is(Sabotage::NoEnd) {
            return Ok(());
        }
        let length = self.layer.storage().len().await?;
        state.room = Some(length >> self.geometry.cluster_bits());
        if state.has_room(end) {
            return Ok(());
        }
        Err(self.no_room())
    }

    /// The error for a device without room.
    pub fn no_room(&self) -> DiskError {
        let full = io::Error::from_raw_os_error(libc::ENOSPC);
        StorageError::new(Operation::Write, self.layer.storage().name(), full).into()
    }
}
