//! Persistent bitmaps: a bitmap never claims to match a disk that has changed.
//!
//! A bitmap that tracks writes (flag `auto`) is marked *in use* before the first write; every program considers a
//! bitmap with this mark inconsistent. Writes are noted in memory. When the image is closed, they are brought into the
//! file, and the mark is removed. Bitmaps that do not track writes are left unchanged, unless the disk gets another
//! size.

use super::Qcow2Writer;
use crate::alloc::Run;
use crate::bitmap_bits::{BitmapBits, inconsistent, keep_bits};
use crate::durability::Metadata;
use crate::layer::Layer;
use crate::readers::Readers;
use crate::sabotage::{self, Sabotage};
use crate::tables::Claim;
use crate::writer::Writer;
use crate::{DiskError, Result, always, lock_order};
use isobath_qcow2::{
    AutoclearFeatures, Bitmap, BitmapCluster, BitmapFlags, Header, HostCluster, HostOffset,
};
use isobath_storage::{IoBuf, Storage};
use isobath_sync::{AsyncMutex, AsyncMutexGuard};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

/// The bitmaps of an image open for writing.
pub(super) struct Bitmaps {
    /// Some of them track writes.
    tracking: bool,
    /// Those are marked.
    marked: AtomicBool,
    directory: AsyncMutex<Option<Directory>>,
    /// What the file does not have yet, of those that are marked.
    noted: parking_lot::Mutex<Vec<Noted>>,
}

/// The bitmap directory as the file has it.
struct Directory {
    offset: u64,
    bitmaps: Vec<Bitmap>,
    /// Guest bytes that the stored bitmaps cover.
    size: u64,
}

/// Writes since the image was opened.
struct Noted {
    /// The bitmap's number in the directory.
    place: usize,
    tracks: bool,
    bits: BitmapBits,
}

impl Bitmaps {
    /// Reads the bitmap directory, if the image has one that is consistent.
    pub(super) async fn open<S: Storage>(layer: &Layer<S>, header: &Header) -> Result<Self> {
        let consistent = header.autoclear.contains(AutoclearFeatures::BITMAPS);
        let mut directory = None;
        if let Some(extension) = header.bitmaps().filter(|_| consistent) {
            let geometry = header.geometry().map_err(|error| layer.format_error(error))?;
            extension.validate(&geometry).map_err(|error| layer.format_error(error))?;
            let (offset, length) = (extension.directory_offset.get(), extension.directory_size);
            let bytes = layer.storage().read_at(offset, IoBuf::zeroed(length as usize)).await?;
            let bitmaps = Bitmap::parse_directory(&bytes, extension.count)
                .map_err(|error| layer.format_error(error))?;
            // The requirements of an unknown kind of bitmap for writers are unknown.
            let size = header.disk_size();
            bitmaps
                .iter()
                .try_for_each(|bitmap| bitmap.validate(&geometry, size))
                .map_err(|error| layer.format_error(error))?;
            directory = Some(Directory { offset, bitmaps, size });
        }
        Ok(Self {
            tracking: directory.iter().flat_map(|directory| &directory.bitmaps).any(tracks),
            marked: AtomicBool::new(false),
            directory: AsyncMutex::ranked(directory, lock_order::BITMAPS),
            noted: parking_lot::Mutex::default(),
        })
    }
}

fn is_marked(bitmap: &Bitmap) -> bool {
    bitmap.flags.contains(BitmapFlags::IN_USE)
}

/// Whether a bitmap tracks every write and is not marked.
fn tracks(bitmap: &Bitmap) -> bool {
    bitmap.flags.contains(BitmapFlags::AUTO) && !is_marked(bitmap)
}

impl Directory {
    /// Writes the directory with other flags or places, durably.
    async fn replace<S: Storage>(&mut self, layer: &Layer<S>, bitmaps: Vec<Bitmap>) -> Result<()> {
        let bytes =
            Bitmap::encode_directory(&bitmaps).map_err(|error| layer.format_error(error))?;
        layer.storage().write_at(self.offset, IoBuf::copy_of(&bytes)).await?;
        layer.storage().flush().await?;
        self.bitmaps = bitmaps;
        Ok(())
    }
}

impl<S: Storage> Qcow2Writer<S> {
    /// Called before guest data in the range changes.
    pub async fn note_write(&self, range: Range<u64>) -> Result<()> {
        let bitmaps = &self.bitmaps;
        if !bitmaps.tracking || sabotage::is(Sabotage::UnmarkedBitmaps) {
            return Ok(());
        }
        if !bitmaps.marked.load(Ordering::Acquire) {
            let mut directory = bitmaps.directory.lock().await;
            if !bitmaps.marked.load(Ordering::Acquire) {
                self.mark(&mut directory, tracks).await?;
                bitmaps.marked.store(true, Ordering::Release);
            }
        }
        if sabotage::is(Sabotage::UnnotedWrites) {
            return Ok(());
        }
        for noted in bitmaps.noted.lock().iter_mut().filter(|noted| noted.tracks) {
            noted.bits.set(&range);
        }
        Ok(())
    }

    /// Marks those bitmaps, durably.
    async fn mark(
        &self,
        directory: &mut AsyncMutexGuard<'_, Option<Directory>>,
        which: impl Fn(&Bitmap) -> bool,
    ) -> Result<()> {
        let Some(directory) = &mut **directory else { return Ok(()) };
        let (mut bitmaps, mut more) = (directory.bitmaps.clone(), Vec::new());
        for (place, bitmap) in bitmaps.iter_mut().enumerate().filter(|(_, bitmap)| which(bitmap)) {
            let bits = BitmapBits::new(directory.size, bitmap.granularity_bits);
            more.push(Noted { place, tracks: tracks(bitmap), bits });
            bitmap.flags = bitmap.flags.with(BitmapFlags::IN_USE);
        }
        if !more.is_empty() {
            directory.replace(&self.metadata.layer, bitmaps).await?;
            self.bitmaps.noted.lock().extend(more);
        }
        Ok(())
    }

    /// Prepares the bitmaps for a change of the disk's size: all are marked, and rewritten when the image is closed.
    ///
    /// # Errors
    /// [`DiskError::Refused`] if one was inconsistent before; or if the storage fails.
    pub async fn begin_resize_bitmaps(&self) -> Result<()> {
        let layer = &self.metadata.layer;
        let mut directory = self.bitmaps.directory.lock().await;
        let Some(all) = directory.as_ref() else { return Ok(()) };
        let ours: Vec<_> = self.bitmaps.noted.lock().iter().map(|noted| noted.place).collect();
        let mut marked = all.bitmaps.iter().enumerate().filter(|(_, bitmap)| is_marked(bitmap));
        if let Some((_, bitmap)) = marked.find(|(place, _)| !ours.contains(place)) {
            let (image, reason) = (layer.name().to_owned(), inconsistent(bitmap));
            return Err(DiskError::Refused { image, reason });
        }
        self.mark(&mut directory, |bitmap| !is_marked(bitmap)).await?;
        self.bitmaps.marked.store(true, Ordering::Release);
        Ok(())
    }

    /// The disk has another size now. A part that is new may have had other contents before the disk shrank: bitmaps
    /// that track writes mark it.
    pub fn resize_bitmaps(&self, size: u64) {
        for noted in self.bitmaps.noted.lock().iter_mut() {
            let old = noted.bits.size();
            noted.bits.resize(size);
            if noted.tracks {
                noted.bits.set(&(old..size));
            }
        }
    }
}

/// How a bitmap that is marked gets its final contents.
struct Update {
    place: usize,
    /// Its table after the update.
    table: IoBuf,
    table_changes: bool,
    /// The table gets another size, and so another place.
    moves: bool,
    /// Contents of clusters that it has already.
    in_place: Vec<(HostOffset, IoBuf)>,
    /// Contents of clusters that it gets, by their entries in the table.
    new: Vec<(usize, IoBuf)>,
    /// Clusters that it has no use for afterwards.
    released: Vec<HostCluster>,
}

/// Whether only the bitmap is lost if it cannot be stored for this reason.
fn is_of_one_bitmap(error: &DiskError) -> bool {
    let known = matches!(
        error,
        DiskError::Storage(_) | DiskError::Format { .. } | DiskError::Refused { .. }
    );
    known && !error.is_failed_flush()
}

/// An update whose clusters are written.
struct PreparedUpdate<'a, S> {
    update: Update,
    /// The bitmap as the directory will have it.
    bitmap: Bitmap,
    /// What the update takes, until it is counted.
    claim: Claim<'a, S>,
}

impl<S: Storage> Writer<S> {
    /// Brings what was noted into the bitmaps, and removes their marks. One that finds no room, or cannot be read,
    /// remains marked: programs take it for inconsistent, and the image can be closed. No request changes the disk any
    /// more, and everything is durable; there is no journal. Returns whether there is anything that the caller must
    /// commit.
    pub(super) async fn store_bitmaps(&self, readers: &Readers) -> Result<bool> {
        let Some(qcow2) = &self.qcow2 else { return Ok(false) };
        let _held = self.policy.journal().map(|journal| journal.hold());
        let mut directory = qcow2.bitmaps.directory.lock().await;
        let Some(directory) = &mut *directory else { return Ok(false) };
        let noted = std::mem::take(&mut *qcow2.bitmaps.noted.lock());
        if noted.is_empty() {
            return Ok(false);
        }
        let mut updates = Vec::new();
        for noted in &noted {
            let prepared = async {
                let update = self.plan_update(qcow2, directory, noted).await?;
                self.prepare_update(qcow2, directory, update).await
            };
            match prepared.await {
                Ok(update) => updates.push(update),
                Err(error) if !is_of_one_bitmap(&error) => return Err(error),
                Err(error) => tracing::warn!(
                    "{}: a bitmap stays inconsistent: {error}",
                    isobath_storage::shown(self.layer.name())
                ),
            }
        }
        if !updates.is_empty() {
            self.update(qcow2, directory, updates, readers).await?;
        }
        // A bitmap that remains marked may have given back what it took.
        Ok(true)
    }

    async fn plan_update(
        &self,
        qcow2: &Qcow2Writer<S>,
        directory: &Directory,
        noted: &Noted,
    ) -> Result<Update> {
        let (layer, geometry) = (&self.layer, qcow2.geometry());
        let bitmap = directory.bitmaps.get(noted.place);
        let bitmap = always(bitmap, layer.name(), "a bitmap that is marked is in the directory")?;
        let stored = bitmap.table_size as usize;
        let table = IoBuf::zeroed(stored * 8);
        let old = layer.storage().read_at(bitmap.table_offset.get(), table).await?;
        let entries = bitmap.table_size_for(&geometry, noted.bits.size()).max(1) as usize;
        let mut update = Update {
            place: noted.place,
            table: IoBuf::zeroed(entries * 8),
            table_changes: entries != stored,
            moves: entries != stored,
            in_place: Vec::new(),
            new: Vec::new(),
            released: Vec::new(),
        };
        let cluster_size = geometry.cluster_size();
        let resized = noted.bits.size() != directory.size;
        let bits_in = |size: u64| size.div_ceil(noted.bits.granularity());
        let (before, after) = (bits_in(directory.size), bits_in(noted.bits.size()));
        let mut chunks = noted.bits.bytes().chunks(cluster_size as usize);
        for index in 0..entries.max(stored) {
            let cluster = BitmapCluster::read(&old, index, &geometry).transpose();
            let cluster = cluster.map_err(|error| layer.format_error(error))?;
            let cluster = cluster.unwrap_or(BitmapCluster::Zeroes);
            let more = chunks.next().unwrap_or_default();
            if index >= entries {
                if let BitmapCluster::Data(at) = cluster {
                    update.released.push(geometry.host_cluster_of(at));
                }
                continue;
            }
            let name = layer.name();
            always(cluster.write(&mut update.table, index), name, "a table has its entries")?;
            // What is past the end of the disk is in the cluster with the end, before or after.
            let first = index as u64 * cluster_size * 8;
            let ends = [before, after].iter().any(|bits| first + cluster_size * 8 > *bits);
            if !(resized && ends) && more.iter().all(|byte| *byte == 0) {
                continue;
            }
            let found = match cluster {
                BitmapCluster::Zeroes => IoBuf::zeroed(cluster_size as usize),
                BitmapCluster::Ones => IoBuf::copy_of(&vec![0xff; cluster_size as usize]),
                BitmapCluster::Data(at) => {
                    let buf = IoBuf::zeroed(cluster_size as usize);
                    layer.storage().read_at(at.get(), buf).await?
                }
            };
            let mut wanted = IoBuf::copy_of(&found);
            keep_bits(&mut wanted, before.saturating_sub(first));
            wanted.iter_mut().zip(more).for_each(|(byte, more)| *byte |= more);
            keep_bits(&mut wanted, after.saturating_sub(first));
            match cluster {
                _ if wanted[..] == found[..] => {}
                // A bit past the end of the disk means nothing.
                BitmapCluster::Ones if !resized => {}
                BitmapCluster::Data(at) => {
                    let host = geometry.host_cluster_of(at);
                    let alloc = &qcow2.metadata.alloc;
                    if alloc.is_metadata(host) || alloc.refcount(host).await? != 1 {
                        let reason = format!(
                            "its cluster at {at} is not its own; run 'isobath check' on the \
                             image"
                        );
                        return Err(DiskError::Refused { image: name.to_owned(), reason });
                    }
                    update.in_place.push((at, wanted));
                }
                BitmapCluster::Zeroes | BitmapCluster::Ones => {
                    update.new.push((index, wanted));
                    update.table_changes = true;
                }
            }
        }
        if update.moves {
            let first = geometry.host_cluster_of(bitmap.table_offset).get();
            let clusters = geometry.clusters_for(stored as u64 * 8);
            update.released.extend((first..first + clusters).map(HostCluster::new));
        }
        Ok(update)
    }

    /// Writes what the update adds to the bitmap, where nothing refers to it yet or the bitmap is marked.
    async fn prepare_update<'a>(
        &self,
        qcow2: &'a Qcow2Writer<S>,
        directory: &Directory,
        mut update: Update,
    ) -> Result<PreparedUpdate<'a, S>> {
        let (layer, geometry) = (&*self.layer, qcow2.geometry());
        let Metadata { alloc, tables, .. } = &qcow2.metadata;
        let mut claim = tables.claim();
        for (entry, contents) in std::mem::take(&mut update.new) {
            let run = alloc.allocate(1).await?;
            claim.add_run(&run);
            let at = alloc.offset_of(run.start)?;
            let written = BitmapCluster::Data(at).write(&mut update.table, entry);
            always(written, layer.name(), "a table has its entries")?;
            layer.storage().write_at(at.get(), contents).await?;
        }
        for (at, contents) in std::mem::take(&mut update.in_place) {
            layer.storage().write_at(at.get(), contents).await?;
        }
        let bitmap = directory.bitmaps.get(update.place);
        let mut bitmap = always(bitmap, layer.name(), "a bitmap is in the directory")?.clone();
        if update.moves {
            let bytes = update.table.len() as u64;
            let run: Run = alloc.allocate_adjacent(geometry.clusters_for(bytes)).await?;
            claim.add_run(&run);
            bitmap.table_offset = alloc.offset_of(run.start)?;
            bitmap.table_size = (bytes / 8) as u32;
            let table = std::mem::replace(&mut update.table, IoBuf::zeroed(0));
            layer.storage().write_at(bitmap.table_offset.get(), table).await?;
            update.table_changes = false;
        }
        bitmap.flags = bitmap.flags.without(BitmapFlags::IN_USE);
        Ok(PreparedUpdate { update, bitmap, claim })
    }

    async fn update(
        &self,
        qcow2: &Qcow2Writer<S>,
        directory: &mut Directory,
        mut updates: Vec<PreparedUpdate<'_, S>>,
        readers: &Readers,
    ) -> Result<()> {
        let layer = &*self.layer;
        let Metadata { alloc, .. } = &qcow2.metadata;
        let storage = layer.storage();
        let mut bitmaps = directory.bitmaps.clone();
        let taken: Vec<_> =
            updates.iter().flat_map(|prepared| prepared.claim.clusters()).copied().collect();
        // The clusters are counted before anything refers to them.
        if !taken.is_empty() {
            self.exclusively(|| async {
                alloc.publish(&taken).await?;
                self.commit_alone(readers).await
            })
            .await?;
            for prepared in &mut updates {
                prepared.claim.set_published();
            }
        }
        let mut released = Vec::new();
        for PreparedUpdate { update, bitmap, claim } in updates {
            claim.keep();
            if update.table_changes {
                storage.write_at(bitmap.table_offset.get(), update.table).await?;
            }
            let place = bitmaps.get_mut(update.place);
            *always(place, layer.name(), "a bitmap is in the directory")? = bitmap;
            released.extend(update.released);
        }
        if !sabotage::is(Sabotage::EarlyUnmark) {
            storage.flush().await?;
        }
        if !released.is_empty() {
            // An entry of the directory may not be written as a whole: the marks go last.
            let marked = bitmaps
                .iter()
                .cloned()
                .map(|bitmap| Bitmap { flags: bitmap.flags.with(BitmapFlags::IN_USE), ..bitmap });
            directory.replace(layer, marked.collect()).await?;
        }
        directory.replace(layer, bitmaps).await?;
        for cluster in &released {
            alloc.unmark_metadata(cluster.get()..cluster.get() + 1);
        }
        alloc.release(&released).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broken::{must_violate, qcow2, writer};
    use crate::options::OpenOptions;
    use futures_executor::block_on;

    #[test]
    fn a_bitmap_that_is_updated_is_in_the_directory_and_has_its_entries() {
        let writer = writer(&OpenOptions::new());
        let qcow2 = qcow2(&writer);
        let directory = Directory { offset: 0, bitmaps: Vec::new(), size: 1 << 30 };
        let noted = Noted { place: 0, tracks: true, bits: BitmapBits::new(1 << 30, 16) };
        let planned = block_on(writer.plan_update(qcow2, &directory, &noted)).map(drop);
        must_violate(planned, "a bitmap that is marked is in the directory");
        let update = |entry| Update {
            place: 0,
            table: IoBuf::zeroed(8),
            table_changes: true,
            moves: false,
            in_place: Vec::new(),
            new: vec![(entry, IoBuf::zeroed(65536))],
            released: Vec::new(),
        };
        let prepare =
            |entry| block_on(writer.prepare_update(qcow2, &directory, update(entry))).map(drop);
        must_violate(prepare(0), "a bitmap is in the directory");
        must_violate(prepare(1), "a table has its entries");
    }
}
