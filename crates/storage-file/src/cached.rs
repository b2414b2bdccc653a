//! Immediate reads of cached data by a system call, which costs half as much as going through the ring.

use super::sys;
use isobath_storage::IoBuf;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};

/// The number of consecutive failures after which attempts become no rarer: one read in 64.
const RAREST: u32 = 6;
/// The file system does not support it.
const NEVER: u32 = u32::MAX;

/// Whether it is worth trying the page cache first. Threads may see each other's changes late, since this is only a
/// heuristic.
#[derive(Default)]
pub(super) struct Cached {
    /// Consecutive attempts that found nothing.
    failures: AtomicU32,
    /// Reads until the next attempt.
    skip: AtomicU32,
}

impl Cached {
    /// Reads the cached part of the range, from its start on; returns its length. A length less than the buffer's says
    /// nothing about the end of the file.
    pub(super) fn read(&self, file: &OwnedFd, offset: u64, buf: &mut IoBuf) -> usize {
        let failures = self.failures.load(Ordering::Relaxed);
        if failures > 0 {
            let skip = self.skip.load(Ordering::Relaxed);
            if failures == NEVER {
                return 0;
            }
            if skip > 0 {
                self.skip.store(skip - 1, Ordering::Relaxed);
                return 0;
            }
        }
        // Otherwise a task that never waits would starve all others.
        if !isobath_ring::may_go_on(buf.len()) {
            return 0;
        }
        match sys::pread_cached(file, buf, offset) {
            Ok(count) if count > 0 => {
                if failures > 0 {
                    self.failures.store(0, Ordering::Relaxed);
                }
                count
            }
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                self.failures.store(NEVER, Ordering::Relaxed);
                0
            }
            // Not cached, past the end, or an error that the ring will report.
            Ok(_) | Err(_) => {
                let failures = (failures + 1).min(RAREST);
                self.skip.store((1 << failures) - 1, Ordering::Relaxed);
                self.failures.store(failures, Ordering::Relaxed);
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
    fn who_finds_nothing_asks_ever_less_often() {
        let file = OwnedFd::from(tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap());
        let cached = Cached::default();
        let mut buf = IoBuf::zeroed(512);
        let mut attempts = 0;
        for _ in 0..1000 {
            let before = cached.skip.load(Ordering::Relaxed);
            assert_eq!(cached.read(&file, 0, &mut buf), 0);
            attempts += u32::from(cached.skip.load(Ordering::Relaxed) > before);
        }
        assert!((15..30).contains(&attempts), "{attempts} attempts");
    }

    #[test]
    fn where_it_is_not_supported_nobody_asks_again() {
        let file = OwnedFd::from(std::fs::File::open("/proc/self/status").unwrap());
        let cached = Cached::default();
        let mut buf = IoBuf::zeroed(512);
        assert_eq!(cached.read(&file, 0, &mut buf), 0);
        assert_eq!(cached.failures.load(Ordering::Relaxed), NEVER);
    }
}
