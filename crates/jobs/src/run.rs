//! The loop of all jobs: piece after piece as the pacer decides, pauses, errors, and completion.

use super::job::{Job, JobEvent, JobStatus, LOOK_AGAIN, OnError};
use super::pace::{Pacer, Pacing, Step, Work};
use futures_util::future::select;
use futures_util::stream::{FuturesUnordered, StreamExt};
use isobath_disk::live::{Claim, LiveDisk};
use isobath_disk::write::Pulled;
use isobath_image::{DiskError, Result, violated};
use isobath_storage::{Host, Operation};
use isobath_sync::order::in_order;
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

/// Work that consists of pieces of a disk.
pub(super) trait Pieces {
    /// The next piece, of at most `most` bytes but at least one cluster; `None` if there is none now.
    fn next(&self, most: u64) -> impl Future<Output = Result<Option<Range<u64>>>>;

    /// Does a piece.
    fn copy(&self, range: Range<u64>) -> impl Future<Output = Result<Pulled>>;

    /// Bytes examined, and their total.
    fn progress(&self) -> (u64, u64);

    /// Bytes still to be copied, as far as known.
    fn remaining(&self) -> u64;

    /// Counts them.
    fn count(&self) -> impl Future<Output = Result<()>>;
}

/// A job's task as a whole.
pub(super) trait Task {
    /// Does all the work except the change of the chain. Returns `false` if it was cancelled.
    fn work(&mut self, job: &Job) -> impl Future<Output = Result<bool>>;

    /// Changes the chain.
    fn finish(&mut self, job: &Job) -> impl Future<Output = Result<()>>;

    /// Cleans up; the chain reads as before.
    fn abandon(&mut self) -> impl Future<Output = Result<()>>;
}

/// Runs a job to its end.
pub(super) async fn run(job: Arc<Job>, mut task: impl Task, mut claim: Claim) {
    claim.begin();
    job.go_to(JobStatus::Running);
    let mut result = task.work(&job).await;
    if matches!(result, Ok(true)) {
        job.go_to(JobStatus::Waiting);
        job.go_to(JobStatus::Pending);
        if !job.may_finalize() {
            job.tell(JobEvent::Pending);
            job.until(|job| job.may_finalize() || job.is_cancelled()).await;
        }
        result = if job.is_cancelled() && !job.may_finalize() {
            Ok(false)
        } else {
            task.finish(&job).await.map(|()| true)
        };
    }
    let (ended, cancelled) = (matches!(result, Ok(true)), matches!(result, Ok(false)));
    if let Err(error) = result {
        tracing::warn!(job = job.id(), %error, "a job failed");
        job.fail(error);
    }
    if cancelled {
        job.end_cancelled();
    }
    if !ended {
        job.go_to(JobStatus::Aborting);
        if let Err(error) = task.abandon().await {
            tracing::warn!(job = job.id(), %error, "a job's cleanup failed");
            job.see(&error);
        }
    }
    drop(task);
    claim.end(job.has_failed_flush());
    job.tell(if cancelled { JobEvent::Cancelled } else { JobEvent::Completed });
    job.go_to(JobStatus::Concluded);
    job.until(Job::is_dismissed).await;
    job.go_to(JobStatus::Null);
}

/// What a job began, and now goes on with.
pub(super) fn begun<T>(work: Option<T>) -> T {
    let Some(work) = work else { violated("a job goes on with what it began") };
    work
}

/// Processes pieces until there are none, as fast as the pacing and the speed limit allow.
pub(super) struct Driver<'a, H: Host> {
    job: &'a Job,
    live: &'a LiveDisk<H>,
    pacer: Pacer,
    speed: u64,
    /// An error that was ignored.
    ignored: Option<DiskError>,
}

impl<'a, H: Host> Driver<'a, H> {
    pub(super) fn new(job: &'a Job, live: &'a LiveDisk<H>) -> Self {
        let speed = job.speed();
        let pacer = Pacer::new(&job.options().pacing, speed, live.clock().now());
        Self { job, live, pacer, speed, ignored: None }
    }

    /// Counts the work if a deadline depends on it.
    pub(super) async fn plan(&self, pieces: &impl Pieces) -> Result<()> {
        match self.job.options().pacing {
            Pacing::Adaptive { deadline: Some(_), .. } => pieces.count().await,
            _ => Ok(()),
        }
    }

    /// Stops throttling for the guest: the job is about to end.
    pub(super) fn hurry(&mut self) {
        self.pacer = Pacer::new(&Pacing::None, self.speed, self.live.clock().now());
    }

    /// Processes the existing pieces; returns `false` if the job was cancelled. `paused` is its state while it waits.
    ///
    /// # Errors
    /// If the storage fails and the job should not wait then.
    pub(super) async fn drive(
        &mut self,
        pieces: &impl Pieces,
        running: JobStatus,
        paused: JobStatus,
    ) -> Result<bool> {
        let live = self.live;
        let mut under_way = FuturesUnordered::new();
        let mut in_flight = InFlight::default();
        let mut again: VecDeque<Range<u64>> = VecDeque::new();
        let mut ended = false;
        let mut failed: Option<DiskError> = None;
        let mut done_with = Vec::new();
        loop {
            in_flight.check(under_way.len() + done_with.len());
            let stop = self.job.is_cancelled() || failed.is_some();
            let pause = self.job.wants_pause();
            if under_way.is_empty() && done_with.is_empty() {
                if let Some(error) = failed {
                    return Err(error);
                }
                if self.job.is_cancelled() {
                    return Ok(false);
                }
                if pause {
                    self.job.go_to(paused);
                    self.job.until(|job| !job.wants_pause()).await;
                    self.job.go_to(running);
                    continue;
                }
                if ended && again.is_empty() {
                    return match self.ignored.take() {
                        Some(error) => Err(error),
                        None => Ok(true),
                    };
                }
            }
            let clock = self.live.clock();
            let now = clock.now();
            let mut until = now + LOOK_AGAIN;
            let more = !ended || !again.is_empty();
            if more && !stop && !pause {
                if self.job.speed() != self.speed {
                    self.speed = self.job.speed();
                    self.pacer.set_speed(now, self.speed);
                }
                let InFlight { bytes, pieces: count } = in_flight;
                let remaining = pieces.remaining();
                let work = Work { remaining, in_flight: bytes, pieces: count as u32 };
                let guest = self.live.guest();
                let step = self.pacer.next(now, &guest, &work);
                let forecast = self.pacer.forecast(now, &work);
                self.job.set_pace(now, guest.bytes(), self.pacer.is_paused(), forecast);
                match step {
                    Step::Copy { bytes } => {
                        let next = if let Some(range) = again.pop_front() {
                            Ok(Some(range))
                        } else {
                            // Pieces in flight may hold locks that this waits for.
                            let mut next = pin!(in_order(pieces.next(bytes)));
                            poll_fn(|context| {
                                loop {
                                    if let Poll::Ready(found) = next.as_mut().poll(context) {
                                        return Poll::Ready(found);
                                    }
                                    match under_way.poll_next_unpin(context) {
                                        Poll::Ready(Some(done)) => done_with.push(done),
                                        _ => return Poll::Pending,
                                    }
                                }
                            })
                            .await
                        };
                        let (current, total) = pieces.progress();
                        self.job.set_progress(current, total);
                        match next {
                            Ok(Some(range)) => {
                                in_flight.begin(&range);
                                let start = clock.now();
                                under_way.push(in_order(async move {
                                    let _copying = live.copying();
                                    let done = pieces.copy(range.clone()).await;
                                    (range, done, start)
                                }));
                            }
                            Ok(None) => ended = true,
                            Err(error) => failed = Some(error),
                        }
                        if done_with.is_empty() {
                            continue;
                        }
                    }
                    Step::Wait { until: wanted } => until = until.min(wanted),
                }
            }
            if done_with.is_empty() {
                let mut sleep = clock.sleep_until(until);
                let mut changed = pin!(self.job.changed());
                let done = poll_fn(|context| {
                    if let Poll::Ready(Some(done)) = under_way.poll_next_unpin(context) {
                        return Poll::Ready(Some(done));
                    }
                    let changed = changed.as_mut().poll(context).is_ready();
                    if changed || sleep.as_mut().poll(context).is_ready() {
                        return Poll::Ready(None);
                    }
                    Poll::Pending
                });
                done_with.extend(done.await);
            }
            for (range, done, start) in done_with.drain(..) {
                in_flight.end(&range);
                match done {
                    Ok(pulled) => {
                        self.job.moved(pulled.copied, pulled.cloned);
                        let now = clock.now();
                        self.pacer.copied(now, pulled.copied, now.saturating_sub(start));
                    }
                    Err(error) => match self.passed_over(&error) {
                        Verdict::Retry => again.push_back(range),
                        Verdict::Skip => self.ignored = self.ignored.take().or(Some(error)),
                        Verdict::Fail => failed = failed.or(Some(error)),
                    },
                }
                let (current, total) = pieces.progress();
                self.job.set_progress(current, total);
            }
        }
    }

    /// The action for an error.
    fn passed_over(&self, error: &DiskError) -> Verdict {
        self.job.see(error);
        let no_space = matches!(error.errno(), libc::ENOSPC | libc::EDQUOT);
        let (verdict, action) = match self.job.options().on_error {
            OnError::Ignore => (Verdict::Skip, "ignore"),
            OnError::Stop => (Verdict::Retry, "stop"),
            OnError::Enospc if no_space => (Verdict::Retry, "stop"),
            OnError::Report | OnError::Enospc => (Verdict::Fail, "report"),
        };
        // Writes can be retried unless a flush has failed; a poisoned disk stays poisoned.
        let read = matches!(error, DiskError::Storage(e) if e.operation == Operation::Read);
        self.job.tell(JobEvent::Error { read, action });
        if matches!(verdict, Verdict::Retry) {
            self.job.wait_for_resume(error);
        }
        verdict
    }
}

/// The pieces that have begun and not ended.
#[derive(Clone, Copy, Default)]
struct InFlight {
    bytes: u64,
    pieces: usize,
}

impl InFlight {
    fn begin(&mut self, range: &Range<u64>) {
        if range.is_empty() {
            violated("a piece has bytes");
        }
        self.bytes += range.end - range.start;
        self.pieces += 1;
    }

    fn end(&mut self, range: &Range<u64>) {
        let length = range.end - range.start;
        if length > self.bytes || self.pieces == 0 {
            violated("a piece that ends is in flight");
        }
        self.bytes -= length;
        self.pieces -= 1;
    }

    /// Checks that so many pieces are in flight.
    fn check(&self, pieces: usize) {
        if self.pieces != pieces || (pieces == 0) != (self.bytes == 0) {
            violated("the pieces that a job counts are those in flight");
        }
    }
}

enum Verdict {
    Retry,
    Skip,
    Fail,
}

/// Waits briefly before a ready job checks for changes again.
pub(super) async fn look_again<H: Host>(live: &LiveDisk<H>, job: &Job) {
    let clock = live.clock();
    let sleep = clock.sleep_until(clock.now() + READY_STEP);
    select(pin!(job.changed()), sleep).await;
}

/// The interval at which a ready job checks for changes.
const READY_STEP: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    fn must_panic(change: impl FnOnce(), what: &str) {
        let panic = catch_unwind(AssertUnwindSafe(change)).expect_err(what);
        let text = panic.downcast_ref::<String>().unwrap();
        assert!(text.contains(what), "{what}: {text}");
    }

    #[test]
    fn a_job_does_not_go_on_with_nothing() {
        assert_eq!(begun(Some(1)), 1);
        must_panic(|| begun(None), "a job goes on with what it began");
    }

    #[test]
    fn the_pieces_in_flight_are_counted() {
        let mut in_flight = InFlight::default();
        in_flight.check(0);
        in_flight.begin(&(0..512));
        in_flight.check(1);
        let counts = "the pieces that a job counts are those in flight";
        must_panic(|| in_flight.check(2), counts);
        must_panic(|| InFlight { bytes: 0, ..in_flight }.check(1), counts);
        let in_flight_once = "a piece that ends is in flight";
        must_panic(|| in_flight.clone().end(&(0..513)), in_flight_once);
        in_flight.end(&(0..512));
        in_flight.check(0);
        must_panic(|| in_flight.clone().end(&(0..0)), in_flight_once);
        must_panic(|| in_flight.begin(&(512..512)), "a piece has bytes");
    }
}
