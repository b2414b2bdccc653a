//! System calls: locks of open files, mappings, and what became of writes.

use isobath_buf::guard::{Access, Guard};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU64;
use std::thread;
use std::time::{Duration, Instant};

/// Bytes of a page, in which maps are measured.
pub(super) const PAGE: usize = 4096;

/// The bytes of a file that are locked. The locks belong to the open file, exclude other threads too, and end with the
/// process.
#[derive(Clone, Copy, Debug)]
pub(super) enum Part {
    /// Held by everybody who uses the file: shared; by who removes it: alone.
    Use = 0,
    /// Held alone by who begins to use the file, or removes it.
    Opening = 1,
    /// Held alone by who evicts blocks.
    Evicting = 2,
}

/// How a part is locked.
#[derive(Clone, Copy, Debug)]
pub(super) enum Lock {
    /// By any number of users.
    Shared = libc::F_RDLCK as isize,
    /// By one.
    Alone = libc::F_WRLCK as isize,
    /// Not any more.
    Free = libc::F_UNLCK as isize,
}

/// How long a lock is waited for that others hold for moments only.
const PATIENCE: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(2);

/// Changes a lock, if nobody else's is in the way; whether that was so. A lock that is held changes at once.
///
/// # Errors
/// The file system has no locks.
pub(super) fn try_lock(file: &File, part: Part, lock: Lock) -> io::Result<bool> {
    // SAFETY: all bytes may be zero.
    let mut range: libc::flock = unsafe { std::mem::zeroed() };
    range.l_type = lock as libc::c_short;
    range.l_whence = libc::SEEK_SET as libc::c_short;
    range.l_start = part as libc::off_t;
    range.l_len = 1;
    loop {
        // SAFETY: `range` is a live value.
        let done = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const range) };
        if done == 0 {
            return Ok(true);
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EAGAIN | libc::EACCES) => return Ok(false),
            Some(libc::EINTR) => {}
            _ => return Err(error),
        }
    }
}

/// As [`try_lock`], and waits a little.
///
/// # Errors
/// Another process holds it, or the file system has no locks.
pub(super) fn lock(file: &File, part: Part, lock: Lock) -> io::Result<()> {
    let begin = Instant::now();
    while !try_lock(file, part, lock)? {
        if begin.elapsed() >= PATIENCE {
            return Err(locked());
        }
        thread::sleep(LOOK);
    }
    Ok(())
}

/// As [`try_lock`].
///
/// # Errors
/// Another process or thread holds it, or the file system has no locks.
pub(super) fn lock_at_once(file: &File, part: Part, lock: Lock) -> io::Result<()> {
    if try_lock(file, part, lock)? { Ok(()) } else { Err(locked()) }
}

fn locked() -> io::Error {
    io::Error::new(io::ErrorKind::ResourceBusy, "another process keeps it locked")
}

/// Gives all locks up: a mapping of the file, or a child that was just forked, would keep them.
pub(super) fn unlock(file: &File) {
    for part in [Part::Opening, Part::Use, Part::Evicting] {
        // It does not fail for a lock that was taken, and nothing can be done.
        let _ = try_lock(file, part, Lock::Free);
    }
}

/// Whether data that was written to the file has been lost since it was opened, or since that was last asked: whether
/// the kernel could not write it to the disk. Does not wait for anything.
pub(super) fn has_lost_writes(file: &File, length: u64) -> bool {
    let beyond = length.next_multiple_of(PAGE as u64) as i64;
    // SAFETY: a system call without memory. Nothing is cached beyond the end, so it only looks at errors.
    let done = unsafe {
        libc::sync_file_range(file.as_raw_fd(), beyond, 1, libc::SYNC_FILE_RANGE_WAIT_BEFORE)
    };
    let failed = [libc::EIO, libc::ENOSPC, libc::EDQUOT];
    done != 0 && io::Error::last_os_error().raw_os_error().is_some_and(|e| failed.contains(&e))
}

/// Memory that is unmapped when it is dropped.
#[derive(Debug)]
struct Region {
    start: NonNull<u64>,
    length: usize,
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nobody uses it any more.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.length) };
    }
}

/// Words that processes share: a mapped file, which others may cut short.
#[derive(Debug)]
pub(super) struct Words {
    // Dropped before the memory.
    guard: Guard,
    region: Region,
}

// SAFETY: the memory is accessed through atomics alone.
unsafe impl Send for Words {}
// SAFETY: as above.
unsafe impl Sync for Words {}

impl Words {
    /// Maps the first bytes of a file, or memory of this process alone.
    ///
    /// # Errors
    /// The system has no memory, or the file cannot be mapped.
    pub(super) fn map(file: Option<&File>, length: usize) -> io::Result<Self> {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let (flags, descriptor) = match file {
            Some(file) => (libc::MAP_SHARED, file.as_raw_fd()),
            None => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
        };
        // SAFETY: a new mapping.
        let start = unsafe { libc::mmap(ptr::null_mut(), length, access, flags, descriptor, 0) };
        let Some(start) = NonNull::new(start.cast()).filter(|_| start != libc::MAP_FAILED) else {
            return Err(io::Error::last_os_error());
        };
        let region = Region { start, length };
        Ok(Self { guard: Guard::new(start.cast(), length, PAGE, Access::Write)?, region })
    }

    /// A word.
    ///
    /// # Panics
    /// If the mapping has no such word.
    pub(super) fn get(&self, number: usize) -> &AtomicU64 {
        assert!(number < self.region.length / 8, "word {number} is beyond the mapping");
        // SAFETY: it is within the mapping, aligned, and only accessed so.
        unsafe { AtomicU64::from_ptr(self.region.start.as_ptr().add(number)) }
    }

    /// Whether a part of the file was gone when it was accessed. Words are then no longer shared, and what was loaded
    /// just now may be zeroes.
    pub(super) fn is_lost(&self) -> bool {
        self.guard.is_lost()
    }
}
