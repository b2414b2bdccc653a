//! The eventfds with which the two sides wake each other.

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
    target: Mutex<Option<Target>>,
}

struct Target {
    file: OwnedFd,
    /// Whether a write does not block when the count is at its maximum.
    nonblocking: bool,
}

impl Notifier {
    /// Uses another eventfd from now on, or none.
    pub(crate) fn set(&self, file: Option<OwnedFd>) {
        let target = file.map(|file| {
            // SAFETY: a plain system call on an open descriptor.
            let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
            Target { file, nonblocking: flags >= 0 && flags & libc::O_NONBLOCK != 0 }
        });
        *self.target.lock() = target;
    }

    /// Adds 1 to the count, unless it is at its maximum: the other side has then been notified often enough.
    pub(crate) fn notify(&self) {
        let target = self.target.lock();
        let Some(Target { file, nonblocking }) = &*target else { return };
        let mut poll = libc::pollfd { fd: file.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
        // SAFETY: the call reads and writes one valid `pollfd`.
        if !nonblocking && unsafe { libc::poll(&raw mut poll, 1, 0) } != 1 {
            return;
        }
        let one = 1_u64;
        // SAFETY: 8 bytes of a live value.
        unsafe { libc::write(file.as_raw_fd(), (&raw const one).cast(), 8) };
    }
}
