//! Waiting for a future on a thread without an executor.

use isobath_sync::order::in_order;
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

/// Runs a future to completion, parking the thread while it waits. Files then work without a ring: in memory, or with
/// blocking system calls.
///
/// # Panics
/// Inside [`Executor::block_on`](crate::Executor::block_on): the future's operations would go to
/// that executor, which could not run.
pub fn block_on<F: Future>(future: F) -> F::Output {
    assert!(!super::is_running(), "block_on inside an executor would deadlock");
    let mut future = pin!(in_order(future));
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
    use super::super::oneshot;
    use super::*;

    #[test]
    fn a_wake_from_another_thread_arrives() {
        let (sender, mut receiver) = oneshot::channel();
        let other = std::thread::spawn(move || {
            block_on(std::future::poll_fn(|context| receiver.poll(context)))
        });
        sender.send(1);
        assert_eq!(other.join().unwrap(), Some(1));
    }
}
