//! Ranges of a file that operations hold while they are in flight.

use isobath_ring::Lease;
use parking_lot::Mutex;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Poll, Waker};

#[derive(Clone, Copy)]
struct HeldRange {
    start: u64,
    end: u64,
    exclusive: bool,
    id: u64,
}

#[derive(Default)]
struct Holders {
    held: Vec<HeldRange>,
    exclusive: usize,
    next: u64,
    waiting: Vec<Waker>,
}

/// The ranges held in one file. Any number of shared holders may overlap; an exclusive holder overlaps with no other.
#[derive(Default)]
pub(super) struct Ranges(Mutex<Holders>);

/// A held range, and the file that it is in. It is released when dropped; operations in flight
/// keep it.
pub(super) struct Guard {
    ranges: Arc<Ranges>,
    /// Keeps the file open, and locked, for as long as the range is held.
    lease: Lease,
    id: u64,
}

impl isobath_ring::Leased for Guard {
    fn orphaned(&self) {
        self.lease.orphaned();
    }

    fn landed(&self) {
        self.lease.landed();
    }
}

impl Ranges {
    /// Waits until `[start, end)` can be held.
    pub(super) async fn hold(
        self: &Arc<Self>,
        lease: &Lease,
        start: u64,
        end: u64,
        exclusive: bool,
    ) -> Arc<Guard> {
        let id = poll_fn(|context| {
            let mut state = self.0.lock();
            // Shared holders do not wait for each other.
            let blocked = (exclusive || state.exclusive > 0)
                && state.held.iter().any(|held| {
                    held.start < end && start < held.end && (exclusive || held.exclusive)
                });
            if blocked {
                if !state.waiting.iter().any(|waker| waker.will_wake(context.waker())) {
                    state.waiting.push(context.waker().clone());
                }
                return Poll::Pending;
            }
            let id = state.next;
            state.next += 1;
            state.exclusive += usize::from(exclusive);
            state.held.push(HeldRange { start, end, exclusive, id });
            Poll::Ready(id)
        })
        .await;
        Arc::new(Guard { ranges: self.clone(), lease: lease.clone(), id })
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let mut state = self.ranges.0.lock();
        if let Some(index) = state.held.iter().position(|held| held.id == self.id) {
            let held = state.held.swap_remove(index);
            state.exclusive -= usize::from(held.exclusive);
        }
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        for waker in waiting {
            waker.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;
    use std::task::Context;

    #[test]
    fn exclusive_holders_are_alone() {
        let lease: Lease = Arc::new(());
        let ranges = Arc::new(Ranges::default());
        let mut context = Context::from_waker(Waker::noop());
        let mut hold =
            |start, end, exclusive| match pin!(ranges.hold(&lease, start, end, exclusive))
                .poll(&mut context)
            {
                Poll::Ready(guard) => Some(guard),
                Poll::Pending => None,
            };
        let shared = [hold(0, 10, false).unwrap(), hold(5, 15, false).unwrap()];
        assert!(hold(14, 20, true).is_none());
        let exclusive = hold(15, 20, true).unwrap();
        assert!(hold(19, 30, false).is_none());
        assert!(hold(0, 15, false).is_some());
        drop(shared);
        drop(exclusive);
        assert!(hold(0, u64::MAX, true).is_some());
    }
}
