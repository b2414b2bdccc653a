//! Locks of images, as QEMU takes them.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;

/// Whether somebody keeps writers out of an image that exists. The look itself keeps nobody out.
pub(crate) fn denies_writing(image: &Path) -> bool {
    /// The last lock that a user takes: it denies changes of the size.
    const LAST: i64 = 203;
    let Ok(file) = File::open(image) else { return false };
    // SAFETY: a description of zeroes is valid.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    (lock.l_type, lock.l_whence) = (libc::F_WRLCK as i16, libc::SEEK_SET as i16);
    (lock.l_start, lock.l_len) = (LAST, 1);
    // SAFETY: the kernel reads and writes the description, which is live.
    let asked = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
    assert_eq!(asked, 0, "locks can be looked at");
    i32::from(lock.l_type) != libc::F_UNLCK
}
