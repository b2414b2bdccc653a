//! `block-stream`: copies the data of layers between a base and an overlay into the overlay, and removes them from the
//! chain.

use super::job::{Job, JobKind, JobOptions, JobStatus};
use super::run::{Driver, Pieces, Task, begun, run};
use super::scan::Scan;
use isobath_chain::chain::LayerIndex;
use isobath_chain::map::{Unit, UnitKind};
use isobath_disk::disk::Disk;
use isobath_disk::live::LiveDisk;
use isobath_disk::live::graph::Shortening;
use isobath_disk::write::{Pulled, Surplus};
use isobath_image::layer::Layer;
use isobath_image::sabotage::{self, Sabotage};
use isobath_image::{DiskError, Result};
use isobath_storage::{FileId, Host};
use isobath_sync::order::in_order;
use std::future::Future;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes copied between two commits, which bounds what a guest's flush may have to write.
const COMMIT_EVERY: u64 = 32 << 20;
/// The same beside a guest that does not flush.
const COMMIT_SELDOM: u64 = 512 << 20;

/// What to stream.
#[derive(Clone, Debug, Default)]
pub struct StreamOptions {
    /// The overlay that receives the data, by its image's file; `None`: the active layer.
    pub top: Option<FileId>,
    /// The layer that stays below it; `None`: none stays.
    pub base: Option<FileId>,
    /// How the overlay's header names the base; `None`: as the header of the layer above it does.
    pub backing_file: Option<String>,
    /// Internal snapshots of the overlay may change: they read through the layers that are removed.
    pub change_snapshots: bool,
}

/// The overlay, while the job runs.
enum Target<H: Host> {
    /// The live disk's active layer.
    Active(Arc<LiveDisk<H>>),
    /// A layer below it, as the top of a disk of its own.
    Lower(Box<Disk<H>>),
}

struct Stream<H: Host> {
    live: Arc<LiveDisk<H>>,
    options: StreamOptions,
    target: Option<Target<H>>,
    surplus: Surplus,
    top: LayerIndex,
    scan: Scan,
    since_commit: AtomicU64,
    /// The guest's flushes at the last commit.
    flushes: AtomicU64,
}

/// Starts a stream job. The future runs it; the caller spawns it on this thread.
///
/// # Errors
/// If the layers are not of this chain, or not in this order; if the overlay has internal snapshots, which must not
/// change.
pub fn stream<H: Host>(
    live: &Arc<LiveDisk<H>>,
    options: StreamOptions,
    job: JobOptions,
) -> Result<(Arc<Job>, impl Future<Output = ()> + use<H>)> {
    let disk = live.current();
    let top = live.layer_of(options.top)?.unwrap_or(disk.active_index());
    let base = live.layer_of(options.base)?;
    if base.is_some_and(|base| base >= top) {
        return Err(disk.refused("the base is not below the layer that takes the data"));
    }
    if disk.chain.get(top).is_none_or(|layer| layer.as_qcow2().is_none()) {
        return Err(disk.refused("only a qcow2 layer can take the data of the layers below it"));
    }
    let writable = disk.writer.is_some();
    if !writable {
        return Err(DiskError::ReadOnly);
    }
    disk.check_changeable(top)?;
    if let (Some(base), Some(name)) = (base, &options.backing_file) {
        disk.check_name_given(top, base, name)?;
    }
    let first = base.map_or(0, |base| base.get() + 1);
    let overlay = disk.layer(top)?;
    let snapshots = overlay.header().map_or(0, |header| header.nb_snapshots);
    let may_change = options.change_snapshots || sabotage::is(Sabotage::ChangedSnapshots);
    if snapshots > 0 && first < top.get() && !may_change {
        return Err(DiskError::Refused {
            image: overlay.name().to_owned(),
            reason: format!(
                "it has internal snapshots ({snapshots}), which read through the layers below it and would change; \
                 delete them first with 'isobath snapshot -d', or let them change (--change-snapshots, in QMP \
                 'change-snapshots': true)"
            ),
        });
    }
    let surplus = disk.surplus(LayerIndex::new(first), top);
    let job = Job::new(JobKind::Stream, job);
    let claim = live.claim(Arc::clone(&job) as _)?;
    let task = Stream {
        live: Arc::clone(live),
        options,
        target: None,
        surplus,
        top,
        scan: Scan::default(),
        since_commit: AtomicU64::new(0),
        flushes: AtomicU64::new(0),
    };
    Ok((Arc::clone(&job), in_order(run(job, task, claim))))
}

impl<H: Host> Stream<H> {
    /// The layer that stays below, if any.
    fn base_layer(&self) -> Option<Arc<Layer<H::File>>> {
        let base = self.surplus.start.get().checked_sub(1)?;
        self.live.current().chain.get(LayerIndex::new(base)).map(Arc::clone)
    }

    /// The overlay's new backing file name and format.
    fn backing(&self) -> Result<Option<(String, isobath_image::layer::ImageFormat)>> {
        let Some(base) = self.base_layer() else { return Ok(None) };
        let name = match self.options.backing_file.clone() {
            Some(name) => name,
            None => self.live.current().name_below(self.surplus.start, self.top)?,
        };
        Ok(Some((name, base.format())))
    }
}

impl<H: Host> Pieces for Stream<H> {
    async fn next(&self, most: u64) -> Result<Option<Range<u64>>> {
        let found = self.find(self.scan.cursor(), most).await?;
        self.scan.pass(found.as_ref(), self.size());
        Ok(found)
    }

    async fn copy(&self, range: Range<u64>) -> Result<Pulled> {
        let target = begun(self.target.as_ref());
        let pulled = match target {
            Target::Active(live) => {
                live.inside(|disk| async move {
                    disk.or_mark_corrupt(disk.pull(self.surplus, range).await).await
                })
                .await?
            }
            Target::Lower(disk) => {
                disk.or_mark_corrupt(disk.pull(self.surplus, range).await).await?
            }
        };
        let moved = pulled.copied + pulled.cloned;
        let flushes = self.live.flushes();
        let quiet = flushes == self.flushes.load(Ordering::Relaxed);
        let due = if quiet { COMMIT_SELDOM } else { COMMIT_EVERY };
        if self.since_commit.fetch_add(moved, Ordering::Relaxed) + moved >= due {
            self.since_commit.store(0, Ordering::Relaxed);
            self.flushes.store(flushes, Ordering::Relaxed);
            match target {
                Target::Active(live) => live.current().flush().await?,
                Target::Lower(disk) => disk.flush().await?,
            }
        }
        Ok(pulled)
    }

    fn progress(&self) -> (u64, u64) {
        self.scan.progress(self.size())
    }

    fn remaining(&self) -> u64 {
        self.scan.remaining(self.size())
    }

    async fn count(&self) -> Result<()> {
        self.scan.count_all(|at| self.find(at, u64::MAX >> 1)).await
    }
}

impl<H: Host> Stream<H> {
    /// The next piece from `at` on.
    async fn find(&self, at: u64, most: u64) -> Result<Option<Range<u64>>> {
        let surplus = self.surplus;
        match begun(self.target.as_ref()) {
            Target::Active(live) => {
                live.inside(|disk| async move { disk.next_surplus(surplus, at, most).await }).await
            }
            Target::Lower(disk) => disk.next_surplus(surplus, at, most).await,
        }
    }

    fn size(&self) -> u64 {
        match &self.target {
            Some(Target::Lower(disk)) => disk.size(),
            _ => self.live.size(),
        }
    }
}

impl<H: Host> Task for Stream<H> {
    async fn work(&mut self, job: &Job) -> Result<bool> {
        let active = {
            let _graph = self.live.hold_graph().await;
            let disk = self.live.current();
            self.top == disk.active_index()
        };
        self.target = Some(if active {
            Target::Active(Arc::clone(&self.live))
        } else {
            Target::Lower(Box::new(self.live.open_lower(self.top).await?))
        });
        let live = Arc::clone(&self.live);
        let mut driver = Driver::new(job, &live);
        driver.plan(&*self).await?;
        driver.drive(&*self, JobStatus::Running, JobStatus::Paused).await
    }

    async fn finish(&mut self, _: &Job) -> Result<()> {
        let live = Arc::clone(&self.live);
        let _graph = live.hold_graph().await;
        let backing = self.backing()?;
        let named = backing.as_ref().map(|(name, format)| (name.as_str(), format.name()));
        let removed = self.surplus.start.get()..self.top.get();
        match begun(self.target.take()) {
            Target::Active(_) => {
                let disk = live.current();
                if !sabotage::is(Sabotage::UnflushedStream) {
                    disk.flush().await?;
                }
                disk.set_backing(named).await?;
                let alone = named.is_none();
                let unit = |_, unit: Unit| {
                    let zero = alone && unit.kind() == UnitKind::Zero;
                    zero.then_some(Unit::ABSENT)
                };
                live.shorten(Shortening { removed, changed: None, alone }, unit).await
            }
            Target::Lower(disk) => {
                let done = async {
                    if !sabotage::is(Sabotage::UnflushedStream) {
                        disk.flush().await?;
                    }
                    disk.set_backing(named).await
                };
                if let Err(error) = done.await {
                    self.target = Some(Target::Lower(disk));
                    return Err(error);
                }
                let layer = live.close_lower(self.top, &disk).await?;
                let start = removed.start;
                let alone = named.is_none();
                let bits = live.current().map.unit_bits();
                let unit = |guest, old: Unit| {
                    let now = disk.map.cached(guest, bits)?;
                    if now.kind() == UnitKind::Absent && !(alone && old.kind() == UnitKind::Zero) {
                        return None;
                    }
                    let plain = now.is_plain();
                    // The unit in the layer that received it, with its new number.
                    (plain && now.layer() == self.top).then(|| now.in_layer(LayerIndex::new(start)))
                };
                let changed = Some((self.top, layer));
                live.shorten(Shortening { removed, changed, alone: false }, unit).await
            }
        }
    }

    async fn abandon(&mut self) -> Result<()> {
        if let Some(Target::Lower(disk)) = self.target.take() {
            let _graph = self.live.hold_graph().await;
            let layer = self.live.close_lower(self.top, &disk).await?;
            self.live.renew(self.top, layer).await?;
        }
        Ok(())
    }
}
