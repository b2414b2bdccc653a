//! Several things at once.

use crate::error::{Error, Result};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

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
