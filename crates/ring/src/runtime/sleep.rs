//! Waiting for a time.

use super::local::{self, Local};
use std::fmt;
use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

/// Waits until a deadline; a future from [`sleep`].
pub struct Sleep {
    deadline: Instant,
    registered: Option<(Rc<Local>, u64)>,
}

impl Sleep {
    fn unregister(&mut self) {
        if let Some((local, id)) = self.registered.take() {
            local.timers.remove(self.deadline, id);
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
            let id = local.timers.new_id();
            (local, id)
        });
        local.timers.set(deadline, *id, context.waker().clone());
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
