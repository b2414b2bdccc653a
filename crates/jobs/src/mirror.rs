//! `blockdev-mirror`: copies a disk to another disk, which then takes its place.

use super::follow::{Follow, From};
use super::job::{Job, JobKind, JobOptions};
use super::run::{Task, begun, run};
use isobath_chain::chain::LayerIndex;
use isobath_disk::device::ZeroFlags;
use isobath_disk::disk::Disk;
use isobath_disk::live::{Claim, DirtyMap, LiveDisk};
use isobath_disk::write::Surplus;
use isobath_image::options::OpenOptions;
use isobath_image::{DiskError, Result};
use isobath_storage::{Host, StorageExt};
use isobath_sync::order::in_order;
use std::future::Future;
use std::sync::Arc;

/// What a mirror copies (`sync`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MirrorSync {
    /// Everything; the target has no backing file, or one that does not matter.
    #[default]
    Full,
    /// The active layer's data; the target already has the contents of the layers below.
    Top,
    /// Only new writes.
    None,
}

/// How to mirror.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MirrorOptions {
    /// What is copied.
    pub sync: MirrorSync,
}

struct Mirror<H: Host> {
    live: Arc<LiveDisk<H>>,
    target: Arc<LiveDisk<H>>,
    options: MirrorOptions,
    follow: Option<Follow<H>>,
    /// Keeps other jobs and changes of the size from the target.
    _target: Claim,
}

/// Starts a job that mirrors the disk to `target`, which must not be used otherwise. The future runs it; the caller
/// spawns it on this thread. Once completed, this disk uses the target's image.
///
/// # Errors
/// If the target is read-only, of another size, or part of this disk. If one of the two is an overlay above a chain in
/// a store, and not everything is copied, also if the headers of the target lead to other layers than it has; with
/// [`MirrorSync::Top`], if the other is not above the same layers.
pub fn mirror<H: Host>(
    live: &Arc<LiveDisk<H>>,
    target: &Arc<LiveDisk<H>>,
    options: MirrorOptions,
    job: JobOptions,
) -> Result<(Arc<Job>, impl Future<Output = ()> + use<H>)> {
    let (disk, other) = (live.current(), target.current());
    if other.is_read_only() {
        return Err(DiskError::ReadOnly);
    }
    check_fits(&disk, &other, &target.options(), options)?;
    let active = other.chain.active().storage().id();
    if disk.layers().any(|layer| layer.storage().id() == active) {
        return Err(other.refused("it is part of the disk to mirror"));
    }
    let job = Job::new(JobKind::Mirror, job);
    let claim = live.claim(Arc::clone(&job) as _)?;
    let task = Mirror {
        live: Arc::clone(live),
        target: Arc::clone(target),
        options,
        follow: None,
        _target: target.claim(Arc::clone(&job) as _)?,
    };
    Ok((Arc::clone(&job), in_order(run(job, task, claim))))
}

/// Refuses a target, opened with the options `opened`, that is of another size; and if not everything is copied, one
/// that would show another disk than this one, with a chain in a store below either. Checked again when the job starts,
/// since both may have changed by then.
fn check_fits<H: Host>(
    disk: &Disk<H>,
    target: &Disk<H>,
    opened: &OpenOptions,
    options: MirrorOptions,
) -> Result<()> {
    if target.size() == disk.size() {
        return match options.sync {
            MirrorSync::Full => Ok(()),
            MirrorSync::None => disk.check_leads_below(target, opened),
            MirrorSync::Top => {
                disk.check_same_below(target)?;
                disk.check_leads_below(target, opened)
            }
        };
    }
    Err(target.refused(format!(
        "its size is {} bytes, but the size of the disk to mirror is {}",
        target.size(),
        disk.size()
    )))
}

impl<H: Host> Mirror<H> {
    async fn begin(&self) -> Result<Follow<H>> {
        let _graph = self.live.hold_graph().await;
        let (disk, target) = (self.live.current(), self.target.current());
        check_fits(&disk, &target, &self.target.options(), self.options)?;
        let active = disk.active_index();
        let start = match self.options.sync {
            MirrorSync::Full => LayerIndex::new(0),
            MirrorSync::Top | MirrorSync::None => active,
        };
        // Parts that are not copied read as zeroes, unless the target has a backing file.
        let below = if self.options.sync == MirrorSync::Top { u64::MAX } else { 0 };
        let surplus = Surplus { start, end: active.above(), seen: u64::MAX, below };
        if self.options.sync == MirrorSync::Full {
            let size = target.size();
            // Zeroes of its backing file would not stay if it got another one. The file that its header names counts
            // even if it is not open: others will read the target with it.
            let header = target.chain.active().header();
            let over_others =
                target.depth() > 1 || header.is_some_and(|header| header.backing_file.is_some());
            // What is damaged is overwritten.
            let status = target.block_status(0, size, 1).await.unwrap_or_default();
            if over_others || status.first().is_none_or(|run| !run.zero || run.length < size) {
                let flags = ZeroFlags { may_unmap: true, only_fast: false };
                target.write_zeroes(0, size, flags).await?;
            }
        }
        let dirty = Arc::new(DirtyMap::new(disk.size(), 16));
        self.live.track(&dirty);
        let follow = Follow::new(From::Live(Arc::clone(&self.live), dirty), target, surplus);
        if self.options.sync == MirrorSync::None {
            follow.skip();
        }
        Ok(follow)
    }
}

impl<H: Host> Task for Mirror<H> {
    async fn work(&mut self, job: &Job) -> Result<bool> {
        let follow = self.follow.insert(self.begin().await?);
        follow.work(job, &self.live).await
    }

    async fn finish(&mut self, job: &Job) -> Result<()> {
        let live = Arc::clone(&self.live);
        let _graph = live.hold_graph().await;
        let follow = begun(self.follow.take());
        if job.wants_to_leave() {
            return follow.leave_copy(&live).await;
        }
        let given = self.target.options().backing_files.clone();
        follow.pivot(&live, given).await
    }

    async fn abandon(&mut self) -> Result<()> {
        if let Some(follow) = self.follow.take() {
            follow.untrack();
            follow.to.flush().await?;
        }
        Ok(())
    }
}
