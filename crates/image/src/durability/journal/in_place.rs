//! A commit that is too much for a record, while zones are in use or a log for a killed process.
//!
//! Without either the journal is taken out of use for such a commit. With zones it must stay, since it lists them, and
//! with a log, which counts as long as it does; so it becomes empty instead, the commit goes the ordered way, and a
//! record says that it has what was embedded. A crash in between finds the records that are embedded once more: they
//! say what the tables say, or what was there before the commit.

use super::{Active, checkpoint, ordered};
use crate::Result;
use crate::durability::Metadata;
use crate::pieces::JournaledWrite;
use crate::readers::Readers;
use crate::sabotage::{self, Sabotage};
use crate::tables::ClosedBatch;
use isobath_qcow2::{HostCluster, Lsn};
use isobath_storage::Storage;

/// What was closed for the commit.
pub(super) struct Oversized {
    pub(super) batch: ClosedBatch,
    /// Clusters to which nothing refers once it is done.
    pub(super) freed: Vec<HostCluster>,
    pub(super) kept: Vec<JournaledWrite>,
    pub(super) plain: Vec<HostCluster>,
}

/// Commits what was closed, by way of its places.
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
    // The record says so: what is kept may overwrite what embedded records have sums of.
    zones.finish_commit(lsn);
    let emptied = metadata.sequence.next();
    let mut empty = active.next(size, emptied, emptied);
    empty.zones(zones.table(active.checkpoint_lsn, &[]));
    active.write(metadata, empty).await?;
    (active.written, active.durable) = (emptied, emptied);
    data_journal.checkpointed();
    metadata.zones_listed().await?;

    // Lead blocks become plain by a record only: it says so.
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
        // One cluster's pieces are adjacent, and in one record.
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
