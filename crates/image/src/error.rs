//! Errors of a disk: which image, which field, and how to fix it.

use crate::out_of_memory::OutOfMemory;
use isobath_qcow2::FormatError;
use isobath_storage::{Operation, StorageError, shown};
use std::path::{Path, PathBuf};

/// The result of a disk operation.
pub type Result<T> = std::result::Result<T, DiskError>;

/// Why a disk operation failed. The message names the image and says how to fix the problem.
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
        /// The field, its value and how to fix it.
        source: FormatError,
    },
    /// An image is not opened, or not used in this way, for a reason beyond one field.
    #[error("'{}': {reason}", shown(image))]
    Refused {
        /// The image.
        image: PathBuf,
        /// The reason, and how to fix it.
        reason: String,
    },
    /// An image takes more memory than is left of a limit.
    #[error("'{}': {source}", shown(image))]
    Memory {
        /// The image.
        image: PathBuf,
        /// How much it may take, and the way out.
        source: OutOfMemory,
    },
    /// A backing file could not be opened.
    #[error("cannot open the backing file of '{}': {source}", shown(overlay))]
    Backing {
        /// The image that names it.
        overlay: PathBuf,
        /// What went wrong there.
        source: Box<DiskError>,
    },
    /// The image's own tables are inconsistent; nothing was changed.
    #[error("'{}' is corrupt: {reason}; run 'isobath check -r all' on it", shown(image))]
    Corrupt {
        /// The image.
        image: PathBuf,
        /// What is wrong, and where.
        reason: String,
    },
    /// An invariant is violated: a bug in Isobath, not damage to the image. The disk accepts no more writes.
    #[error(
        "internal error in '{}': violated invariant: {violated}; the disk accepts no more writes; reopen it, and \
         report this with the log",
        shown(image)
    )]
    Internal {
        /// The image in use.
        image: PathBuf,
        /// What should have held.
        violated: &'static str,
    },
    /// An earlier failure left it unknown what is durable, so writes are refused.
    #[error("the disk accepts no more writes after an earlier failure: {reason}; reopen it")]
    Poisoned {
        /// The failure.
        reason: String,
        /// A flush failed: data written before it may be lost, although it can still be read.
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
    /// A change would make a raw image, whose format was detected and not named, begin as an image of another format:
    /// it would be opened as that from then on.
    #[error(
        "'{}' was detected as raw, and would begin as {becomes} after this: not allowed unless its format is named, \
         with '-f raw', or for a backing file with 'isobath rebase -u -b FILE -F raw' on the image above it",
        shown(image)
    )]
    Disguise {
        /// The image.
        image: PathBuf,
        /// What it would be taken for.
        becomes: String,
    },
    /// The disk was opened read-only.
    #[error("the disk is read-only")]
    ReadOnly,
    /// The operation is not supported on this disk.
    #[error("{0}")]
    Unsupported(String),
}

/// Fails unless the invariant `what` holds.
///
/// # Errors
/// [`DiskError::Internal`], which forbids further writes.
#[inline]
pub fn invariant(holds: bool, image: &Path, what: &'static str) -> Result<()> {
    if holds { Ok(()) } else { Err(DiskError::internal(image, what)) }
}

/// The value, which is present if the invariant `what` holds.
///
/// # Errors
/// As [`invariant`].
#[inline]
pub fn always<T>(there: Option<T>, image: &Path, what: &'static str) -> Result<T> {
    there.ok_or_else(|| DiskError::internal(image, what))
}

/// So many parts of a structure are looked at when its invariants are checked. Long ones are checked at each of the
/// thousands of steps that made them so: with 256 a simulated mirror that zeroes a large disk takes four times as long.
pub(crate) const MOST_CHECKED: usize = 32;

/// Panics because the invariant `what` is violated, where no error can be returned. The disk of the request accepts
/// no more writes.
#[cold]
pub fn violated(what: &'static str) -> ! {
    panic!("internal error: violated invariant: {what}")
}

impl From<isobath_formats::Error> for DiskError {
    fn from(error: isobath_formats::Error) -> Self {
        match error {
            isobath_formats::Error::Storage(error) => Self::Storage(error),
            isobath_formats::Error::Format { image, source } => Self::Format { image, source },
        }
    }
}

impl DiskError {
    /// The error for a violated invariant, which is logged.
    #[cold]
    pub fn internal(image: &Path, violated: &'static str) -> Self {
        tracing::error!(image = %shown(image), violated, "violated invariant");
        Self::Internal { image: image.to_owned(), violated }
    }

    /// Whether a flush has failed: data written before it may be lost, although it can still be read.
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
            | Self::Memory { .. }
            | Self::Corrupt { .. }
            | Self::Internal { .. }
            | Self::Poisoned { .. } => libc::EIO,
            Self::Closed => libc::ESHUTDOWN,
            Self::OutOfRange { .. } => libc::EINVAL,
            Self::ReadOnly | Self::Disguise { .. } => libc::EPERM,
            Self::Unsupported(_) => libc::ENOTSUP,
        }
    }
}
