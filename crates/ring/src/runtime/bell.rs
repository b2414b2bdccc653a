//! Wakes an executor that waits in the kernel.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

static ONE: u64 = 1;

/// An eventfd that an executor awaits whenever it waits.
pub(super) struct Bell {
    eventfd: OwnedFd,
    /// Under loom, no thread may wait in the kernel; threads wait for this instead.
    #[cfg(loom)]
    rung: (loom::sync::Mutex<bool>, loom::sync::Condvar),
}

impl Bell {
    pub(super) fn new() -> io::Result<Self> {
        // SAFETY: a plain system call.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(Self {
            // SAFETY: the descriptor was just created and has no other owner.
            eventfd: unsafe { OwnedFd::from_raw_fd(fd) },
            #[cfg(loom)]
            rung: (loom::sync::Mutex::new(false), loom::sync::Condvar::new()),
        })
    }

    /// Ends the executor's current or next wait. May be called from any thread.
    pub(super) fn ring(&self) {
        // A full counter (EAGAIN) wakes the reader as well, so the result does not matter. SAFETY: the eventfd is open,
        // and 8 bytes are read from a live value.
        unsafe { libc::write(self.eventfd.as_raw_fd(), (&raw const ONE).cast(), 8) };
        #[cfg(loom)]
        {
            *self.rung.0.lock().unwrap() = true;
            self.rung.1.notify_one();
        }
    }

    /// The descriptor to read.
    pub(super) fn descriptor(&self) -> i32 {
        self.eventfd.as_raw_fd()
    }

    /// Waits until the eventfd is readable.
    #[cfg(loom)]
    pub(super) fn wait(&self) {
        let (rung, changed) = &self.rung;
        let mut rung = rung.lock().unwrap();
        while !*rung {
            rung = changed.wait(rung).unwrap();
        }
        *rung = false;
    }
}
