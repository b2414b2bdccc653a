//! Commits of embedded mappings: a sync without a record.

use super::{Active, Journal};
use crate::Result;
use crate::durability::metadata::Metadata;
use isobath_qcow2::Lsn;
use isobath_storage::Storage;
use std::sync::atomic::Ordering;

impl Journal {
    /// Commits by a sync alone if every change is embedded with an LSN below `lsn`, the commit's; otherwise does
    /// nothing and returns `false`.
    pub(super) async fn commit_embedded<S: Storage>(
        &self,
        active: &mut Active,
        metadata: &Metadata<S>,
        lsn: Lsn,
    ) -> Result<bool> {
        let Metadata { tables, alloc, data_journal, zones, .. } = metadata;
        let asked = self.asked.load(Ordering::SeqCst);
        if !zones.any() || asked || self.is_due(tables.pending(), 0) || !tables.are_embedded() {
            return Ok(false);
        }
        if alloc.has_unstaged().await {
            return Ok(false);
        }
        let Some(commit) = data_journal.begin_embedded_commit() else { return Ok(false) };
        commit.landed().await;
        let noted = zones.take_noted();
        let written = active.written;
        metadata.sync().await?;
        active.synced(written);
        data_journal.finish_embedded_commit(commit, lsn, noted);
        Ok(true)
    }
}
