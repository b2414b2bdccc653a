//! Per-thread state, so that threads that serve one disk do not contend for cache lines.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The number of threads with a slot of their own; further threads share one.
const PLACES: usize = if cfg!(loom) { 2 } else { 8 };

#[cfg(not(loom))]
static NEXT: AtomicUsize = AtomicUsize::new(0);

#[cfg(not(loom))]
thread_local! {
    static PLACE: Cell<usize> = const { Cell::new(usize::MAX) };
}

#[cfg(loom)]
loom::lazy_static! {
    static ref NEXT: AtomicUsize = AtomicUsize::new(0);
}

#[cfg(loom)]
loom::thread_local! {
    static PLACE: Cell<usize> = Cell::new(usize::MAX);
}

/// This thread's slot.
fn place() -> usize {
    PLACE.with(|place| {
        if place.get() == usize::MAX {
            place.set(NEXT.fetch_add(1, Ordering::Relaxed) % PLACES);
        }
        place.get()
    })
}

/// Aligned to two cache lines, since the processor prefetches the adjacent line.
#[derive(Default)]
#[repr(align(128))]
struct Apart<T>(T);

/// A value for each thread. Any thread can read all of them.
#[derive(Default)]
pub struct PerThread<T>([Apart<T>; PLACES]);

impl<T> PerThread<T> {
    /// This thread's value, and a number that gives access to it [from another thread](Self::at).
    pub fn mine(&self) -> (usize, &T) {
        let place = place();
        (place, self.at(place))
    }

    /// The value of a slot.
    pub fn at(&self, place: usize) -> &T {
        &self.0[place % PLACES].0
    }

    /// The values of all threads.
    pub fn all(&self) -> impl Iterator<Item = &T> {
        self.0.iter().map(|apart| &apart.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn threads_count_apart_and_together() {
        let counts = Arc::new(PerThread::<AtomicU64>::default());
        let count = |counts: &PerThread<AtomicU64>| counts.mine().1.fetch_add(1, Ordering::Relaxed);
        let threads: Vec<_> = (0..20)
            .map(|_| {
                let counts = counts.clone();
                std::thread::spawn(move || {
                    for _ in 0..100 {
                        count(&counts);
                    }
                    counts.mine().0
                })
            })
            .collect();
        let places: std::collections::HashSet<usize> =
            threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        assert_eq!(places.len(), PLACES);
        assert_eq!(counts.all().map(|count| count.load(Ordering::Relaxed)).sum::<u64>(), 2000);
    }
}
