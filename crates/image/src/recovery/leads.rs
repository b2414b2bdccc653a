//! After a crash: embedded mappings that are in no record of the journal.

use crate::replayed::Replayed;
use crate::{DiskError, Result};
use futures_util::stream::{self, StreamExt, TryStreamExt};
use isobath_qcow2::embedded::{LEAD, Lead, extract, find as find_record};
use isobath_qcow2::journal::{Zone, Zones};
use isobath_qcow2::{
    ClusterKind, Crc32c, FormatError, Geometry, Header, HostCluster, HostOffset, L1Entry, L2Entry,
    Lsn, RefcountTableEntry,
};
use isobath_storage::{IoBuf, Storage};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

/// Lead blocks read at once.
const READS: usize = 64;

/// The embedded records found.
#[derive(Default)]
pub(super) struct Found {
    leads: Vec<FoundLead>,
}

struct FoundLead {
    /// Host byte offset.
    at: u64,
    lead: Lead,
    /// The guest's bytes of the span.
    plain: Box<[u8]>,
}

/// Looks for records in the lead blocks of zones, with `replayed` overlaid on the file.
pub(super) async fn find<S: Storage>(
    storage: &S,
    name: &Path,
    geometry: &Geometry,
    replayed: &Replayed,
    zones: Option<&Zones>,
) -> Result<Found> {
    let size = geometry.cluster_size();
    let end = storage.len().await?.max(replayed.end());
    let zones = zones.map_or(&[][..], |zones| zones.zones.as_slice());
    let damaged = |reason: String| DiskError::Corrupt { image: name.to_owned(), reason };
    let misplaced = zones.iter().find(|zone| !zone.start.get().is_multiple_of(size));
    if let Some(zone) = misplaced.or_else(|| zones.first().filter(|_| size < LEAD as u64)) {
        return Err(damaged(format!(
            "its journal lists a zone at {} of {} clusters, which cannot be one of clusters of \
             {size} bytes",
            zone.start, zone.clusters
        )));
    }
    let mut runs = Vec::new();
    for zone in zones {
        runs.extend(data_in(storage, zone, size, end, replayed).await?);
    }
    let places = runs.into_iter().flat_map(|(zone, clusters)| {
        let places = clusters.filter(|n| !zone.is_plain(*n));
        places.map(|n| (zone.start.get() + u64::from(n) * size, zone.id))
    });
    let reads = places.map(|(at, id)| async move {
        let mut block = storage.read_at(at, IoBuf::zeroed(LEAD)).await?;
        replayed.put_over(at, &mut block);
        let Some(lead) = find_record(&block, id) else { return Ok(None) };
        if extract(&mut block, id).is_none() {
            return Err(DiskError::Corrupt {
                image: name.to_owned(),
                reason: format!("the embedded record at host offset {at} does not decompress"),
            });
        }
        Ok(Some(FoundLead { at, lead, plain: block[..lead.span.bytes()].into() }))
    });
    let leads = stream::iter(reads).buffered(READS).try_filter_map(async |found| Ok(found));
    Ok(Found { leads: leads.try_collect().await? })
}

/// Runs of a zone's clusters that may contain records: there are none where the file has no data and the overlay has
/// nothing. A zone may be much larger than the file.
async fn data_in<'a, S: Storage>(
    storage: &S,
    zone: &'a Zone,
    size: u64,
    end: u64,
    replayed: &Replayed,
) -> Result<Vec<(&'a Zone, Range<u32>)>> {
    let start = zone.start.get();
    let zone_end = end.min(start + u64::from(zone.clusters) * size);
    let mut runs: Vec<(&Zone, Range<u32>)> = Vec::new();
    // Clusters whose lead block reaches into a range.
    let mut add = |found: Range<u64>| {
        let first = (found.start.saturating_sub(LEAD as u64 - 1).max(start) - start).div_ceil(size);
        let last = (found.end - start).div_ceil(size);
        let run = first as u32..last as u32;
        match runs.last_mut() {
            Some((_, before)) if before.end >= run.start => before.end = before.end.max(run.end),
            _ if run.is_empty() => {}
            _ => runs.push((zone, run)),
        }
    };
    let mut at = start;
    while at < zone_end {
        let found = storage.allocation(at).await?;
        // Past the end of the file there is only the overlay.
        let length = if found.length == 0 { zone_end - at } else { found.length };
        let until = zone_end.min(at.saturating_add(length));
        if found.data {
            add(at..until);
        } else {
            replayed.bytes_in(at..until).for_each(&mut add);
        }
        at = until;
    }
    Ok(runs)
}

impl Found {
    /// Records with lower LSNs were durable.
    pub(super) fn durable_lsn(&self) -> Option<Lsn> {
        self.leads.iter().map(|found| found.lead.mapping.durable_lsn).max()
    }

    /// Adds to `replayed` the mappings from the checkpoint LSN of `zones` on, as changes of the tables, and the plain
    /// bytes of every lead block that the tables then refer to.
    pub(super) async fn apply<S: Storage>(
        self,
        storage: &S,
        name: &Path,
        header: &Header,
        zones: &Zones,
        replayed: &mut Replayed,
    ) -> Result<()> {
        let checkpoint = zones.checkpoint_lsn;
        let durable = self.durable_lsn().unwrap_or_default().max(zones.durable_lsn).max(checkpoint);
        let format_error = |source| DiskError::Format { image: name.to_owned(), source };
        let geometry = header.geometry().map_err(format_error)?;
        let file = File { storage, name, header, geometry };
        let clusters = header.disk_size().div_ceil(geometry.cluster_size());
        let mut tables: BTreeMap<u64, Vec<FoundLead>> = BTreeMap::new();
        for found in self.leads {
            let cluster = found.lead.mapping.cluster;
            if cluster.get() < clusters {
                tables.entry(geometry.table_position(cluster).0).or_default().push(found);
            }
        }
        let mut taken = Vec::new();
        for (l1_index, leads) in tables {
            file.apply_table(l1_index, leads, checkpoint..durable, replayed, &mut taken).await?;
        }
        taken.sort_unstable();
        file.count(&taken, replayed).await
    }
}

/// The image's file.
struct File<'a, S> {
    storage: &'a S,
    name: &'a Path,
    header: &'a Header,
    geometry: Geometry,
}

impl<S: Storage> File<'_, S> {
    fn format_error(&self, source: FormatError) -> DiskError {
        DiskError::Format { image: self.name.to_owned(), source }
    }

    async fn read(&self, replayed: &Replayed, at: u64, length: usize) -> Result<IoBuf> {
        let mut bytes = self.storage.read_at(at, IoBuf::zeroed(length)).await?;
        replayed.put_over(at, &mut bytes);
        Ok(bytes)
    }

    /// Adds mappings to one L2 table. Those with LSNs below the start of `trusted` are already in the tables, if still
    /// valid; those below its end were durable. `taken` gets the clusters to which the table newly refers.
    async fn apply_table(
        &self,
        l1_index: u64,
        mut leads: Vec<FoundLead>,
        trusted: Range<Lsn>,
        replayed: &mut Replayed,
        taken: &mut Vec<u64>,
    ) -> Result<()> {
        let geometry = &self.geometry;
        if l1_index >= u64::from(self.header.l1_size) {
            return Ok(());
        }
        let entry_at = self.header.l1_table_offset.get() + l1_index * 8;
        let entry = L1Entry::read(&self.read(replayed, entry_at, 8).await?, 0);
        let entry = entry.unwrap_or(L1Entry::unallocated());
        let table = entry.offset(geometry).map_err(|error| self.format_error(error))?;
        // A flush after the first write through a new table writes a record with the table: without one, none of this
        // was flushed.
        let Some(table) = table.filter(|_| entry.is_copied()) else { return Ok(()) };
        let size = geometry.cluster_size() as usize;
        let mut bytes = self.read(replayed, table.get(), size).await?;
        // For each guest cluster, the newest first.
        leads.sort_unstable_by_key(|found| {
            let mapping = found.lead.mapping;
            (mapping.cluster, std::cmp::Reverse(mapping.lsn))
        });
        for found in leads {
            let mapping = found.lead.mapping;
            let (_, index) = geometry.table_position(mapping.cluster);
            let entry = L2Entry::read(&bytes, index, geometry).unwrap_or(L2Entry::unallocated());
            let kind = entry.kind(geometry).map_err(|error| self.format_error(error))?;
            let new = match kind {
                ClusterKind::Unallocated | ClusterKind::ZeroPlain
                    if mapping.lsn >= trusted.start =>
                {
                    true
                }
                ClusterKind::Data { offset, .. } if offset.get() == found.at => false,
                // It is older than the table's entry.
                _ => continue,
            };
            if new {
                if mapping.lsn >= trusted.end && !self.holds(replayed, &found).await? {
                    continue;
                }
                let entry = L2Entry::data(HostOffset::new(found.at), true);
                // In range: the table has a place for each of its clusters.
                let _ = entry.write(&mut bytes, index, geometry);
                let entry_size = geometry.l2_entry_size();
                let from = index * entry_size;
                let patch = bytes[from..from + entry_size].to_vec();
                replayed.put(table.get() + from as u64, patch);
            }
            // This includes a table written by an earlier recovery that was interrupted before it updated the
            // refcounts.
            taken.push(found.at / geometry.cluster_size());
            replayed.put_lead(found.at, found.plain);
        }
        Ok(())
    }

    /// Whether a cluster's data matches its record's checksum.
    async fn holds(&self, replayed: &Replayed, found: &FoundLead) -> Result<bool> {
        let Some(sum) = found.lead.mapping.rest else { return Ok(true) };
        let length = self.geometry.cluster_size() as usize - LEAD;
        let rest = self.read(replayed, found.at + LEAD as u64, length).await?;
        Ok(Crc32c::of(&rest) == sum)
    }

    /// Counts a reference to each of the clusters.
    async fn count(&self, taken: &[u64], replayed: &mut Replayed) -> Result<()> {
        let geometry = &self.geometry;
        let order = geometry.refcount_order();
        let mut rest = taken;
        while let Some(first) = rest.first() {
            let (index, _) = geometry.refcount_position(HostCluster::new(*first));
            let same =
                |cluster: &&u64| geometry.refcount_position(HostCluster::new(**cluster)).0 == index;
            let (now, later) = rest.split_at(rest.iter().take_while(same).count());
            rest = later;
            let at = self.header.refcount_table_offset.get() + index * 8;
            let table_bytes =
                u64::from(self.header.refcount_table_clusters) * geometry.cluster_size();
            let entry = if index * 8 < table_bytes {
                RefcountTableEntry::read(&self.read(replayed, at, 8).await?, 0)
            } else {
                None
            };
            let entry = entry.unwrap_or(RefcountTableEntry::unallocated());
            let block = entry.offset(geometry).map_err(|error| self.format_error(error))?;
            let Some(block) = block else {
                return Err(DiskError::Corrupt {
                    image: self.name.to_owned(),
                    reason: format!(
                        "host cluster {first} lies in a zone but has no refcount block; recover \
                         what can be read with 'isobath convert'"
                    ),
                });
            };
            let size = geometry.cluster_size() as usize;
            let mut bytes = self.read(replayed, block.get(), size).await?;
            let places =
                now.iter().map(|cluster| geometry.refcount_position(HostCluster::new(*cluster)).1);
            let bits = order.bits() as usize;
            let (mut from, mut to) = (usize::MAX, 0);
            for place in places {
                if order.read(&bytes, place) == Some(0) {
                    order.write(&mut bytes, place, 1).map_err(|e| self.format_error(e))?;
                }
                from = from.min(place * bits / 8);
                to = to.max(((place + 1) * bits).div_ceil(8));
            }
            replayed.put(block.get() + from as u64, bytes[from..to].to_vec());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_executor::block_on;
    use isobath_qcow2::embedded::ZoneId;
    use isobath_storage::memory::MemoryHost;
    use isobath_storage::{Host, OpenMode, StorageExt};

    const CLUSTER: u64 = 64 << 10;

    /// The clusters that a recovery examines in a zone of 2^16.
    fn looked_at(length: u64, data: &[(u64, usize)], over: &[(u64, usize)]) -> Vec<Range<u32>> {
        block_on(async {
            let host = MemoryHost::new();
            let mode = OpenMode { writable: true, ..OpenMode::default() };
            let file = host.create(Path::new("image"), mode).await.unwrap();
            file.set_len(length).await.unwrap();
            for &(at, bytes) in data {
                file.write_at(at, IoBuf::copy_of(&vec![1; bytes])).await.unwrap();
            }
            let mut replayed = Replayed::default();
            for &(at, bytes) in over {
                replayed.put(at, vec![1; bytes]);
            }
            let zone = Zone {
                start: HostOffset::new(CLUSTER),
                clusters: 1 << 16,
                id: ZoneId([1; 16]),
                plain: vec![0; 1 << 13],
            };
            let end = length.max(replayed.end());
            let runs = data_in(&file, &zone, CLUSTER, end, &replayed).await.unwrap();
            runs.into_iter().map(|(_, run)| run).collect()
        })
    }

    fn clusters(runs: &[Range<u32>]) -> usize {
        runs.iter().map(ExactSizeIterator::len).sum()
    }

    #[test]
    fn a_zone_is_searched_only_where_there_is_something() {
        let zone_end = CLUSTER * ((1 << 16) + 1);
        assert!(looked_at(1 << 50, &[], &[]).is_empty());
        assert!(looked_at(CLUSTER, &[], &[]).is_empty());
        // The storage may report data in a larger granularity than it was written.
        let found = looked_at(1 << 50, &[(5 * CLUSTER, 4096), (900 * CLUSTER, 4096)], &[]);
        assert!(found.iter().any(|run| run.contains(&4)), "{found:?}");
        assert!(found.iter().any(|run| run.contains(&899)), "{found:?}");
        assert!(clusters(&found) <= 64, "{found:?}");
        // An overlay over a hole, including past the end of the file and starting before a lead block's first byte.
        let over = [(7 * CLUSTER, 100), (20 * CLUSTER - 1, 2), (30 * CLUSTER + 4096, 8)];
        assert_eq!(looked_at(CLUSTER, &[], &over), [6..7, 19..20]);
        assert_eq!(looked_at(1 << 50, &[], &over), [6..7, 19..20]);
        let last = looked_at(1 << 50, &[(zone_end - CLUSTER, 4096)], &[]);
        assert_eq!(last.last().unwrap().end, 1 << 16);
    }
}
