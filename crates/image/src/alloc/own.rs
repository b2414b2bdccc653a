//! The image's own tables: where they are when it is opened for writing.
//!
//! If two of them overlap, or the refcounts say that one is free, nothing is written: a check must find out which is
//! right.

use super::{AllocState, Allocator};
use crate::layer::{Layer, Qcow2};
use crate::{DiskError, Result};
use isobath_qcow2::snapshot::check_length;
use isobath_qcow2::{AutoclearFeatures, Bitmap, Geometry, Header, RefcountTableEntry, Snapshot};
use isobath_storage::{IoBuf, Storage};
use isobath_sync::AsyncMutexGuard;
use std::collections::HashSet;
use std::ops::Range;

/// Bytes of the snapshot table read at once.
const SNAPSHOT_READ: u64 = 1 << 20;

/// No entry of a snapshot table is longer: its head, extra data, ID and name.
const LONGEST_ENTRY: usize = 256 << 10;

/// More clusters of tables than this are not kept in memory. Each snapshot of a disk of 2 TiB in
/// 64 KiB clusters has an L1 table of one.
const MAX_OWN_CLUSTERS: usize = 4 << 20;

/// Host clusters, each of one table.
struct Own<'a, S> {
    layer: &'a Layer<S>,
    bits: u32,
    clusters: HashSet<u64>,
}

impl<S: Storage> Own<'_, S> {
    fn corrupt(&self, reason: String) -> DiskError {
        DiskError::Corrupt { image: self.layer.name().to_owned(), reason }
    }

    /// Adds the clusters of a table of `length` bytes.
    fn add(&mut self, what: &str, offset: u64, length: u64) -> Result<()> {
        if length == 0 {
            return Ok(());
        }
        for cluster in offset >> self.bits..=offset.saturating_add(length - 1) >> self.bits {
            if self.clusters.len() > MAX_OWN_CLUSTERS {
                return Err(self.corrupt(format!(
                    "its tables take more than {MAX_OWN_CLUSTERS} clusters, the last of them {what}"
                )));
            }
            if !self.clusters.insert(cluster) {
                return Err(self.corrupt(format!(
                    "host cluster {cluster} is part of {what} and of another of its tables"
                )));
            }
        }
        Ok(())
    }

    /// Adds the snapshot table and the L1 tables that it names.
    async fn add_snapshots(&mut self, geometry: &Geometry, header: &Header) -> Result<()> {
        let file_length = self.layer.length().await?;
        let count = header.nb_snapshots;
        let start = header.snapshots_offset.get();
        let mut at = start;
        let mut window = IoBuf::empty();
        let mut window_start = at;
        // Snapshots may share one.
        let mut tables = HashSet::new();
        for number in 0..count {
            let mut rest = window.get((at - window_start) as usize..).unwrap_or_default();
            if rest.len() < LONGEST_ENTRY {
                let length = SNAPSHOT_READ.min(file_length.saturating_sub(at));
                window = self.layer.read_at(at, IoBuf::zeroed(length as usize)).await?;
                window_start = at;
                rest = &window;
            }
            let (snapshot, length) = Snapshot::parse(rest).map_err(|error| {
                self.corrupt(format!(
                    "entry {number} of its snapshot table (snapshots_offset {}, nb_snapshots \
                     {count}), at {at} of {file_length} bytes: {error}",
                    header.snapshots_offset
                ))
            })?;
            snapshot.check(geometry).map_err(|error| self.layer.format_error(error))?;
            let (l1, l1_bytes) = (snapshot.l1_table_offset.get(), u64::from(snapshot.l1_size) * 8);
            if l1.saturating_add(l1_bytes) > file_length {
                return Err(self.corrupt(format!(
                    "the L1 table of snapshot {number} (l1_table_offset {l1:#x}, l1_size {}) \
                     reaches past the end of the file ({file_length} bytes)",
                    snapshot.l1_size
                )));
            }
            if tables.insert((l1, l1_bytes)) {
                self.add(&format!("the L1 table of snapshot {number}"), l1, l1_bytes)?;
            }
            at = at.saturating_add(length as u64).next_multiple_of(8);
            check_length((at - header.snapshots_offset.get()) as usize)
                .map_err(|error| self.layer.format_error(error))?;
        }
        self.add("the snapshot table", start, at - start)
    }

    /// Adds the bitmap directory and the tables that it names, if the image says that they are
    /// consistent.
    async fn add_bitmaps(&mut self, geometry: &Geometry, header: &Header) -> Result<()> {
        let consistent = header.autoclear.contains(AutoclearFeatures::BITMAPS);
        let Some(extension) = header.bitmaps().filter(|_| consistent) else { return Ok(()) };
        extension.validate(geometry).map_err(|error| self.layer.format_error(error))?;
        let (at, length) = (extension.directory_offset.get(), extension.directory_size);
        let bytes = self.layer.read_at(at, IoBuf::zeroed(length as usize)).await?;
        let bitmaps = Bitmap::parse_directory(&bytes, extension.count)
            .map_err(|error| self.layer.format_error(error))?;
        self.add("the bitmap directory", at, length)?;
        for bitmap in bitmaps {
            bitmap
                .validate(geometry, header.disk_size())
                .map_err(|error| self.layer.format_error(error))?;
            let bytes = u64::from(bitmap.table_size) * 8;
            self.add("a bitmap table", bitmap.table_offset.get(), bytes)?;
        }
        Ok(())
    }
}

/// The host clusters that hold the image's own tables, with those of `refcounts`, its refcount table.
///
/// # Errors
/// If two tables overlap, a refcount block is not in the file, or a table's cluster has no refcount block.
pub(super) async fn own_clusters<S: Storage>(
    layer: &Layer<S>,
    qcow2: &Qcow2,
    refcounts: &[RefcountTableEntry],
) -> Result<HashSet<u64>> {
    let geometry = &qcow2.geometry;
    let header = qcow2.header.read().clone();
    let (bits, size) = (geometry.cluster_bits(), geometry.cluster_size());
    let mut own = Own { layer, bits, clusters: HashSet::new() };
    own.add("the header", 0, 1)?;
    own.add("the L1 table", header.l1_table_offset.get(), u64::from(header.l1_size) * 8)?;
    if let Some((offset, length)) = header.encryption() {
        own.add("the encryption header", offset.get(), length)?;
    }
    let tables: Vec<_> = qcow2.l1.read().allocated().collect();
    for (index, entry) in tables {
        match entry.offset(geometry) {
            Ok(Some(offset)) => {
                own.add(&format!("the L2 table of L1 entry {index}"), offset.get(), size)?;
            }
            Ok(None) if entry.raw() != 0 => {
                return Err(own.corrupt(format!(
                    "L1 entry {index} is {:#x}: it has a flag but no table",
                    entry.raw()
                )));
            }
            Ok(None) => {}
            Err(error) => return Err(layer.format_error(error)),
        }
    }
    own.add_snapshots(geometry, &header).await?;
    own.add_bitmaps(geometry, &header).await?;
    let table_bytes = refcounts.len() as u64 * 8;
    own.add("the refcount table", header.refcount_table_offset.get(), table_bytes)?;
    let length = layer.length().await?;
    for (index, entry) in refcounts.iter().enumerate() {
        let offset = entry.offset(geometry).map_err(|error| layer.format_error(error))?;
        let Some(offset) = offset else { continue };
        if offset.get() >= length {
            return Err(own.corrupt(format!(
                "refcount block {index} (at {offset}) is past the end of the file ({length} bytes)"
            )));
        }
        own.add(&format!("refcount block {index}"), offset.get(), size)?;
    }
    let has_block = |cluster: &u64| {
        let index = cluster / geometry.refcount_block_entries();
        let entry = refcounts.get(index as usize);
        entry.is_some_and(|entry| matches!(entry.offset(geometry), Ok(Some(_))))
    };
    if let Some(cluster) = own.clusters.iter().filter(|cluster| !has_block(cluster)).min() {
        return Err(own.corrupt(format!(
            "host cluster {cluster} holds one of its tables but has no refcount block"
        )));
    }
    Ok(own.clusters)
}

impl<S: Storage> Allocator<S> {
    /// Fails if any of these clusters, which seem free and are about to be used, holds a table.
    pub(super) fn refuse_tables(&self, clusters: Range<u64>) -> Result<()> {
        let own = self.own.read();
        match clusters.into_iter().find(|cluster| own.tables.contains(cluster)) {
            None => Ok(()),
            Some(cluster) => Err(self.free_table(cluster)),
        }
    }

    fn free_table(&self, cluster: u64) -> DiskError {
        self.corrupt(format!("host cluster {cluster} holds one of its tables but has refcount 0"))
    }

    /// Fails if a refcount block that was just loaded says that a table's cluster is free: its other refcounts cannot
    /// be trusted either.
    pub(super) fn check_block(
        &self,
        state: &AsyncMutexGuard<'_, AllocState>,
        index: u64,
    ) -> Result<()> {
        let Some(block) = state.blocks.get(&index) else { return Ok(()) };
        let entries = self.geometry.refcount_block_entries();
        let counted = index * entries..(index + 1) * entries;
        let is_free = |cluster: u64| block.get((cluster - counted.start) as usize) == 0;
        let own = &self.own.read().tables;
        let free = if (own.len() as u64) < entries {
            own.iter().copied().find(|cluster| counted.contains(cluster) && is_free(*cluster))
        } else {
            counted.clone().find(|cluster| own.contains(cluster) && is_free(*cluster))
        };
        free.map_or(Ok(()), |cluster| Err(self.free_table(cluster)))
    }
}
