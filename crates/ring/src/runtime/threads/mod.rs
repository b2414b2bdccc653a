//! Operations without a ring: threads make the calls on files, and sockets, eventfds and devices are awaited with
//! epoll.

mod calls;
mod pool;
mod readiness;

use super::call::{Call, Wait};
use pool::Pool;
use readiness::Readiness;
use std::cell::{Cell, RefCell};
use std::io;

/// The number of an operation, and its result as a ring gives it: negative for an error.
pub(super) type Completion = (u64, i32);

pub(super) struct Threads {
    pool: Pool,
    readiness: Readiness,
    /// Completions that have not been taken.
    done: RefCell<Vec<Completion>>,
    /// Operations that were started and whose completions have not been taken.
    in_flight: Cell<usize>,
}

impl Threads {
    pub(super) fn new() -> io::Result<Self> {
        let pool = Pool::new()?;
        let readiness = Readiness::new(pool.descriptor())?;
        Ok(Self { pool, readiness, done: RefCell::default(), in_flight: Cell::new(0) })
    }

    /// Starts an operation.
    ///
    /// # Safety
    /// What `call` points to must stay valid, and not be accessed otherwise, until the completion of `operation`; its
    /// file must be open until then.
    pub(super) unsafe fn start(&self, operation: u64, call: Call) {
        self.in_flight.set(self.in_flight.get() + 1);
        let mut done = self.done.borrow_mut();
        let Some(awaited) = calls::awaited(&call) else {
            // SAFETY: passed on to the caller.
            unsafe { self.pool.submit((operation, call), &mut done) };
            return;
        };
        // SAFETY: as above.
        match unsafe { calls::begin(&call) } {
            Some(result) => done.push((operation, result)),
            None => self.readiness.add((operation, call), awaited, &mut done),
        }
    }

    /// Ends an operation, if it waits for readiness: the others end by themselves.
    pub(super) fn cancel(&self, operation: u64) {
        if self.readiness.remove(operation) {
            self.done.borrow_mut().push((operation, -libc::ECANCELED));
        }
    }

    /// Makes wake-ups through an eventfd, which must not block, end waits.
    ///
    /// # Errors
    /// It cannot be watched.
    pub(super) fn listen(&self, eventfd: i32) -> io::Result<()> {
        self.readiness.listen(eventfd)
    }

    /// Waits as requested, unless there are completions. Returns whether there was a wake-up.
    pub(super) fn enter(&self, wait: Wait) -> bool {
        let mut done = self.done.borrow_mut();
        let wait = match wait {
            Wait::No => Wait::No,
            _ if !done.is_empty() || !self.pool.prepare_sleep() => Wait::No,
            wait => wait,
        };
        let mut woken = false;
        if !matches!(wait, Wait::No) || self.readiness.is_used() {
            woken = self.readiness.wait(wait, &mut done);
        }
        self.pool.take(&mut done);
        woken
    }

    /// The completions.
    pub(super) fn take(&self) -> Vec<Completion> {
        let done = self.done.take();
        self.in_flight.set(self.in_flight.get() - done.len());
        done
    }

    /// Whether [`enter`](Self::enter) may find completions.
    pub(super) fn may_have_completions(&self) -> bool {
        self.readiness.is_used() || !self.done.borrow().is_empty() || self.pool.has_completions()
    }

    /// Whether any operation has not ended.
    pub(super) fn is_busy(&self) -> bool {
        self.in_flight.get() > 0
    }
}
