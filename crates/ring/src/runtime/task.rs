//! Tasks: futures that an executor runs independently.

use super::join_error::JoinError;
use super::local::{self, Local};
use super::mailbox::{Remote, Run};
use isobath_sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use isobath_sync::order::in_order;
use std::cell::UnsafeCell;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

struct Outcome<T> {
    result: Option<Result<T, JoinError>>,
    /// The future is gone.
    ended: bool,
    /// Nobody needs the result.
    detached: bool,
    waker: Option<Waker>,
}

/// A task, in one allocation. Only the owning thread touches anything but the atomics.
pub(super) struct Task<F: Future> {
    remote: Arc<Remote>,
    /// The task is in a run queue or a mailbox.
    queued: AtomicBool,
    aborted: AtomicBool,
    key: AtomicUsize,
    /// Touched only by `run` and `end`.
    future: UnsafeCell<Option<F>>,
    /// Borrowed only briefly, while no foreign code runs.
    outcome: UnsafeCell<Outcome<F::Output>>,
}

// SAFETY: other threads only wake a task or hold a reference to it: they touch only the atomics, `remote` and the
// reference count. The future is polled by the owning thread, and dropped by it before the executor gives up its own
// reference; the result is taken or dropped by the owning thread, since it is stored only while a `JoinHandle`, which
// is not `Send`, waits for it. So neither is left when some thread frees the allocation.
unsafe impl<F: Future> Send for Task<F> {}
// SAFETY: as above.
unsafe impl<F: Future> Sync for Task<F> {}

impl<F: Future> Task<F> {
    pub(super) fn new(future: F, remote: Arc<Remote>) -> Self {
        Self {
            remote,
            queued: AtomicBool::new(true),
            aborted: AtomicBool::new(false),
            key: AtomicUsize::new(usize::MAX),
            future: UnsafeCell::new(Some(future)),
            outcome: UnsafeCell::new(Outcome {
                result: None,
                ended: false,
                detached: false,
                waker: None,
            }),
        }
    }

    pub(super) fn set_key(&self, key: usize) {
        self.key.store(key, Ordering::Relaxed);
    }

    fn outcome<R>(&self, change: impl FnOnce(&mut Outcome<F::Output>) -> R) -> R {
        // SAFETY: called by the owning thread, with closures that only move values, so that no two borrows overlap.
        change(unsafe { &mut *self.outcome.get() })
    }

    /// Drops the future and stores the result.
    fn finish(&self, result: Result<F::Output, JoinError>) {
        // SAFETY: called by `run` and `end`, which never run concurrently.
        let future = unsafe { &mut *self.future.get() };
        let dropped = catch_unwind(AssertUnwindSafe(|| *future = None));
        let result = match dropped {
            Ok(()) => result,
            Err(payload) => Err(JoinError::panicked(payload)),
        };
        let (waker, unwanted) = self.outcome(|outcome| {
            outcome.ended = true;
            let unwanted = if outcome.detached {
                Some(result)
            } else {
                outcome.result = Some(result);
                None
            };
            (outcome.waker.take(), unwanted)
        });
        if let Some(waker) = waker {
            waker.wake();
        }
        if let Some(Err(error)) = unwanted
            && error.is_panic()
        {
            tracing::error!("a task panicked: {}", error.message());
        }
    }
}

impl<F: Future + 'static> Wake for Task<F>
where
    F::Output: 'static,
{
    fn wake(self: Arc<Self>) {
        if !self.queued.swap(true, Ordering::AcqRel) {
            let remote = self.remote.clone();
            local::schedule(&remote, self);
        }
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.queued.load(Ordering::Acquire) {
            self.clone().wake();
        }
    }
}

impl<F: Future + 'static> Run for Task<F>
where
    F::Output: 'static,
{
    fn run(self: Arc<Self>) {
        self.queued.swap(false, Ordering::AcqRel);
        // SAFETY: called by the owning thread, never while the task runs, so this is the only borrow.
        let Some(future) = (unsafe { &mut *self.future.get() }) else { return };
        let result = if self.aborted.load(Ordering::Relaxed) {
            Err(JoinError::aborted())
        } else {
            let waker = Waker::from(self.clone());
            let mut context = Context::from_waker(&waker);
            // SAFETY: the future stays in its allocation until it is dropped there.
            let future = unsafe { Pin::new_unchecked(future) };
            match catch_unwind(AssertUnwindSafe(|| future.poll(&mut context))) {
                Ok(Poll::Pending) => return,
                Ok(Poll::Ready(output)) => Ok(output),
                Err(payload) => Err(JoinError::panicked(payload)),
            }
        };
        self.finish(result);
        if let Some(local) = local::current() {
            local.forget(self.key.load(Ordering::Relaxed));
        }
    }

    fn end(self: Arc<Self>) {
        // SAFETY: as in `run`.
        if unsafe { &*self.future.get() }.is_some() {
            self.finish(Err(JoinError::aborted()));
        }
    }
}

impl Local {
    pub(super) fn spawn<F>(&self, future: F) -> JoinHandle<F::Output>
    where
        F: Future + 'static,
        F::Output: 'static,
    {
        let task = Arc::new(Task::new(in_order(future), self.remote.clone()));
        if !self.add(task.clone(), |key| task.set_key(key)) {
            task.clone().end();
        }
        JoinHandle::new(task)
    }
}

/// What a [`JoinHandle`] does with its task.
trait Join<T> {
    fn poll(&self, context: &mut Context<'_>) -> Poll<Result<T, JoinError>>;
    fn detach(&self);
    fn abort(self: Arc<Self>);
    fn is_finished(&self) -> bool;
}

impl<F: Future + 'static> Join<F::Output> for Task<F>
where
    F::Output: 'static,
{
    fn poll(&self, context: &mut Context<'_>) -> Poll<Result<F::Output, JoinError>> {
        let waker = context.waker().clone();
        let (poll, old) = self.outcome(|outcome| {
            if outcome.ended {
                let result = outcome.result.take().unwrap_or_else(|| Err(JoinError::aborted()));
                (Poll::Ready(result), Some(waker))
            } else {
                (Poll::Pending, outcome.waker.replace(waker))
            }
        });
        drop(old);
        poll
    }

    fn detach(&self) {
        let old = self.outcome(|outcome| {
            outcome.detached = true;
            (outcome.result.take(), outcome.waker.take())
        });
        drop(old);
    }

    fn abort(self: Arc<Self>) {
        self.aborted.store(true, Ordering::Relaxed);
        self.wake();
    }

    fn is_finished(&self) -> bool {
        self.outcome(|outcome| outcome.ended)
    }
}

/// A future for the result of a task on this thread. Dropping it leaves the task running.
pub struct JoinHandle<T> {
    task: Arc<dyn Join<T>>,
}

impl<T> JoinHandle<T> {
    pub(super) fn new<F: Future<Output = T> + 'static>(task: Arc<Task<F>>) -> Self
    where
        T: 'static,
    {
        Self { task }
    }

    /// Drops the task's future at its next turn, unless it ends first; operations that it waits for are cancelled or
    /// left to complete.
    pub fn abort(&self) {
        self.task.clone().abort();
    }

    /// Whether the task has ended.
    pub fn is_finished(&self) -> bool {
        self.task.is_finished()
    }
}

impl<T> Future for JoinHandle<T> {
    type Output = Result<T, JoinError>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.task.poll(context)
    }
}

impl<T> Drop for JoinHandle<T> {
    fn drop(&mut self) {
        self.task.detach();
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::oneshot;
    use super::*;
    use std::future::poll_fn;
    use std::thread;

    fn poll<T>(handle: &mut JoinHandle<T>) -> Poll<Result<T, JoinError>> {
        Pin::new(handle).poll(&mut Context::from_waker(Waker::noop()))
    }

    fn run_what_was_sent(remote: &Remote) {
        for task in remote.take().into_iter().flat_map(|mail| mail.tasks) {
            task.run();
        }
    }

    // Without a ring, so that Miri can run these.
    #[test]
    fn a_task_that_another_thread_wakes_ends_on_its_own() {
        let remote = Arc::new(Remote::new().unwrap());
        let (sender, mut receiver) = oneshot::channel();
        let future = async move { poll_fn(|context| receiver.poll(context)).await };
        let task = Arc::new(Task::new(future, remote.clone()));
        let mut handle = JoinHandle::new(task.clone());
        task.run();
        assert!(poll(&mut handle).is_pending());
        thread::spawn(move || sender.send(vec![7])).join().unwrap();
        run_what_was_sent(&remote);
        let Poll::Ready(Ok(value)) = poll(&mut handle) else { panic!("it has not ended") };
        assert_eq!(value, Some(vec![7]));
    }

    #[test]
    fn threads_free_a_task_whose_executor_has_ended() {
        let remote = Arc::new(Remote::new().unwrap());
        let held = Arc::new(vec![1]);
        let (sender, mut receiver) = oneshot::channel::<u8>();
        let kept = held.clone();
        let future = async move {
            poll_fn(|context| receiver.poll(context)).await;
            kept.len()
        };
        let task = Arc::new(Task::new(future, remote.clone()));
        let mut handle = JoinHandle::new(task.clone());
        task.clone().run();
        let threads = [(); 3].map(|()| {
            let waker = Waker::from(task.clone());
            thread::spawn(move || waker.wake())
        });
        // The future is dropped here, even if others hold the task.
        task.end();
        assert_eq!(Arc::strong_count(&held), 1);
        remote.close();
        for thread in threads {
            thread.join().unwrap();
        }
        drop(sender);
        assert!(matches!(poll(&mut handle), Poll::Ready(Err(error)) if !error.is_panic()));
    }
}
