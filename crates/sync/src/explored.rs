//! The same types for loom, which runs a small program in every possible interleaving of its threads.

use loom::sync;
use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, PoisonError};
use std::time::Instant;

/// Like `parking_lot`'s.
#[derive(Debug, Default)]
pub struct Mutex<T>(sync::Mutex<T>);

/// Like `parking_lot`'s.
pub type MutexGuard<'a, T> = sync::MutexGuard<'a, T>;

impl<T> Mutex<T> {
    /// An unlocked lock.
    pub fn new(value: T) -> Self {
        Self(sync::Mutex::new(value))
    }

    /// Waits for the lock.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Like the standard library's.
#[derive(Debug, Default)]
pub struct Condvar(sync::Condvar);

impl Condvar {
    /// One that nobody waits for.
    pub fn new() -> Self {
        Self(sync::Condvar::new())
    }

    /// Unlocks, waits to be notified, and locks again.
    pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        self.0.wait(guard).unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends one wait.
    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    /// Ends all waits.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }
}

/// Like `parking_lot`'s.
#[derive(Debug, Default)]
pub struct RwLock<T>(sync::RwLock<T>);

impl<T> RwLock<T> {
    /// An unlocked lock.
    pub fn new(value: T) -> Self {
        Self(sync::RwLock::new(value))
    }

    /// Locks it for reading.
    pub fn read(&self) -> sync::RwLockReadGuard<'_, T> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks it for writing.
    pub fn write(&self) -> sync::RwLockWriteGuard<'_, T> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

pub mod atomic {
    //! Like the standard library's.
    //!
    //! loom treats a sequentially consistent access as acquire and release, but supports sequentially consistent
    //! fences, so each such access is put between two.

    pub use loom::sync::atomic::{Ordering, fence};

    fn between_fences<R>(order: Ordering, access: impl FnOnce() -> R) -> R {
        if !matches!(order, Ordering::SeqCst) {
            return access();
        }
        fence(order);
        let result = access();
        fence(order);
        result
    }

    macro_rules! number {
        ($name:ident, $of:ty) => {
            /// Like the standard library's.
            #[derive(Debug, Default)]
            pub struct $name(loom::sync::atomic::$name);

            impl $name {
                /// An atomic with an initial value.
                pub fn new(value: $of) -> Self {
                    Self(loom::sync::atomic::$name::new(value))
                }

                /// The value.
                pub fn load(&self, order: Ordering) -> $of {
                    between_fences(order, || self.0.load(order))
                }

                /// Sets the value.
                pub fn store(&self, value: $of, order: Ordering) {
                    between_fences(order, || self.0.store(value, order));
                }

                /// Sets the value if it is `current`; returns the previous one, as an error if it differs.
                pub fn compare_exchange(
                    &self,
                    current: $of,
                    new: $of,
                    success: Ordering,
                    failure: Ordering,
                ) -> Result<$of, $of> {
                    between_fences(success, || {
                        self.0.compare_exchange(current, new, success, failure)
                    })
                }

                /// Sets the value; returns the previous one.
                pub fn swap(&self, value: $of, order: Ordering) -> $of {
                    between_fences(order, || self.0.swap(value, order))
                }
            }
        };
        ($name:ident, $of:ty, counts) => {
            number!($name, $of);

            impl $name {
                /// Adds; returns the previous value.
                pub fn fetch_add(&self, value: $of, order: Ordering) -> $of {
                    between_fences(order, || self.0.fetch_add(value, order))
                }

                /// Subtracts; returns the previous value.
                pub fn fetch_sub(&self, value: $of, order: Ordering) -> $of {
                    between_fences(order, || self.0.fetch_sub(value, order))
                }

                /// Raises the value if it is lower; returns the previous value.
                pub fn fetch_max(&self, value: $of, order: Ordering) -> $of {
                    between_fences(order, || self.0.fetch_max(value, order))
                }
            }
        };
    }

    number!(AtomicBool, bool);
    number!(AtomicU16, u16, counts);
    number!(AtomicU64, u64, counts);
    number!(AtomicUsize, usize, counts);
}

/// A value that no two threads may use concurrently if one of them changes it. Accesses must be ordered by a lock or an
/// atomic; loom reports violations.
#[derive(Debug, Default)]
pub struct Cell<T>(loom::cell::UnsafeCell<T>);

// SAFETY: loom ends the program at the first data race.
unsafe impl<T: Send> Sync for Cell<T> {}

impl<T: Copy> Cell<T> {
    /// A cell with an initial value.
    pub fn new(value: T) -> Self {
        Self(loom::cell::UnsafeCell::new(value))
    }

    /// The value.
    pub fn get(&self) -> T {
        // SAFETY: checked by loom.
        self.0.with(|value| unsafe { *value })
    }

    /// Sets the value.
    pub fn set(&self, new: T) {
        // SAFETY: checked by loom.
        self.0.with_mut(|value| unsafe { *value = new });
    }
}

/// Runs a future to completion on this loom thread.
pub fn wait<F: Future>(future: F) -> F::Output {
    loom::future::block_on(future)
}

/// Runs `tasks`, each on its own thread, over a new `start()`, then `end`: in every possible order with at most
/// `preemptions` switches away from a thread that could continue. Prints the number of orders. A panic, a deadlock, or
/// a data race on a [`Cell`] ends it.
///
/// `ISOBATH_PREEMPTIONS` overrides the bound; `all` removes it.
pub fn explore<S: Send + Sync + 'static>(
    name: &str,
    preemptions: usize,
    start: fn() -> S,
    tasks: &'static [fn(&S)],
    end: fn(&S),
) {
    let bound = match std::env::var("ISOBATH_PREEMPTIONS") {
        Ok(all) if all == "all" => None,
        Ok(number) => Some(number.parse().expect("ISOBATH_PREEMPTIONS must be a number or `all`")),
        Err(_) => Some(preemptions),
    };
    explore_within(name, bound, start, tasks, end);
}

/// Like [`explore`], but ignores `ISOBATH_PREEMPTIONS`: for bugs that show only with this many preemptions.
pub fn explore_within<S: Send + Sync + 'static>(
    name: &str,
    bound: Option<usize>,
    start: fn() -> S,
    tasks: &'static [fn(&S)],
    end: fn(&S),
) {
    let orders = Arc::new(AtomicU64::new(0));
    let count = orders.clone();
    let mut model = loom::model::Builder::new();
    model.preemption_bound = bound;
    model.max_branches = 20_000;
    let begin = Instant::now();
    model.check(move || {
        count.fetch_add(1, Relaxed);
        let state = Arc::new(start());
        // The last one runs on the main thread: loom supports at most five.
        let (last, others) = tasks.split_last().expect("something to run");
        let threads: Vec<_> = others
            .iter()
            .map(|task| {
                let state = state.clone();
                loom::thread::spawn(move || task(&state))
            })
            .collect();
        last(&state);
        for thread in threads {
            thread.join().expect("a panic ends the program");
        }
        end(&state);
    });
    let bound = bound.map_or("any number of".into(), |bound| format!("at most {bound}"));
    let (orders, time) = (orders.load(Relaxed), begin.elapsed());
    println!("{name}: {orders} orders, all with {bound} preemptions, in {time:.1?}");
}
