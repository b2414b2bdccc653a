//! Copying a disk to another one while it changes, until the other can replace it.

use super::job::{Job, JobEvent, JobStatus};
use super::run::{Driver, Pieces, look_again};
use super::scan::Scan;
use isobath_chain::map::{Extent, Source, guest_range};
use isobath_disk::copy::is_zero;
use isobath_disk::device::ZeroFlags;
use isobath_disk::disk::Disk;
use isobath_disk::live::{DirtyMap, LiveDisk};
use isobath_disk::write::{Need, Pulled, Surplus};
use isobath_image::Result;
use isobath_image::options::Below;
use isobath_image::range_lock::RangeLocks;
use isobath_image::sabotage::{self, Sabotage};
use isobath_storage::{Host, IoBuf};
use isobath_sync::order::beneath;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes written between two flushes of the target.
const FLUSH_EVERY: u64 = 256 << 20;
/// When less than this is left, in bytes, the rest is copied while requests wait.
const LITTLE: u64 = 1 << 20;
/// The number of passes over changes that a guest may make faster than they can be copied.
const LOOKS: usize = 20;
/// Bytes of changed parts copied at once.
const CHANGED_PIECE: u64 = 1 << 20;

/// Where the data comes from.
pub(super) enum From<H: Host> {
    /// A disk in use, with its tracked changes.
    Live(Arc<LiveDisk<H>>, Arc<DirtyMap>),
    /// Layers that are not written to.
    Still(Box<Disk<H>>),
}

/// A copy in progress.
pub(super) struct Follow<H: Host> {
    pub(super) from: From<H>,
    pub(super) to: Arc<Disk<H>>,
    /// The data that the first pass copies.
    pub(super) surplus: Surplus,
    scan: Scan,
    since_flush: AtomicU64,
    /// Locks the pieces in flight: a piece may have changed again, and what was read last must be written last.
    ranges: RangeLocks,
}

/// The parts changed since the first pass, as far as they are marked now.
struct Changed<'a, H: Host> {
    follow: &'a Follow<H>,
    dirty: &'a DirtyMap,
    left: AtomicU64,
}

impl<H: Host> Follow<H> {
    pub(super) fn new(from: From<H>, to: Arc<Disk<H>>, surplus: Surplus) -> Self {
        let (scan, since_flush) = (Scan::default(), AtomicU64::new(0));
        Self { from, to, surplus, scan, since_flush, ranges: RangeLocks::default() }
    }

    /// Bytes of the disk that is copied.
    pub(super) fn size(&self) -> u64 {
        match &self.from {
            From::Live(live, _) => live.size(),
            From::Still(disk) => disk.size(),
        }
    }

    /// The next piece of the first pass from `at` on.
    async fn find(&self, at: u64, most: u64) -> Result<Option<Range<u64>>> {
        let surplus = self.surplus;
        match &self.from {
            From::Live(live, _) => {
                live.inside(|disk| async move { disk.next_surplus(surplus, at, most).await }).await
            }
            From::Still(disk) => disk.next_surplus(surplus, at, most).await,
        }
    }

    /// Skips the first pass.
    pub(super) fn skip(&self) {
        self.scan.pass(None, self.size());
    }

    /// Copies everything and, for a disk in use, its changes until the user completes or ends the job. Returns `false`
    /// if the job was cancelled.
    pub(super) async fn work(&self, job: &Job, live: &LiveDisk<H>) -> Result<bool> {
        let mut driver = Driver::new(job, live);
        driver.plan(self).await?;
        if !driver.drive(self, JobStatus::Running, JobStatus::Paused).await? {
            return Ok(false);
        }
        let From::Live(_, dirty) = &self.from else { return Ok(true) };
        let mut ready = false;
        let (mut looks, mut last_looks) = (0, 0);
        loop {
            let state = if ready { JobStatus::Ready } else { JobStatus::Running };
            let paused = if ready { JobStatus::Standby } else { JobStatus::Paused };
            let ending = job.wants_completion() || job.wants_to_leave();
            if ending {
                driver.hurry();
            }
            let left = AtomicU64::new(dirty.bytes());
            if !driver.drive(&Changed { follow: self, dirty, left }, state, paused).await? {
                return Ok(false);
            }
            let few = dirty.bytes() <= LITTLE;
            if !ready {
                looks += 1;
                if few || looks > LOOKS {
                    self.to.flush().await?;
                    ready = true;
                    job.go_to(JobStatus::Ready);
                    job.tell(JobEvent::Ready);
                }
            } else if ending {
                last_looks += 1;
                if few || last_looks > LOOKS {
                    self.to.flush().await?;
                    return Ok(true);
                }
            } else {
                look_again(live, job).await;
            }
        }
    }

    /// Tracks the changes of a disk in use from now on.
    pub(super) fn track(&self) {
        if let From::Live(live, dirty) = &self.from {
            live.track(dirty);
        }
    }

    /// Ends [`track`](Self::track).
    pub(super) fn untrack(&self) {
        if let From::Live(live, dirty) = &self.from {
            live.untrack(dirty);
        }
    }

    /// Replaces the disk in use with the target, which was opened with `given` below it. The caller holds the graph.
    pub(super) async fn pivot(&self, live: &LiveDisk<H>, given: Vec<Below>) -> Result<()> {
        let target = Arc::clone(&self.to);
        let old = live.go_on_in(target, given, async |disk| self.finish(&disk).await).await;
        self.untrack();
        // The former chain is no longer the disk's: a failure to close it is not a failure of the job.
        if let Err(error) = old?.close().await {
            tracing::warn!(%error, "cannot close the former active image");
        }
        Ok(())
    }

    /// Leaves the target as the disk is now. The caller holds the graph.
    pub(super) async fn leave_copy(&self, live: &LiveDisk<H>) -> Result<()> {
        let done = live.while_quiet(async |disk| self.finish(&disk).await).await;
        self.untrack();
        done
    }

    /// Copies the last changes. No others happen meanwhile.
    async fn finish(&self, disk: &Disk<H>) -> Result<()> {
        if let From::Live(_, dirty) = &self.from
            && !sabotage::is(Sabotage::UncopiedRest)
        {
            while let Some(range) = dirty.take(CHANGED_PIECE) {
                self.copy_from(disk, range, true).await?;
            }
        }
        self.to.flush().await
    }

    /// With `whole`, ranges that read as zeroes are copied too.
    async fn copy_from(&self, disk: &Disk<H>, range: Range<u64>, whole: bool) -> Result<Pulled> {
        let mut pulled = Pulled::default();
        let end = range.end.min(disk.size()).min(self.to.size());
        if range.start >= end {
            return Ok(pulled);
        }
        let _pass = disk.readers.epoch.enter();
        let extents = disk.extents(range.start..end).await?;
        let need = |extent: &Extent| match extent.source {
            Source::Absent | Source::Zero(_) if whole => Need::Zeroes,
            _ => self.surplus.need(extent),
        };
        let mut rest = &extents[..];
        while let Some(first) = rest.first() {
            let wanted = need(first);
            let count = rest.iter().take_while(|extent| need(extent) == wanted).count().max(1);
            let (run, later) = rest.split_at(count);
            rest = later;
            match wanted {
                Need::Nothing => {}
                Need::Zeroes => self.zero(&guest_range(run)).await?,
                Need::Data => self.data(disk, run, &mut pulled).await?,
            }
        }
        Ok(pulled)
    }

    async fn zero(&self, range: &Range<u64>) -> Result<()> {
        // Space of zeroes is freed, as in QEMU.
        let flags = ZeroFlags { may_unmap: true, only_fast: false };
        beneath(self.to.write_zeroes(range.start, range.end - range.start, flags)).await
    }

    async fn data(&self, disk: &Disk<H>, run: &[Extent], pulled: &mut Pulled) -> Result<()> {
        let mut copied = 0;
        for (n, extent) in run.iter().enumerate() {
            if let Source::Data { layer, host, .. } = extent.source
                && let Some(source) = disk.shareable(layer, &(host..host + extent.length))
                && beneath(self.to.clone_in(extent.guest, extent.length, source, host)).await?
            {
                self.bytes(disk, &run[copied..n], pulled).await?;
                copied = n + 1;
                pulled.cloned += extent.length;
            }
        }
        self.bytes(disk, &run[copied..], pulled).await
    }

    async fn bytes(&self, disk: &Disk<H>, run: &[Extent], pulled: &mut Pulled) -> Result<()> {
        let range = guest_range(run);
        if range.is_empty() {
            return Ok(());
        }
        let length = range.end - range.start;
        let buf = disk.read_extents(run, IoBuf::zeroed(length as usize)).await?;
        if is_zero(&buf) {
            return self.zero(&range).await;
        }
        beneath(self.to.write(range.start, buf)).await?;
        pulled.copied += length;
        Ok(())
    }

    async fn copy_piece(&self, range: Range<u64>, whole: bool) -> Result<Pulled> {
        let _range = self.ranges.lock(range.clone()).await;
        let pulled = match &self.from {
            From::Live(live, _) => {
                live.inside(|disk| async move { self.copy_from(&disk, range, whole).await }).await?
            }
            From::Still(disk) => self.copy_from(disk, range, whole).await?,
        };
        let moved = pulled.copied + pulled.cloned;
        if self.since_flush.fetch_add(moved, Ordering::Relaxed) + moved >= FLUSH_EVERY {
            self.since_flush.store(0, Ordering::Relaxed);
            self.to.flush().await?;
        }
        Ok(pulled)
    }
}

impl<H: Host> Pieces for Follow<H> {
    async fn next(&self, most: u64) -> Result<Option<Range<u64>>> {
        let found = self.find(self.scan.cursor(), most).await?;
        self.scan.pass(found.as_ref(), self.size());
        Ok(found)
    }

    async fn copy(&self, range: Range<u64>) -> Result<Pulled> {
        self.copy_piece(range, false).await
    }

    fn progress(&self) -> (u64, u64) {
        let dirty = match &self.from {
            From::Live(_, dirty) => dirty.bytes(),
            From::Still(_) => 0,
        };
        let (current, total) = self.scan.progress(self.size());
        (current, total + dirty)
    }

    fn remaining(&self) -> u64 {
        self.scan.remaining(self.size())
    }

    async fn count(&self) -> Result<()> {
        self.scan.count_all(|at| self.find(at, u64::MAX >> 1)).await
    }
}

impl<H: Host> Pieces for Changed<'_, H> {
    async fn next(&self, most: u64) -> Result<Option<Range<u64>>> {
        let left = self.left.load(Ordering::Relaxed);
        if left == 0 {
            return Ok(None);
        }
        let taken = self.dirty.take(most.min(CHANGED_PIECE));
        let length = taken.as_ref().map_or(left, |range| range.end - range.start);
        self.left.store(left.saturating_sub(length), Ordering::Relaxed);
        Ok(taken)
    }

    async fn copy(&self, range: Range<u64>) -> Result<Pulled> {
        let copied = self.follow.copy_piece(range.clone(), true).await;
        if copied.is_err() {
            self.dirty.mark(range.start, range.end - range.start);
        }
        copied
    }

    fn progress(&self) -> (u64, u64) {
        self.follow.progress()
    }

    fn remaining(&self) -> u64 {
        self.dirty.bytes()
    }

    async fn count(&self) -> Result<()> {
        Ok(())
    }
}
