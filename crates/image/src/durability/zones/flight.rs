//! First writes whose mapping is not recorded yet.
//!
//! A [`WaitGroup`](isobath_sync::WaitGroup) is not enough: a commit waits for the writes that began before it, while
//! others keep starting.

use crate::violated;
use isobath_qcow2::Lsn;
use isobath_sync::{Condition, Mutex};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Writes in progress, by LSN.
#[derive(Default)]
pub(super) struct Flights {
    lsns: Mutex<BTreeSet<Lsn>>,
    ended: Condition,
}

/// A write in progress; ends when dropped.
pub(super) struct Flight {
    flights: Arc<Flights>,
    lsn: Lsn,
}

impl Flights {
    pub(super) fn begin(self: &Arc<Self>, lsn: Lsn) -> Flight {
        if !self.lsns.lock().insert(lsn) {
            violated("each first write has an LSN of its own");
        }
        Flight { flights: Arc::clone(self), lsn }
    }

    /// The lowest LSN.
    pub(super) fn lowest(&self) -> Option<Lsn> {
        self.lsns.lock().first().copied()
    }

    /// Waits for all writes with LSNs below `lsn`.
    pub(super) async fn ended_below(&self, lsn: Lsn) {
        self.ended.until(|| self.lowest().is_none_or(|lowest| lowest >= lsn)).await;
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        if !self.flights.lsns.lock().remove(&self.lsn) {
            violated("a first write that ends was in progress");
        }
        self.flights.ended.changed();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "each first write has an LSN of its own")]
    fn two_first_writes_with_one_lsn_are_noticed() {
        let flights = Arc::<Flights>::default();
        let _first = flights.begin(Lsn::new(1));
        let _second = flights.begin(Lsn::new(1));
    }

    #[test]
    #[should_panic(expected = "a first write that ends was in progress")]
    fn a_first_write_that_ends_twice_is_noticed() {
        let flights = Arc::<Flights>::default();
        let flight = flights.begin(Lsn::new(1));
        flights.lsns.lock().clear();
        drop(flight);
    }
}

#[cfg(all(test, loom))]
mod interleavings {
    use super::*;
    use isobath_sync::{Cell, explore, wait};

    struct Zones {
        flights: Arc<Flights>,
        /// The flights of writes that began before everything else, and the data that they write.
        writes: [(Mutex<Option<Flight>>, Cell<u8>); 3],
    }

    fn zones() -> Zones {
        let flights = Arc::<Flights>::default();
        let write = |lsn| (Mutex::new(Some(flights.begin(Lsn::new(lsn)))), Cell::new(0));
        Zones { writes: [0, 1, 2].map(write), flights }
    }

    fn end(zones: &Zones, number: usize) {
        let (flight, data) = &zones.writes[number];
        data.set(1);
        drop(flight.lock().take());
    }

    /// A commit, which must find all of the data below its LSN.
    fn commit(zones: &Zones, until: u64) {
        wait(zones.flights.ended_below(Lsn::new(until)));
        for (_, data) in &zones.writes[..until as usize] {
            assert_eq!(data.get(), 1);
        }
    }

    #[test]
    fn a_commit_waits_for_all_flights_before_it_and_no_others() {
        let tasks: &[fn(&Zones)] = &[|z| end(z, 1), |z| end(z, 0), |z| commit(z, 2)];
        explore("Flights, two that end and a wait", 3, zones, tasks, |_| ());
    }

    #[test]
    fn two_commits_wait() {
        let tasks: &[fn(&Zones)] =
            &[|z| (0..2).for_each(|n| end(z, n)), |z| commit(z, 1), |z| commit(z, 2)];
        explore("Flights, two waits", 2, zones, tasks, |_| ());
    }
}
