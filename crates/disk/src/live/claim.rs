//! One job at a time on a disk, as QEMU has it.

use super::LiveDisk;
use crate::disk::Disk;
use crate::jobs::{Job, JobStatus};
use crate::{DiskError, Result};
use isobath_storage::Host;
use parking_lot::Mutex;
use std::sync::Arc;

/// The job that a disk is in use by.
#[derive(Default)]
pub(super) struct Claims(Mutex<Option<Arc<Job>>>);

/// A job's use of a disk, until it is dropped.
pub(crate) struct Claim<H: Host>(Arc<LiveDisk<H>>);

impl<H: Host> Drop for Claim<H> {
    fn drop(&mut self) {
        *self.0.claims.0.lock() = None;
    }
}

impl Claims {
    /// Refuses what does not go beside a job.
    pub(super) fn check<H: Host>(&self, disk: &Disk<H>) -> Result<()> {
        match &*self.0.lock() {
            None => Ok(()),
            Some(job) => Err(busy(disk, job)),
        }
    }

    /// Cancels the job, if there is one, and waits for its end.
    pub(super) async fn end(&self) {
        let job = self.0.lock().clone();
        if let Some(job) = job {
            let _ = job.cancel(true);
            let ended = |job: &Job| matches!(job.status(), JobStatus::Concluded | JobStatus::Null);
            job.until(ended).await;
        }
    }
}

fn busy<H: Host>(disk: &Disk<H>, job: &Job) -> DiskError {
    DiskError::Refused {
        image: disk.chain.active().name().to_owned(),
        reason: format!(
            "block device is in use by block job: {} ('{}'); wait for it or cancel it",
            job.kind().name(),
            job.id()
        ),
    }
}

impl<H: Host> LiveDisk<H> {
    /// Takes the disk for a job.
    pub(crate) fn claim(self: &Arc<Self>, job: &Arc<Job>) -> Result<Claim<H>> {
        let mut claimed = self.claims.0.lock();
        if let Some(other) = &*claimed {
            return Err(busy(&self.current(), other));
        }
        *claimed = Some(Arc::clone(job));
        drop(claimed);
        Ok(Claim(Arc::clone(self)))
    }
}
