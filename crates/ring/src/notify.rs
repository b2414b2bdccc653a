//! Adding to an eventfd of another program without ever waiting.

use crate::aio::Aio;
use crate::runtime::{Choice, Io, Refused, choice, explain};
use io_uring::{IoUring, opcode};
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// Adds to the count of an eventfd that somebody else may change at any time.
///
/// `write` waits while the count is at its maximum, unless the file is non-blocking; but whoever shares the file may
/// clear that flag between any check and the write. Here the kernel adds to the count as it does for completions: a
/// ring of one entry has the eventfd registered, and completes an operation that does nothing. Where io_uring is
/// forbidden, the kernel's older interface for asynchronous I/O completes a read of no bytes. That never waits; at its
/// maximum, the count stays there.
pub struct Notify {
    way: Way,
    /// Closed after the ring.
    eventfd: OwnedFd,
}

enum Way {
    Ring(Box<IoUring>),
    Aio(Aio),
}

impl Way {
    fn new(io: Io) -> io::Result<Self> {
        if let Choice::Threads = choice(io)? {
            return Ok(Self::Aio(Aio::new()?));
        }
        match IoUring::new(1).map_err(|error| explain(&error)) {
            Ok(ring) => Ok(Self::Ring(Box::new(ring))),
            // A server that has confined itself sets up no more rings, even if its executors must have theirs.
            Err(Refused::Forbidden(_)) => Ok(Self::Aio(Aio::new()?)),
            Err(refused) => Err(refused.into()),
        }
    }
}

impl Notify {
    /// Takes an eventfd over.
    ///
    /// # Errors
    /// `EINVAL` if it is another kind of file; a lack of descriptors or memory.
    pub fn new(eventfd: OwnedFd) -> io::Result<Self> {
        Self::with(Io::Any, eventfd)
    }

    fn with(io: Io, eventfd: OwnedFd) -> io::Result<Self> {
        let way = Way::new(io)?;
        match &way {
            Way::Ring(ring) => ring.submitter().register_eventfd(eventfd.as_raw_fd())?,
            Way::Aio(aio) => aio.check(eventfd.as_raw_fd())?,
        }
        Ok(Self { way, eventfd })
    }

    /// Uses another eventfd from now on. A ring takes the kernel longer to end than to make; here none ends.
    ///
    /// # Errors
    /// As [`new`](Self::new); no eventfd is used then.
    pub fn replace(&mut self, eventfd: OwnedFd) -> io::Result<()> {
        match &self.way {
            Way::Ring(ring) => {
                ring.submitter().unregister_eventfd()?;
                ring.submitter().register_eventfd(eventfd.as_raw_fd())?;
            }
            Way::Aio(aio) => aio.check(eventfd.as_raw_fd())?,
        }
        self.eventfd = eventfd;
        Ok(())
    }

    /// Adds 1 to the count, unless it is at its maximum.
    ///
    /// # Errors
    /// The kernel is short of memory.
    pub fn notify(&mut self) -> io::Result<()> {
        let ring = match &mut self.way {
            Way::Ring(ring) => ring,
            Way::Aio(aio) => return aio.signal(self.eventfd.as_raw_fd()),
        };
        // SAFETY: the operation refers to no memory.
        let queued = unsafe { ring.submission().push(&opcode::Nop::new().build()) };
        // An entry that an earlier, failed call left there notifies as well.
        drop(queued);
        ring.submit()?;
        ring.completion().for_each(drop);
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

    const WAYS: [Io; 2] = [Io::Ring, Io::Threads];

    fn eventfd(flags: i32) -> File {
        // SAFETY: a plain system call, and the descriptor is new.
        unsafe {
            let fd = libc::eventfd(0, libc::EFD_CLOEXEC | flags);
            assert!(fd >= 0);
            File::from_raw_fd(fd)
        }
    }

    fn notify_of(io: Io, file: &File) -> Notify {
        let notify = Notify::with(io, file.try_clone().unwrap().into()).unwrap();
        assert_eq!(matches!(notify.way, Way::Ring(_)), io == Io::Ring, "no other way is tested");
        notify
    }

    fn count(mut file: &File) -> u64 {
        let mut count = [0; 8];
        file.read_exact(&mut count).unwrap();
        u64::from_ne_bytes(count)
    }

    #[test]
    fn every_call_adds_one_and_none_waits() {
        for way in WAYS {
            let file = eventfd(0);
            let mut notify = notify_of(way, &file);
            // More than there is room for at a time.
            for _ in 0..10_000 {
                notify.notify().unwrap();
            }
            assert_eq!(count(&file), 10_000);
            (&file).write_all(&(u64::MAX - 1).to_ne_bytes()).unwrap();
            notify.notify().unwrap();
            notify.notify().unwrap();
            assert!(count(&file) >= u64::MAX - 1);
            notify.notify().unwrap();
            assert_eq!(count(&file), 1);
        }
    }

    #[test]
    fn an_eventfd_that_is_replaced_is_left_alone() {
        for way in WAYS {
            let (old, new) = (eventfd(libc::EFD_NONBLOCK), eventfd(0));
            let mut notify = notify_of(way, &old);
            // More than there is room for completions.
            for _ in 0..1000 {
                notify.replace(old.try_clone().unwrap().into()).unwrap();
                notify.replace(new.try_clone().unwrap().into()).unwrap();
                notify.notify().unwrap();
            }
            assert_eq!(count(&new), 1000);
            assert!((&old).read(&mut [0; 8]).is_err(), "its count is 0");
        }
    }

    #[test]
    fn other_files_are_refused() {
        for way in WAYS {
            let zero = || File::open("/dev/zero").unwrap().into();
            let refused = Notify::with(way, zero()).unwrap_err();
            assert_eq!(refused.raw_os_error(), Some(libc::EINVAL));
            let mut notify = notify_of(way, &eventfd(0));
            assert!(notify.replace(zero()).is_err());
            notify.notify().unwrap();
        }
    }
}
