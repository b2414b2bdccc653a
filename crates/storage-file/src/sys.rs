//! The system calls, with errors as results.

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

const BLKSSZGET: libc::Ioctl = 0x1268;
const BLKDISCARD: libc::Ioctl = 0x1277;
const BLKGETSIZE64: libc::Ioctl = 0x8008_1272_u32 as libc::Ioctl;

/// ext2, ext3 and ext4, by the number in `statfs(2)`.
pub(super) const EXT: u64 = 0xEF53;
/// XFS.
pub(super) const XFS: u64 = 0x5846_5342;
/// Btrfs.
pub(super) const BTRFS: u64 = 0x9123_683E;

const FICLONERANGE: libc::Ioctl = 0x4020_940D;

const FS_IOC_FSGETXATTR: libc::Ioctl = 0x801C_581F_u32 as libc::Ioctl;
const FS_IOC_FSSETXATTR: libc::Ioctl = 0x401C_5820_u32 as libc::Ioctl;
const FS_XFLAG_REALTIME: u32 = 1;
const FS_XFLAG_EXTSIZE: u32 = 0x800;
const FS_IOC_GETFLAGS: libc::Ioctl = 0x8008_6601_u32 as libc::Ioctl;
const FS_IOC_SETFLAGS: libc::Ioctl = 0x4008_6602_u32 as libc::Ioctl;
const FS_NOCOW_FL: libc::c_int = 0x0080_0000;

/// `struct fsxattr`.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    flags: u32,
    extent_size: u32,
    _rest: [u32; 5],
}

/// `struct file_clone_range`.
#[repr(C)]
struct CloneRange {
    src_fd: i64,
    src_offset: u64,
    src_length: u64,
    dest_offset: u64,
}

/// Where an open file is.
pub(super) fn path_of(file: &OwnedFd) -> io::Result<PathBuf> {
    if stat(file)?.st_nlink == 0 {
        return Err(io::Error::new(io::ErrorKind::NotFound, "it was deleted"));
    }
    std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

fn count(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

fn done(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn signed(value: u64) -> io::Result<i64> {
    i64::try_from(value).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

pub(super) fn pread(file: &OwnedFd, buf: &mut [u8], offset: u64) -> io::Result<usize> {
    let offset = signed(offset)?;
    // SAFETY: the buffer is writable for its length.
    count(unsafe { libc::pread(file.as_raw_fd(), buf.as_mut_ptr().cast(), buf.len(), offset) })
}

/// Reads cached data without waiting: less than the buffer's length if no more is cached.
pub(super) fn pread_cached(file: &OwnedFd, buf: &mut [u8], offset: u64) -> io::Result<usize> {
    let offset = signed(offset)?;
    let vector = libc::iovec { iov_base: buf.as_mut_ptr().cast(), iov_len: buf.len() };
    // SAFETY: the vector describes the buffer, which is writable for its length.
    count(unsafe {
        libc::preadv2(file.as_raw_fd(), &raw const vector, 1, offset, libc::RWF_NOWAIT)
    })
}

/// The smallest size of a page of memory.
pub(super) const LEAST_PAGE: usize = 4096;

/// Sets the lowest bit of a byte for each page of a mapped range that is in the page cache, and clears that of others.
///
/// # Errors
/// There are fewer bytes than pages, or the kernel refuses it.
///
/// # Safety
/// The range is part of a mapping and begins with a page.
pub(super) unsafe fn find_in_memory(
    start: NonNull<u8>,
    length: usize,
    found: &mut [u8],
) -> io::Result<()> {
    if length.div_ceil(page_size()) > found.len() {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    // SAFETY: there is a byte for each page; the mapping is the caller's business.
    done(unsafe { libc::mincore(start.as_ptr().cast(), length, found.as_mut_ptr()) })
}

/// Whether this process may write to a file, also by other descriptors.
pub(super) fn may_write(file: &OwnedFd) -> bool {
    let flags = libc::AT_EMPTY_PATH | libc::AT_EACCESS;
    // SAFETY: the name is a string that ends with a zero byte.
    unsafe { libc::faccessat(file.as_raw_fd(), c"".as_ptr(), libc::W_OK, flags) == 0 }
}

/// Bytes of a page of memory.
pub(super) fn page_size() -> usize {
    // SAFETY: the call has no preconditions.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(LEAST_PAGE)
}

/// Maps a part of a file for reading, which may reach beyond its end.
pub(super) fn map_to_read(file: &OwnedFd, offset: u64, length: usize) -> io::Result<NonNull<u8>> {
    let (offset, none) = (signed(offset)?, std::ptr::null_mut());
    let fd = file.as_raw_fd();
    // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
    let start = unsafe { libc::mmap(none, length, libc::PROT_READ, libc::MAP_SHARED, fd, offset) };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(start.cast()).ok_or_else(|| io::Error::other("the file was mapped at address 0"))
}

/// # Safety
/// It was mapped by [`map_to_read`], and nobody uses it any more.
pub(super) unsafe fn unmap(start: NonNull<u8>, length: usize) {
    // SAFETY: passed on to the caller.
    unsafe { libc::munmap(start.as_ptr().cast(), length) };
}

/// How often this thread has waited for a page that was not in memory; `None` if the system does not say.
pub(super) fn waits_for_pages() -> Option<i64> {
    let mut usage = MaybeUninit::<libc::rusage>::uninit();
    // SAFETY: the call fills `usage` if it succeeds.
    unsafe {
        let known = libc::getrusage(libc::RUSAGE_THREAD, usage.as_mut_ptr()) == 0;
        known.then(|| usage.assume_init().ru_majflt)
    }
}

/// Whether the process's address space is limited.
pub(super) fn has_limited_address_space() -> bool {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: there is room for the answer.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_AS, &raw mut limit) } == 0;
    !known || limit.rlim_cur != libc::RLIM_INFINITY
}

/// The longest file that the process may write, in bytes (`RLIMIT_FSIZE`). Beyond, the kernel sends a signal that ends
/// the process unless it is ignored.
pub(super) fn longest_file() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: there is room for the answer.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) } == 0;
    if known { limit.rlim_cur } else { 0 }
}

pub(super) fn pwrite(file: &OwnedFd, buf: &[u8], offset: u64) -> io::Result<usize> {
    let offset = signed(offset)?;
    // SAFETY: the buffer is readable for its length.
    count(unsafe { libc::pwrite(file.as_raw_fd(), buf.as_ptr().cast(), buf.len(), offset) })
}

/// # Safety
/// The vectors must describe readable memory.
pub(super) unsafe fn pwritev(
    file: &OwnedFd,
    vectors: &[libc::iovec],
    offset: u64,
) -> io::Result<usize> {
    let (offset, length) = (signed(offset)?, vectors.len() as libc::c_int);
    // SAFETY: passed on to the caller.
    count(unsafe { libc::pwritev(file.as_raw_fd(), vectors.as_ptr(), length, offset) })
}

/// Writes into the page cache without waiting: `EAGAIN` where that is not possible.
///
/// # Safety
/// The vectors must describe readable memory.
pub(super) unsafe fn pwritev_cached(
    file: &OwnedFd,
    vectors: &[libc::iovec],
    offset: u64,
) -> io::Result<usize> {
    let (offset, length) = (signed(offset)?, vectors.len() as libc::c_int);
    let flags = libc::RWF_NOWAIT;
    // SAFETY: passed on to the caller.
    count(unsafe { libc::pwritev2(file.as_raw_fd(), vectors.as_ptr(), length, offset, flags) })
}

pub(super) fn fdatasync(file: &OwnedFd) -> io::Result<()> {
    // SAFETY: a plain system call.
    done(unsafe { libc::fdatasync(file.as_raw_fd()) })
}

pub(super) fn fsync(file: &OwnedFd) -> io::Result<()> {
    // SAFETY: a plain system call.
    done(unsafe { libc::fsync(file.as_raw_fd()) })
}

pub(super) fn fallocate(file: &OwnedFd, mode: i32, offset: u64, length: u64) -> io::Result<()> {
    let (offset, length) = (signed(offset)?, signed(length)?);
    // SAFETY: a plain system call.
    done(unsafe { libc::fallocate(file.as_raw_fd(), mode, offset, length) })
}

/// Only a hint: its failure does not matter.
pub(super) fn advise(file: &OwnedFd, advice: libc::c_int) {
    // SAFETY: the call takes no memory.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, advice) };
}

/// Starts to write all of a file's dirty pages, and waits at most until the disk takes requests. An error of the disk
/// is left to the next sync.
pub(super) fn begin_write_back(file: &OwnedFd) -> io::Result<()> {
    // SAFETY: the call takes no memory.
    done(unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, libc::SYNC_FILE_RANGE_WRITE) })
}

pub(super) fn ftruncate(file: &OwnedFd, length: u64) -> io::Result<()> {
    let length = signed(length)?;
    // SAFETY: a plain system call.
    done(unsafe { libc::ftruncate(file.as_raw_fd(), length) })
}

pub(super) fn stat(file: &OwnedFd) -> io::Result<libc::stat> {
    let mut stat = MaybeUninit::uninit();
    // SAFETY: there is room for the answer, which is complete on success.
    unsafe {
        done(libc::fstat(file.as_raw_fd(), stat.as_mut_ptr()))?;
        Ok(stat.assume_init())
    }
}

/// The number of the kind of file system that holds the file.
pub(super) fn file_system(file: &OwnedFd) -> io::Result<u64> {
    Ok(statfs(file)?.f_type as u64)
}

/// Bytes that users may still take of the file system that holds the file.
pub(super) fn free_space(file: &OwnedFd) -> io::Result<u64> {
    let found = statfs(file)?;
    Ok(found.f_bavail.saturating_mul(found.f_bsize as u64))
}

/// The block size of the file system that holds the file, in bytes.
pub(super) fn block_size(file: &OwnedFd) -> io::Result<u64> {
    Ok(statfs(file)?.f_bsize as u64)
}

/// `FICLONERANGE`: the bytes of `from` become those of `to`, in the same space.
pub(super) fn clone_range(
    from: &OwnedFd,
    from_offset: u64,
    to: &OwnedFd,
    to_offset: u64,
    length: u64,
) -> io::Result<()> {
    let range = CloneRange {
        src_fd: i64::from(from.as_raw_fd()),
        src_offset: from_offset,
        src_length: length,
        dest_offset: to_offset,
    };
    // SAFETY: the kernel reads the description, which is live.
    done(unsafe { libc::ioctl(to.as_raw_fd(), FICLONERANGE, &raw const range) })
}

/// Whether the file system can share space among files. The request used to find out is one that no file system accepts
/// and that would change nothing: a byte within a block, with itself.
pub(super) fn can_clone(file: &OwnedFd) -> bool {
    match clone_range(file, 1, file, 1, 1) {
        Ok(()) => true,
        Err(error) => error.raw_os_error() == Some(libc::EINVAL),
    }
}

/// Whether the file's blocks are on the realtime device of its XFS, not the one that `stat` names.
pub(super) fn is_realtime(file: &OwnedFd) -> io::Result<bool> {
    let mut found = Attributes::default();
    // SAFETY: there is room for the answer.
    done(unsafe { libc::ioctl(file.as_raw_fd(), FS_IOC_FSGETXATTR, &raw mut found) })?;
    Ok(found.flags & FS_XFLAG_REALTIME > 0)
}

/// Makes the file system overwrite an empty file in place (Btrfs).
pub(super) fn set_nocow(file: &OwnedFd) -> io::Result<()> {
    // The kernel uses an int of the long that the request's number speaks of.
    let mut flags: libc::c_int = 0;
    // SAFETY: there is room for the answer, and the kernel reads what is live.
    unsafe {
        done(libc::ioctl(file.as_raw_fd(), FS_IOC_GETFLAGS, &raw mut flags))?;
        flags |= FS_NOCOW_FL;
        done(libc::ioctl(file.as_raw_fd(), FS_IOC_SETFLAGS, &raw const flags))
    }
}

/// Makes the file system allocate a file's space in multiples of this many bytes (XFS); of its own choice with 0.
pub(super) fn set_extent_size(file: &OwnedFd, bytes: u32) -> io::Result<()> {
    let mut attributes = Attributes::default();
    // SAFETY: there is room for the answer, and the kernel reads what is live.
    unsafe {
        done(libc::ioctl(file.as_raw_fd(), FS_IOC_FSGETXATTR, &raw mut attributes))?;
        attributes.extent_size = bytes;
        attributes.flags &= !FS_XFLAG_EXTSIZE;
        if bytes > 0 {
            attributes.flags |= FS_XFLAG_EXTSIZE;
        }
        done(libc::ioctl(file.as_raw_fd(), FS_IOC_FSSETXATTR, &raw const attributes))
    }
}

fn statfs(file: &OwnedFd) -> io::Result<libc::statfs> {
    let mut found = MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: there is room for the answer, which is complete on success.
    unsafe {
        done(libc::fstatfs(file.as_raw_fd(), found.as_mut_ptr()))?;
        Ok(found.assume_init())
    }
}

/// A clock's time in nanoseconds since the epoch; `None` past the year 2262.
pub(super) fn clock(clock: libc::clockid_t) -> Option<i64> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: there is room for the answer.
    done(unsafe { libc::clock_gettime(clock, &raw mut time) }).ok()?;
    nanoseconds(time.tv_sec, time.tv_nsec)
}

/// A kernel time in nanoseconds since the epoch; `None` if it does not fit.
pub(super) fn nanoseconds(seconds: i64, nanoseconds: i64) -> Option<i64> {
    seconds.checked_mul(1_000_000_000)?.checked_add(nanoseconds)
}

/// `lseek` with `SEEK_DATA` or `SEEK_HOLE`; `None` past the last data or the end of the file.
pub(super) fn seek(file: &OwnedFd, offset: u64, whence: libc::c_int) -> io::Result<Option<u64>> {
    let Ok(offset) = i64::try_from(offset) else { return Ok(None) };
    // SAFETY: a plain system call; nobody uses the file's position.
    let found = unsafe { libc::lseek(file.as_raw_fd(), offset, whence) };
    match u64::try_from(found) {
        Ok(found) => Ok(Some(found)),
        Err(_) => match io::Error::last_os_error() {
            error if error.raw_os_error() == Some(libc::ENXIO) => Ok(None),
            error => Err(error),
        },
    }
}

/// Clears `O_NONBLOCK`, which is needed only while opening. Also sets or clears `O_DIRECT`; the other flags that can be
/// changed are not used.
pub(super) fn set_blocking(file: &OwnedFd, direct: bool) -> io::Result<()> {
    let flags = if direct { libc::O_DIRECT } else { 0 };
    // SAFETY: a plain system call.
    done(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags) })
}

/// Sets or tests a lock on `length` bytes (0: to the end); returns whether another user's lock conflicts with the one
/// tested.
pub(super) fn lock(
    file: &OwnedFd,
    command: libc::c_int,
    kind: libc::c_int,
    start: i64,
    length: i64,
) -> io::Result<bool> {
    // SAFETY: a description of zeroes is valid, and open file description locks require the process id to be 0.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = start;
    lock.l_len = length;
    loop {
        // SAFETY: the kernel reads and writes the description, which is live.
        if unsafe { libc::fcntl(file.as_raw_fd(), command, &raw mut lock) } == 0 {
            return Ok(
                command == libc::F_OFD_GETLK && lock.l_type != libc::F_UNLCK as libc::c_short
            );
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// The flags of a descriptor's open file.
pub(super) fn status(file: &OwnedFd) -> io::Result<libc::c_int> {
    // SAFETY: no memory is involved.
    let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
    if flags < 0 { Err(io::Error::last_os_error()) } else { Ok(flags) }
}

/// Clears `O_NONBLOCK` of an open file that others may use, and nothing else.
pub(super) fn clear_nonblocking(file: &OwnedFd) -> io::Result<()> {
    let flags = status(file)?;
    if flags & libc::O_NONBLOCK == 0 {
        return Ok(());
    }
    // SAFETY: a plain system call.
    done(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, flags & !libc::O_NONBLOCK) })
}

/// The length of a block device in bytes.
pub(super) fn device_length(file: &OwnedFd) -> io::Result<u64> {
    let mut length = 0_u64;
    // SAFETY: the kernel writes eight bytes.
    done(unsafe { libc::ioctl(file.as_raw_fd(), BLKGETSIZE64, &raw mut length) })?;
    Ok(length)
}

/// The logical block size of a block device in bytes.
pub(super) fn device_block(file: &OwnedFd) -> io::Result<u32> {
    let mut block: libc::c_int = 0;
    // SAFETY: the kernel writes an int.
    done(unsafe { libc::ioctl(file.as_raw_fd(), BLKSSZGET, &raw mut block) })?;
    u32::try_from(block).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}

/// Discards blocks of a block device.
pub(super) fn device_discard(file: &OwnedFd, offset: u64, length: u64) -> io::Result<()> {
    let range = [offset, length];
    // SAFETY: the kernel reads two 64-bit numbers.
    done(unsafe { libc::ioctl(file.as_raw_fd(), BLKDISCARD, range.as_ptr()) })
}

/// The alignment that `O_DIRECT` requires of memory and of offsets and lengths, in bytes; `None` if the kernel does not
/// report it (before Linux 6.1), zeroes if the file cannot be used that way.
pub(super) fn direct_alignment(file: &OwnedFd) -> Option<(u64, u64)> {
    let mut stat = MaybeUninit::<libc::statx>::zeroed();
    // SAFETY: the path is empty and terminated; there is room for the answer.
    let stat = unsafe {
        let (flags, mask) = (libc::AT_EMPTY_PATH, libc::STATX_DIOALIGN);
        if libc::statx(file.as_raw_fd(), c"".as_ptr(), flags, mask, stat.as_mut_ptr()) < 0 {
            return None;
        }
        stat.assume_init()
    };
    (stat.stx_mask & libc::STATX_DIOALIGN != 0)
        .then(|| (u64::from(stat.stx_dio_mem_align), u64::from(stat.stx_dio_offset_align)))
}

/// The effective user id.
pub(super) fn effective_user() -> u32 {
    // SAFETY: the call takes no memory and cannot fail.
    unsafe { libc::geteuid() }
}

/// A file's pages, shared with everyone who has mapped them.
pub(super) struct Mapping {
    start: NonNull<AtomicU64>,
    length: usize,
}

// SAFETY: the pages are the process's, whatever the thread, and are only used as atomic numbers.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// The first `length` bytes of a file that is open for reading and writing, and has them.
    pub(super) fn of(file: &File, length: usize) -> io::Result<Self> {
        let (access, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_POPULATE);
        // SAFETY: the kernel chooses an unused address range.
        let start =
            unsafe { libc::mmap(std::ptr::null_mut(), length, access, flags, file.as_raw_fd(), 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        match NonNull::new(start.cast::<AtomicU64>()) {
            Some(start) => Ok(Self { start, length }),
            None => Err(io::Error::from_raw_os_error(libc::ENOMEM)),
        }
    }

    pub(super) fn words(&self) -> &[AtomicU64] {
        // SAFETY: the pages are aligned and mapped until the drop, and other mappings of them can do no more than
        // stores to atomics can.
        unsafe {
            std::slice::from_raw_parts(self.start.as_ptr(), self.length / size_of::<AtomicU64>())
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `of`, and nothing refers to it any more.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.length) };
    }
}
