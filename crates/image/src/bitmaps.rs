//! Persistent bitmaps of an image that nobody uses: added, removed, cleared, switched on and off, merged. Whatever is
//! done becomes durable in one change.

use crate::bitmap_bits::inconsistent;
use crate::change::Change;
use crate::open::{Opening, open_layer};
use crate::options::OpenOptions;
use crate::{DiskError, Result, violated};
use isobath_qcow2::bitmap::{DIRTY_TRACKING, MAX_BITMAP_BYTES, MAX_BITMAPS, MAX_NAME_BYTES};
use isobath_qcow2::{
    AutoclearFeatures, Bitmap, BitmapCluster, BitmapFlags, BitmapsExtension, FormatError, Geometry,
    Header, HostOffset,
};
use isobath_storage::{Host, IoBuf, Storage};
use std::path::Path;

pub use crate::bitmap_bits::BitmapBits;

/// The least and the greatest granularity, in bytes.
const GRANULARITIES: std::ops::RangeInclusive<u64> = 512..=1 << 31;

/// What is done to one bitmap.
#[derive(Clone, Debug)]
pub enum BitmapAction {
    /// Adds it, empty and enabled. The granularity is in bytes, a power of two, 512 to 2^31; `None` is the cluster
    /// size, 4 KiB to 64 KiB.
    Add(Option<u64>),
    /// Removes it; the only thing to do with one that is inconsistent.
    Remove,
    /// Clears every bit.
    Clear,
    /// Enables it: writers record their writes in it.
    Enable,
    /// Disables it.
    Disable,
    /// Sets the bits of another bitmap of the image, too.
    Merge(String),
    /// Sets the bits of a bitmap of another image, too.
    MergeFrom(BitmapBits),
}

/// A bitmap whose bits are loaded once they are needed.
struct Edited {
    bitmap: Bitmap,
    /// Its bits, if they are not those in the file.
    changed: Option<BitmapBits>,
}

/// The bitmaps of an image while they are edited.
pub struct BitmapEditor<S: Storage> {
    change: Change<S>,
    bitmaps: Vec<Edited>,
}

impl<S: Storage> BitmapEditor<S> {
    /// Opens an image for changes of its bitmaps.
    ///
    /// # Errors
    /// If the image cannot be used, or its format has no bitmaps.
    pub async fn open<H: Host<File = S>>(
        host: &H,
        name: &Path,
        options: &OpenOptions,
    ) -> Result<Self> {
        let change = Change::begin(host, name, options, "bitmaps").await?;
        let directory = read_directory(&**change.layer.storage(), name, &change.header).await?;
        let bitmaps = directory.into_iter().map(|bitmap| Edited { bitmap, changed: None });
        Ok(Self { bitmaps: bitmaps.collect(), change })
    }

    /// Does one thing to the bitmap `name`; [`finish`](Self::finish) makes it durable.
    ///
    /// # Errors
    /// [`DiskError::Refused`] if there is no such bitmap, or already one, or it cannot be used like this; or if the
    /// storage fails.
    pub async fn apply(&mut self, name: &str, action: &BitmapAction) -> Result<()> {
        if let BitmapAction::Add(granularity) = action {
            return self.add(name, *granularity);
        }
        let place = self.find(name)?;
        if matches!(action, BitmapAction::Remove) {
            self.bitmaps.remove(place);
            return Ok(());
        }
        self.require_consistent(place)?;
        let merged = match action {
            BitmapAction::Merge(source) => {
                let source = self.find(source)?;
                self.require_consistent(source)?;
                Some(self.bits(source).await?)
            }
            BitmapAction::MergeFrom(bits) => Some(bits.clone()),
            _ => None,
        };
        if let Some(source) = merged {
            let mut bits = self.bits(place).await?;
            bits.merge(&source).map_err(|reason| self.change.refused(reason))?;
            self.edit(place, |edited| edited.changed = Some(bits));
            return Ok(());
        }
        let size = self.change.header.disk_size();
        self.edit(place, |edited| {
            let flags = edited.bitmap.flags;
            match action {
                BitmapAction::Clear => {
                    let granularity = edited.bitmap.granularity_bits;
                    edited.changed = Some(BitmapBits::new(size, granularity));
                }
                BitmapAction::Enable => edited.bitmap.flags = flags.with(BitmapFlags::AUTO),
                BitmapAction::Disable => edited.bitmap.flags = flags.without(BitmapFlags::AUTO),
                _ => {}
            }
        });
        Ok(())
    }

    fn edit(&mut self, place: usize, edit: impl FnOnce(&mut Edited)) {
        match self.bitmaps.get_mut(place) {
            Some(edited) => edit(edited),
            None => violated("a bitmap that was found is there"),
        }
    }

    fn add(&mut self, name: &str, granularity: Option<u64>) -> Result<()> {
        let geometry = self.change.geometry();
        let default = geometry.cluster_size().clamp(4 << 10, 64 << 10);
        let granularity = granularity.unwrap_or(default);
        let size = self.change.header.disk_size();
        let refused = |reason: String| Err(self.change.refused(reason));
        if name.is_empty() {
            return refused("Bitmap name cannot be empty".into());
        }
        if name.len() > MAX_NAME_BYTES {
            return refused(format!("Bitmap name is longer than {MAX_NAME_BYTES} bytes"));
        }
        if self.bitmaps.iter().any(|edited| edited.bitmap.name == name.as_bytes()) {
            return refused(format!("Bitmap already exists: {name}"));
        }
        if !granularity.is_power_of_two() || granularity < *GRANULARITIES.start() {
            return refused("Granularity must be power of 2 and at least 512".into());
        }
        if granularity > *GRANULARITIES.end() {
            return refused("Granularity exceeds maximum (2147483648 bytes)".into());
        }
        if self.change.header.version < 3 {
            return refused(
                "Cannot store dirty bitmaps in qcow2 v2 files; upgrade the image with 'isobath \
                 amend -o compat=1.1'"
                    .into(),
            );
        }
        if self.bitmaps.len() >= MAX_BITMAPS as usize {
            return refused("Maximum number of persistent bitmaps is already reached".into());
        }
        if size.div_ceil(granularity).div_ceil(8) > MAX_BITMAP_BYTES {
            return refused(
                "Too much space will be occupied by the bitmap. Use larger granularity".into(),
            );
        }
        let bitmap = Bitmap {
            table_offset: HostOffset::new(0),
            table_size: 0,
            flags: BitmapFlags::AUTO,
            kind: DIRTY_TRACKING,
            granularity_bits: granularity.trailing_zeros() as u8,
            extra_data: Vec::new(),
            name: name.into(),
        };
        let changed = Some(BitmapBits::new(size, bitmap.granularity_bits));
        self.bitmaps.push(Edited { bitmap, changed });
        Ok(())
    }

    fn find(&self, name: &str) -> Result<usize> {
        let place = self.bitmaps.iter().position(|one| one.bitmap.name == name.as_bytes());
        place.ok_or_else(|| self.change.refused(format!("Dirty bitmap '{name}' not found")))
    }

    fn require_consistent(&self, place: usize) -> Result<()> {
        let bitmap = self.bitmaps.get(place).map(|edited| &edited.bitmap);
        match bitmap.filter(|bitmap| bitmap.flags.contains(BitmapFlags::IN_USE)) {
            None => Ok(()),
            Some(bitmap) => Err(self.change.refused(inconsistent(bitmap))),
        }
    }

    /// The bits of a bitmap as they are now.
    async fn bits(&self, place: usize) -> Result<BitmapBits> {
        let edited = crate::always(
            self.bitmaps.get(place),
            self.change.layer.name(),
            "a bitmap that was found is there",
        )?;
        if let Some(bits) = &edited.changed {
            return Ok(bits.clone());
        }
        let layer = &self.change.layer;
        read_bits(&**layer.storage(), layer.name(), &self.change.header, &edited.bitmap).await
    }

    /// Makes everything durable.
    ///
    /// # Errors
    /// If the image has errors or the storage fails. The image is then as before.
    pub async fn finish(mut self) -> Result<()> {
        let header = self.store_all().await;
        self.change.switch(header).await
    }

    /// Writes all that is changed; returns the header that refers to it.
    async fn store_all(&mut self) -> Result<Header> {
        let geometry = self.change.geometry();
        let mut bitmaps = Vec::new();
        for edited in std::mem::take(&mut self.bitmaps) {
            let mut bitmap = edited.bitmap;
            if let Some(bits) = edited.changed {
                (bitmap.table_offset, bitmap.table_size) = self.store(&geometry, &bits).await?;
            }
            bitmaps.push(bitmap);
        }
        let mut header = self.change.header.clone();
        let mut extension = None;
        if !bitmaps.is_empty() {
            let directory = Bitmap::encode_directory(&bitmaps);
            let directory = directory.map_err(|error| self.change.layer.format_error(error))?;
            let directory_offset = self.change.take(directory.len() as u64).await?;
            self.change.write(directory_offset, IoBuf::copy_of(&directory)).await?;
            extension = Some(BitmapsExtension {
                count: bitmaps.len() as u32,
                directory_size: directory.len() as u64,
                directory_offset,
                reserved: 0,
            });
        }
        header.set_bitmaps(extension);
        Ok(header)
    }

    /// Writes bits into clusters of their own; returns where their table is, and its entries.
    async fn store(&mut self, geometry: &Geometry, bits: &BitmapBits) -> Result<(HostOffset, u32)> {
        let cluster_size = geometry.cluster_size() as usize;
        let chunks = bits.bytes().chunks(cluster_size);
        let entries = chunks.len().max(1);
        let mut table = IoBuf::zeroed(entries * 8);
        for (index, chunk) in chunks.enumerate() {
            let cluster = if chunk.iter().all(|byte| *byte == 0) {
                BitmapCluster::Zeroes
            } else {
                let at = self.change.take(cluster_size as u64).await?;
                self.change.write(at, IoBuf::copy_of(chunk)).await?;
                BitmapCluster::Data(at)
            };
            let name = self.change.layer.name();
            crate::always(cluster.write(&mut table, index), name, "a table has its entries")?;
        }
        let at = self.change.take(table.len() as u64).await?;
        self.change.write(at, table).await?;
        Ok((at, entries as u32))
    }
}

/// The bits of the bitmap `bitmap` of an image.
///
/// # Errors
/// If the image cannot be read, has no such bitmap, or it is inconsistent.
pub async fn read_bitmap<H: Host>(
    host: &H,
    name: &Path,
    options: &OpenOptions,
    bitmap: &str,
) -> Result<BitmapBits> {
    let options = options.clone().writable(false).backing(false);
    let layer = open_layer(host, name, Opening::of(&options)).await?;
    let refused = |reason: String| Err(DiskError::Refused { image: name.to_owned(), reason });
    let absent = || refused(format!("Dirty bitmap '{bitmap}' not found"));
    let Some(header) = layer.header() else { return absent() };
    let directory = read_directory(&**layer.storage(), name, &header).await?;
    let Some(found) = directory.iter().find(|one| one.name == bitmap.as_bytes()) else {
        return absent();
    };
    if found.flags.contains(BitmapFlags::IN_USE) {
        return refused(inconsistent(found));
    }
    read_bits(&**layer.storage(), name, &header, found).await
}

/// The directory of an image's bitmaps; without the feature bit it has none.
async fn read_directory<S: Storage>(
    storage: &S,
    name: &Path,
    header: &Header,
) -> Result<Vec<Bitmap>> {
    let error = |source: FormatError| DiskError::Format { image: name.to_owned(), source };
    let consistent = header.autoclear.contains(AutoclearFeatures::BITMAPS);
    let Some(extension) = header.bitmaps().filter(|_| consistent) else { return Ok(Vec::new()) };
    let geometry = header.geometry().map_err(error)?;
    extension.validate(&geometry).map_err(error)?;
    let bytes = IoBuf::zeroed(extension.directory_size as usize);
    let bytes = storage.read_at(extension.directory_offset.get(), bytes).await?;
    let bitmaps = Bitmap::parse_directory(&bytes, extension.count).map_err(error)?;
    for bitmap in &bitmaps {
        bitmap.validate(&geometry, header.disk_size()).map_err(error)?;
    }
    Ok(bitmaps)
}

/// The bits of a valid bitmap that is not in use.
async fn read_bits<S: Storage>(
    storage: &S,
    name: &Path,
    header: &Header,
    bitmap: &Bitmap,
) -> Result<BitmapBits> {
    let error = |source: FormatError| DiskError::Format { image: name.to_owned(), source };
    let geometry = header.geometry().map_err(error)?;
    let mut bits = BitmapBits::new(header.disk_size(), bitmap.granularity_bits);
    let table = IoBuf::zeroed(bitmap.table_size as usize * 8);
    let table = storage.read_at(bitmap.table_offset.get(), table).await?;
    let cluster_size = geometry.cluster_size() as usize;
    for (index, chunk) in bits.bytes_mut().chunks_mut(cluster_size).enumerate() {
        match BitmapCluster::read(&table, index, &geometry).transpose().map_err(error)? {
            None | Some(BitmapCluster::Zeroes) => {}
            Some(BitmapCluster::Ones) => chunk.fill(0xff),
            Some(BitmapCluster::Data(at)) => {
                let data = storage.read_at(at.get(), IoBuf::zeroed(chunk.len())).await?;
                chunk.copy_from_slice(&data);
            }
        }
    }
    Ok(bits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broken::{NAME, host, must_panic, must_violate};
    use futures_executor::block_on;

    #[test]
    fn a_bitmap_that_is_edited_was_found() {
        let (host, options) = (host(), OpenOptions::new());
        let opened = BitmapEditor::open(&host, Path::new(NAME), &options);
        let mut editor = block_on(Box::pin(opened)).unwrap();
        block_on(editor.apply("a", &BitmapAction::Add(None))).unwrap();
        editor.edit(0, |edited| assert!(edited.changed.is_some()));
        must_panic(|| editor.edit(1, |_| ()), "a bitmap that was found is there");
        let bits = block_on(editor.bits(1)).map(|bits| bits.size());
        must_violate(bits, "a bitmap that was found is there");
    }
}
