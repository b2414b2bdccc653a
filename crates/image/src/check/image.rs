//! The image under examination.

use crate::layer::ImageFormat;
use crate::probe::format_of;
use crate::recovery::{Purpose, Recovered, recover};
use crate::replayed::Replayed;
use crate::{DiskError, Result, invariant};
use isobath_qcow2::header::{ParseMode, field};
use isobath_qcow2::{AutoclearFeatures, Geometry, Header, IncompatibleFeatures};
use isobath_storage::{IoBuf, Storage};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The most host clusters that are counted (QEMU's limit).
pub(super) const MAX_CLUSTERS: u64 = i32::MAX as u64;

/// An image with a usable header.
pub(super) struct Image<S> {
    pub(super) storage: Arc<S>,
    pub(super) name: PathBuf,
    pub(super) header: Header,
    pub(super) geometry: Geometry,
    /// The file's length in bytes.
    pub(super) length: u64,
    /// The overlay of a journal in use, applied to everything that is read.
    view: Option<Replayed>,
}

impl<S: Storage> Image<S> {
    /// Opens the image, after [recovering](recover) it if it was not closed. The contents of a restart log were applied
    /// before.
    pub(super) async fn open(
        storage: &Arc<S>,
        name: &Path,
        format: Option<ImageFormat>,
        purpose: Purpose,
    ) -> Result<Self> {
        let mut length = storage.len().await?;
        let start = storage.read_at(0, IoBuf::zeroed(4096)).await?;
        if format_of(name, format, &start)? == ImageFormat::Raw {
            return Err(DiskError::Unsupported("This image format does not support checks".into()));
        }
        let error = |source| DiskError::Format { image: name.to_owned(), source };
        let head = Header::probe_length(&start).map_err(error)?.min(length as usize);
        let mut bytes = storage.read_at(0, IoBuf::zeroed(head)).await?;
        let mut header = Header::parse_for(&bytes, ParseMode::Check).map_err(error)?;
        let Recovered { view, restart_log } = recover(&**storage, name, &header, purpose).await?;
        invariant(restart_log.is_none(), name, "a restart log is brought in before a check")?;
        if header.incompatible.contains(IncompatibleFeatures::JOURNAL) {
            length = storage.len().await?;
            bytes = storage.read_at(0, bytes).await?;
            if let Some(view) = &view {
                view.put_over(0, &mut bytes);
                length = length.max(view.end());
            }
            header = Header::parse_for(&bytes, ParseMode::Check).map_err(error)?;
        }
        let geometry = header.geometry().map_err(error)?;
        let (storage, name) = (Arc::clone(storage), name.to_owned());
        let image = Self { storage, name, header, geometry, length, view };
        if image.clusters() > MAX_CLUSTERS {
            return Err(image.refused(format!(
                "the file has {} clusters; a check counts at most {MAX_CLUSTERS}",
                image.clusters()
            )));
        }
        let l1_end = image.header.l1_table_offset.checked_add(u64::from(image.header.l1_size) * 8);
        if l1_end.is_none_or(|end| end.get() > length) {
            return Err(image.refused(format!(
                "its L1 table (l1_table_offset {}, l1_size {}) reaches past the end of the file \
                 ({length} bytes): the file is truncated; restore it from a backup",
                image.header.l1_table_offset, image.header.l1_size
            )));
        }
        Ok(image)
    }

    /// The file's clusters, including a partial last one.
    pub(super) fn clusters(&self) -> u64 {
        self.geometry.clusters_for(self.length)
    }

    pub(super) fn refused(&self, reason: String) -> DiskError {
        DiskError::Refused { image: self.name.clone(), reason }
    }

    /// Reads bytes, with zeroes past the end of the file.
    pub(super) async fn read(&self, offset: u64, length: usize) -> Result<IoBuf> {
        let mut bytes = self.storage.read_at(offset, IoBuf::zeroed(length)).await?;
        if let Some(view) = &self.view {
            view.put_over(offset, &mut bytes);
        }
        Ok(bytes)
    }

    /// Reads at most `length` bytes, as many as the file has.
    pub(super) async fn read_existing(&self, offset: u64, length: u64) -> Result<IoBuf> {
        let there = self.length.saturating_sub(offset).min(length);
        self.read(offset, there as usize).await
    }

    pub(super) async fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.storage.write_at(offset, IoBuf::copy_of(bytes)).await?;
        Ok(())
    }

    pub(super) async fn flush(&self) -> Result<()> {
        Ok(self.storage.flush().await?)
    }

    /// Clears bits of the incompatible features, durably, after what was written before.
    pub(super) async fn clear_incompatible(&mut self, bits: IncompatibleFeatures) -> Result<()> {
        let kept = self.header.incompatible.without(bits);
        if kept != self.header.incompatible {
            self.flush().await?;
            self.write(field::INCOMPATIBLE_FEATURES as u64, &kept.bits().to_be_bytes()).await?;
            self.flush().await?;
            self.header.incompatible = kept;
        }
        Ok(())
    }

    /// Clears unknown autoclear bits: the data that they describe may no longer be valid.
    pub(super) async fn clear_unknown_autoclear(&mut self) -> Result<()> {
        let unknown = self.header.autoclear.unknown();
        if !unknown.is_empty() {
            let kept: AutoclearFeatures = self.header.autoclear.without(unknown);
            self.write(field::AUTOCLEAR_FEATURES as u64, &kept.bits().to_be_bytes()).await?;
            self.flush().await?;
            self.header.autoclear = kept;
        }
        Ok(())
    }
}
