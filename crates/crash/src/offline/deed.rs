//! The commands: how each runs, and what it must have done.

use super::truth::{Marked, Truth, read_disk};
use crate::clock::SimClock;
use crate::host::SimHost;
use crate::image::IMAGE;
use crate::record::Files;
use crate::recover::header_of;
use isobath_disk::{
    Amend, BitmapAction, BitmapBits, BitmapEditor, Disk, DiskError, LiveDisk, OpenOptions, Rebase,
    amend, apply_snapshot, create_snapshot, delete_snapshot,
};
use isobath_jobs::pace::Pacing;
use isobath_jobs::{CommitOptions, Job, JobOptions, StreamOptions};
use isobath_storage::{FileId, StorageExt};
use isobath_storage_test::any::AnyHost;
use rand::RngExt;
use rand::rngs::SmallRng;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// A command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Deed {
    Take(String),
    Apply(String),
    Delete(String),
    /// On another image, or on none; what is copied may be compressed.
    Rebase(Option<String>, bool),
    /// A bitmap with these bits is added.
    AddBitmap(String, BitmapBits),
    RemoveBitmap(String),
    ClearBitmap(String),
    Amend(Amend),
    /// Into this layer; without one into the backing file, and the image is emptied.
    Commit(Option<String>),
    /// What is above this layer comes into the image; without one, all of the chain.
    Merge(Option<String>),
}

impl Deed {
    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::Take(_) => "snapshot -c",
            Self::Apply(_) => "snapshot -a",
            Self::Delete(_) => "snapshot -d",
            Self::Rebase(..) => "rebase",
            Self::AddBitmap(..) => "bitmap --add --merge",
            Self::RemoveBitmap(_) => "bitmap --remove",
            Self::ClearBitmap(_) => "bitmap --clear --disable",
            Self::Amend(_) => "amend",
            Self::Commit(None) => "commit",
            Self::Commit(Some(_)) => "commit -b",
            Self::Merge(None) => "chain flatten",
            Self::Merge(Some(_)) => "chain merge",
        }
    }

    pub(super) async fn run(&self, host: &SimHost) -> Result<(), String> {
        match self {
            Self::Commit(base) => commit(host, base.as_deref()).await,
            Self::Merge(base) => merge(host, base.as_deref()).await,
            _ => self.change(host).await.map_err(|error| error.to_string()),
        }
    }

    async fn change(&self, host: &SimHost) -> Result<(), DiskError> {
        let (image, options) = (Path::new(IMAGE), OpenOptions::new());
        match self {
            // They are jobs.
            Self::Commit(_) | Self::Merge(_) => Ok(()),
            Self::Take(name) => {
                create_snapshot(&host.any(), image, &options, name, Duration::from_secs(1)).await
            }
            Self::Apply(name) => apply_snapshot(&host.any(), image, &options, name).await,
            Self::Delete(name) => delete_snapshot(&host.any(), image, &options, name).await,
            Self::AddBitmap(name, bits) => {
                let add = BitmapAction::Add(Some(bits.granularity()));
                let actions = [add, BitmapAction::MergeFrom(bits.clone())];
                edit_bitmap(host, name, &actions).await
            }
            Self::RemoveBitmap(name) => edit_bitmap(host, name, &[BitmapAction::Remove]).await,
            Self::ClearBitmap(name) => {
                edit_bitmap(host, name, &[BitmapAction::Clear, BitmapAction::Disable]).await
            }
            Self::Amend(wanted) => {
                if wanted.version == Some(2) {
                    let writable = options.clone().writable(true);
                    let disk = Disk::open(host.any(), image, &writable).await?;
                    disk.expand_zeroes().await?;
                    disk.close().await?;
                }
                amend(&host.any(), image, &options, wanted).await
            }
            Self::Rebase(onto, compressed) => {
                let disk = Disk::open(host.any(), image, &options.writable(true)).await?;
                let disk = Arc::new(disk);
                let below = match onto {
                    None => None,
                    Some(name) => {
                        let options = OpenOptions::new();
                        Some(Arc::new(Disk::open(host.any(), Path::new(name), &options).await?))
                    }
                };
                let rebase = Rebase::new(Arc::clone(&disk), below, *compressed);
                let (one, other) = futures_util::join!(rebase.work(), rebase.work());
                one.and(other)?;
                let format = |name: &str| if name == "base.raw" { "raw" } else { "qcow2" };
                rebase.finish(onto.as_deref().map(|name| (name, format(name)))).await?;
                disk.close().await
            }
        }
    }

    /// Whether it writes to the disk, which bitmaps that track writes do not survive.
    pub(super) const fn writes(&self) -> bool {
        let expands = matches!(self, Self::Amend(Amend { version: Some(2), .. }));
        expands || self.moves_data() || matches!(self, Self::Rebase(..))
    }

    /// What there is afterwards.
    pub(super) fn after(&self, before: &Truth) -> Truth {
        let mut after = before.clone();
        match self {
            Self::Take(name) => after.snapshots.push((name.clone(), Arc::clone(&before.disk))),
            Self::Apply(name) => {
                after.disk = before.snapshot(name).map_or_else(Arc::default, Arc::clone);
            }
            Self::Delete(name) => after.snapshots.retain(|(other, _)| other != name),
            Self::AddBitmap(name, bits) => {
                let ranges = Some(bits.ranges().collect());
                after.bitmaps.push(Marked { name: name.clone(), ranges, enabled: true });
            }
            Self::RemoveBitmap(name) => after.bitmaps.retain(|bitmap| bitmap.name != *name),
            Self::ClearBitmap(name) => {
                for bitmap in after.bitmaps.iter_mut().filter(|bitmap| bitmap.name == *name) {
                    bitmap.ranges = Some(Vec::new());
                    bitmap.enabled = false;
                }
            }
            // Version 2 has no bitmaps.
            Self::Amend(Amend { version: Some(2), .. }) => after.bitmaps.clear(),
            Self::Rebase(..) | Self::Amend(_) | Self::Commit(_) | Self::Merge(_) => {}
        }
        after
    }

    /// Whether it changes internal snapshots.
    pub(super) const fn is_of_snapshots(&self) -> bool {
        matches!(self, Self::Take(_) | Self::Apply(_) | Self::Delete(_))
    }

    /// Whether it moves data between layers.
    pub(super) const fn moves_data(&self) -> bool {
        matches!(self, Self::Commit(_) | Self::Merge(_))
    }

    /// The other files that it may change: only a commit's base.
    pub(super) fn writes_to(&self, files: &Files) -> Option<PathBuf> {
        match self {
            Self::Commit(None) => chain_of(files).get(1).cloned(),
            Self::Commit(Some(base)) => Some(base.into()),
            _ => None,
        }
    }

    /// Verifies what it has done besides: what `disk` reads as is in the base, and the image is empty; or the chain is
    /// shorter.
    pub(super) async fn effect(&self, files: &Files, disk: &[u8]) -> Result<(), String> {
        let chain = chain_of(files);
        match self {
            Self::Commit(base) => {
                let Some(into) = self.writes_to(files) else {
                    return Err("the image has no backing file any more".into());
                };
                let shown = read_disk(files, &into, &OpenOptions::new()).await?;
                if !shown.holds(0, disk) {
                    return Err(format!("{} does not have the disk's data", into.display()));
                }
                let alone = OpenOptions::new().backing(false);
                let left = read_disk(files, Path::new(IMAGE), &alone).await?;
                if base.is_none() && left.data().next().is_some() {
                    return Err("the image is not empty".into());
                }
                Ok(())
            }
            Self::Merge(base)
                if chain.get(1).map(PathBuf::as_path) != base.as_deref().map(Path::new) =>
            {
                Err(format!("the chain is {chain:?}"))
            }
            _ => Ok(()),
        }
    }
}

async fn edit_bitmap(
    host: &SimHost,
    name: &str,
    actions: &[BitmapAction],
) -> Result<(), DiskError> {
    let mut editor = BitmapEditor::open(&host.any(), Path::new(IMAGE), &OpenOptions::new()).await?;
    for action in actions {
        editor.apply(name, action).await?;
    }
    editor.finish().await
}

/// The files of a chain, from the active one down, as the headers name them.
pub(super) fn chain_of(files: &Files) -> Vec<PathBuf> {
    let mut chain = vec![PathBuf::from(IMAGE)];
    while let Some(last) = chain.last() {
        let content = files.iter().find(|(name, _)| name == last).map(|(_, content)| content);
        let header = content.and_then(|content| header_of(content));
        let Some(below) = header.and_then(|header| header.backing_file) else { break };
        chain.push(below.into());
    }
    chain
}

async fn open_live(host: &SimHost) -> Result<Arc<LiveDisk<AnyHost>>, DiskError> {
    let options = OpenOptions::new().writable(true);
    let disk = Disk::open(host.any(), Path::new(IMAGE), &options).await?;
    Ok(LiveDisk::new(disk, &options, Arc::new(SimClock::default())))
}

fn layer(live: &LiveDisk<AnyHost>, name: &str) -> Option<FileId> {
    let layers = live.layers();
    let layer = layers.iter().find(|layer| layer.name() == Path::new(name));
    layer.map(|layer| layer.storage().id())
}

fn job_options() -> JobOptions {
    JobOptions { pacing: Pacing::None, ..JobOptions::new("job") }
}

async fn run_job<F: Future<Output = ()>>(
    started: Result<(Arc<Job>, F), DiskError>,
) -> Result<(), String> {
    match started {
        Ok((job, run)) => {
            run.await;
            job.error().map_or(Ok(()), |error| Err(error.to_string()))
        }
        Err(error) => Err(error.to_string()),
    }
}

/// Runs a job to its end, and closes the disk.
async fn finish<F: Future<Output = ()>>(
    live: &LiveDisk<AnyHost>,
    started: Result<(Arc<Job>, F), DiskError>,
) -> Result<(), String> {
    let done = run_job(started).await;
    let closed = live.close().await.map_err(|error| error.to_string());
    done.and(closed)
}

async fn commit(host: &SimHost, base: Option<&str>) -> Result<(), String> {
    let shown = |error: DiskError| error.to_string();
    let live = open_live(host).await.map_err(shown)?;
    let into = match base {
        Some(name) => layer(&live, name),
        None => live.layers().get(1).map(|layer| layer.storage().id()),
    };
    let options = CommitOptions { base: into, keep_chain: true, ..CommitOptions::default() };
    let mut done = run_job(isobath_jobs::commit(&live, options, job_options())).await;
    if done.is_ok() && base.is_none() {
        done = live.make_empty().await.map_err(shown);
    }
    let closed = live.close().await.map_err(shown);
    done.and(closed)
}

async fn merge(host: &SimHost, base: Option<&str>) -> Result<(), String> {
    let live = open_live(host).await.map_err(|error| error.to_string())?;
    // Done already, before a crash.
    if live.depth() == 1 {
        return live.close().await.map_err(|error| error.to_string());
    }
    let base = base.and_then(|name| layer(&live, name));
    let options = StreamOptions { base, ..StreamOptions::default() };
    finish(&live, isobath_jobs::stream(&live, options, job_options())).await
}

/// A command that is possible.
pub(super) fn choose(truth: &Truth, files: &Files, number: u32, rng: &mut SmallRng) -> Deed {
    let any = |rng: &mut SmallRng| {
        let count = truth.snapshots.len();
        (count > 0).then(|| truth.snapshots[rng.random_range(0..count)].0.clone())
    };
    let names = |names: &[PathBuf]| -> Vec<String> {
        names.iter().map(|name| name.display().to_string()).filter(|name| name != IMAGE).collect()
    };
    let below = names(&chain_of(files));
    let all = names(&files.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>());
    let bitmap = |rng: &mut SmallRng| {
        let count = truth.bitmaps.len();
        (count > 0).then(|| truth.bitmaps[rng.random_range(0..count)].name.clone())
    };
    match (rng.random_range(0..12), bitmap(rng)) {
        (0, Some(name)) => return Deed::RemoveBitmap(name),
        (1, Some(name)) => return Deed::ClearBitmap(name),
        (2..4, _) => {
            let mut bits = BitmapBits::new(truth.disk.len(), 9 + rng.random_range(0..8));
            for _ in 0..rng.random_range(0..4) {
                let start = rng.random_range(0..truth.disk.len());
                bits.set(&(start..truth.disk.len().min(start + rng.random_range(1..100_000))));
            }
            return Deed::AddBitmap(format!("bitmap{number}"), bits);
        }
        (4, _) => {
            let wanted = match rng.random_range(0..3) {
                0 => Amend { version: Some(rng.random_range(2..=3)), ..Amend::default() },
                1 => Amend { refcount_bits: Some(1 << rng.random_range(0..7)), ..Amend::default() },
                _ => Amend { lazy_refcounts: Some(rng.random()), ..Amend::default() },
            };
            return Deed::Amend(wanted);
        }
        _ => {}
    }
    match (rng.random_range(0..16), any(rng)) {
        (0..6, Some(name)) => Deed::Apply(name),
        (6..8, Some(name)) => Deed::Delete(name),
        // A snapshot shows the backing file too, and would show another one.
        (0..4, None) if !below.is_empty() => {
            let base = below[rng.random_range(0..below.len())].clone();
            Deed::Commit(rng.random_bool(0.5).then_some(base))
        }
        (4..7, None) if !below.is_empty() => {
            let at = rng.random_range(1..=below.len());
            Deed::Merge(below.get(at).cloned())
        }
        (7..14, None) if !all.is_empty() => {
            let onto = rng.random_bool(0.7).then(|| all[rng.random_range(0..all.len())].clone());
            Deed::Rebase(onto, rng.random_bool(0.2))
        }
        _ => Deed::Take(format!("snapshot{number}")),
    }
}
