//! The executor of one thread.

use super::config::Config;
use super::local::{self, Local};
use super::mailbox::Remote;
use super::remote::Handle;
use super::task::JoinHandle;
use isobath_sync::atomic::{AtomicBool, Ordering};
use isobath_sync::order::in_order;
use std::fmt;
use std::future::Future;
use std::io;
use std::mem::ManuallyDrop;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

/// Runs futures and their I/O on the thread that created it.
pub struct Executor {
    local: ManuallyDrop<Rc<Local>>,
}

impl Executor {
    /// Sets up a ring for this thread, or what does without one ([`Io`](super::Io)).
    ///
    /// # Errors
    /// A limit on memory or descriptors is reached; `ISOBATH_IO` has another value; or io_uring is required, and
    /// missing, too old (before Linux 5.11) or forbidden.
    pub fn new(config: &Config) -> io::Result<Self> {
        Ok(Self { local: ManuallyDrop::new(Local::new(config)?) })
    }

    /// The handle by which other threads reach this executor.
    pub fn handle(&self) -> Handle {
        self.local.handle()
    }

    /// Adds a task; it runs during [`block_on`](Self::block_on).
    pub fn spawn<F>(&self, future: F) -> JoinHandle<F::Output>
    where
        F: Future + 'static,
        F::Output: 'static,
    {
        self.local.spawn(future)
    }

    /// Runs a future to completion, and tasks concurrently. When it returns, no operation of a dropped future is in
    /// flight; unfinished tasks wait for the next `block_on` or for the executor's end.
    ///
    /// # Panics
    /// If the future panics; or inside another `block_on` on this thread.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        let Some(entered) = self.local.enter() else {
            panic!("Executor::block_on called inside another block_on on this thread");
        };
        let main =
            Arc::new(Main { woken: AtomicBool::new(true), remote: self.local.remote.clone() });
        let waker = Waker::from(main.clone());
        let mut context = Context::from_waker(&waker);
        let output = {
            let mut future = pin!(in_order(future));
            loop {
                if main.woken.swap(false, Ordering::AcqRel)
                    && let Poll::Ready(output) = future.as_mut().poll(&mut context)
                {
                    break output;
                }
                self.local.turn(|| main.woken.load(Ordering::Acquire));
            }
        };
        self.local.settle();
        drop(entered);
        output
    }
}

impl Drop for Executor {
    /// Ends every task, cancels operations that could wait forever, and waits for the others.
    fn drop(&mut self) {
        // If this panics the ring and all buffers in it stay allocated, which is safe.
        self.local.close();
        // SAFETY: taken once, here, and not used again.
        drop(unsafe { ManuallyDrop::take(&mut self.local) });
    }
}

impl fmt::Debug for Executor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Executor").finish_non_exhaustive()
    }
}

/// Wakes the future given to `block_on`.
struct Main {
    woken: AtomicBool,
    remote: Arc<Remote>,
}

impl Wake for Main {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.woken.swap(true, Ordering::AcqRel) && !local::is_current(&self.remote) {
            self.remote.notify();
        }
    }
}
