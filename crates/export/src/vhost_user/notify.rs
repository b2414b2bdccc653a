//! The eventfds with which the two sides wake each other.

use isobath_ring::Notify;
use parking_lot::Mutex;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// Fails unless a descriptor from a client is an eventfd: other files could block, or be ready forever. Without
/// `/proc`, the descriptor is trusted.
pub(crate) fn check_eventfd(file: &OwnedFd) -> io::Result<()> {
    match fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())) {
        Ok(name) if name.as_os_str() != "anon_inode:[eventfd]" => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("{} is not an eventfd", name.display()),
        )),
        _ => Ok(()),
    }
}

/// A client's eventfd that interrupts a guest. It may be replaced while in use.
#[derive(Default)]
pub(crate) struct Notifier {
    target: Mutex<Option<Notify>>,
}

impl Notifier {
    /// Uses another eventfd from now on, or none.
    ///
    /// # Errors
    /// It is not an eventfd; a lack of descriptors or memory.
    pub(crate) fn set(&self, file: Option<OwnedFd>) -> io::Result<()> {
        let mut target = self.target.lock();
        *target = match (target.take(), file) {
            (_, None) => None,
            (None, Some(file)) => Some(Notify::new(file)?),
            (Some(mut notify), Some(file)) => {
                notify.replace(file)?;
                Some(notify)
            }
        };
        Ok(())
    }

    /// Adds 1 to the count, unless it is at its maximum: the other side has then been notified often enough. Never
    /// waits, whatever the client does to its eventfd.
    pub(crate) fn notify(&self) {
        if let Some(target) = &mut *self.target.lock()
            && let Err(error) = target.notify()
        {
            tracing::warn!(%error, "cannot notify a guest");
        }
    }
}
