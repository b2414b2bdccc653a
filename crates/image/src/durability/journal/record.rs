//! A commit with a record: what is closed, built, written and finished.

use super::build::{self, Builder};
use super::{Active, BLOCK, Journal, checkpoint, in_place, most_blocks, ordered};
use crate::Result;
use crate::alloc::Staged;
use crate::durability::data_journal::{ClosedData, DataCommit};
use crate::durability::metadata::Metadata;
use crate::durability::zones::CommitPoint;
use crate::readers::Readers;
use crate::restart_log::ClosedLog;
use crate::sabotage::{self, Sabotage};
use crate::tables::{ClosedBatch, StagedTables};
use isobath_qcow2::{HostCluster, Lsn};
use isobath_storage::Storage;
use std::sync::atomic::Ordering;

/// Bytes of changed table pages at which a checkpoint is made.
pub(super) const MAX_DIRTY: usize = 8 << 20;

/// What a commit has closed.
struct Closed {
    batch: ClosedBatch,
    /// Clusters to which nothing refers after the commit.
    freed: Vec<HostCluster>,
    data: ClosedData,
    /// A record is wanted even without changes.
    asked: bool,
}

/// What does not fit into a record, while the journal may be taken out of use for it.
pub(super) struct TooLarge {
    pub(super) batch: ClosedBatch,
    pub(super) log: Option<ClosedLog>,
    pub(super) data: DataCommit,
}

/// What a record contains, as far as the commit must know it afterwards.
struct Recorded {
    staged: StagedTables,
    refcounts: Staged,
    /// A recovery replays no record before this one.
    tail: Lsn,
}

impl Journal {
    /// Commits with a record, if there are changes. The record gets the commit's LSN, and contains the mappings
    /// embedded with a lower one. Returns the batch if it is too large for a record and the journal may be taken out of
    /// use for it.
    pub(super) async fn commit_record<S: Storage>(
        &self,
        active: &mut Active,
        metadata: &Metadata<S>,
        readers: &Readers,
        point: &CommitPoint,
    ) -> Result<Option<TooLarge>> {
        let mut closed = self.close_batch(metadata, point.lsn).await?;
        let tells = closed.batch.changes || !closed.data.writes.is_empty() || closed.asked;
        if !tells && !metadata.alloc.has_unstaged().await {
            commit_data(active, metadata, closed).await?;
            return Ok(None);
        }
        // Data that cannot have checksums in a record must be durable before the record is written.
        if closed.data.too_much || metadata.has_data_apart() {
            metadata.layer.data().flush().await?;
            closed.data.checksums.clear();
        }
        let staged = metadata.tables.stage(&closed.batch).await?;
        if !fits(active, metadata, &closed, &staged).await {
            return commit_without(active, metadata, readers, closed, point).await;
        }
        let (record, recorded) = build(active, metadata, point.lsn, &mut closed, staged).await?;
        let written = active.written;
        active.write(metadata, record).await?;
        active.synced(written);
        active.checkpoint_lsn = point.lsn;
        finish(active, metadata, readers, closed, recorded, point.lsn).await?;
        Ok(None)
    }

    /// Closes the open batches, and waits for the writes to them.
    async fn close_batch<S: Storage>(&self, metadata: &Metadata<S>, lsn: Lsn) -> Result<Closed> {
        let mut batch = metadata.tables.begin_commit()?;
        let freed = metadata.alloc.freed_by(&batch.releases).await?;
        let (size, entries) = (metadata.cluster_size(), batch.log.take());
        let data = metadata.data_journal.begin_commit(lsn, &freed, size, entries);
        data.commit.landed().await;
        let asked = self.asked.swap(false, Ordering::SeqCst);
        Ok(Closed { batch, freed, data, asked })
    }
}

/// Commits data that needs no record.
async fn commit_data<S: Storage>(
    active: &mut Active,
    metadata: &Metadata<S>,
    closed: Closed,
) -> Result<()> {
    let written = active.written;
    metadata.sync().await?;
    active.synced(written);
    let _ = metadata.log_durable(closed.data.log);
    metadata.data_journal.finish_plain_commit(closed.data.commit);
    metadata.tables.finish_commit(closed.batch);
    Ok(())
}

/// Whether what was closed fits into one record, and into the free part of the area.
async fn fits<S: Storage>(
    active: &Active,
    metadata: &Metadata<S>,
    closed: &Closed,
    staged: &StagedTables,
) -> bool {
    let Closed { batch, data, .. } = closed;
    let estimate =
        build::estimate(staged, &metadata.alloc, batch, &data.checksums, &data.writes).await;
    let blocks = (metadata.zones.table_bytes() + estimate).div_ceil(BLOCK as u64);
    blocks <= most_blocks(&active.ring) && active.ring.room(blocks).is_some()
}

/// Commits what does not fit into a record; or returns it, if the journal may be taken out of use.
async fn commit_without<S: Storage>(
    active: &mut Active,
    metadata: &Metadata<S>,
    readers: &Readers,
    closed: Closed,
    point: &CommitPoint,
) -> Result<Option<TooLarge>> {
    let Closed { batch, freed, data, .. } = closed;
    let has_log = metadata.log.as_ref().is_some_and(|log| log.is_begun());
    if !metadata.zones.any() && !has_log {
        return Ok(Some(TooLarge { batch, log: data.log, data: data.commit }));
    }
    let ClosedData { writes, plain, log, commit, .. } = data;
    let closed = in_place::Oversized { batch, freed, writes, plain, log, data: commit };
    Box::pin(in_place::commit(active, metadata, readers, closed, point)).await?;
    Ok(None)
}

/// Builds the record.
async fn build<S: Storage>(
    active: &Active,
    metadata: &Metadata<S>,
    lsn: Lsn,
    closed: &mut Closed,
    staged: StagedTables,
) -> Result<(Builder, Recorded)> {
    metadata.alloc.publish(&closed.batch.allocated).await?;
    let refcounts = metadata.alloc.stage(&closed.batch.releases).await?;
    let tail = active.durable.next();
    let mut record = active.next(metadata.cluster_size(), lsn, tail);
    record.revoke(&active.last_operations, closed.freed.iter().chain(&refcounts.replaced));
    record.tables(&staged);
    record.refcounts(&refcounts);
    record.data(&closed.data.writes);
    let checksums = std::mem::take(&mut closed.data.checksums);
    record.add_checksums(&**metadata.layer.data(), checksums).await?;
    metadata.zones.leave_out(lsn, &closed.freed);
    record.zones(metadata.zones.table(lsn, &closed.data.plain));
    Ok((record, Recorded { staged, refcounts, tail }))
}

/// Ends a commit whose record is durable: what it frees may be used again.
async fn finish<S: Storage>(
    active: &mut Active,
    metadata: &Metadata<S>,
    readers: &Readers,
    closed: Closed,
    recorded: Recorded,
    lsn: Lsn,
) -> Result<()> {
    let Metadata { tables, alloc, data_journal, zones, .. } = metadata;
    let (freed, replaced) = (&closed.freed, &recorded.refcounts.replaced);
    let dropped = metadata.log_durable(closed.data.log);
    data_journal.finish_commit(closed.data.commit, lsn, recorded.tail);
    metadata.zones_listed().await?;
    let released = tables.finish_journaled(closed.batch, &recorded.staged)?;
    if !released.clusters.is_empty() || !replaced.is_empty() {
        metadata.forget_unreferenced(freed, readers, dropped).await;
        if released.discarded {
            let unused = ordered::unused(metadata, &released.clusters).await?;
            Box::pin(ordered::discard(metadata, unused)).await?;
        }
        alloc.release(&released.clusters).await?;
        alloc.release(replaced).await?;
        zones.release(freed);
    }
    let half = active.ring.used() * 2 > active.ring.blocks();
    if half || tables.dirty_bytes() > MAX_DIRTY {
        checkpoint(metadata).await?;
        active.written = lsn;
        if sabotage::is(Sabotage::EarlyCheckpoint) {
            active.synced(lsn);
        }
    }
    Ok(())
}
