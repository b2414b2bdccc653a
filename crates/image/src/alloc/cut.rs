//! Truncating a free tail of the file.

use super::Allocator;
use crate::Result;
use isobath_qcow2::HostCluster;
use isobath_storage::Storage;

/// What may be truncated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TailCut {
    /// Everything with refcount 0: it was just released.
    AllFree,
    /// Space that was added since the image was opened, and holes. Data that was there before stays: if the refcounts
    /// are wrong, it may be a guest's.
    KeepingData,
}

impl<S: Storage> Allocator<S> {
    /// Truncates the file after its last cluster in use.
    pub async fn cut_tail(&self, what: TailCut) -> Result<()> {
        let mut state = self.lock().await;
        let storage = self.layer.storage();
        let length = storage.len().await?;
        let mut end = state.never_used.max(self.geometry.clusters_for(length));
        // A file may be absurdly long: space that the table does not reach is skipped at once.
        let counted = state.table.len() as u64 * self.geometry.refcount_block_entries();
        // Areas may lie where there is no refcount block.
        let kept = state.kept_until().max(1);
        end = end.min(counted.max(kept));
        while end > kept {
            let last = end - 1;
            let (index, within) = self.geometry.refcount_position(HostCluster::new(last));
            let entry = state.table.get(index as usize).copied();
            let offset = match entry {
                Some(entry) => {
                    entry.offset(&self.geometry).map_err(|e| self.layer.format_error(e))?
                }
                None => None,
            };
            if offset.is_none() {
                // No refcount block, so none of its clusters is in use.
                end -= (within as u64 + 1).min(end - kept);
                continue;
            }
            if self.refcount_in(&mut state, last).await? > 0
                || self.is_metadata(HostCluster::new(last))
            {
                break;
            }
            end = last;
            self.shrink_cache(&mut state);
        }
        if what == TailCut::KeepingData {
            end = self.data_end(end, state.added_from).await?;
        }
        state.never_used = end;
        state.length.cut(end);
        state.added_from = state.added_from.min(end);
        state.prepared = 0..0;
        state.first_maybe_free = state.first_maybe_free.min(end);
        let cut = end << self.geometry.cluster_bits();
        if cut < length {
            storage.set_len(cut).await?;
            self.layer.cut_at(cut);
        }
        Ok(())
    }

    /// Where the last data in a range of clusters ends; `start` if it is a hole.
    async fn data_end(&self, start: u64, end: u64) -> Result<u64> {
        let bits = self.geometry.cluster_bits();
        let storage = self.layer.storage();
        let mut last = start;
        let mut at = start << bits;
        while at < end << bits {
            let run = storage.allocation(at).await?;
            if run.length == 0 {
                break;
            }
            let next = (at + run.length).min(end << bits);
            if run.data {
                last = self.geometry.clusters_for(next);
            }
            at = next;
        }
        Ok(last)
    }
}
