//! The order in which tasks take locks, checked in builds with debug assertions.
//!
//! Two tasks that take two locks in different orders can wait for each other for ever, and a test sees that only if
//! they meet. With a [`Rank`] for each lock, every task that takes them in the wrong order is found, alone. Release
//! builds, and those for loom, check nothing.
//!
//! [`in_order`] says what belongs to one task: a request, or one of several parts of it that run at the same time. A
//! disk's requests begin one, and so do the executor's tasks. Outside of any, only locks that are not held across an
//! await are checked.

#[cfg(all(debug_assertions, not(loom)))]
pub use checked::{Held, InOrder, beneath, in_order};
#[cfg(not(all(debug_assertions, not(loom))))]
pub use unchecked::{Held, beneath, in_order};

/// A lock's place in the order. While a task holds a lock, it takes only locks with a higher place.
#[derive(Clone, Copy, Debug)]
pub struct Rank {
    place: u16,
    name: &'static str,
    waits: bool,
}

impl Rank {
    /// A lock called `name` at this place.
    pub const fn new(place: u16, name: &'static str) -> Self {
        Self { place, name, waits: true }
    }

    /// Like [`new`](Self::new), for what is taken without waiting: several times, and before or after others of this
    /// place.
    pub const fn without_wait(place: u16, name: &'static str) -> Self {
        Self { place, name, waits: false }
    }

    /// What the lock is called.
    pub const fn name(self) -> &'static str {
        self.name
    }

    /// Whether one who holds a lock of rank `held` may take one of this.
    pub const fn may_follow(self, held: Self) -> bool {
        self.place > held.place || (self.place == held.place && !(self.waits && held.waits))
    }
}

#[cfg(all(debug_assertions, not(loom)))]
mod checked {
    use super::Rank;
    use parking_lot::Mutex;
    use std::cell::RefCell;
    use std::future::Future;
    use std::pin::Pin;
    use std::sync::Arc;
    use std::task::{Context, Poll};

    thread_local! {
        /// The task that is being polled.
        static CURRENT: RefCell<Option<Arc<Task>>> = const { RefCell::new(None) };
        /// The locks that this thread holds and that are never held across an await.
        static BRIEF: RefCell<Vec<Rank>> = const { RefCell::new(Vec::new()) };
    }

    /// The locks that a task holds across awaits.
    #[derive(Debug)]
    struct Task {
        held: Mutex<Vec<Rank>>,
        /// The task of which this is a part.
        whole: Option<Arc<Task>>,
    }

    /// A lock that is held, or waited for, until this is dropped.
    #[must_use = "the lock is not held"]
    #[derive(Debug)]
    pub struct Held {
        rank: Rank,
        by: Holder,
    }

    #[derive(Debug)]
    enum Holder {
        Nobody,
        Thread,
        Task(Arc<Task>),
    }

    fn check(rank: Rank, held: &[Rank]) {
        if let Some(before) = held.iter().find(|held| !rank.may_follow(**held))
            && !std::thread::panicking()
        {
            panic!(
                "violated: locks are taken in their order: {} is taken by one who holds {}",
                rank.name(),
                before.name()
            );
        }
    }

    fn check_task(rank: Rank, mut task: Option<&Arc<Task>>) {
        while let Some(part) = task {
            check(rank, &part.held.lock());
            task = part.whole.as_ref();
        }
    }

    impl Held {
        /// A lock that may be held across awaits is about to be waited for, if it has a rank.
        pub fn across_awaits(rank: Option<Rank>) -> Option<Self> {
            let rank = rank?;
            BRIEF.with_borrow(|held| check(rank, held));
            CURRENT.with_borrow(|current| {
                check_task(rank, current.as_ref());
                let by = match current {
                    Some(task) => {
                        task.held.lock().push(rank);
                        Holder::Task(Arc::clone(task))
                    }
                    None => Holder::Nobody,
                };
                Some(Self { rank, by })
            })
        }

        /// A lock that is never held across an await is about to be taken, if it has a rank.
        pub fn briefly(rank: Option<Rank>) -> Option<Self> {
            let rank = rank?;
            CURRENT.with_borrow(|current| check_task(rank, current.as_ref()));
            BRIEF.with_borrow_mut(|held| {
                check(rank, held);
                held.push(rank);
            });
            Some(Self { rank, by: Holder::Thread })
        }
    }

    impl Drop for Held {
        fn drop(&mut self) {
            let remove = |held: &mut Vec<Rank>| {
                let last = held.iter().rposition(|held| held.name() == self.rank.name());
                last.map(|last| held.remove(last));
            };
            match &self.by {
                Holder::Nobody => {}
                Holder::Thread => BRIEF.with_borrow_mut(remove),
                Holder::Task(task) => remove(&mut task.held.lock()),
            }
        }
    }

    /// Runs `work` as a task, or as a part of one: what it holds says what it may take.
    pub fn in_order<F: Future>(work: F) -> InOrder<F> {
        InOrder { work: Box::pin(work), is_part: true, task: None }
    }

    /// Runs `work` on a structure whose locks all come after those that the task holds: locks of the same rank are
    /// others there.
    pub fn beneath<F: Future>(work: F) -> InOrder<F> {
        InOrder { work: Box::pin(work), is_part: false, task: None }
    }

    /// See [`in_order`] and [`beneath`].
    #[must_use = "futures do nothing unless they are awaited"]
    pub struct InOrder<F> {
        // Apart, so that tasks within tasks need no larger stack than in other builds.
        work: Pin<Box<F>>,
        /// It answers for the task that polls it first.
        is_part: bool,
        task: Option<Arc<Task>>,
    }

    impl<F: Future> Future for InOrder<F> {
        type Output = F::Output;

        fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
            let Self { work, is_part, task } = &mut *self;
            let task = task.get_or_insert_with(|| {
                let whole = CURRENT.with_borrow(Clone::clone).filter(|_| *is_part);
                Arc::new(Task { held: Mutex::default(), whole })
            });
            let restored = Restored(CURRENT.replace(Some(Arc::clone(task))));
            let before = BRIEF.with_borrow(Vec::len);
            let polled = work.as_mut().poll(context);
            let after = BRIEF.with_borrow(Vec::len);
            drop(restored);
            assert_eq!(after, before, "violated: a lock that is not held across awaits is held");
            polled
        }
    }

    /// Restores the task that was being polled, after a panic too.
    struct Restored(Option<Arc<Task>>);

    impl Drop for Restored {
        fn drop(&mut self) {
            CURRENT.set(self.0.take());
        }
    }
}

#[cfg(not(all(debug_assertions, not(loom))))]
mod unchecked {
    use super::Rank;

    /// A lock that is held; not checked in this build.
    #[must_use = "the lock is not held"]
    #[derive(Debug)]
    pub enum Held {}

    impl Held {
        /// A lock that may be held across awaits is about to be waited for.
        #[inline(always)]
        pub const fn across_awaits(_rank: Option<Rank>) -> Option<Self> {
            None
        }

        /// A lock that is never held across an await is about to be taken.
        #[inline(always)]
        pub const fn briefly(_rank: Option<Rank>) -> Option<Self> {
            None
        }
    }

    /// Runs `work`; not checked in this build.
    #[inline(always)]
    pub fn in_order<F: Future>(work: F) -> F {
        work
    }

    /// Runs `work`; not checked in this build.
    #[inline(always)]
    pub fn beneath<F: Future>(work: F) -> F {
        work
    }
}

#[cfg(all(test, debug_assertions, not(loom)))]
mod tests {
    use super::*;
    use crate::{AsyncMutex, CheckedMutex, Invariants};
    use futures_executor::block_on;
    use futures_util::future::join;
    use std::future::pending;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::pin::pin;
    use std::task::{Context, Waker};

    const OUTER: Rank = Rank::new(1, "the outer");
    const SIDE: Rank = Rank::without_wait(2, "a side");
    const OTHER_SIDE: Rank = Rank::new(2, "another side");
    const INNER: Rank = Rank::new(3, "the inner");

    struct Brief;

    impl Invariants for Brief {
        const RANK: Option<Rank> = Some(Rank::new(4, "the brief"));

        fn check_invariants(&self) {}
    }

    struct Locks {
        outer: AsyncMutex<()>,
        sides: [AsyncMutex<()>; 2],
        inner: AsyncMutex<()>,
        brief: CheckedMutex<Brief>,
    }

    fn locks() -> Locks {
        Locks {
            outer: AsyncMutex::ranked((), OUTER),
            sides: [SIDE, OTHER_SIDE].map(|rank| AsyncMutex::ranked((), rank)),
            inner: AsyncMutex::ranked((), INNER),
            brief: CheckedMutex::new(Brief),
        }
    }

    #[track_caller]
    fn assert_refused<T>(work: impl Future<Output = T>, what: &str) {
        let ended = catch_unwind(AssertUnwindSafe(|| block_on(in_order(work))));
        let Err(stopped) = ended else { panic!("it ends although {what}") };
        let text = stopped.downcast_ref::<String>();
        assert!(text.is_some_and(|text| text.contains(what)), "{text:?}");
    }

    #[test]
    fn locks_in_their_order_are_taken() {
        let locks = locks();
        block_on(in_order(async {
            let _outer = locks.outer.lock().await;
            let _other = locks.sides[1].lock().await;
            let _side = locks.sides[0].lock().await;
            let inner = locks.inner.lock().await;
            drop(locks.brief.lock());
            drop(inner);
            let _inner = locks.inner.lock().await;
        }));
    }

    #[test]
    fn a_lock_out_of_order_is_refused_though_nobody_waits() {
        let locks = locks();
        let what = "the outer is taken by one who holds the inner";
        let inverted = async {
            let _inner = locks.inner.lock().await;
            drop(locks.outer.lock().await);
        };
        assert_refused(inverted, what);
        let across = async {
            let _inner = locks.inner.lock().await;
            in_order(async { drop(locks.outer.lock().await) }).await;
        };
        assert_refused(across, what);
        let twice = async {
            let _inner = locks.inner.lock().await;
            drop(locks.inner.lock().await);
        };
        assert_refused(twice, "the inner is taken by one who holds the inner");
    }

    #[test]
    fn a_brief_lock_is_held_neither_across_awaits_nor_for_another() {
        let locks = locks();
        let held = async {
            let _brief = locks.brief.lock();
            pending::<()>().await;
        };
        assert_refused(held, "not held across awaits is held");
        let awaited = async {
            let _brief = locks.brief.lock();
            drop(locks.inner.lock().await);
        };
        assert_refused(awaited, "the inner is taken by one who holds the brief");
    }

    #[test]
    fn parts_that_run_at_the_same_time_hold_locks_of_their_own() {
        let locks = locks();
        let (inner, sides) = (&locks.inner, &locks.sides);
        block_on(in_order(async {
            let _outer = locks.outer.lock().await;
            let mut first = pin!(in_order(async {
                let _inner = inner.lock().await;
                pending::<()>().await;
            }));
            assert!(first.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
            // The first holds the inner, and this one holds nothing.
            let part = || in_order(async { drop(sides[0].lock().await) });
            join(part(), part()).await;
        }));
    }
}
