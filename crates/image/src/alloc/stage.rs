//! Refcounts with a journal: their changes in a record, and their checkpoint.

use super::block::Block;
use super::{AllocState, Allocator, Journaled};
use crate::{Result, always};
use isobath_qcow2::HostCluster;
use isobath_storage::{IoBuf, Storage};
use isobath_sync::AsyncMutexGuard;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Changes of the refcount structure that become durable with a record.
#[derive(Default)]
pub struct Staged {
    /// New structures, zero except for `patches`: offset and length.
    pub fresh: Vec<(u64, u64)>,
    /// Bytes and their offsets.
    pub patches: Vec<(u64, IoBuf)>,
    /// Clusters of a refcount table that was replaced, to be released with the record's others.
    pub replaced: Vec<HostCluster>,
}

impl<S: Storage> Allocator<S> {
    /// From now on changes reach the file through a journal. The file has all changes so far.
    pub async fn begin_journal(&self) {
        self.state().await.journaled = Some(Journaled::default());
    }

    /// The journal is empty and no longer used.
    pub async fn end_journal(&self) {
        self.state().await.journaled = None;
    }

    /// Whether a record has anything to contain besides what its own changes publish and release.
    pub async fn has_unstaged(&self) -> bool {
        let state = self.state().await;
        let changed = state.journaled.as_ref().is_some_and(|j| !j.changed.is_empty());
        changed || !state.unlisted.is_empty() || !state.replaced_tables.is_empty()
    }

    /// The most bytes that unstaged changes take in a record, including their operations' headers.
    pub async fn staged_bytes(&self) -> u64 {
        let state = self.state().await;
        let changed = state.journaled.as_ref().map_or(0, |j| j.changed.len()) + state.own.len();
        let blocks = state.unlisted.len() as u64 * 2 * self.geometry.cluster_size();
        let table = if state.replaced_tables.is_empty() { 0 } else { 16 * state.table.len() };
        blocks + 32 * (changed + state.unlisted.len() + 4) as u64 + table as u64
    }

    /// Changes for the next record: everything published since the last one, less one reference for each time a cluster
    /// is in `releases`. Those references are still counted in memory, and must be [released](Self::release) together
    /// with the returned ones once the record is durable.
    pub async fn stage(&self, releases: &[HostCluster]) -> Result<Staged> {
        let mut state = self.state().await;
        let mut staged = Staged::default();
        for table in std::mem::take(&mut state.replaced_tables) {
            self.unmark_metadata(table.clone());
            staged.replaced.extend(table.map(HostCluster::new));
        }
        let mut less: BTreeMap<u64, u64> = BTreeMap::new();
        for cluster in releases.iter().chain(&staged.replaced) {
            let count = less.entry(cluster.get()).or_default();
            *count += 1;
            let held = state.unpublished_references(cluster.get());
            if self.refcount_in(&mut state, cluster.get()).await? < *count + held {
                return Err(self.unbalanced(cluster.get()));
            }
        }
        self.publish_own(&mut state)?;
        self.stage_table(&mut state, &mut staged);
        let fresh = std::mem::take(&mut state.unlisted);
        for index in &fresh {
            self.stage_block(&state, &less, *index, &mut staged)?;
        }
        let mut changed = match &mut state.journaled {
            Some(journaled) => std::mem::take(&mut journaled.changed),
            None => BTreeSet::new(),
        };
        changed.extend(less.keys());
        let mut runs: Vec<(u64, Range<usize>)> = Vec::new();
        for cluster in changed {
            let (index, within) = self.geometry.refcount_position(HostCluster::new(cluster));
            if fresh.contains(&index) {
                continue;
            }
            let bytes = self.block(&mut state, index, cluster)?.bytes_of(within);
            match runs.last_mut() {
                Some((last, run)) if *last == index && bytes.start <= run.end => {
                    run.end = bytes.end;
                }
                _ => runs.push((index, bytes)),
            }
        }
        for (index, bytes) in runs {
            let patch = self.patch(&state, &less, index, bytes)?;
            staged.patches.push(patch);
        }
        Ok(staged)
    }

    /// Entries of new blocks, or a whole new table and the header's pointer to it.
    fn stage_table(&self, state: &mut AsyncMutexGuard<'_, AllocState>, staged: &mut Staged) {
        let at = state.table_offset.get();
        if staged.replaced.is_empty() {
            let mut entries = Vec::new();
            for index in &state.unlisted {
                if let Some(entry) = state.table.get(*index as usize) {
                    entries.push(*index);
                    let bytes = IoBuf::copy_of(&entry.raw().to_be_bytes());
                    staged.patches.push((at + index * 8, bytes));
                }
            }
            if let Some(journaled) = &mut state.journaled {
                journaled.entries.extend(entries);
            }
            return;
        }
        let table = state.table_bytes();
        staged.fresh.push((at, table.len() as u64));
        staged.patches.extend(not_zero(at, &table));
        staged.patches.push(self.point_to_table(state));
        if let Some(journaled) = &mut state.journaled {
            journaled.moved = true;
        }
    }

    /// A new block, whole.
    fn stage_block(
        &self,
        state: &AsyncMutexGuard<'_, AllocState>,
        less: &BTreeMap<u64, u64>,
        index: u64,
        staged: &mut Staged,
    ) -> Result<()> {
        let length = self.staged_block(state, index)?.len();
        let (at, bytes) = self.patch(state, less, index, 0..length)?;
        staged.fresh.push((at, length as u64));
        staged.patches.extend(not_zero(at, &bytes));
        Ok(())
    }

    /// Bytes of a block as a record contains them, and their offset in the file.
    fn patch(
        &self,
        state: &AsyncMutexGuard<'_, AllocState>,
        less: &BTreeMap<u64, u64>,
        index: u64,
        bytes: Range<usize>,
    ) -> Result<(u64, IoBuf)> {
        let block = self.staged_block(state, index)?;
        let places = block.indexes_in(&bytes);
        let unpublished = self.counted_in(&state.unpublished, index, places.clone());
        let less = unpublished.chain(self.counted_in(less, index, places));
        let at = block.offset.get() + bytes.start as u64;
        let bytes = block.copy_with_less(bytes, less);
        Ok((at, bytes.map_err(|error| self.layer.format_error(error))?))
    }

    /// A block with changes for a record.
    pub(super) fn staged_block<'a>(
        &self,
        state: &'a AsyncMutexGuard<'_, AllocState>,
        index: u64,
    ) -> Result<&'a Block> {
        let block = state.blocks.get(&index);
        always(block, self.layer.name(), "a refcount block that changed is in memory")
    }

    /// Writes all changes in records to their final places; not yet durable. No record may be in progress.
    pub async fn checkpoint(&self) -> Result<()> {
        let parts = {
            let mut state = self.state().await;
            let mut parts = self.take_dirty(&mut state)?;
            let at = state.table_offset.get();
            let journaled = match &mut state.journaled {
                Some(journaled) => {
                    (std::mem::take(&mut journaled.entries), std::mem::take(&mut journaled.moved))
                }
                None => Default::default(),
            };
            if journaled.1 {
                parts.push((at, state.table_bytes()));
                parts.push(self.point_to_table(&state));
            } else {
                parts.extend(journaled.0.into_iter().filter_map(|index| {
                    let entry = state.table.get(index as usize)?;
                    Some((at + index * 8, IoBuf::copy_of(&entry.raw().to_be_bytes())))
                }));
            }
            parts
        };
        self.write_all(parts).await
    }
}

/// The parts of `bytes`, at offset `at`, that are not zero. Parts close to each other are merged.
pub(crate) fn not_zero(at: u64, bytes: &[u8]) -> Vec<(u64, IoBuf)> {
    const STEP: usize = 64;
    let mut runs: Vec<Range<usize>> = Vec::new();
    for (number, piece) in bytes.chunks(STEP).enumerate() {
        if piece.iter().all(|byte| *byte == 0) {
            continue;
        }
        let start = number * STEP;
        match runs.last_mut() {
            Some(run) if run.end == start => run.end += piece.len(),
            _ => runs.push(start..start + piece.len()),
        }
    }
    runs.into_iter().map(|run| (at + run.start as u64, IoBuf::copy_of(&bytes[run]))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeroes_are_left_out() {
        let mut bytes = [0; 1000];
        assert!(not_zero(4096, &bytes).is_empty());
        bytes[70] = 1;
        bytes[130] = 1;
        bytes[999] = 1;
        let parts: Vec<_> = not_zero(4096, &bytes).iter().map(|(at, b)| (*at, b.len())).collect();
        assert_eq!(parts, [(4096 + 64, 128), (4096 + 960, 40)]);
    }
}
