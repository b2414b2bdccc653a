//! Reading all tables of a layer: which pages it owns something in, and a digest of its mapping.

use futures_util::future::try_join_all;
use isobath_image::Result;
use isobath_image::layer::{Layer, Qcow2};
use isobath_qcow2::index::{BlockHash, BlockHasher};
use isobath_qcow2::{IncompatibleFeatures, L2Entry};
use isobath_storage::{IoBuf, Storage};
use std::ops::Range;

/// Bytes of L2 tables read at once.
const READ_AT_ONCE: u64 = 4 << 20;

/// The result of reading all of a layer's tables.
pub(super) struct Scan {
    /// The digest of everything that maps guest clusters to host clusters; `None` if that was too much to read, or
    /// cannot be read.
    pub(super) digest: Option<BlockHash>,
    /// Runs of pages in which the layer may own something, ascending.
    pub(super) pages: Vec<Range<u64>>,
}

/// Bytes of L2 tables that a layer has.
pub(super) fn table_bytes<S: Storage>(layer: &Layer<S>) -> u64 {
    layer.as_qcow2().map_or(0, |qcow2| {
        let l1 = qcow2.l1.read();
        let tables = l1.allocated().filter(|(_, e)| matches!(qcow2.l2_table(*e), Ok(Some(_))));
        tables.count() as u64 * qcow2.geometry.cluster_size()
    })
}

/// Scans a layer whose tables do not change. With more than `limit` bytes of L2 tables only the L1 table is examined.
pub(super) async fn scan<S: Storage>(layer: &Layer<S>, page_bits: u32, limit: u64) -> Result<Scan> {
    let Some(qcow2) = layer.as_qcow2() else {
        let mut hasher = BlockHasher::default();
        hasher.update(b"raw");
        hasher.update(&layer.size().to_be_bytes());
        let all = 0..layer.size().div_ceil(1 << page_bits);
        return Ok(Scan { digest: Some(hasher.finish()), pages: vec![all] });
    };
    let mut pages = Pages { bits: page_bits, end: layer.size(), runs: Vec::new() };
    let geometry = &qcow2.geometry;
    let l1 = qcow2.l1.read().clone();
    let mut hasher = head(qcow2, layer.size());
    // What is past the end of the file is past that of the disk, too, but has no digest.
    let mut whole = table_bytes(layer) <= limit && l1.missing() == 0;
    let mut tables = Vec::new();
    for (index, entry) in l1.iter().take(l1.len() - l1.missing()).enumerate() {
        hasher.update(&entry.raw().to_be_bytes());
        let start = (index as u64).saturating_mul(geometry.l1_entry_span());
        match qcow2.l2_table(entry) {
            Ok(None) => {}
            Ok(Some(offset)) => tables.push((start, offset)),
            Err(_) => {
                whole = false;
                tables.push((start, isobath_qcow2::HostOffset::new(0)));
            }
        }
    }
    if !whole {
        for (start, _) in tables {
            pages.add(start, geometry.l1_entry_span());
        }
        return Ok(Scan { digest: None, pages: pages.runs });
    }
    let size = geometry.cluster_size();
    for batch in tables.chunks((READ_AT_ONCE / size).max(1) as usize) {
        let reads = batch
            .iter()
            .map(|(_, offset)| layer.read_at(offset.get(), IoBuf::zeroed(size as usize)));
        for ((start, _), table) in batch.iter().zip(try_join_all(reads).await?) {
            hasher.update(&table);
            for index in 0..geometry.l2_entries() {
                let entry = L2Entry::read(&table, index as usize, geometry);
                if entry.is_some_and(|entry| entry != L2Entry::unallocated()) {
                    pages.add(start + (index << geometry.cluster_bits()), size);
                }
            }
        }
    }
    Ok(Scan { digest: Some(hasher.finish()), pages: pages.runs })
}

/// The current digest of a layer, whatever its size.
pub(super) async fn digest<S: Storage>(layer: &Layer<S>) -> Result<Option<BlockHash>> {
    // The pages are not needed here, so they are made large.
    Ok(scan(layer, 40, u64::MAX).await?.digest)
}

/// The beginning of a qcow2 layer's digest.
fn head(qcow2: &Qcow2, size: u64) -> BlockHasher {
    let mapping = IncompatibleFeatures::DATA_FILE
        .with(IncompatibleFeatures::EXTENDED_L2)
        .with(IncompatibleFeatures::COMPRESSION_TYPE);
    let header = qcow2.header.read();
    let mut hasher = BlockHasher::default();
    hasher.update(b"qcow2");
    hasher.update(&size.to_be_bytes());
    hasher.update(&header.cluster_bits.to_be_bytes());
    hasher.update(&(header.incompatible.bits() & mapping.bits()).to_be_bytes());
    hasher.update(&[header.compression_type.byte()]);
    hasher
}

struct Pages {
    bits: u32,
    /// Guest bytes of the layer.
    end: u64,
    runs: Vec<Range<u64>>,
}

impl Pages {
    /// Adds the pages of guest bytes that come in ascending order.
    fn add(&mut self, start: u64, length: u64) {
        let end = start.saturating_add(length).min(self.end);
        if start >= end {
            return;
        }
        let (first, last) = (start >> self.bits, (end - 1) >> self.bits);
        match self.runs.last_mut() {
            Some(run) if first <= run.end => run.end = run.end.max(last + 1),
            _ => self.runs.push(first..last + 1),
        }
    }
}
