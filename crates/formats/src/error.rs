//! Errors of an image in another program's format.

use isobath_qcow2::{FormatError, FormatErrorKind};
use isobath_storage::{StorageError, shown};
use std::fmt;
use std::path::{Path, PathBuf};

/// The result of an operation on an image.
pub type Result<T> = std::result::Result<T, Error>;

/// Why an image cannot be opened or read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The storage below failed.
    #[error(transparent)]
    Storage(#[from] StorageError),
    /// A field of an image cannot be accepted.
    #[error("'{}': {source}", shown(image))]
    Format {
        /// The image, or the one of its files that contains the field.
        image: PathBuf,
        /// The field, its value and what is wrong with it.
        source: FormatError,
    },
}

/// Makes errors about the fields of one file.
#[derive(Clone, Copy)]
pub(crate) struct Blame<'a>(pub(crate) &'a Path);

impl Blame<'_> {
    fn error(
        self,
        kind: FormatErrorKind,
        field: &str,
        value: impl fmt::Display,
        reason: String,
    ) -> Error {
        let source = FormatError::new(kind, field.to_owned(), value, reason);
        Error::Format { image: self.0.to_owned(), source }
    }

    /// A value that no valid image has.
    pub(crate) fn invalid(
        self,
        field: &str,
        value: impl fmt::Display,
        reason: impl Into<String>,
    ) -> Error {
        self.error(FormatErrorKind::Invalid, field, value, reason.into())
    }

    /// A value that is not supported.
    pub(crate) fn unsupported(
        self,
        field: &str,
        value: impl fmt::Display,
        reason: impl Into<String>,
    ) -> Error {
        self.error(FormatErrorKind::Unsupported, field, value, reason.into())
    }

    /// `value` points past the end of the file.
    pub(crate) fn truncated(self, field: &str, value: impl fmt::Display, length: u64) -> Error {
        let reason =
            format!("it is past the end of the file ({length} bytes), which may be truncated");
        self.error(FormatErrorKind::Truncated, field, value, reason)
    }
}
