//! A direct-access index in use.

use isobath_image::index_area::read_block;
use isobath_image::layer::Layer;
use isobath_image::violated;
use isobath_qcow2::index::{
    BlockPointer, MAX_BLOCK_BYTES, MAX_PAGE_BYTES, Page, PageRecord, Root, SEGMENT_PAGES, Segment,
    WholeRoot, page_bits,
};
use isobath_storage::{IoBuf, Storage};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Segments kept in memory: with 64 KiB clusters each covers 4 GiB and takes some 6 KiB.
const CACHED_SEGMENTS: usize = 256;

/// The most bytes of a segment whose pages are all folded.
const MAX_FOLDED_SEGMENT_BYTES: u32 = 16 + SEGMENT_PAGES as u32 * 40;

/// An index in use.
pub struct ChainIndex<S> {
    held: Held<S>,
    /// Layers that it describes, from the base.
    covers: u32,
    /// log2 of its unit in bytes.
    unit_bits: u32,
    segments: Mutex<FxHashMap<u32, Arc<Segment>>>,
    /// A block was damaged, and that was logged.
    damaged: AtomicBool,
}

/// Where an index is.
enum Held<S> {
    /// In the files of these layers, from the base up to the one that holds the root, which is the last. The chain that
    /// uses it may end below.
    Within { layers: Vec<Arc<Layer<S>>>, root: Root },
    /// In a file of its own.
    Beside { file: S, root: WholeRoot },
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
        let (covers, unit_bits) = (root.covers, root.unit_bits);
        Self::held(Held::Within { layers, root }, covers, unit_bits)
    }

    /// The index of a whole chain in a file of its own, which has this `root`.
    pub fn beside(file: S, root: WholeRoot) -> Self {
        let (covers, unit_bits) = (root.layers, root.unit_bits);
        Self::held(Held::Beside { file, root }, covers, unit_bits)
    }

    fn held(held: Held<S>, covers: u32, unit_bits: u32) -> Self {
        let damaged = AtomicBool::new(false);
        Self { held, covers, unit_bits, segments: Mutex::default(), damaged }
    }

    /// Layers that it describes, from the base.
    pub fn covers(&self) -> usize {
        self.covers as usize
    }

    /// log2 of its unit in bytes.
    pub fn unit_bits(&self) -> u32 {
        self.unit_bits
    }

    /// log2 of the guest bytes that a page describes.
    pub fn page_bits(&self) -> u32 {
        page_bits(self.unit_bits)
    }

    /// Its root, if it is in the files of its layers.
    pub fn root(&self) -> Option<&Root> {
        match &self.held {
            Held::Within { root, .. } => Some(root),
            Held::Beside { .. } => None,
        }
    }

    /// The owners of the page that contains the guest byte at `guest`; `None` if its block is damaged or cannot be
    /// read, which is logged once.
    pub async fn owners(&self, guest: u64) -> Option<Owners> {
        let owners = self.read_owners(guest >> self.page_bits()).await;
        if owners.is_none() && !self.damaged.swap(true, Ordering::Relaxed) {
            match &self.held {
                Held::Within { layers, root } => tracing::warn!(
                    "the index of '{}' is damaged; the layers' own tables are used in place of the \
                     damaged parts. 'isobath index' rewrites it",
                    isobath_storage::shown(layers[root.position as usize].name())
                ),
                Held::Beside { file, .. } => tracing::warn!(
                    "the index '{}' is damaged or cannot be read; where that is so, the layers' own tables are \
                     used",
                    isobath_storage::shown(file.name())
                ),
            }
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
        let segments = match &self.held {
            Held::Within { root, .. } => &root.segments,
            Held::Beside { root, .. } => &root.segments,
        };
        let Some(pointer) = segments.get(segment as usize).copied().flatten() else {
            return Some(PageRecord::default());
        };
        let segment = self.segment(segment, &pointer).await?;
        let within = (number % SEGMENT_PAGES as u64) as usize;
        Some(segment.pages.get(within).cloned().unwrap_or_default())
    }

    /// A segment, from memory or from its file; `None` if it is damaged or cannot be read.
    pub async fn segment(&self, number: u32, pointer: &BlockPointer) -> Option<Arc<Segment>> {
        let cached = self.segments.lock().get(&number).map(Arc::clone);
        if cached.is_some() {
            return cached;
        }
        let most = match &self.held {
            Held::Within { .. } => MAX_BLOCK_BYTES,
            Held::Beside { .. } => MAX_FOLDED_SEGMENT_BYTES,
        };
        let bytes = self.block(pointer, most).await?;
        let segment = Arc::new(Segment::decode(&bytes, number, self.covers)?);
        let mut segments = self.segments.lock();
        if segments.len() >= CACHED_SEGMENTS {
            segments.clear();
        }
        segments.insert(number, Arc::clone(&segment));
        Some(segment)
    }

    async fn page(&self, number: u64, record: &PageRecord, pointer: &BlockPointer) -> Option<Page> {
        let bytes = self.block(pointer, MAX_PAGE_BYTES).await?;
        let page = Page::decode(&bytes, u32::try_from(number).ok()?, self.unit_bits)?;
        let known = |layer: u16| u32::from(layer) < record.folded;
        page.runs.iter().all(|run| run.entry.layer().is_none_or(known)).then_some(page)
    }

    /// A block, from the file that contains it.
    async fn block(&self, pointer: &BlockPointer, most: u32) -> Option<IoBuf> {
        match &self.held {
            Held::Within { layers, .. } => {
                read_block(&**layers.get(pointer.layer as usize)?.storage(), pointer, most).await
            }
            Held::Beside { file, .. } if pointer.layer == 0 => {
                read_block(file, pointer, most).await
            }
            Held::Beside { .. } => None,
        }
    }
}
