//! `--metadata ordered`: no journal, only order.
//!
//! 1. New refcount blocks, made durable before the refcount table lists them (rare).
//! 2. Refcounts of what was allocated, new L2 tables, and with them all data written: one sync.
//! 3. Entries of L2 tables and of the L1 table: one more sync. They refer only to what step 2 made
//!    durable; each is whole or old, since it lies within a sector.
//! 4. Clusters no longer referred to are released, once no request reads them. Their refcounts
//!    reach the file with the next commit.
//!
//! A crash between steps loses at most space: a refcount may be higher than the number of references. If nothing was
//! allocated since the last commit, there is only one sync.

use super::metadata::Metadata;
use crate::readers::Readers;
use crate::restart_log::ClosedLog;
use crate::sabotage::{self, Sabotage};
use crate::tables::ClosedBatch;
use crate::{Result, invariant};
use isobath_qcow2::{HostCluster, Lsn};
use isobath_storage::Storage;
use std::ops::Range;

/// The mode's state, which is empty.
pub struct Ordered;

impl Ordered {
    /// Makes every change recorded, and all data written, before the call durable. After an error it is unknown what is
    /// durable.
    pub async fn commit<S: Storage>(
        &self,
        metadata: &Metadata<S>,
        readers: &Readers,
    ) -> Result<()> {
        let mut batch = metadata.tables.begin_commit()?;
        // Changes that a journal being set up collects from here on are not in this batch.
        let (size, entries) = (metadata.cluster_size(), batch.log.take());
        let closed = metadata.data_journal.begin_commit(Lsn::default(), &[], size, entries);
        metadata.place(&closed.writes).await?;
        finish(metadata, readers, batch, closed.log, &[]).await?;
        metadata.data_journal.finish_plain_commit(closed.commit);
        Ok(())
    }
}

/// Makes the closed batch, and all data written before, durable. Before the clusters in `freed`, which are among those
/// that it releases, are released, their journaled data is forgotten, and so is the restart log's, since their next
/// contents might be in place by the time the log is replayed. Returns the clusters of zones that are still to be
/// [discarded](discard): a recovery may find the mappings embedded in them, until a record says otherwise.
pub(super) async fn finish<S: Storage>(
    metadata: &Metadata<S>,
    readers: &Readers,
    batch: ClosedBatch,
    log: Option<ClosedLog>,
    freed: &[HostCluster],
) -> Result<Vec<HostCluster>> {
    let Metadata { tables, alloc, .. } = metadata;
    let early = sabotage::is(Sabotage::EarlyRelease);
    if early {
        alloc.release(&batch.releases).await?;
    }
    alloc.publish(&batch.allocated).await?;
    let replaced = alloc.write_structure().await?;
    if alloc.is_dirty().await || batch.ordered || !batch.changes || !replaced.is_empty() {
        alloc.write_blocks().await?;
        tables.write_fresh(&batch).await?;
        if !sabotage::is(Sabotage::NoFirstSync) {
            metadata.sync().await?;
        }
    }
    if batch.changes {
        tables.write_updates(&batch).await?;
        if !sabotage::is(Sabotage::NoSecondSync) {
            metadata.sync().await?;
        }
    }
    let dropped = metadata.log_durable(log);
    let released = tables.finish_commit(batch);
    if released.clusters.is_empty() && replaced.is_empty() {
        return Ok(Vec::new());
    }
    metadata.forget_unreferenced(freed, readers, dropped).await;
    let mut in_zones = Vec::new();
    if released.discarded {
        in_zones = Box::pin(discard_outside_zones(metadata, &released.clusters)).await?;
    }
    if !early {
        alloc.release(&released.clusters).await?;
    }
    alloc.release(&replaced).await?;
    Ok(in_zones)
}

/// Returns the space of clusters that are about to become free to the host. Those of zones are left, and returned.
async fn discard_outside_zones<S: Storage>(
    metadata: &Metadata<S>,
    released: &[HostCluster],
) -> Result<Vec<HostCluster>> {
    let is_in_zone = |cluster: &HostCluster| metadata.zones.contain(*cluster);
    let (in_zones, others) = unused(metadata, released).await?.into_iter().partition(is_in_zone);
    discard(metadata, others).await?;
    Ok(in_zones)
}

/// The clusters that are about to become free.
pub(super) async fn unused<S: Storage>(
    metadata: &Metadata<S>,
    released: &[HostCluster],
) -> Result<Vec<HostCluster>> {
    let mut last = Vec::new();
    for cluster in released {
        // A table to which an entry of a snapshot, or a hostile one, refers too.
        if metadata.alloc.is_metadata(*cluster) {
            continue;
        }
        if metadata.alloc.is_last(*cluster).await? {
            last.push(*cluster);
        }
    }
    Ok(last)
}

/// Returns the space of clusters to the host, before they can be allocated again. A failure costs space, not data, so
/// it is only logged.
pub(super) async fn discard<S: Storage>(
    metadata: &Metadata<S>,
    mut clusters: Vec<HostCluster>,
) -> Result<()> {
    let may_erase = clusters.iter().all(|cluster| metadata.zones.may_erase(*cluster));
    invariant(may_erase, metadata.layer.name(), "what a recovery would find is not erased")?;
    clusters.sort_unstable();
    let mut runs: Vec<Range<u64>> = Vec::new();
    for cluster in clusters.iter().map(|cluster| cluster.get()) {
        match runs.last_mut() {
            Some(run) if run.end == cluster => run.end += 1,
            _ => runs.push(cluster..cluster + 1),
        }
    }
    let size = metadata.cluster_size();
    for run in runs {
        let (offset, length) = (run.start * size, (run.end - run.start) * size);
        if let Err(error) = metadata.layer.storage().discard(offset, length).await {
            tracing::debug!(%error, "cannot release discarded space");
            break;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broken::{must_violate, qcow2, writer};
    use crate::durability::MetadataMode;
    use crate::durability::zones::Embedded;
    use crate::options::OpenOptions;
    use futures_executor::block_on;
    use isobath_qcow2::embedded::Span;

    #[test]
    fn a_mapping_that_a_recovery_would_find_stays() {
        let writer = writer(&OpenOptions::new().metadata(MetadataMode::Embedded));
        let metadata = &qcow2(&writer).metadata;
        let zones = &metadata.zones;
        zones.open(&(100..104), true, true);
        assert!(zones.table(Lsn::default(), &[]).is_some() && zones.listed().is_empty());
        let taken = zones.take(&metadata.sequence).unwrap();
        let (host, lsn) = (taken.host, metadata.sequence.next());
        zones.written(&taken, Embedded { cluster: 7, lsn, span: Span::Sector, rest: None });
        zones.forget(&[host]);
        let discarded = block_on(discard(metadata, vec![host]));
        must_violate(discarded, "what a recovery would find is not erased");
        block_on(discard(metadata, vec![HostCluster::new(99)])).unwrap();
    }
}
