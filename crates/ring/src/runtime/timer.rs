//! Timers.

use super::local::{self, Local};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// The timers of one executor, in order of expiry.
#[derive(Default)]
pub(super) struct Timers {
    waiting: RefCell<BTreeMap<(Instant, u64), Waker>>,
    next: Cell<u64>,
}

impl Timers {
    /// Wakes expired timers; returns the time until the next.
    pub(super) fn expire(&self) -> Option<Duration> {
        if self.waiting.borrow().is_empty() {
            return None;
        }
        let now = Instant::now();
        loop {
            let mut waiting = self.waiting.borrow_mut();
            let first = waiting.first_entry()?;
            let deadline = first.key().0;
            if deadline > now {
                return Some(deadline - now);
            }
            let waker = first.remove();
            drop(waiting);
            waker.wake();
        }
    }
}

/// Waits until a deadline; a future from [`sleep`].
pub struct Sleep {
    deadline: Instant,
    registered: Option<(Rc<Local>, u64)>,
}

impl Sleep {
    fn unregister(&mut self) {
        if let Some((local, id)) = self.registered.take() {
            let old = local.timers.waiting.borrow_mut().remove(&(self.deadline, id));
            drop(old);
        }
    }
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if Instant::now() >= self.deadline {
            self.unregister();
            return Poll::Ready(());
        }
        let deadline = self.deadline;
        let (local, id) = self.registered.get_or_insert_with(|| {
            let local = local::required();
            let id = local.timers.next.get();
            local.timers.next.set(id + 1);
            (local, id)
        });
        let waker = context.waker().clone();
        let old = local.timers.waiting.borrow_mut().insert((deadline, *id), waker);
        drop(old);
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        self.unregister();
    }
}

/// Waits for `duration`. Dropping the future removes the timer.
///
/// # Panics
/// When polled outside [`Executor::block_on`](super::Executor::block_on).
pub fn sleep(duration: Duration) -> Sleep {
    let now = Instant::now();
    // A time beyond the clock's range is treated as never.
    let never = Duration::from_hours(100 * 365 * 24);
    sleep_until(now.checked_add(duration).unwrap_or(now + never))
}

/// Waits until `deadline`. In other respects like [`sleep`].
pub fn sleep_until(deadline: Instant) -> Sleep {
    Sleep { deadline, registered: None }
}

/// A [`timeout`] has expired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Elapsed;

impl fmt::Display for Elapsed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("timed out")
    }
}

impl std::error::Error for Elapsed {}

impl From<Elapsed> for io::Error {
    fn from(_: Elapsed) -> Self {
        Self::from_raw_os_error(libc::ETIMEDOUT)
    }
}

/// Waits for a future for up to `duration`, then drops it.
///
/// # Errors
/// [`Elapsed`] if it does not complete in time.
pub async fn timeout<F: Future>(duration: Duration, future: F) -> Result<F::Output, Elapsed> {
    let mut future = pin!(future);
    let mut sleep = pin!(sleep(duration));
    std::future::poll_fn(move |context| {
        if let Poll::Ready(output) = future.as_mut().poll(context) {
            return Poll::Ready(Ok(output));
        }
        sleep.as_mut().poll(context).map(|()| Err(Elapsed))
    })
    .await
}
