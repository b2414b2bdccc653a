//! Internal snapshots of an image that nobody uses: taken, applied, deleted.
//!
//! No guest data moves. A change puts the new tables next to the old ones, in clusters of their own, and one write of
//! the header's first sector switches to them. Refcounts and COPIED flags follow from the tables: they are counted as a
//! check counts them, for the image as it will be. To every crash there is an image in which no cluster is used twice:
//!
//! 1. the dirty bit is set (version 3), with which any program that opens the image counts again;
//! 2. refcounts that must be higher are raised, and durable;
//! 3. COPIED flags are cleared where a refcount is not 1;
//! 4. the header is written;
//! 5. refcounts that may be lower are lowered, and durable;
//! 6. COPIED flags are set where a refcount is 1;
//! 7. the dirty bit is cleared.
//!
//! Version 2 has no such bit: a crash in between leaves leaked clusters, and COPIED flags that a check reports.

use crate::check::copied;
use crate::check::image::Image;
use crate::check::log::Log;
use crate::check::refcounts::{self, Refcounts};
use crate::check::survey::Survey;
use crate::check::{CheckEvent, Repair, check_storage};
use crate::durability::MetadataMode;
use crate::layer::{ImageFormat, Layer};
use crate::open::open_layer;
use crate::options::OpenOptions;
use crate::readers::Readers;
use crate::recovery::Purpose;
use crate::writer::Writer;
use crate::{DiskError, Result, always};
use isobath_qcow2::header::field;
use isobath_qcow2::snapshot::check_length;
use isobath_qcow2::{
    AutoclearFeatures, FormatError, Header, HostOffset, IncompatibleFeatures, L1Entry, Snapshot,
};
use isobath_storage::{Host, IoBuf, Storage};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Bytes of the snapshot table read at once; more than the longest entry.
const READ_AT_ONCE: u64 = 1 << 20;
/// The header's first sector, which has every field that changes.
const SECTOR: usize = 512;

/// Takes a snapshot of the disk as it is, named `snapshot`. `taken` is the time since 1970.
///
/// # Errors
/// If the image cannot be used, its format or data file allows no snapshots, it has errors, or a refcount cannot count
/// one reference more. The image is then as before.
pub async fn create_snapshot<H: Host>(
    host: &H,
    name: &Path,
    options: &OpenOptions,
    snapshot: &str,
    taken: Duration,
) -> Result<()> {
    let mut change = Change::begin(host, name, options).await?;
    let l1 = change.read_l1(change.header.l1_table_offset, change.header.l1_size).await?;
    let l1_table_offset = change.take(l1.len() as u64 * 8).await?;
    let highest = change.snapshots.iter().filter_map(|one| one.id_text().parse::<u64>().ok()).max();
    change.snapshots.push(Snapshot {
        l1_table_offset,
        l1_size: change.header.l1_size,
        id: highest.unwrap_or(0).saturating_add(1).to_string().into_bytes(),
        name: snapshot.as_bytes().to_vec(),
        date_sec: u32::try_from(taken.as_secs()).unwrap_or(u32::MAX),
        date_nsec: taken.subsec_nanos(),
        disk_size: Some(change.header.disk_size()),
        // There was no record or replay.
        icount: Some(0),
        ..Snapshot::default()
    });
    change.write_l1(l1_table_offset, &l1).await?;
    let table = change.write_snapshots().await?;
    change.switch(table).await
}

/// Makes the disk what it was when the snapshot with this ID or, if there is none, with this name was taken, also its
/// size. The snapshot stays.
///
/// # Errors
/// As for [`create_snapshot`]; or if there is no such snapshot, or the image has bitmaps, which would no longer be
/// true.
pub async fn apply_snapshot<H: Host>(
    host: &H,
    name: &Path,
    options: &OpenOptions,
    snapshot: &str,
) -> Result<()> {
    let mut change = Change::begin(host, name, options).await?;
    if change.header.autoclear.contains(AutoclearFeatures::BITMAPS) {
        return Err(change.refused("Device has active dirty bitmaps"));
    }
    let by_id = change.find(|one| one.id == snapshot.as_bytes());
    let index = by_id.or_else(|| change.find(|one| one.name == snapshot.as_bytes()));
    let snapshot = change.required(index)?;
    let geometry = change.geometry();
    snapshot.check(&geometry).map_err(|error| change.layer.format_error(error))?;
    let size = snapshot.disk_size.unwrap_or_else(|| change.header.disk_size());
    // Behind the disk lies what the guest's memory and devices were, which stays the snapshot's.
    let entries = geometry.l1_size_for(size);
    let mut l1 = change.read_l1(snapshot.l1_table_offset, snapshot.l1_size).await?;
    l1.resize(entries as usize, L1Entry::unallocated());
    let l1_table_offset = change.take(entries * 8).await?;
    change.write_l1(l1_table_offset, &l1).await?;
    let header = Header { l1_table_offset, l1_size: entries as u32, size, ..change.header.clone() };
    change.switch(header).await
}

/// Deletes the first snapshot with this name, and frees what only it holds.
///
/// # Errors
/// As for [`create_snapshot`]; or if there is no such snapshot.
pub async fn delete_snapshot<H: Host>(
    host: &H,
    name: &Path,
    options: &OpenOptions,
    snapshot: &str,
) -> Result<()> {
    let mut change = Change::begin(host, name, options).await?;
    let index = change.find(|one| one.name == snapshot.as_bytes());
    change.required(index)?;
    change.snapshots = std::mem::take(&mut change.snapshots)
        .into_iter()
        .enumerate()
        .filter_map(|(place, one)| (Some(place) != index).then_some(one))
        .collect();
    let table = change.write_snapshots().await?;
    change.switch(table).await
}

/// The snapshots of an image with this header.
///
/// # Errors
/// If the table cannot be read or used.
pub async fn read_snapshots<S: Storage>(
    storage: &S,
    name: &Path,
    header: &Header,
    length: u64,
) -> Result<Vec<Snapshot>> {
    let error = |source: FormatError| DiskError::Format { image: name.to_owned(), source };
    let start = header.snapshots_offset.get();
    let mut snapshots = Vec::new();
    let (mut at, mut window, mut window_at) = (start, IoBuf::empty(), start);
    for _ in 0..header.nb_snapshots {
        let used = (at - window_at) as usize;
        // An entry takes at most 132,152 bytes.
        if window.len() < used + (1 << 18) && window_at + (window.len() as u64) < length {
            let there = length.saturating_sub(at).min(READ_AT_ONCE);
            window = storage.read_at(at, IoBuf::zeroed(there as usize)).await?;
            window_at = at;
        }
        let rest = window.get((at - window_at) as usize..).unwrap_or_default();
        let (snapshot, used) = Snapshot::parse(rest).map_err(error)?;
        snapshots.push(snapshot);
        at += used as u64;
        check_length((at - start) as usize).map_err(error)?;
    }
    Ok(snapshots)
}

/// A change of an image's snapshots.
struct Change<S: Storage> {
    layer: Arc<Layer<S>>,
    writer: Writer<S>,
    readers: Readers,
    header: Header,
    snapshots: Vec<Snapshot>,
    /// Clusters were taken.
    taken: bool,
}

impl<S: Storage> Change<S> {
    async fn begin<H: Host<File = S>>(
        host: &H,
        name: &Path,
        options: &OpenOptions,
    ) -> Result<Self> {
        let options = options.clone().writable(true).backing(false).metadata(MetadataMode::Ordered);
        let layer = Arc::new(open_layer(host, name, options.format, true, &options).await?);
        let refused =
            |reason: &str| DiskError::Refused { image: name.to_owned(), reason: reason.to_owned() };
        let qcow2 = match layer.as_qcow2() {
            None => return Err(refused("its format has no internal snapshots")),
            Some(qcow2) if qcow2.geometry.has_data_file() => {
                return Err(refused(
                    "an image with an external data file has no internal snapshots",
                ));
            }
            Some(qcow2) => qcow2,
        };
        let writer = Writer::open(&layer, qcow2, &options, true).await?;
        let header = qcow2.header.read().clone();
        let length = layer.storage().len().await?;
        let snapshots = read_snapshots(&**layer.storage(), name, &header, length).await?;
        let readers = Readers::default();
        Ok(Self { layer, writer, readers, header, snapshots, taken: false })
    }

    fn refused(&self, reason: &str) -> DiskError {
        DiskError::Refused { image: self.layer.name().to_owned(), reason: reason.to_owned() }
    }

    fn geometry(&self) -> isobath_qcow2::Geometry {
        // Only a qcow2 image gets here.
        match self.layer.as_qcow2() {
            Some(qcow2) => qcow2.geometry,
            None => crate::violated("an image whose snapshots change is a qcow2 image"),
        }
    }

    fn find(&self, wanted: impl Fn(&Snapshot) -> bool) -> Option<usize> {
        self.snapshots.iter().position(wanted)
    }

    fn required(&self, index: Option<usize>) -> Result<Snapshot> {
        let snapshot = index.and_then(|index| self.snapshots.get(index));
        snapshot.cloned().ok_or_else(|| self.refused("snapshot not found"))
    }

    async fn read_l1(&self, offset: HostOffset, entries: u32) -> Result<Vec<L1Entry>> {
        let bytes = IoBuf::zeroed(entries as usize * 8);
        let bytes = self.layer.storage().read_at(offset.get(), bytes).await?;
        let entry = |index| L1Entry::read(&bytes, index).unwrap_or(L1Entry::unallocated());
        Ok((0..entries as usize).map(entry).collect())
    }

    /// Takes adjacent clusters for a table of so many bytes, durably: nothing refers to them yet.
    async fn take(&mut self, bytes: u64) -> Result<HostOffset> {
        let count = self.geometry().clusters_for(bytes).max(1);
        self.taken = true;
        let offset = self.writer.take_clusters(&self.readers, count).await?;
        // Until the table is written it is zeroes, also where the file ended before.
        let length = (count << self.geometry().cluster_bits()) as usize;
        self.layer.storage().write_at(offset.get(), IoBuf::zeroed(length)).await?;
        Ok(offset)
    }

    /// Writes an L1 table, with no COPIED flag: its L2 tables are those of another L1 table too.
    async fn write_l1(&self, at: HostOffset, entries: &[L1Entry]) -> Result<()> {
        let mut table = IoBuf::zeroed(entries.len() * 8);
        for (index, entry) in entries.iter().enumerate() {
            let written = entry.with_copied(false).write(&mut table, index);
            always(written, self.layer.name(), "a table has a place for each of its entries")?;
        }
        self.layer.storage().write_at(at.get(), table).await?;
        Ok(())
    }

    /// Writes the table of the snapshots that there will be; returns the header that refers to it.
    async fn write_snapshots(&mut self) -> Result<Header> {
        let table = Snapshot::encode_table(&self.snapshots);
        let table = table.map_err(|error| self.layer.format_error(error))?;
        let mut header = self.header.clone();
        header.nb_snapshots = self.snapshots.len() as u32;
        header.snapshots_offset = HostOffset::new(0);
        if !table.is_empty() {
            header.snapshots_offset = self.take(table.len() as u64).await?;
            let at = header.snapshots_offset.get();
            self.layer.storage().write_at(at, IoBuf::copy_of(&table)).await?;
        }
        Ok(header)
    }

    /// Makes `header` the image's header, with the refcounts and flags that follow from it.
    async fn switch(self, header: Header) -> Result<()> {
        self.writer.close(&self.readers).await?;
        let Self { layer, writer, taken, .. } = self;
        drop(writer);
        let (storage, name) = (layer.storage(), layer.name());
        storage.flush().await?;
        let mut now = Image::open(storage, name, Some(ImageFormat::Qcow2), Purpose::Write).await?;
        let prepared = prepare(&now, header).await;
        if prepared.is_err() && taken {
            // What was taken for the new tables.
            let mut quiet = |_: CheckEvent<'_>| {};
            check_storage(storage, name, Some(ImageFormat::Qcow2), Repair::Leaks, &mut quiet)
                .await?;
        }
        prepared?.run(&mut now).await
    }
}

/// The image as it will be, and what refers to its clusters.
struct Prepared<S> {
    then: Image<S>,
    target: Survey,
    /// What the active tables are now, if they are not those that they will be.
    now: Option<Survey>,
    refcounts: Refcounts,
}

/// Counts; changes nothing.
async fn prepare<S: Storage>(now: &Image<S>, header: Header) -> Result<Prepared<S>> {
    let then = now.with_header(header);
    let target = count(&then, "the change would leave it with errors").await?;
    let moves = then.header.l1_table_offset != now.header.l1_table_offset;
    let before = if moves {
        Some(count(now, "its snapshots are not changed while it has errors").await?)
    } else {
        None
    };
    let refcounts = refcounts::compare(&then, &target).await?;
    Ok(Prepared { then, target, now: before, refcounts })
}

/// Counts the references of an image without errors; `otherwise` is what is said of one with some.
async fn count<S: Storage>(image: &Image<S>, otherwise: &str) -> Result<Survey> {
    let mut first = None;
    let mut events = |event: CheckEvent<'_>| {
        if let CheckEvent::Finding(text) = event {
            first.get_or_insert_with(|| text.to_owned());
        }
    };
    let mut log = Log::new(&mut events);
    let survey = Survey::take(image, &mut log).await?;
    let (corruptions, errors) = (log.report.corruptions, log.report.check_errors);
    match survey {
        Some(survey) if corruptions == 0 && errors == 0 && !survey.lost => Ok(survey),
        _ => Err(DiskError::Corrupt {
            image: image.name.clone(),
            reason: format!("{otherwise}; the first is '{}'", first.unwrap_or_default()),
        }),
    }
}

impl<S: Storage> Prepared<S> {
    async fn run(self, now: &mut Image<S>) -> Result<()> {
        let Self { mut then, target, now: before, mut refcounts } = self;
        now.set_incompatible(IncompatibleFeatures::DIRTY).await?;
        then.header.incompatible = now.header.incompatible;
        if refcounts::raise(&then, &target, &mut refcounts).await? {
            flags(now, before.as_ref().unwrap_or(&target), (&refcounts, &target)).await?;
        }
        if before.is_some() {
            flags(&then, &target, (&refcounts, &target)).await?;
        }
        write_header(&then).await?;
        let lowered = refcounts::lower(&then, &target, &mut refcounts).await?;
        if lowered.ones {
            flags(&then, &target, (&refcounts, &target)).await?;
        }
        then.clear_incompatible(IncompatibleFeatures::DIRTY).await?;
        let bits = then.geometry.cluster_bits();
        for run in lowered.freed {
            let (offset, length) = (run.start << bits, (run.end - run.start) << bits);
            if let Err(error) = then.storage.discard(offset, length).await {
                tracing::debug!(%error, "cannot release the space of a deleted snapshot");
                break;
            }
        }
        Ok(())
    }
}

/// Makes the COPIED flags of an image's active tables true.
async fn flags<S: Storage>(
    image: &Image<S>,
    survey: &Survey,
    refcounts: (&Refcounts, &Survey),
) -> Result<()> {
    let mut log = Log::quiet();
    copied::check(image, survey, refcounts, Repair::All, &mut log).await?;
    if log.report.corruptions > 0 {
        return Err(image.refused("the COPIED flags of its tables cannot be written".into()));
    }
    Ok(())
}

/// Writes the fields of the header that change, in one piece, durably.
async fn write_header<S: Storage>(image: &Image<S>) -> Result<()> {
    image.flush().await?;
    let mut sector = image.read(0, SECTOR).await?.to_vec();
    let header = &image.header;
    let fields: [(usize, Vec<u8>); 5] = [
        (field::SIZE, header.size.to_be_bytes().into()),
        (field::L1_SIZE, header.l1_size.to_be_bytes().into()),
        (field::L1_TABLE_OFFSET, header.l1_table_offset.get().to_be_bytes().into()),
        (field::NB_SNAPSHOTS, header.nb_snapshots.to_be_bytes().into()),
        (field::SNAPSHOTS_OFFSET, header.snapshots_offset.get().to_be_bytes().into()),
    ];
    for (at, bytes) in fields {
        let place = sector.get_mut(at..at + bytes.len());
        always(place, &image.name, "a header has its fields in its first sector")?
            .copy_from_slice(&bytes);
    }
    image.write(0, &sector).await?;
    image.flush().await
}
