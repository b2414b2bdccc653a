//! Growth of the refcount structure itself.
//!
//! A new block counts its own cluster. It is written and made durable before the table lists it, and
//! a new table before the header points to it, so a crash in between leaves the old structure whole:
//! what only the new one counted is then not referenced either.

use super::block::Block;
use super::{Allocator, Run, State};
use crate::Result;
use async_lock::MutexGuard;
use isobath_qcow2::geometry::MAX_REFCOUNT_TABLE_BYTES;
use isobath_qcow2::{HostCluster, HostOffset, RefcountTableEntry};
use isobath_storage::{IoBuf, Storage};

impl<S: Storage> Allocator<S> {
    /// Sees to it that a cluster has a refcount block in memory, creating one where none is.
    pub(super) async fn cover(
        &self,
        state: &mut MutexGuard<'_, State>,
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
        let grows = index as usize >= state.table.len();
        if grows {
            let entries = self.geometry.cluster_size() / 8;
            let wanted =
                (index + 1).max(state.table.len() as u64 * 3 / 2).next_multiple_of(entries);
            let limit = MAX_REFCOUNT_TABLE_BYTES / 8;
            if index >= limit {
                return Err(self.corrupt(format!(
                    "the file would need refcounts for host cluster {cluster}, more than a refcount \
                     table can hold"
                )));
            }
            let length = wanted.min(limit) as usize;
            let old = self.geometry.host_cluster_of(state.table_offset).get();
            let old_clusters = state.table.len() as u64 / entries;
            state.table.resize(length, RefcountTableEntry::unallocated());
            self.create_block(state, index, cluster)?;
            // Boxed: taking clusters may need further blocks, for which the table is long enough.
            let run = Box::pin(self.take_adjacent(state, length as u64 / entries)).await?;
            self.mark_metadata(run.start.get()..run.start.get() + run.count);
            state.replaced_tables.push(old..old + old_clusters);
            state.table_offset = self.start_of(run)?;
        } else {
            self.create_block(state, index, cluster)?;
        }
        Ok(())
    }

    fn start_of(&self, run: Run) -> Result<HostOffset> {
        self.geometry.host_cluster_start(run.start).ok_or_else(|| {
            self.corrupt(format!("host cluster {} lies beyond what an offset can name", run.start))
        })
    }

    /// Makes `cluster`, which has no refcount block, the home of the block that counts it.
    fn create_block(
        &self,
        state: &mut MutexGuard<'_, State>,
        index: u64,
        cluster: u64,
    ) -> Result<()> {
        let order = self.geometry.refcount_order();
        let size = self.geometry.cluster_size() as usize;
        let (_, within) = self.geometry.refcount_position(HostCluster::new(cluster));
        let run = Run { start: HostCluster::new(cluster), count: 1, zeroed: false };
        let offset = self.start_of(run)?;
        let mut block = Block::fresh(offset, size, order);
        block.set(within, 1).map_err(|e| self.layer.format_error(e))?;
        let entry = RefcountTableEntry::new(offset, &self.geometry)
            .map_err(|e| self.layer.format_error(e))?;
        if let Some(slot) = state.table.get_mut(index as usize) {
            *slot = entry;
        }
        state.blocks.insert(index, block);
        state.unlisted.push(index);
        state.never_used = state.never_used.max(cluster + 1);
        self.mark_metadata(cluster..cluster + 1);
        Ok(())
    }

    /// Writes new blocks, makes them durable, then lists them in the table (in a new table where it
    /// grew, to which the header then points). What this last step wrote is not durable yet.
    /// Returns clusters of a replaced table, to be released once it is.
    pub(crate) async fn write_structure(&self) -> Result<Vec<HostCluster>> {
        let mut state = self.state.lock().await;
        if state.unlisted.is_empty() && state.replaced_tables.is_empty() {
            return Ok(Vec::new());
        }
        let storage = self.layer.storage();
        let indexes = std::mem::take(&mut state.unlisted);
        let mut parts = Vec::new();
        for index in &indexes {
            if let Some(block) = state.blocks.get_mut(index) {
                parts.extend(block.take_dirty());
            }
        }
        let replaced = std::mem::take(&mut state.replaced_tables);
        if !replaced.is_empty() {
            let mut bytes = IoBuf::zeroed(state.table.len() * 8);
            for (index, entry) in state.table.iter().enumerate() {
                // In range: the buffer has a place for each entry.
                let _ = entry.write(&mut bytes, index);
            }
            parts.push((state.table_offset.get(), bytes));
            // The table's own clusters and others may be counted in blocks that existed before.
            for block in state.blocks.values_mut() {
                parts.extend(block.take_dirty());
            }
        }
        self.write_all(parts).await?;
        storage.flush().await?;
        if replaced.is_empty() {
            let mut entries = Vec::new();
            for index in indexes {
                if let Some(entry) = state.table.get(index as usize) {
                    let at = state.table_offset.get() + index * 8;
                    entries.push((at, IoBuf::copy_of(&entry.raw().to_be_bytes())));
                }
            }
            drop(state);
            self.write_all(entries).await?;
            return Ok(Vec::new());
        }
        let offset = state.table_offset;
        let clusters = (state.table.len() as u64 * 8) >> self.geometry.cluster_bits();
        drop(state);
        if let Some(qcow2) = self.layer.as_qcow2() {
            let mut header = qcow2.header.write();
            header.refcount_table_offset = offset;
            header.refcount_table_clusters = clusters as u32;
        }
        // refcount_table_offset and refcount_table_clusters: bytes 48 to 59 of the header.
        let mut field = IoBuf::zeroed(12);
        field[..8].copy_from_slice(&offset.get().to_be_bytes());
        field[8..].copy_from_slice(&(clusters as u32).to_be_bytes());
        storage.write_at(48, field).await?;
        for table in &replaced {
            self.unmark_metadata(table.clone());
        }
        Ok(replaced.into_iter().flatten().map(HostCluster::new).collect())
    }
}
