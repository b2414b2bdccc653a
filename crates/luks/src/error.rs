//! Errors of LUKS headers and key slots.

use std::{fmt, io};

/// The result of an operation on a LUKS header.
pub type Result<T> = std::result::Result<T, Error>;

/// Why a header cannot be used, or an operation on it was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A field of the header has a value that no valid header has.
    #[error("LUKS header: {field} is {value}: {reason}")]
    Invalid {
        /// The field.
        field: String,
        /// Its value.
        value: String,
        /// What is wrong with it, and what to do about it.
        reason: String,
    },
    /// A field of the header, or an option, has a value that is not supported.
    #[error("LUKS: {field} '{value}' is not supported; {supported}")]
    Unsupported {
        /// The field or option.
        field: String,
        /// Its value.
        value: String,
        /// What is supported instead.
        supported: String,
    },
    /// The secret opens no active key slot.
    #[error("Invalid password, cannot unlock any keyslot")]
    WrongSecret,
    /// The secret is not text, or too long.
    #[error("{0}")]
    Secret(&'static str),
    /// A change of key slots was refused, with QEMU's message.
    #[error("{0}")]
    KeySlot(String),
    /// The system returned no random bytes.
    #[error("no random bytes from the system: {0}")]
    Random(#[source] io::Error),
    /// This build has no ciphers.
    #[error("this program was built without encryption (the feature 'encryption')")]
    Absent,
}

impl Error {
    pub(crate) fn invalid(
        field: impl Into<String>,
        value: impl fmt::Display,
        reason: impl Into<String>,
    ) -> Self {
        Self::Invalid { field: field.into(), value: value.to_string(), reason: reason.into() }
    }

    pub(crate) fn unsupported(
        field: impl Into<String>,
        value: impl fmt::Display,
        supported: impl Into<String>,
    ) -> Self {
        let (value, supported) = (value.to_string(), supported.into());
        Self::Unsupported { field: field.into(), value, supported }
    }
}
