//! Writes into the page cache by the thread that wants them. On ext4 a write through the ring is made by a thread of
//! the kernel, which costs more than the write.

use super::disks::is_on_disks;
use super::sys;
use isobath_ring::{Attempts, Brief, may_go_on};
use std::io;
use std::os::fd::OwnedFd;

/// The longest write that is made at once, in bytes. A longer one is better made by another thread, while this one goes
/// on.
const MOST: usize = 64 << 10;

/// Which files are written to at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WriteAtOnce {
    /// None.
    #[default]
    Never,
    /// Those that are on disks alone. For a program that serves disks, of which this machine's kernel may make a device
    /// (NBD, ublk, a loop device on a FUSE file) with a file system that has images in turn: a write to one of these
    /// may wait for what only the thread itself can do.
    OnDisks,
    /// All. For a program that serves no disk to the machine that it runs on.
    Anywhere,
}

/// How a file is written to at once. Each looks into the page cache first.
enum Way {
    /// By calls that fail where they would have to wait.
    NeverWaits(Attempts),
    /// By calls that may wait, for the journal or because too much is not yet written back: of whole pages, which need
    /// not be read before.
    HardlyWaits,
    /// It is not.
    None,
}

/// Whether, and how, a file is written to at once.
pub(super) struct AtOnce(Way);

impl AtOnce {
    /// How a regular file is, if `files` are.
    pub(super) fn of(file: &OwnedFd, files: WriteAtOnce) -> Self {
        let found = sys::file_system(file);
        let never_waits = || Way::NeverWaits(Attempts::default());
        Self(match (files, found) {
            (WriteAtOnce::OnDisks | WriteAtOnce::Anywhere, Ok(sys::XFS)) => never_waits(),
            (WriteAtOnce::Anywhere, Ok(sys::EXT)) => Way::HardlyWaits,
            (WriteAtOnce::OnDisks, Ok(sys::EXT)) => match sys::stat(file) {
                Ok(stat) if is_on_disks(stat.st_dev) => Way::HardlyWaits,
                _ => Way::None,
            },
            _ => Way::None,
        })
    }

    /// Writes a part of the buffer, from its start on; returns its length. The rest is for the ring, which reports
    /// errors as well.
    pub(super) fn write(&self, file: &OwnedFd, buf: &[u8], offset: u64) -> usize {
        let vector = libc::iovec { iov_base: buf.as_ptr().cast_mut().cast(), iov_len: buf.len() };
        // SAFETY: the vector describes the buffer.
        unsafe { self.write_vectored(file, &[vector], offset) }
    }

    /// The same for several buffers, one after another.
    ///
    /// # Safety
    /// The vectors must describe readable memory.
    pub(super) unsafe fn write_vectored(
        &self,
        file: &OwnedFd,
        vectors: &[libc::iovec],
        offset: u64,
    ) -> usize {
        let length = vectors.iter().map(|vector| vector.iov_len).sum();
        // SAFETY: passed on to the caller.
        self.write_by(length, offset, |waits| unsafe {
            if waits {
                sys::pwritev(file, vectors, offset)
            } else {
                sys::pwritev_cached(file, vectors, offset)
            }
        })
    }

    fn write_by(
        &self,
        length: usize,
        offset: u64,
        write: impl FnOnce(bool) -> io::Result<usize>,
    ) -> usize {
        if length > MOST {
            return 0;
        }
        match &self.0 {
            Way::NeverWaits(attempts) => {
                if !attempts.is_due() || !may_go_on(length) {
                    return 0;
                }
                match write(false) {
                    Ok(count) if count > 0 => {
                        attempts.succeeded();
                        count
                    }
                    Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                        attempts.give_up();
                        0
                    }
                    Ok(_) | Err(_) => {
                        attempts.failed();
                        0
                    }
                }
            }
            Way::HardlyWaits => {
                let page = sys::page_size();
                if !length.is_multiple_of(page) || !offset.is_multiple_of(page as u64) {
                    return 0;
                }
                match Brief::begin(length) {
                    Some(_brief) => write(true).unwrap_or(0),
                    None => 0,
                }
            }
            Way::None => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    /// How many of so many writes are tried, each of which ends so, and what the last one gives.
    fn tried(
        at_once: &AtOnce,
        writes: usize,
        result: impl Fn() -> io::Result<usize>,
    ) -> (usize, usize) {
        let (calls, mut last) = (Cell::new(0), 0);
        for _ in 0..writes {
            last = at_once.write_by(4096, 0, |_| {
                calls.set(calls.get() + 1);
                result()
            });
        }
        (calls.get(), last)
    }

    #[test]
    fn calls_that_would_wait_become_rare_and_what_is_not_supported_is_tried_once() {
        let often = AtOnce(Way::NeverWaits(Attempts::default()));
        assert_eq!(tried(&often, 100, || Ok(4096)), (100, 4096));
        let error = |number| move || Err(io::Error::from_raw_os_error(number));
        let (calls, last) = tried(&often, 1000, error(libc::EAGAIN));
        assert!((10..30).contains(&calls), "{calls}");
        assert_eq!(last, 0);
        let unsupported = AtOnce(Way::NeverWaits(Attempts::default()));
        assert_eq!(tried(&unsupported, 1000, error(libc::EOPNOTSUPP)), (1, 0));
        assert_eq!(tried(&AtOnce(Way::None), 1000, || Ok(4096)), (0, 0));
    }

    #[test]
    fn what_a_call_leaves_or_fails_at_is_for_the_ring() {
        let at_once = AtOnce(Way::HardlyWaits);
        assert_eq!(tried(&at_once, 1, || Ok(512)), (1, 512));
        assert_eq!(tried(&at_once, 1, || Err(io::ErrorKind::StorageFull.into())), (1, 0));
    }
}
