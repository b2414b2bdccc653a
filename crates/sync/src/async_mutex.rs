//! A mutex that can be held across await points.

#[cfg(loom)]
use super::Cell;
use super::order::Rank;
use super::semaphore::{Permits, Semaphore};
use std::cell::UnsafeCell;
use std::fmt;
use std::ops::{Deref, DerefMut};

/// A mutex that can be held across await points. Tasks acquire it in the order of their calls: see [`Semaphore`].
pub struct AsyncMutex<T> {
    turn: Semaphore,
    #[cfg(loom)]
    held: Cell<()>,
    value: UnsafeCell<T>,
}

// SAFETY: only the holder of the semaphore's one permit accesses the value, so one thread at a time does.
unsafe impl<T: Send> Send for AsyncMutex<T> {}
// SAFETY: as above; sharing the mutex only passes the value from thread to thread.
unsafe impl<T: Send> Sync for AsyncMutex<T> {}

impl<T> AsyncMutex<T> {
    /// An unlocked mutex.
    pub fn new(value: T) -> Self {
        Self {
            turn: Semaphore::new(1),
            #[cfg(loom)]
            held: Cell::new(()),
            value: UnsafeCell::new(value),
        }
    }

    /// An unlocked mutex with a place in the order of locks.
    pub fn ranked(value: T, rank: Rank) -> Self {
        Self { turn: Semaphore::ranked(1, rank), ..Self::new(value) }
    }

    /// Waits for the lock.
    pub async fn lock(&self) -> AsyncMutexGuard<'_, T> {
        let turn = self.turn.acquire().await;
        #[cfg(loom)]
        self.held.set(());
        AsyncMutexGuard { mutex: self, _turn: turn }
    }
}

impl<T: Default> Default for AsyncMutex<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T> fmt::Debug for AsyncMutex<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncMutex").finish_non_exhaustive()
    }
}

/// The guard of a locked [`AsyncMutex`].
#[must_use = "if unused, the mutex is unlocked immediately"]
pub struct AsyncMutexGuard<'a, T> {
    mutex: &'a AsyncMutex<T>,
    _turn: Permits<'a>,
}

// SAFETY: a shared guard gives shared access to the value.
unsafe impl<T: Sync> Sync for AsyncMutexGuard<'_, T> {}

impl<T> Deref for AsyncMutexGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: this guard holds the lock, so the value is accessed only through it.
        unsafe { &*self.mutex.value.get() }
    }
}

impl<T> DerefMut for AsyncMutexGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this guard holds the lock and is borrowed mutably, so no other access exists.
        unsafe { &mut *self.mutex.value.get() }
    }
}

impl<T: fmt::Debug> fmt::Debug for AsyncMutexGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}

#[cfg(loom)]
impl<T> Drop for AsyncMutexGuard<'_, T> {
    fn drop(&mut self) {
        self.mutex.held.set(());
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::pin::pin;
    use std::sync::Arc;
    use std::task::{Context, Poll, Wake, Waker};
    use std::thread;

    struct Thread(thread::Thread);

    impl Wake for Thread {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    fn wait<F: Future>(future: F) -> F::Output {
        let waker = Waker::from(Arc::new(Thread(thread::current())));
        let mut future = pin!(future);
        loop {
            match future.as_mut().poll(&mut Context::from_waker(&waker)) {
                Poll::Ready(output) => return output,
                Poll::Pending => thread::park(),
            }
        }
    }

    #[test]
    fn one_at_a_time_changes_the_value() {
        let counter = AsyncMutex::new(0_u64);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..1000 {
                        let mut value = wait(counter.lock());
                        let seen = *value;
                        thread::yield_now();
                        *value = seen + 1;
                    }
                });
            }
        });
        assert_eq!(*wait(counter.lock()), 4000);
    }
}

#[cfg(all(test, loom))]
mod interleavings {
    use super::super::{explore, wait};
    use super::*;
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    fn add(mutex: &AsyncMutex<u8>) {
        *wait(mutex.lock()) += 1;
    }

    /// Polls for the lock once, and gives up if it would have to wait.
    fn give_up(mutex: &AsyncMutex<u8>) {
        let mut lock = pin!(mutex.lock());
        if let Poll::Ready(mut value) = lock.as_mut().poll(&mut Context::from_waker(Waker::noop()))
        {
            *value += 1;
        }
    }

    #[test]
    fn everyone_gets_the_lock_alone() {
        let tasks: &[fn(&AsyncMutex<u8>)] = &[add, add, add];
        explore(
            "AsyncMutex, three that lock",
            3,
            || AsyncMutex::new(0),
            tasks,
            |m| assert_eq!(*wait(m.lock()), 3),
        );
    }

    #[test]
    fn one_that_gives_up_passes_the_lock_on() {
        let tasks: &[fn(&AsyncMutex<u8>)] = &[add, give_up, add];
        explore(
            "AsyncMutex, one gives up",
            3,
            || AsyncMutex::new(0),
            tasks,
            |m| assert!(*wait(m.lock()) >= 2),
        );
    }

    #[test]
    fn who_wants_many_permits_gets_them() {
        let tasks: &[fn(&Semaphore)] = &[
            |s| drop(wait(s.acquire())),
            |s| drop(wait(s.acquire_many(2))),
            |s| drop(wait(s.acquire())),
        ];
        explore(
            "Semaphore, two that want one and one that wants both",
            3,
            || Semaphore::new(2),
            tasks,
            |s| {
                drop(wait(s.acquire_many(2)));
            },
        );
    }
}
