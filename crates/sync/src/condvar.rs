//! Waiting, on a thread that may, for another to change what a lock protects.

use parking_lot::MutexGuard;

/// Like the standard library's, for this crate's [`Mutex`](crate::Mutex).
#[derive(Debug, Default)]
pub struct Condvar(parking_lot::Condvar);

impl Condvar {
    /// One that nobody waits for.
    pub const fn new() -> Self {
        Self(parking_lot::Condvar::new())
    }

    /// Unlocks, waits to be notified, and locks again. It may also end without.
    pub fn wait<'a, T>(&self, mut guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        self.0.wait(&mut guard);
        guard
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
