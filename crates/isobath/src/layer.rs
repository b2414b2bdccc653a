//! A disk's layers, as its user sees them.

use isobath_disk::{ImageFormat, Layer};
use isobath_storage::{FileId, Storage};
use std::path::PathBuf;

/// An image of a disk's chain.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LayerInfo {
    /// The name by which it was opened.
    pub name: PathBuf,
    /// Its format.
    pub format: ImageFormat,
    /// The size of its disk in bytes.
    pub size: u64,
    /// Whether its data is encrypted.
    pub encrypted: bool,
    /// Its file, by which the options of [jobs](crate::jobs) name a layer.
    pub file: FileId,
}

impl LayerInfo {
    pub(crate) fn of<S: Storage>(layer: &Layer<S>) -> Self {
        Self {
            name: layer.name().to_owned(),
            format: layer.format(),
            size: layer.size(),
            encrypted: layer.is_encrypted(),
            file: layer.storage().identity().id,
        }
    }
}
