//! A semaphore for tasks: first come, first served.

use super::Mutex;
use super::atomic::{AtomicUsize, Ordering};
use super::order::{Held, Rank};
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

/// The bit of [`Semaphore::state`] that is set while tasks wait. The number of permits is above it.
const WAITED_FOR: usize = 1;
/// One permit in [`Semaphore::state`].
const PERMIT: usize = 2;

/// A counting semaphore: tasks take permits and return them.
///
/// A permit that becomes free goes to the task that has waited longest; later ones cannot overtake it. The order thus
/// depends only on the order of calls, not on timing. A task that wants many permits holds up those behind it until it
/// has them.
#[derive(Debug)]
pub struct Semaphore {
    /// The free permits, times [`PERMIT`], and [`WAITED_FOR`]. While that bit is set, only the holder of `waiting`
    /// changes this.
    state: AtomicUsize,
    waiting: Mutex<Queue>,
    rank: Option<Rank>,
}

/// The waiting tasks, in order of arrival.
#[derive(Debug, Default)]
struct Queue {
    /// By ascending `turn`.
    tasks: VecDeque<Waiter>,
    next: u64,
}

#[derive(Debug)]
struct Waiter {
    turn: u64,
    count: usize,
    waker: Waker,
}

impl Queue {
    fn find(&self, turn: u64) -> Option<usize> {
        self.tasks.binary_search_by_key(&turn, |waiter| waiter.turn).ok()
    }
}

impl Semaphore {
    /// A semaphore with this many permits.
    pub fn new(permits: usize) -> Self {
        Self { state: AtomicUsize::new(permits * PERMIT), waiting: Mutex::default(), rank: None }
    }

    /// A semaphore with this many permits and a place in the order of locks.
    pub fn ranked(permits: usize, rank: Rank) -> Self {
        Self { rank: Some(rank), ..Self::new(permits) }
    }

    /// Waits for a permit.
    pub async fn acquire(&self) -> Permits<'_> {
        self.acquire_many(1).await
    }

    /// Waits for this many permits. If the semaphore has fewer, this never completes.
    pub async fn acquire_many(&self, count: usize) -> Permits<'_> {
        let held = Held::across_awaits(self.rank);
        if !self.take(count) {
            Wait { semaphore: self, count, turn: None }.await;
        }
        Permits { semaphore: self, count, _held: held }
    }

    /// Takes permits if there are enough and no task waits.
    #[inline]
    fn take(&self, count: usize) -> bool {
        let mut state = self.state.load(Ordering::Relaxed);
        while state & WAITED_FOR == 0 && state >= count * PERMIT {
            let less = state - count * PERMIT;
            match self.state.compare_exchange(state, less, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(now) => state = now,
            }
        }
        false
    }

    /// Takes permits, or enters the queue and returns the turn.
    fn take_or_enter(&self, count: usize, waker: &Waker) -> Option<u64> {
        let mut queue = self.waiting.lock();
        let mut state = self.state.load(Ordering::Relaxed);
        loop {
            let free = state & WAITED_FOR == 0 && state >= count * PERMIT;
            let new = if free { state - count * PERMIT } else { state | WAITED_FOR };
            match self.state.compare_exchange(state, new, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) if free => return None,
                Ok(_) => break,
                Err(now) => state = now,
            }
        }
        let turn = queue.next;
        queue.next += 1;
        queue.tasks.push_back(Waiter { turn, count, waker: waker.clone() });
        Some(turn)
    }

    /// Gives permits back.
    #[inline]
    fn release(&self, count: usize) {
        let mut state = self.state.load(Ordering::Relaxed);
        while state & WAITED_FOR == 0 {
            let more = state + count * PERMIT;
            match self.state.compare_exchange(state, more, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => state = now,
            }
        }
        self.release_to_waiting(count);
    }

    #[cold]
    fn release_to_waiting(&self, count: usize) {
        // The waiting tasks may be gone by now; this is then an ordinary addition.
        let queue = self.waiting.lock();
        self.state.fetch_add(count * PERMIT, Ordering::AcqRel);
        drop(queue);
        self.grant();
    }

    /// Gives the free permits to the tasks that have waited longest.
    fn grant(&self) {
        while let Some(waker) = self.grant_next() {
            waker.wake();
        }
    }

    fn grant_next(&self) -> Option<Waker> {
        let mut queue = self.waiting.lock();
        let count = queue.tasks.front()?.count;
        // A task waits, so only the holder of `waiting` changes the state.
        let state = self.state.load(Ordering::Acquire);
        if state < count * PERMIT {
            return None;
        }
        let waiter = queue.tasks.pop_front();
        let waited_for = if queue.tasks.is_empty() { WAITED_FOR } else { 0 };
        self.state.fetch_sub(count * PERMIT + waited_for, Ordering::AcqRel);
        waiter.map(|waiter| waiter.waker)
    }

    /// Leaves the queue. A task no longer in it has been granted its permits, which are returned.
    fn leave(&self, turn: u64, count: usize) {
        let mut queue = self.waiting.lock();
        let Some(place) = queue.find(turn) else {
            drop(queue);
            return self.release(count);
        };
        queue.tasks.remove(place);
        if queue.tasks.is_empty() {
            self.state.fetch_sub(WAITED_FOR, Ordering::AcqRel);
        }
        drop(queue);
        // Tasks behind it may want fewer.
        self.grant();
    }
}

/// The wait for permits.
struct Wait<'a> {
    semaphore: &'a Semaphore,
    count: usize,
    /// Set once this is in the queue.
    turn: Option<u64>,
}

impl Future for Wait<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let semaphore = self.semaphore;
        let Some(turn) = self.turn else {
            self.turn = semaphore.take_or_enter(self.count, context.waker());
            return if self.turn.is_none() { Poll::Ready(()) } else { Poll::Pending };
        };
        let mut queue = semaphore.waiting.lock();
        if let Some(place) = queue.find(turn) {
            queue.tasks[place].waker.clone_from(context.waker());
            return Poll::Pending;
        }
        drop(queue);
        self.turn = None;
        Poll::Ready(())
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        if let Some(turn) = self.turn {
            self.semaphore.leave(turn, self.count);
        }
    }
}

/// Permits of a [`Semaphore`], returned when dropped.
#[derive(Debug)]
#[must_use = "if unused, the permits are returned immediately"]
pub struct Permits<'a> {
    semaphore: &'a Semaphore,
    count: usize,
    _held: Option<Held>,
}

impl Drop for Permits<'_> {
    #[inline]
    fn drop(&mut self) {
        self.semaphore.release(self.count);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::pin::pin;

    fn poll<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    fn ready<F: Future>(future: Pin<&mut F>) -> F::Output {
        match poll(future) {
            Poll::Ready(output) => output,
            Poll::Pending => panic!("this must not wait"),
        }
    }

    #[test]
    fn who_came_first_is_served_first() {
        let semaphore = Semaphore::new(1);
        let permit = ready(pin!(semaphore.acquire()));
        let (mut first, mut second) = (pin!(semaphore.acquire()), pin!(semaphore.acquire()));
        assert!(poll(first.as_mut()).is_pending() && poll(second.as_mut()).is_pending());
        drop(permit);
        assert!(
            poll(pin!(semaphore.acquire())).is_pending(),
            "one that comes later overtakes those who wait"
        );
        assert!(poll(second.as_mut()).is_pending(), "the second is served first");
        let permit = ready(first);
        assert!(poll(second.as_mut()).is_pending());
        drop(permit);
        drop(ready(second));
        drop(ready(pin!(semaphore.acquire())));
    }

    #[test]
    fn who_gives_up_keeps_nothing_and_holds_nobody_up() {
        let semaphore = Semaphore::new(2);
        let permit = ready(pin!(semaphore.acquire()));
        let mut small = pin!(semaphore.acquire());
        {
            let mut large = pin!(semaphore.acquire_many(2));
            assert!(poll(large.as_mut()).is_pending() && poll(small.as_mut()).is_pending());
        }
        let small = ready(small);
        {
            let mut granted = pin!(semaphore.acquire());
            assert!(poll(granted.as_mut()).is_pending());
            drop(permit);
            // It is granted the permit, and dropped before it is polled again.
        }
        drop(small);
        drop(ready(pin!(semaphore.acquire_many(2))));
    }

    #[test]
    fn who_wants_all_waits_for_all() {
        let semaphore = Semaphore::new(3);
        let permits = [(); 3].map(|()| ready(pin!(semaphore.acquire())));
        let mut all = pin!(semaphore.acquire_many(3));
        for permit in permits {
            assert!(poll(all.as_mut()).is_pending());
            drop(permit);
        }
        let all = ready(all);
        assert!(poll(pin!(semaphore.acquire())).is_pending());
        drop(all);
    }
}
