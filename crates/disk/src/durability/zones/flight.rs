//! First writes whose mapping is not recorded yet.

use event_listener::Event;
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Those under way, by serial.
#[derive(Default)]
pub(super) struct Flights {
    serials: Mutex<BTreeSet<u64>>,
    ended: Event,
}

/// One of them; ends when dropped.
pub(super) struct Flight {
    flights: Arc<Flights>,
    serial: u64,
}

impl Flights {
    pub(super) fn begin(self: &Arc<Self>, serial: u64) -> Flight {
        self.serials.lock().insert(serial);
        Flight { flights: Arc::clone(self), serial }
    }

    /// The lowest serial.
    pub(super) fn lowest(&self) -> Option<u64> {
        self.serials.lock().first().copied()
    }

    /// Waits for all with serials below `until`.
    pub(super) async fn ended_below(&self, until: u64) {
        loop {
            let ended = self.ended.listen();
            if self.lowest().is_none_or(|lowest| lowest >= until) {
                return;
            }
            ended.await;
        }
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.flights.serials.lock().remove(&self.serial);
        self.flights.ended.notify(usize::MAX);
    }
}
