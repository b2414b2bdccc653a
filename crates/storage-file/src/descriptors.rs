//! The process's file descriptors, distributed among open files.
//!
//! A [`Pool`] counts the descriptors of the files opened through it. Files opened for writing keep theirs, and so do
//! the first files opened for reading, up to half the limit. Later ones are [`Shared`](super::shared::Shared): at the
//! limit, a file that was not used recently and is not in use gives up its descriptor.
//!
//! The limit is soft: if no descriptor can be given up it is exceeded, and the system may then report an error. Lock
//! order: the pool's queue, then a shared file's descriptor.

use super::at_once::WriteAtOnce;
use super::beside::Besides;
use super::mapped::Mappings;
use super::pause::pause;
use super::transfer::Target;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Weak};
use std::time::Duration;

/// Waits for an operation to end, a millisecond each, before the limit is passed.
const PATIENCE: usize = 100;

/// The pool of all files of a [`FileHost`](super::FileHost).
static PROCESS: LazyLock<Arc<Pool>> = LazyLock::new(|| Arc::new(Pool::new(process_limit())));

/// The most descriptors that are handed in.
static HANDED_IN: LazyLock<usize> = LazyLock::new(|| handed_in_of(soft_limit()) as usize);

/// The most descriptors that may be handed in and not be in use, for images and sockets.
pub(super) fn most_handed_in() -> usize {
    *HANDED_IN
}

/// The soft limit on open files less a reserve.
fn process_limit() -> usize {
    less_reserve(soft_limit())
}

fn soft_limit() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: there is room for the answer.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } != 0 {
        return 1024;
    }
    limit.rlim_cur
}

fn handed_in_of(soft: u64) -> u64 {
    (soft / 8).min(256)
}

/// Without those that may be handed in, and without a reserve for sockets, rings and the like: an eighth, at least 64.
fn less_reserve(soft: u64) -> usize {
    let left = soft.saturating_sub((soft / 8).max(64)).saturating_sub(handed_in_of(soft));
    usize::try_from(left).unwrap_or(usize::MAX).max(2)
}

/// The result of asking for a descriptor to be given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Given {
    Up,
    /// Every shared descriptor is in use.
    InUse,
    /// None is shared.
    Nothing,
}

/// An open file that can do without its descriptor.
pub(super) trait Lender: Send + Sync {
    /// Gives up the descriptor unless it is in use or was recently used.
    fn give_up(&self) -> GiveUp;
}

/// The result of asking a file to give up its descriptor.
pub(super) enum GiveUp {
    /// It is closed when this is dropped.
    Done(Option<Arc<Target>>),
    InUse,
}

/// A number of descriptors shared by files.
pub(super) struct Pool {
    limit: usize,
    /// Descriptors in use.
    open: AtomicUsize,
    /// Descriptors kept by files opened for reading.
    kept: AtomicUsize,
    /// The shared files that have a descriptor, roughly in the order of their last use.
    queue: Mutex<VecDeque<Weak<dyn Lender>>>,
    /// The files that are read by handles that let writers in.
    besides: Arc<Besides>,
    mappings: Arc<Mappings>,
    writes_at_once: Mutex<WriteAtOnce>,
}

/// A descriptor's place in the pool, until it is dropped.
pub(super) struct Permit(Arc<Pool>);

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The right of a read-only file to keep its descriptor, until this is dropped.
pub(super) struct Keep(Arc<Pool>);

impl Drop for Keep {
    fn drop(&mut self) {
        self.0.kept.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Pool {
    pub(super) fn new(limit: usize) -> Self {
        Self {
            limit,
            open: AtomicUsize::new(0),
            kept: AtomicUsize::new(0),
            queue: Mutex::default(),
            besides: Arc::default(),
            mappings: Arc::default(),
            writes_at_once: Mutex::default(),
        }
    }

    /// Lets files be written to by the threads that want it.
    pub(super) fn write_at_once(&self, files: WriteAtOnce) {
        *self.writes_at_once.lock() = files;
    }

    pub(super) fn writes_at_once(&self) -> WriteAtOnce {
        *self.writes_at_once.lock()
    }

    pub(super) fn besides(&self) -> &Arc<Besides> {
        &self.besides
    }

    pub(super) fn mappings(&self) -> &Arc<Mappings> {
        &self.mappings
    }

    pub(super) fn of_process() -> &'static Arc<Self> {
        &PROCESS
    }

    /// The most descriptors in use at a time.
    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    /// The right to keep a descriptor, if any are left.
    pub(super) fn keep(self: &Arc<Self>) -> Option<Keep> {
        let more = |kept| (kept < self.limit / 2).then_some(kept + 1);
        let counted = self.kept.fetch_update(Ordering::AcqRel, Ordering::Acquire, more);
        counted.is_ok().then(|| Keep(self.clone()))
    }

    fn take(self: &Arc<Self>) -> Option<Permit> {
        let more = |open| (open < self.limit).then_some(open + 1);
        let counted = self.open.fetch_update(Ordering::AcqRel, Ordering::Acquire, more);
        counted.is_ok().then(|| Permit(self.clone()))
    }

    /// A place for one more descriptor; other files give theirs up if necessary.
    pub(super) async fn admit(self: &Arc<Self>) -> Permit {
        let mut waits = 0;
        loop {
            if let Some(permit) = self.take() {
                return permit;
            }
            match self.give_up() {
                Given::Up => {}
                Given::InUse if waits < PATIENCE => {
                    waits += 1;
                    pause(Duration::from_millis(1)).await;
                }
                Given::InUse | Given::Nothing => {
                    self.open.fetch_add(1, Ordering::AcqRel);
                    return Permit(self.clone());
                }
            }
        }
    }

    /// Opens a file; other files give up their descriptors if the system has no more.
    pub(super) async fn open<T>(&self, mut open: impl FnMut() -> io::Result<T>) -> io::Result<T> {
        let mut waits = 0;
        loop {
            let error = match open() {
                Err(error) if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => {
                    error
                }
                result => return result,
            };
            match self.give_up() {
                Given::Up => {}
                Given::InUse if waits < PATIENCE => {
                    waits += 1;
                    pause(Duration::from_millis(1)).await;
                }
                Given::InUse | Given::Nothing => return Err(error),
            }
        }
    }

    /// Registers a shared file that has a descriptor.
    pub(super) fn offer(&self, file: Weak<dyn Lender>) {
        let mut queue = self.queue.lock();
        if queue.len() > self.limit.saturating_mul(2) {
            queue.retain(|file| file.strong_count() > 0);
        }
        queue.push_back(file);
    }

    /// Makes one shared file give up its descriptor.
    fn give_up(&self) -> Given {
        let mut queue = self.queue.lock();
        let mut result = Given::Nothing;
        let mut closed = None;
        // Two rounds: recently used files are skipped once.
        for _ in 0..queue.len() * 2 {
            let Some(file) = queue.pop_front() else { break };
            let Some(shared) = file.upgrade() else { continue };
            match shared.give_up() {
                GiveUp::Done(target) => {
                    closed = Some((target, shared));
                    result = Given::Up;
                    break;
                }
                GiveUp::InUse => {
                    result = Given::InUse;
                    queue.push_back(file);
                }
            }
        }
        drop(queue);
        // No lock is held while the file is closed, or while the last reference to a file is dropped.
        drop(closed);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reserve_is_left_to_others() {
        for (soft, left) in [(20_000, 17_244), (1024, 768), (256, 160), (64, 2), (0, 2)] {
            assert_eq!(less_reserve(soft), left);
        }
        assert!(less_reserve(libc::RLIM_INFINITY) > 1 << 60);
    }

    #[test]
    fn the_limit_is_passed_when_nothing_can_be_given_up() {
        let pool = Arc::new(Pool::new(2));
        isobath_ring::block_on(async {
            let permits = [pool.admit().await, pool.admit().await, pool.admit().await];
            assert!(pool.take().is_none());
            drop(permits);
            assert!(pool.take().is_some());
            let full = || Err::<(), _>(io::Error::from_raw_os_error(libc::ENFILE));
            assert_eq!(pool.open(full).await.unwrap_err().raw_os_error(), Some(libc::ENFILE));
        });
        let kept = pool.keep().unwrap();
        assert!(pool.keep().is_none());
        drop(kept);
        assert!(pool.keep().is_some());
    }
}
