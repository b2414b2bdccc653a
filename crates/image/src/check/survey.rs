//! Counting the references to every host cluster.

use super::counts::{Counts, ENTRY_BYTES};
use super::entry::{Refers, inspect};
use super::image::Image;
use super::log::Log;
use super::own::Own;
use super::structure::Structure;
use crate::Result;
use futures_util::future::try_join_all;
use isobath_qcow2::geometry::MAX_L1_BYTES;
use isobath_qcow2::header::MAX_SNAPSHOTS;
use isobath_qcow2::snapshot::{ENTRY_HEAD_BYTES, MAX_TABLE_BYTES};
use isobath_qcow2::{
    AutoclearFeatures, Bitmap, BitmapCluster, ClusterIndex, HostOffset, L1Entry, L2Entry,
    RefcountTableEntry, Snapshot,
};
use isobath_storage::Storage;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

/// Bytes of tables read at once.
const READ_AT_ONCE: u64 = 4 << 20;
/// Bytes written at once into a table: what changes, with its neighbours.
pub(crate) const PIECE: usize = 4096;
/// After how many entries of a table the memory is looked at.
const ENTRIES_AT_ONCE: usize = 4096;

/// The number of references to an L2 table.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TableUse {
    /// From the active L1 table.
    pub(crate) active: u64,
    /// From all L1 tables.
    pub(crate) total: u64,
    /// The first entry of an L1 table that refers to it.
    l1_index: u64,
}

/// A new value for an L2 entry.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fix {
    /// Where its table starts.
    table: u64,
    index: usize,
    entry: L2Entry,
    /// Errors that it repairs.
    errors: u64,
}

/// The references that an image's structures make.
pub(crate) struct Survey {
    /// All of them, also where there are more than a refcount can hold.
    pub(crate) counts: Counts,
    /// The most that a refcount can hold.
    most: u64,
    pub(crate) own: Own,
    /// The active L1 table.
    pub(crate) l1: Vec<L1Entry>,
    /// The L2 tables by their offset.
    pub(crate) tables: BTreeMap<u64, TableUse>,
    fixes: Vec<Fix>,
    /// New values for entries of the active L1 table, each of which repairs one error.
    l1_fixes: Vec<(usize, L1Entry)>,
    /// Tables with an entry that has an invalid offset: they may be something else.
    doubtful: BTreeSet<u64>,
    /// The same for the active L1 table.
    l1_doubtful: bool,
    /// The active L1 table is certain to be one, and nothing else.
    pub(crate) l1_certain: bool,
    /// The refcount table and its blocks, which `counts` includes.
    pub(crate) structure: Structure,
    /// Errors that are references to clusters beyond what refcounts can count.
    pub(crate) overflows: u64,
    /// Something leads nowhere: clusters that seem unused may not be.
    pub(crate) lost: bool,
    /// Entries of the snapshot table without a field that version 3 demands.
    pub(crate) incomplete: Vec<u32>,
    /// Guest clusters counted from the active L1 table.
    allocated: u64,
    fragmented: u64,
    pub(crate) compressed: u64,
}

impl Survey {
    /// Walks every structure; `None` if one cannot be read at all, and the rest would mean nothing.
    pub(crate) async fn take<S: Storage>(
        image: &Image<S>,
        log: &mut Log<'_>,
    ) -> Result<Option<Self>> {
        let mut survey = Self {
            counts: Counts::default(),
            most: image.geometry.refcount_order().max(),
            own: Own::default(),
            l1: Vec::new(),
            tables: BTreeMap::new(),
            fixes: Vec::new(),
            l1_fixes: Vec::new(),
            doubtful: BTreeSet::new(),
            l1_doubtful: false,
            l1_certain: false,
            structure: Structure::default(),
            overflows: 0,
            lost: false,
            incomplete: Vec::new(),
            allocated: 0,
            fragmented: 0,
            compressed: 0,
        };
        survey.refer_own(image, 0, image.geometry.cluster_size(), 1, log);
        let header = &image.header;
        let l1_bytes = u64::from(header.l1_size) * 8;
        survey.refer_own(image, header.l1_table_offset.get(), l1_bytes, 1, log);
        if let Some((offset, length)) = header.encryption() {
            image.budget.read(length)?;
            survey.refer_own(image, offset.get(), length, 1, log);
        }
        survey.l1 = read_l1(image, header.l1_table_offset, l1_bytes).await?;
        let l1 = std::mem::take(&mut survey.l1);
        survey.visit_l1(image, &l1, 1, 1, log)?;
        survey.l1 = l1;
        if !survey.visit_snapshots(image, log).await? {
            return Ok(None);
        }
        for (number, (at, uses)) in survey.tables.iter().enumerate() {
            survey.afford(image, number, 0)?;
            let cluster = at >> image.geometry.cluster_bits();
            survey.own.claim(cluster..=cluster, uses.total);
            if uses.active > 1 {
                // Each describes another part of the disk.
                survey.own.note_shared(cluster);
            }
        }
        survey.visit_tables(image, log).await?;
        survey.visit_bitmaps(image, log).await?;
        // Whatever refers to a table by mistake should refer to something else.
        survey.lost |= survey.own.dispute(&survey.counts);
        survey.structure = survey.load_structure(image, log).await?;
        survey.l1_certain = survey.is_l1_certain(image);
        log.report.allocated_clusters = survey.allocated;
        log.report.fragmented_clusters = survey.fragmented;
        log.report.compressed_clusters = survey.compressed;
        Ok(Some(survey))
    }

    /// Reads the refcount table, and counts its references and those to it.
    async fn load_structure<S: Storage>(
        &mut self,
        image: &Image<S>,
        log: &mut Log<'_>,
    ) -> Result<Structure> {
        let geometry = &image.geometry;
        let cluster_size = geometry.cluster_size();
        let mut structure = Structure::default();
        let at = image.header.refcount_table_offset.get();
        let bytes = u64::from(image.header.refcount_table_clusters) << geometry.cluster_bits();
        let before = log.report.corruptions;
        if at == 0 || bytes == 0 {
            log.corruption("ERROR the image has no refcount table");
        } else {
            self.refer_structure(image, &mut structure, at, bytes, log);
        }
        let table = image.read_existing(at, if at == 0 { 0 } else { bytes }).await?;
        for index in 0..table.len() / 8 {
            let kept = structure.blocks.len() + structure.ranges.len();
            self.afford(image, index, table.len() + kept * ENTRY_BYTES as usize)?;
            let entry = RefcountTableEntry::read(&table, index).unwrap_or_default();
            if entry.raw() == 0 {
                continue;
            }
            if entry.reserved_bits() != 0 || entry.raw() >> 56 != 0 {
                log.corruption(format_args!(
                    "ERROR refcount table entry {index} has reserved bits set"
                ));
                continue;
            }
            let Ok(Some(offset)) = entry.offset(geometry) else {
                log.corruption(format_args!(
                    "ERROR refcount block {index} is not cluster aligned; refcount table entry \
                     corrupted"
                ));
                continue;
            };
            if geometry.host_cluster_of(offset).get() >= image.clusters() {
                log.corruption(format_args!("ERROR refcount block {index} is outside image"));
                continue;
            }
            self.refer_structure(image, &mut structure, offset.get(), cluster_size, log);
            let count = self.counts.get(geometry.host_cluster_of(offset).get());
            if count != 1 {
                log.corruption(format_args!("ERROR refcount block {index} refcount={count}"));
                continue;
            }
            structure.blocks.insert(index as u64, offset.get());
        }
        // If two entries refer to one block, the first was considered correct.
        let bits = geometry.cluster_bits();
        structure.blocks.retain(|_, at| self.counts.get(*at >> bits) == 1);
        structure.broken = log.report.corruptions - before;
        Ok(structure)
    }

    fn refer_structure<S: Storage>(
        &mut self,
        image: &Image<S>,
        structure: &mut Structure,
        offset: u64,
        length: u64,
        log: &mut Log<'_>,
    ) {
        let lost = self.lost;
        let clusters = self.refer(image, offset, length, 1, log);
        // Errors in the structure itself say nothing about the data, unless one of the tables overlaps it.
        self.lost = lost | clusters.is_some_and(|clusters| self.own.collide(clusters));
        structure.ranges.push((offset, length));
    }

    /// The references to a cluster, as far as a refcount can hold them.
    pub(crate) fn references(&self, cluster: u64) -> u64 {
        self.counts.get(cluster).min(self.most)
    }

    /// Counts `weight` references to each cluster of one of the image's own structures.
    fn refer_own<S: Storage>(
        &mut self,
        image: &Image<S>,
        offset: u64,
        length: u64,
        weight: u64,
        log: &mut Log<'_>,
    ) {
        if let Some(clusters) = self.refer(image, offset, length, weight, log) {
            self.own.claim(clusters, weight);
        }
    }

    /// Counts `weight` references to each cluster of a range; returns those.
    pub(crate) fn refer<S: Storage>(
        &mut self,
        image: &Image<S>,
        offset: u64,
        length: u64,
        weight: u64,
        log: &mut Log<'_>,
    ) -> Option<RangeInclusive<u64>> {
        if length == 0 {
            return None;
        }
        let bits = image.geometry.cluster_bits();
        let end = offset.checked_add(length);
        // The file's last cluster may be partial.
        let Some(end) = end.filter(|end| {
            end.checked_sub(image.length).is_none_or(|past| past < image.geometry.cluster_size())
        }) else {
            self.lost = true;
            log.corruption(format_args!(
                "ERROR: counting reference for region exceeding the end of the file by one cluster \
                 or more: offset {offset:#x} size {length:#x}"
            ));
            return None;
        };
        let clusters = offset >> bits..=(end - 1) >> bits;
        for cluster in clusters.clone() {
            let count = self.counts.get(cluster).saturating_add(weight);
            if count > self.most {
                self.overflows += 1;
                let at = cluster << bits;
                log.corruption(format_args!(
                    "ERROR: overflow cluster offset={at:#x}: it has more references than refcounts \
                     of {} bits can count; convert the image to one with refcount_bits=16",
                    image.geometry.refcount_bits()
                ));
            }
            self.counts.set(cluster, count);
        }
        Some(clusters)
    }

    /// Notes the L2 tables that an L1 table refers to. `weight` is the number of L1 tables with these entries; `active`
    /// of them are in use by the guest.
    fn visit_l1<S: Storage>(
        &mut self,
        image: &Image<S>,
        l1: &[L1Entry],
        active: u64,
        weight: u64,
        log: &mut Log<'_>,
    ) -> Result<()> {
        let cluster_size = image.geometry.cluster_size();
        let used = l1.iter().enumerate().filter(|(_, entry)| entry.raw() != 0);
        for (number, (index, entry)) in used.enumerate() {
            self.afford(image, number, size_of_val(l1))?;
            let reserved = entry.reserved_bits();
            if reserved != 0 {
                log.corruption(format_args!(
                    "ERROR found L1 entry with reserved bits set: {:x}",
                    entry.raw()
                ));
                if active > 0 {
                    self.l1_fixes.push((index, L1Entry::from_raw(entry.raw() & !reserved)));
                }
            }
            let offset = entry.with_copied(false).raw() & !reserved;
            if offset == 0 {
                self.lost = true;
                self.l1_doubtful |= active > 0;
                if reserved == 0 {
                    log.corruption(format_args!(
                        "ERROR L1 entry {index} is {:x}: it has a flag but no table",
                        entry.raw()
                    ));
                }
                continue;
            }
            let counted = self.refer(image, offset, cluster_size, weight, log).is_some();
            if !counted || !offset.is_multiple_of(cluster_size) {
                self.l1_doubtful |= active > 0;
            }
            if !offset.is_multiple_of(cluster_size) {
                self.lost = true;
                log.corruption(format_args!(
                    "ERROR l2_offset={offset:x}: Table is not cluster aligned; L1 entry corrupted"
                ));
            } else if offset < image.length {
                let table = self
                    .tables
                    .entry(offset)
                    .or_insert(TableUse { l1_index: index as u64, ..TableUse::default() });
                table.active += active;
                table.total += weight;
            }
        }
        image.budget.hold(self.bytes())
    }

    /// Every so many entries of a table, allows for the memory that this takes, and for so many bytes beside it.
    ///
    /// # Errors
    /// They are too many.
    fn afford<S: Storage>(&self, image: &Image<S>, entry: usize, beside: usize) -> Result<()> {
        if entry.is_multiple_of(ENTRIES_AT_ONCE) {
            image.budget.hold(self.bytes() + beside as u64)?;
        }
        Ok(())
    }

    /// How many bytes of memory it takes.
    pub(crate) fn bytes(&self) -> u64 {
        let kept = self.tables.len() + self.fixes.len() + self.l1_fixes.len() + self.doubtful.len();
        let blocks = self.structure.blocks.len() + self.structure.ranges.len();
        let l1 = (self.l1.len() * size_of::<L1Entry>()) as u64;
        self.counts.bytes() + self.own.bytes() + l1 + (kept + blocks) as u64 * ENTRY_BYTES
    }

    /// Walks the snapshot table; `false` if it cannot be read.
    async fn visit_snapshots<S: Storage>(
        &mut self,
        image: &Image<S>,
        log: &mut Log<'_>,
    ) -> Result<bool> {
        let header = &image.header;
        let start = header.snapshots_offset.get();
        if header.nb_snapshots == 0 {
            return Ok(true);
        }
        let mut fail = |reason: &str| {
            log.check_error(format_args!("ERROR failed to read the snapshot table: {reason}"));
            Ok(false)
        };
        if header.nb_snapshots > MAX_SNAPSHOTS {
            return fail(&format!("nb_snapshots {} exceeds {MAX_SNAPSHOTS}", header.nb_snapshots));
        }
        if !image.geometry.is_aligned(header.snapshots_offset) || start == 0 {
            return fail(&format!(
                "snapshots_offset {} is not cluster aligned",
                header.snapshots_offset
            ));
        }
        // Snapshots that share an L1 table make the same references.
        let mut tables: BTreeMap<(u64, u32), u64> = BTreeMap::new();
        let (mut at, mut window, mut window_at) = (start, Vec::new(), start);
        let mut bad = Vec::new();
        for number in 0..header.nb_snapshots {
            let rest = window.get((at - window_at) as usize..).unwrap_or_default();
            // An entry takes at most 132,152 bytes.
            if rest.len() < (1 << 18)
                && window_at.saturating_add(window.len() as u64) < image.length
            {
                (window, window_at) = (image.read_existing(at, 1 << 20).await?.to_vec(), at);
            }
            let rest = window.get((at - window_at) as usize..).unwrap_or_default();
            let (snapshot, length) = match Snapshot::parse(rest) {
                Ok(parsed) => parsed,
                Err(error) => return fail(&error.to_string()),
            };
            at += length as u64;
            if at - start > MAX_TABLE_BYTES as u64 || rest.len() < ENTRY_HEAD_BYTES {
                return fail(&format!("it exceeds {MAX_TABLE_BYTES} bytes"));
            }
            let label = format!("{} ({})", snapshot.id_text(), snapshot.name_text());
            if header.version >= 3 && snapshot.disk_size.is_none() {
                self.incomplete.push(number);
            }
            let l1 = snapshot.l1_table_offset;
            if !image.geometry.is_aligned(l1) {
                bad.push(format!(
                    "ERROR snapshot {label} l1_offset={l1}: L1 table is not cluster aligned; \
                     snapshot table entry corrupted"
                ));
                self.lost = true;
            } else if u64::from(snapshot.l1_size) * 8 > MAX_L1_BYTES {
                bad.push(format!(
                    "ERROR snapshot {label} l1_size={:#x}: L1 table is too large; snapshot table \
                     entry corrupted",
                    snapshot.l1_size
                ));
                self.lost = true;
            } else {
                *tables.entry((l1.get(), snapshot.l1_size)).or_default() += 1;
            }
        }
        for error in bad {
            log.corruption(&error);
        }
        for ((offset, l1_size), weight) in tables {
            let bytes = u64::from(l1_size) * 8;
            self.refer_own(image, offset, bytes, weight, log);
            let l1 = read_l1(image, HostOffset::new(offset), bytes).await?;
            self.visit_l1(image, &l1, 0, weight, log)?;
        }
        self.refer_own(image, start, at - start, 1, log);
        Ok(true)
    }

    /// Reads every L2 table once, in the order of the file.
    async fn visit_tables<S: Storage>(
        &mut self,
        image: &Image<S>,
        log: &mut Log<'_>,
    ) -> Result<()> {
        let tables: Vec<(u64, TableUse)> =
            self.tables.iter().map(|(&at, &uses)| (at, uses)).collect();
        let total = tables.len() as u64;
        let mut done = 0;
        log.progress(0, total);
        for batch in tables.chunks(tables_at_once(image)) {
            let size = image.geometry.cluster_size() as usize;
            image.budget.read((batch.len() * size) as u64)?;
            let contents = try_join_all(batch.iter().map(|(at, _)| image.read(*at, size))).await?;
            for ((at, uses), bytes) in batch.iter().zip(contents) {
                self.visit_table(image, *at, *uses, &bytes, log)?;
            }
            done += batch.len() as u64;
            log.progress(done, total);
        }
        Ok(())
    }

    fn visit_table<S: Storage>(
        &mut self,
        image: &Image<S>,
        table: u64,
        uses: TableUse,
        bytes: &[u8],
        log: &mut Log<'_>,
    ) -> Result<()> {
        let geometry = &image.geometry;
        let mut contiguous = 0;
        for index in 0..geometry.l2_entries() as usize {
            self.afford(image, index, 0)?;
            let entry = L2Entry::read(bytes, index, geometry).unwrap_or(L2Entry::unallocated());
            if entry == L2Entry::unallocated() {
                continue;
            }
            let guest = if geometry.has_data_file() {
                geometry
                    .first_cluster_of_l1(uses.l1_index)
                    .and_then(|first| first.checked_add(index as u64))
                    .and_then(|cluster: ClusterIndex| geometry.cluster_start(cluster))
            } else {
                None
            };
            let found = inspect(entry, index, guest, geometry);
            for error in &found.errors {
                log.corruption(error);
            }
            if found.lost {
                self.lost = true;
                self.doubtful.insert(table);
            }
            if let Some(entry) = found.mended {
                let errors = found.errors.len() as u64;
                self.fixes.push(Fix { table, index, entry, errors });
            }
            match found.refers {
                Refers::Nothing => {}
                Refers::Cluster(offset) => {
                    self.allocated += uses.active;
                    if contiguous != 0 && offset != contiguous {
                        self.fragmented += uses.active;
                    }
                    contiguous = offset + geometry.cluster_size();
                    if !geometry.has_data_file() {
                        let size = geometry.cluster_size();
                        self.refer_data(image, table, (offset, size), uses.total, log);
                    }
                }
                Refers::Compressed(offset, length) => {
                    self.allocated += uses.active;
                    self.compressed += uses.active;
                    self.fragmented += uses.active;
                    self.refer_data(image, table, (offset, length), uses.total, log);
                }
            }
        }
        Ok(())
    }

    /// Counts the references of an entry of an L2 table to a range, offset and length.
    fn refer_data<S: Storage>(
        &mut self,
        image: &Image<S>,
        table: u64,
        (offset, length): (u64, u64),
        weight: u64,
        log: &mut Log<'_>,
    ) {
        if self.refer(image, offset, length, weight, log).is_none() {
            self.doubtful.insert(table);
        }
    }

    /// Walks the bitmaps, if the image says that they are consistent.
    async fn visit_bitmaps<S: Storage>(
        &mut self,
        image: &Image<S>,
        log: &mut Log<'_>,
    ) -> Result<()> {
        let consistent = image.header.autoclear.contains(AutoclearFeatures::BITMAPS);
        let Some(extension) = image.header.bitmaps().filter(|_| consistent) else { return Ok(()) };
        let wrong = |survey: &mut Self, log: &mut Log<'_>, error: &dyn std::fmt::Display| {
            survey.lost = true;
            log.corruption(format_args!("ERROR {error}"));
        };
        if let Err(error) = extension.validate(&image.geometry) {
            wrong(self, log, &error);
            return Ok(());
        }
        let (at, size) = (extension.directory_offset.get(), extension.directory_size);
        let Some(clusters) = self.refer(image, at, size, 1, log) else { return Ok(()) };
        self.own.claim(clusters, 1);
        image.budget.read(size)?;
        let directory = image.read(at, size as usize).await?;
        let bitmaps = match Bitmap::parse_directory(&directory, extension.count) {
            Ok(bitmaps) => bitmaps,
            Err(error) => {
                wrong(self, log, &error);
                return Ok(());
            }
        };
        for bitmap in bitmaps {
            if let Err(error) = bitmap.validate(&image.geometry, image.header.disk_size()) {
                self.lost = true;
                log.corruption(format_args!("ERROR {error}"));
                continue;
            }
            let (at, bytes) = (bitmap.table_offset.get(), u64::from(bitmap.table_size) * 8);
            self.refer_own(image, at, bytes, 1, log);
            image.budget.hold(self.bytes() + bytes)?;
            let table = image.read_existing(at, bytes).await?;
            let entries = table.chunks_exact(8).filter_map(|raw| raw.first_chunk::<8>());
            for (number, raw) in entries.enumerate() {
                self.afford(image, number, table.len())?;
                match BitmapCluster::from_raw(u64::from_be_bytes(*raw), &image.geometry) {
                    Ok(BitmapCluster::Data(offset)) => {
                        let size = image.geometry.cluster_size();
                        self.refer_own(image, offset.get(), size, 1, log);
                    }
                    Ok(_) => {}
                    Err(error) => {
                        self.lost = true;
                        log.corruption(format_args!("ERROR {error}"));
                    }
                }
            }
        }
        Ok(())
    }

    fn is_l1_certain<S: Storage>(&self, image: &Image<S>) -> bool {
        let (at, bits) = (image.header.l1_table_offset.get(), image.geometry.cluster_bits());
        let Some(last) = self.l1.len().checked_sub(1) else { return false };
        let clusters = at >> bits..=(at + last as u64 * 8) >> bits;
        !self.l1_doubtful && self.own.are_alone(clusters, &self.counts)
    }

    /// Whether the table at `offset` is certain to be an L2 table, and nothing else.
    pub(crate) fn may_write_table<S: Storage>(&self, image: &Image<S>, offset: u64) -> bool {
        let cluster = offset >> image.geometry.cluster_bits();
        self.l1_certain
            && !self.doubtful.contains(&offset)
            && self.own.are_alone(cluster..=cluster, &self.counts)
    }

    /// Whether there are entries to mend.
    pub(crate) fn has_fixes(&self) -> bool {
        !self.fixes.is_empty() || !self.l1_fixes.is_empty()
    }

    /// Writes the mended entries, durably, where their tables are nothing but tables. Returns how
    /// many errors that mends.
    pub(crate) async fn apply_fixes<S: Storage>(&self, image: &Image<S>) -> Result<u64> {
        let mut fixed = 0;
        for (index, entry) in &self.l1_fixes {
            let table = entry.offset(&image.geometry).ok().flatten();
            if table.is_some_and(|table| self.may_write_table(image, table.get())) {
                write_l1_entry(image, *index, *entry).await?;
                fixed += 1;
            }
        }
        for fixes in self.fixes.chunk_by(|a, b| a.table == b.table) {
            let Some(first) = fixes.first() else { continue };
            if !self.may_write_table(image, first.table) {
                continue;
            }
            let entries = fixes.iter().map(|fix| (fix.index, fix.entry));
            write_entries(image, first.table, entries).await?;
            fixed += fixes.iter().map(|fix| fix.errors).sum::<u64>();
        }
        image.flush().await?;
        Ok(fixed)
    }
}

/// Puts an entry into the active L1 table.
pub(crate) async fn write_l1_entry<S: Storage>(
    image: &Image<S>,
    index: usize,
    entry: L1Entry,
) -> Result<()> {
    let at = image.header.l1_table_offset.get() + index as u64 * 8;
    image.write(at, &entry.raw().to_be_bytes()).await
}

/// How many tables to read at once.
pub(crate) fn tables_at_once<S: Storage>(image: &Image<S>) -> usize {
    (READ_AT_ONCE >> image.geometry.cluster_bits()).clamp(1, 64) as usize
}

/// Puts entries, in order of their indexes, into the L2 table at `table`.
pub(crate) async fn write_entries<S: Storage>(
    image: &Image<S>,
    table: u64,
    entries: impl Iterator<Item = (usize, L2Entry)>,
) -> Result<()> {
    let geometry = &image.geometry;
    let size = geometry.cluster_size() as usize;
    let mut bytes = image.read(table, size).await?.to_vec();
    let piece = PIECE.min(size);
    let mut changed: Vec<usize> = Vec::new();
    for (index, entry) in entries {
        // In range: the index came from this table.
        let _ = entry.write(&mut bytes, index, geometry);
        changed.push(index * geometry.l2_entry_size() / piece);
    }
    changed.dedup();
    for run in changed.chunk_by(|one, next| one + 1 == *next) {
        let (Some(first), Some(last)) = (run.first(), run.last()) else { continue };
        let part = bytes.get(first * piece..(last + 1) * piece).unwrap_or_default();
        image.write(table + (first * piece) as u64, part).await?;
    }
    Ok(())
}

/// Reads the entries of an L1 table that the file has.
async fn read_l1<S: Storage>(
    image: &Image<S>,
    offset: HostOffset,
    bytes: u64,
) -> Result<Vec<L1Entry>> {
    let table = image.read_existing(offset.get(), bytes).await?;
    Ok((0..table.len() / 8)
        .map(|index| L1Entry::read(&table, index).unwrap_or(L1Entry::unallocated()))
        .collect())
}
