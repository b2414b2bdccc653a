//! Tables with a journal: their changes in a record, and their checkpoint.

use super::{ClosedBatch, Released, Tables};
use crate::Result;
use crate::alloc::not_zero;
use isobath_qcow2::L2Entry;
use isobath_storage::{IoBuf, Storage};
use std::collections::BTreeMap;

/// What a record tells of the closed batch.
#[derive(Default)]
pub struct StagedTables {
    /// New tables, zero except for `patches`: host offsets.
    pub fresh: Vec<u64>,
    /// Bytes and their offsets.
    pub patches: Vec<(u64, Vec<u8>)>,
    updates: BTreeMap<u64, Vec<(usize, L2Entry)>>,
}

impl<S: Storage> Tables<S> {
    /// What a record tells of the closed batch.
    pub async fn stage(&self, closed: &ClosedBatch) -> Result<StagedTables> {
        let updates = self.load_updates(closed).await?;
        let mut staged = StagedTables { updates, ..StagedTables::default() };
        let state = self.state.lock();
        let batch = self.closed(&state)?;
        for (at, table) in batch.complete_tables(&self.geometry) {
            staged.fresh.push(at);
            staged.patches.extend(not_zero(at, &table).into_iter().map(|(at, b)| (at, b.to_vec())));
        }
        let size = self.geometry.l2_entry_size();
        for (at, entry) in self.entry_places(batch)? {
            let bytes = entry.bytes(&self.geometry);
            let bytes = &bytes[..size];
            match staged.patches.last_mut() {
                Some((start, run)) if *start + run.len() as u64 == at => {
                    run.extend_from_slice(bytes);
                }
                _ => staged.patches.push((at, bytes.to_vec())),
            }
        }
        let table = self.layer.qcow2().header.read().l1_table_offset.get();
        for (index, entry) in &batch.l1 {
            staged.patches.push((table + index * 8, entry.raw().to_be_bytes().to_vec()));
        }
        Ok(staged)
    }

    /// Ends a commit whose record is durable: cached pages have its changes, which are not in place in the file yet.
    /// Otherwise like [`finish_commit`](Self::finish_commit).
    pub fn finish_journaled(&self, closed: ClosedBatch, staged: &StagedTables) -> Result<Released> {
        let mut state = self.state.lock();
        let state = &mut *state;
        self.apply(state, &staged.updates)?;
        for page in staged.updates.keys() {
            state.pages.mark_dirty(*page);
        }
        let batch = closed.into_batch(state.closed.take());
        let length = state.pages.page_size();
        for (at, table) in batch.complete_tables(&self.geometry) {
            for (number, page) in table.chunks(length).enumerate() {
                let page_at = at + (number * length) as u64;
                state.pages.insert(page_at, IoBuf::copy_of(page));
                state.pages.mark_dirty(page_at);
            }
        }
        state.journaled_l1.extend(batch.l1.keys());
        Ok(self.finish(state, batch))
    }

    /// Bytes of pages that are newer than the file.
    pub fn dirty_bytes(&self) -> usize {
        let state = self.state.lock();
        state.pages.dirty_count() * state.pages.page_size()
    }

    /// Writes all changes in records to their final places; not yet durable. No other commit may be in progress.
    pub async fn checkpoint(&self) -> Result<()> {
        let writes = {
            let state = self.state.lock();
            let mut writes = state.pages.dirty();
            writes.extend(self.l1_writes(None, state.journaled_l1.iter().copied().collect()));
            writes
        };
        self.write_all(writes).await?;
        let mut state = self.state.lock();
        state.pages.clean();
        state.journaled_l1.clear();
        Ok(())
    }
}
