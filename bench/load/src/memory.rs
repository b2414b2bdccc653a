//! Memory for requests, which a device in another process can map.

use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;

/// Shared memory in a file without a name, mapped here, on page boundaries.
pub(crate) struct Memory {
    file: OwnedFd,
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: it is a plain range of memory; whoever uses it does so by raw pointers.
unsafe impl Send for Memory {}
// SAFETY: as above; its methods only tell where it is.
unsafe impl Sync for Memory {}

impl Memory {
    /// `length` bytes, all of them in memory, with random content.
    ///
    /// # Errors
    /// There is not so much memory.
    pub(crate) fn random(length: usize, seed: u64) -> io::Result<Self> {
        // SAFETY: the name is a C string, and the descriptor that comes back is nobody else's.
        let file = unsafe {
            let file = libc::memfd_create(c"isobath-load".as_ptr(), libc::MFD_CLOEXEC);
            if file < 0 {
                return Err(io::Error::last_os_error());
            }
            OwnedFd::from_raw_fd(file)
        };
        let signed = i64::try_from(length).map_err(io::Error::other)?;
        // SAFETY: a call with a descriptor and a number.
        if unsafe { libc::ftruncate(file.as_raw_fd(), signed) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let start = unsafe {
            libc::mmap(std::ptr::null_mut(), length, protection, flags, file.as_raw_fd(), 0)
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::other("mapped at 0"))?;
        // SAFETY: the mapping is `length` bytes, and nobody else knows it yet.
        let bytes = unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), length) };
        SmallRng::seed_from_u64(seed).fill_bytes(bytes);
        Ok(Self { file, start, length })
    }

    pub(crate) fn file(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    pub(crate) fn address(&self) -> usize {
        self.start.as_ptr() as usize
    }

    pub(crate) fn len(&self) -> usize {
        self.length
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping is this one's, and whoever was given its address is done with it.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.length) };
    }
}
