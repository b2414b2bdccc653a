//! Errors of a disk: which image, which field, what to do.

use isobath_qcow2::FormatError;
use isobath_storage::{Operation, StorageError, shown};
use std::path::PathBuf;

/// The result of a disk operation.
pub type Result<T> = std::result::Result<T, DiskError>;

/// Why a disk operation failed. The message names the image and says the way out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiskError {
    /// The storage below failed.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// A field of an image cannot be accepted.
    #[error("'{}': {source}", shown(image))]
    Format {
        /// The image.
        image: PathBuf,
        /// The field, its value and the way out.
        source: FormatError,
    },
    /// An image is not opened, or not used in this way, for a reason beyond one field.
    #[error("'{}': {reason}", shown(image))]
    Refused {
        /// The image.
        image: PathBuf,
        /// Why, and the way out.
        reason: String,
    },
    /// A backing file could not be opened.
    #[error("cannot open the backing file of '{}': {source}", shown(overlay))]
    Backing {
        /// The image that names it.
        overlay: PathBuf,
        /// What went wrong there.
        source: Box<DiskError>,
    },
    /// The image's own tables contradict each other; nothing was changed.
    #[error("'{}' is corrupt: {reason}; run 'isobath check -r all' on it", shown(image))]
    Corrupt {
        /// The image.
        image: PathBuf,
        /// What is wrong, and where.
        reason: String,
    },
    /// An earlier failure left it unknown what is durable, so writes are refused.
    #[error("the disk accepts no more writes after an earlier failure: {reason}; reopen it")]
    Poisoned {
        /// The failure.
        reason: String,
        /// It was a flush: what was written before may be lost, and is still read.
        flush_failed: bool,
    },
    /// The disk was closed.
    #[error("the disk is closed")]
    Closed,
    /// The request reaches past the end of the disk.
    #[error(
        "request of {length} bytes at {offset} extends past the end of the disk ({size} bytes)"
    )]
    OutOfRange {
        /// First byte asked for.
        offset: u64,
        /// Bytes asked for.
        length: u64,
        /// The disk's size in bytes.
        size: u64,
    },
    /// The disk was opened read-only.
    #[error("the disk is read-only")]
    ReadOnly,
    /// The operation is not supported on this disk.
    #[error("{0}")]
    Unsupported(String),
}

impl DiskError {
    /// Whether it says that a flush has failed: what was written before may be lost, and is still read.
    pub fn is_failed_flush(&self) -> bool {
        match self {
            Self::Storage(error) => error.operation == Operation::Flush,
            Self::Poisoned { flush_failed, .. } => *flush_failed,
            _ => false,
        }
    }

    /// The error number (`errno`) that a protocol should report.
    pub fn errno(&self) -> i32 {
        match self {
            Self::Storage(error) => error.errno(),
            Self::Backing { source, .. } => source.errno(),
            Self::Format { .. }
            | Self::Refused { .. }
            | Self::Corrupt { .. }
            | Self::Poisoned { .. } => libc::EIO,
            Self::Closed => libc::ESHUTDOWN,
            Self::OutOfRange { .. } => libc::EINVAL,
            Self::ReadOnly => libc::EPERM,
            Self::Unsupported(_) => libc::ENOTSUP,
        }
    }
}
