//! When a file was last changed, and whether a later change would be visible.

use super::open::Kind;
use super::pause::pause;
use super::storage::FileStorage;
use super::sys;
use isobath_storage::Stamp;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

/// File systems that only this machine's kernel changes and timestamps, by their numbers in `statfs(2)`. Elsewhere
/// another machine's clock is used, or attributes are cached.
const TIMED: [u64; 11] = [
    sys::EXT,
    sys::XFS,
    sys::BTRFS,
    0x0102_1994, // tmpfs
    0x8584_58F6, // ramfs
    0xF2F5_2010, // F2FS
    0xCA45_1A4E, // bcachefs
    0x2FC1_2FC1, // ZFS
    0x794C_7630, // overlayfs: lower layers may not be changed under it
    0x3153_464A, // JFS
    0xE0F5_E1E2, // EROFS
];

const SECOND: i64 = 1_000_000_000;
const MILLISECOND: i64 = 1_000_000;

/// How far the clock must have advanced since a change: more than a tick, which is at most 10 ms.
const MARGIN: i64 = 20 * MILLISECOND;
/// Like [`MARGIN`], for times stored in whole seconds or in even seconds.
const COARSE_MARGIN: i64 = 2 * SECOND;
/// How long to wait for that.
const PATIENCE: i64 = 50 * MILLISECOND;

/// A file's stamp as it is; `None` if its times are out of range.
pub(super) fn of(stat: &libc::stat) -> Option<Stamp> {
    Some(Stamp {
        length: stat.st_size as u64,
        modified: sys::nanoseconds(stat.st_mtime, stat.st_mtime_nsec)?,
        changed: sys::nanoseconds(stat.st_ctime, stat.st_ctime_nsec)?,
        inode: stat.st_ino,
    })
}

/// Whether later changes differ from a stamp queried at some time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Age {
    /// Every later change gives another stamp.
    Settled,
    /// This will be so after this many nanoseconds, if nothing changes until then.
    Recent(i64),
    /// Waiting would not help.
    Unknown,
}

/// `coarse` is the clock that file systems use, `fine` the precise one, read before the stamp.
fn age(stamp: &Stamp, coarse: i64, fine: i64) -> Age {
    let newest = stamp.modified.max(stamp.changed);
    let whole = stamp.modified % SECOND == 0 && stamp.changed % SECOND == 0;
    let past = coarse.saturating_sub(newest);
    if whole {
        return if past > COARSE_MARGIN { Age::Settled } else { Age::Unknown };
    }
    if past > MARGIN {
        Age::Settled
    } else if newest > fine.saturating_add(MARGIN) {
        // A change between the two calls is not in the future.
        Age::Unknown
    } else {
        Age::Recent(MARGIN - past + MILLISECOND)
    }
}

impl FileStorage {
    fn is_timed(&self, file: &OwnedFd) -> io::Result<bool> {
        if let Some(timed) = self.timed.get() {
            return Ok(*timed);
        }
        let timed = self.kind == Kind::Regular && TIMED.contains(&sys::file_system(file)?);
        Ok(*self.timed.get_or_init(|| timed))
    }

    pub(super) fn present_stamp(&self, file: &OwnedFd) -> io::Result<Option<Stamp>> {
        if !self.is_timed(file)? {
            return Ok(None);
        }
        Ok(of(&sys::stat(file)?))
    }

    pub(super) async fn wait_for_stamp(&self, file: &OwnedFd) -> io::Result<Option<Stamp>> {
        let mut waited = 0;
        loop {
            // The clocks first: a change between the two calls then makes the stamp recent.
            let clocks =
                sys::clock(libc::CLOCK_REALTIME_COARSE).zip(sys::clock(libc::CLOCK_REALTIME));
            let Some((stamp, (coarse, fine))) = self.present_stamp(file)?.zip(clocks) else {
                return Ok(None);
            };
            match age(&stamp, coarse, fine) {
                Age::Settled => return Ok(Some(stamp)),
                Age::Recent(wait) if waited + wait <= PATIENCE => {
                    waited += wait;
                    pause(Duration::from_nanos(wait as u64)).await;
                }
                Age::Recent(_) | Age::Unknown => return Ok(None),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: i64 = 1_700_000_000 * SECOND + 123_456_789;

    fn stamp(modified: i64, changed: i64) -> Stamp {
        Stamp { length: 1, modified, changed, inode: 1 }
    }

    #[test]
    fn only_what_is_past_a_tick_is_settled() {
        let old = NOW - SECOND;
        assert_eq!(age(&stamp(old, old), NOW, NOW), Age::Settled);
        for recent in [stamp(NOW, old), stamp(old, NOW), stamp(NOW - MARGIN, old)] {
            assert!(matches!(age(&recent, NOW, NOW), Age::Recent(_)), "{recent:?}");
        }
        assert_eq!(
            age(&stamp(old, NOW + MILLISECOND), NOW, NOW),
            Age::Recent(MARGIN + 2 * MILLISECOND)
        );
        assert_eq!(age(&stamp(NOW + SECOND, old), NOW, NOW), Age::Unknown);
        assert_eq!(age(&stamp(old, NOW + SECOND), NOW, NOW), Age::Unknown);
    }

    #[test]
    fn whole_seconds_must_be_old() {
        let second = NOW / SECOND * SECOND;
        for age_in_seconds in 0..=1 {
            let time = second - age_in_seconds * SECOND;
            assert_eq!(age(&stamp(time, time), NOW, NOW), Age::Unknown);
        }
        let time = second - 3 * SECOND;
        assert_eq!(age(&stamp(time, time), NOW, NOW), Age::Settled);
        // Only one of them is whole by chance, or because it was set.
        assert_eq!(age(&stamp(second, NOW - MARGIN - 1), NOW, NOW), Age::Settled);
    }
}
