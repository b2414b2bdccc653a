//! Whether a file's pages stay in memory.

use crate::sys;
use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};

/// Of so many reads of a thread, one looks whether it had to wait.
const ONE_OF: u32 = 64;
/// Looks that find nothing before the next doubt has a smaller effect.
const CALM_LOOKS: u32 = 1024;
/// The effect of a doubt: this power of two of immediate reads are not noted.
const LEAST_HELD: u32 = 6;
const MOST_HELD: u32 = 20;

/// How often reads through a file's mappings had to wait for pages that were thought to be present.
#[derive(Default)]
pub(super) struct Doubts {
    count: AtomicU32,
    /// Immediate reads that are not noted yet.
    held: AtomicU32,
    /// By how many powers of two the next doubt has a larger effect than the first.
    level: AtomicU32,
    calm: AtomicU32,
}

thread_local! {
    /// Reads of this thread until one looks.
    static UNTIL_A_LOOK: Cell<u32> = const { Cell::new(0) };
}

impl Doubts {
    /// How many there have been.
    pub(super) fn count(&self) -> u32 {
        self.count.load(Ordering::Relaxed)
    }

    /// Whether pages that an immediate read has found are to be noted.
    pub(super) fn may_note(&self) -> bool {
        let held = self.held.load(Ordering::Relaxed);
        if held > 0 {
            self.held.store(held - 1, Ordering::Relaxed);
        }
        held == 0
    }

    /// Reads, and now and then looks whether this thread had to wait.
    pub(super) fn while_looking<T>(&self, read: impl FnOnce() -> T) -> T {
        let left = UNTIL_A_LOOK.get();
        UNTIL_A_LOOK.set(left.checked_sub(1).unwrap_or(ONE_OF - 1));
        if left > 0 {
            return read();
        }
        let before = sys::waits_for_pages();
        let result = read();
        if sys::waits_for_pages() == before {
            self.look_calmly();
        } else {
            self.doubt();
        }
        result
    }

    /// A thread had to wait, so that nothing that is noted counts any more, and for a while nothing new is noted.
    fn doubt(&self) {
        self.count.fetch_add(1, Ordering::Relaxed);
        let level = self.level.load(Ordering::Relaxed);
        self.held.store(1 << (LEAST_HELD + level), Ordering::Relaxed);
        self.level.store((level + 1).min(MOST_HELD - LEAST_HELD), Ordering::Relaxed);
        self.calm.store(0, Ordering::Relaxed);
    }

    fn look_calmly(&self) {
        let calm = self.calm.load(Ordering::Relaxed) + 1;
        let enough = calm >= CALM_LOOKS;
        self.calm.store(if enough { 0 } else { calm }, Ordering::Relaxed);
        if enough {
            let level = self.level.load(Ordering::Relaxed);
            self.level.store(level.saturating_sub(1), Ordering::Relaxed);
        }
    }
}

/// Lets this thread's next read look.
#[cfg(test)]
pub(super) fn look_at_the_next_read() {
    UNTIL_A_LOOK.set(0);
}
