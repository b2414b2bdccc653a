//! Simulated time, which passes only when all tasks wait for it.

use isobath_disk::clock::Clock;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

#[derive(Debug, Default)]
struct Timers {
    now: Duration,
    next: u64,
    waiting: BTreeMap<(Duration, u64), Waker>,
}

/// A simulation's clock. Clones share the time.
#[derive(Clone, Debug, Default)]
pub struct SimClock(Arc<Mutex<Timers>>);

impl SimClock {
    /// Advances to the next waiting task and wakes it; returns whether there was one.
    pub fn advance(&self) -> bool {
        let mut timers = self.0.lock();
        let Some(((time, _), waker)) = timers.waiting.pop_first() else { return false };
        timers.now = timers.now.max(time);
        drop(timers);
        waker.wake();
        true
    }

    /// Advances the time by this much, regardless of waiting tasks.
    pub fn pass(&self, length: Duration) {
        let mut timers = self.0.lock();
        timers.now += length;
        let now = timers.now;
        let mut due = Vec::new();
        while let Some(first) = timers.waiting.first_entry().filter(|first| first.key().0 <= now) {
            due.push(first.remove());
        }
        drop(timers);
        due.into_iter().for_each(Waker::wake);
    }

    /// Waits for this long.
    pub fn sleep(&self, length: Duration) -> impl Future<Output = ()> + use<> {
        let until = self.0.lock().now + length;
        self.wait_until(until)
    }

    fn wait_until(&self, until: Duration) -> impl Future<Output = ()> + use<> {
        let mut wait = Wait { clock: self.clone(), at: None };
        poll_fn(move |context| {
            let mut timers = wait.clock.0.lock();
            if let Some(at) = wait.at.take() {
                timers.waiting.remove(&at);
            }
            if timers.now >= until {
                return Poll::Ready(());
            }
            timers.next += 1;
            let at = (until, timers.next);
            timers.waiting.insert(at, context.waker().clone());
            drop(timers);
            wait.at = Some(at);
            Poll::Pending
        })
    }
}

/// An entry in the list of waiting tasks, which is removed when dropped.
struct Wait {
    clock: SimClock,
    at: Option<(Duration, u64)>,
}

impl Drop for Wait {
    fn drop(&mut self) {
        if let Some(at) = self.at {
            self.clock.0.lock().waiting.remove(&at);
        }
    }
}

impl Clock for SimClock {
    fn now(&self) -> Duration {
        let mut timers = self.0.lock();
        // Code takes time, too.
        timers.now += Duration::from_nanos(100);
        timers.now
    }

    fn sleep_until(&self, time: Duration) -> Pin<Box<dyn Future<Output = ()>>> {
        Box::pin(self.wait_until(time))
    }
}
