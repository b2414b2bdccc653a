//! A direct-access index in use.

use isobath_image::index_area::read_block;
use isobath_image::layer::Layer;
use isobath_image::violated;
use isobath_qcow2::index::{
    BlockPointer, MAX_BLOCK_BYTES, MAX_PAGE_BYTES, Page, PageRecord, Root, SEGMENT_PAGES, Segment,
};
use isobath_storage::{IoBuf, Storage};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Segments kept in memory: with 64 KiB clusters each covers 4 GiB and takes some 6 KiB.
const CACHED_SEGMENTS: usize = 256;

/// An index in use.
pub struct ChainIndex<S> {
    /// The layers from the base up to the one that holds it, which is the last. The chain that uses it may end below.
    layers: Vec<Arc<Layer<S>>>,
    root: Root,
    segments: Mutex<FxHashMap<u32, Arc<Segment>>>,
    /// A block was damaged, and that was logged.
    damaged: AtomicBool,
}

/// The owners that an index gives for one page of the disk.
pub struct Owners {
    /// Layers whose own tables take precedence, from the base.
    pub newer: Vec<u16>,
    /// The owners below those.
    pub page: Option<Page>,
}

impl<S: Storage> ChainIndex<S> {
    /// The index with this `root`, over `layers`, from the base up to the one that holds it.
    pub fn new(layers: Vec<Arc<Layer<S>>>, root: Root) -> Self {
        if layers.len() != root.position as usize + 1 {
            violated("an index is held by the last of its layers");
        }
        if root.covers > root.position {
            violated("an index describes layers below the image that holds it");
        }
        Self { layers, root, segments: Mutex::default(), damaged: AtomicBool::new(false) }
    }

    /// Layers that it describes, from the base.
    pub fn covers(&self) -> usize {
        self.root.covers as usize
    }

    /// Its root.
    pub fn root(&self) -> &Root {
        &self.root
    }

    /// The image that holds it.
    fn holder(&self) -> &Layer<S> {
        &self.layers[self.root.position as usize]
    }

    /// The owners of the page that contains the guest byte at `guest`; `None` if its block is damaged, which is logged
    /// once.
    pub async fn owners(&self, guest: u64) -> Option<Owners> {
        let owners = self.read_owners(guest >> self.root.page_bits()).await;
        if owners.is_none() && !self.damaged.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "the index of '{}' is damaged; the layers' own tables are used in place of the \
                 damaged parts. 'isobath index' rewrites it",
                isobath_storage::shown(self.holder().name())
            );
        }
        owners
    }

    async fn read_owners(&self, number: u64) -> Option<Owners> {
        let record = self.record(number).await?;
        let page = match &record.page {
            Some(pointer) => Some(self.page(number, &record, pointer).await?),
            None => None,
        };
        Some(Owners { newer: record.newer, page })
    }

    async fn record(&self, number: u64) -> Option<PageRecord> {
        let segment = u32::try_from(number / SEGMENT_PAGES as u64).ok()?;
        let Some(pointer) = self.root.segments.get(segment as usize).copied().flatten() else {
            return Some(PageRecord::default());
        };
        let segment = self.segment(segment, &pointer).await?;
        let within = (number % SEGMENT_PAGES as u64) as usize;
        Some(segment.pages.get(within).cloned().unwrap_or_default())
    }

    /// A segment, from memory or from its file.
    pub async fn segment(&self, number: u32, pointer: &BlockPointer) -> Option<Arc<Segment>> {
        let cached = self.segments.lock().get(&number).map(Arc::clone);
        if cached.is_some() {
            return cached;
        }
        let bytes = self.block(pointer, MAX_BLOCK_BYTES).await?;
        let segment = Arc::new(Segment::decode(&bytes, number, self.root.covers)?);
        let mut segments = self.segments.lock();
        if segments.len() >= CACHED_SEGMENTS {
            segments.clear();
        }
        segments.insert(number, Arc::clone(&segment));
        Some(segment)
    }

    async fn page(&self, number: u64, record: &PageRecord, pointer: &BlockPointer) -> Option<Page> {
        let bytes = self.block(pointer, MAX_PAGE_BYTES).await?;
        let page = Page::decode(&bytes, u32::try_from(number).ok()?, self.root.unit_bits)?;
        let known = |layer: u16| u32::from(layer) < record.folded;
        page.runs.iter().all(|run| run.entry.layer().is_none_or(known)).then_some(page)
    }

    /// A block, from the layer whose file contains it.
    async fn block(&self, pointer: &BlockPointer, most: u32) -> Option<IoBuf> {
        read_block(self.layers.get(pointer.layer as usize)?, pointer, most).await
    }
}
