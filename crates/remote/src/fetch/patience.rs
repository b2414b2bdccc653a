//! How long somebody waits for the store.

use super::flight::{Flight, Outcome, lock};
use super::wanted::Shared;
use crate::error::Error;
use std::collections::VecDeque;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::{Arc, Condvar, Mutex, PoisonError, Weak};
use std::task::Poll;
use std::time::{Duration, Instant};

/// Ends when the time of somebody who waits is over.
type Alarm = Flight<()>;

/// When an alarm ends.
type Set = (Instant, Weak<Alarm>);

/// The time limits of all who wait for a store. A thread [keeps](Self::keep) them, since a read may be awaited where
/// there are no other timers.
pub(super) struct Limits {
    /// After this time whoever waits for the store gets an error, whatever is tried by then; `None`: never.
    limit: Option<Duration>,
    /// When whose time is over, in order, and whether nobody waits any more.
    alarms: Mutex<(VecDeque<Set>, bool)>,
    changed: Condvar,
}

impl Limits {
    /// So much time for each; `None`: without end.
    pub(super) fn new(limit: Option<Duration>) -> Self {
        Self { limit, alarms: Mutex::default(), changed: Condvar::new() }
    }

    /// The time for each.
    pub(super) fn limit(&self) -> Option<Duration> {
        self.limit
    }

    /// An alarm after the time `limit`, which is that of all.
    fn set(&self, limit: Duration) -> Arc<Alarm> {
        let alarm = Arc::<Alarm>::default();
        let mut alarms = lock(&self.alarms);
        let was_empty = alarms.0.is_empty();
        // Under the lock, so that they are in order. Those that were dropped go when their time comes: there are as
        // many as were set in that time.
        alarms.0.push_back((Instant::now() + limit, Arc::downgrade(&alarm)));
        drop(alarms);
        if was_empty {
            self.changed.notify_one();
        }
        alarm
    }

    /// What a thread does until it is [closed](Self::close).
    pub(super) fn keep(&self) {
        let mut alarms = lock(&self.alarms);
        while !alarms.1 {
            let Some((end, _)) = alarms.0.front() else {
                alarms = self.changed.wait(alarms).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let left = end.saturating_duration_since(Instant::now());
            if !left.is_zero() {
                let waited = self.changed.wait_timeout(alarms, left);
                alarms = waited.unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            let Some((_, alarm)) = alarms.0.pop_front() else { continue };
            drop(alarms);
            if let Some(alarm) = alarm.upgrade() {
                alarm.end(());
            }
            alarms = lock(&self.alarms);
        }
    }

    /// Nobody waits any more.
    pub(super) fn close(&self) {
        lock(&self.alarms).1 = true;
        self.changed.notify_all();
    }
}

/// The time that one request waits for the store, from the first wait on. It is nobody else's: what is waited for goes
/// on when it is over, and what others began earlier does not count.
pub(crate) struct Patience<'a> {
    limits: &'a Limits,
    alarm: Option<Outcome<()>>,
}

impl<'a> Patience<'a> {
    /// That of somebody who begins to wait now.
    pub(super) fn new(limits: &'a Limits) -> Self {
        Self { limits, alarm: None }
    }

    /// Waits for a future about the object `key`.
    ///
    /// # Errors
    /// The time is over.
    pub(crate) async fn wait<F: Future>(&mut self, key: &str, future: F) -> Shared<F::Output> {
        let Some(limit) = self.limits.limit else { return Ok(future.await) };
        let limits = self.limits;
        let alarm = self.alarm.get_or_insert_with(|| limits.set(limit).outcome());
        let mut future = pin!(future);
        std::future::poll_fn(|context| {
            if let Poll::Ready(outcome) = future.as_mut().poll(context) {
                return Poll::Ready(Ok(outcome));
            }
            Pin::new(&mut *alarm).poll(context).map(|()| {
                Err(Arc::new(Error::Store(format!(
                    "cannot read '{key}' in the store: no answer within {limit:?} (--remote-timeout)"
                ))))
            })
        })
        .await
    }
}
