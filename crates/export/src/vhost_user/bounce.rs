//! Memory for bounce buffers, limited for all devices of the process.

use crate::budget::{ASSURED, Budget, Share};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

/// Bytes of bounce buffers that all devices of the process together may have, beyond the bytes guaranteed to each.
pub(super) const MEMORY: usize = 256 << 20;

/// Bytes of free buffers that a thread keeps for its queues.
pub(super) const FREE: usize = 16 << 20;

/// What all devices of the process take from.
pub(super) static BUDGET: Budget = Budget::new(MEMORY, ASSURED);

/// A device's share of a budget, for its queues on any thread. Requests get their bytes in the order of arrival.
pub(crate) struct Bounces {
    share: Mutex<Share<'static>>,
    line: Arc<Line>,
    /// Wakes the first in the line.
    waker: Waker,
    /// Bytes of free buffers that a thread keeps for its queues.
    pub(crate) free: usize,
}

/// Requests that wait.
#[derive(Default)]
struct Line {
    state: Mutex<Waiting>,
}

#[derive(Default)]
struct Waiting {
    next: u64,
    wakers: BTreeMap<u64, Waker>,
}

impl Bounces {
    /// The share of a new device.
    pub(crate) fn of(budget: &'static Budget) -> Self {
        let line = Arc::<Line>::default();
        let waker = Waker::from(line.clone());
        Self { share: Mutex::new(budget.share()), line, waker, free: FREE }
    }

    /// Has threads keep at most `free` bytes of free buffers.
    pub(crate) fn keeping(self, free: usize) -> Self {
        Self { free, ..self }
    }

    /// Waits for this many bytes, which are the caller's until what this returns is dropped. Whoever waits must hold no
    /// others.
    pub(crate) fn take(&self, bytes: usize) -> Take<'_> {
        Take { bounces: self, bytes, place: None }
    }

    /// Takes bytes if they are available; if not, the line is woken when there may be more.
    fn try_take(&self, bytes: usize) -> Option<Taken<'_>> {
        let taken = self.share.lock().poll_take(bytes, &Context::from_waker(&self.waker));
        taken.is_ready().then(|| Taken { bounces: self, bytes })
    }
}

/// A future that waits for bytes; see [`Bounces::take`].
pub(crate) struct Take<'a> {
    bounces: &'a Bounces,
    bytes: usize,
    /// The place in the line, if it waits.
    place: Option<u64>,
}

/// Bytes of a share, until they are dropped.
pub(crate) struct Taken<'a> {
    bounces: &'a Bounces,
    bytes: usize,
}

impl<'a> Future for Take<'a> {
    type Output = Taken<'a>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Taken<'a>> {
        let Self { bounces, bytes, place } = *self;
        if place.is_none()
            && bounces.line.is_empty()
            && let Some(taken) = bounces.try_take(bytes)
        {
            return Poll::Ready(taken);
        }
        // It is in the line before the last look, so that no bytes are given back unnoticed.
        let (place, is_first) = bounces.line.stand(place, cx.waker());
        self.place = Some(place);
        if is_first && let Some(taken) = bounces.try_take(bytes) {
            self.leave();
            return Poll::Ready(taken);
        }
        Poll::Pending
    }
}

impl Take<'_> {
    fn leave(&mut self) {
        if let Some(place) = self.place.take() {
            self.bounces.line.leave(place);
        }
    }
}

impl Drop for Take<'_> {
    fn drop(&mut self) {
        self.leave();
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.bounces.share.lock().give(self.bytes);
        self.bounces.line.wake_first();
    }
}

impl Line {
    fn is_empty(&self) -> bool {
        self.state.lock().wakers.is_empty()
    }

    /// Waits at a place, or at the end, to be woken by this waker; returns the place, and whether it is the first.
    fn stand(&self, place: Option<u64>, waker: &Waker) -> (u64, bool) {
        let mut state = self.state.lock();
        let place = place.unwrap_or_else(|| {
            state.next += 1;
            state.next
        });
        state.wakers.insert(place, waker.clone());
        (place, state.wakers.keys().next() == Some(&place))
    }

    fn leave(&self, place: u64) {
        self.state.lock().wakers.remove(&place);
        self.wake_first();
    }

    fn wake_first(&self) {
        let first = self.state.lock().wakers.values().next().cloned();
        if let Some(first) = first {
            first.wake();
        }
    }
}

impl Wake for Line {
    fn wake(self: Arc<Self>) {
        self.wake_first();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.wake_first();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;
    use std::sync::atomic::{AtomicUsize, Ordering};

    const MIB: usize = 1 << 20;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn budget(limit: usize) -> &'static Budget {
        Box::leak(Box::new(Budget::new(limit, ASSURED)))
    }

    /// Takes as often as possible.
    fn take_all(bounces: &Bounces, bytes: usize) -> Vec<Taken<'_>> {
        std::iter::from_fn(|| bounces.try_take(bytes)).collect()
    }

    #[test]
    fn one_devices_share_leaves_each_other_what_it_is_assured_of() {
        let budget = budget(64 * MIB);
        let (greedy, other) = (Bounces::of(budget), Bounces::of(budget));
        let held = take_all(&greedy, MIB);
        let most = ASSURED + budget.held();
        assert_eq!(held.len() * MIB, most);
        assert!(most > ASSURED && most <= ASSURED + 64 * MIB / 8, "{most}");
        assert!(take_all(&other, MIB).len() * MIB > ASSURED);
        drop(held);
        assert_eq!(budget.held(), 0);
    }

    #[test]
    fn requests_get_their_bytes_in_the_order_of_arrival() {
        let bounces = Bounces::of(budget(0));
        let mut held = take_all(&bounces, MIB);
        assert_eq!(held.len() * MIB, ASSURED);
        let count = [(); 3].map(|()| Arc::new(Count::default()));
        let wakers = [0, 1, 2].map(|at| Waker::from(count[at].clone()));
        let woken = || [0, 1, 2].map(|at: usize| count[at].0.load(Ordering::Relaxed));
        let mut first = pin!(bounces.take(2 * MIB));
        let mut second = Box::pin(bounces.take(MIB));
        let mut third = pin!(bounces.take(4096));
        let [mut one, mut two, mut three] =
            [0, 1, 2].map(|at: usize| Context::from_waker(&wakers[at]));
        assert!(first.as_mut().poll(&mut one).is_pending());
        assert!(second.as_mut().poll(&mut two).is_pending());
        assert!(third.as_mut().poll(&mut three).is_pending());
        held.pop();
        assert_eq!(woken(), [1, 0, 0], "the bytes become free for the first only");
        assert!(first.as_mut().poll(&mut one).is_pending());
        assert!(third.as_mut().poll(&mut three).is_pending(), "who needs less does not overtake");
        held.pop();
        let taken = first.as_mut().poll(&mut one);
        assert!(taken.is_ready());
        assert_eq!(woken(), [2, 1, 0], "the next one looks, too");
        drop(second);
        assert_eq!(woken(), [2, 1, 1], "who leaves lets the next one look");
        assert!(third.as_mut().poll(&mut three).is_pending());
        drop(taken);
        assert_eq!(woken(), [2, 1, 2]);
        assert!(third.as_mut().poll(&mut three).is_ready());
        assert!(bounces.line.is_empty());
    }

    #[test]
    fn what_a_device_gives_back_wakes_the_others() {
        let budget = budget(8 * MIB);
        let (one, other) = (Bounces::of(budget), Bounces::of(budget));
        let held = take_all(&one, MIB);
        let kept = take_all(&other, MIB);
        let count = Arc::new(Count::default());
        let waker = Waker::from(count.clone());
        let mut waiting = pin!(other.take(MIB));
        assert!(waiting.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        assert_eq!(count.0.load(Ordering::Relaxed), 0);
        drop(held);
        assert!(count.0.load(Ordering::Relaxed) > 0);
        assert!(waiting.as_mut().poll(&mut Context::from_waker(&waker)).is_ready());
        assert!(!kept.is_empty());
    }
}
