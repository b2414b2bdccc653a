//! A single-threaded executor on io_uring, or without it where it is forbidden.
//!
//! Each thread that does I/O runs one [`Executor`] with its own ring. Rings share nothing; other threads wake an
//! executor's tasks and send it work through a mailbox ([`Handle`]). Tasks are not `Send`: a task, its operations and
//! their buffers stay on one thread.
//!
//! - An operation's buffers belong to the ring until its completion arrives. A dropped future leaves them there, so the
//!   kernel never writes into freed memory; operations that could wait forever (receive, accept, poll, connect, send)
//!   are also cancelled.
//! - Submissions are batched: they go to the kernel when nothing else can run, or every
//!   [`Config::batch`] entries.
//! - Operations that do not fit into the submission queue wait in a backlog, and completions that do not fit into
//!   theirs wait in the kernel (`IORING_FEAT_NODROP`), so none is refused or lost.
//! - Where io_uring is missing or forbidden, threads make the calls on files, and everything else is awaited with epoll
//!   ([`Io`]). What is said of rings here then holds of these.
//! - [`Executor::block_on`] returns only once no dropped operation is in flight. Dropping the executor ends every task
//!   and waits for every operation.
//!
//! A panic in a task ends only that task: its [`JoinHandle`] reports it or, if dropped, the log does. A panic in the
//! future passed to `block_on` unwinds through it.
//!
//! Higher-level crates handle files: they start [operations](ops) on descriptors and pass ownership of buffers
//! ([`IoBuf`](isobath_buf::IoBuf)).

mod aio;
mod attempts;
mod commands;
mod device;
mod event;
mod first;
pub mod net;
mod notify;
pub mod place;
mod runtime;
mod signal;

pub use attempts::Attempts;
pub use commands::{CommandRing, Commands, command, command_unless};
pub use device::{Device, Listening};
pub use event::Event;
pub use first::first;
pub use net::Readiness;
pub use notify::Notify;
pub use runtime::{
    Brief, Config, Elapsed, Executor, Handle, Io, JoinError, JoinHandle, Lease, Leased, Local,
    RemoteJoin, Sleep, Vectored, Worker, block_on, current, handle, is_running, may_go_on, ops,
    others_wait, sleep, sleep_until, spawn, timeout, unblock, yield_now,
};
pub use signal::Signals;
