//! What becomes of a client's request when the storage fails: it fails, or the disk pauses and it is tried again later.
//!
//! A disk that is paused in a direction carries out no new requests of that direction. Those that failed, and those
//! that came later, wait until the operator lets the disk [continue](Pausing::resume), and are then carried out. They
//! wait before the disk: outside the gate, with no lock, and not counted as in flight. Frontends do the waiting, since
//! only they know when a client or a server ends; jobs and queries never wait here.
//!
//! Whoever stops the disk waits for the requests that have [entered](Pausing::enter). A request is counted, and then
//! looks whether the disk is stopped; a stop is noted, and then looks whether requests are counted. So each for which
//! the stop does not wait sees it.

use crate::clock::Clock;
use crate::throttle::Direction;
use isobath_image::DiskError;
use isobath_image::per_thread::PerThread;
use isobath_image::violated;
use isobath_sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use isobath_sync::{Condition, Mutex};
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// What becomes of a request when the storage fails. The words are those of a job's `on-error`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnFailure {
    /// It fails.
    #[default]
    Report,
    /// Like [`Stop`](Self::Stop) if there is no space left, otherwise like [`Report`](Self::Report).
    Enospc,
    /// The disk pauses, and the request is tried again once it continues.
    Stop,
}

impl OnFailure {
    /// QEMU's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Report => "report",
            Self::Enospc => "enospc",
            Self::Stop => "stop",
        }
    }

    /// The value of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Report, Self::Enospc, Self::Stop].into_iter().find(|value| value.name() == name)
    }

    /// Whether this error pauses the disk.
    fn pauses(self, error: &DiskError) -> bool {
        match self {
            Self::Report => false,
            Self::Enospc => is_no_space(error),
            Self::Stop => is_of_storage(error) && may_pass_later(error),
        }
    }
}

/// Whether the host has no space left.
pub(crate) fn is_no_space(error: &DiskError) -> bool {
    matches!(error.errno(), libc::ENOSPC | libc::EDQUOT)
}

/// Whether the storage failed, and not the request itself, or the memory that it came with, which a client may have cut
/// short.
pub(crate) fn is_of_storage(error: &DiskError) -> bool {
    !matches!(
        error,
        DiskError::OutOfRange { .. }
            | DiskError::ReadOnly
            | DiskError::Unsupported(_)
            | DiskError::Closed
    ) && error.errno() != libc::EFAULT
}

/// Whether the same request may succeed later.
fn may_pass_later(error: &DiskError) -> bool {
    !matches!(error, DiskError::Disguise { .. }) && error.errno() != libc::ENOTSUP
}

/// What becomes of a disk's requests when the storage fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Policies {
    /// Reads.
    pub reads: OnFailure,
    /// Writes, zero-writes, discards and flushes.
    pub writes: OnFailure,
}

impl Policies {
    const fn of(self, direction: Direction) -> OnFailure {
        match direction {
            Direction::Read => self.reads,
            Direction::Write => self.writes,
        }
    }
}

/// The failure that paused a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pause {
    /// Whether a read failed, as opposed to a write or flush.
    pub read: bool,
    /// Whether the host has no space left.
    pub no_space: bool,
    /// The error message.
    pub reason: String,
    /// When, by the disk's clock.
    pub since: Duration,
}

/// A disk's state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PauseState {
    /// What becomes of requests.
    pub policies: Policies,
    /// The failures that paused it: at most one of a read and one of a write.
    pub failures: Vec<Pause>,
    /// Whether the operator has stopped it.
    pub stopped: bool,
    /// Requests that wait until it continues.
    pub waiting: usize,
    /// How long it has been paused by a failure.
    pub paused_for: Option<Duration>,
}

/// Called when a failure pauses the disk, on the thread of the request. It must not block.
pub type PauseListener = Box<dyn Fn(Pause) + Send + Sync>;

#[derive(Default)]
struct State {
    policies: Policies,
    failures: [Option<Pause>; 2],
    stopped: bool,
    waiting: usize,
    /// How often it has continued. A failure of an attempt that began before does not pause it again.
    round: u64,
}

impl State {
    fn is_plain(&self) -> bool {
        self.policies == Policies::default()
            && !self.stopped
            && self.failures.iter().all(Option::is_none)
    }

    fn passes(&self, direction: Direction) -> bool {
        !self.stopped && self.failure(direction).is_none()
    }

    fn failure(&self, direction: Direction) -> Option<&Pause> {
        let [read, write] = &self.failures;
        match direction {
            Direction::Read => read.as_ref(),
            Direction::Write => write.as_ref(),
        }
    }

    fn failure_mut(&mut self, direction: Direction) -> &mut Option<Pause> {
        let [read, write] = &mut self.failures;
        match direction {
            Direction::Read => read,
            Direction::Write => write,
        }
    }
}

/// The pauses of one disk.
pub struct Pausing {
    /// Whether requests need nothing from the state: all that they look at unless a policy or a pause is set.
    plain: AtomicBool,
    /// Whether the operator has stopped the disk.
    stopped: AtomicBool,
    /// Nobody waits for requests any longer.
    ended: AtomicBool,
    /// Clients' requests that are being carried out.
    inside: PerThread<AtomicUsize>,
    state: Mutex<State>,
    changed: Condition,
    /// Signals that a request has left while the disk is stopped.
    left: Condition,
    listener: OnceLock<PauseListener>,
    clock: Arc<dyn Clock>,
}

impl fmt::Debug for Pausing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pausing").field("state", &self.state()).finish_non_exhaustive()
    }
}

/// A client's request that is being carried out.
pub struct Inside<'a> {
    pausing: &'a Pausing,
    counted: &'a AtomicUsize,
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        if self.counted.fetch_sub(1, Ordering::SeqCst) == 0 {
            violated("a request that leaves a disk has entered it");
        }
        if self.pausing.is_stopped() {
            self.pausing.left.changed();
        }
    }
}

/// Counts a request that waits.
struct Waiting<'a>(&'a Pausing);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.state.lock().waiting -= 1;
    }
}

impl Pausing {
    /// A disk that never pauses, until its policies are set. Times are of this clock.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        Self {
            plain: AtomicBool::new(true),
            stopped: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            inside: PerThread::default(),
            state: Mutex::default(),
            changed: Condition::default(),
            left: Condition::default(),
            listener: OnceLock::new(),
            clock,
        }
    }

    /// Whether requests are carried out without regard to any of this: no policy is set, and nothing is paused.
    #[inline]
    pub fn is_plain(&self) -> bool {
        self.plain.load(Ordering::SeqCst)
    }

    /// The state.
    pub fn state(&self) -> PauseState {
        let state = self.state.lock();
        let since = state.failures.iter().flatten().map(|pause| pause.since).min();
        PauseState {
            policies: state.policies,
            failures: state.failures.iter().flatten().cloned().collect(),
            stopped: state.stopped,
            waiting: state.waiting,
            paused_for: since.map(|since| self.clock.now().saturating_sub(since)),
        }
    }

    /// Calls `listener` whenever a failure pauses the disk. The first listener stays.
    pub fn on_pause(&self, listener: PauseListener) {
        let _ = self.listener.set(listener);
    }

    /// Sets what becomes of requests. Those that wait, and would not pause the disk now, fail.
    pub fn set_policies(&self, policies: Policies) {
        self.change(|state| {
            state.policies = policies;
            for direction in [Direction::Read, Direction::Write] {
                let place = state.failure_mut(direction);
                let stays = |pause: &Pause| match policies.of(direction) {
                    OnFailure::Report => false,
                    OnFailure::Enospc => pause.no_space,
                    OnFailure::Stop => true,
                };
                *place = place.take().filter(stays);
            }
        });
    }

    /// Keeps all requests waiting from now on, until the disk [continues](Self::resume).
    pub fn stop(&self) {
        self.change(|state| state.stopped = true);
    }

    /// Whether the operator has stopped the disk.
    #[inline]
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }

    /// Lets all requests that wait be carried out.
    pub fn resume(&self) {
        self.change(|state| {
            state.stopped = false;
            state.failures = [None, None];
            state.round += 1;
        });
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        {
            let mut state = self.state.lock();
            change(&mut state);
            self.plain.store(state.is_plain(), Ordering::SeqCst);
            self.stopped.store(state.stopped, Ordering::SeqCst);
        }
        self.changed.changed();
        self.left.changed();
    }

    /// Counts a client's request as being carried out, unless its policy or a pause concerns it.
    #[inline]
    pub fn enter(&self) -> Option<Inside<'_>> {
        let inside = self.count();
        self.is_plain().then_some(inside)
    }

    fn count(&self) -> Inside<'_> {
        let (_, counted) = self.inside.mine();
        counted.fetch_add(1, Ordering::SeqCst);
        Inside { pausing: self, counted }
    }

    /// Waits until no client's request is being carried out, on a disk that is stopped, or until it goes on.
    pub(crate) async fn quiet(&self) {
        let empty = || self.inside.all().all(|inside| inside.load(Ordering::SeqCst) == 0);
        let ended = || self.ended.load(Ordering::SeqCst);
        self.left.until(|| empty() || !self.is_stopped() || ended()).await;
    }

    /// The server ends: a stop does not wait for requests any longer.
    pub fn end(&self) {
        self.ended.store(true, Ordering::SeqCst);
        self.left.changed();
    }

    /// Whether this failure of a client's request pauses the disk, and is not reported to the client.
    pub(crate) fn would_pause(&self, direction: Direction, error: &DiskError) -> bool {
        !self.is_plain() && self.state.lock().policies.of(direction).pauses(error)
    }

    /// Which attempt a request makes now: to be passed to [`hold`](Self::hold) if it fails.
    pub fn round(&self) -> u64 {
        self.state.lock().round
    }

    /// Waits while requests of this direction are kept waiting.
    pub async fn pass(&self, direction: Direction) -> Inside<'_> {
        self.enter_once(|state| state.passes(direction)).await
    }

    /// As [`pass`](Self::pass); `None` if it would wait.
    pub fn try_pass(&self, direction: Direction) -> Option<Inside<'_>> {
        let passes = self.state.lock().passes(direction);
        if passes { self.enter_unless_stopped() } else { None }
    }

    /// Waits while the operator has stopped the disk: a flush, which concerns only what has completed, passes while a
    /// failure keeps writes waiting.
    pub async fn pass_flush(&self) -> Inside<'_> {
        self.enter_once(|state| !state.stopped).await
    }

    async fn enter_once(&self, passes: impl Fn(&State) -> bool) -> Inside<'_> {
        loop {
            self.until(&passes).await;
            if let Some(inside) = self.enter_unless_stopped() {
                return inside;
            }
        }
    }

    /// Counts a request as being carried out, whatever has failed, unless the operator has stopped the disk.
    pub fn enter_unless_stopped(&self) -> Option<Inside<'_>> {
        let inside = self.count();
        (!self.is_stopped()).then_some(inside)
    }

    /// Handles the failure of a client's request that was begun in `round`. Pauses the disk and waits, if the policy
    /// says so; the request is then to be tried again. Otherwise it fails.
    pub async fn hold(&self, round: u64, direction: Direction, error: &DiskError) -> Held {
        if !self.pause(round, direction, error) {
            return Held::Fails;
        }
        let fails = |state: &State| !state.policies.of(direction).pauses(error);
        self.until(|state| state.passes(direction) || fails(state)).await;
        if fails(&self.state.lock()) { Held::Fails } else { Held::Again }
    }

    /// Pauses the disk, unless it is paused or has continued since the attempt began. Returns whether the request
    /// waits.
    fn pause(&self, round: u64, direction: Direction, error: &DiskError) -> bool {
        let pause = {
            let mut state = self.state.lock();
            if !state.policies.of(direction).pauses(error) {
                return false;
            }
            if state.round != round || state.failure(direction).is_some() {
                return true;
            }
            let pause = Pause {
                read: direction == Direction::Read,
                no_space: is_no_space(error),
                reason: error.to_string(),
                since: self.clock.now(),
            };
            *state.failure_mut(direction) = Some(pause.clone());
            pause
        };
        if let Some(listener) = self.listener.get() {
            listener(pause);
        }
        true
    }

    /// Waits for a state, counted as waiting.
    async fn until(&self, holds: impl Fn(&State) -> bool) {
        let _waiting = {
            let mut state = self.state.lock();
            if holds(&state) {
                return;
            }
            state.waiting += 1;
            Waiting(self)
        };
        self.changed.until(|| holds(&self.state.lock())).await;
    }
}

/// What becomes of a request that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Held {
    /// It is tried again.
    Again,
    /// It fails.
    Fails,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::SystemClock;
    use futures_util::FutureExt;
    use isobath_storage::{Operation, StorageError};
    use std::io;
    use std::path::Path;
    use std::pin::pin;

    fn failed(errno: i32) -> DiskError {
        let error = io::Error::from_raw_os_error(errno);
        StorageError::at(Operation::Write, Path::new("disk.img"), 0, 512, error).into()
    }

    fn pausing(reads: OnFailure, writes: OnFailure) -> (Pausing, Arc<Mutex<Vec<Pause>>>) {
        let pausing = Pausing::new(Arc::<SystemClock>::default());
        let told = Arc::new(Mutex::new(Vec::new()));
        let to = Arc::clone(&told);
        pausing.on_pause(Box::new(move |pause| to.lock().push(pause)));
        pausing.set_policies(Policies { reads, writes });
        (pausing, told)
    }

    #[test]
    fn a_policy_pauses_for_its_errors_only() {
        let denied = DiskError::ReadOnly;
        let slow = DiskError::Unsupported("not fast".into());
        for (policy, errno, expected) in [
            (OnFailure::Report, libc::ENOSPC, false),
            (OnFailure::Enospc, libc::ENOSPC, true),
            (OnFailure::Enospc, libc::EDQUOT, true),
            (OnFailure::Enospc, libc::EIO, false),
            (OnFailure::Stop, libc::EIO, true),
            (OnFailure::Stop, libc::ENOTSUP, false),
            // Of the memory that a client has cut short.
            (OnFailure::Stop, libc::EFAULT, false),
        ] {
            assert_eq!(policy.pauses(&failed(errno)), expected, "{policy:?} {errno}");
            assert!(!policy.pauses(&denied) && !policy.pauses(&slow), "{policy:?}");
            assert_eq!(OnFailure::from_name(policy.name()), Some(policy));
        }
        let (pausing, told) = pausing(OnFailure::Report, OnFailure::Report);
        assert!(pausing.is_plain());
        let error = failed(libc::ENOSPC);
        let hold = pausing.hold(0, Direction::Write, &error);
        assert_eq!(hold.now_or_never(), Some(Held::Fails));
        assert!(told.lock().is_empty());
    }

    #[test]
    fn writes_wait_for_the_operator_while_reads_and_flushes_pass() {
        let (pausing, told) = pausing(OnFailure::Stop, OnFailure::Enospc);
        let error = failed(libc::ENOSPC);
        let mut first = pin!(pausing.hold(0, Direction::Write, &error));
        let mut second = pin!(pausing.hold(0, Direction::Write, &error));
        assert_eq!(first.as_mut().now_or_never(), None);
        assert_eq!(second.as_mut().now_or_never(), None);
        let mut later = pin!(pausing.pass(Direction::Write));
        assert!(later.as_mut().now_or_never().is_none());
        assert!(pausing.pass(Direction::Read).now_or_never().is_some());
        assert!(pausing.pass_flush().now_or_never().is_some());
        let state = pausing.state();
        assert_eq!((state.waiting, state.failures.len()), (3, 1));
        assert!(state.failures[0].no_space && !state.failures[0].read);
        assert!(state.failures[0].reason.contains("disk.img"));
        assert_eq!(told.lock().len(), 1, "one event for one pause");
        pausing.resume();
        assert_eq!(first.now_or_never(), Some(Held::Again));
        assert_eq!(second.now_or_never(), Some(Held::Again));
        assert!(later.now_or_never().is_some());
        assert_eq!((pausing.state().waiting, pausing.state().failures.len()), (0, 0));
    }

    #[test]
    fn a_failure_that_lasts_pauses_the_disk_once_for_each_time_that_it_continues() {
        let (pausing, told) = pausing(OnFailure::Report, OnFailure::Stop);
        let error = DiskError::Poisoned { reason: "a sync failed".into(), flush_failed: true };
        for round in 0..3 {
            assert_eq!(pausing.round(), round);
            let mut held = pin!(pausing.hold(round, Direction::Write, &error));
            assert_eq!(held.as_mut().now_or_never(), None);
            assert_eq!(told.lock().len() as u64, round + 1);
            pausing.resume();
            assert_eq!(held.now_or_never(), Some(Held::Again));
        }
        // This one began before the disk has continued.
        let late = pausing.hold(1, Direction::Write, &error);
        assert_eq!((late.now_or_never(), told.lock().len()), (Some(Held::Again), 3));
    }

    #[test]
    fn who_waits_fails_when_the_policy_is_to_report() {
        let (pausing, _) = pausing(OnFailure::Report, OnFailure::Stop);
        let error = failed(libc::EIO);
        let mut held = pin!(pausing.hold(0, Direction::Write, &error));
        let mut later = pin!(pausing.pass(Direction::Write));
        assert_eq!(held.as_mut().now_or_never(), None);
        assert!(later.as_mut().now_or_never().is_none());
        pausing.set_policies(Policies { reads: OnFailure::Stop, writes: OnFailure::Enospc });
        assert_eq!(held.now_or_never(), Some(Held::Fails));
        assert!(later.now_or_never().is_some());
        assert!(!pausing.is_plain());
        pausing.set_policies(Policies::default());
        assert!(pausing.is_plain());
    }

    #[test]
    fn a_stopped_disk_keeps_everything_and_a_dropped_request_is_forgotten() {
        let (pausing, told) = pausing(OnFailure::Report, OnFailure::Report);
        pausing.stop();
        assert!(!pausing.is_plain());
        {
            let mut flush = pin!(pausing.pass_flush());
            let mut read = pin!(pausing.pass(Direction::Read));
            assert!(flush.as_mut().now_or_never().is_none());
            assert!(read.as_mut().now_or_never().is_none());
            assert_eq!(pausing.state().waiting, 2);
        }
        assert_eq!(pausing.state().waiting, 0);
        assert!(pausing.enter().is_none() && pausing.enter_unless_stopped().is_none());
        assert!(pausing.quiet().now_or_never().is_some());
        pausing.resume();
        assert!(pausing.is_plain() && pausing.pass(Direction::Read).now_or_never().is_some());
        assert!(told.lock().is_empty());
    }

    #[test]
    fn a_stop_waits_for_requests_that_are_being_carried_out() {
        let (pausing, _) = pausing(OnFailure::Report, OnFailure::Stop);
        assert!(pausing.enter().is_none(), "its policy concerns it");
        let write = pausing.pass(Direction::Write).now_or_never().unwrap();
        let flush = pausing.pass_flush().now_or_never().unwrap();
        pausing.stop();
        assert!(pausing.try_pass(Direction::Write).is_none());
        let mut quiet = pin!(pausing.quiet());
        assert!(quiet.as_mut().now_or_never().is_none());
        drop(write);
        assert!(quiet.as_mut().now_or_never().is_none());
        drop(flush);
        assert!(quiet.now_or_never().is_some());
        // One that goes on meanwhile waits for nobody.
        pausing.resume();
        let _write = pausing.pass(Direction::Write).now_or_never().unwrap();
        pausing.stop();
        let mut quiet = pin!(pausing.quiet());
        assert!(quiet.as_mut().now_or_never().is_none());
        pausing.resume();
        assert!(quiet.now_or_never().is_some());
        pausing.stop();
        let mut quiet = pin!(pausing.quiet());
        assert!(quiet.as_mut().now_or_never().is_none());
        pausing.end();
        assert!(quiet.now_or_never().is_some());
    }

    #[test]
    #[should_panic(expected = "a request that leaves a disk has entered it")]
    fn nobody_leaves_who_has_not_entered() {
        let (pausing, _) = pausing(OnFailure::Report, OnFailure::Report);
        drop(Inside { pausing: &pausing, counted: &AtomicUsize::new(0) });
    }
}
