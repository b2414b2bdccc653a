//! Commits shared by concurrent requests for one.

use crate::sabotage::{self, Sabotage};
use crate::{DiskError, Result, lock_order, violated};
use isobath_sync::AsyncMutex;
use isobath_sync::RwLock;
use isobath_sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::future::Future;

/// Runs commits one after another. Callers that ask while one runs share the next.
///
/// After a failed commit it is unknown what is durable, and a retry could report success for data that the kernel has
/// dropped: from then on every commit and write fails.
pub struct GroupCommit {
    turn: AsyncMutex<()>,
    started: AtomicU64,
    finished: AtomicU64,
    failure: RwLock<Option<Failure>>,
    closed: AtomicBool,
}

impl Default for GroupCommit {
    fn default() -> Self {
        Self {
            turn: AsyncMutex::ranked((), lock_order::COMMIT),
            started: AtomicU64::new(0),
            finished: AtomicU64::new(0),
            failure: RwLock::default(),
            closed: AtomicBool::new(false),
        }
    }
}

impl GroupCommit {
    /// Refuses changes from now on, since the image is in its final state.
    pub fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }

    /// Fails if an earlier commit did, or the image is closed.
    pub fn check(&self) -> Result<()> {
        if self.closed.load(Ordering::SeqCst) {
            return Err(DiskError::Closed);
        }
        match &*self.failure.read() {
            None => Ok(()),
            Some(Failure { reason, flush }) => {
                Err(DiskError::Poisoned { reason: reason.clone(), flush_failed: *flush })
            }
        }
    }

    /// Refuses writes and commits from now on.
    pub fn poison(&self, what: &str, reason: String, flush: bool) {
        tracing::error!(reason, "{what}: the disk accepts no more writes");
        self.failure.write().get_or_insert(Failure { reason, flush });
    }

    /// Runs `work`, which may be partly done if it ends early: by an error, by a panic, or because the caller cancels
    /// it. It is then unknown what is durable.
    async fn whole(&self, what: &str, work: impl Future<Output = Result<()>>) -> Result<()> {
        let unfinished = Unfinished { group: self, what };
        let done = work.await;
        std::mem::forget(unfinished);
        if let Err(error) = &done {
            self.poison(&format!("{what} failed"), error.to_string(), error.is_failed_flush());
        }
        done
    }

    /// Refuses writes and commits from now on, because of `error`, and runs `last` once no commit runs.
    pub async fn end<F: Future<Output = Result<()>>>(
        &self,
        error: &DiskError,
        last: impl FnOnce() -> F,
    ) -> Result<()> {
        self.poison("its tables are inconsistent", error.to_string(), false);
        let _turn = self.turn.lock().await;
        last().await
    }

    /// Returns once a commit that began after this call has succeeded: one that `commit` runs, or another caller's.
    pub async fn run<F: Future<Output = Result<()>>>(
        &self,
        commit: impl FnOnce() -> F,
    ) -> Result<()> {
        let wanted = self.started.load(Ordering::SeqCst) + 1;
        let _turn = self.turn.lock().await;
        self.check()?;
        if self.finished.load(Ordering::SeqCst) >= wanted {
            return Ok(());
        }
        let number = self.started.fetch_add(1, Ordering::SeqCst) + 1;
        let commit = async {
            commit().await?;
            if self.finished.swap(number, Ordering::SeqCst) >= number {
                violated("commits end in the order in which they began");
            }
            Ok(())
        };
        self.whole("a commit", commit).await
    }

    /// Runs `change` while no commit runs. If it fails it is unknown what is durable, as after a
    /// failed commit.
    pub async fn exclusively<F: Future<Output = Result<()>>>(
        &self,
        change: impl FnOnce() -> F,
    ) -> Result<()> {
        let _turn = self.turn.lock().await;
        self.check()?;
        self.whole("a change of the image", change()).await
    }
}

/// Why no more changes are accepted.
struct Failure {
    reason: String,
    /// A flush has failed.
    flush: bool,
}

/// Work in progress; dropped only if it does not finish.
struct Unfinished<'a> {
    group: &'a GroupCommit,
    what: &'a str,
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        if sabotage::is(Sabotage::ForgottenCommit) {
            return;
        }
        let reason = format!("{} was abandoned before it ended", self.what);
        self.group.poison(self.what, reason, false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use futures_util::future::join_all;
    use std::cell::Cell;

    async fn pause() {
        let mut first = true;
        std::future::poll_fn(|context| {
            if std::mem::take(&mut first) {
                context.waker().wake_by_ref();
                return std::task::Poll::Pending;
            }
            std::task::Poll::Ready(())
        })
        .await;
    }

    fn finish<T>(future: impl Future<Output = T>) -> T {
        let mut future = Box::pin(future);
        for _ in 0..1000 {
            if let Some(output) = (&mut future).now_or_never() {
                return output;
            }
        }
        panic!("the future never ended");
    }

    #[test]
    fn waiters_share_the_commit_that_begins_after_them() {
        let group = GroupCommit::default();
        let commits = Cell::new(0);
        let ask = || {
            group.run(|| async {
                commits.set(commits.get() + 1);
                pause().await;
                Ok(())
            })
        };
        let results = finish(join_all((0..10).map(|_| ask())));
        assert!(results.iter().all(Result::is_ok));
        // The first runs alone; the nine that came while it ran share the second.
        assert_eq!(commits.get(), 2);
    }

    #[test]
    fn after_a_commit_that_was_given_up_nothing_succeeds() {
        let group = GroupCommit::default();
        assert!(group.run(pause_and_end).now_or_never().is_none());
        assert!(group.check().is_err());
        assert!(matches!(finish(group.run(pause_and_end)), Err(DiskError::Poisoned { .. })));
        let group = GroupCommit::default();
        assert!(group.exclusively(pause_and_end).now_or_never().is_none());
        assert!(group.check().is_err());
    }

    #[test]
    fn a_wait_for_somebody_elses_commit_may_be_given_up() {
        let group = GroupCommit::default();
        let mut first = Box::pin(group.run(pause_and_end));
        assert!((&mut first).now_or_never().is_none());
        assert!(group.run(pause_and_end).now_or_never().is_none());
        assert!(finish(first).is_ok() && group.check().is_ok());
    }

    async fn pause_and_end() -> Result<()> {
        pause().await;
        Ok(())
    }

    #[test]
    fn after_a_failure_nothing_succeeds() {
        let group = GroupCommit::default();
        assert!(finish(group.run(|| async { Err(DiskError::ReadOnly) })).is_err());
        let mut ran = false;
        let again = finish(group.run(|| async {
            ran = true;
            Ok(())
        }));
        assert!(matches!(again, Err(DiskError::Poisoned { .. })));
        assert!(!ran && group.check().is_err());
    }

    #[test]
    #[should_panic(expected = "commits end in the order in which they began")]
    fn a_commit_that_ends_before_an_earlier_one_is_noticed() {
        let group = GroupCommit::default();
        let _ = finish(group.run(|| async {
            group.finished.store(7, Ordering::SeqCst);
            Ok(())
        }));
    }
}

#[cfg(all(test, loom))]
mod interleavings {
    use super::*;
    use futures_util::FutureExt;
    use isobath_sync::{Cell, explore, wait};
    use std::task::Poll;

    /// Sums of changes, each of which has a bit.
    #[derive(Default)]
    struct Disk {
        group: GroupCommit,
        recorded: AtomicU64,
        durable: AtomicU64,
        /// Accessed by one commit or exclusive change at a time.
        own: Cell<u64>,
    }

    /// Takes the batch, waits for the storage, and makes it durable; change 4 always fails.
    async fn commit(disk: &Disk) -> Result<()> {
        disk.own.set(disk.own.get() + 1);
        let batch = disk.recorded.swap(0, Ordering::SeqCst);
        let mut waited = false;
        std::future::poll_fn(|context| {
            context.waker().wake_by_ref();
            if std::mem::replace(&mut waited, true) { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        if batch & 4 != 0 {
            return Err(DiskError::Closed);
        }
        disk.durable.fetch_add(batch, Ordering::SeqCst);
        disk.own.set(disk.own.get() + 1);
        Ok(())
    }

    fn change(disk: &Disk, bit: u64) {
        disk.recorded.fetch_add(bit, Ordering::SeqCst);
    }

    /// A change and a flush.
    fn flush(disk: &Disk, bit: u64) {
        change(disk, bit);
        check(disk, bit, wait(disk.group.run(|| commit(disk))).is_ok());
    }

    fn check(disk: &Disk, bit: u64, durable: bool) {
        let is = disk.durable.load(Ordering::SeqCst) & bit != 0;
        assert!(is || !durable, "reported as durable, and is not");
    }

    #[test]
    fn what_was_changed_before_a_flush_is_durable_after_it() {
        let tasks: &[fn(&Disk)] = &[|d| flush(d, 1), |d| flush(d, 2)];
        explore("GroupCommit, two flushes", 3, Disk::default, tasks, |disk| {
            assert_eq!(disk.durable.load(Ordering::SeqCst), 3);
        });
    }

    #[test]
    fn three_flushes() {
        let tasks: &[fn(&Disk)] = &[|d| flush(d, 1), |d| flush(d, 2), |d| flush(d, 8)];
        explore("GroupCommit, three flushes", 1, Disk::default, tasks, |disk| {
            assert_eq!(disk.durable.load(Ordering::SeqCst), 11);
        });
    }

    #[test]
    fn a_commit_that_fails_tells_everybody() {
        let tasks: &[fn(&Disk)] = &[|d| flush(d, 1), |d| flush(d, 4)];
        explore("GroupCommit, a flush and one that fails", 3, Disk::default, tasks, |disk| {
            assert!(disk.group.check().is_err());
        });
    }

    #[test]
    fn a_flush_that_is_given_up_takes_no_change_with_it() {
        let tasks: &[fn(&Disk)] = &[
            |d| flush(d, 1),
            |d| {
                change(d, 2);
                let result = d.group.run(|| commit(d)).now_or_never();
                check(d, 2, result.is_some_and(|result| result.is_ok()));
            },
        ];
        explore("GroupCommit, a flush and one given up", 3, Disk::default, tasks, |_| ());
    }

    #[test]
    fn nothing_is_committed_during_an_exclusive_change() {
        let tasks: &[fn(&Disk)] = &[
            |d| flush(d, 1),
            |d| {
                let change = || async {
                    d.own.set(d.own.get() + 1);
                    Ok(())
                };
                assert!(wait(d.group.exclusively(change)).is_ok());
            },
        ];
        explore("GroupCommit, a flush and an exclusive change", 3, Disk::default, tasks, |_| ());
    }
}
