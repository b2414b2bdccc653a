//! Why a chain could not be generated.

use isobath_qcow2::FormatError;
use std::io;
use std::path::PathBuf;

/// Why a chain could not be generated.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GenerateError {
    /// The directory is not empty.
    #[error(
        "'{}' is not empty, or in use by another run; choose a new or empty directory",
        .0.display()
    )]
    NotEmpty(PathBuf),
    /// The chain has no layers.
    #[error("a chain needs at least one layer")]
    NoLayers,
    /// The disk's size is 0, or not a whole number of sectors.
    #[error("the disk's size is {0} bytes; it must be a nonzero multiple of 512")]
    Size(u64),
    /// The share of clusters to fill is below 0 or above 1.
    #[error("'{0}' is not a share of the disk: expected a number from 0 to 1, or from 0% to 100%")]
    Fill(String),
    /// A line of a trace is invalid.
    #[error("line {line}: {reason}")]
    Trace {
        /// The line's number, from 1.
        line: u64,
        /// What is wrong with it.
        reason: String,
    },
    /// The format does not support the disk or the image.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// One layer's clusters do not fit in one image.
    #[error(
        "layer {layer} would need {clusters} clusters, more than an image with this cluster size \
         can have; use larger clusters"
    )]
    LayerTooLarge {
        /// The layer's number, counted from 0, the base.
        layer: u32,
        /// The host clusters it would need.
        clusters: u64,
    },
    /// The list of clusters does not fit in memory.
    #[error("not enough memory for a list of {0} clusters; use larger clusters or fill less")]
    Memory(u64),
    /// A file or directory could not be used.
    #[error("cannot {what} '{}': {error}", path.display())]
    Io {
        /// What was attempted, such as `write`.
        what: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        error: io::Error,
    },
    /// The raw image that the clusters are filled from could not be read.
    #[error("cannot read the raw image: {0}")]
    Source(io::Error),
    /// [`Progress::stop`](crate::Progress::stop) was called.
    #[error("stopped")]
    Stopped,
}
