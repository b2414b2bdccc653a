//! The clock of live disks and their jobs.

use std::future::Future;
use std::pin::Pin;
use std::time::{Duration, Instant};

/// A clock with timers. Simulations provide their own.
pub trait Clock: Send + Sync + 'static {
    /// Time since some moment before the clock was created.
    fn now(&self) -> Duration;

    /// Waits at least until `now` reaches `time`.
    fn sleep_until(&self, time: Duration) -> Pin<Box<dyn Future<Output = ()>>>;
}

/// The machine's clock. It waits only within a [`isobath_ring::Executor`].
#[derive(Clone, Copy, Debug)]
pub struct SystemClock(Instant);

impl Default for SystemClock {
    fn default() -> Self {
        Self(Instant::now())
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }

    fn sleep_until(&self, time: Duration) -> Pin<Box<dyn Future<Output = ()>>> {
        let at = self.0 + time;
        Box::pin(isobath_ring::sleep_until(at))
    }
}
