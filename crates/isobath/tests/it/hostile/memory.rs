//! Memory that each thread has allocated, to find what an image makes the engine take.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

thread_local! {
    static NOW: Cell<usize> = const { Cell::new(0) };
    static PEAK: Cell<usize> = const { Cell::new(0) };
    static BLOCKS: Cell<usize> = const { Cell::new(0) };
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn add(bytes: usize) {
    let _ = BLOCKS.try_with(|blocks| blocks.set(blocks.get().wrapping_add(1)));
    let _ = NOW.try_with(|now| {
        now.set(now.get().wrapping_add(bytes));
        let _ = PEAK.try_with(|peak| {
            // A thread that frees what another allocated is below zero.
            if (now.get() as isize) > peak.get() as isize {
                peak.set(now.get());
            }
        });
    });
}

// SAFETY: every call goes on to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        // SAFETY: as the caller promises.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        let _ = NOW.try_with(|now| now.set(now.get().wrapping_sub(layout.size())));
        let _ = BLOCKS.try_with(|blocks| blocks.set(blocks.get().wrapping_sub(1)));
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(memory, layout) }
    }
}

/// Counts from here on, on this thread.
pub(crate) fn restart() {
    NOW.set(0);
    PEAK.set(0);
    BLOCKS.set(0);
}

/// The most that was allocated together since [`restart`], in bytes.
pub(crate) fn peak() -> usize {
    PEAK.get()
}

/// What is allocated of what was allocated since [`restart`]: in bytes, and in blocks.
pub(crate) fn held() -> (usize, usize) {
    (NOW.get(), BLOCKS.get())
}
