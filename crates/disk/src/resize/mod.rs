//! Changing a disk's size while it is in use.
//!
//! Growing: the L1 table is replaced by a longer one if necessary; data of an earlier shrink or a larger backing file
//! in the new part is turned into zeroes; space is preallocated; and only when all that is durable does the header's
//! `size` change. Shrinking: the header's `size` changes first, then the clusters past the end are released, and the
//! file is truncated where its tail became free. A crash leaves the disk at its old size or at its new one, and at
//! worst lost space.

mod preallocate;

use crate::device::ZeroFlags;
use crate::disk::Disk;
use crate::named::has_format;
use isobath_chain::create::Preallocation;
use isobath_chain::map::Source;
use isobath_image::layer::{ImageFormat, Layer, Qcow2};
use isobath_image::sabotage::{self, Sabotage};
use isobath_image::writer::{Qcow2Writer, Writer};
use isobath_image::{DiskError, Result, invariant};
use isobath_qcow2::header::field;
use isobath_qcow2::{ClusterKind, GuestOffset, L1Entry};
use isobath_storage::{Host, IoBuf, Storage, ZeroMode};
use std::cmp::Ordering;
use std::ops::Range;

/// Guest bytes examined at once.
const WINDOW: u64 = 64 << 20;

/// The size that a disk is to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewSize {
    /// This many bytes.
    To(u64),
    /// This many bytes more than the disk has when the change begins, or less.
    By(i64),
}

impl NewSize {
    /// The new size in bytes of a disk of `old` bytes; `None` if a change would make it 0 or put it out of range.
    pub fn of(self, old: u64) -> Option<u64> {
        match self {
            Self::To(size) => Some(size),
            Self::By(change) => old.checked_add_signed(change).filter(|size| *size > 0),
        }
    }
}

impl From<u64> for NewSize {
    fn from(size: u64) -> Self {
        Self::To(size)
    }
}

impl<H: Host> Disk<H> {
    /// Changes the disk's size, durably. Of two changes at once, one begins when the other has ended. The new part
    /// reads as zeroes, except for what a raw data file already holds there, and in a LUKS image that is not
    /// [preallocated](Self::preallocation_of_zeroes): it is noise there, as in QEMU. With `shrink` the size may become
    /// smaller; data past it is deleted.
    ///
    /// Other requests may run meanwhile. Those that reach past the end of a disk that shrinks fail.
    ///
    /// # Errors
    /// If the size is 0 by a relative change, is not a multiple of 512 bytes or exceeds what the image's tables can
    /// describe; if it is smaller and `shrink` is not set or preallocation is requested; if the image is of version 2
    /// and has internal snapshots, or has an inconsistent persistent bitmap; or the storage fails. After a failure of
    /// the storage the disk may accept no more writes.
    pub async fn resize(
        &self,
        size: impl Into<NewSize>,
        preallocation: Preallocation,
        shrink: bool,
    ) -> Result<()> {
        let writer = self.writer()?;
        let _stop = self.stop_on_panic();
        let _alone = writer.resizing.lock().await;
        let old = self.size();
        let Some(size) = size.into().of(old) else {
            return Err(self.refused(format!(
                "its size is {old} bytes: the new size must be positive and less than 2^64"
            )));
        };
        if size < old && !shrink {
            return Err(self.refused(format!(
                "its size is {old} bytes; shrinking it to {size} deletes all data past the new \
                 end; use --shrink to allow it"
            )));
        }
        if size < old && preallocation != Preallocation::Off {
            return Err(self.refused("preallocation can only be used for growing images"));
        }
        match (writer.qcow2(), self.active_qcow2()) {
            (Some(qcow2), Some(image)) => {
                self.check_resize(image, size)?;
                if size < old {
                    // Whether its place may be written to shows before anything changes.
                    let end = Box::pin(self.end_within_cluster(qcow2, size)).await;
                    self.or_mark_corrupt(end).await?;
                }
                if size != old {
                    self.or_mark_corrupt(qcow2.begin_resize_bitmaps().await).await?;
                }
                let change = async {
                    match size.cmp(&old) {
                        Ordering::Less => Box::pin(self.shrink(writer, qcow2, image, size)).await,
                        Ordering::Equal => Ok(()),
                        Ordering::Greater => {
                            self.extend(writer, qcow2, image, old..size, preallocation).await
                        }
                    }
                };
                let changed = Box::pin(writer.without_journal(&self.readers, change)).await;
                self.or_mark_corrupt(changed).await?;
                qcow2.resize_bitmaps(size);
            }
            _ => self.resize_raw(writer, old, size, preallocation).await?,
        }
        if size != old {
            self.or_mark_corrupt(self.check_resized(size)).await?;
        }
        self.refit_map();
        self.resized.notify(usize::MAX);
        Ok(())
    }

    /// Checks that the disk has become `size` bytes long, rounded to whole sectors.
    fn check_resized(&self, size: u64) -> Result<()> {
        let (layer, name) = (self.chain.active(), self.name());
        let is = Some(layer.size()) == size.checked_next_multiple_of(512);
        invariant(is, name, "a disk has the size that it was given")?;
        let shown = layer.visible() == layer.size();
        invariant(shown, name, "the active layer shows all of the disk")?;
        let Some(image) = layer.as_qcow2() else { return Ok(()) };
        let header = image.header.read();
        invariant(header.size == size, name, "the header has the disk's new size")?;
        let entries = image.l1.read().len() as u64;
        let covers = entries >= image.geometry.l1_size_for(size);
        invariant(covers, name, "the L1 table covers the disk")?;
        let counts = u64::from(header.l1_size) == entries;
        invariant(counts, name, "the header counts the entries of the L1 table")
    }

    /// Checks whether the image can be resized at all, and to this size.
    fn check_resize(&self, image: &Qcow2, size: u64) -> Result<()> {
        let header = image.header.read();
        if !size.is_multiple_of(512) {
            return Err(self.refused(format!("the new size {size} is not a multiple of 512")));
        }
        let most = image.geometry.max_disk_size();
        if size > most {
            return Err(self.refused(format!(
                "the new size {size} is too large for clusters of {} bytes, which allow {most}",
                image.geometry.cluster_size()
            )));
        }
        if header.version < 3 && header.nb_snapshots > 0 {
            return Err(self.refused(
                "a version 2 image with internal snapshots cannot be resized; delete them, or \
                 upgrade it with 'qemu-img amend -o compat=1.1'",
            ));
        }
        Ok(())
    }

    /// Sets how much of each layer is visible.
    fn show(&self, size: u64) {
        let mut visible = size;
        for (index, layer) in self.chain.top_down() {
            if index != self.active_index() {
                visible = visible.min(layer.size());
            }
            layer.set_visible(visible);
        }
        self.map.clear();
    }

    async fn extend(
        &self,
        writer: &Writer<H::File>,
        qcow2: &Qcow2Writer<H::File>,
        image: &Qcow2,
        new: Range<u64>,
        preallocation: Preallocation,
    ) -> Result<()> {
        writer.grow_l1(&self.readers, image.geometry.l1_size_for(new.end)).await?;
        let layer = self.chain.active();
        let mut kept = 0;
        if image.geometry.has_data_file() {
            let length = layer.data().len().await?;
            if length < new.end {
                layer.data().set_len(new.end).await?;
            }
            // The guest sees a raw data file's contents, even past the old end.
            kept = if qcow2.data_file_raw() { length } else { 0 };
        }
        // Requests are still limited to the old size, but the new part can be examined.
        self.show(new.end);
        let prepared = async {
            if !qcow2.data_file_raw() && !sabotage::is(Sabotage::UnclearedGrowth) {
                self.clear_new_part(image, new.clone()).await?;
            }
            let preallocation = match preallocation {
                // A raw data file must be complete without the image's tables.
                Preallocation::Off if qcow2.data_file_raw() => Preallocation::Metadata,
                other => other,
            };
            if preallocation != Preallocation::Off {
                self.preallocate(writer, qcow2, new.clone(), preallocation, kept).await?;
            }
            writer.commit(&self.readers).await
        };
        if let Err(error) = prepared.await {
            self.show(new.start);
            return Err(error);
        }
        writer.exclusively(|| write_size(layer, image, new.end)).await?;
        layer.set_size(new.end);
        Ok(())
    }

    /// Zeroes whatever is not zero in the new part: data that the active layer kept from before it was shrunk, and data
    /// of the backing file that the smaller size hid.
    async fn clear_new_part(&self, image: &Qcow2, new: Range<u64>) -> Result<()> {
        if self.is_above_others() {
            return self.hide_below(new).await;
        }
        let below = self.chain.top_down().nth(1).map_or(0, |(_, layer)| layer.size());
        self.clear(new.start..new.end.min(below)).await?;
        let span = image.geometry.l1_entry_span();
        let tables: Vec<u64> = {
            let l1 = image.l1.read();
            let first = new.start / span;
            // The table that contains the old end may be only in the open batch.
            (first..new.end.div_ceil(span))
                .take(l1.len().saturating_sub(first as usize))
                .filter(|index| {
                    let entry = l1.get(*index as usize);
                    *index == first || entry.is_some_and(|e| e != L1Entry::unallocated())
                })
                .collect()
        };
        for index in tables {
            let start = (index * span).max(new.start);
            self.clear(start..(index * span).saturating_add(span).min(new.end)).await?;
        }
        Ok(())
    }

    /// Whether a layer's header names a backing file, or a format of it, other than what is open below it: what others
    /// find there is not known.
    fn is_above_others(&self) -> bool {
        let mut layers = self.chain.top_down().map(|(_, layer)| layer).peekable();
        while let Some(layer) = layers.next() {
            let named = layer.header().is_some_and(|header| header.backing_file.is_some());
            let is_named = layers.peek().is_some_and(|below| {
                self.host.kept(layer.name()).is_some()
                    || self.host.kept(below.name()).is_some()
                    || (self.leads_to(layer, below) && has_format(layer, below))
            });
            if named && !is_named {
                return true;
            }
        }
        false
    }

    /// Makes a range read as zeroes in the active layer, whatever is below.
    async fn hide_below(&self, range: Range<u64>) -> Result<()> {
        let old = self.active_qcow2().is_some_and(|image| image.geometry.version() < 3);
        if old {
            return Err(self.refused(
                "its header names another backing file than the one that is open, which a version 2 image could not \
                 hide in the new part; upgrade it with 'isobath amend -o compat=1.1'",
            ));
        }
        let flags = ZeroFlags { may_unmap: true, only_fast: false };
        let mut at = range.start;
        while at < range.end {
            let next = range.end.min(at - at % WINDOW + WINDOW);
            self.zero_range(at, next - at, flags).await?;
            at = next;
        }
        Ok(())
    }

    async fn clear(&self, range: Range<u64>) -> Result<()> {
        let flags = ZeroFlags { may_unmap: true, only_fast: false };
        let mut at = range.start;
        while at < range.end {
            let next = range.end.min(at - at % WINDOW + WINDOW);
            let extents = {
                let _pass = self.readers.epoch.enter();
                self.extents(at..next).await?
            };
            for extent in extents {
                if !matches!(extent.source, Source::Absent | Source::Zero(_)) {
                    self.zero_range(extent.guest, extent.length, flags).await?;
                }
            }
            at = next;
        }
        Ok(())
    }

    async fn shrink(
        &self,
        writer: &Writer<H::File>,
        qcow2: &Qcow2Writer<H::File>,
        image: &Qcow2,
        size: u64,
    ) -> Result<()> {
        let layer = self.chain.active();
        writer
            .exclusively(|| async {
                layer.set_size(size);
                self.show(size);
                // From here on no request changes anything past the new end.
                self.readers.drain().await;
                writer.commit_alone(&self.readers).await?;
                write_size(layer, image, size).await?;
                writer.drop_past(&self.readers, size).await?;
                writer.commit_alone(&self.readers).await?;
                // This writes the refcounts of the released clusters.
                writer.commit_alone(&self.readers).await?;
                if image.geometry.has_data_file() {
                    layer.data().set_len(size).await?;
                    layer.data().flush().await?;
                }
                writer.cut_tail().await
            })
            .await?;
        self.clear_last_cluster(writer, qcow2, size).await
    }

    /// Zeroes the rest of the cluster in which the disk ends: a program that grows the disk later may expose it.
    async fn clear_last_cluster(
        &self,
        writer: &Writer<H::File>,
        qcow2: &Qcow2Writer<H::File>,
        end: u64,
    ) -> Result<()> {
        let size = qcow2.geometry().cluster_size();
        let start = end / size * size;
        let _range = writer.ranges.lock(start..start + size).await;
        let _pass = self.readers.epoch.enter();
        let rest = Box::pin(self.end_within_cluster(qcow2, end)).await?;
        let Some(rest) = rest else { return Ok(()) };
        let length = rest.end - rest.start;
        let data = qcow2.metadata.guest_io();
        if !data.is_stored_plain(&rest) || self.chain.active().is_encrypted() {
            data.write(rest.start, IoBuf::zeroed(length as usize)).await?;
            return Ok(());
        }
        let mode = ZeroMode { may_unmap: true, only_fast: false };
        let storage = self.chain.active().storage();
        Ok(storage.write_zeroes(rest.start, length, mode).await?)
    }

    /// The rest of the cluster in which the disk is to end at `end`: its place in the image's file, if that is the
    /// image's own.
    async fn end_within_cluster(
        &self,
        qcow2: &Qcow2Writer<H::File>,
        end: u64,
    ) -> Result<Option<Range<u64>>> {
        let geometry = qcow2.geometry();
        let size = geometry.cluster_size();
        let within = end % size;
        if within == 0 || geometry.has_data_file() {
            return Ok(None);
        }
        let cluster = geometry.cluster_of(GuestOffset::new(end));
        let entry = qcow2.entry(cluster).await?;
        let Ok(
            ClusterKind::Data { offset: host, copied: true }
            | ClusterKind::Subclusters { offset: Some(host), copied: true, .. },
        ) = entry.kind(&geometry)
        else {
            return Ok(None);
        };
        qcow2.check_place(end - within, host)?;
        Ok(Some(host.get() + within..host.get() + size))
    }

    async fn resize_raw(
        &self,
        writer: &Writer<H::File>,
        old: u64,
        size: u64,
        preallocation: Preallocation,
    ) -> Result<()> {
        let layer = self.chain.active();
        let storage = layer.storage();
        if preallocation == Preallocation::Metadata {
            return Err(DiskError::Unsupported(
                "Unsupported preallocation mode: metadata; an image without tables has none".into(),
            ));
        }
        let whole = size
            .checked_next_multiple_of(512)
            .ok_or_else(|| self.refused(format!("the new size {size} is too large")))?;
        // What a short image ends with, or is filled up with, counts too.
        let _start = self.keep_detected_raw(writer, size.min(old)..size.max(old), None).await?;
        writer
            .exclusively(|| async {
                if size < old {
                    layer.set_size(whole);
                    self.show(whole);
                    self.readers.drain().await;
                }
                // What is added to an encrypted file is noise: if zeroes are wanted, they are written from its end on,
                // so that there is never anything else.
                let added = size > old && preallocation != Preallocation::Off;
                let at_end = added && layer.format() == ImageFormat::Luks;
                if !at_end {
                    storage.set_len(size).await?;
                }
                if added {
                    preallocate::fill(&**storage, old..size, preallocation).await?;
                }
                if at_end {
                    storage.set_len(size).await?;
                }
                storage.flush().await?;
                if size >= old {
                    self.show(whole);
                    layer.set_size(whole);
                }
                Ok(())
            })
            .await
    }
}

/// Changes the header's `size`, durably.
async fn write_size<S: Storage>(layer: &Layer<S>, image: &Qcow2, size: u64) -> Result<()> {
    let storage = layer.storage();
    storage.write_at(field::SIZE as u64, IoBuf::copy_of(&size.to_be_bytes())).await?;
    storage.flush().await?;
    image.header.write().size = size;
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::testing::{CLUSTER, SIZE, disk, must_violate, writers};
    use futures_executor::block_on;

    #[test]
    fn a_disk_is_as_long_everywhere() {
        let disk = disk();
        let (layer, image) = (disk.chain.active(), disk.active_qcow2().unwrap());
        let check = || disk.check_resized(SIZE);
        check().unwrap();
        image.header.write().l1_size += 1;
        must_violate(check(), "the header counts the entries of the L1 table");
        image.l1.write().clear();
        must_violate(check(), "the L1 table covers the disk");
        image.header.write().size -= 512;
        must_violate(check(), "the header has the disk's new size");
        layer.set_visible(SIZE - 512);
        must_violate(check(), "the active layer shows all of the disk");
        layer.set_size(SIZE - 512);
        must_violate(check(), "a disk has the size that it was given");
    }

    #[test]
    fn nothing_is_dropped_before_the_disk_ends() {
        let disk = disk();
        let (writer, _) = writers(&disk);
        let image = disk.active_qcow2().unwrap();
        let drop_past = |size| block_on(Box::pin(writer.drop_past(&disk.readers, size)));
        let ends = "a disk ends before what is past its end is dropped";
        must_violate(drop_past(SIZE - CLUSTER), ends);
        image.header.write().size = SIZE - CLUSTER;
        must_violate(drop_past(SIZE - CLUSTER), ends);
        disk.chain.active().set_visible(SIZE - CLUSTER);
        drop_past(SIZE - CLUSTER).unwrap();
    }
}
