//! Memory for messages: each buffer has address space for the longest one, but pages only for the part that was used.

use isobath_storage::IoBuf;
use std::cell::RefCell;
use std::io;
use std::ptr::{self, NonNull};
use std::sync::Arc;

/// Buffers of which more than this many bytes were used are not kept for reuse...
const SMALL: usize = 64 << 10;
/// ...except for this many of them.
const LARGE: usize = 32;

/// Free buffers of one length.
pub(super) struct Memory {
    length: usize,
    small: RefCell<Vec<IoBuf>>,
    large: RefCell<Vec<IoBuf>>,
}

impl Memory {
    /// For buffers of `length` bytes.
    pub(super) fn new(length: usize) -> Self {
        Self { length, small: RefCell::default(), large: RefCell::default() }
    }

    /// A page-aligned buffer with arbitrary contents.
    ///
    /// # Errors
    /// There is not enough memory.
    pub(super) fn take(&self) -> io::Result<IoBuf> {
        let kept = self.small.borrow_mut().pop().or_else(|| self.large.borrow_mut().pop());
        kept.map_or_else(|| map(self.length), Ok)
    }

    /// Returns a buffer of which the first `used` bytes have been used.
    pub(super) fn put(&self, buf: IoBuf, used: usize) {
        if buf.len() != self.length {
            return;
        }
        if used <= SMALL {
            self.small.borrow_mut().push(buf);
        } else if self.large.borrow().len() < LARGE {
            self.large.borrow_mut().push(buf);
        }
    }
}

/// Private pages of this process.
struct Pages {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: this is only used to unmap the pages, which any thread may do.
unsafe impl Send for Pages {}
// SAFETY: as above; it has no methods.
unsafe impl Sync for Pages {}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the pages were mapped by `map`, and every buffer over them is gone.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.length) };
    }
}

/// A buffer of zeroes whose pages are allocated on first use.
fn map(length: usize) -> io::Result<IoBuf> {
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
    let start = unsafe { libc::mmap(ptr::null_mut(), length, access, kind, -1, 0) };
    let (false, Some(start)) = (start == libc::MAP_FAILED, NonNull::new(start.cast::<u8>())) else {
        return Err(io::Error::last_os_error());
    };
    // Huge pages would allocate memory for the whole buffer. Failure to disable them does no harm.
    // SAFETY: the pages were mapped just now.
    unsafe { libc::madvise(start.as_ptr().cast(), length, libc::MADV_NOHUGEPAGE) };
    let pages = Arc::new(Pages { start, length });
    // SAFETY: the pages live as long as their owner, and nothing else refers to them.
    Ok(unsafe { IoBuf::from_owner(start, length, pages) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_little_used_is_kept_and_little_of_the_rest() {
        let memory = Memory::new(1 << 20);
        let many: Vec<_> = (0..100).map(|_| memory.take().unwrap()).collect();
        for (number, mut buf) in many.into_iter().enumerate() {
            let used = if number % 2 == 0 { SMALL } else { SMALL + 1 };
            assert!(buf.as_ptr().addr().is_multiple_of(4096) && buf.iter().all(|byte| *byte == 0));
            buf[used] = 1;
            memory.put(buf, used);
        }
        assert_eq!((memory.small.borrow().len(), memory.large.borrow().len()), (50, LARGE));
        let mut buf = memory.take().unwrap();
        drop(buf.split_to(4096));
        memory.put(buf, 1);
        assert_eq!(memory.small.borrow().len(), 49, "a part is no buffer");
    }
}
