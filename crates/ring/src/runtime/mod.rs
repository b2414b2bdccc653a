//! The executor: its ring, its tasks, and its interface for other threads.

mod bell;
mod blocking;
mod brief;
mod call;
mod choice;
mod config;
mod driver;
mod executor;
#[cfg(all(test, loom))]
mod interleavings;
mod join_error;
mod local;
mod mailbox;
mod memory;
mod oneshot;
mod op;
mod patience;
mod remote;
mod ring;
mod sleep;
mod task;
mod threads;
mod timers;
mod wait;
mod worker;

pub use blocking::unblock;
pub use brief::Brief;
pub use config::{Config, Io};
pub use executor::Executor;
pub use join_error::JoinError;
pub use local::{Local, current, may_go_on, others_wait};
pub use memory::{Lease, Leased, Vectored};
pub use op::ops;
pub use remote::{Handle, RemoteJoin};
pub use sleep::{Elapsed, Sleep, sleep, sleep_until, timeout};
pub use task::JoinHandle;
pub use wait::block_on;
pub use worker::Worker;

pub(crate) use choice::{Choice, choice};
pub(crate) use local::required;
pub(crate) use memory::Keep;
pub(crate) use op::Op;
pub(crate) use ring::{Refused, explain};

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
