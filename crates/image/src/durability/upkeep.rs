//! What is known of background work.

use event_listener::Event;
use isobath_sync::AsyncMutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// Pending work, and whether a task is running that does it.
#[derive(Default)]
pub struct Upkeep {
    /// Bytes to prepare for growth.
    pub(super) wanted: AtomicU64,
    /// Clusters of a zone to prepare.
    pub(super) zone_wanted: AtomicU64,
    pub(super) changed: Event,
    pub(super) attendants: AtomicUsize,
    pub(super) ended: AtomicBool,
    /// Space on the host is short.
    pub(super) short: AtomicBool,
    /// Held while work is in progress.
    pub(super) busy: AsyncMutex<()>,
}

impl Upkeep {
    /// Whether there will be space for deferred writes.
    pub(crate) fn has_room(&self) -> bool {
        !self.short.load(Ordering::Relaxed)
    }
}
