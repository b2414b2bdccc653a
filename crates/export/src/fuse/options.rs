//! Options of a mounted file.

use super::channel::MAX_WRITE;

/// Maximum number of requests in flight per thread.
pub(super) const MOST_REQUESTS: usize = 256;

/// Which other users may access the file, as far as its permissions allow; QEMU's `FuseExportAllowOther`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AllowOther {
    /// Only the user who mounts it, not even root.
    Off,
    /// Everyone.
    On,
    /// Everyone if the system permits it, otherwise only the user who mounts it.
    #[default]
    Auto,
}

/// Options of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Whether it is writable, provided that the disk is.
    pub writable: bool,
    /// Whether writes past its end, `truncate` and `fallocate` grow the disk.
    pub growable: bool,
    /// Who else may use it.
    pub allow_other: AllowOther,
    /// How many requests may be in flight on each thread; further ones wait in the kernel. For each, a thread takes up
    /// to 2 MiB, and keeps up to 1 MiB of free buffers for reads, 16 MiB at most.
    pub requests: usize,
}

impl Default for Options {
    /// Read-only, for whom the system permits it, 256 requests.
    fn default() -> Self {
        let allow_other = AllowOther::default();
        Self { writable: false, growable: false, allow_other, requests: MOST_REQUESTS }
    }
}

impl Options {
    /// Bytes that a thread takes, rounded up.
    pub(super) const fn memory(requests: usize) -> usize {
        // A message and a buffer for reading, and a free buffer.
        requests * (3 * MAX_WRITE + (64 << 10))
    }
}
