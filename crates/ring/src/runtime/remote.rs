//! The interface of an executor for other threads.

use super::bell::Bell;
use super::oneshot;
use super::task::{JoinError, Run};
use isobath_sync::Mutex;
use isobath_sync::atomic::{AtomicBool, Ordering};
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

type Job = Box<dyn FnOnce() + Send>;

/// Messages from other threads for the executor.
#[derive(Default)]
pub(super) struct Mail {
    pub(super) tasks: Vec<Arc<dyn Run>>,
    pub(super) jobs: Vec<Job>,
}

#[derive(Default)]
struct Mailbox {
    mail: Mail,
    /// The executor waits in the kernel, or is about to, so only the bell wakes it.
    sleeping: bool,
    closed: bool,
}

/// The part of an executor that other threads may access.
pub(super) struct Remote {
    mailbox: Mutex<Mailbox>,
    /// Something happened since the last [`take`](Self::take). Written under the lock.
    news: AtomicBool,
    pub(super) bell: Bell,
}

impl Remote {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { mailbox: Mutex::default(), news: AtomicBool::new(false), bell: Bell::new()? })
    }

    /// Puts something into the mailbox; returns it if the executor has ended.
    fn post<T>(&self, item: T, put: impl FnOnce(&mut Mail, T)) -> Option<T> {
        let mut mailbox = self.mailbox.lock();
        if mailbox.closed {
            return Some(item);
        }
        put(&mut mailbox.mail, item);
        self.news.store(true, Ordering::Release);
        if std::mem::take(&mut mailbox.sleeping) {
            self.bell.ring();
        }
        None
    }

    /// Makes the executor run a task. The task is dropped if the executor has ended; its future is already gone then.
    pub(super) fn schedule(&self, task: Arc<dyn Run>) {
        drop(self.post(task, |mail, task| mail.tasks.push(task)));
    }

    /// Makes the executor poll its main future.
    pub(super) fn notify(&self) {
        let _ = self.post((), |_, ()| {});
    }

    pub(super) fn take(&self) -> Option<Mail> {
        if !self.news.load(Ordering::Acquire) {
            return None;
        }
        let mut mailbox = self.mailbox.lock();
        self.news.store(false, Ordering::Release);
        mailbox.sleeping = false;
        Some(std::mem::take(&mut mailbox.mail))
    }

    /// Announces that the executor will wait in the kernel; `false` if there is mail to process first.
    pub(super) fn prepare_sleep(&self) -> bool {
        let mut mailbox = self.mailbox.lock();
        mailbox.sleeping = !self.news.load(Ordering::Acquire);
        mailbox.sleeping
    }

    pub(super) fn close(&self) {
        let mail = {
            let mut mailbox = self.mailbox.lock();
            mailbox.closed = true;
            std::mem::take(&mut mailbox.mail)
        };
        drop(mail);
    }
}

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
            let local = super::local::required();
            let task = local.spawn(async move { make().await });
            let forward = local.spawn(async move { sender.send(task.await) });
            drop(forward);
        });
        drop(self.remote.post(job, |mail, job| mail.jobs.push(job)));
        RemoteJoin { receiver }
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
