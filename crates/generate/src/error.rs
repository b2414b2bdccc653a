//! Why a chain could not be generated.

use isobath_qcow2::FormatError;
use std::io;
use std::path::PathBuf;

/// Why a chain could not be generated.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GenerateError {
    /// The directory has something in it already.
    #[error("{0} is not empty; name a new or an empty directory")]
    NotEmpty(PathBuf),
    /// A chain has at least one layer.
    #[error("a chain needs at least one layer")]
    NoLayers,
    /// A disk has at least one sector, and only whole ones.
    #[error("the disk's size is {0} bytes; it must be a multiple of 512, and not 0")]
    Size(u64),
    /// The share of clusters to fill is below 0 or above 1.
    #[error("'{0}' is not a share of the disk: expected a number from 0 to 1, or from 0% to 100%")]
    Fill(String),
    /// A line of a trace that cannot be taken.
    #[error("line {line}: {reason}")]
    Trace {
        /// The line's number, from 1.
        line: u64,
        /// What is wrong with it.
        reason: String,
    },
    /// A disk or an image that the format cannot hold.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// One layer's clusters do not fit one image.
    #[error(
        "layer {layer} would need {clusters} clusters, more than an image of this cluster size can \
         count; use larger clusters"
    )]
    LayerTooLarge {
        /// The layer's number, from the base at 0.
        layer: u32,
        /// The host clusters it would need.
        clusters: u64,
    },
    /// The list of clusters does not fit memory.
    #[error("not enough memory for a list of {0} clusters; use larger clusters, or fill less")]
    Memory(u64),
    /// A file or directory could not be used.
    #[error("cannot {what} '{}': {error}", path.display())]
    Io {
        /// What was attempted, such as `write`.
        what: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's answer.
        error: io::Error,
    },
    /// The raw image that the clusters are filled from could not be read.
    #[error("cannot read the raw image: {0}")]
    Source(io::Error),
    /// [`Progress::stop`](crate::Progress::stop) was called.
    #[error("stopped")]
    Stopped,
}
