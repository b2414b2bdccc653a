//! Waiting for other tasks and threads.

use super::atomic::{AtomicUsize, Ordering};
use event_listener::Event;

/// Waits for a condition on shared state, such as a counter being 0. Code that makes it true must then call
/// [`changed`](Self::changed).
///
/// The state must be protected by a lock, or consist of atomics accessed with `SeqCst`, so that no change is missed
/// between a check and the following wait.
#[derive(Debug, Default)]
pub struct Condition {
    changed: Event,
}

impl Condition {
    /// Waits until `holds` returns true. It is checked at least once, and again after each [`changed`](Self::changed).
    pub async fn until(&self, holds: impl Fn() -> bool) {
        // The first check allocates nothing. The second catches changes made before `listen`.
        while !holds() {
            let changed = self.changed.listen();
            if holds() {
                return;
            }
            changed.await;
        }
    }

    /// Makes all waiters check again. Call it after the change.
    #[inline]
    pub fn changed(&self) {
        self.changed.notify(usize::MAX);
    }
}

/// Counts operations in progress, and waits until there are none.
///
/// New ones may begin meanwhile: the caller must prevent that, or accept waiting for them too.
#[derive(Debug, Default)]
pub struct WaitGroup {
    count: AtomicUsize,
    empty: Condition,
}

impl WaitGroup {
    /// Records the start of an operation.
    pub fn begin(&self) {
        self.count.fetch_add(1, Ordering::SeqCst);
    }

    /// Records the end of an operation that [began](Self::begin).
    pub fn end(&self) {
        if self.count.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.empty.changed();
        }
    }

    /// Whether no operations are in progress.
    pub fn is_empty(&self) -> bool {
        self.count.load(Ordering::SeqCst) == 0
    }

    /// Waits for a moment at which no operations are in progress.
    pub async fn ended(&self) {
        self.empty.until(|| self.is_empty()).await;
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Waker};

    #[test]
    fn the_last_one_ends_the_wait() {
        let group = WaitGroup::default();
        let mut context = Context::from_waker(Waker::noop());
        assert!(pin!(group.ended()).poll(&mut context).is_ready());
        group.begin();
        group.begin();
        let mut ended = pin!(group.ended());
        assert!(ended.as_mut().poll(&mut context).is_pending());
        group.end();
        assert!(ended.as_mut().poll(&mut context).is_pending() && !group.is_empty());
        group.end();
        assert!(ended.as_mut().poll(&mut context).is_ready());
    }
}

#[cfg(all(test, loom))]
mod interleavings {
    use super::super::{Cell, explore, wait};
    use super::*;

    struct Work {
        group: WaitGroup,
        /// The data written by the two operations, which began before everything else.
        data: [Cell<u8>; 2],
    }

    fn work() -> Work {
        let work = Work { group: WaitGroup::default(), data: [Cell::new(0), Cell::new(0)] };
        work.group.begin();
        work.group.begin();
        work
    }

    fn end(work: &Work, number: usize) {
        work.data[number].set(1);
        work.group.end();
    }

    fn ended(work: &Work) {
        wait(work.group.ended());
        assert!(work.data.iter().all(|data| data.get() == 1));
    }

    #[test]
    fn who_waits_finds_all_that_was_done() {
        let tasks: &[fn(&Work)] = &[|w| end(w, 0), |w| end(w, 1), ended];
        explore("WaitGroup, two that end and a wait", 3, work, tasks, |_| ());
    }

    #[test]
    fn two_wait() {
        let tasks: &[fn(&Work)] = &[|w| (0..2).for_each(|n| end(w, n)), ended, ended];
        explore("WaitGroup, two that end and two waits", 2, work, tasks, |_| ());
    }
}
