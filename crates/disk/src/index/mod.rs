//! The direct-access index of a chain: one look-up in place of a walk over its layers.
//!
//! An overlay may carry an index of the layers below it ([`isobath_qcow2::index`]). It is used only
//! once every layer that it describes was seen to be as it was when the index was written
//! ([`load`]); each of its blocks is checked against its hash when it is read. Whatever does not hold
//! is said once in the log, and the chain is then served from its layers' own tables.
//!
//! [`build`] makes an index, for a new overlay from the one below it or for a whole chain afresh;
//! [`store`] puts it into an existing image, verifies it and removes it.

mod build;
mod load;
mod scan;
mod status;
mod store;

pub(crate) use build::{Built, Folding, Place, build};
pub(crate) use load::{Ahead, find, find_again, read_root};
pub(crate) use status::index_info;
pub use status::{IndexInfo, IndexState};
pub(crate) use store::clusters;
pub use store::{IndexMismatch, IndexProgress};

use crate::chain::{Chain, Layer};
use isobath_qcow2::index::{
    BlockHash, BlockPointer, MAX_BLOCK_BYTES, MAX_PAGE_BYTES, Page, PageRecord, Root,
    SEGMENT_PAGES, Segment,
};
use isobath_storage::{IoBuf, Storage};
use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Segments kept in memory: of a disk in 64 KiB clusters, 4 GiB each in some 6 KiB.
const CACHED_SEGMENTS: usize = 256;

/// An index in use.
pub(crate) struct ChainIndex<S> {
    /// The layers from the base up to the one that holds it, which is last. The chain that uses it
    /// may end below.
    layers: Vec<Arc<Layer<S>>>,
    root: Root,
    segments: Mutex<FxHashMap<u32, Arc<Segment>>>,
    /// A block was not what it should be, and that was said.
    damaged: AtomicBool,
}

/// What an index says of one page of the disk.
pub(crate) struct Owners {
    /// Layers whose own tables come first, from the base.
    pub(crate) newer: Vec<u16>,
    /// The owners below those.
    pub(crate) page: Option<Page>,
}

impl<S: Storage> ChainIndex<S> {
    fn new(chain: &Chain<S>, root: Root) -> Self {
        let layers = chain.layers().take(root.position as usize + 1);
        let layers = layers.map(|(_, layer)| Arc::clone(layer)).collect();
        Self { layers, root, segments: Mutex::default(), damaged: AtomicBool::new(false) }
    }

    /// Layers that it describes, from the base.
    pub(crate) fn covers(&self) -> usize {
        self.root.covers as usize
    }

    pub(crate) fn root(&self) -> &Root {
        &self.root
    }

    /// The image that holds it.
    fn holder(&self) -> &Layer<S> {
        &self.layers[self.root.position as usize]
    }

    /// What it says of the page around the guest byte at `guest`; `None` if its block is damaged,
    /// which is said once.
    pub(crate) async fn owners(&self, guest: u64) -> Option<Owners> {
        let owners = self.read_owners(guest >> self.root.page_bits()).await;
        if owners.is_none() && !self.damaged.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "the index of '{}' is damaged; where it is, the layers' own tables serve. \
                 'isobath index' writes it anew",
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
    async fn segment(&self, number: u32, pointer: &BlockPointer) -> Option<Arc<Segment>> {
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

    /// A block, from the layer whose file has it.
    async fn block(&self, pointer: &BlockPointer, most: u32) -> Option<IoBuf> {
        read_block(self.layers.get(pointer.layer as usize)?, pointer, most).await
    }
}

/// Reads a block from a layer's file; `None` if it is not what the pointer says.
async fn read_block<S: Storage>(
    layer: &Layer<S>,
    pointer: &BlockPointer,
    most: u32,
) -> Option<IoBuf> {
    if pointer.length > most {
        return None;
    }
    let buf = IoBuf::zeroed(pointer.length as usize);
    match layer.storage().read_at(pointer.offset.get(), buf).await {
        Ok(bytes) => (BlockHash::of(&bytes) == pointer.hash).then_some(bytes),
        Err(error) => {
            tracing::debug!("{error}");
            None
        }
    }
}
