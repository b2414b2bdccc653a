//! `block-commit`: copies the data of layers above a base into the base, and removes them from the chain.

use super::follow::{Follow, From};
use super::job::{Job, JobKind, JobOptions};
use super::run::{Task, begun, run};
use isobath_chain::chain::{Chain, LayerIndex};
use isobath_chain::create::Preallocation;
use isobath_chain::map::Unit;
use isobath_disk::device::ZeroFlags;
use isobath_disk::disk::Disk;
use isobath_disk::live::graph::Shortening;
use isobath_disk::live::{DirtyMap, LiveDisk};
use isobath_image::sabotage::{self, Sabotage};
use isobath_image::{DiskError, Result};
use isobath_storage::{FileId, Host};
use isobath_sync::order::in_order;
use std::cmp::Ordering;
use std::future::Future;
use std::sync::Arc;

/// What to commit.
#[derive(Clone, Debug, Default)]
pub struct CommitOptions {
    /// The highest layer to commit, by its image's file; `None`: the active layer. Its overlay gets the base as backing
    /// file. If it is the active layer, its changes are tracked until the job is completed, and the base then replaces
    /// it.
    pub top: Option<FileId>,
    /// The layer that takes the data; `None`: the base of the chain.
    pub base: Option<FileId>,
    /// How the overlay's header names the base; `None`: by its path.
    pub backing_file: Option<String>,
    /// The chain stays as it is: the base gets a copy of the active layer's data, and nothing more. Nobody may write
    /// to the disk meanwhile. A base larger than the disk keeps its size and what it has there.
    pub keep_chain: bool,
}

struct Commit<H: Host> {
    live: Arc<LiveDisk<H>>,
    options: CommitOptions,
    base: LayerIndex,
    top: LayerIndex,
    follow: Option<Follow<H>>,
}

/// Starts a commit job. The future runs it; the caller spawns it on this thread.
///
/// # Errors
/// If the layers are not of this chain, or not in this order, or the disk is read-only.
pub fn commit<H: Host>(
    live: &Arc<LiveDisk<H>>,
    options: CommitOptions,
    job: JobOptions,
) -> Result<(Arc<Job>, impl Future<Output = ()> + use<H>)> {
    let disk = live.current();
    let top = live.layer_of(options.top)?.unwrap_or(disk.active_index());
    let base = live.layer_of(options.base)?.unwrap_or(LayerIndex::new(0));
    if base >= top {
        return Err(disk.refused("the base is not below the top layer to be committed"));
    }
    if disk.writer.is_none() {
        return Err(DiskError::ReadOnly);
    }
    disk.check_changeable(base)?;
    if let Some(name) = options.backing_file.as_ref().filter(|_| top < disk.active_index()) {
        disk.check_name_given(top.above(), base, name)?;
    }
    let job = Job::new(JobKind::Commit, job);
    let claim = live.claim(Arc::clone(&job) as _)?;
    let task = Commit { live: Arc::clone(live), options, base, top, follow: None };
    Ok((Arc::clone(&job), in_order(run(job, task, claim))))
}

impl<H: Host> Commit<H> {
    /// Whether the base is to take the active layer's place.
    fn follows(&self) -> bool {
        self.top == self.live.current().active_index() && !self.options.keep_chain
    }

    async fn open(&self) -> Result<Follow<H>> {
        let _graph = self.live.hold_graph().await;
        let disk = self.live.current();
        self.live.finish_retiring(&disk).await?;
        let surplus = disk.surplus(self.base.above(), self.top.above());
        let base = Arc::new(self.live.open_lower(self.base).await?);
        let from = async {
            if self.follows() {
                let dirty = Arc::new(DirtyMap::new(disk.size(), 16));
                return Ok(From::Live(Arc::clone(&self.live), dirty));
            }
            // All of the top layer, including parts that the layers above it in this chain hide: other chains may show
            // them.
            let top = disk.layer(self.top)?;
            let below = disk.chain.layers().take(self.top.get() as usize);
            let mut layers: Vec<_> = below.map(|(_, layer)| Arc::clone(layer)).collect();
            layers.push(if sabotage::is(Sabotage::HiddenLeftOut) {
                Arc::clone(top)
            } else {
                Arc::new(top.in_other_chain())
            });
            let chain = Chain::stacked(layers);
            let index = disk.chain.index().filter(|index| index.covers() <= chain.depth());
            chain.set_index(index);
            let options = (*self.live.options()).clone().writable(false);
            let disk = Disk::of_chain(Arc::clone(&disk.host), chain, &options).await?;
            Ok::<_, DiskError>(From::Still(Box::new(disk)))
        };
        let from = async {
            let from = from.await?;
            let size = match &from {
                From::Live(live, _) => live.size(),
                From::Still(disk) => disk.size(),
            };
            match base.size().cmp(&size) {
                Ordering::Less => base.resize(size, base.preallocation_of_zeroes(), false).await?,
                // A job that is cancelled leaves what the base has past the end of those above.
                Ordering::Equal | Ordering::Greater => {}
            }
            Ok(from)
        };
        match from.await {
            Ok(from) => Ok(Follow::new(from, base, surplus)),
            Err(error) => {
                let layer = self.live.close_lower(self.base, &base).await?;
                self.live.renew(self.base, layer).await?;
                Err(error)
            }
        }
    }

    /// Makes the base the backing file of the overlay of the committed layers.
    async fn rebase(&mut self, follow: Follow<H>) -> Result<()> {
        let disk = self.live.current();
        let overlay = self.top.above();
        let base = disk.layer(self.base)?;
        let name = match self.options.backing_file.clone() {
            Some(name) => name,
            None => disk.name_below(self.base.above(), overlay)?,
        };
        let format = base.format();
        let done = async {
            let (to, size) = (&follow.to, follow.size());
            if to.size() > size {
                // What the base has past the end of those above would come to light.
                let flags = ZeroFlags { may_unmap: false, only_fast: false };
                to.write_zeroes(size, to.size() - size, flags).await?;
            }
            to.flush().await?;
            self.live.close_lower(self.base, to).await
        };
        let layer = match done.await {
            Ok(layer) => layer,
            Err(error) => {
                self.follow = Some(follow);
                return Err(error);
            }
        };
        let removed = self.base.get() + 1..self.top.get() + 1;
        if let Err(error) = self.live.set_backing(overlay, Some((&name, format))).await {
            self.live.renew(self.base, layer).await?;
            return Err(error);
        }
        let (map, bits) = (&follow.to.map, disk.map.unit_bits());
        let unit = |guest, _: Unit| map.cached(guest, bits).filter(|unit| unit.is_plain());
        let change = Shortening { removed, changed: Some((self.base, layer)), alone: false };
        self.live.shorten(change, unit).await
    }
}

impl<H: Host> Task for Commit<H> {
    async fn work(&mut self, job: &Job) -> Result<bool> {
        let follow = self.follow.insert(self.open().await?);
        follow.track();
        follow.work(job, &self.live).await
    }

    async fn finish(&mut self, job: &Job) -> Result<()> {
        if job.wants_to_leave() {
            return self.abandon().await;
        }
        let live = Arc::clone(&self.live);
        let _graph = live.hold_graph().await;
        let follow = begun(self.follow.take());
        if self.options.keep_chain {
            follow.to.flush().await?;
            self.follow = Some(follow);
            return self.leave().await;
        }
        if let From::Still(_) = follow.from {
            return self.rebase(follow).await;
        }
        let given = live.options().backing_files.clone();
        let done = async {
            if follow.to.size() > live.size() {
                // What the base has past the end of the disk that it becomes.
                follow.to.resize(live.size(), Preallocation::Off, true).await?;
            }
            follow.pivot(&live, given).await
        };
        let done = done.await;
        if done.is_err() {
            self.follow = Some(follow);
        }
        done
    }

    async fn abandon(&mut self) -> Result<()> {
        let live = Arc::clone(&self.live);
        let _graph = live.hold_graph().await;
        self.leave().await
    }
}

impl<H: Host> Commit<H> {
    /// Closes the base, which stays where it is in the chain. The caller holds the graph.
    async fn leave(&mut self) -> Result<()> {
        let live = &self.live;
        let Some(follow) = self.follow.take() else { return Ok(()) };
        follow.untrack();
        let layer = live.close_lower(self.base, &follow.to).await?;
        live.renew(self.base, layer).await
    }
}
