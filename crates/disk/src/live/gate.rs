//! Keeping requests out for the moment in which the chain changes.

use crate::per_thread::PerThread;
use event_listener::Event;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Requests pass; a change of the chain waits until none is inside, and keeps new ones out until it
/// is done. At most one change at a time.
#[derive(Default)]
pub(super) struct Gate {
    inside: PerThread<AtomicUsize>,
    shut: AtomicBool,
    changed: Event,
}

/// A request's stay; ends when dropped.
pub(super) struct Pass<'a> {
    gate: &'a Gate,
    inside: &'a AtomicUsize,
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        self.gate.leave(self.inside);
    }
}

/// Nobody is inside, until this is dropped.
pub(super) struct Quiet<'a>(&'a Gate);

impl Drop for Quiet<'_> {
    fn drop(&mut self) {
        self.0.shut.store(false, Ordering::SeqCst);
        self.0.changed.notify(usize::MAX);
    }
}

impl Gate {
    /// Lets a request in, at once unless a change is being made.
    pub(super) async fn enter(&self) -> Pass<'_> {
        loop {
            let (_, inside) = self.inside.mine();
            inside.fetch_add(1, Ordering::SeqCst);
            if !self.shut.load(Ordering::SeqCst) {
                return Pass { gate: self, inside };
            }
            self.leave(inside);
            let changed = self.changed.listen();
            if self.shut.load(Ordering::SeqCst) {
                changed.await;
            }
        }
    }

    fn leave(&self, inside: &AtomicUsize) {
        if inside.fetch_sub(1, Ordering::SeqCst) == 1 && self.shut.load(Ordering::SeqCst) {
            self.changed.notify(usize::MAX);
        }
    }

    /// Lets nobody in any more and waits for those inside.
    pub(super) async fn quiet(&self) -> Quiet<'_> {
        self.shut.store(true, Ordering::SeqCst);
        let quiet = Quiet(self);
        loop {
            let changed = self.changed.listen();
            if self.inside.all().all(|inside| inside.load(Ordering::SeqCst) == 0) {
                return quiet;
            }
            changed.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

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
    fn a_change_given_up_opens_the_gate() {
        let gate = Gate::default();
        let _inside = gate.enter().now_or_never().unwrap();
        let mut quiet = Box::pin(gate.quiet());
        assert!((&mut quiet).now_or_never().is_none());
        drop(quiet);
        assert!(gate.enter().now_or_never().is_some());
    }
}
