//! The direct-access index: which layer of a backing chain owns each guest cluster.
//!
//! An overlay carries the index of everything *below* it, never of its own clusters. It is a tree of
//! blocks, each named by a [`BlockPointer`] that holds the block's hash, so that nothing in it can
//! change unnoticed: the header extension ([`IndexExtension`]) points to a [`Root`], the root to
//! chapters of [`LayerRecord`]s and to [`Segment`]s, a segment to [`Page`]s. Blocks that did not
//! change since the snapshot before are pointed to where they are, in the file of a layer below.
//! `docs/format.md` specifies it to the byte.

mod block;
mod page;
mod record;
mod root;
mod segment;

pub use block::{BlockHash, BlockHasher, BlockPointer, IndexExtension};
pub use page::{MAX_PAGE_BYTES, Page, PageEntry, PageRun};
pub use record::{LayerRecord, LayerStamp, RecordedFormat};
pub use root::Root;
pub use segment::{PageRecord, Segment};

/// Units that a page describes.
pub const PAGE_UNITS: usize = 1024;
/// Pages that a segment describes.
pub const SEGMENT_PAGES: usize = 64;
/// Layers whose records make a chapter.
pub const CHAPTER_LAYERS: usize = 64;

/// No block other than a page, whose size is bounded, is larger, in bytes.
pub const MAX_BLOCK_BYTES: u32 = 64 << 20;
