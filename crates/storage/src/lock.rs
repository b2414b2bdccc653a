//! Image locks as QEMU takes them.

use crate::error::{Operation, StorageError};
use std::io;
use std::path::Path;

/// What another user of an image does that this open cannot live with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Conflict {
    /// QEMU's name of the permission.
    permission: &'static str,
    /// The permission is refused to others here and held by one of them; otherwise it is wanted
    /// here and refused by another.
    shared: bool,
}

impl Conflict {
    /// Writing is wanted and another user forbids it.
    pub(crate) const WRITE: Self = Self { permission: "write", shared: false };
    /// Nobody else may write and somebody does.
    pub(crate) const SHARED_WRITE: Self = Self { permission: "write", shared: true };
}

/// The error of an image that another user holds, in QEMU's words.
pub(crate) fn busy(name: &Path, conflict: Conflict) -> StorageError {
    let shared = if conflict.shared { "shared " } else { "" };
    let message = format!(
        "Failed to get {shared}\"{}\" lock. Is another process using the image [{}]? \
         Close it there first; -U (--force-share) reads it as it is meanwhile",
        conflict.permission,
        name.display()
    );
    let source = io::Error::new(io::ErrorKind::ResourceBusy, message);
    StorageError::new(Operation::Lock, name, source)
}
