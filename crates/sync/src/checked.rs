//! A mutex that checks the invariants of its contents.

use crate::order::{Held, Rank};
use crate::{Mutex, MutexGuard};
use std::ops::{Deref, DerefMut};

/// A structure with invariants that hold whenever nobody is changing it.
pub trait Invariants {
    /// The place of the structure's mutex in the order of locks.
    const RANK: Option<Rank> = None;

    /// Checks the invariants. If one is violated, stops the program or poisons what the structure belongs to.
    fn check_invariants(&self);
}

/// A mutex that checks the [`Invariants`] of its contents each time it is unlocked, in builds with debug assertions.
#[derive(Default)]
pub struct CheckedMutex<T: Invariants>(Mutex<T>);

/// Exclusive access to the contents of a [`CheckedMutex`].
#[must_use = "the mutex is unlocked at once if it is not held"]
pub struct CheckedGuard<'a, T: Invariants> {
    guard: MutexGuard<'a, T>,
    // Dropped after it.
    _held: Option<Held>,
}

impl<T: Invariants> CheckedMutex<T> {
    /// An unlocked mutex.
    pub fn new(contents: T) -> Self {
        Self(Mutex::new(contents))
    }

    /// Waits for the lock.
    pub fn lock(&self) -> CheckedGuard<'_, T> {
        let held = Held::briefly(T::RANK);
        CheckedGuard { guard: self.0.lock(), _held: held }
    }
}

impl<T: Invariants> Deref for CheckedGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T: Invariants> DerefMut for CheckedGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

impl<T: Invariants> Drop for CheckedGuard<'_, T> {
    fn drop(&mut self) {
        if cfg!(debug_assertions) && !std::thread::panicking() {
            self.guard.check_invariants();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Pair(u32, u32);

    impl Invariants for Pair {
        fn check_invariants(&self) {
            assert_eq!(self.0, self.1, "they are equal");
        }
    }

    #[test]
    fn what_is_put_back_in_order_passes() {
        let pair = CheckedMutex::<Pair>::default();
        let mut locked = pair.lock();
        locked.0 = 7;
        locked.1 = 7;
        drop(locked);
        assert_eq!(pair.lock().0, 7);
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "they are equal")]
    fn what_is_left_in_disorder_does_not() {
        CheckedMutex::<Pair>::default().lock().0 = 7;
    }
}
