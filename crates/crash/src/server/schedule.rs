//! Tasks polled in an order derived from a seed, and time that passes when all of them wait.

use crate::clock::SimClock;
use crate::executor::Woken;
use crate::host::Planned;
use crate::trace;
use futures_util::future::LocalBoxFuture;
use isobath_sync::order::in_order;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// Far more polls than any history needs.
const MOST_POLLS: u64 = 5_000_000;
/// The duration of a task's step.
const STEP: Duration = Duration::from_nanos(300);
/// Far more wake-ups of background tasks alone than any history needs.
const MOST_QUIET: u64 = 20_000;

struct Task<'a> {
    /// `None` when it has ended.
    future: Option<LocalBoxFuture<'a, Result<(), String>>>,
    woken: Arc<Woken>,
    /// Nobody waits for its end.
    background: bool,
}

/// Tasks that run in turns.
pub struct Schedule<'a> {
    tasks: Vec<Task<'a>>,
    clock: SimClock,
    rng: SmallRng,
}

impl<'a> Schedule<'a> {
    /// No tasks yet.
    pub fn new(clock: SimClock, seed: u64) -> Self {
        Self { tasks: Vec::new(), clock, rng: SmallRng::seed_from_u64(seed) }
    }

    /// Adds a task.
    pub fn add(&mut self, task: impl Future<Output = Result<(), String>> + 'a) {
        self.push(Box::pin(in_order(task)), false);
    }

    /// Adds a task that continues until all others have ended.
    pub fn add_background(&mut self, task: impl Future<Output = Result<(), String>> + 'a) {
        self.push(Box::pin(in_order(task)), true);
    }

    fn push(&mut self, task: LocalBoxFuture<'a, Result<(), String>>, background: bool) {
        let woken = Arc::new(Woken(AtomicBool::new(true)));
        self.tasks.push(Task { future: Some(task), woken, background });
    }

    /// Runs all tasks to their end; `look` is called after each step of one.
    ///
    /// # Errors
    /// A task's, or that of tasks that never end.
    pub fn run(mut self, mut look: impl FnMut()) -> Result<(), String> {
        let (mut polls, mut quiet) = (0, 0);
        while self.tasks.iter().any(|task| !task.background && task.future.is_some()) {
            let ready =
                |task: &Task<'_>| task.future.is_some() && task.woken.0.load(Ordering::Relaxed);
            let count = self.tasks.iter().filter(|task| ready(task)).count();
            if count == 0 {
                if !self.clock.advance() {
                    return Err(
                        "a request waits for ever: nothing is left that could wake it".into()
                    );
                }
                quiet += 1;
                if quiet > MOST_QUIET {
                    return Err("a request waits for ever: time passes, and nothing happens".into());
                }
                continue;
            }
            polls += 1;
            if polls > MOST_POLLS {
                return Err(format!("the requests did not end within {MOST_POLLS} polls"));
            }
            let chosen = self.rng.random_range(0..count);
            trace::note((count, chosen));
            let Some(task) = self.tasks.iter_mut().filter(|task| ready(task)).nth(chosen) else {
                continue;
            };
            if !task.background {
                quiet = 0;
            }
            task.woken.0.store(false, Ordering::Relaxed);
            let waker = Waker::from(Arc::clone(&task.woken));
            let Some(future) = &mut task.future else { continue };
            if let Poll::Ready(done) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
                task.future = None;
                done?;
            }
            self.clock.pass(STEP);
            look();
        }
        Ok(())
    }
}

/// How long to wait for a future.
#[derive(Clone, Copy, Debug)]
pub enum Patience {
    /// Until it ends.
    Endless,
    /// For this many polls; then it is cancelled.
    Polls(u32),
}

/// Runs a future that may be cancelled, or whose task may panic as planned; returns `None` in these cases.
pub async fn endure<T>(patience: Patience, future: impl Future<Output = T>) -> Option<T> {
    let mut future = Some(Box::pin(future));
    let mut polls = 0;
    poll_fn(move |context| {
        let Some(running) = &mut future else { return Poll::Ready(None) };
        let poll = || Pin::new(running).poll(context);
        match catch_unwind(AssertUnwindSafe(poll)) {
            Ok(Poll::Ready(output)) => {
                future = None;
                return Poll::Ready(Some(output));
            }
            Ok(Poll::Pending) => {}
            Err(panic) if panic.is::<Planned>() => {
                future = None;
                return Poll::Ready(None);
            }
            Err(panic) => resume_unwind(panic),
        }
        polls += 1;
        if matches!(patience, Patience::Polls(most) if polls >= most) {
            future = None;
            return Poll::Ready(None);
        }
        Poll::Pending
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;
    use isobath_disk::clock::Clock;
    use std::cell::RefCell;

    #[test]
    fn time_passes_when_all_wait_and_what_waits_for_ever_is_told() {
        let clock = SimClock::default();
        let order = RefCell::new(Vec::new());
        let mut schedule = Schedule::new(clock.clone(), 1);
        for seconds in [3, 1, 2] {
            let (clock, order) = (&clock, &order);
            schedule.add(async move {
                clock.sleep(Duration::from_secs(seconds)).await;
                order.borrow_mut().push(seconds);
                Ok(())
            });
        }
        assert_eq!(schedule.run(|| ()), Ok(()));
        assert_eq!(*order.borrow(), [1, 2, 3]);
        assert!(clock.now() >= Duration::from_secs(3));
        let mut schedule = Schedule::new(clock, 1);
        schedule.add(std::future::pending());
        assert!(schedule.run(|| ()).is_err());
    }

    #[test]
    fn a_future_is_given_up_or_panics_as_planned() {
        let clock = SimClock::default();
        let mut schedule = Schedule::new(clock.clone(), 1);
        schedule.add(async {
            let waiting = clock.sleep(Duration::from_secs(1));
            assert_eq!(endure(Patience::Polls(1), waiting).await, None);
            let waiting = clock.sleep(Duration::from_secs(1));
            assert_eq!(endure(Patience::Polls(2), waiting).await, Some(()));
            let panics = async { resume_unwind(Box::new(Planned)) };
            assert_eq!(endure::<()>(Patience::Endless, panics).await, None);
            Ok(())
        });
        assert_eq!(schedule.run(|| ()), Ok(()));
    }
}
