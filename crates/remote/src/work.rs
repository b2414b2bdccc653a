//! Several things at once.

use crate::error::{Error, Result};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;

/// Bytes that may be in memory at once.
pub(crate) struct Room {
    size: u64,
    taken: Mutex<u64>,
    freed: Condvar,
}

/// Bytes that were taken, until it is dropped.
pub(crate) struct Taken<'r> {
    room: &'r Room,
    bytes: u64,
}

impl Room {
    pub(crate) fn new(size: u64) -> Self {
        Self { size, taken: Mutex::new(0), freed: Condvar::new() }
    }

    /// Waits until there is room for so many bytes; for more than there is, until all of it is free.
    pub(crate) fn take(&self, bytes: u64) -> Taken<'_> {
        let bytes = bytes.min(self.size);
        let taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let full = |taken: &mut u64| self.size - *taken < bytes;
        let mut taken = self.freed.wait_while(taken, full).unwrap_or_else(PoisonError::into_inner);
        *taken += bytes;
        Taken { room: self, bytes }
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        *self.room.taken.lock().unwrap_or_else(PoisonError::into_inner) -= self.bytes;
        self.room.freed.notify_all();
    }
}

/// Does `work` for each number below `count`, `most` at a time, and returns the results in order. Once one has failed,
/// no more are begun.
///
/// # Errors
/// The first that occurred.
pub(crate) fn each<T: Send>(
    count: usize,
    most: usize,
    work: impl Fn(usize) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    if count <= 1 || most <= 1 {
        return (0..count).map(work).collect();
    }
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let results = Mutex::new((Vec::new(), None::<Error>));
    let one = || {
        while !failed.load(Ordering::Relaxed) {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= count {
                return;
            }
            let result = work(number);
            let mut results = results.lock().unwrap_or_else(PoisonError::into_inner);
            match result {
                Ok(result) => results.0.push((number, result)),
                Err(error) => {
                    failed.store(true, Ordering::Relaxed);
                    results.1.get_or_insert(error);
                }
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..count.min(most) {
            scope.spawn(one);
        }
    });
    let (mut results, error) = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    if let Some(error) = error {
        return Err(error);
    }
    results.sort_unstable_by_key(|(number, _)| *number);
    Ok(results.into_iter().map(|(_, result)| result).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_bytes_are_taken_than_there_is_room() {
        let (room, now) = (Room::new(100), Mutex::new((0, 0)));
        let sizes = [40, 60, 100, 1, 700, 33];
        each(120, 8, |number| {
            let size = sizes[number % sizes.len()];
            let _taken = room.take(size);
            let bytes = size.min(100);
            {
                let mut now = now.lock().unwrap();
                now.0 += bytes;
                now.1 = now.1.max(now.0);
            }
            thread::yield_now();
            now.lock().unwrap().0 -= bytes;
            Ok(())
        })
        .unwrap();
        assert_eq!(now.into_inner().unwrap(), (0, 100));
        assert_eq!(*room.taken.lock().unwrap(), 0);
    }
}
