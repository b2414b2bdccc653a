//! Blocking system calls that io_uring does not support.

use super::join_error::JoinError;
use super::oneshot;
use super::remote::RemoteJoin;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

/// Runs `call` without blocking this thread's tasks: on its own thread inside an executor, in place elsewhere. Meant
/// for rare calls.
///
/// # Errors
/// Those of the call, or if no thread can be started.
pub async fn unblock<T: Send + 'static>(
    call: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    if !super::is_running() {
        return call();
    }
    let (sender, receiver) = oneshot::channel();
    thread::Builder::new().name("blocking-call".into()).spawn(move || {
        let result = catch_unwind(AssertUnwindSafe(call));
        sender.send(result.map_err(JoinError::panicked));
    })?;
    match RemoteJoin::new(receiver).await {
        Ok(result) => result,
        Err(error) => error.resume(),
    }
}
