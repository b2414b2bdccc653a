//! A commit that is too large for a record, while zones or a restart log are in use.
//!
//! Without either, the journal is taken out of use for such a commit. With zones it must stay in use, since it lists
//! them, and so it must with a restart log, which is valid only as long as the journal is in use. So the journal is
//! emptied instead, the commit is ordered, and a record says that the embedded mappings are in the tables. A crash in
//! between finds the embedded records again: they match the tables, or what was there before the commit. So clusters of
//! zones that the commit frees keep their contents until that record is durable.

use super::{Active, build, checkpoint, ordered};
use crate::Result;
use crate::durability::data_journal::DataCommit;
use crate::durability::metadata::Metadata;
use crate::durability::zones::CommitPoint;
use crate::pieces::JournaledWrite;
use crate::readers::Readers;
use crate::restart_log::ClosedLog;
use crate::sabotage::{self, Sabotage};
use crate::tables::ClosedBatch;
use isobath_qcow2::HostCluster;
use isobath_qcow2::embedded::LEAD;
use isobath_qcow2::journal::HEAD_BYTES;
use isobath_storage::Storage;

/// The batches that were closed for the commit.
pub(super) struct Oversized {
    pub(super) batch: ClosedBatch,
    /// Clusters to which nothing refers after the commit.
    pub(super) freed: Vec<HostCluster>,
    pub(super) writes: Vec<JournaledWrite>,
    pub(super) plain: Vec<HostCluster>,
    pub(super) log: Option<ClosedLog>,
    pub(super) data: DataCommit,
}

/// Commits the closed batches in place.
pub(super) async fn commit<S: Storage>(
    active: &mut Active,
    metadata: &Metadata<S>,
    readers: &Readers,
    closed: Oversized,
    point: &CommitPoint,
) -> Result<()> {
    let lsn = point.lsn;
    let Metadata { alloc, data_journal, zones, .. } = metadata;
    let size = metadata.cluster_size();
    let Oversized { batch, freed, writes, plain, mut log, data } = closed;
    checkpoint(metadata).await?;
    metadata.sync().await?;
    // The record makes this durable: journaled data may overwrite data that embedded records have checksums of.
    zones.all_durable(point);
    empty(active, metadata).await?;
    data_journal.checkpointed();
    metadata.zones_listed().await?;

    // Lead blocks become plain only with a record that says so.
    let is_lead = |write: &&JournaledWrite| {
        write.at % size < LEAD as u64 && plain.contains(&HostCluster::new(write.at / size))
    };
    let (leads, others): (Vec<&JournaledWrite>, Vec<&JournaledWrite>) =
        writes.iter().partition(is_lead);
    let others: Vec<JournaledWrite> = others.into_iter().cloned().collect();
    metadata.place(&others).await?;
    alloc.end_journal().await;
    let unclean = metadata.log.as_ref().map(|log| log.begin_unclean());
    let late = log.take_if(|_| sabotage::is(Sabotage::LateLog) && !freed.is_empty());
    let mut in_zones = ordered::finish(metadata, readers, batch, log, &freed).await?;
    if sabotage::is(Sabotage::EarlyErase) {
        ordered::discard(metadata, std::mem::take(&mut in_zones)).await?;
    }
    alloc.write_blocks().await?;
    metadata.sync().await?;
    if late.is_some() {
        let _ = metadata.log_durable(late);
    }
    if let Some((log, change)) = metadata.log.as_ref().zip(unclean) {
        log.end_unclean(change);
    }
    alloc.begin_journal().await;

    zones.leave_out(lsn, &freed);
    let mut leads = leads.as_slice();
    // In records, but not in place.
    let mut recorded: Vec<JournaledWrite> = Vec::new();
    loop {
        // The pieces of one cluster are adjacent, and in one record.
        let room = super::most_blocks(&active.ring) as usize * super::BLOCK / 2;
        let mut bytes = 0;
        let mut count = 0;
        while let Some(next) = leads.get(count) {
            let same = count > 0 && leads[count - 1].at / size == next.at / size;
            if !same && bytes >= room {
                break;
            }
            bytes += next.bytes.len();
            count += 1;
        }
        let (now, later) = leads.split_at(count);
        leads = later;
        let bytes = now.iter().map(|write| build::OPERATION + write.bytes.len() as u64).sum();
        // There is always room for an empty record.
        let blocks = blocks(metadata, bytes) + blocks(metadata, 0);
        if active.ring.room(blocks).is_none() {
            metadata.place(&std::mem::take(&mut recorded)).await?;
            metadata.sync().await?;
            empty(active, metadata).await?;
        }
        let tail = active.durable.next();
        let mut record = active.next(size, metadata.sequence.next(), tail);
        let now: Vec<JournaledWrite> = now.iter().map(|write| (*write).clone()).collect();
        record.data(&now);
        let made_plain: Vec<HostCluster> = plain
            .iter()
            .filter(|cluster| now.iter().any(|write| write.at / size == cluster.get()))
            .copied()
            .collect();
        recorded.extend(now);
        record.zones(zones.table(lsn, &made_plain));
        active.checkpoint_lsn = lsn;
        active.write(metadata, record).await?;
        if leads.is_empty() {
            break;
        }
    }
    data_journal.moved(&others, active.last);
    data_journal.finish_commit(data, lsn, active.durable.next());
    metadata.zones_listed().await?;
    ordered::discard(metadata, in_zones).await?;
    zones.release(&freed);
    Ok(())
}

/// Empties the journal by a record after which a recovery replays no earlier one. Their contents are durable in place.
async fn empty<S: Storage>(active: &mut Active, metadata: &Metadata<S>) -> Result<()> {
    let emptied = metadata.sequence.next();
    let mut record = active.next(metadata.cluster_size(), emptied, emptied);
    record.zones(metadata.zones.table(active.checkpoint_lsn, &[]));
    active.write(metadata, record).await?;
    (active.written, active.durable) = (emptied, emptied);
    Ok(())
}

/// The most blocks of a record with the list of zones, and so many bytes of other operations.
fn blocks<S: Storage>(metadata: &Metadata<S>, bytes: u64) -> u64 {
    let all = HEAD_BYTES as u64 + build::OPERATION + metadata.zones.table_bytes() + bytes;
    all.div_ceil(super::BLOCK as u64)
}
