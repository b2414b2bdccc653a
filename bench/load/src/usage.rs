//! What this process uses: CPU time and allocations.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::io;
use std::mem::MaybeUninit;
use std::time::Duration;

/// The CPU time that this process has used: all threads, user and system.
///
/// # Errors
/// Those of `getrusage`.
pub(crate) fn cpu() -> io::Result<Duration> {
    let mut usage = MaybeUninit::<libc::rusage>::uninit();
    // SAFETY: the kernel writes a whole `rusage` there.
    if unsafe { libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has succeeded.
    let usage = unsafe { usage.assume_init() };
    let time = |value: libc::timeval| {
        Duration::from_secs(value.tv_sec as u64) + Duration::from_micros(value.tv_usec as u64)
    };
    Ok(time(usage.ru_utime) + time(usage.ru_stime))
}

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// Allocations that this thread has made so far.
pub(crate) fn allocations() -> u64 {
    ALLOCATIONS.get()
}

/// The system's allocator, which counts for each thread.
pub(crate) struct Counting;

impl Counting {
    fn count() {
        // A thread that ends may allocate when its counter is gone.
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
    }
}

// SAFETY: everything is the system allocator's; to count allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::count();
        // SAFETY: the caller's promise is the one that is asked for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        Self::count();
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, start: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        Self::count();
        // SAFETY: as above.
        unsafe { System.realloc(start, layout, size) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(start, layout) }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn an_allocation_counts() {
        let before = super::allocations();
        drop(std::hint::black_box(Box::new(1)));
        assert_eq!(super::allocations() - before, 1);
    }
}
