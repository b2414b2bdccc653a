//! Runs many futures of one type in one task, without an allocation for each.

use parking_lot::Mutex;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

/// How many rounds of woken futures are polled before the task yields.
const ROUNDS: usize = 16;

/// A set of running futures. The slot of a finished future is reused, and only futures that were woken are polled.
pub(crate) struct Slots<F> {
    places: Vec<Slot<F>>,
    free: Vec<usize>,
    woken: Arc<Woken>,
    /// The list being processed, kept to reuse its memory.
    batch: Vec<usize>,
}

struct Slot<F> {
    future: Pin<Box<Option<F>>>,
    flag: Arc<Flag>,
    waker: Waker,
}

struct Flag {
    index: usize,
    /// Whether the index is already in the list.
    listed: AtomicBool,
    woken: Arc<Woken>,
}

#[derive(Default)]
struct Woken {
    state: Mutex<Ready>,
}

#[derive(Default)]
struct Ready {
    list: Vec<usize>,
    task: Option<Waker>,
}

impl Wake for Flag {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.listed.swap(true, Ordering::AcqRel) {
            return;
        }
        let task = {
            let mut state = self.woken.state.lock();
            state.list.push(self.index);
            if state.list.len() > 1 { None } else { state.task.clone() }
        };
        if let Some(task) = task {
            task.wake();
        }
    }
}

impl<F: Future<Output = ()>> Slots<F> {
    pub(crate) fn new() -> Self {
        Self { places: Vec::new(), free: Vec::new(), woken: Arc::default(), batch: Vec::new() }
    }

    /// Whether no future is running.
    pub(crate) fn is_empty(&self) -> bool {
        self.free.len() == self.places.len()
    }

    /// Polls a new future once, and keeps it if it is pending. It is made in its slot: it may have several KiB, and
    /// moving those would take longer than a small read.
    #[inline]
    pub(crate) fn start(&mut self, make: impl FnOnce() -> F) {
        let index = self.free_slot();
        if let Some(slot) = self.places.get_mut(index) {
            slot.future.set(Some(make()));
        }
        self.poll_slot(index);
    }

    /// A slot without a future.
    fn free_slot(&mut self) -> usize {
        if let Some(index) = self.free.pop() {
            return index;
        }
        let index = self.places.len();
        let flag =
            Arc::new(Flag { index, listed: AtomicBool::new(false), woken: self.woken.clone() });
        let waker = Waker::from(flag.clone());
        self.places.push(Slot { future: Box::pin(None), flag, waker });
        index
    }

    /// Polls the futures that were woken, and arranges for the calling task to be woken when more are. If futures keep
    /// waking each other, yields to the thread's other tasks, which they may be waiting for.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) {
        for _ in 0..ROUNDS {
            let mut batch = std::mem::take(&mut self.batch);
            {
                let mut state = self.woken.state.lock();
                std::mem::swap(&mut state.list, &mut batch);
                if !state.task.as_ref().is_some_and(|task| task.will_wake(cx.waker())) {
                    state.task = Some(cx.waker().clone());
                }
            }
            let idle = batch.is_empty();
            for index in batch.drain(..) {
                if let Some(slot) = self.places.get(index) {
                    slot.flag.listed.store(false, Ordering::Release);
                }
                self.poll_slot(index);
            }
            self.batch = batch;
            if idle {
                return;
            }
        }
        cx.waker().wake_by_ref();
    }

    /// Polls every future, including those that were not woken.
    pub(crate) fn poll_all(&mut self, cx: &mut Context<'_>) {
        self.poll(cx);
        for index in 0..self.places.len() {
            self.poll_slot(index);
        }
    }

    fn poll_slot(&mut self, index: usize) {
        let Some(slot) = self.places.get_mut(index) else { return };
        let Some(future) = slot.future.as_mut().as_pin_mut() else { return };
        if let Poll::Ready(()) = future.poll(&mut Context::from_waker(&slot.waker)) {
            slot.future.set(None);
            self.free.push(index);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::{Cell, RefCell};
    use std::future::poll_fn;
    use std::sync::atomic::AtomicUsize;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn only_woken_futures_are_polled_and_slots_are_used_again() {
        let count = Arc::new(Count::default());
        let waker = Waker::from(count.clone());
        let mut cx = Context::from_waker(&waker);
        let wakers = RefCell::new(Vec::new());
        let polls = Cell::new(0);
        let mut slots = Slots::new();
        let task = |wait: bool| {
            let (wakers, polls, mut wait) = (&wakers, &polls, wait);
            poll_fn(move |cx| {
                polls.set(polls.get() + 1);
                if std::mem::take(&mut wait) {
                    wakers.borrow_mut().push(cx.waker().clone());
                    return Poll::Pending;
                }
                Poll::Ready(())
            })
        };
        slots.poll(&mut cx);
        slots.start(|| task(false));
        assert!(slots.is_empty());
        for _ in 0..3 {
            slots.start(|| task(true));
        }
        assert_eq!((polls.get(), slots.places.len()), (4, 3));
        for waker in wakers.take().drain(..2) {
            waker.wake_by_ref();
            waker.wake();
        }
        assert_eq!(count.0.load(Ordering::Relaxed), 1, "one wake-up for the batch");
        slots.poll(&mut cx);
        assert_eq!((polls.get(), slots.is_empty()), (6, false));
        slots.start(|| task(true));
        assert_eq!(slots.places.len(), 3);
    }

    #[test]
    fn a_wake_during_the_poll_is_not_lost() {
        let mut cx = Context::from_waker(Waker::noop());
        let mut slots = Slots::new();
        let mut polls = 0;
        let future = poll_fn(move |cx| {
            polls += 1;
            cx.waker().wake_by_ref();
            if polls < 3 { Poll::Pending } else { Poll::Ready(()) }
        });
        slots.start(|| future);
        slots.poll(&mut cx);
        assert!(slots.is_empty());
    }

    #[test]
    fn futures_that_go_on_waking_each_other_leave_the_thread_to_others() {
        let count = Arc::new(Count::default());
        let waker = Waker::from(count.clone());
        let mut cx = Context::from_waker(&waker);
        let mut slots = Slots::new();
        for _ in 0..2 {
            slots.start(|| {
                poll_fn(|cx| {
                    cx.waker().wake_by_ref();
                    Poll::Pending
                })
            });
        }
        slots.poll(&mut cx);
        let before = count.0.load(Ordering::Relaxed);
        slots.poll(&mut cx);
        assert!(count.0.load(Ordering::Relaxed) > before, "their turn comes again");
    }
}
