//! The image under examination.

use super::budget::Budget;
use crate::layer::ImageFormat;
use crate::probe::format_of;
use crate::recovery::{Purpose, Recovered, recover};
use crate::replayed::Replayed;
use crate::{DiskError, Result, always, invariant};
use isobath_qcow2::header::{ParseMode, field};
use isobath_qcow2::{AutoclearFeatures, Geometry, Header, IncompatibleFeatures};
use isobath_storage::{IoBuf, Storage};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Most host clusters that are counted (QEMU's limit).
pub(crate) const MAX_CLUSTERS: u64 = i32::MAX as u64;

/// Bytes at the start of the header, which hold its fields. They are written in one piece.
const SECTOR: usize = 512;

/// An image whose header can be used.
pub(crate) struct Image<S> {
    pub(crate) storage: Arc<S>,
    pub(crate) name: PathBuf,
    pub(crate) header: Header,
    pub(crate) geometry: Geometry,
    /// The file's length in bytes.
    pub(crate) length: u64,
    /// What a journal that is in use puts over what is read.
    view: Option<Replayed>,
    /// What an examination may take.
    pub(crate) budget: Budget,
}

impl<S: Storage> Image<S> {
    /// Opens the image; what a crash has left of it is [recovered](recover) first. What only a restart log has was
    /// brought in before.
    pub(crate) async fn open(
        storage: &Arc<S>,
        name: &Path,
        format: Option<ImageFormat>,
        purpose: Purpose,
    ) -> Result<Self> {
        let mut length = storage.len().await?;
        let start = storage.read_at(0, IoBuf::zeroed(4096)).await?;
        if format_of(name, format, &start)? != ImageFormat::Qcow2 {
            return Err(DiskError::Unsupported("This image format does not support checks".into()));
        }
        let error = |source| DiskError::Format { image: name.to_owned(), source };
        let head = Header::probe_length(&start).map_err(error)?.min(length as usize);
        let mut bytes = storage.read_at(0, IoBuf::zeroed(head)).await?;
        let mut header = Header::parse_for(&bytes, ParseMode::Check).map_err(error)?;
        let Recovered { view, restart_log, .. } =
            recover(&**storage, name, &header, purpose).await?;
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
        let image =
            Self { storage, name, header, geometry, length, view, budget: Budget::default() };
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

    /// The file's clusters, with the last if it is cut short.
    pub(crate) fn clusters(&self) -> u64 {
        self.geometry.clusters_for(self.length)
    }

    pub(crate) fn refused(&self, reason: String) -> DiskError {
        DiskError::Refused { image: self.name.clone(), reason }
    }

    /// Reads bytes; what lies past the end of the file reads as zeroes.
    pub(crate) async fn read(&self, offset: u64, length: usize) -> Result<IoBuf> {
        let mut bytes = self.storage.read_at(offset, IoBuf::zeroed(length)).await?;
        if let Some(view) = &self.view {
            view.put_over(offset, &mut bytes);
        }
        Ok(bytes)
    }

    /// Reads at most `length` bytes: what the file has of them.
    pub(crate) async fn read_existing(&self, offset: u64, length: u64) -> Result<IoBuf> {
        let there = self.length.saturating_sub(offset).min(length);
        self.budget.read(there)?;
        self.read(offset, there as usize).await
    }

    pub(crate) async fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let settled = self.budget.is_settled();
        invariant(settled, &self.name, "a repair within bounds writes once it is known to be")?;
        self.storage.write_at(offset, IoBuf::copy_of(bytes)).await?;
        Ok(())
    }

    /// Writes fields of the header, all in one piece and durably: byte offsets and bytes.
    pub(crate) async fn write_fields(
        &self,
        fields: impl IntoIterator<Item = (usize, Vec<u8>)>,
    ) -> Result<()> {
        let mut sector = self.read(0, SECTOR).await?.to_vec();
        for (at, bytes) in fields {
            let place = sector.get_mut(at..at + bytes.len());
            always(place, &self.name, "a header has its fields in its first sector")?
                .copy_from_slice(&bytes);
        }
        self.write(0, &sector).await?;
        self.flush().await
    }

    pub(crate) async fn flush(&self) -> Result<()> {
        Ok(self.storage.flush().await?)
    }

    /// The same file, open for writing, as an image with another header.
    pub(crate) fn with_header(&self, header: Header) -> Self {
        Self {
            storage: Arc::clone(&self.storage),
            name: self.name.clone(),
            header,
            geometry: self.geometry,
            length: self.length,
            // Only what is opened to be viewed has one.
            view: None,
            budget: Budget::default(),
        }
    }

    /// Sets a bit of the incompatible features, durably, where the version has any.
    pub(crate) async fn set_incompatible(&mut self, bit: IncompatibleFeatures) -> Result<()> {
        let bits = self.header.incompatible.with(bit);
        if self.header.version >= 3 && bits != self.header.incompatible {
            self.write(field::INCOMPATIBLE_FEATURES as u64, &bits.bits().to_be_bytes()).await?;
            self.flush().await?;
            self.header.incompatible = bits;
        }
        Ok(())
    }

    /// Clears bits of the incompatible features, durably, after what was written before.
    pub(crate) async fn clear_incompatible(&mut self, bits: IncompatibleFeatures) -> Result<()> {
        let kept = self.header.incompatible.without(bits);
        if kept != self.header.incompatible {
            self.flush().await?;
            self.write(field::INCOMPATIBLE_FEATURES as u64, &kept.bits().to_be_bytes()).await?;
            self.flush().await?;
            self.header.incompatible = kept;
        }
        Ok(())
    }

    /// Says that what unknown autoclear features describe may no longer be true.
    pub(crate) async fn clear_unknown_autoclear(&mut self) -> Result<()> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broken::{NAME, layer, must_violate, qcow2, writer};
    use crate::durability::MetadataMode;
    use crate::options::OpenOptions;
    use crate::readers::Readers;
    use crate::restart_log::LogUse;
    use crate::tables::References;
    use futures_executor::block_on;
    use isobath_qcow2::{ClusterIndex, L2Entry};

    #[test]
    fn the_fields_of_a_header_are_in_its_first_sector() {
        let layer = layer();
        let storage = Arc::clone(layer.storage());
        let opened = Image::open(&storage, Path::new(NAME), None, Purpose::Examine);
        let image = block_on(Box::pin(opened)).unwrap();
        let write = |at| block_on(image.write_fields([(at, vec![0; 8])]));
        write(SECTOR - 8).unwrap();
        must_violate(write(SECTOR - 7), "a header has its fields in its first sector");
    }

    #[test]
    fn nothing_is_written_before_a_repair_is_known_to_be_within_its_bounds() {
        let layer = layer();
        let storage = Arc::clone(layer.storage());
        block_on(async {
            let opened = Image::open(&storage, Path::new(NAME), None, Purpose::Examine);
            let mut image = Box::pin(opened).await.unwrap();
            image.budget = Budget::of_file(&*storage, Path::new(NAME), None).await.unwrap();
            let end = image.length;
            let early = image.write(end, &[0; 512]).await;
            must_violate(early, "a repair within bounds writes once it is known to be");
            image.budget.settle();
            image.write(end, &[0; 512]).await.unwrap();
        });
    }

    #[test]
    fn a_check_does_not_see_a_restart_log() {
        let options = OpenOptions::new().metadata(MetadataMode::Journal).restart_log(true);
        let writer = writer(&options);
        let metadata = &qcow2(&writer).metadata;
        block_on(async {
            metadata.tables.ensure_table(0, &metadata.alloc).await.unwrap();
            let references = References::to_nothing_new(&[]);
            let cluster = ClusterIndex::new(0);
            metadata.tables.record(cluster, L2Entry::zero_plain(), references).unwrap();
            Box::pin(writer.commit(&Readers::default())).await.unwrap();
        });
        let storage = Arc::clone(metadata.layer.storage());
        let open = |purpose| {
            let opened = Image::open(&storage, Path::new(NAME), None, purpose);
            block_on(Box::pin(opened)).map(drop)
        };
        open(Purpose::Examine).unwrap();
        let viewed = open(Purpose::View(LogUse::Glance));
        must_violate(viewed, "a restart log is brought in before a check");
    }
}
