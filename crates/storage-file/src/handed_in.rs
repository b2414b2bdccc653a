//! How many descriptors may be handed in.

use super::descriptors::most_handed_in;
use std::fmt;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Those that were handed in and are not in use yet.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// A descriptor that was handed in. All of them together are limited: the process needs others.
#[derive(Debug)]
pub struct HandedIn {
    file: OwnedFd,
    _place: Place,
}

impl HandedIn {
    /// Counts a descriptor until it is [taken](Self::into_file) or closed.
    ///
    /// # Errors
    /// There are too many; it is closed.
    pub fn new(file: OwnedFd) -> Result<Self, TooMany> {
        let most = most_handed_in();
        let more = |count| (count < most).then_some(count + 1);
        match COUNT.fetch_update(Ordering::AcqRel, Ordering::Acquire, more) {
            Ok(_) => Ok(Self { file, _place: Place }),
            Err(_) => Err(TooMany(most)),
        }
    }

    /// The descriptor, which counts no more.
    pub fn into_file(self) -> OwnedFd {
        self.file
    }

    pub(super) fn file(&self) -> &OwnedFd {
        &self.file
    }
}

impl AsRawFd for HandedIn {
    fn as_raw_fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }
}

#[derive(Debug)]
struct Place;

impl Drop for Place {
    fn drop(&mut self) {
        COUNT.fetch_sub(1, Ordering::AcqRel);
    }
}

/// There are too many descriptors that were handed in: this is the most.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooMany(usize);

impl fmt::Display for TooMany {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} file descriptors have been handed in, the most under this limit on open files; close some with \
             remove-fd or closefd",
            self.0
        )
    }
}

impl std::error::Error for TooMany {}
