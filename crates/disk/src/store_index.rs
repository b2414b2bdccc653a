//! The index of an existing image: writing, verifying, removing.
//!
//! The area is put at the end of the file, followed by a refcount block. Both are durable before the blocks are written
//! into the area, and the blocks before the header points to them. A crash leaves the previous index, or none, and at
//! worst lost space.

use crate::disk::Disk;
use isobath_chain::chain::LayerIndex;
use isobath_chain::chain_index::ChainIndex;
use isobath_chain::index::{
    Built, Folding, IndexInfo, IndexState, NoIndex, Place, WholeIndex, build, build_whole, examine,
    examine_heads, find, kept_beside, page,
};
use isobath_chain::open::unlike_its_file;
use isobath_image::index_area::clusters;
use isobath_image::layer::Qcow2;
use isobath_image::writer::{Qcow2Writer, Writer};
use isobath_image::{Result, invariant};
use isobath_qcow2::Header;
use isobath_qcow2::header::HeaderWrite;
use isobath_qcow2::index::IndexExtension;
use isobath_storage::{Host, IoBuf, Storage, StorageExt, shown};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Progress of building or verifying an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexProgress {
    /// Pages of the disk and, where an index is built, layers that are done.
    pub done: u64,
    /// How many there are.
    pub total: u64,
}

/// A part of the disk for which an index differs from the layers, or is unreadable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexMismatch {
    /// First guest byte.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// Whether a read detects this by a hash, as when the index was overwritten, and uses the layers' tables.
    pub noticed: bool,
}

type Indexable<'a, S> = (&'a Writer<S>, &'a Qcow2Writer<S>, &'a Qcow2);

impl<H: Host> Disk<H> {
    /// Writes the index of all layers below the active one into its image, replacing an existing one. The disk may be
    /// read meanwhile; writes wait.
    ///
    /// # Errors
    /// If the disk is read-only, has no backing file or is too large for an index; the header has
    /// no room; or the storage fails.
    pub async fn write_index(&self, progress: impl FnMut(IndexProgress)) -> Result<IndexInfo> {
        let (writer, ..) = self.indexable()?;
        writer.without_journal(&self.readers, self.replace_index(progress)).await
    }

    async fn replace_index(&self, mut progress: impl FnMut(IndexProgress)) -> Result<IndexInfo> {
        let (writer, qcow2, image) = self.indexable()?;
        let _alone = writer.resizing.lock().await;
        let _range = writer.ranges.lock(0..u64::MAX).await;
        writer.commit(&self.readers).await?;
        let name = image.header.read().backing_file.clone().unwrap_or_default();
        let Some(below) = self.chain.below(self.chain.depth() - 1) else {
            return Err(self.refused("it has no backing file, so there is nothing to index"));
        };
        let foreign = below.layers().find(|(_, layer)| layer.format().recorded().is_none());
        if let Some((_, layer)) = foreign {
            let (name, format) = (shown(layer.name()), layer.format().name());
            return Err(self.refused(format!(
                "its backing file '{name}' is in the format {format}; an index covers only qcow2 and raw images"
            )));
        }
        self.check_layers().await?;
        let (start, at) = qcow2.index_place().await?;
        let place = Place {
            at,
            cluster_size: image.geometry.cluster_size(),
            position: below.depth() as u32,
        };
        let report = |done, total| progress(IndexProgress { done, total });
        let built = build(&below, &name, place, Folding::Whole, report).await?;
        let built = built.map_err(|none| self.refused(reason(&none)))?;
        // Before anything is written: whether the header has room.
        self.edits(image, Some(&built.extension)).await?;
        let clusters = built.extension.area_length >> image.geometry.cluster_bits();
        let area = start.get()..start.get() + clusters;
        check_area(image, &built, &area, self.name())?;
        qcow2.check_index_area(&area).await?;
        writer.exclusively(|| self.store(qcow2, image, area, &built)).await?;
        writer.commit(&self.readers).await?;
        self.chain.set_index(find(&self.chain).await);
        let covers = below.depth() as u32;
        let unit = self.chain.index().map_or(0, |index| 1 << index.unit_bits());
        let used = built.bytes.len() as u64;
        Ok(IndexInfo {
            layers: covers,
            bytes: used,
            granularity: unit,
            undigested: built.undigested,
            state: IndexState::Valid,
        })
    }

    async fn store(
        &self,
        qcow2: &Qcow2Writer<H::File>,
        image: &Qcow2,
        area: Range<u64>,
        built: &Built,
    ) -> Result<()> {
        let old = image.header.read().index().copied();
        let released = qcow2.write_index(area, &built.bytes).await?;
        self.point_to(image, Some(&built.extension)).await?;
        qcow2.release_clusters(&released).await?;
        match old {
            Some(old) => self.free_area(qcow2, image, &old).await,
            None => Ok(()),
        }
    }

    /// Removes the index from the active image; returns whether it had one. Indexes of images above may have pointed
    /// into it, and are then no longer used.
    ///
    /// # Errors
    /// If the disk is read-only, or the storage fails.
    pub async fn drop_index(&self) -> Result<bool> {
        let (writer, qcow2, image) = self.indexable()?;
        let _alone = writer.resizing.lock().await;
        let Some(old) = image.header.read().index().copied() else { return Ok(false) };
        self.chain.set_index(None);
        let removed = writer.exclusively(|| async {
            self.point_to(image, None).await?;
            self.free_area(qcow2, image, &old).await
        });
        writer.without_journal(&self.readers, removed).await?;
        Ok(true)
    }

    /// Checks that what is known of the layers is what their files say: an index made of something else would be wrong
    /// for good.
    async fn check_layers(&self) -> Result<()> {
        let Some(layer) = unlike_its_file(&self.chain, 0).await else { return Ok(()) };
        let name = shown(layer.name());
        Err(self.refused(format!(
            "its backing file '{name}' cannot be read, or is not what an index says of it; open the disk without \
             heads, as 'isobath index' does"
        )))
    }

    /// An index of all layers, the active one included, for a file beside them; `None` if there can be none. It is made
    /// from the layers' own tables, which must not change meanwhile.
    ///
    /// # Errors
    /// The storage fails.
    pub async fn whole_index(&self) -> Result<Option<WholeIndex>> {
        build_whole(&self.chain).await
    }

    /// Compares what the active image's index says with the layers' own headers and tables, page by page, and
    /// returns where they differ. The inner `Err` is the reason why the index is not used at all, or says what it has
    /// wrong besides pages.
    ///
    /// # Errors
    /// If the image has no index, or the storage fails.
    pub async fn verify_index(
        &self,
        progress: impl FnMut(IndexProgress),
    ) -> Result<std::result::Result<Vec<IndexMismatch>, String>> {
        let image = self.active_qcow2().filter(|image| image.header.read().index().is_some());
        if image.is_none() {
            return Err(self.refused("it has no index; 'isobath index' writes one"));
        }
        self.check_layers().await?;
        let root = match examine(&self.chain).await {
            Ok(examined) => examined.root,
            Err(reason) => return Ok(Err(reason)),
        };
        if let Err(reason) = examine_heads(&self.chain, &root).await {
            return Ok(Err(reason));
        }
        let index = self.chain.indexed_by(root.clone());
        self.compare_pages(&index, root.size, progress).await.map(Ok)
    }

    /// Compares what the index that the host has beside the layers says with their own tables, page by page, and
    /// returns where they differ. `None` if there is no index in use.
    ///
    /// # Errors
    /// The storage fails.
    pub async fn verify_index_beside(
        &self,
        progress: impl FnMut(IndexProgress),
    ) -> Result<Option<Vec<IndexMismatch>>> {
        let Some(index) = kept_beside(&self.chain, self.chain.depth()) else { return Ok(None) };
        let top = index.covers().checked_sub(1).and_then(|top| u16::try_from(top).ok());
        let top = top.and_then(|top| self.chain.get(LayerIndex::new(top)));
        let size = top.map_or(0, |top| top.size());
        self.compare_pages(&index, size, progress).await.map(Some)
    }

    /// Where an index of a disk of `size` bytes differs from the tables of the layers that it describes.
    async fn compare_pages(
        &self,
        index: &Arc<ChainIndex<H::File>>,
        size: u64,
        mut progress: impl FnMut(IndexProgress),
    ) -> Result<Vec<IndexMismatch>> {
        let covers = index.covers();
        let (Some(plain), Some(indexed)) = (self.chain.below(covers), self.chain.below(covers))
        else {
            return Ok(Vec::new());
        };
        indexed.set_index(Some(Arc::clone(index)));
        let mut differ = Vec::new();
        let (length, unit_bits) = (1 << index.page_bits(), index.unit_bits());
        let total = size.div_ceil(length);
        for number in 0..total {
            let whole = index.owners(number * length).await.is_some();
            let ours = page(&indexed, unit_bits, number).await?;
            let theirs = page(&plain, unit_bits, number).await?;
            if !whole || ours != theirs {
                differ.push(IndexMismatch { offset: number * length, length, noticed: !whole });
            }
            progress(IndexProgress { done: number + 1, total });
        }
        Ok(differ)
    }

    /// The writer, its qcow2 side and the image of a disk that can hold an index.
    fn indexable(&self) -> Result<Indexable<'_, H::File>> {
        let writer = self.writer()?;
        match (writer.qcow2(), self.active_qcow2()) {
            (Some(qcow2), Some(image)) => Ok((writer, qcow2, image)),
            _ => Err(self.refused("only a qcow2 image can hold an index")),
        }
    }

    /// The writes, in order, that make the header point to an index, or to none.
    async fn edits(
        &self,
        image: &Qcow2,
        index: Option<&IndexExtension>,
    ) -> Result<Vec<HeaderWrite>> {
        let layer = self.chain.active();
        let size = image.geometry.cluster_size() as usize;
        let cluster = layer.storage().read_at(0, IoBuf::zeroed(size)).await?;
        Header::edit_index(&cluster, index).map_err(|error| layer.format_error(error))
    }

    /// Makes the header point to an index, or to none, durably.
    async fn point_to(&self, image: &Qcow2, index: Option<&IndexExtension>) -> Result<()> {
        let layer = self.chain.active();
        let storage = layer.storage();
        for (at, bytes) in self.edits(image, index).await? {
            storage.write_at(at as u64, IoBuf::copy_of(&bytes)).await?;
            storage.flush().await?;
        }
        let size = image.geometry.cluster_size() as usize;
        let cluster = storage.read_at(0, IoBuf::zeroed(size)).await?;
        let header = Header::parse(&cluster).map_err(|error| layer.format_error(error))?;
        let points = header.index() == index;
        invariant(points, self.name(), "the header points to the index that was written")?;
        image.header.write().extensions = header.extensions;
        Ok(())
    }

    /// Frees the area of an index that nothing refers to.
    async fn free_area(
        &self,
        qcow2: &Qcow2Writer<H::File>,
        image: &Qcow2,
        index: &IndexExtension,
    ) -> Result<()> {
        match clusters(image, index) {
            Some(area) => qcow2.free_index(area).await,
            None => Ok(()),
        }
    }
}

/// Why a disk gets no index.
fn reason(none: &NoIndex) -> String {
    match none {
        NoIndex::Unsuited | NoIndex::Much => {
            "it is too large for an index; use larger clusters".into()
        }
        NoIndex::Unprovable(layer) => {
            let layer = shown(layer);
            format!(
                "an index could not tell whether '{layer}' is unchanged: its tables cannot be read in full, and its \
                 file's times do not count, being those of a device or of another machine, too recent, or in the \
                 future; 'isobath check' says whether it is damaged"
            )
        }
    }
}

/// Checks that an index was built for these clusters.
fn check_area(image: &Qcow2, built: &Built, area: &Range<u64>, name: &Path) -> Result<()> {
    let size = image.geometry.cluster_size();
    let there = area.start.checked_mul(size) == Some(built.extension.area_offset.get());
    invariant(there, name, "an index is written where it was built for")?;
    let fits = built.bytes.len() as u64 <= (area.end - area.start) * size;
    invariant(fits, name, "the area of an index has room for it")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{CLUSTER, careless_disk, disk, must_violate};
    use futures_executor::block_on;
    use isobath_qcow2::HostOffset;
    use isobath_qcow2::index::BlockHash;
    use isobath_storage_test::careless::Slip;

    #[test]
    fn an_index_is_written_to_its_area() {
        let disk = disk();
        let image = disk.active_qcow2().unwrap();
        let extension = IndexExtension {
            area_offset: HostOffset::new(5 * CLUSTER),
            area_length: CLUSTER,
            root_offset: HostOffset::new(5 * CLUSTER),
            root_length: 512,
            root_hash: BlockHash::of(&[]),
        };
        let bytes = vec![0; CLUSTER as usize];
        let built = Built { bytes, extension, undigested: 0, deferred: false };
        let check = |area| check_area(image, &built, &area, disk.name());
        check(5..6).unwrap();
        must_violate(check(6..7), "an index is written where it was built for");
        must_violate(check(5..5), "the area of an index has room for it");
    }

    #[test]
    fn a_header_points_to_the_index_that_was_written() {
        let (disk, slips) = careless_disk();
        let image = disk.active_qcow2().unwrap();
        let extension = IndexExtension {
            area_offset: HostOffset::new(5 * CLUSTER),
            area_length: CLUSTER,
            root_offset: HostOffset::new(5 * CLUSTER),
            root_length: 512,
            root_hash: BlockHash::of(&[]),
        };
        let point = || block_on(Box::pin(disk.point_to(image, Some(&extension))));
        slips.set(Slip::LostWrite);
        must_violate(point(), "the header points to the index that was written");
        slips.set(Slip::None);
        point().unwrap();
    }
}
