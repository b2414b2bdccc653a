//! How far an operation is, and a request to end it.

use crate::error::{Error, Result};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// How often somebody who waits looks whether the operation is to end.
const PIECE_OF_WAIT: Duration = Duration::from_millis(50);

/// Shared by the thread that works and those that watch it.
#[derive(Debug, Default)]
pub struct Progress {
    done: AtomicU64,
    total: AtomicU64,
    cancelled: AtomicBool,
    /// Bytes a second; 0 for no limit.
    speed: AtomicU64,
    /// When, at that speed, what was begun so far has ended.
    due: Mutex<Option<Instant>>,
}

impl Progress {
    /// Bytes done, and bytes in total, as far as known.
    pub fn bytes(&self) -> (u64, u64) {
        (self.done.load(Ordering::Relaxed), self.total.load(Ordering::Relaxed))
    }

    /// Ends the operation at its next step: it returns [`Error::Interrupted`].
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
    }

    /// Whether somebody wants it to end.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    /// Limits what the operation reads of local files to so many bytes a second; 0 is no limit.
    pub fn limit_to(&self, speed: u64) {
        self.speed.store(speed, Ordering::Relaxed);
    }

    /// Waits until so many more bytes may be read, and does `meanwhile` again and again, at least once. Time that was
    /// not used is lost.
    pub(crate) fn wait_for(&self, bytes: u64, meanwhile: impl Fn() -> Result<()>) -> Result<()> {
        let speed = self.speed.load(Ordering::Relaxed);
        if speed > 0 {
            let begin = {
                let mut due = self.due.lock().unwrap_or_else(PoisonError::into_inner);
                let now = Instant::now();
                let begin = due.map_or(now, |due| due.max(now));
                *due = Some(begin + Duration::from_secs_f64(bytes as f64 / speed as f64));
                begin
            };
            loop {
                let left = begin.saturating_duration_since(Instant::now());
                if left.is_zero() || self.is_cancelled() {
                    break;
                }
                meanwhile()?;
                thread::sleep(left.min(PIECE_OF_WAIT));
            }
        }
        self.check()?;
        meanwhile()
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.is_cancelled() { Err(Error::Interrupted) } else { Ok(()) }
    }

    pub(crate) fn expect(&self, bytes: u64) {
        self.total.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn add(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limited_operation_is_no_faster_and_can_be_ended_at_any_time() {
        let progress = Progress::default();
        let nothing = || Ok(());
        progress.wait_for(u64::MAX, nothing).unwrap();
        progress.limit_to(1000);
        let begin = Instant::now();
        for _ in 0..3 {
            progress.wait_for(50, nothing).unwrap();
        }
        // The last of them has only begun.
        assert!(begin.elapsed() >= Duration::from_millis(100));
        thread::scope(|scope| {
            progress.wait_for(1 << 40, nothing).unwrap();
            let waits = scope.spawn(|| progress.wait_for(1, nothing));
            progress.cancel();
            waits.join().unwrap().unwrap_err();
        });
    }
}
