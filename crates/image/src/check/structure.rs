//! Where an image's refcounts are.

use std::collections::BTreeMap;

/// The location of an image's refcounts.
#[derive(Default)]
pub(crate) struct Structure {
    /// Refcount blocks that can be used: their offset by their place in the refcount table.
    pub(super) blocks: BTreeMap<u64, u64>,
    /// The ranges of the file that the structure takes, offset and length, as they were counted.
    pub(crate) ranges: Vec<(u64, u64)>,
    /// Errors that only a new structure mends.
    pub(super) broken: u64,
}
