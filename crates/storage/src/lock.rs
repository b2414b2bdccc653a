//! Conflicts between users of an image, in QEMU's words.

use crate::error::{Operation, StorageError};
use std::io;
use std::path::Path;

/// A conflict with another user of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Conflict {
    permission: &'static str,
    /// If `true`, the permission is denied to others here and used by one of them; otherwise it is wanted here and
    /// denied by another.
    shared: bool,
}

impl Conflict {
    /// A permission of QEMU's name is wanted here, and denied by another user.
    pub const fn wanted(permission: &'static str) -> Self {
        Self { permission, shared: false }
    }

    /// A permission of QEMU's name is denied to others here, and used by one of them.
    pub const fn denied(permission: &'static str) -> Self {
        Self { permission, shared: true }
    }

    /// Writing is wanted here and denied by another user.
    pub const WRITE: Self = Self::wanted("write");
    /// Writing is denied to others here and used by one of them.
    pub const SHARED_WRITE: Self = Self::denied("write");
}

/// The error of an image that another user holds, in QEMU's words.
pub fn busy(name: &Path, conflict: Conflict) -> StorageError {
    let shared = if conflict.shared { "shared " } else { "" };
    // Who wants to write has no use for reading it.
    let way_out = if conflict == Conflict::WRITE {
        "Close it there first"
    } else {
        "Close it there first, or read it without a lock with -U (--force-share)"
    };
    let message = format!(
        "Failed to get {shared}\"{}\" lock. Is another process using the image [{}]? {way_out}",
        conflict.permission,
        crate::shown(name)
    );
    let source = io::Error::new(io::ErrorKind::ResourceBusy, message);
    StorageError::new(Operation::Lock, name, source)
}
