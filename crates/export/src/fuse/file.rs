//! The one file of an export, as `stat` shows it.

use super::wire::{Attr, ROOT, SetattrIn, StatfsOut, set};
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The unit of disk sizes. The size of a growing file is rounded up to it.
pub(super) const SECTOR: u64 = 512;
/// The reported optimal alignment of requests. It is not the disk's own, since the kernel expects at most a page.
const BLOCK: u32 = 4096;
/// The permission bits that `chmod` may set.
const PERMISSIONS: u32 = 0o777;
/// The permission bits that allow writing.
const WRITABLE: u32 = 0o222;

/// The file's attributes other than its size.
pub(super) struct Inode {
    read_only: bool,
    state: Mutex<Attributes>,
    /// Whether anything was written since `state.modified`.
    changed: AtomicBool,
}

#[derive(Clone, Copy)]
struct Attributes {
    mode: u32,
    uid: u32,
    gid: u32,
    accessed: Duration,
    modified: Duration,
    changed: Duration,
}

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

impl Inode {
    /// A file that belongs to this process's user and group, and that only its owner may use.
    pub(super) fn new(read_only: bool) -> Self {
        // SAFETY: these calls cannot fail.
        let (uid, gid) = unsafe { (libc::geteuid(), libc::getegid()) };
        let now = now();
        let mode = if read_only { 0o400 } else { 0o600 };
        let state = Attributes { mode, uid, gid, accessed: now, modified: now, changed: now };
        Self { read_only, state: Mutex::new(state), changed: AtomicBool::new(false) }
    }

    /// Marks the contents as changed.
    pub(super) fn touch(&self) {
        if !self.changed.load(Ordering::Relaxed) {
            self.changed.store(true, Ordering::Relaxed);
        }
    }

    /// What `stat` shows for a disk of `size` bytes.
    pub(super) fn attributes(&self, size: u64) -> Attr {
        let mut state = self.state.lock();
        if self.changed.swap(false, Ordering::Relaxed) {
            state.modified = now();
            state.changed = state.modified;
        }
        Attr {
            ino: ROOT,
            size,
            blocks: blocks(size),
            atime: state.accessed.as_secs(),
            mtime: state.modified.as_secs(),
            ctime: state.changed.as_secs(),
            atimensec: state.accessed.subsec_nanos(),
            mtimensec: state.modified.subsec_nanos(),
            ctimensec: state.changed.subsec_nanos(),
            mode: libc::S_IFREG | state.mode,
            nlink: 1,
            uid: state.uid,
            gid: state.gid,
            rdev: 0,
            blksize: BLOCK,
            flags: 0,
        }
    }

    /// Sets the owner and the permissions from `wanted`; the times in it are ignored.
    ///
    /// # Errors
    /// `EROFS` for write permission on a read-only file.
    pub(super) fn change(&self, wanted: &SetattrIn) -> Result<(), i32> {
        let mut state = self.state.lock();
        if wanted.valid & set::MODE != 0 {
            if self.read_only && wanted.mode & WRITABLE != 0 {
                return Err(libc::EROFS);
            }
            state.mode = wanted.mode & PERMISSIONS;
        }
        if wanted.valid & set::UID != 0 {
            state.uid = wanted.uid;
        }
        if wanted.valid & set::GID != 0 {
            state.gid = wanted.gid;
        }
        if wanted.valid & (set::MODE | set::UID | set::GID) != 0 {
            state.changed = now();
        }
        Ok(())
    }
}

/// The number of 512-byte blocks that the file is reported to occupy. The actual number cannot be determined without
/// examining the whole disk. One block less than the size makes `cp` and `tar` query the holes, which are reported
/// exactly; with 0, they would assume that the whole file is a hole.
fn blocks(size: u64) -> u64 {
    match size / SECTOR {
        0 => u64::from(size > 0),
        1 => 1,
        sectors => sectors - 1,
    }
}

/// What `statfs` shows for a disk of `size` bytes: a full file system.
pub(super) fn statfs(size: u64) -> StatfsOut {
    StatfsOut {
        blocks: size.div_ceil(u64::from(BLOCK)),
        files: 1,
        bsize: BLOCK,
        frsize: BLOCK,
        namelen: 255,
        ..StatfsOut::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromZeros;

    #[test]
    fn a_change_shows_in_the_times_once() {
        let inode = Inode::new(false);
        let time = |attr: Attr| (attr.mtime, attr.mtimensec);
        let first = time(inode.attributes(0));
        assert_eq!(time(inode.attributes(0)), first);
        inode.touch();
        let second = time(inode.attributes(0));
        assert!(second > first);
        assert_eq!(time(inode.attributes(0)), second);
    }

    #[test]
    fn nobody_is_promised_what_is_read_only() {
        let inode = Inode::new(true);
        let mut wanted = SetattrIn::new_zeroed();
        wanted.valid = set::MODE | set::UID;
        (wanted.mode, wanted.uid) = (0o4444, 7);
        assert_eq!(inode.change(&wanted), Ok(()));
        wanted.mode = 0o644;
        assert_eq!(inode.change(&wanted), Err(libc::EROFS));
        let attr = inode.attributes(4096);
        assert_eq!((attr.mode, attr.uid), (libc::S_IFREG | 0o444, 7));
    }

    #[test]
    fn space_is_never_none_for_a_file_with_content() {
        assert_eq!([0, 1, 512, 1024, 1 << 20].map(blocks), [0, 1, 1, 1, 2047]);
    }
}
