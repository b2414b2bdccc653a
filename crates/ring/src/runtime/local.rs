//! The parts of one thread's executor.

use super::call::Wait;
use super::choice;
use super::config::Config;
use super::driver::Driver;
use super::mailbox::{Remote, Run};
use super::memory::Vectored;
use super::patience::Patience;
use super::timers::Timers;
use slab::Slab;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

/// Bytes that tasks may transfer without waiting in one turn of the executor. Each call counts as additional bytes,
/// which limits the number of calls.
const AT_ONCE: usize = 8 << 20;
const AT_ONCE_CALLS: usize = 256;

#[cfg(not(loom))]
thread_local! {
    static CURRENT: RefCell<Option<Rc<Local>>> = const { RefCell::new(None) };
}

#[cfg(loom)]
loom::thread_local! {
    static CURRENT: RefCell<Option<Rc<Local>>> = RefCell::new(None);
}

/// This thread's executor, inside [`Executor::block_on`](crate::Executor::block_on); `None` elsewhere.
pub fn current() -> Option<Rc<Local>> {
    CURRENT.try_with(|current| current.borrow().clone()).ok().flatten()
}

/// Whether a task may continue after `bytes` more bytes of work done without waiting. Once the turn's budget is spent
/// it may not, so that the executor's other tasks get their turn. Always `true` outside `block_on`.
pub fn may_go_on(bytes: usize) -> bool {
    let may = CURRENT.try_with(|current| {
        current.borrow().as_ref().is_none_or(|local| {
            let left = local.at_once.get().checked_sub(bytes + AT_ONCE / AT_ONCE_CALLS);
            local.at_once.set(left.unwrap_or(0));
            left.is_some()
        })
    });
    may.unwrap_or(true)
}

/// Whether tasks of this thread's executor other than the one that `own` wakes are ready, or may be because of another
/// thread. Takes the completions of their operations for that. A task that always has more to do then yields, so that
/// they need not wait for all of it. `false` outside `block_on`.
pub fn others_wait(own: &Waker) -> bool {
    current().is_some_and(|local| local.others_wait(own))
}

/// This thread's executor.
///
/// # Panics
/// Outside `block_on`.
pub(crate) fn required() -> Rc<Local> {
    current().unwrap_or_else(|| panic!("this thread is not inside Executor::block_on"))
}

/// Puts a task into the run queue of the executor that owns it, from any thread.
pub(super) fn schedule(remote: &Remote, task: Arc<dyn Run>) {
    let mut task = Some(task);
    let _ = CURRENT.try_with(|current| {
        if let Some(local) = &*current.borrow()
            && std::ptr::eq(&raw const *local.remote, remote)
        {
            local.run_queue.borrow_mut().extend(task.take());
        }
    });
    if let Some(task) = task {
        remote.schedule(task);
    }
}

/// Whether this thread is inside `block_on` of the executor that `remote` reaches.
pub(super) fn is_current(remote: &Remote) -> bool {
    current().is_some_and(|local| std::ptr::eq(&raw const *local.remote, remote))
}

/// Makes an executor the thread's current one until dropped.
pub(super) struct Entered(());

impl Drop for Entered {
    fn drop(&mut self) {
        let _ = CURRENT.try_with(|current| current.borrow_mut().take());
    }
}

/// One thread's executor. Everything here is accessed only by that thread, except `remote`.
pub struct Local {
    pub(super) driver: Driver,
    pub(super) timers: Timers,
    /// Descriptions of vectored operations, for reuse; boxed, since the kernel holds their addresses.
    #[allow(clippy::vec_box)]
    pub(super) spare: RefCell<Vec<Box<Vectored>>>,
    pub(super) remote: Arc<Remote>,
    run_queue: RefCell<VecDeque<Arc<dyn Run>>>,
    tasks: RefCell<Slab<Arc<dyn Run>>>,
    /// Why it has no ring, if it should have one.
    no_ring: Option<String>,
    closed: Cell<bool>,
    /// The rest of this turn's budget of [`AT_ONCE`] bytes.
    at_once: Cell<usize>,
    /// For calls that may have to wait.
    patience: Patience,
}

impl Local {
    pub(super) fn new(config: &Config) -> io::Result<Rc<Self>> {
        let (backend, no_ring) = choice::backend(config)?;
        let local = Rc::new(Self {
            driver: Driver::new(backend),
            timers: Timers::default(),
            spare: RefCell::default(),
            remote: Arc::new(Remote::new()?),
            run_queue: RefCell::default(),
            tasks: RefCell::default(),
            no_ring,
            closed: Cell::new(false),
            at_once: Cell::new(AT_ONCE),
            patience: Patience::default(),
        });
        local.driver.listen(local.remote.bell.descriptor())?;
        Ok(local)
    }

    /// Whether the executor has ended, so that operations fail with `ECANCELED`. Otherwise, an operation whose future
    /// still exists is cancelled only by the kernel, when it ends the process.
    pub fn has_ended(&self) -> bool {
        self.driver.is_closed()
    }

    /// Whether this thread may make a call that hardly ever waits.
    pub(super) fn may_be_brief(&self) -> bool {
        self.patience.has_any(Instant::now)
    }

    /// Such a call has taken so long.
    pub(super) fn was_brief(&self, took: Duration) {
        self.patience.spend(took, Instant::now);
    }

    /// Whether an io_uring does the I/O.
    pub(crate) fn has_ring(&self) -> bool {
        self.driver.has_ring()
    }

    /// Gives the kernel the operations that a ring has queued. Whoever goes on without waiting does so first: they
    /// would wait for the end of the turn.
    pub(crate) fn submit_queued(&self) {
        self.driver.submit_queued();
    }

    /// Why threads do the I/O though nobody asked for them: what is wrong with io_uring.
    pub fn why_no_ring(&self) -> Option<&str> {
        self.no_ring.as_deref()
    }

    /// Makes the next wake-up from another thread end a wait in the kernel.
    fn listen_again(&self) {
        self.driver.listen_again(self.remote.bell.descriptor());
    }

    /// Makes this the thread's current executor; `None` if there already is one.
    pub(super) fn enter(self: &Rc<Self>) -> Option<Entered> {
        CURRENT
            .try_with(|current| {
                let mut current = current.borrow_mut();
                current.is_none().then(|| *current = Some(self.clone()))
            })
            .ok()
            .flatten()
            .map(Entered)
    }

    /// Adds a task; `false` if the executor has ended.
    pub(super) fn add(&self, task: Arc<dyn Run>, set_key: impl FnOnce(usize)) -> bool {
        if self.closed.get() {
            return false;
        }
        set_key(self.tasks.borrow_mut().insert(task.clone()));
        self.run_queue.borrow_mut().push_back(task);
        true
    }

    /// Forgets a task that has ended.
    pub(super) fn forget(&self, key: usize) {
        let task = self.tasks.borrow_mut().try_remove(key);
        drop(task);
    }

    /// Runs the ready tasks, then takes completions; waits for one if no task is ready and `busy` returns `false`.
    pub(super) fn turn(self: &Rc<Self>, busy: impl Fn() -> bool) {
        self.take_mail();
        self.at_once.set(AT_ONCE);
        let ready = self.run_queue.borrow().len();
        for _ in 0..ready {
            let task = self.run_queue.borrow_mut().pop_front();
            let Some(task) = task else { break };
            task.run();
        }
        let next = self.timers.expire();
        let idle = self.run_queue.borrow().is_empty() && !busy() && self.remote.prepare_sleep();
        #[cfg(loom)]
        if idle {
            self.remote.bell.wait();
        }
        let wait = match next {
            _ if !idle => Wait::No,
            None => Wait::Forever,
            Some(duration) => Wait::For(duration),
        };
        if self.driver.enter(wait) {
            self.listen_again();
        }
    }

    fn others_wait(&self, own: &Waker) -> bool {
        if self.remote.has_news() {
            return true;
        }
        if self.driver.has_completions() && self.driver.enter(Wait::No) {
            self.listen_again();
        }
        let queue = self.run_queue.borrow();
        queue.iter().any(|task| Arc::as_ptr(task).cast::<()>() != own.data())
    }

    /// Waits until no dropped operation is in flight. Tasks do not run meanwhile.
    pub(super) fn settle(&self) {
        while self.driver.has_orphans() {
            if self.driver.enter(Wait::Forever) {
                self.listen_again();
            }
        }
    }

    fn take_mail(&self) {
        let Some(mail) = self.remote.take() else { return };
        self.run_queue.borrow_mut().extend(mail.tasks);
        for job in mail.jobs {
            job();
        }
    }

    /// Ends every task and operation.
    pub(super) fn close(self: &Rc<Self>) {
        let entered = self.enter();
        self.closed.set(true);
        self.remote.close();
        loop {
            let tasks: Vec<_> = self.tasks.borrow_mut().drain().collect();
            if tasks.is_empty() {
                break;
            }
            for task in tasks {
                task.end();
            }
        }
        let left = self.run_queue.take();
        drop(left);
        self.driver.drain();
        drop(entered);
    }
}
