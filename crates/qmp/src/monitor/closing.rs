//! Disks that are being closed.

use super::Drive;
use event_listener::Event;
use isobath_ring::{JoinHandle, spawn};
use isobath_storage::Host;
use std::cell::Cell;
use std::rc::Rc;

/// The disks of a monitor that are being closed. Each is closed by a task of its own, whoever waits for it: nobody else
/// makes durable what it has.
#[derive(Clone, Default)]
pub struct Closing(Rc<State>);

#[derive(Default)]
struct State {
    count: Cell<usize>,
    /// Notified when one has been closed.
    closed: Event,
}

/// A disk is being closed until this is dropped.
struct Begun(Closing);

impl Drop for Begun {
    fn drop(&mut self) {
        let state = &self.0.0;
        state.count.set(state.count.get() - 1);
        state.closed.notify(usize::MAX);
    }
}

impl Closing {
    /// Waits until all are closed. Storage that does not answer is waited for as long as it does not.
    pub async fn ended(&self) {
        loop {
            let closed = self.0.closed.listen();
            if self.0.count.get() == 0 {
                return;
            }
            closed.await;
        }
    }

    /// Closes a disk; a failure is logged as well.
    pub(super) fn begin<H: Host + Clone>(
        &self,
        drive: Rc<Drive<H>>,
    ) -> JoinHandle<isobath_disk::Result<()>> {
        self.0.count.set(self.0.count.get() + 1);
        let begun = Begun(self.clone());
        spawn(async move {
            let _begun = begun;
            let closed = drive.close().await;
            if let Err(error) = &closed {
                tracing::warn!(%error, "cannot close a disk");
            }
            closed
        })
    }

    /// Closes a disk, and goes on with that if this is dropped.
    pub(super) async fn close<H: Host + Clone>(
        &self,
        drive: &Rc<Drive<H>>,
    ) -> isobath_disk::Result<()> {
        match self.begin(Rc::clone(drive)).await {
            Ok(closed) => closed,
            Err(panicked) => panicked.resume(),
        }
    }
}
