//! Runs one future on this thread, and detects when it can never end.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

/// Far more polls than any history needs.
const MOST_POLLS: u64 = 20_000_000;

/// Whether a task was woken since it was last polled.
#[derive(Default)]
pub(crate) struct Woken(pub(crate) AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Polls `future` to its end.
///
/// # Errors
/// It waits for something that can never happen, or does not end.
pub fn run<T>(future: impl Future<Output = T>) -> Result<T, String> {
    let woken = Arc::new(Woken::default());
    let waker = Waker::from(woken.clone());
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    for _ in 0..MOST_POLLS {
        woken.0.store(false, Ordering::Relaxed);
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return Ok(output);
        }
        if !woken.0.load(Ordering::Relaxed) {
            return Err("a request waits for ever: nothing is left that could wake it".into());
        }
    }
    Err(format!("the requests did not end within {MOST_POLLS} polls"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use isobath_storage_test::give_way;

    #[test]
    fn a_future_that_nobody_wakes_is_told() {
        assert_eq!(run(give_way(5)), Ok(()));
        assert!(run(std::future::pending::<()>()).is_err());
    }
}
