//! Commits shared by those who ask for one at the same time.

use crate::{DiskError, Result};
use async_lock::Mutex;
use parking_lot::RwLock;
use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Runs commits one after another. Whoever asks while one runs shares the next.
///
/// After a failed commit it is unknown what is durable, and asking again could report success for
/// data that the kernel has dropped: from then on every commit and write fails.
#[derive(Default)]
pub(crate) struct GroupCommit {
    turn: Mutex<()>,
    started: AtomicU64,
    finished: AtomicU64,
    failure: RwLock<Option<String>>,
    closed: AtomicBool,
}

impl GroupCommit {
    /// Refuses changes from now on, since the image is in its final state.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
    }

    /// Fails if an earlier commit did, or the image is closed.
    pub(crate) fn check(&self) -> Result<()> {
        if self.closed.load(Ordering::SeqCst) {
            return Err(DiskError::Closed);
        }
        match &*self.failure.read() {
            None => Ok(()),
            Some(reason) => Err(DiskError::Poisoned(reason.clone())),
        }
    }

    /// Refuses writes and commits from now on.
    pub(crate) fn poison(&self, error: &DiskError) {
        self.failure.write().get_or_insert_with(|| error.to_string());
    }

    /// Returns once a commit that began after this call has succeeded: one that `commit` runs, or
    /// somebody else's.
    pub(crate) async fn run<F: Future<Output = Result<()>>>(
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
        match commit().await {
            Ok(()) => {
                self.finished.store(number, Ordering::SeqCst);
                Ok(())
            }
            Err(error) => {
                tracing::error!(%error, "a commit failed: the disk takes no more writes");
                self.poison(&error);
                Err(error)
            }
        }
    }

    /// Runs `change` while no commit runs. If it fails it is unknown what is durable, as after a
    /// failed commit.
    pub(crate) async fn exclusively<F: Future<Output = Result<()>>>(
        &self,
        change: impl FnOnce() -> F,
    ) -> Result<()> {
        let _turn = self.turn.lock().await;
        self.check()?;
        let done = change().await;
        if let Err(error) = &done {
            tracing::error!(%error, "a change of the image failed: the disk takes no more writes");
            self.poison(error);
        }
        done
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
    fn after_a_failure_nothing_succeeds() {
        let group = GroupCommit::default();
        assert!(finish(group.run(|| async { Err(DiskError::ReadOnly) })).is_err());
        let mut ran = false;
        let again = finish(group.run(|| async {
            ran = true;
            Ok(())
        }));
        assert!(matches!(again, Err(DiskError::Poisoned(_))));
        assert!(!ran && group.check().is_err());
    }
}
