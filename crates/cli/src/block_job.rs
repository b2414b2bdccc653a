//! Runs block jobs of commands, on images that no other program uses.

use crate::failure::Failure;
use crate::workers::{self, Progress};
use isobath_disk::DiskError;
use isobath_jobs::pace::Pacing;
use isobath_jobs::{Job, JobOptions};
use isobath_ring::Signals;
use std::cell::Cell;
use std::future::Future;
use std::sync::Arc;

/// Options for a job without pacing, limited to `speed` bytes per second; 0 means no limit.
pub(crate) fn options(name: &str, speed: u64) -> JobOptions {
    JobOptions { speed, pacing: Pacing::None, ..JobOptions::new(name) }
}

/// Runs a job to its end. A signal cancels it; the chain then reads as before.
///
/// # Errors
/// If the job cannot start, fails, or is cancelled.
pub(crate) async fn run<F: Future<Output = ()>>(
    started: Result<(Arc<Job>, F), DiskError>,
    signals: &mut Signals,
    progress: bool,
) -> Result<(), Failure> {
    let (job, running) = started?;
    let running = Box::pin(running);
    let shown = Progress::show(progress, {
        let job = Arc::clone(&job);
        move || {
            let progress = job.progress();
            (progress.current, progress.total)
        }
    });
    let interrupted = Cell::new(None);
    workers::until_signal(running, signals, |signal| {
        // A job that is ending can no longer be cancelled.
        if job.cancel(true).is_ok() {
            interrupted.set(Some(signal));
        }
    })
    .await;
    let (error, signal) = (job.error(), interrupted.get());
    shown.end(error.is_none() && signal.is_none());
    match (error, signal) {
        (Some(error), _) => Err(Failure::new(error)),
        (None, Some(signal)) => {
            let failure = Failure::new("interrupted; the disk's contents are unchanged");
            Err(failure.with_code(128 + signal as u8))
        }
        (None, None) => Ok(()),
    }
}
