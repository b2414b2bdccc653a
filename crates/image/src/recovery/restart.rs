//! Applying a restart log to an image.
//!
//! The image's journal stays in use, but empty, until that is done: a process that is killed meanwhile leaves the log
//! valid, and no other program changes the image in between.

use super::{discontinued, place};
use crate::alloc::Allocator;
use crate::durability::data_journal::MAX_PENDING;
use crate::durability::zones::Zones;
use crate::durability::{Metadata, Ordered};
use crate::layer::{Layer, Qcow2Layer, ShownLog};
use crate::pieces::{JournaledWrite, Pieces};
use crate::readers::Readers;
use crate::references::{data_place, referenced};
use crate::replayed::Replayed;
use crate::restart_log::FoundLog;
use crate::tables::{References, Tables};
use crate::{DiskError, Result, always};
use isobath_qcow2::{
    ClusterIndex, Geometry, HostCluster, HostOffset, IncompatibleFeatures, L1Entry, L2Entry, Lsn,
};
use isobath_storage::{IoBuf, Storage};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// How far past the end of the file recorded clusters may lie, in bytes: more than is ever kept in memory.
const BEHIND: u64 = 64 << 20;

/// In clusters, what is added to that. Small writes whose bytes the journal is to have take clusters without making the
/// file longer, and those that are discarded meanwhile are not taken again before a commit: a cluster for each byte
/// that may wait for one. Requests under way take more: as many as all frontends together can have, and far more.
const TAKEN: u64 = MAX_PENDING + (1 << 20);

/// Bytes of a table that are kept or left out together.
const PAGE: usize = 4096;

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
/// If the storage fails, or the log does not fit and must; the image must then be opened again.
pub(crate) async fn finish<S: Storage>(metadata: &Metadata<S>, found_log: &FoundLog) -> Result<()> {
    let header = metadata.layer.header().ok_or(DiskError::ReadOnly)?;
    let area = area(metadata)?;
    metadata.alloc.set_aside(area.clone()).await;
    match plan(metadata, found_log, &area, true).await? {
        Ok(plan) => {
            tracing::info!(
                image = %isobath_storage::shown(metadata.layer.name()),
                mappings = plan.changes.len(),
                pieces = found_log.writes.len(),
                "replaying the writes acknowledged by a killed process"
            );
            found_log.set_unclean(metadata.layer.name())?;
            apply(metadata, plan).await?;
        }
        Err(reason) if found_log.must_fit => {
            let log = format!("does not match it ({reason})");
            return Err(discontinued(metadata.layer.name(), &log));
        }
        Err(reason) => {
            found_log.set_aside(metadata.layer.name(), &unfit(reason))?;
            metadata.layer.note_log(ShownLog::Unfit);
        }
    }
    place::take_out(&**metadata.layer.storage(), &header).await?;
    {
        let mut header = metadata.layer.qcow2().header.write();
        header.incompatible = header.incompatible.without(IncompatibleFeatures::JOURNAL);
    }
    found_log.remove();
    metadata.alloc.keep_freed(false).await;
    metadata.layer.note_new_tables().await
}

/// Overlays a killed process's completed writes on the image `layer`, which is only read: it then shows what a writer
/// would make of it. A log that does not fit the image is left out.
///
/// # Errors
/// If the storage fails, or the image's tables are not valid.
pub(crate) async fn overlay<S: Storage>(layer: Layer<S>, found_log: &FoundLog) -> Result<Layer<S>> {
    let layer = Arc::new(layer);
    let name = layer.name().to_owned();
    let shown = shown(&layer, found_log).await?;
    let layer = alone(layer, &name)?;
    Ok(match shown {
        Ok(overlay) => layer.with_overlay(overlay),
        Err(reason) => {
            tracing::error!(image = %isobath_storage::shown(&name), "{}", unfit(reason));
            layer.note_log(ShownLog::Unfit);
            layer
        }
    })
}

/// A layer that nobody else uses yet.
fn alone<S>(layer: Arc<Layer<S>>, name: &Path) -> Result<Layer<S>> {
    always(Arc::into_inner(layer), name, "a layer that is being opened has one user")
}

fn unfit(reason: &str) -> String {
    format!(
        "the restart log of a killed process does not match the image, which is as after a power failure: {reason}"
    )
}

/// What the file would hold with the log, as far as reading the disk needs it, and where it would end; or the reason
/// why the log does not fit.
/// Puts new tables into the L1 table in memory.
async fn shown<S: Storage>(
    layer: &Arc<Layer<S>>,
    found_log: &FoundLog,
) -> Result<std::result::Result<(Replayed, u64), &'static str>> {
    let name = layer.name();
    let layer =
        always(Qcow2Layer::of(layer), name, "an image with a restart log is a qcow2 image")?;
    let qcow2 = layer.qcow2();
    let (geometry, size) = (qcow2.geometry, qcow2.geometry.cluster_size());
    let tables = Tables::new(layer.clone(), None);
    let alloc = Allocator::open(layer.clone()).await?;
    let metadata = Metadata::new(tables, alloc, Zones::none(), None, layer.clone());
    let area = area(&metadata)?;
    // A writer repairs the refcounts first.
    let dirty = qcow2.header.read().incompatible.contains(IncompatibleFeatures::DIRTY);
    let counted = !dirty && !found_log.is_unclean();
    let Plan { changes, pieces } = match plan(&metadata, found_log, &area, counted).await? {
        Ok(plan) => plan,
        Err(reason) => return Ok(Err(reason)),
    };
    let mut overlay = layer.overlay();
    for piece in pieces {
        overlay.put(piece.at, piece.bytes);
    }
    let taken = changes.iter().flat_map(|change| &change.taken);
    let taken = taken.map(|host| (host.get() + 1) * size).max().unwrap_or(0);
    // Where no table of the file is.
    let end = layer.length().await?.max(overlay.end()).max(taken);
    let free = end.checked_next_multiple_of(size).ok_or_else(|| DiskError::Corrupt {
        image: name.to_owned(),
        reason: format!("its journal or restart log reaches up to host offset {end}"),
    });
    let mut free = free?;
    let mut made: BTreeMap<u64, u64> = BTreeMap::new();
    for Change { cluster, entry, .. } in changes {
        let (l1_index, within) = geometry.table_position(cluster);
        let l1_entry = qcow2.l1_entry(l1_index);
        let old = qcow2.l2_table(l1_entry).map_err(|error| layer.format_error(error))?;
        let table = match (made.get(&l1_index), old) {
            (Some(made), _) => *made,
            (None, Some(own)) if l1_entry.is_copied() => own.get(),
            // There is none, or a snapshot has it too.
            (None, old) => {
                overlay.put_zeroes(free, size);
                if let Some(old) = old {
                    let bytes = layer.read_at(old.get(), IoBuf::zeroed(size as usize)).await?;
                    // What is empty of a table takes no memory.
                    for (at, page) in (free..).step_by(PAGE).zip(bytes.chunks(PAGE)) {
                        if page.iter().any(|byte| *byte != 0) {
                            overlay.put(at, page.to_vec());
                        }
                    }
                }
                made.insert(l1_index, free);
                free += size;
                free - size
            }
        };
        let length = geometry.l2_entry_size();
        let bytes = entry.bytes(&geometry);
        overlay.put(table + (within * length) as u64, bytes[..length].to_vec());
    }
    let mut l1 = qcow2.l1.write();
    for (index, table) in made {
        let entry = L1Entry::new(HostOffset::new(table), true, &geometry);
        let entry = entry.map_err(|error| layer.format_error(error))?;
        always(l1.set(index as usize, entry), name, "an L1 table covers the disk")?;
    }
    Ok(Ok((overlay, free)))
}

/// What a log changes in an image that it fits.
struct Plan {
    changes: Vec<Change>,
    /// Bytes to be written in place, without those whose cluster is not in use any more.
    pieces: Vec<JournaledWrite>,
}

/// The clusters of the journal's area.
fn area<S: Storage>(metadata: &Metadata<S>) -> Result<Range<u64>> {
    let header = metadata.layer.header().ok_or(DiskError::ReadOnly)?;
    let size = metadata.cluster_size();
    Ok(header.journal().map_or(0..0, |journal| {
        let start = journal.area_offset.get();
        start / size..(start + journal.area_length).div_ceil(size)
    }))
}

/// The changes to make, or the reason why the log does not fit. The refcounts can be relied on if they are `counted`.
async fn plan<S: Storage>(
    metadata: &Metadata<S>,
    found_log: &FoundLog,
    area: &Range<u64>,
    counted: bool,
) -> Result<std::result::Result<Plan, &'static str>> {
    let geometry = metadata.tables.geometry();
    let size = geometry.cluster_size();
    let clusters = metadata.layer.size().div_ceil(size);
    let file = metadata.layer.length().await?.div_ceil(size);
    let most = file + found_log.entries.len() as u64 * 2 + TAKEN + BEHIND / size;
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
    for (&host, &count) in taken.iter().filter(|_| counted) {
        let present = metadata.alloc.refcount(host).await?;
        let in_use = alone.contains(&host) && present + count > 1;
        if in_use || present.checked_add(count).is_none_or(|all| all > most_counted) {
            return Ok(Err("it maps a cluster that is in use"));
        }
    }
    for (&host, &count) in released.iter().filter(|_| counted) {
        if metadata.alloc.refcount(host).await? < count {
            return Ok(Err("it replaces a mapping whose refcount is too small"));
        }
    }
    let mut pieces = Pieces::default();
    for JournaledWrite { at, bytes } in &found_log.writes {
        let (mut at, mut rest) = (*at, bytes.as_slice());
        while !rest.is_empty() {
            let room = usize::try_from(size - at % size).unwrap_or(rest.len());
            let (now, later) = rest.split_at(room.min(rest.len()));
            let host = HostCluster::new(at / size);
            // A cluster that nothing refers to may get any other use.
            let known = area.contains(&host.get()) || metadata.alloc.is_metadata(host);
            let count = |counts: &Counts| counts.get(&host).copied().unwrap_or(0);
            let stays = if counted {
                metadata.alloc.refcount(host).await? + count(&taken) > count(&released)
            } else {
                host.get() < most
            };
            if !known && stays {
                pieces.put(at, now.into(), Lsn::default());
            }
            at += now.len() as u64;
            rest = later;
        }
    }
    Ok(Ok(Plan { changes, pieces: pieces.list(|_| true) }))
}

async fn apply<S: Storage>(metadata: &Metadata<S>, plan: Plan) -> Result<()> {
    let Plan { changes, pieces } = plan;
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
    metadata.place(&pieces).await?;
    let geometry = metadata.tables.geometry();
    let place = |change: &Change| data_place(&geometry, &change.entry.kind(&geometry).ok()?);
    let data = metadata.data_journal.add_unchecked(changes.iter().filter_map(place).collect());
    for change in changes {
        let refers = place(&change).is_some();
        let Change { cluster, entry, taken, released } = change;
        let (l1_index, _) = metadata.tables.geometry().table_position(cluster);
        metadata.tables.ensure_table(l1_index, &metadata.alloc).await?;
        let change = if refers {
            References::to_data(&taken, &released, &data, false)
        } else {
            References::to_nothing_new(&released)
        };
        metadata.tables.record(cluster, entry, change)?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broken::{layer, must_violate};
    use crate::restart_log::tests::found_log;
    use futures_executor::block_on;

    #[test]
    fn a_log_is_overlaid_on_an_image_that_has_tables() {
        let found_log = found_log();
        let overlay = |layer| block_on(Box::pin(overlay(layer, &found_log))).map(drop);
        let opened = layer();
        overlay(opened.in_other_chain()).unwrap();
        let raw = Layer::raw(opened.name().to_owned(), Arc::clone(opened.storage()), 512);
        must_violate(overlay(raw), "an image with a restart log is a qcow2 image");
        let layer = opened.in_other_chain();
        opened.as_qcow2().unwrap().l1.write().clear();
        must_violate(overlay(layer), "an L1 table covers the disk");
    }

    #[test]
    fn a_layer_that_is_being_opened_is_not_shared() {
        let layer = layer();
        let shared = Arc::clone(&layer);
        let name = layer.name().to_owned();
        must_violate(alone(layer, &name).map(drop), "a layer that is being opened has one user");
        alone(shared, &name).unwrap();
    }
}
