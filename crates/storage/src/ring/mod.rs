//! A single-threaded executor on io_uring.
//!
//! Each thread that does I/O runs one [`Executor`] with a ring of its own; nothing is shared between
//! rings but a mailbox through which other threads wake tasks and send work ([`Handle`]). Tasks are
//! not `Send`: a task, its operations and their buffers stay on one thread.
//!
//! - An operation's buffers belong to the ring until its completion arrives. A dropped future leaves
//!   them there, so the kernel never writes into freed memory; operations that could wait without end
//!   (receive, accept, poll, connect, send) are cancelled as well.
//! - Submissions are batched: they go to the kernel when nothing else can run, or every
//!   [`Config::batch`] entries.
//! - Operations beyond what the queues hold wait here or, completed, in the kernel (`FEAT_NODROP`), so
//!   none is refused or lost.
//! - [`Executor::block_on`] returns only when no dropped operation is in flight any more, and dropping
//!   the executor ends every task and waits for every operation.
//!
//! A panic in a task ends that task alone: its [`JoinHandle`] tells, or the log if nobody listens. A
//! panic in the future given to `block_on` unwinds through it.

mod bell;
mod blocking;
mod device;
mod driver;
mod event;
mod executor;
#[cfg(all(test, loom))]
mod interleavings;
mod local;
pub mod net;
mod oneshot;
mod op;
mod remote;
mod signal;
mod task;
mod timer;
mod worker;

pub use device::Device;
pub use event::Event;
pub use executor::{Config, Executor};
pub use net::Readiness;
pub use remote::{Handle, RemoteJoin};
pub use signal::Signals;
pub use task::{JoinError, JoinHandle};
pub use timer::{Elapsed, Sleep, sleep, sleep_until, timeout};
pub use worker::Worker;

pub(crate) use blocking::unblock;
pub(crate) use local::{current, may_go_on};
pub(crate) use op::{Held, Lease, Vectored, ops};

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

/// Whether this thread is inside [`Executor::block_on`].
pub fn is_running() -> bool {
    current().is_some()
}

/// Starts a task on this thread's executor. It runs when the present task next waits.
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

/// Lets every other ready task run, and completions arrive, before going on.
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
