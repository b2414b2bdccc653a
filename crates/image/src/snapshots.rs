//! Internal snapshots of an image that nobody uses: taken, applied, deleted, each as one change.

use crate::Result;
use crate::change::Change;
use crate::options::{OpenOptions, SnapshotChoice};
use crate::snapshot_table::read_snapshots;
use isobath_qcow2::{AutoclearFeatures, Header, HostOffset, L1Entry, Snapshot};
use isobath_storage::{Host, IoBuf, Storage};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// What is changed, for messages.
const WHAT: &str = "internal snapshots";

/// The instruction count of a snapshot that has none.
const NO_ICOUNT: u64 = u64::MAX;

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
    let mut this = SnapshotChange::begin(host, name, options).await?;
    let header = this.add(snapshot, taken).await;
    Box::pin(this.change.switch(header)).await
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
    let mut this = SnapshotChange::begin(host, name, options).await?;
    if this.change.header.autoclear.contains(AutoclearFeatures::BITMAPS) {
        return Err(this.change.refused("Device has active dirty bitmaps"));
    }
    let index = SnapshotChoice::IdOrName(snapshot.to_owned()).find(&this.snapshots);
    let snapshot = this.required(index)?;
    let geometry = this.change.geometry();
    snapshot.check(&geometry).map_err(|error| this.change.layer.format_error(error))?;
    let header = this.show(&snapshot).await;
    Box::pin(this.change.switch(header)).await
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
    let mut this = SnapshotChange::begin(host, name, options).await?;
    let index = this.snapshots.iter().position(|one| one.name == snapshot.as_bytes());
    this.required(index)?;
    this.snapshots = std::mem::take(&mut this.snapshots)
        .into_iter()
        .enumerate()
        .filter_map(|(place, one)| (Some(place) != index).then_some(one))
        .collect();
    let table = this.write_snapshots().await;
    Box::pin(this.change.switch(table)).await
}

/// Notes in every snapshot what version 3 demands, such as the disk's size, which those of version 2 may lack.
///
/// # Errors
/// As for [`create_snapshot`]; or if a snapshot's tables are too small for the size that it would get.
pub(crate) async fn complete_snapshots<H: Host>(
    host: &H,
    name: &Path,
    options: &OpenOptions,
) -> Result<()> {
    let change = Change::begin(host, name, options, WHAT).await?;
    SnapshotChange::of(change).await?.complete().await
}

/// Completes the snapshots of an image as [`complete_snapshots`] does, one that is open for writing as `storage`.
///
/// # Errors
/// As for that.
pub(crate) async fn complete_open_snapshots<H: Host>(
    host: &H,
    name: &Path,
    options: &OpenOptions,
    storage: &Arc<H::File>,
) -> Result<()> {
    let change = Change::begin_open(host, name, options, storage, WHAT).await?;
    SnapshotChange::of(change).await?.complete().await
}

/// A change of an image's snapshots.
struct SnapshotChange<S: Storage> {
    change: Change<S>,
    snapshots: Vec<Snapshot>,
}

impl<S: Storage> SnapshotChange<S> {
    async fn begin<H: Host<File = S>>(
        host: &H,
        name: &Path,
        options: &OpenOptions,
    ) -> Result<Self> {
        Self::of(Change::begin(host, name, options, WHAT).await?).await
    }

    async fn of(change: Change<S>) -> Result<Self> {
        if change.geometry().has_data_file() {
            return Err(
                change.refused("an image with an external data file has no internal snapshots")
            );
        }
        let storage = change.layer.storage();
        let length = storage.len().await?;
        let name = change.layer.name();
        let snapshots = read_snapshots(&**storage, name, &change.header, length).await?;
        Ok(Self { change, snapshots })
    }

    /// Completes every snapshot, or none.
    async fn complete(mut self) -> Result<()> {
        if self.snapshots.iter().all(|snapshot| snapshot.disk_size.is_some()) {
            self.change.close().await?;
            return Ok(());
        }
        let checked = self.complete_entries();
        let table = match checked {
            Ok(()) => self.write_snapshots().await,
            Err(error) => Err(error),
        };
        Box::pin(self.change.switch(table)).await
    }

    /// Completes the entries that can be used then, as QEMU does with all whenever it writes the table. The error is of
    /// the first of the others.
    fn complete_entries(&mut self) -> Result<()> {
        let (size, geometry) = (self.change.header.disk_size(), self.change.geometry());
        let mut checked = Ok(());
        for snapshot in &mut self.snapshots {
            let complete = Snapshot {
                disk_size: snapshot.disk_size.or(Some(size)),
                icount: snapshot.icount.or(Some(NO_ICOUNT)),
                ..snapshot.clone()
            };
            match complete.check(&geometry) {
                Ok(()) => *snapshot = complete,
                Err(error) => checked = checked.and(Err(error)),
            }
        }
        checked.map_err(|error| self.change.layer.format_error(error))
    }

    fn required(&self, index: Option<usize>) -> Result<Snapshot> {
        let snapshot = index.and_then(|index| self.snapshots.get(index));
        snapshot.cloned().ok_or_else(|| self.change.refused("snapshot not found"))
    }

    /// Adds the disk as it is to the snapshots; returns the header that refers to it.
    async fn add(&mut self, snapshot: &str, taken: Duration) -> Result<Header> {
        let header = self.change.header.clone();
        let l1 = self.read_l1(header.l1_table_offset, header.l1_size).await?;
        let l1_table_offset = self.change.take(l1.len() as u64 * 8).await?;
        let highest =
            self.snapshots.iter().filter_map(|one| one.id_text().parse::<u64>().ok()).max();
        self.snapshots.push(Snapshot {
            l1_table_offset,
            l1_size: header.l1_size,
            id: highest.unwrap_or(0).saturating_add(1).to_string().into_bytes(),
            name: snapshot.as_bytes().to_vec(),
            date_sec: u32::try_from(taken.as_secs()).unwrap_or(u32::MAX),
            date_nsec: taken.subsec_nanos(),
            disk_size: Some(header.disk_size()),
            // There was no record or replay.
            icount: Some(0),
            ..Snapshot::default()
        });
        self.write_l1(l1_table_offset, &l1).await?;
        self.write_snapshots().await
    }

    /// The header of the image that shows what a snapshot holds.
    async fn show(&mut self, snapshot: &Snapshot) -> Result<Header> {
        let size = snapshot.disk_size.unwrap_or_else(|| self.change.header.disk_size());
        // Behind the disk lies what the machine's state was, which comes with it, as in QEMU.
        let entries = self.change.geometry().l1_size_for(size).max(u64::from(snapshot.l1_size));
        let mut l1 = self.read_l1(snapshot.l1_table_offset, snapshot.l1_size).await?;
        l1.resize(entries as usize, L1Entry::unallocated());
        let l1_table_offset = self.change.take(entries * 8).await?;
        self.write_l1(l1_table_offset, &l1).await?;
        let header = self.change.header.clone();
        Ok(Header { l1_table_offset, l1_size: entries as u32, size, ..header })
    }

    async fn read_l1(&self, offset: HostOffset, entries: u32) -> Result<Vec<L1Entry>> {
        let bytes = self.change.read(offset, u64::from(entries) * 8).await?;
        let entry = |index| L1Entry::read(&bytes, index).unwrap_or(L1Entry::unallocated());
        Ok((0..entries as usize).map(entry).collect())
    }

    /// Writes an L1 table, with no COPIED flag: its L2 tables are those of another L1 table too.
    async fn write_l1(&self, at: HostOffset, entries: &[L1Entry]) -> Result<()> {
        let bytes = entries.iter().flat_map(|entry| entry.with_copied(false).raw().to_be_bytes());
        self.change.write(at, IoBuf::copy_of(&bytes.collect::<Vec<u8>>())).await
    }

    /// Writes the table of the snapshots that there will be; returns the header that refers to it.
    async fn write_snapshots(&mut self) -> Result<Header> {
        // One whose tables are too small for the disk is left as it is.
        let _ = self.complete_entries();
        let table = Snapshot::encode_table(&self.snapshots);
        let table = table.map_err(|error| self.change.layer.format_error(error))?;
        let mut header = self.change.header.clone();
        header.nb_snapshots = self.snapshots.len() as u32;
        header.snapshots_offset = HostOffset::new(0);
        if !table.is_empty() {
            header.snapshots_offset = self.change.take(table.len() as u64).await?;
            self.change.write(header.snapshots_offset, IoBuf::copy_of(&table)).await?;
        }
        Ok(header)
    }
}
