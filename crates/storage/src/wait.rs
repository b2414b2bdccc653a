//! Waiting for a future on a thread without an executor.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs one future to its end, parking the thread while it waits. Storage then works without a
/// ring: in memory, or with blocking system calls.
///
/// # Panics
/// Inside [`Executor::block_on`](crate::ring::Executor::block_on): the future's operations would go to
/// that executor, which could not run.
pub fn block_on<F: Future>(future: F) -> F::Output {
    assert!(!crate::ring::is_running(), "block_on inside an executor would wait for itself");
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::park(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wake_from_another_thread_arrives() {
        let lock = Arc::new(async_lock::Mutex::new(1));
        let guard = block_on(lock.lock_arc());
        let other = {
            let lock = lock.clone();
            std::thread::spawn(move || block_on(async { *lock.lock().await }))
        };
        drop(guard);
        assert_eq!(other.join().unwrap(), 1);
    }
}
