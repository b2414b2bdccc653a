//! The status of an image's index.

use isobath_qcow2::index::IndexExtension;

/// An image's direct-access index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexInfo {
    /// Layers that it describes, from the base; 0 if unknown.
    pub layers: u32,
    /// Bytes that it takes in this image's file; parts unchanged since the previous snapshot are in the files below.
    pub bytes: u64,
    /// Its granularity, in bytes; 0 if unknown.
    pub granularity: u64,
    /// Layers of which it has no digest, so that it is no longer used once the file of one is copied or touched; 0 if
    /// unknown.
    pub undigested: u32,
    /// Whether it is used.
    pub state: IndexState,
}

/// Whether an index is used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IndexState {
    /// It matches the layers below.
    Valid,
    /// It does not match, for this reason.
    Invalid(String),
    /// The layers below were not examined.
    Unchecked,
}

impl IndexInfo {
    /// The status that follows from an extension alone.
    pub fn unchecked(extension: &IndexExtension) -> Self {
        let end = extension.root_offset.get() + u64::from(extension.root_length);
        Self {
            layers: 0,
            bytes: end - extension.area_offset.get(),
            granularity: 0,
            undigested: 0,
            state: IndexState::Unchecked,
        }
    }
}
