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
//! - Operations that do not fit into the queues wait here or, once completed, in the kernel (`FEAT_NODROP`), so none is
//!   refused or lost.
//! - [`Executor::block_on`] returns only when no dropped operation is in flight any more, and dropping
//!   the executor ends every task and waits for every operation.
//!
//! A panic in a task ends only that task: its [`JoinHandle`] reports it, or the log if there is no handle. A panic in
//! the future given to `block_on` unwinds through it.
//!
//! Files are handled by the crates above: they start [operations](ops) on descriptors, and pass ownership of buffers
//! ([`IoBuf`]).

pub mod buf;
mod device;
mod event;
mod first;
pub mod net;
mod runtime;
mod signal;

pub use buf::IoBuf;
pub use device::Device;
pub use event::Event;
pub use first::first;
pub use net::Readiness;
pub use runtime::{
    Config, Elapsed, Executor, Handle, Held, JoinError, JoinHandle, Lease, Local, RemoteJoin,
    Sleep, Vectored, Worker, block_on, current, handle, is_running, may_go_on, ops, sleep,
    sleep_until, spawn, timeout, unblock, yield_now,
};
pub use signal::Signals;
