//! Persistent bitmaps: a bitmap never claims to match a disk that has changed.
//!
//! A bitmap that tracks writes (flag `auto`) is marked *in use* before the first write. QEMU considers a bitmap with
//! this mark inconsistent. Bitmaps that do not track writes are left unchanged: they describe a moment in the past.

use super::Qcow2Writer;
use crate::layer::Layer;
use crate::sabotage::{self, Sabotage};
use crate::{DiskError, Result};
use async_lock::Mutex;
use isobath_qcow2::{AutoclearFeatures, Bitmap, BitmapFlags, Header};
use isobath_storage::{IoBuf, Storage};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

/// The bitmaps of an image open for writing.
pub(super) struct Bitmaps {
    /// Set while there are tracking bitmaps not yet marked.
    unmarked: AtomicBool,
    directory: Mutex<Option<Directory>>,
}

struct Directory {
    offset: u64,
    bitmaps: Vec<Bitmap>,
}

impl Bitmaps {
    /// Reads the bitmap directory, if the image has one that is consistent.
    pub(super) async fn open<S: Storage>(layer: &Layer<S>, header: &Header) -> Result<Self> {
        let consistent = header.autoclear.contains(AutoclearFeatures::BITMAPS);
        let Some(extension) = header.bitmaps().filter(|_| consistent) else {
            return Ok(Self { unmarked: AtomicBool::new(false), directory: Mutex::new(None) });
        };
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
        let unmarked = bitmaps.iter().any(tracks);
        let directory = Mutex::new(Some(Directory { offset, bitmaps }));
        Ok(Self { unmarked: AtomicBool::new(unmarked), directory })
    }
}

/// Whether a bitmap tracks every write and is not marked.
fn tracks(bitmap: &Bitmap) -> bool {
    bitmap.flags.contains(BitmapFlags::AUTO) && !bitmap.flags.contains(BitmapFlags::IN_USE)
}

impl<S: Storage> Qcow2Writer<S> {
    /// Called before guest data in the range changes.
    pub async fn note_write(&self, _range: Range<u64>) -> Result<()> {
        let unmarked = self.bitmaps.unmarked.load(Ordering::Acquire);
        if !unmarked || sabotage::is(Sabotage::UnmarkedBitmaps) {
            return Ok(());
        }
        let layer = &self.metadata.layer;
        let mut directory = self.bitmaps.directory.lock().await;
        let Some(directory) = &mut *directory else { return Ok(()) };
        if !self.bitmaps.unmarked.load(Ordering::Acquire) {
            return Ok(());
        }
        for bitmap in directory.bitmaps.iter_mut().filter(|bitmap| tracks(bitmap)) {
            bitmap.flags = bitmap.flags.with(BitmapFlags::IN_USE);
        }
        let bytes = Bitmap::encode_directory(&directory.bitmaps)
            .map_err(|error| DiskError::Format { image: layer.name().to_owned(), source: error })?;
        layer.storage().write_at(directory.offset, IoBuf::copy_of(&bytes)).await?;
        layer.storage().flush().await?;
        self.bitmaps.unmarked.store(false, Ordering::Release);
        Ok(())
    }
}
