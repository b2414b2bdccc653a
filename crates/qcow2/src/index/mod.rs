//! The direct-access index: which layer of a backing chain owns each guest cluster.
//!
//! An overlay contains the index of everything *below* it, never of its own clusters. It is a tree of blocks. Each
//! [`BlockPointer`] contains the block's hash, so that no change goes unnoticed: the header extension
//! ([`IndexExtension`]) points to a [`Root`], the root to chapters of [`LayerRecord`]s and to [`Segment`]s, a segment
//! to [`Page`]s. A chapter is followed by the [heads](crate::Head) of its layers. Blocks that have not changed since
//! the previous snapshot are referred to in the file of a layer below. `docs/format.md` specifies it to the byte.
//!
//! A chain in a store has an index of all of its layers, in a file of its own, under a [`WholeRoot`].

mod block;
mod page;
mod record;
mod root;
mod segment;
mod whole;

pub use block::{BlockHash, BlockHasher, BlockPointer, IndexExtension};
pub(crate) use block::{Fields, pad};
pub use page::{MAX_PAGE_BYTES, Page, PageEntry, PageRun};
pub use record::{HeadsBlock, LayerRecord, LayerStamp, RecordedFormat};
pub use root::Root;
pub use segment::{PageRecord, Segment};
pub use whole::{MAX_WHOLE_BYTES, MAX_WHOLE_ROOT_BYTES, WholeRoot};

/// Units that a page describes.
pub const PAGE_UNITS: usize = 1024;
/// Pages that a segment describes.
pub const SEGMENT_PAGES: usize = 64;
/// Layers whose records form a chapter.
pub const CHAPTER_LAYERS: usize = 64;

/// log2 of the guest bytes that a page describes, with units of this size.
pub const fn page_bits(unit_bits: u32) -> u32 {
    unit_bits + PAGE_UNITS.trailing_zeros()
}

/// The largest block, in bytes; pages have a smaller limit.
pub const MAX_BLOCK_BYTES: u32 = 64 << 20;
