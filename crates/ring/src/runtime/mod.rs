//! The executor: its ring, its tasks, and its interface for other threads.

mod bell;
mod blocking;
mod driver;
mod executor;
#[cfg(all(test, loom))]
mod interleavings;
mod local;
mod oneshot;
mod op;
mod remote;
mod task;
mod timer;
mod wait;
mod worker;

pub use blocking::unblock;
pub use executor::{Config, Executor};
pub use local::{Local, current, may_go_on};
pub use op::{Held, Lease, Vectored, ops};
pub use remote::{Handle, RemoteJoin};
pub use task::{JoinError, JoinHandle};
pub use timer::{Elapsed, Sleep, sleep, sleep_until, timeout};
pub use wait::block_on;
pub use worker::Worker;

pub(crate) use local::required;
pub(crate) use op::{Keep, Op};

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

/// Whether this thread is inside [`Executor::block_on`].
pub fn is_running() -> bool {
    current().is_some()
}

/// Starts a task on this thread's executor. It runs when the current task next waits.
///
/// # Panics
/// Outside [`Executor::block_on`].
pub fn spawn<F>(future: F) -> JoinHandle<F::Output>
where
    F: Future + 'static,
    F::Output: 'static,
{
    local::required().spawn(future)
}

/// The handle by which other threads reach this thread's executor.
///
/// # Panics
/// Outside [`Executor::block_on`].
pub fn handle() -> Handle {
    local::required().handle()
}

/// Lets every other ready task run, and completions arrive, before continuing.
pub fn yield_now() -> impl Future<Output = ()> {
    Yield { done: false }
}

struct Yield {
    done: bool,
}

impl Future for Yield {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if self.done {
            return Poll::Ready(());
        }
        self.done = true;
        context.waker().wake_by_ref();
        Poll::Pending
    }
}
