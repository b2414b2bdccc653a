//! Keeping requests out while the chain changes.
//!
//! Each side waits for the other, and every request passes, so each thread has its own counters. The
//! [`ReaderEpoch`](isobath_image::reader_epoch::ReaderEpoch) counts in the same way but never keeps a request out.

use isobath_image::per_thread::PerThread;
use isobath_image::sabotage::{self, Sabotage};
use isobath_image::{lock_order, violated};
use isobath_sync::Condition;
use isobath_sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use isobath_sync::order::Held;

/// Requests pass; a change of the chain waits until none is inside, and keeps new ones out until it
/// is done. At most one change at a time.
#[derive(Default)]
pub(super) struct Gate {
    inside: PerThread<AtomicUsize>,
    shut: AtomicBool,
    /// Signals to the change that a request left while the gate is closed. Waiting requests are not notified of each
    /// other's attempts, or they would keep waking one another.
    left: Condition,
    /// Wakes the waiting requests.
    opened: Condition,
}

/// A request inside the gate; leaves when dropped.
pub(super) struct Pass<'a> {
    gate: &'a Gate,
    inside: &'a AtomicUsize,
    _held: Option<Held>,
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        self.gate.leave(self.inside);
    }
}

/// Nobody is inside, until this is dropped.
pub(super) struct Quiet<'a> {
    gate: &'a Gate,
    _held: Option<Held>,
}

impl Drop for Quiet<'_> {
    fn drop(&mut self) {
        self.gate.shut.store(false, Ordering::SeqCst);
        self.gate.opened.changed();
    }
}

impl Gate {
    /// Lets a request in, immediately unless a change is in progress.
    pub(super) async fn enter(&self) -> Pass<'_> {
        let held = Held::across_awaits(Some(lock_order::GATE));
        loop {
            let (_, inside) = self.inside.mine();
            inside.fetch_add(1, Ordering::SeqCst);
            if !self.shut.load(Ordering::SeqCst) {
                return Pass { gate: self, inside, _held: held };
            }
            self.leave(inside);
            self.opened.until(|| !self.shut.load(Ordering::SeqCst)).await;
        }
    }

    fn leave(&self, inside: &AtomicUsize) {
        let before = inside.fetch_sub(1, Ordering::SeqCst);
        if before == 0 {
            violated("a request that leaves the gate is inside");
        }
        if before == 1 && self.shut.load(Ordering::SeqCst) {
            self.left.changed();
        }
    }

    /// Closes the gate and waits for the requests inside.
    pub(super) async fn quiet(&self) -> Quiet<'_> {
        if self.shut.swap(true, Ordering::SeqCst) {
            violated("the gate is shut for one change at a time");
        }
        let quiet = Quiet { gate: self, _held: Held::across_awaits(Some(lock_order::GATE)) };
        let empty = || self.inside.all().all(|inside| inside.load(Ordering::SeqCst) == 0);
        self.left.until(|| empty() || sabotage::is(Sabotage::OpenGate)).await;
        quiet
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use std::sync::Arc;
    use std::sync::atomic::Ordering::Relaxed;
    use std::task::{Context, Wake, Waker};

    #[test]
    fn a_change_waits_for_those_inside_and_keeps_others_out() {
        let gate = Gate::default();
        let early = gate.enter().now_or_never().unwrap();
        let mut quiet = Box::pin(gate.quiet());
        assert!((&mut quiet).now_or_never().is_none());
        let mut late = Box::pin(gate.enter());
        assert!((&mut late).now_or_never().is_none());
        drop(early);
        let held = (&mut quiet).now_or_never().unwrap();
        assert!((&mut late).now_or_never().is_none());
        drop(held);
        assert!((&mut late).now_or_never().is_some());
    }

    #[test]
    #[should_panic(expected = "a request that leaves the gate is inside")]
    fn nobody_leaves_who_is_not_inside() {
        Gate::default().leave(&AtomicUsize::new(0));
    }

    #[test]
    #[should_panic(expected = "the gate is shut for one change at a time")]
    fn two_changes_at_once_are_found() {
        let gate = Gate::default();
        let _quiet = gate.quiet().now_or_never();
        drop(gate.quiet().now_or_never());
    }

    #[test]
    fn requests_that_wait_do_not_wake_each_other() {
        let gate = Gate::default();
        let held = gate.quiet().now_or_never().unwrap();
        let wakes = Arc::new(Wakes::default());
        let waker = Waker::from(wakes.clone());
        let mut context = Context::from_waker(&waker);
        let mut first = Box::pin(gate.enter());
        let mut second = Box::pin(gate.enter());
        assert!(first.as_mut().poll(&mut context).is_pending());
        assert!(second.as_mut().poll(&mut context).is_pending());
        assert_eq!(wakes.0.load(Relaxed), 0, "they would go on for as long as the gate is shut");
        drop(held);
        assert_eq!(wakes.0.load(Relaxed), 2);
    }

    #[derive(Default)]
    struct Wakes(std::sync::atomic::AtomicUsize);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Relaxed);
        }
    }

    #[test]
    fn a_change_given_up_opens_the_gate() {
        let gate = Gate::default();
        let _inside = gate.enter().now_or_never().unwrap();
        let mut quiet = Box::pin(gate.quiet());
        assert!((&mut quiet).now_or_never().is_none());
        drop(quiet);
        assert!(gate.enter().now_or_never().is_some());
    }
}

#[cfg(all(test, loom))]
mod interleavings {
    use super::*;
    use futures_util::FutureExt;
    use isobath_sync::{Cell, explore, wait};

    struct Live {
        gate: Gate,
        /// The number of the chain that requests use; changed without a lock.
        chain: Cell<u8>,
    }

    fn live() -> Live {
        Live { gate: Gate::default(), chain: Cell::new(0) }
    }

    fn request(live: &Live) {
        let _pass = wait(live.gate.enter());
        live.chain.get();
    }

    fn change(live: &Live) {
        let _quiet = wait(live.gate.quiet());
        live.chain.set(live.chain.get() + 1);
    }

    /// Waits briefly, then cancels.
    fn change_given_up(live: &Live) {
        if let Some(_quiet) = live.gate.quiet().now_or_never() {
            live.chain.set(live.chain.get() + 1);
        }
    }

    #[test]
    fn no_request_is_inside_while_the_chain_changes() {
        explore("Gate, a change and two requests", 2, live, &[request, request, change], |live| {
            assert_eq!(live.chain.get(), 1);
        });
    }

    #[test]
    fn changes_one_after_another_and_a_request() {
        let tasks: &[fn(&Live)] = &[request, |live| (0..2).for_each(|_| change(live))];
        explore("Gate, two changes and a request", 3, live, tasks, |_| ());
    }

    #[test]
    fn a_change_that_is_given_up_keeps_nobody_out() {
        let tasks: &[fn(&Live)] = &[request, request, change_given_up];
        explore("Gate, a change given up and two requests", 2, live, tasks, |_| ());
    }

    #[test]
    fn a_request_that_gives_up_keeps_no_change_waiting() {
        let tasks: &[fn(&Live)] = &[
            request,
            |live| {
                if let Some(_pass) = live.gate.enter().now_or_never() {
                    live.chain.get();
                }
            },
            change,
        ];
        explore("Gate, a change, a request and one given up", 2, live, tasks, |_| ());
    }
}
