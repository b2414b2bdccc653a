//! A disk that is stopped: requests in flight are waited for, and no other begins.
//!
//! A request is counted, and then looks whether the disk is stopped; a stop is noted, and then looks whether
//! requests are counted. So each that the stop does not wait for sees it, and waits until the disk goes on.

use super::LiveDisk;
use super::counts::{InFlight, Kind};
use crate::pausing::Pausing;
use isobath_image::{DiskError, Result};
use isobath_storage::Host;
use isobath_sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Requests that a stop waits for, besides those that are counted as in flight.
#[derive(Default)]
pub(super) struct Stopping {
    /// Requests that are carried out in steps.
    in_steps: AtomicUsize,
}

/// A client's request in flight.
pub(super) struct Entered<'a> {
    counted: Option<InFlight<'a>>,
    kind: Kind,
    pausing: &'a Pausing,
}

impl Entered<'_> {
    pub(super) fn kind(&self) -> Kind {
        self.kind
    }

    pub(super) fn end(mut self, succeeded: bool, now: Duration) {
        if let Some(counted) = self.counted.take() {
            counted.end(succeeded, now);
        }
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        drop(self.counted.take());
        self.pausing.leave();
    }
}

/// A request that is carried out in steps.
pub(super) struct InSteps<'a> {
    stopping: &'a Stopping,
    pausing: &'a Pausing,
}

impl Drop for InSteps<'_> {
    fn drop(&mut self) {
        self.stopping.in_steps.fetch_sub(1, Ordering::SeqCst);
        self.pausing.leave();
    }
}

impl<H: Host> LiveDisk<H> {
    /// Counts a request, or a step of one that has [entered](Self::enter_in_steps), whether or not the disk is stopped.
    pub(super) fn count(&self, kind: Kind, bytes: u64) -> Entered<'_> {
        let counted = Some(self.counts.begin(kind, bytes, self.clock.now()));
        Entered { counted, kind, pausing: &self.pausing }
    }

    /// Counts a client's request, at once unless the disk is stopped.
    ///
    /// # Errors
    /// [`DiskError::Closed`] if the server ends meanwhile.
    pub(super) async fn enter(&self, kind: Kind, bytes: u64) -> Result<Entered<'_>> {
        loop {
            let entered = self.count(kind, bytes);
            if !self.pausing.is_stopped() {
                return Ok(entered);
            }
            drop(entered);
            Box::pin(self.until_it_goes_on()).await?;
        }
    }

    /// As [`enter`](Self::enter), for a request whose steps are counted one by one.
    pub(super) async fn enter_in_steps(&self) -> Result<InSteps<'_>> {
        loop {
            self.stopping.in_steps.fetch_add(1, Ordering::SeqCst);
            let entered = InSteps { stopping: &self.stopping, pausing: &self.pausing };
            if !self.pausing.is_stopped() {
                return Ok(entered);
            }
            drop(entered);
            self.until_it_goes_on().await?;
        }
    }

    async fn until_it_goes_on(&self) -> Result<()> {
        if self.pausing.pass_stop().await { Ok(()) } else { Err(DiskError::Closed) }
    }

    /// Waits until the requests in flight of a disk that has been [stopped](Pausing::stop) have ended, and makes what
    /// they wrote durable: from then on nothing changes the image until it goes on, except jobs, snapshots and changes
    /// of its size.
    ///
    /// # Errors
    /// As for [`flush`](Self::flush).
    pub async fn settle(&self) -> Result<()> {
        let steps = &self.stopping.in_steps;
        let is_quiet = || self.counts.in_flight() == 0 && steps.load(Ordering::SeqCst) == 0;
        self.pausing.quiet(is_quiet).await;
        self.flush_now().await
    }
}
