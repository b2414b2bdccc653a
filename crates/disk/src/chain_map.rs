//! The layer and offset of all data, as in `qemu-img map`.

use crate::device::BlockStatus;
use crate::disk::Disk;
use crate::parts::Parts;
use crate::touched::Touched;
use isobath_image::Result;
use isobath_image::layer::Layer;
use isobath_qcow2::{ClusterIndex, ClusterKind, GuestOffset, L2Entry, RefcountTableEntry};
use isobath_storage::{Host, IoBuf, Storage};
use std::ops::Range;

/// Guest bytes examined at a time.
const WINDOW: u64 = 1 << 30;

/// A run of guest bytes, with QEMU's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapEntry {
    /// First guest byte.
    pub start: u64,
    /// Bytes.
    pub length: u64,
    /// The layer that determines the contents, or, if no layer has the range, the layer at which the search ends. 0 is
    /// the active layer.
    pub depth: u32,
    /// Whether any layer has it.
    pub present: bool,
    /// Whether it is known to read as zeroes.
    pub zero: bool,
    /// Whether it is stored as data.
    pub data: bool,
    /// Whether it is stored compressed.
    pub compressed: bool,
    /// Where it is, or would be, in the layer's data file, in bytes.
    pub offset: Option<u64>,
}

impl MapEntry {
    /// Whether `next`, which starts where this ends, continues it.
    fn continues(&self, next: &Self) -> bool {
        let offset = match (self.offset, next.offset) {
            (Some(here), Some(there)) => here.checked_add(self.length) == Some(there),
            (None, None) => true,
            _ => false,
        };
        let same = Self { start: self.start, length: self.length, offset: self.offset, ..*next };
        offset && same == *self
    }
}

impl<H: Host> Disk<H> {
    /// Describes a range of guest bytes in order: `visit` is called for every run. Data that the disk's writer has not
    /// flushed may be described wrongly.
    ///
    /// # Errors
    /// If the range reaches past the end of the disk, or tables cannot be read.
    pub async fn chain_map(
        &self,
        range: Range<u64>,
        visit: &mut dyn FnMut(&MapEntry),
    ) -> Result<()> {
        self.check_range(range.start, range.end.saturating_sub(range.start))?;
        let mut sparse = vec![None; self.depth()];
        let mut last: Option<MapEntry> = None;
        let mut at = range.start;
        while at < range.end {
            let window = WINDOW.min(range.end - at);
            for run in self.status_of(at, window, usize::MAX).await? {
                let mut described = Parts::of(at..at + run.length, self.name());
                for entry in self.describe(at, &run, &mut sparse).await? {
                    described.add(entry.start, entry.length)?;
                    match &mut last {
                        Some(last) if last.continues(&entry) => last.length += entry.length,
                        _ => {
                            last.iter().for_each(&mut *visit);
                            last = Some(entry);
                        }
                    }
                }
                described.end()?;
                at += run.length;
            }
        }
        last.iter().for_each(visit);
        Ok(())
    }

    /// The layer at which the search for a byte that no layer has ends, and the end of the range to which this applies:
    /// a backing file that is too short is not searched.
    pub fn search_ends(&self, at: u64) -> (u32, u64) {
        let below = self.layers().skip(1).map(|layer| layer.size());
        below
            .take_while(|size| at < *size)
            .fold((0, u64::MAX), |(depth, until), size| (depth + 1, until.min(size)))
    }

    async fn describe(
        &self,
        start: u64,
        run: &BlockStatus,
        sparse: &mut [Option<bool>],
    ) -> Result<Vec<MapEntry>> {
        let end = start + run.length;
        let entry = MapEntry {
            start,
            length: run.length,
            depth: run.depth,
            present: run.allocated,
            zero: run.zero,
            data: !run.zero,
            compressed: run.compressed,
            offset: run.host.map(|(_, offset)| offset),
        };
        let mut entries = Vec::new();
        if !run.allocated {
            let mut at = start;
            while at < end {
                let (depth, until) = self.search_ends(at);
                let next = end.min(until);
                let part = MapEntry { start: at, length: next - at, depth, ..entry };
                self.add_hosts(part, &mut entries).await?;
                at = next;
            }
            return Ok(entries);
        }
        let layer = self.layers().nth(run.depth as usize);
        match (layer, entry.offset) {
            (Some(layer), Some(host)) if entry.data && layer.as_qcow2().is_some() => {
                let known = sparse.get(run.depth as usize).copied().flatten();
                let is_sparse = match known {
                    Some(known) => known,
                    None => has_preallocated_metadata(layer).await?,
                };
                if let Some(slot) = sparse.get_mut(run.depth as usize) {
                    *slot = Some(is_sparse);
                }
                if !is_sparse {
                    return Ok(vec![entry]);
                }
                let mut done = 0;
                while done < run.length {
                    let found = layer.allocation(host + done).await?;
                    let rest = run.length - done;
                    let length = if found.length == 0 { rest } else { rest.min(found.length) };
                    entries.push(MapEntry {
                        start: start + done,
                        length,
                        zero: !found.data,
                        offset: Some(host + done),
                        ..entry
                    });
                    done += length;
                }
            }
            (Some(_), None) if entry.zero => self.add_hosts(entry, &mut entries).await?,
            _ => entries.push(entry),
        }
        Ok(entries)
    }

    /// Adds an entry that reads as zeroes, with its host clusters.
    async fn add_hosts(&self, entry: MapEntry, entries: &mut Vec<MapEntry>) -> Result<()> {
        let layer = self.layers().nth(entry.depth as usize);
        let qcow2 = layer.and_then(|layer| Some((layer, layer.as_qcow2()?)));
        let Some((layer, qcow2)) = qcow2.filter(|(_, q)| entry.present || q.geometry.extended_l2())
        else {
            entries.push(entry);
            return Ok(());
        };
        let geometry = qcow2.geometry;
        let end = entry.start + entry.length;
        let mut at = entry.start;
        while at < end {
            let position = geometry.position(GuestOffset::new(at));
            let table = qcow2
                .l1_entry(position.l1_index)
                .offset(&geometry)
                .map_err(|error| layer.format_error(error))?;
            let span = geometry.l1_entry_span();
            let table_end = end.min((at / span * span).saturating_add(span));
            let Some(table) = table else {
                entries.push(MapEntry { start: at, length: table_end - at, ..entry });
                at = table_end;
                continue;
            };
            let first = geometry.cluster_of(GuestOffset::new(at)).get();
            let count = geometry.clusters_for(table_end) - first;
            let size = geometry.l2_entry_size();
            let from = table.get() + (position.l2_index * size) as u64;
            let bytes = IoBuf::zeroed(count as usize * size);
            let bytes = layer.read_at(from, bytes).await?;
            for step in 0..count {
                let found = L2Entry::read(&bytes, step as usize, &geometry);
                let start = ClusterIndex::new(first + step).get() << geometry.cluster_bits();
                let next = table_end.min(start + geometry.cluster_size());
                let host = match found.map(|found| found.kind(&geometry)) {
                    Some(Ok(
                        ClusterKind::ZeroAllocated { offset, .. }
                        | ClusterKind::Subclusters { offset: Some(offset), .. },
                    )) if !layer.is_encrypted() => Some(offset.get() + (at - start)),
                    _ => None,
                };
                entries.push(MapEntry { start: at, length: next - at, offset: host, ..entry });
                at = next;
            }
        }
        Ok(())
    }
}

/// Whether an image seems to have clusters that were allocated but not written: more clusters are in use than the file
/// takes space for. Only then does QEMU look for holes in the file.
async fn has_preallocated_metadata<S: Storage>(layer: &Layer<S>) -> Result<bool> {
    let Some(qcow2) = layer.as_qcow2() else { return Ok(false) };
    let geometry = qcow2.geometry;
    let storage = layer.storage();
    let clusters = geometry.clusters_for(storage.len().await?);
    let taken = storage.allocated().await? / geometry.cluster_size();
    let enough = (taken.saturating_mul(10) / 9).max(taken + 2);
    if clusters < enough {
        return Ok(false);
    }
    // Without valid refcounts it is not known, as in QEMU.
    let Ok(area) = qcow2.header.read().refcount_table(&geometry) else { return Ok(false) };
    let table = IoBuf::zeroed((area.end - area.start) as usize);
    let table = layer.read_at(area.start, table).await?;
    let entries = geometry.refcount_block_entries();
    let mut used = 0;
    for block in 0..clusters.div_ceil(entries) {
        let entry = RefcountTableEntry::read(&table, block as usize);
        let Some(Ok(Some(at))) = entry.map(|entry| entry.offset(&geometry)) else { continue };
        let bytes = IoBuf::zeroed(geometry.cluster_size() as usize);
        let bytes = layer.read_at(at.get(), bytes).await?;
        let order = geometry.refcount_order();
        let count = entries.min(clusters - block * entries) as usize;
        used += (0..count).filter(|n| order.read(&bytes, *n).is_some_and(|c| c > 0)).count() as u64;
        if used >= enough {
            return Ok(true);
        }
    }
    Ok(false)
}

impl<H: Host> Disk<H> {
    /// The end of the unallocated range from `at` on, at most `end`; `at` if that is not immediately known.
    pub fn untouched_until(&self, at: u64, end: u64) -> u64 {
        if self.writer.is_some() {
            return at;
        }
        self.touched.get_or_init(|| Touched::new(&self.chain)).next(at).clamp(at, end)
    }
}
