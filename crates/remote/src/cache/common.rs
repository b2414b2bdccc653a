//! What the layers of a cache have in common: the limit, and what follows from failures.

use super::usage::Usage;
use crate::digest::BLOCK;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;

/// Fills that are left out after one that failed, at first and at most.
const FIRST_PAUSE: u64 = 64;
const MOST_PAUSE: u64 = 8192;

/// Why a block was not kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotKept {
    /// The cache is at its limit, and nothing has been evicted yet.
    Full,
    /// The disk is full or failing, or was a short time ago.
    Failing,
    /// Somebody else is changing the block.
    Busy,
    /// The layer has no usable files in the cache.
    Detached,
}

/// The limit of a cache, and how full it is.
#[derive(Debug)]
pub(super) struct Common {
    pub(super) usage: Usage,
    limit: u64,
    /// Bytes that this process has filled since the files were last counted.
    uncounted: AtomicU64,
    /// Fills that are left out before the next one is tried, and how many there were after the last failure.
    skipped: AtomicU64,
    pause: AtomicU64,
    /// Whether it was said that the cache fails.
    warned: AtomicBool,
    wake: SyncSender<()>,
}

impl Common {
    pub(super) fn new(usage: Usage, limit: u64, wake: SyncSender<()>) -> Self {
        Self {
            usage,
            limit,
            uncounted: AtomicU64::new(0),
            skipped: AtomicU64::new(0),
            pause: AtomicU64::new(0),
            warned: AtomicBool::new(false),
            wake,
        }
    }

    pub(super) fn limit(&self) -> u64 {
        self.limit
    }

    /// From how many bytes on blocks are evicted.
    pub(super) fn high(&self) -> u64 {
        self.limit - self.limit / 16
    }

    /// Whether blocks are to be evicted.
    pub(super) fn is_high(&self) -> bool {
        self.usage.bytes().is_none_or(|used| used > self.high())
    }

    /// Down to how many bytes blocks are evicted.
    pub(super) fn low(&self) -> u64 {
        self.limit - self.limit / 8
    }

    /// Whether a block may be filled.
    ///
    /// # Errors
    /// The reason why not.
    pub(super) fn admit(&self, bytes: u64) -> Result<(), NotKept> {
        let waits = |skipped: u64| skipped.checked_sub(1);
        if self.skipped.fetch_update(Ordering::Relaxed, Ordering::Relaxed, waits).is_ok() {
            return Err(NotKept::Failing);
        }
        let used = self.usage.bytes().unwrap_or(u64::MAX);
        if used.saturating_add(bytes) > self.limit {
            self.wake();
            return Err(NotKept::Full);
        }
        Ok(())
    }

    /// Notes a block that was filled.
    pub(super) fn filled(&self, bytes: u64) {
        self.pause.store(0, Ordering::Relaxed);
        self.usage.filled(bytes);
        let uncounted = self.uncounted.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if self.is_high() || uncounted > (self.limit / 8).max(BLOCK) {
            self.wake();
        }
    }

    /// Notes that the files were counted, and how much was known [`before`](Usage::counted).
    pub(super) fn counted(&self, before: Option<u64>, bytes: u64) {
        self.uncounted.store(0, Ordering::Relaxed);
        self.usage.counted(before, bytes);
    }

    /// Notes that something could not be written: for a while nothing is.
    pub(super) fn failed(&self, error: &io::Error) {
        let last = self.pause.load(Ordering::Relaxed);
        let pause = (last * 2).clamp(FIRST_PAUSE, MOST_PAUSE);
        self.pause.store(pause, Ordering::Relaxed);
        self.skipped.store(pause, Ordering::Relaxed);
        self.warn(error);
        self.wake();
    }

    /// Says once that the cache does not work as it should.
    pub(super) fn warn(&self, error: &io::Error) {
        if !self.warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(%error, "cannot write to the cache; disks are served without it where it fails");
        }
    }

    /// Lets the cache be tidied up soon.
    pub(super) fn wake(&self) {
        // If it was woken already, or has ended, that will do.
        let _ = self.wake.try_send(());
    }
}
