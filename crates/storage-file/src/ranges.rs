//! Ranges of a file that operations hold while they are in flight.

use isobath_ring::Lease;
use parking_lot::Mutex;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Poll, Waker};

#[derive(Clone, Copy)]
struct Range {
    start: u64,
    end: u64,
    exclusive: bool,
    id: u64,
}

impl Range {
    /// Whether the two cannot be held at a time.
    fn excludes(&self, other: &Self) -> bool {
        self.start < other.end && other.start < self.end && (self.exclusive || other.exclusive)
    }
}

#[derive(Default)]
struct Holders {
    held: Vec<Range>,
    /// How many of them are exclusive.
    exclusive: usize,
    /// In order of arrival.
    waiting: Vec<(Range, Waker)>,
    next: u64,
}

impl Holders {
    /// Whether a range must wait: for those that are held, or that have waited for longer.
    fn must_wait(&self, range: &Range) -> bool {
        // Shared holders do not wait for each other.
        let held = range.exclusive || self.exclusive > 0;
        (held && self.held.iter().any(|other| other.excludes(range)))
            || self
                .waiting
                .iter()
                .take_while(|(other, _)| other.id < range.id)
                .any(|(other, _)| other.excludes(range))
    }
}

/// The ranges held in one file. Any number of shared holders may overlap; an exclusive holder overlaps with no other.
/// Those that exclude each other get their ranges in order of arrival, so whoever waits must be polled: others wait
/// behind it.
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

/// A place among those that wait, which is given up when dropped.
struct Place<'a> {
    ranges: &'a Ranges,
    id: u64,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.ranges.change(|state| {
            let index = state.waiting.iter().position(|(range, _)| range.id == self.id);
            index.map(|index| state.waiting.remove(index))
        });
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
        let mut place: Option<Place<'_>> = None;
        let id = poll_fn(|context| {
            let mut state = self.0.lock();
            let id = place.as_ref().map_or(state.next, |place| place.id);
            let range = Range { start, end, exclusive, id };
            if state.must_wait(&range) {
                let waker = context.waker().clone();
                let known = state.waiting.iter_mut().find(|(other, _)| other.id == id);
                let former = if let Some((_, last)) = known {
                    Some(std::mem::replace(last, waker))
                } else {
                    state.next += 1;
                    state.waiting.push((range, waker));
                    place = Some(Place { ranges: self, id });
                    None
                };
                drop(state);
                drop(former);
                return Poll::Pending;
            }
            if place.is_none() {
                state.next += 1;
            }
            state.exclusive += usize::from(exclusive);
            state.held.push(range);
            Poll::Ready(id)
        })
        .await;
        Arc::new(Guard { ranges: self.clone(), lease: lease.clone(), id })
    }

    /// Makes a change after which others may go on, and wakes them. What it returns is dropped once nothing is locked:
    /// the last waker of a task drops the task, which may hold ranges.
    fn change<T>(&self, change: impl FnOnce(&mut Holders) -> T) {
        let mut state = self.0.lock();
        let _removed = change(&mut state);
        let waiting: Vec<Waker> = state.waiting.iter().map(|(_, waker)| waker.clone()).collect();
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.ranges.change(|state| {
            if let Some(index) = state.held.iter().position(|held| held.id == self.id) {
                let held = state.held.swap_remove(index);
                state.exclusive -= usize::from(held.exclusive);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::{Pin, pin};
    use std::task::Context;

    fn poll<T>(future: Pin<&mut impl Future<Output = T>>) -> Option<T> {
        match future.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    #[test]
    fn exclusive_holders_are_alone() {
        let lease: Lease = Arc::new(());
        let ranges = Arc::new(Ranges::default());
        let hold = |start, end, exclusive| poll(pin!(ranges.hold(&lease, start, end, exclusive)));
        let shared = [hold(0, 10, false).unwrap(), hold(5, 15, false).unwrap()];
        assert!(hold(14, 20, true).is_none());
        let exclusive = hold(15, 20, true).unwrap();
        assert!(hold(19, 30, false).is_none());
        assert!(hold(0, 15, false).is_some());
        drop(shared);
        drop(exclusive);
        assert!(hold(0, u64::MAX, true).is_some());
        assert!(ranges.0.lock().waiting.is_empty());
    }

    #[test]
    fn nobody_overtakes_those_who_wait_for_the_same_bytes() {
        let lease: Lease = Arc::new(());
        let ranges = Arc::new(Ranges::default());
        let hold = |start, end, exclusive| ranges.hold(&lease, start, end, exclusive);
        let first = poll(pin!(hold(0, 10, false))).unwrap();
        let mut exclusive = pin!(hold(5, 20, true));
        assert!(poll(exclusive.as_mut()).is_none());
        {
            // One who gives up is not waited for.
            let mut given_up = pin!(hold(30, 40, true));
            let other = poll(pin!(hold(35, 36, false))).unwrap();
            assert!(poll(given_up.as_mut()).is_none());
            assert!(poll(pin!(hold(30, 31, false))).is_none());
            drop(other);
        }
        let mut later = pin!(hold(15, 30, false));
        assert!(poll(later.as_mut()).is_none(), "it would overtake");
        assert!(poll(pin!(hold(0, 5, false))).is_some(), "it is in nobody's way");
        assert!(poll(pin!(hold(30, 31, false))).is_some());
        drop(first);
        assert!(poll(later.as_mut()).is_none());
        let exclusive = poll(exclusive).unwrap();
        assert!(poll(later.as_mut()).is_none());
        drop(exclusive);
        assert!(poll(later).is_some());
    }
}
