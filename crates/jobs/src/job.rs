//! A job's interface: QEMU's states, and the verbs allowed in each.

use super::error::JobError;
use super::pace::{Forecast, Pacing};
use super::record::{JobRecord, Recorder};
use event_listener::Event;
use isobath_disk::live::Occupant;
use isobath_image::{DiskError, violated};
use isobath_sync::{CheckedMutex, Invariants};
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

/// What a job does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobKind {
    /// Copies data of backing files into an overlay (`block-stream`).
    Stream,
    /// Copies data of overlays into a backing file (`block-commit`).
    Commit,
    /// Copies a disk to another disk, and tracks its changes (`blockdev-mirror`).
    Mirror,
}

impl JobKind {
    /// QEMU's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Stream => "stream",
            Self::Commit => "commit",
            Self::Mirror => "mirror",
        }
    }
}

/// QEMU's `JobStatus`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum JobStatus {
    /// It has not started.
    #[default]
    Created,
    /// It is running.
    Running,
    /// It is paused by its user or because of an error.
    Paused,
    /// Everything is copied; it tracks changes until it is completed or cancelled.
    Ready,
    /// As [`Paused`](Self::Paused), when it was ready.
    Standby,
    /// The work is done.
    Waiting,
    /// Only the change of the chain is left.
    Pending,
    /// It was cancelled or has failed, and cleans up.
    Aborting,
    /// It has ended, and can be dismissed.
    Concluded,
    /// It is gone.
    Null,
}

impl JobStatus {
    /// QEMU's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Ready => "ready",
            Self::Standby => "standby",
            Self::Waiting => "waiting",
            Self::Pending => "pending",
            Self::Aborting => "aborting",
            Self::Concluded => "concluded",
            Self::Null => "null",
        }
    }

    /// Whether a job in this state may get into the next one: QEMU's table.
    fn may_become(self, next: Self) -> bool {
        match self {
            Self::Created => matches!(next, Self::Running | Self::Aborting),
            Self::Running => {
                matches!(next, Self::Paused | Self::Ready | Self::Waiting | Self::Aborting)
            }
            Self::Paused => next == Self::Running,
            Self::Ready => matches!(next, Self::Standby | Self::Waiting | Self::Aborting),
            Self::Standby => next == Self::Ready,
            Self::Waiting => matches!(next, Self::Pending | Self::Aborting),
            Self::Pending => matches!(next, Self::Aborting | Self::Concluded),
            Self::Aborting => next == Self::Concluded,
            Self::Concluded => next == Self::Null,
            Self::Null => false,
        }
    }

    /// Whether a verb is allowed in this state.
    fn allows(self, verb: Verb) -> bool {
        use JobStatus::{Concluded, Created, Paused, Pending, Ready, Running, Standby, Waiting};
        match verb {
            Verb::Cancel => {
                matches!(self, Created | Running | Paused | Ready | Standby | Waiting | Pending)
            }
            Verb::Pause | Verb::Resume | Verb::SetSpeed => {
                matches!(self, Created | Running | Paused | Ready | Standby)
            }
            Verb::Complete => self == Ready,
            Verb::Finalize => self == Pending,
            Verb::Dismiss => self == Concluded,
        }
    }
}

/// The verbs of jobs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// Cancels it.
    Cancel,
    /// Pauses it.
    Pause,
    /// Resumes it.
    Resume,
    /// Changes its speed limit.
    SetSpeed,
    /// Completes a job that is ready: it changes the chain.
    Complete,
    /// Finalizes a pending job: it changes the chain.
    Finalize,
    /// Dismisses it.
    Dismiss,
}

impl Verb {
    /// QEMU's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cancel => "cancel",
            Self::Pause => "pause",
            Self::Resume => "resume",
            Self::SetSpeed => "set-speed",
            Self::Complete => "complete",
            Self::Finalize => "finalize",
            Self::Dismiss => "dismiss",
        }
    }
}

/// What a job does when the storage fails (`on-error`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnError {
    /// Fails.
    #[default]
    Report,
    /// Continues with other parts, and fails at the end: the chain stays unchanged.
    Ignore,
    /// Pauses until resumed, and retries.
    Stop,
    /// Like [`Stop`](Self::Stop) if there is no space left, otherwise like [`Report`](Self::Report).
    Enospc,
}

/// A job's events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobEvent {
    /// It has entered a state.
    Status(JobStatus),
    /// The storage failed, and this action is taken: `report`, `ignore` or `stop`.
    Error {
        /// Whether a read failed, as opposed to a write.
        read: bool,
        /// QEMU's name for the action.
        action: &'static str,
    },
    /// Everything is copied.
    Ready,
    /// It waits to be finalized.
    Pending,
    /// It has ended; see [`Job::error`].
    Completed,
    /// It was cancelled.
    Cancelled,
}

/// Called with a job's events, in order, as they happen. It must not block.
pub type Listener = Arc<dyn Fn(&Job, JobEvent) + Send + Sync>;

/// Options common to all jobs.
#[derive(Clone)]
pub struct JobOptions {
    /// The job's unique name.
    pub id: String,
    /// The speed limit, in bytes per second; 0: no limit.
    pub speed: u64,
    /// How it is throttled for guest I/O.
    pub pacing: Pacing,
    /// What it does when the storage fails.
    pub on_error: OnError,
    /// Change the chain without `finalize` (`auto-finalize`).
    pub auto_finalize: bool,
    /// Dismiss the job once it has ended (`auto-dismiss`).
    pub auto_dismiss: bool,
    /// The listener for its events.
    pub listener: Option<Listener>,
}

impl JobOptions {
    /// QEMU's defaults, and the default pacing.
    pub fn new(id: impl Into<String>) -> Self {
        Self {
            id: id.into(),
            speed: 0,
            pacing: Pacing::default(),
            on_error: OnError::default(),
            auto_finalize: true,
            auto_dismiss: true,
            listener: None,
        }
    }
}

impl fmt::Debug for JobOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, speed, pacing, on_error, auto_finalize, auto_dismiss, listener: _ } = self;
        f.debug_struct("JobOptions")
            .field("id", id)
            .field("speed", speed)
            .field("pacing", pacing)
            .field("on_error", on_error)
            .field("auto_finalize", auto_finalize)
            .field("auto_dismiss", auto_dismiss)
            .finish_non_exhaustive()
    }
}

/// A verb that the job's state does not allow.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("Job '{id}' in state '{}' cannot accept command verb '{}'", status.name(), verb.name())]
pub struct VerbRefused {
    /// The job.
    pub id: String,
    /// Its state.
    pub status: JobStatus,
    /// The verb.
    pub verb: Verb,
}

/// A job. It is run by the future that was returned with it.
pub struct Job {
    kind: JobKind,
    options: JobOptions,
    state: CheckedMutex<JobState>,
    changed: Event,
}

#[derive(Clone, Debug, Default)]
pub(super) struct JobState {
    status: JobStatus,
    speed: u64,
    /// Bytes of the disk examined, and of the whole disk, or of its dirty parts.
    current: u64,
    total: u64,
    /// Bytes that were actually copied, and those that were cloned instead.
    copied: u64,
    cloned: u64,
    asked_to_pause: bool,
    failed_for_now: Option<FailedForNow>,
    cancelled: bool,
    /// A job that is ready ends without changing the chain.
    leave: bool,
    complete: bool,
    finalize: bool,
    dismissed: bool,
    yields: bool,
    forecast: Option<Forecast>,
    recorder: Option<Recorder>,
    error: Option<JobError>,
    /// It has ended because it was cancelled.
    given_up: bool,
    flush_failed: bool,
}

impl Invariants for JobState {
    fn check_invariants(&self) {
        use JobStatus::{
            Aborting, Concluded, Created, Null, Paused, Pending, Ready, Running, Standby,
        };
        let copies = matches!(self.status, Created | Running | Paused);
        if self.complete && copies {
            violated("a job is completed once it is ready");
        }
        if self.leave && copies {
            violated("a job leaves the chain as it is once it is ready");
        }
        if self.finalize && !matches!(self.status, Pending | Aborting | Concluded | Null) {
            violated("a job is finalized once it is pending");
        }
        if self.dismissed && !matches!(self.status, Concluded | Null) {
            violated("a job is dismissed once it has ended");
        }
        if self.given_up && !self.cancelled {
            violated("a job that is given up was cancelled");
        }
        let works = matches!(self.status, Running | Paused | Ready | Standby);
        if self.failed_for_now.is_some() && !works && !self.cancelled && self.error.is_none() {
            violated("only a job that works waits because of an error");
        }
        if self.current > self.total {
            violated("a job has done no more than there is to do");
        }
        if self.status == Created && (self.recorder.is_some() || self.copied + self.cloned > 0) {
            violated("a job that has not started has done nothing");
        }
        if let Some(recorder) = &self.recorder {
            if recorder.job_bytes() > self.copied + self.cloned {
                violated("a record has no more than its job moved");
            }
            recorder.check_invariants();
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FailedForNow {
    NoSpace,
    Otherwise,
}

/// A job's progress.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// The work done, in the unit of `total`.
    pub current: u64,
    /// The total work, in bytes; it may grow.
    pub total: u64,
    /// Bytes read and written so far.
    pub copied: u64,
    /// Bytes that were cloned (reflinked) instead.
    pub cloned: u64,
}

/// Whether a job waits because of an error (`io-status`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoStatus {
    /// No.
    Ok,
    /// The storage failed.
    Failed,
    /// There was no space left.
    NoSpace,
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut job = f.debug_struct("Job");
        job.field("kind", &self.kind).field("id", &self.id()).field("status", &self.status());
        job.finish_non_exhaustive()
    }
}

impl Job {
    pub(super) fn new(kind: JobKind, options: JobOptions) -> Arc<Self> {
        let state = JobState { speed: options.speed, ..JobState::default() };
        let job = Arc::new(Self {
            kind,
            options,
            state: CheckedMutex::new(state),
            changed: Event::new(),
        });
        job.tell(JobEvent::Status(JobStatus::Created));
        job
    }

    /// Its name.
    pub fn id(&self) -> &str {
        &self.options.id
    }

    /// What it does.
    pub fn kind(&self) -> JobKind {
        self.kind
    }

    /// The options that it was started with.
    pub fn options(&self) -> &JobOptions {
        &self.options
    }

    /// Its state.
    pub fn status(&self) -> JobStatus {
        self.state.lock().status
    }

    /// Its progress.
    pub fn progress(&self) -> Progress {
        let state = self.state.lock();
        Progress {
            current: state.current,
            total: state.total,
            copied: state.copied,
            cloned: state.cloned,
        }
    }

    /// Its limit in bytes per second; 0: none.
    pub fn speed(&self) -> u64 {
        self.state.lock().speed
    }

    /// Why it failed, if it did; a cancelled job has not.
    pub fn error(&self) -> Option<JobError> {
        self.state.lock().error.clone()
    }

    /// Whether it has succeeded, once its future has ended.
    ///
    /// # Errors
    /// Its [error](Self::error), or [`JobError::Cancelled`]. [`JobError::Abandoned`] if it has not ended, and never
    /// will once its future is dropped.
    pub fn result(&self) -> Result<(), JobError> {
        let state = self.state.lock();
        match &state.error {
            Some(error) => Err(error.clone()),
            None if state.given_up => Err(JobError::Cancelled),
            None if matches!(state.status, JobStatus::Concluded | JobStatus::Null) => Ok(()),
            None => Err(JobError::Abandoned),
        }
    }

    /// Whether it is currently throttled for guest I/O.
    pub fn yields(&self) -> bool {
        self.state.lock().yields
    }

    /// When it is expected to end, if known.
    pub fn forecast(&self) -> Option<Forecast> {
        self.state.lock().forecast
    }

    /// Whether it waits because of an error.
    pub fn io_status(&self) -> IoStatus {
        match self.state.lock().failed_for_now {
            None => IoStatus::Ok,
            Some(FailedForNow::NoSpace) => IoStatus::NoSpace,
            Some(FailedForNow::Otherwise) => IoStatus::Failed,
        }
    }

    /// Its and the guest's activity over time; empty before it started.
    pub fn record(&self) -> JobRecord {
        self.state.lock().recorder.as_ref().map(Recorder::record).unwrap_or_default()
    }

    /// Waits until something about the job changes after this call.
    pub fn changed(&self) -> impl Future<Output = ()> + Unpin + Send + use<> {
        self.changed.listen()
    }

    fn verb(&self, verb: Verb, change: impl FnOnce(&mut JobState)) -> Result<(), VerbRefused> {
        {
            let mut state = self.state.lock();
            let status = state.status;
            if !status.allows(verb) {
                return Err(VerbRefused { id: self.id().to_owned(), status, verb });
            }
            change(&mut state);
        }
        self.changed.notify(usize::MAX);
        Ok(())
    }

    /// Cancels the job. A job that is ready then completes without changing the chain, unless `force` is set; any other
    /// leaves a chain that reads as before.
    ///
    /// # Errors
    /// If its state does not allow that; the same applies to the other verbs.
    pub fn cancel(&self, force: bool) -> Result<(), VerbRefused> {
        self.verb(Verb::Cancel, |state| {
            if state.status == JobStatus::Ready && !force {
                state.leave = true;
            } else {
                state.cancelled = true;
            }
            state.asked_to_pause = false;
        })
    }

    /// Pauses the job, once the pieces in flight are done.
    ///
    /// # Errors
    /// See [`cancel`](Self::cancel).
    pub fn pause(&self) -> Result<(), VerbRefused> {
        self.verb(Verb::Pause, |state| state.asked_to_pause = true)
    }

    /// Resumes the job, including after an error that paused it.
    ///
    /// # Errors
    /// See [`cancel`](Self::cancel).
    pub fn resume(&self) -> Result<(), VerbRefused> {
        self.verb(Verb::Resume, |state| {
            state.asked_to_pause = false;
            state.failed_for_now = None;
        })
    }

    /// Sets the speed limit in bytes per second; 0: no limit.
    ///
    /// # Errors
    /// See [`cancel`](Self::cancel).
    pub fn set_speed(&self, speed: u64) -> Result<(), VerbRefused> {
        self.verb(Verb::SetSpeed, |state| state.speed = speed)
    }

    /// Completes a job that is ready: its target replaces the disk's chain.
    ///
    /// # Errors
    /// See [`cancel`](Self::cancel).
    pub fn complete(&self) -> Result<(), VerbRefused> {
        self.verb(Verb::Complete, |state| state.complete = true)
    }

    /// Finalizes a pending job: it changes the chain.
    ///
    /// # Errors
    /// See [`cancel`](Self::cancel).
    pub fn finalize(&self) -> Result<(), VerbRefused> {
        self.verb(Verb::Finalize, |state| state.finalize = true)
    }

    /// Dismisses a job that has ended.
    ///
    /// # Errors
    /// See [`cancel`](Self::cancel).
    pub fn dismiss(&self) -> Result<(), VerbRefused> {
        self.verb(Verb::Dismiss, |state| state.dismissed = true)
    }

    pub(super) fn tell(&self, event: JobEvent) {
        if let Some(listener) = &self.options.listener {
            listener(self, event);
        }
    }

    pub(super) fn go_to(&self, status: JobStatus) {
        let may = |now: JobStatus| now.may_become(status);
        if !self.set_status(status, may) {
            violated("a job's states follow one another as those of QEMU's jobs");
        }
    }

    /// Sets another state if it `may` follow the present one; returns whether it may.
    fn set_status(&self, status: JobStatus, may: impl FnOnce(JobStatus) -> bool) -> bool {
        let mut state = self.state.lock();
        if state.status == status {
            return true;
        }
        if !may(state.status) {
            return false;
        }
        state.status = status;
        drop(state);
        self.changed.notify(usize::MAX);
        self.tell(JobEvent::Status(status));
        true
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.state.lock().cancelled
    }

    pub(super) fn wants_pause(&self) -> bool {
        let state = self.state.lock();
        !state.cancelled && (state.asked_to_pause || state.failed_for_now.is_some())
    }

    pub(super) fn wants_completion(&self) -> bool {
        let state = self.state.lock();
        state.complete && !state.cancelled
    }

    /// Whether a job that is ready should end without changing the chain.
    pub(super) fn wants_to_leave(&self) -> bool {
        self.state.lock().leave
    }

    pub(super) fn may_finalize(&self) -> bool {
        self.options.auto_finalize || self.state.lock().finalize
    }

    pub(super) fn is_dismissed(&self) -> bool {
        self.options.auto_dismiss || self.state.lock().dismissed
    }

    /// Notes an error, whatever happens to the job.
    pub(super) fn see(&self, error: &DiskError) {
        self.state.lock().flush_failed |= error.is_failed_flush();
    }

    /// Whether a flush has failed.
    pub(super) fn has_failed_flush(&self) -> bool {
        self.state.lock().flush_failed
    }

    /// It ends because it was cancelled.
    pub(super) fn end_cancelled(&self) {
        self.state.lock().given_up = true;
    }

    pub(super) fn fail(&self, error: DiskError) {
        self.see(&error);
        self.state.lock().error.get_or_insert_with(|| JobError::from(error));
    }

    /// Makes the job wait because of an error.
    pub(super) fn wait_for_resume(&self, error: &DiskError) {
        let why = match error.errno() {
            libc::ENOSPC | libc::EDQUOT => FailedForNow::NoSpace,
            _ => FailedForNow::Otherwise,
        };
        self.state.lock().failed_for_now = Some(why);
        self.changed.notify(usize::MAX);
    }

    pub(super) fn set_progress(&self, current: u64, total: u64) {
        let mut state = self.state.lock();
        (state.current, state.total) = (current, total);
    }

    pub(super) fn moved(&self, copied: u64, cloned: u64) {
        let mut state = self.state.lock();
        state.copied += copied;
        state.cloned += cloned;
    }

    /// Records the guest's activity so far, and the job's reaction to it.
    pub(super) fn set_pace(
        &self,
        now: Duration,
        guest: u64,
        yields: bool,
        forecast: Option<Forecast>,
    ) {
        let mut state = self.state.lock();
        let state = &mut *state;
        state.yields = yields;
        state.forecast = forecast;
        let moved = state.copied + state.cloned;
        state
            .recorder
            .get_or_insert_with(|| Recorder::new(now, guest))
            .tell(now, guest, moved, !yields);
    }

    /// Waits until `done` returns `true`.
    pub(crate) async fn until(&self, done: impl Fn(&Self) -> bool) {
        loop {
            let changed = self.changed();
            if done(self) {
                return;
            }
            changed.await;
        }
    }
}

impl Occupant for Job {
    fn describe(&self) -> String {
        format!("{} ('{}')", self.kind().name(), self.id())
    }

    fn give_up(&self) {
        self.state.lock().error.get_or_insert(JobError::Abandoned);
        // Its task was dropped, in whatever state.
        self.set_status(JobStatus::Concluded, |now| now != JobStatus::Null);
    }

    fn end(&self) -> Pin<Box<dyn Future<Output = ()> + '_>> {
        let _ = self.cancel(true);
        let ended = |job: &Self| matches!(job.status(), JobStatus::Concluded | JobStatus::Null);
        Box::pin(self.until(ended))
    }
}

/// The longest time between two checks of the user's requests.
pub(super) const LOOK_AGAIN: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    #[test]
    #[cfg(debug_assertions)]
    fn what_a_job_notes_goes_with_its_state() {
        type Change = fn(&mut JobState);
        let cases: [(&str, Change); 10] = [
            ("a job is completed once it is ready", |state| state.complete = true),
            ("a job leaves the chain as it is once it is ready", |state| state.leave = true),
            ("a job is finalized once it is pending", |state| state.finalize = true),
            ("a job is dismissed once it has ended", |state| state.dismissed = true),
            ("a job that is given up was cancelled", |state| state.given_up = true),
            ("only a job that works waits because of an error", |state| {
                state.failed_for_now = Some(FailedForNow::NoSpace);
            }),
            ("a job has done no more than there is to do", |state| state.current = 1),
            ("a job that has not started has done nothing", |state| state.copied = 1),
            ("a record has no more than its job moved", |state| {
                state.status = JobStatus::Running;
                let mut recorder = Recorder::new(Duration::ZERO, 0);
                recorder.tell(Duration::from_secs(1), 0, 1, true);
                state.recorder = Some(recorder);
            }),
            ("a record's intervals are in order", |state| {
                state.status = JobStatus::Running;
                let mut recorder = Recorder::new(Duration::ZERO, 0);
                recorder.disorder();
                state.recorder = Some(recorder);
            }),
        ];
        for (violated, change) in cases {
            let mut state = JobState::default();
            state.check_invariants();
            change(&mut state);
            let found = catch_unwind(AssertUnwindSafe(|| state.check_invariants())).unwrap_err();
            let text = found.downcast_ref::<String>().unwrap();
            assert!(text.contains(violated), "{violated}: {text}");
        }
    }

    #[test]
    fn verbs_go_with_states_as_in_qemu() {
        let job = Job::new(JobKind::Stream, JobOptions::new("a"));
        assert!(job.complete().is_err());
        job.pause().unwrap();
        assert!(job.wants_pause());
        job.resume().unwrap();
        assert!(!job.wants_pause());
        for status in [JobStatus::Running, JobStatus::Aborting, JobStatus::Concluded] {
            job.go_to(status);
        }
        let error = job.cancel(false).unwrap_err();
        assert_eq!(
            error.to_string(),
            "Job 'a' in state 'concluded' cannot accept command verb 'cancel'"
        );
        job.dismiss().unwrap();
        assert!(job.is_dismissed());
    }

    #[test]
    #[should_panic(expected = "a job's states follow one another as those of QEMU's jobs")]
    fn a_job_that_has_ended_does_not_run_again() {
        let job = Job::new(JobKind::Stream, JobOptions::new("a"));
        for status in [JobStatus::Running, JobStatus::Aborting, JobStatus::Concluded] {
            job.go_to(status);
        }
        job.go_to(JobStatus::Running);
    }

    #[test]
    fn a_job_whose_task_is_dropped_has_ended_in_whatever_state_it_was() {
        for states in [&[] as &[JobStatus], &[JobStatus::Running, JobStatus::Paused]] {
            let job = Job::new(JobKind::Stream, JobOptions::new("a"));
            for status in states {
                job.go_to(*status);
            }
            job.give_up();
            assert_eq!(job.status(), JobStatus::Concluded);
            assert!(matches!(job.error(), Some(JobError::Abandoned)));
        }
    }
}
