//! Waiting for what other tasks and threads do.

use super::atomic::{AtomicUsize, Ordering};
use event_listener::Event;

/// Waits until something holds of what threads share, such as that a counter is 0. Whoever makes it hold says
/// so after that.
///
/// What is looked at must be a lock's content, or atomics that are changed and read with `SeqCst`: then no change
/// comes unnoticed between a look and the wait after it.
#[derive(Debug, Default)]
pub struct Condition {
    changed: Event,
}

impl Condition {
    /// Waits until `holds` is true, which is looked at once at least, and again after each
    /// [`changed`](Self::changed).
    pub async fn until(&self, holds: impl Fn() -> bool) {
        // The first look allocates nothing. The second is for changes that came before this listened.
        while !holds() {
            let changed = self.changed.listen();
            if holds() {
                return;
            }
            changed.await;
        }
    }

    /// Has everybody who waits look again. To be called after the change.
    #[inline]
    pub fn changed(&self) {
        self.changed.notify(usize::MAX);
    }
}

/// Counts what is under way, and waits until nothing is.
///
/// Others may begin meanwhile: who waits sees to it that they do not, or wants to wait for them too.
#[derive(Debug, Default)]
pub struct WaitGroup {
    count: AtomicUsize,
    empty: Condition,
}

impl WaitGroup {
    /// One more is under way.
    pub fn begin(&self) {
        self.count.fetch_add(1, Ordering::SeqCst);
    }

    /// One that [began](Self::begin) has ended.
    pub fn end(&self) {
        if self.count.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.empty.changed();
        }
    }

    /// Whether nothing is under way.
    pub fn is_empty(&self) -> bool {
        self.count.load(Ordering::SeqCst) == 0
    }

    /// Waits until nothing is under way, at one moment.
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
        /// What two that began before anything else write.
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
