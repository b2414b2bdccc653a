//! The timers of one executor.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::task::Waker;
use std::time::{Duration, Instant};

/// The timers of one executor, in order of expiry.
#[derive(Default)]
pub(super) struct Timers {
    waiting: RefCell<BTreeMap<(Instant, u64), Waker>>,
    next: Cell<u64>,
}

impl Timers {
    /// A unique number for a timer.
    pub(super) fn new_id(&self) -> u64 {
        let id = self.next.get();
        self.next.set(id + 1);
        id
    }

    /// Sets a timer; replaces an earlier one with the same deadline and number.
    pub(super) fn set(&self, deadline: Instant, id: u64, waker: Waker) {
        let old = self.waiting.borrow_mut().insert((deadline, id), waker);
        drop(old);
    }

    /// Removes a timer.
    pub(super) fn remove(&self, deadline: Instant, id: u64) {
        let old = self.waiting.borrow_mut().remove(&(deadline, id));
        drop(old);
    }

    /// Wakes expired timers; returns the time until the next one expires.
    pub(super) fn expire(&self) -> Option<Duration> {
        if self.waiting.borrow().is_empty() {
            return None;
        }
        let now = Instant::now();
        loop {
            let mut waiting = self.waiting.borrow_mut();
            let first = waiting.first_entry()?;
            let deadline = first.key().0;
            if deadline > now {
                return Some(deadline - now);
            }
            let waker = first.remove();
            drop(waiting);
            waker.wake();
        }
    }
}
