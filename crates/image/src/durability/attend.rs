//! Background work.

use super::metadata::Metadata;
use super::upkeep::Upkeep;
use crate::Result;
use isobath_storage::Storage;
use std::sync::atomic::Ordering;

/// With less free space than this, in bytes, nothing is prepared or deferred, so that a lack of space is reported to
/// the writer at once.
const SHORT: u64 = 64 << 20;

struct Attendant<'a>(&'a Upkeep);

impl Drop for Attendant<'_> {
    fn drop(&mut self) {
        self.0.attendants.fetch_sub(1, Ordering::SeqCst);
    }
}

impl<S: Storage> Metadata<S> {
    /// Called after each commit: makes the file grow ahead of need, as long as the host has space.
    pub(super) async fn grow_ahead(&self) -> Result<()> {
        let free = self.layer.storage().free_space();
        self.upkeep.short.store(free.is_some_and(|free| free < SHORT), Ordering::Relaxed);
        if self.upkeep.ended.load(Ordering::SeqCst) || !self.upkeep.has_room() {
            return Ok(());
        }
        let bytes = self.alloc.growth_wanted().await.unwrap_or(0);
        let gains = self.layer.storage().gains_from_written_space();
        let clusters = if gains { self.zones.growth_wanted().unwrap_or(0) } else { 0 };
        if self.upkeep.attendants.load(Ordering::SeqCst) == 0 {
            return self.prepare(bytes, clusters).await;
        }
        self.upkeep.wanted.fetch_max(bytes, Ordering::SeqCst);
        self.upkeep.zone_wanted.fetch_max(clusters, Ordering::SeqCst);
        if bytes > 0 || clusters > 0 || self.zones.are_short() {
            self.upkeep.changed.notify(usize::MAX);
        }
        Ok(())
    }

    async fn prepare(&self, bytes: u64, clusters: u64) -> Result<()> {
        if clusters > 0 {
            self.prepare_zone(clusters).await?;
        }
        if bytes > 0 {
            self.alloc.prepare(bytes).await?;
        }
        Ok(())
    }

    /// Does background work until [`end_upkeep`](Self::end_upkeep), whenever it `may`. `extract` makes some embedded
    /// lead blocks plain; it returns `false` if there were none.
    pub async fn attend(
        &self,
        may: impl Fn() -> bool,
        extract: impl AsyncFn() -> Result<bool>,
    ) -> Result<()> {
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
                if may() && self.work(&extract).await? {
                    continue;
                }
            }
            // The next commit asks again for what must not be done now.
            changed.await;
        }
    }

    /// Does a piece of background work; returns `false` if there is none.
    async fn work(&self, extract: &impl AsyncFn() -> Result<bool>) -> Result<bool> {
        let bytes = self.upkeep.wanted.swap(0, Ordering::SeqCst);
        let clusters = self.upkeep.zone_wanted.swap(0, Ordering::SeqCst);
        if bytes > 0 || clusters > 0 {
            self.prepare(bytes, clusters).await?;
            return Ok(true);
        }
        // A zone without embedded lead blocks ends with the next record, or once writes in it are completed.
        Ok(self.zones.are_short() && extract().await?)
    }

    /// Waits for background work in progress.
    pub async fn finish_upkeep(&self) {
        drop(self.upkeep.busy.lock().await);
    }

    /// Ends background work, and waits for work in progress.
    pub async fn end_upkeep(&self) {
        self.upkeep.ended.store(true, Ordering::SeqCst);
        self.upkeep.changed.notify(usize::MAX);
        self.finish_upkeep().await;
    }
}
