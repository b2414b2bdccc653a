//! What all files together may have mapped, and whether that is worth it.

use crate::sys;
use parking_lot::Mutex;
use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// Reads of a thread between two looks at whether it had to wait for pages.
const BETWEEN_LOOKS: u32 = 64;
/// Looks that find nothing before the next doubt has a smaller effect.
const CALM_LOOKS: u32 = 1024;
/// The largest effect of a doubt: this power of two of immediate reads are not noted.
const MOST_HELD: u32 = 20;
const LEAST_HELD: u32 = 6;

/// What has windows.
pub(super) trait Owner: Send + Sync {
    /// Unmaps the window that has this share, as soon as nobody reads it.
    fn give_up(&self, share: &Arc<Share>);
}

/// The share of a mapped window, and whose it is.
struct Entry {
    owner: Weak<dyn Owner>,
    share: Weak<Share>,
}

/// The windows in a circle.
#[derive(Default)]
struct Clock {
    entries: Vec<Entry>,
    hand: usize,
}

/// The mappings of a pool's files.
#[derive(Default)]
pub(crate) struct Mappings {
    /// The most bytes mapped at a time; 0: none.
    limit: AtomicU64,
    mapped: AtomicU64,
    clock: Mutex<Clock>,
    /// How often threads had to wait for pages.
    doubts: AtomicU32,
    /// Immediate reads that are not noted yet.
    held: AtomicU32,
    /// The power of two of the reads that the next doubt holds.
    level: AtomicU32,
    calm: AtomicU32,
}

/// A number of bytes that may be mapped, those of a window.
pub(super) struct Share {
    mappings: Arc<Mappings>,
    bytes: u64,
    /// Read since it was last asked.
    used: AtomicBool,
}

impl Share {
    /// The window is read.
    pub(super) fn was_read(&self) {
        if !self.used.load(Ordering::Relaxed) {
            self.used.store(true, Ordering::Relaxed);
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.mappings.mapped.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

thread_local! {
    /// Reads until the next look, and the waits for pages at the last one.
    static LOOKS: Cell<(u32, Option<i64>)> = const { Cell::new((0, None)) };
}

impl Mappings {
    /// Lets files opened from now on be mapped, up to `bytes` at a time.
    pub(crate) fn allow(&self, bytes: u64) {
        let bytes = if sys::has_limited_address_space() { 0 } else { bytes };
        self.limit.store(bytes, Ordering::Relaxed);
    }

    pub(crate) fn are_allowed(&self) -> bool {
        self.limit.load(Ordering::Relaxed) > 0
    }

    /// Room for a window. Windows that were not used lately are given up for it.
    pub(super) fn admit(self: &Arc<Self>, length: usize) -> Option<Arc<Share>> {
        let bytes = length as u64;
        self.take(bytes).or_else(|| {
            self.give_up(bytes);
            self.take(bytes)
        })
    }

    fn take(self: &Arc<Self>, bytes: u64) -> Option<Arc<Share>> {
        let limit = self.limit.load(Ordering::Relaxed);
        let more = |mapped: u64| mapped.checked_add(bytes).filter(|mapped| *mapped <= limit);
        let taken = self.mapped.fetch_update(Ordering::AcqRel, Ordering::Acquire, more);
        let used = AtomicBool::new(true);
        taken.is_ok().then(|| Arc::new(Share { mappings: self.clone(), bytes, used }))
    }

    /// Notes whose window has a share.
    pub(super) fn register(&self, owner: Weak<dyn Owner>, share: &Arc<Share>) {
        let entry = Entry { owner, share: Arc::downgrade(share) };
        let mut clock = self.clock.lock();
        if clock.entries.len() == clock.entries.capacity() {
            clock.entries.retain(|entry| entry.share.strong_count() > 0);
        }
        clock.entries.push(entry);
    }

    /// Gives up windows of so many bytes that were not used since the last time, if there are.
    fn give_up(&self, bytes: u64) {
        let limit = self.limit.load(Ordering::Relaxed);
        let mapped = self.mapped.load(Ordering::Acquire);
        let mut wanted = mapped.saturating_add(bytes).saturating_sub(limit);
        let mut gone = Vec::new();
        let mut clock = self.clock.lock();
        for _ in 0..clock.entries.len() {
            if wanted == 0 {
                break;
            }
            if clock.hand >= clock.entries.len() {
                clock.hand = 0;
            }
            let hand = clock.hand;
            match clock.entries[hand].share.upgrade() {
                Some(share) if share.used.swap(false, Ordering::Relaxed) => clock.hand += 1,
                found => {
                    let entry = clock.entries.swap_remove(hand);
                    if let Some(share) = found {
                        wanted = wanted.saturating_sub(share.bytes);
                        gone.push((entry.owner, share));
                    }
                }
            }
        }
        drop(clock);
        for (owner, share) in gone {
            if let Some(owner) = owner.upgrade() {
                owner.give_up(&share);
            }
        }
    }

    /// How often threads had to wait for pages that they thought to be present.
    pub(super) fn doubts(&self) -> u32 {
        self.doubts.load(Ordering::Relaxed)
    }

    /// Whether pages that an immediate read has found are to be noted.
    pub(super) fn may_note(&self) -> bool {
        let held = self.held.load(Ordering::Relaxed);
        if held > 0 {
            self.held.store(held - 1, Ordering::Relaxed);
        }
        held == 0
    }

    /// A read through a window has ended. Looks now and then whether this thread had to wait.
    pub(super) fn was_read(&self) {
        let (reads, waits) = LOOKS.get();
        if reads > 0 {
            LOOKS.set((reads - 1, waits));
            return;
        }
        let now = sys::waits_for_pages();
        LOOKS.set((BETWEEN_LOOKS - 1, now));
        match (waits, now) {
            (Some(then), Some(now)) if now > then => self.doubt(),
            _ => self.look_calmly(),
        }
    }

    /// A thread had to wait, so that nothing that is noted counts any more, and for a while nothing new is noted.
    fn doubt(&self) {
        self.doubts.fetch_add(1, Ordering::Relaxed);
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

/// Lets this thread look with its next read whether it had to wait since now.
#[cfg(test)]
pub(super) fn look_at_the_next_read() {
    LOOKS.set((0, sys::waits_for_pages()));
}
