//! Errors of a disk: which image, which field, what to do.

use isobath_storage::StorageError;

/// The result of a disk operation.
pub type Result<T> = std::result::Result<T, DiskError>;

/// Why a disk operation failed. The message names the image and says the way out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiskError {
    /// The storage below failed.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// The request reaches past the end of the disk.
    #[error("request of {length} bytes at {offset} reaches past the end of the disk ({size} bytes)")]
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
    /// The error number (`errno`) that a protocol should report.
    pub fn errno(&self) -> i32 {
        match self {
            Self::Storage(error) => error.errno(),
            Self::OutOfRange { .. } => libc::EINVAL,
            Self::ReadOnly => libc::EPERM,
            Self::Unsupported(_) => libc::ENOTSUP,
        }
    }
}
