//! Work that nobody waits for.

use super::Metadata;
use crate::Result;
use async_lock::Mutex;
use event_listener::Event;
use isobath_storage::Storage;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// What is to be done, and whether somebody is there to do it.
#[derive(Default)]
pub(crate) struct Upkeep {
    /// Bytes to prepare for growth.
    wanted: AtomicU64,
    changed: Event,
    attendants: AtomicUsize,
    ended: AtomicBool,
    /// Space on the host is short.
    short: AtomicBool,
    /// Held while something is done.
    busy: Mutex<()>,
}

/// With less free space, in bytes, nothing is done ahead or put off: who writes is to be told that there
/// is none.
const SHORT: u64 = 64 << 20;

impl Upkeep {
    /// Whether what is written later will find space.
    pub(super) fn has_room(&self) -> bool {
        !self.short.load(Ordering::Relaxed)
    }
}

struct Attendant<'a>(&'a Upkeep);

impl Drop for Attendant<'_> {
    fn drop(&mut self) {
        self.0.attendants.fetch_sub(1, Ordering::SeqCst);
    }
}

impl<S: Storage> Metadata<S> {
    /// Called after each commit: sees to it that the file grows ahead of need, as long as the host has
    /// space.
    pub(super) async fn grow_ahead(&self) -> Result<()> {
        let free = self.layer.storage().free_space();
        self.upkeep.short.store(free.is_some_and(|free| free < SHORT), Ordering::Relaxed);
        if self.upkeep.ended.load(Ordering::SeqCst) || !self.upkeep.has_room() {
            return Ok(());
        }
        let Some(bytes) = self.alloc.growth_wanted().await else { return Ok(()) };
        if self.upkeep.attendants.load(Ordering::SeqCst) == 0 {
            return self.alloc.prepare(bytes).await;
        }
        self.upkeep.wanted.fetch_max(bytes, Ordering::SeqCst);
        self.upkeep.changed.notify(usize::MAX);
        Ok(())
    }

    /// Does what comes up until [`end_upkeep`](Self::end_upkeep).
    pub(crate) async fn attend(&self) -> Result<()> {
        let upkeep = &self.upkeep;
        upkeep.attendants.fetch_add(1, Ordering::SeqCst);
        let _attendant = Attendant(upkeep);
        loop {
            let changed = upkeep.changed.listen();
            {
                let _busy = upkeep.busy.lock().await;
                if upkeep.ended.load(Ordering::SeqCst) {
                    return Ok(());
                }
                let bytes = upkeep.wanted.swap(0, Ordering::SeqCst);
                if bytes > 0 {
                    self.alloc.prepare(bytes).await?;
                    continue;
                }
            }
            changed.await;
        }
    }

    /// Ends it, and waits for what is being done.
    pub(crate) async fn end_upkeep(&self) {
        self.upkeep.ended.store(true, Ordering::SeqCst);
        self.upkeep.changed.notify(usize::MAX);
        drop(self.upkeep.busy.lock().await);
    }
}
