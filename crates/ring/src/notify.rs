//! Adding to an eventfd of another program without ever waiting.

use io_uring::{IoUring, opcode};
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// Adds to the count of an eventfd that somebody else may change at any time.
///
/// `write` waits while the count is at its maximum, unless the file is non-blocking; but whoever shares the file may
/// clear that flag between any check and the write. Here the kernel adds to the count as it does for completions: a
/// ring of one entry has the eventfd registered, and completes an operation that does nothing. That never waits; at
/// its maximum, the count stays there.
pub struct Notify {
    ring: IoUring,
    /// Closed after the ring.
    eventfd: OwnedFd,
}

impl Notify {
    /// Takes an eventfd over.
    ///
    /// # Errors
    /// `EINVAL` if it is another kind of file; a lack of descriptors or memory.
    pub fn new(eventfd: OwnedFd) -> io::Result<Self> {
        let ring = IoUring::new(1)?;
        ring.submitter().register_eventfd(eventfd.as_raw_fd())?;
        Ok(Self { ring, eventfd })
    }

    /// Uses another eventfd from now on. A ring takes the kernel longer to end than to make; here none ends.
    ///
    /// # Errors
    /// As [`new`](Self::new); no eventfd is used then.
    pub fn replace(&mut self, eventfd: OwnedFd) -> io::Result<()> {
        let submitter = self.ring.submitter();
        submitter.unregister_eventfd()?;
        submitter.register_eventfd(eventfd.as_raw_fd())?;
        self.eventfd = eventfd;
        Ok(())
    }

    /// Adds 1 to the count, unless it is at its maximum.
    ///
    /// # Errors
    /// The kernel is short of memory.
    pub fn notify(&mut self) -> io::Result<()> {
        // SAFETY: the operation refers to no memory.
        let queued = unsafe { self.ring.submission().push(&opcode::Nop::new().build()) };
        // An entry that an earlier, failed call left there notifies as well.
        drop(queued);
        self.ring.submit()?;
        self.ring.completion().for_each(drop);
        Ok(())
    }
}

impl fmt::Debug for Notify {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Notify").field("eventfd", &self.eventfd).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Read, Write};
    use std::os::fd::FromRawFd;

    fn eventfd(flags: i32) -> File {
        // SAFETY: a plain system call, and the descriptor is new.
        unsafe {
            let fd = libc::eventfd(0, libc::EFD_CLOEXEC | flags);
            assert!(fd >= 0);
            File::from_raw_fd(fd)
        }
    }

    fn count(mut file: &File) -> u64 {
        let mut count = [0; 8];
        file.read_exact(&mut count).unwrap();
        u64::from_ne_bytes(count)
    }

    #[test]
    fn every_call_adds_one_and_none_waits() {
        let file = eventfd(0);
        let mut notify = Notify::new(file.try_clone().unwrap().into()).unwrap();
        for _ in 0..100 {
            notify.notify().unwrap();
        }
        assert_eq!(count(&file), 100);
        (&file).write_all(&(u64::MAX - 1).to_ne_bytes()).unwrap();
        notify.notify().unwrap();
        notify.notify().unwrap();
        assert!(count(&file) >= u64::MAX - 1);
        notify.notify().unwrap();
        assert_eq!(count(&file), 1);
    }

    #[test]
    fn an_eventfd_that_is_replaced_is_left_alone() {
        let (old, new) = (eventfd(libc::EFD_NONBLOCK), eventfd(0));
        let mut notify = Notify::new(old.try_clone().unwrap().into()).unwrap();
        for _ in 0..100 {
            notify.replace(old.try_clone().unwrap().into()).unwrap();
            notify.replace(new.try_clone().unwrap().into()).unwrap();
            notify.notify().unwrap();
        }
        assert_eq!(count(&new), 100);
        assert!((&old).read(&mut [0; 8]).is_err(), "its count is 0");
    }

    #[test]
    fn other_files_are_refused() {
        assert!(Notify::new(File::open("/dev/zero").unwrap().into()).is_err());
        let mut notify = Notify::new(eventfd(0).into()).unwrap();
        assert!(notify.replace(File::open("/dev/zero").unwrap().into()).is_err());
        notify.notify().unwrap();
    }
}
