//! The interface of an executor for other threads.

use super::join_error::JoinError;
use super::local::{self, Local};
use super::mailbox::{Job, Remote};
use super::oneshot;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

/// Starts tasks on an executor from any thread.
#[derive(Clone)]
pub struct Handle {
    remote: Arc<Remote>,
}

impl Handle {
    pub(super) fn new(remote: Arc<Remote>) -> Self {
        Self { remote }
    }

    /// Makes the executor's thread call `make` and run the returned future as a task; the future itself need not be
    /// `Send`.
    ///
    /// The result arrives at the returned [`RemoteJoin`], which may be dropped.
    pub fn spawn_with<M, F>(&self, make: M) -> RemoteJoin<F::Output>
    where
        M: FnOnce() -> F + Send + 'static,
        F: Future + 'static,
        F::Output: Send + 'static,
    {
        let (sender, receiver) = oneshot::channel();
        let job: Job = Box::new(move || {
            let local = local::required();
            let task = local.spawn(async move { make().await });
            let forward = local.spawn(async move { sender.send(task.await) });
            drop(forward);
        });
        drop(self.remote.post(job, |mail, job| mail.jobs.push(job)));
        RemoteJoin { receiver }
    }
}

impl Local {
    pub(super) fn handle(&self) -> Handle {
        Handle::new(self.remote.clone())
    }
}

/// A future for the result of a task on another thread. Dropping it leaves the task running.
pub struct RemoteJoin<T> {
    receiver: oneshot::Receiver<Result<T, JoinError>>,
}

impl<T> RemoteJoin<T> {
    pub(super) fn new(receiver: oneshot::Receiver<Result<T, JoinError>>) -> Self {
        Self { receiver }
    }

    /// Blocks the thread until the result is available.
    ///
    /// # Errors
    /// The task panicked, or its executor ended first.
    ///
    /// # Panics
    /// Inside [`Executor::block_on`](super::Executor::block_on), which would wait for itself.
    pub fn wait(self) -> Result<T, JoinError> {
        super::block_on(self)
    }
}

impl<T> Future for RemoteJoin<T> {
    type Output = Result<T, JoinError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.receiver.poll(context).map(|sent| sent.unwrap_or_else(|| Err(JoinError::aborted())))
    }
}
