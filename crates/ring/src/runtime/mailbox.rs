//! The part of an executor that other threads may access: a mailbox, and a bell that wakes the executor.

use super::bell::Bell;
use isobath_sync::Mutex;
use isobath_sync::atomic::{AtomicBool, Ordering};
use std::io;
use std::sync::Arc;

/// What an executor does with a task.
pub(super) trait Run: Send + Sync {
    /// Polls the task. Called only by the owning thread, never while the task runs.
    fn run(self: Arc<Self>);
    /// Drops the task's future. Called only by the owning thread, never while the task runs.
    fn end(self: Arc<Self>);
}

/// A function that another thread makes the executor call.
pub(super) type Job = Box<dyn FnOnce() + Send>;

/// Messages from other threads for the executor.
#[derive(Default)]
pub(super) struct Mail {
    pub(super) tasks: Vec<Arc<dyn Run>>,
    pub(super) jobs: Vec<Job>,
}

#[derive(Default)]
struct Mailbox {
    mail: Mail,
    /// Whether the executor waits in the kernel or is about to, so that only the bell wakes it.
    sleeping: bool,
    closed: bool,
}

/// The part of an executor that other threads may access.
pub(super) struct Remote {
    mailbox: Mutex<Mailbox>,
    /// Whether anything was posted since the last [`take`](Self::take). Written under the lock.
    news: AtomicBool,
    pub(super) bell: Bell,
}

impl Remote {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { mailbox: Mutex::default(), news: AtomicBool::new(false), bell: Bell::new()? })
    }

    /// Puts an item into the mailbox; returns it if the executor has ended.
    pub(super) fn post<T>(&self, item: T, put: impl FnOnce(&mut Mail, T)) -> Option<T> {
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

    /// Makes the executor run a task. If the executor has ended, drops the task, whose future is already gone.
    pub(super) fn schedule(&self, task: Arc<dyn Run>) {
        drop(self.post(task, |mail, task| mail.tasks.push(task)));
    }

    /// Makes the executor poll its main future.
    pub(super) fn notify(&self) {
        let _ = self.post((), |_, ()| {});
    }

    /// Whether anything was posted since the last [`take`](Self::take).
    pub(super) fn has_news(&self) -> bool {
        self.news.load(Ordering::Acquire)
    }

    pub(super) fn take(&self) -> Option<Mail> {
        if !self.has_news() {
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
