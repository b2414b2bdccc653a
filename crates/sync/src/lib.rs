//! Locks and atomics for structures shared between threads.
//!
//! Normally these are `parking_lot`'s and the standard library's. Compiled with `--cfg loom` they are loom's, so that
//! `make interleavings` runs a structure's production code in every possible interleaving of its threads. A structure
//! is explored if it takes its locks and atomics from here.

mod async_mutex;
mod checked;
mod condition;
#[cfg(not(loom))]
mod condvar;
#[cfg(loom)]
mod explored;
pub mod order;
mod semaphore;

pub use async_mutex::{AsyncMutex, AsyncMutexGuard};
pub use checked::{CheckedGuard, CheckedMutex, Invariants};
pub use condition::{Condition, WaitGroup};
#[cfg(not(loom))]
pub use condvar::Condvar;
#[cfg(loom)]
pub use explored::{
    Cell, Condvar, Mutex, MutexGuard, RwLock, atomic, explore, explore_within, wait,
};
#[cfg(not(loom))]
pub use parking_lot::{Mutex, MutexGuard, RwLock};
pub use semaphore::{Permits, Semaphore};
#[cfg(not(loom))]
pub use std::sync::atomic;
