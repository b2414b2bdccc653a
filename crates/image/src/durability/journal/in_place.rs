//! A commit that is too large for a record, while zones or a restart log are in use.
//!
//! Without either, the journal is taken out of use for such a commit. With zones it must stay in use, since it lists
//! them, and so it must with a restart log, which is valid only as long as the journal is in use. So the journal is
//! emptied instead, the commit is ordered, and a record says that the embedded mappings are in the tables. A crash in
//! between finds the embedded records again: they match the tables, or what was there before the commit.

use super::{Active, checkpoint, ordered};
use crate::Result;
use crate::durability::Metadata;
use crate::pieces::JournaledWrite;
use crate::readers::Readers;
use crate::sabotage::{self, Sabotage};
use crate::tables::ClosedBatch;
use isobath_qcow2::{HostCluster, Lsn};
use isobath_storage::Storage;

/// The batches that were closed for the commit.
pub(super) struct Oversized {
    pub(super) batch: ClosedBatch,
    /// Clusters to which nothing refers after the commit.
    pub(super) freed: Vec<HostCluster>,
    pub(super) kept: Vec<JournaledWrite>,
    pub(super) plain: Vec<HostCluster>,
}

/// Commits the closed batches in place.
pub(super) async fn commit<S: Storage>(
    active: &mut Active,
    metadata: &Metadata<S>,
    readers: &Readers,
    closed: Oversized,
    lsn: Lsn,
) -> Result<()> {
    let Metadata { alloc, data_journal, zones, .. } = metadata;
    let size = metadata.cluster_size();
    let Oversized { batch, freed, kept, plain } = closed;
    checkpoint(metadata).await?;
    metadata.sync().await?;
    // The record makes this durable: kept data may overwrite data that embedded records have checksums of.
    zones.finish_commit(lsn);
    let emptied = metadata.sequence.next();
    let mut empty = active.next(size, emptied, emptied);
    empty.zones(zones.table(active.checkpoint_lsn, &[]));
    active.write(metadata, empty).await?;
    (active.written, active.durable) = (emptied, emptied);
    data_journal.checkpointed();
    metadata.zones_listed().await?;

    // Lead blocks become plain only with a record that says so.
    let is_lead = |kept: &&JournaledWrite| plain.contains(&HostCluster::new(kept.at / size));
    let (leads, others): (Vec<&JournaledWrite>, Vec<&JournaledWrite>) =
        kept.iter().partition(is_lead);
    let others: Vec<JournaledWrite> = others.into_iter().cloned().collect();
    metadata.place(&others).await?;
    alloc.end_journal().await;
    if let Some(log) = &metadata.log {
        log.set_unclean(true);
    }
    ordered::finish(metadata, readers, batch, &freed).await?;
    zones.release(&freed);
    alloc.write_blocks().await?;
    metadata.sync().await?;
    if sabotage::is(Sabotage::LateLog) {
        metadata.log_durable();
    }
    if let Some(log) = &metadata.log {
        log.set_unclean(false);
    }
    alloc.begin_journal().await;

    let mut leads = leads.as_slice();
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
        let tail = active.durable.next();
        let mut record = active.next(size, metadata.sequence.next(), tail);
        let data: Vec<JournaledWrite> = now.iter().map(|kept| (*kept).clone()).collect();
        record.data(&data);
        let told: Vec<HostCluster> = plain
            .iter()
            .filter(|cluster| now.iter().any(|kept| kept.at / size == cluster.get()))
            .copied()
            .collect();
        record.zones(zones.table(lsn, &told));
        active.write(metadata, record).await?;
        active.checkpoint_lsn = lsn;
        if leads.is_empty() {
            break;
        }
    }
    data_journal.moved(&others, active.last);
    data_journal.finish_commit(lsn, active.durable.next());
    metadata.zones_listed().await?;
    Ok(())
}
