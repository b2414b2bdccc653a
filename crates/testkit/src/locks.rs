//! Image locks, as QEMU takes them.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;

/// Whether the image exists and a process keeps writers out of it. The check itself takes no lock.
///
/// # Panics
/// If its file system does not support locks.
pub fn denies_writing(image: &Path) -> bool {
    // The last lock that a process takes: it denies changes of the size.
    is_held(image, 203, 1)
}

/// Whether the image exists and a process may write to it.
///
/// # Panics
/// If its file system does not support locks.
pub fn is_written(image: &Path) -> bool {
    is_held(image, 101, 1)
}

/// Waits until no process uses an image. The kernel releases a killed process's rings, and with them its locks, a
/// moment after the process ends.
///
/// # Panics
/// If it stays in use for longer than [`PATIENCE`](crate::process::PATIENCE).
#[track_caller]
pub fn until_unlocked(image: &Path) {
    crate::until("the end of a killed program's locks", || !is_held(image, 100, 200));
}

fn is_held(image: &Path, first: i64, length: i64) -> bool {
    let Ok(file) = File::open(image) else { return false };
    // SAFETY: an all-zero `flock` is valid.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    (lock.l_type, lock.l_whence) = (libc::F_WRLCK as i16, libc::SEEK_SET as i16);
    (lock.l_start, lock.l_len) = (first, length);
    // SAFETY: the kernel reads and writes `lock`, which is live.
    let asked = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
    assert_eq!(asked, 0, "the lock cannot be queried");
    i32::from(lock.l_type) != libc::F_UNLCK
}
