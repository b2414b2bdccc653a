//! When a freed cluster may be used again.

use crate::per_thread::PerThread;
use event_listener::Event;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts the requests that may still use an old mapping.
///
/// A request passes the gate before it looks a mapping up and leaves when its I/O is done. A cluster
/// whose mapping is gone can be reused after [`drain`](ReadGate::drain): by then everybody who may
/// have seen the mapping has left. Requests never wait here.
#[derive(Default)]
pub(crate) struct ReadGate {
    epoch: AtomicU64,
    inside: PerThread<[AtomicU64; 2]>,
    left: Event,
}

/// A request's stay; ends when dropped.
pub(crate) struct Pass<'a> {
    gate: &'a ReadGate,
    inside: &'a AtomicU64,
    epoch: u64,
}

impl ReadGate {
    /// Lets a request in.
    pub(crate) fn enter(&self) -> Pass<'_> {
        let (_, sides) = self.inside.mine();
        loop {
            let epoch = self.epoch.load(Ordering::SeqCst);
            let inside = &sides[(epoch & 1) as usize];
            inside.fetch_add(1, Ordering::SeqCst);
            let pass = Pass { gate: self, inside, epoch };
            // A drain that began in between may not have counted this request: try the new side.
            if self.epoch.load(Ordering::SeqCst) == epoch {
                return pass;
            }
        }
    }

    /// Waits until every request has left that was inside when this was called. The caller sees to
    /// it that only one drain runs at a time.
    pub(crate) async fn drain(&self) {
        let side = (self.epoch.fetch_add(1, Ordering::SeqCst) & 1) as usize;
        loop {
            let left = self.left.listen();
            // Nobody enters on this side any more, so counts only fall, but for one who tries and leaves
            // at once.
            if self.inside.all().all(|sides| sides[side].load(Ordering::SeqCst) == 0) {
                return;
            }
            left.await;
        }
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        let last = self.inside.fetch_sub(1, Ordering::SeqCst) == 1;
        // A drain that begins after this look finds the count as it is now.
        if last && self.gate.epoch.load(Ordering::SeqCst) != self.epoch {
            self.gate.left.notify(usize::MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    #[test]
    fn a_drain_waits_for_those_inside_and_not_for_later_ones() {
        let gate = ReadGate::default();
        let mut context = Context::from_waker(Waker::noop());
        let early = gate.enter();
        let mut drain = pin!(gate.drain());
        assert_eq!(drain.as_mut().poll(&mut context), Poll::Pending);
        let _late = gate.enter();
        assert_eq!(drain.as_mut().poll(&mut context), Poll::Pending);
        drop(early);
        assert_eq!(drain.as_mut().poll(&mut context), Poll::Ready(()));
    }

    #[test]
    fn an_empty_gate_drains_at_once() {
        let gate = ReadGate::default();
        for _ in 0..3 {
            drop(gate.enter());
            let mut drain = pin!(gate.drain());
            let polled = drain.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            assert_eq!(polled, Poll::Ready(()));
        }
    }
}
