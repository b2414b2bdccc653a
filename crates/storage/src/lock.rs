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

/// How the error begins if it is a writer elsewhere that keeps this program from reading: without locks it could read.
pub const READ_REFUSED: &str = "Failed to get shared ";

/// What the error advises. Programs that can open an image without locks may say how, behind it.
pub const WAY_OUT: &str = "Close it there first";

/// The error of an image that another user holds, in QEMU's words.
pub fn busy(name: &Path, conflict: Conflict) -> StorageError {
    let failed = if conflict.shared { READ_REFUSED } else { "Failed to get " };
    let message = format!(
        "{failed}\"{}\" lock. Is another process using the image [{}]? {WAY_OUT}",
        conflict.permission,
        crate::shown(name)
    );
    let source = io::Error::new(io::ErrorKind::ResourceBusy, message);
    StorageError::new(Operation::Lock, name, source)
}
