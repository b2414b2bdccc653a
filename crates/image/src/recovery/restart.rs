//! Applying a restart log to an image.
//!
//! The image's journal stays in use, but empty, until that is done: a process that is killed meanwhile leaves the log
//! valid, and no other program changes the image in between.

use super::place;
use crate::durability::{Durability, Metadata, Ordered};
use crate::pieces::{JournaledWrite, Pieces};
use crate::readers::Readers;
use crate::references::referenced;
use crate::restart_log::FoundLog;
use crate::tables::References;
use crate::{DiskError, Result};
use isobath_qcow2::{ClusterIndex, Geometry, HostCluster, L2Entry, Lsn};
use isobath_storage::Storage;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// How far past the end of the file recorded clusters may lie, in bytes: more than is ever kept in memory.
const BEHIND: u64 = 64 << 20;

/// The change of one cluster's entry.
struct Change {
    cluster: ClusterIndex,
    entry: L2Entry,
    taken: Vec<HostCluster>,
    released: Vec<HostCluster>,
}

/// Applies a killed process's completed writes to the image, durably, and takes its journal, which is empty, out of
/// use. A log that does not fit the image changes nothing.
///
/// # Errors
/// If the storage fails; the image must then be opened again.
pub async fn finish<S: Storage>(metadata: &Metadata<S>, found_log: &FoundLog) -> Result<()> {
    let header = metadata.layer.header().ok_or(DiskError::ReadOnly)?;
    let size = metadata.cluster_size();
    let area = header.journal().map_or(0..0, |journal| {
        let start = journal.area_offset.get();
        start / size..(start + journal.area_length).div_ceil(size)
    });
    metadata.alloc.set_aside(area.clone()).await;
    match changes(metadata, found_log, &area).await? {
        Ok(changes) => {
            tracing::info!(
                image = %isobath_storage::shown(metadata.layer.name()),
                mappings = changes.len(),
                pieces = found_log.kept.len(),
                "replaying the writes acknowledged by a killed process"
            );
            found_log.set_unclean();
            apply(metadata, changes, &found_log.kept, &area).await?;
        }
        Err(reason) => tracing::error!(
            image = %isobath_storage::shown(metadata.layer.name()),
            reason,
            "the restart log of a killed process does not match the image, which is as after a \
             power failure"
        ),
    }
    place::take_out(&**metadata.layer.storage(), &header).await?;
    if let Some(qcow2) = metadata.layer.as_qcow2() {
        let mut header = qcow2.header.write();
        header.incompatible =
            header.incompatible.without(isobath_qcow2::IncompatibleFeatures::JOURNAL);
    }
    found_log.remove();
    metadata.alloc.keep_freed(false).await;
    Ok(())
}

/// The changes to make, or the reason why the log does not fit.
async fn changes<S: Storage>(
    metadata: &Metadata<S>,
    found_log: &FoundLog,
    area: &Range<u64>,
) -> Result<std::result::Result<Vec<Change>, &'static str>> {
    let geometry = metadata.tables.geometry();
    let size = geometry.cluster_size();
    let clusters = metadata.layer.size().div_ceil(size);
    let file = metadata.layer.storage().len().await?.div_ceil(size);
    let most = file + found_log.entries.len() as u64 * 2 + BEHIND / size;
    let mut changes = Vec::new();
    let (mut taken, mut released): (Counts, Counts) = Default::default();
    let mut alone = BTreeSet::new();
    for (&cluster, &entry) in &found_log.entries {
        let cluster = ClusterIndex::new(cluster);
        if cluster.get() >= clusters {
            return Ok(Err("it maps an offset past the end of the disk"));
        }
        let present = metadata.tables.entry(cluster).await?;
        if present == entry {
            continue;
        }
        let Some((before, after)) = both(&geometry, present, entry) else {
            return Ok(Err("it has an invalid mapping"));
        };
        let change = Change {
            cluster,
            entry,
            taken: without(&after, &before),
            released: without(&before, &after),
        };
        for host in &change.taken {
            let known = area.contains(&host.get()) || metadata.alloc.is_metadata(*host);
            if known || host.get() >= most {
                return Ok(Err("it maps a cluster that cannot hold data"));
            }
            *taken.entry(*host).or_default() += 1;
            // Only compressed data may share a cluster.
            if !entry.is_compressed() {
                alone.insert(*host);
            }
        }
        for host in &change.released {
            if metadata.alloc.is_metadata(*host) {
                return Ok(Err("it replaces a mapping to one of the image's own tables"));
            }
            *released.entry(*host).or_default() += 1;
        }
        changes.push(change);
    }
    let most_counted = geometry.refcount_order().max();
    for (host, count) in taken {
        let present = metadata.alloc.refcount(host).await?;
        let in_use = alone.contains(&host) && present + count > 1;
        if in_use || present.checked_add(count).is_none_or(|all| all > most_counted) {
            return Ok(Err("it maps a cluster that is in use"));
        }
    }
    for (host, count) in released {
        if metadata.alloc.refcount(host).await? < count {
            return Ok(Err("it replaces a mapping whose refcount is too small"));
        }
    }
    Ok(Ok(changes))
}

async fn apply<S: Storage>(
    metadata: &Metadata<S>,
    changes: Vec<Change>,
    kept: &[JournaledWrite],
    area: &Range<u64>,
) -> Result<()> {
    // Before anything else is allocated.
    for change in &changes {
        for host in &change.taken {
            metadata.alloc.set_aside(host.get()..host.get() + 1).await;
        }
    }
    for change in &changes {
        for host in &change.taken {
            metadata.alloc.claim(*host).await?;
        }
    }
    let mut gone: Counts = BTreeMap::new();
    for host in changes.iter().flat_map(|change| &change.released) {
        *gone.entry(*host).or_default() += 1;
    }
    let mut pieces = Pieces::default();
    let size = metadata.cluster_size();
    for JournaledWrite { at, bytes } in kept {
        let (mut at, mut rest) = (*at, bytes.as_slice());
        while !rest.is_empty() {
            let room = usize::try_from(size - at % size).unwrap_or(rest.len());
            let (now, later) = rest.split_at(room.min(rest.len()));
            let host = HostCluster::new(at / size);
            // A cluster that nothing refers to may get any other use.
            let known = area.contains(&host.get()) || metadata.alloc.is_metadata(host);
            let left = gone.get(&host).copied().unwrap_or(0);
            if !known && metadata.alloc.refcount(host).await? > left {
                pieces.put(at, now.into(), Lsn::default());
            }
            at += now.len() as u64;
            rest = later;
        }
    }
    metadata.place(&pieces.list(|_| true)).await?;
    let data = metadata.data_journal.add_unchecked();
    for Change { cluster, entry, taken, released } in changes {
        let (l1_index, _) = metadata.tables.geometry().table_position(cluster);
        metadata.tables.ensure_table(l1_index, &metadata.alloc).await?;
        let change =
            References { taken: &taken, released: &released, data: Some(data), embedded: false };
        metadata.tables.record(cluster, entry, change);
    }
    Ordered.commit(metadata, &Readers::default()).await?;
    metadata.alloc.write_blocks().await?;
    metadata.sync().await
}

/// References by host cluster.
type Counts = BTreeMap<HostCluster, u64>;

/// The clusters to which two entries refer; `None` if the new one is not a valid entry.
fn both(
    geometry: &Geometry,
    present: L2Entry,
    entry: L2Entry,
) -> Option<(Vec<HostCluster>, Vec<HostCluster>)> {
    let clusters = |entry: L2Entry| Some(referenced(geometry, &entry.kind(geometry).ok()?));
    Some((clusters(present)?, clusters(entry)?))
}

/// The elements of `all` that are not in `others`.
fn without(all: &[HostCluster], others: &[HostCluster]) -> Vec<HostCluster> {
    all.iter().filter(|cluster| !others.contains(cluster)).copied().collect()
}
