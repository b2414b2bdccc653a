//! The order of the engine's locks: from the outside in. While holding one, only those after it are taken.
//!
//! Builds with debug assertions check it for each task: see [`isobath_sync::order`].

use isobath_sync::order::Rank;

/// One change of a disk's chain at a time.
pub const GRAPH: Rank = Rank::new(10, "the chain");
/// One change of an image's size or index at a time.
pub const RESIZING: Rank = Rank::new(15, "the size");
/// Requests in a disk, or a change of its chain.
pub const GATE: Rank = Rank::new(20, "the gate");
/// The directory of bitmaps.
pub const BITMAPS: Rank = Rank::new(25, "the bitmaps");
/// A range of guest bytes.
pub const RANGE: Rank = Rank::new(30, "a range");
/// One commit of an image at a time.
pub const COMMIT: Rank = Rank::new(40, "the commit");
/// The journal's state.
pub const JOURNAL: Rank = Rank::new(45, "the journal");
/// The turn to wait until requests have left an image.
pub const DRAIN: Rank = Rank::new(55, "a drain");
/// A request's stay in an image. Entering never waits, so it may come before a range of host bytes, and after one.
pub const READERS: Rank = Rank::without_wait(60, "a stay");
/// A range of host bytes, with lead blocks.
pub const LEADS: Rank = Rank::new(60, "lead blocks");
/// One look-up of a slice of the map at a time.
pub const RESOLVING: Rank = Rank::new(70, "a slice");
/// A look-up that is under way.
pub const RESOLVERS: Rank = Rank::new(75, "a look-up");
/// One new L2 table at a time.
pub const GROWTH: Rank = Rank::new(80, "the growth of tables");
/// Refcounts.
pub const ALLOCATOR: Rank = Rank::new(90, "the allocator");
/// L1 and L2 tables. From here on, none is held across an await.
pub(crate) const TABLES: Rank = Rank::new(100, "the tables");
/// The zones.
pub(crate) const ZONES: Rank = Rank::new(110, "the zones");
/// Journaled data and its checksums.
pub(crate) const DATA_JOURNAL: Rank = Rank::new(120, "the data journal");
/// The restart log.
pub(crate) const RESTART_LOG: Rank = Rank::new(130, "the restart log");
/// Who waits for a range.
pub(crate) const WAITING: Rank = Rank::new(140, "a list of ranges");
