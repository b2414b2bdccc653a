//! What all files together may have mapped.

use crate::sys;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// What a window counts for at least, since a process cannot have any number of mappings.
const LEAST: u64 = 4 << 20;

/// A window, as it counts here.
pub(super) trait Member: Send + Sync {
    /// Whether it was of use since this was last asked.
    fn was_of_use(&self) -> bool;

    /// The bytes that it counts for.
    fn counted(&self) -> u64;
}

/// What has windows.
pub(super) trait Owner: Send + Sync {
    /// Unmaps this window, as soon as nobody reads it.
    fn give_up(&self, window: &Arc<dyn Member>);
}

/// A mapped window, and whose it is.
struct Entry {
    owner: Weak<dyn Owner>,
    window: Weak<dyn Member>,
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
}

/// A number of bytes that may be mapped, those of a window.
pub(super) struct Share {
    mappings: Arc<Mappings>,
    bytes: u64,
    /// Others were given up for it.
    is_others: bool,
}

impl Share {
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether other windows were given up for it.
    pub(super) fn is_others(&self) -> bool {
        self.is_others
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.mappings.mapped.fetch_sub(self.bytes, Ordering::AcqRel);
    }
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
        let bytes = (length as u64).max(LEAST);
        if bytes > self.limit.load(Ordering::Relaxed) {
            return None;
        }
        self.take(bytes, false).or_else(|| {
            self.give_up(bytes);
            self.take(bytes, true)
        })
    }

    fn take(self: &Arc<Self>, bytes: u64, is_others: bool) -> Option<Arc<Share>> {
        let limit = self.limit.load(Ordering::Relaxed);
        let more = |mapped: u64| mapped.checked_add(bytes).filter(|mapped| *mapped <= limit);
        let taken = self.mapped.fetch_update(Ordering::AcqRel, Ordering::Acquire, more);
        taken.is_ok().then(|| Arc::new(Share { mappings: self.clone(), bytes, is_others }))
    }

    /// Notes whose window this is.
    pub(super) fn register(&self, owner: Weak<dyn Owner>, window: Weak<dyn Member>) {
        let entry = Entry { owner, window };
        let mut clock = self.clock.lock();
        if clock.entries.len() == clock.entries.capacity() {
            clock.entries.retain(|entry| entry.window.strong_count() > 0);
        }
        clock.entries.push(entry);
    }

    /// Gives up windows of so many bytes that were not used since the last time, if there are enough.
    fn give_up(&self, bytes: u64) {
        let limit = self.limit.load(Ordering::Relaxed);
        let mapped = self.mapped.load(Ordering::Acquire);
        let mut wanted = mapped.saturating_add(bytes).saturating_sub(limit);
        let mut gone = Vec::new();
        // The last reference to a window unmaps it, which takes long: not while others wait for the clock.
        let mut kept = Vec::new();
        let mut clock = self.clock.lock();
        for _ in 0..clock.entries.len() {
            if wanted == 0 {
                break;
            }
            if clock.hand >= clock.entries.len() {
                clock.hand = 0;
            }
            let hand = clock.hand;
            match clock.entries[hand].window.upgrade() {
                Some(window) if window.was_of_use() => {
                    clock.hand += 1;
                    kept.push(window);
                }
                found => {
                    let entry = clock.entries.swap_remove(hand);
                    if let Some(window) = found {
                        wanted = wanted.saturating_sub(window.counted());
                        gone.push((entry.owner, window));
                    }
                }
            }
        }
        if wanted > 0 {
            let back = gone.iter().map(|(owner, window)| Entry {
                owner: owner.clone(),
                window: Arc::downgrade(window),
            });
            clock.entries.extend(back);
            drop(clock);
            return;
        }
        drop(clock);
        for (owner, window) in gone {
            if let Some(owner) = owner.upgrade() {
                owner.give_up(&window);
            }
        }
    }
}
