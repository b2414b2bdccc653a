//! Immediate reads of cached data by a system call, which costs half as much as going through the ring.

use super::sys;
use isobath_ring::Attempts;
use isobath_storage::IoBuf;
use std::os::fd::OwnedFd;

/// Whether it is worth trying the page cache first.
#[derive(Default)]
pub(super) struct Cached {
    attempts: Attempts,
}

impl Cached {
    /// Reads the cached part of the range, from its start on; returns its length. A length less than the buffer's says
    /// nothing about the end of the file.
    pub(super) fn read(&self, file: &OwnedFd, offset: u64, buf: &mut IoBuf) -> usize {
        // Without a limit, a task that never waits would starve all others.
        if !self.attempts.is_due() || !isobath_ring::may_go_on(buf.len()) {
            return 0;
        }
        match sys::pread_cached(file, buf, offset) {
            Ok(count) if count > 0 => {
                self.attempts.succeeded();
                count
            }
            // The file system does not support it.
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                self.attempts.give_up();
                0
            }
            // Not cached, past the end, or an error that the ring will report.
            Ok(_) | Err(_) => {
                self.attempts.failed();
                0
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn what_is_cached_is_read_at_once_and_the_end_is_not_judged() {
        let mut file = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        file.write_all(&[7; 6000]).unwrap();
        let file = OwnedFd::from(file);
        let cached = Cached::default();
        let mut buf = IoBuf::zeroed(4096);
        assert_eq!(cached.read(&file, 0, &mut buf), 4096);
        assert_eq!(&*buf, &[7; 4096]);
        assert_eq!(cached.read(&file, 4096, &mut buf), 6000 - 4096);
        assert_eq!(cached.read(&file, 8192, &mut buf), 0);
        // The next attempt is skipped, the one after it is not.
        assert_eq!(cached.read(&file, 0, &mut buf), 0);
        assert_eq!(cached.read(&file, 0, &mut buf), 4096);
        assert_eq!(cached.read(&file, 0, &mut buf), 4096);
    }

    #[test]
    fn where_it_is_not_supported_nobody_asks_again() {
        let file = OwnedFd::from(std::fs::File::open("/proc/self/status").unwrap());
        let cached = Cached::default();
        let mut buf = IoBuf::zeroed(512);
        assert_eq!(cached.read(&file, 0, &mut buf), 0);
        assert!(!(0..1000).any(|_| cached.attempts.is_due()));
    }
}
