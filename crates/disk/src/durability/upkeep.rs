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
    /// Held while something is done.
    busy: Mutex<()>,
}

struct Attendant<'a>(&'a Upkeep);

impl Drop for Attendant<'_> {
    fn drop(&mut self) {
        self.0.attendants.fetch_sub(1, Ordering::SeqCst);
    }
}

impl<S: Storage> Metadata<S> {
    /// Called after each commit: sees to it that the file grows ahead of need.
    pub(super) async fn grow_ahead(&self) -> Result<()> {
        if self.upkeep.ended.load(Ordering::SeqCst) {
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
