//! What goes wrong.

use isobath_qcow2::text::Shown;
use std::fmt;
use std::path::Path;

/// A file's name in a message. What an image or a store calls its files does not write lines of its own.
pub(crate) fn shown(path: &Path) -> String {
    Shown(path.to_string_lossy()).to_string()
}

/// The result of an operation on a store.
pub type Result<T> = std::result::Result<T, Error>;

/// Why an operation failed. The messages are complete: they name the object or the file, and the way out.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// What the user asked for is impossible.
    #[error("{0}")]
    Refused(String),
    /// The store holds something else than it should.
    #[error("{0}")]
    Damaged(String),
    /// The store does not do what was asked of it.
    #[error("{0}")]
    Store(String),
    /// The same, and what was asked may have been done, or may be done later; says so.
    #[error("{0}")]
    Unknown(String),
    /// A local file cannot be read or written.
    #[error("{0}")]
    Local(String),
    /// Another program did something at the same time.
    #[error("{0}")]
    Conflict(String),
    /// [`Progress::cancel`](crate::Progress::cancel) was called.
    #[error("interrupted")]
    Interrupted,
    /// The same, after what was asked for may have taken effect; says how things are.
    #[error("interrupted; {0}")]
    Unsettled(String),
}

impl Error {
    pub(crate) fn refused(message: impl fmt::Display) -> Self {
        Self::Refused(message.to_string())
    }

    pub(crate) fn damaged(message: impl fmt::Display) -> Self {
        Self::Damaged(message.to_string())
    }

    /// An object that must be there is not.
    pub(crate) fn missing(key: &str) -> Self {
        Self::damaged(format_args!(
            "'{key}' is missing in the store; push the chain again from where it is whole"
        ))
    }

    /// An object ends before the bytes that were to be read, up to this one.
    pub(crate) fn ends(key: &str, before: u64) -> Self {
        Self::damaged(format_args!(
            "'{key}' in the store ends before byte {before}: remove it, and push the chain again from where it is \
             whole"
        ))
    }

    /// An object is not what its name says.
    pub(crate) fn mismatch(key: &str) -> Self {
        Self::damaged(format_args!(
            "'{key}' in the store does not match its digest: remove it, and push the chain again from where it is \
             whole"
        ))
    }

    /// An error of the store at an object.
    #[cfg(feature = "buckets")]
    pub(crate) fn store(what: &str, key: &str, cause: impl fmt::Display) -> Self {
        Self::Store(format!("cannot {what} '{key}' in the store: {cause}"))
    }

    /// An error of a local file.
    pub(crate) fn local(what: &str, path: &Path, cause: impl fmt::Display) -> Self {
        let cause = cause.to_string();
        let words = cause.split_once(" (os error ").map_or(&*cause, |(words, _)| words);
        Self::Local(format!("cannot {what} '{}': {words}", shown(path)))
    }
}

impl Error {
    /// The same, which also says this.
    pub(crate) fn and(self, more: impl fmt::Display) -> Self {
        let with = |message: String| format!("{message}; {more}");
        match self {
            Self::Refused(message) => Self::Refused(with(message)),
            Self::Damaged(message) => Self::Damaged(with(message)),
            Self::Store(message) => Self::Store(with(message)),
            Self::Unknown(message) => Self::Unknown(with(message)),
            Self::Local(message) => Self::Local(with(message)),
            Self::Conflict(message) => Self::Conflict(with(message)),
            Self::Interrupted => Self::Unsettled(more.to_string()),
            Self::Unsettled(message) => Self::Unsettled(with(message)),
        }
    }

    /// The same, of a file that the message does not name.
    pub(crate) fn of(self, path: &Path) -> Self {
        let name = shown(path);
        let named = |message: String| {
            if message.contains(&name) { message } else { format!("'{name}': {message}") }
        };
        match self {
            Self::Refused(message) => Self::Refused(named(message)),
            Self::Damaged(message) => Self::Damaged(named(message)),
            Self::Store(message) => Self::Store(named(message)),
            Self::Unknown(message) => Self::Unknown(named(message)),
            Self::Local(message) => Self::Local(named(message)),
            Self::Conflict(message) => Self::Conflict(named(message)),
            Self::Interrupted | Self::Unsettled(_) => self,
        }
    }
}
