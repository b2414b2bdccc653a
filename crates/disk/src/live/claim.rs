//! One job at a time on a disk, as in QEMU.

use crate::disk::Disk;
use isobath_image::{Result, violated};
use isobath_storage::Host;
use parking_lot::Mutex;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

/// The exclusive user of a disk: a block job.
pub trait Occupant: Send + Sync {
    /// Its kind and name, for errors.
    fn describe(&self) -> String;

    /// Its future was dropped before it had ended.
    fn give_up(&self);

    /// Cancels it, and waits for its end.
    fn end(&self) -> Pin<Box<dyn Future<Output = ()> + '_>>;
}

/// The job that uses a disk.
#[derive(Clone, Default)]
pub(super) struct Claims(Arc<Mutex<Use>>);

#[derive(Default)]
enum Use {
    #[default]
    Free,
    Job(Arc<dyn Occupant>),
    /// A job whose future was dropped before it had ended: a layer below may be half changed, and its place in the
    /// chain may have become another's.
    GivenUp(Arc<dyn Occupant>),
    /// A job that failed because a flush failed. Data it wrote to a layer may be lost although it still reads
    /// correctly, so nothing may rely on it.
    Doubtful(Arc<dyn Occupant>),
}

/// A job's use of a disk.
pub struct Claim {
    claims: Claims,
    job: Arc<dyn Occupant>,
    began: bool,
    doubtful: bool,
}

impl Claim {
    /// The job begins. From here on it must [end](Self::end).
    pub fn begin(&mut self) {
        self.began = true;
    }

    /// The job has finished with the disk. `doubtful` says that a flush has failed.
    pub fn end(mut self, doubtful: bool) {
        if !self.began {
            violated("a job that ends has begun");
        }
        (self.began, self.doubtful) = (false, doubtful);
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let job = Arc::clone(&self.job);
        let mut claimed = self.claims.0.lock();
        if !claimed.is_of(&job) {
            violated("a job gives up the disk that it has claimed");
        }
        *claimed = match (self.began, self.doubtful) {
            (true, _) => Use::GivenUp(job),
            (false, true) => Use::Doubtful(job),
            (false, false) => Use::Free,
        };
        drop(claimed);
        if self.began {
            self.job.give_up();
        }
    }
}

impl Claims {
    /// Takes the disk for a job.
    pub(super) fn claim<H: Host>(&self, disk: &Disk<H>, job: Arc<dyn Occupant>) -> Result<Claim> {
        let mut claimed = self.0.lock();
        claimed.check(disk)?;
        claimed.check_layers(disk)?;
        *claimed = Use::Job(Arc::clone(&job));
        Ok(Claim { claims: self.clone(), job, began: false, doubtful: false })
    }

    /// Refuses operations that exclude a job.
    pub(super) fn check<H: Host>(&self, disk: &Disk<H>) -> Result<()> {
        self.0.lock().check(disk)
    }

    /// Cancels the job, if there is one, and waits for its end.
    pub(super) async fn end(&self) {
        let job = match &*self.0.lock() {
            Use::Job(job) => Arc::clone(job),
            Use::Free | Use::GivenUp(_) | Use::Doubtful(_) => return,
        };
        job.end().await;
    }
}

impl Use {
    fn is_of(&self, job: &Arc<dyn Occupant>) -> bool {
        matches!(self, Self::Job(user) if Arc::ptr_eq(user, job))
    }

    fn check<H: Host>(&self, disk: &Disk<H>) -> Result<()> {
        let refused = |job: &Arc<dyn Occupant>, what: &str| {
            let reason = format!("block device is in use by block job: {}; {what}", job.describe());
            Err(disk.refused(reason))
        };
        match self {
            // Only another job would rely on the doubtful data.
            Self::Free | Self::Doubtful(_) => Ok(()),
            Self::Job(job) => refused(job, "wait for it or cancel it"),
            Self::GivenUp(job) => {
                refused(job, "the job was abandoned half done; close the disk and reopen it")
            }
        }
    }

    /// Refuses a job if data that another job wrote to a layer may be lost.
    fn check_layers<H: Host>(&self, disk: &Disk<H>) -> Result<()> {
        let Self::Doubtful(job) = self else { return Ok(()) };
        let reason = format!(
            "a flush of block job {} failed, and data it wrote to a layer may be lost; fix the \
             storage, then close the disk and reopen it",
            job.describe()
        );
        Err(disk.refused(reason))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{disk, live, must_panic};

    struct Idle;

    impl Occupant for Idle {
        fn describe(&self) -> String {
            "idle".into()
        }

        fn give_up(&self) {}

        fn end(&self) -> Pin<Box<dyn Future<Output = ()> + '_>> {
            Box::pin(async {})
        }
    }

    #[test]
    fn a_job_ends_after_it_has_begun_and_has_the_disk() {
        let live = live(disk());
        let claim = || live.claim(Arc::new(Idle)).unwrap();
        let mut good = claim();
        good.begin();
        good.end(false);
        must_panic(|| claim().end(false), "a job that ends has begun");
        let other = claim();
        *live.claims.0.lock() = Use::Job(Arc::new(Idle));
        must_panic(|| drop(other), "a job gives up the disk that it has claimed");
        *live.claims.0.lock() = Use::Free;
        drop(claim());
    }
}
