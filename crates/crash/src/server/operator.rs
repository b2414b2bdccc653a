//! The operator, who changes the chain: snapshots, jobs and their control, resizes.

use super::chain::{Begin, with_data_file};
use super::chronicle::{Chronicle, Frozen, FrozenContent};
use super::kind::Kind;
use super::schedule::{Patience, endure};
use crate::clock::SimClock;
use crate::history::Guest;
use crate::host::SimHost;
use crate::plan::preallocation;
use crate::record::NEVER;
use isobath_disk::{
    Disk, ImageFormat, LiveDisk, NewDisk, OpenOptions, Overlay, Preallocation, create,
};
use isobath_jobs::pace::Pacing;
use isobath_jobs::{
    CommitOptions, IoStatus, Job, JobOptions, JobStatus, MirrorOptions, MirrorSync, OnError,
    StreamOptions,
};
use isobath_storage::{FileId, StorageExt};
use isobath_storage_test::any::AnyHost;
use rand::RngExt;
use rand::rngs::SmallRng;
use std::cell::{Cell, RefCell};
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Bytes of the largest disk that is filled when it grows.
const MOST_FILLED: u64 = 64 << 20;

/// The number of images that can be created in a history.
pub const NEW_IMAGES: usize = 10;

/// The name of an image that is created in a history.
pub fn new_image(number: usize) -> PathBuf {
    PathBuf::from(format!("new{number}.qcow2"))
}

/// The operator.
pub struct Operator<'a> {
    pub(super) live: &'a Arc<LiveDisk<AnyHost>>,
    pub(super) host: &'a SimHost,
    pub(super) guest: &'a Guest<'a>,
    pub(super) chronicle: &'a RefCell<Chronicle>,
    pub(super) clock: &'a SimClock,
    pub(super) options: &'a OpenOptions,
    pub(super) begin: &'a Begin,
    pub(super) kind: Kind,
    /// Images made so far.
    pub(super) made: Cell<usize>,
    /// Jobs and snapshots may be cancelled.
    pub(super) impatient: bool,
}

/// The operator's next action.
#[derive(Clone, Copy, Debug)]
enum Deed {
    Snapshot,
    Stream,
    Commit,
    Pivot,
    Mirror,
    Resize,
}

impl Operator<'_> {
    /// Performs this many actions, one after another.
    pub async fn work(&self, deeds: u32, rng: &mut SmallRng) -> Result<(), String> {
        for _ in 0..deeds {
            let pause = Duration::from_micros(rng.random_range(0..1500));
            self.clock.sleep(pause).await;
            match self.choose(rng) {
                Deed::Snapshot => self.snapshot(rng).await?,
                Deed::Stream => self.stream(rng).await?,
                Deed::Commit => self.commit(false, rng).await?,
                Deed::Pivot => self.commit(true, rng).await?,
                Deed::Mirror => self.mirror(rng).await?,
                Deed::Resize => self.resize(rng).await?,
            }
        }
        Ok(())
    }

    fn choose(&self, rng: &mut SmallRng) -> Deed {
        let any = [
            Deed::Snapshot,
            Deed::Snapshot,
            Deed::Stream,
            Deed::Stream,
            Deed::Commit,
            Deed::Commit,
            Deed::Pivot,
            Deed::Mirror,
            Deed::Resize,
        ];
        let favourite = match self.kind {
            Kind::Streams => Some(Deed::Stream),
            Kind::Commits | Kind::Reflinks | Kind::Bitmaps => Some(Deed::Commit),
            Kind::Pivots => Some(Deed::Pivot),
            Kind::Mirrors | Kind::Kills => Some(Deed::Mirror),
            Kind::Snapshots => Some(Deed::Snapshot),
            Kind::Sizes => Some(Deed::Resize),
            _ => None,
        };
        let deed = favourite.filter(|_| rng.random_bool(0.6));
        let deed = deed.unwrap_or_else(|| any[rng.random_range(0..any.len())]);
        let depth = self.live.depth();
        let images = self.made.get() < NEW_IMAGES;
        match deed {
            Deed::Snapshot | Deed::Mirror if !images && depth > 1 => Deed::Stream,
            Deed::Stream | Deed::Pivot if depth < 2 => Deed::Snapshot,
            Deed::Commit if depth < 3 => Deed::Snapshot,
            deed => deed,
        }
    }

    fn patience(&self, rng: &mut SmallRng) -> Patience {
        if self.impatient && rng.random_bool(0.25) {
            Patience::Polls(rng.random_range(1..60))
        } else {
            Patience::Endless
        }
    }

    /// Notes the start of an action. Returns its number.
    fn begin_act(&self, text: String) -> usize {
        let now = self.host.tick();
        self.chronicle.borrow_mut().begin(text, now)
    }

    fn end_act(&self, number: usize, how: &str) {
        let now = self.host.tick();
        self.chronicle.borrow_mut().end(number, now, how);
        if self.kind == Kind::Kills {
            // What was completed before a change must survive just after it.
            self.host.keep_killed();
        }
    }

    /// The layers' files, from the active one down.
    fn chain(&self) -> Vec<PathBuf> {
        names(self.live)
    }

    fn layer(&self, at: usize) -> Option<FileId> {
        self.live.layers().get(at).map(|layer| layer.storage().id())
    }

    /// The next image to be made.
    fn next_image(&self) -> PathBuf {
        let number = self.made.get();
        self.made.set(number + 1);
        new_image(number)
    }

    /// Creates an image over `backing`; `None` if a fault prevented that.
    async fn make(
        &self,
        path: &Path,
        backing: Option<(String, &str)>,
        rng: &mut SmallRng,
    ) -> Result<Option<()>, String> {
        let like = &self.begin.start.new;
        let other = self.kind != Kind::Large && rng.random_bool(0.4);
        let mut new = NewDisk::new(self.live.size())
            .cluster_size(if other { 1 << rng.random_range(9..=14) } else { like.cluster_size })
            .extended_l2(like.extended_l2 && !other)
            .open_backing(false)
            .index(rng.random_bool(0.3));
        if let Some((name, format)) = backing {
            new = new.backing_file(name, format);
        }
        if self.kind == Kind::DataFiles && rng.random() {
            new = with_data_file(new, path, rng);
        }
        match endure(Patience::Endless, create(&self.host.any(), path, &new)).await {
            Some(made) => self.guest.judge("making an image", made.map(drop)),
            None => Ok(None),
        }
    }

    async fn snapshot(&self, rng: &mut SmallRng) -> Result<(), String> {
        let former = self.chain();
        let Some(active) = former.first().cloned() else { return Ok(()) };
        let path = self.next_image();
        let overlay = if rng.random_bool(0.6) && !self.begin.fixed {
            Overlay::Create(path.clone())
        } else {
            let format = self.live.layers().first().map_or("raw", |layer| layer.format().name());
            let backing = (active.display().to_string(), format);
            if self.make(&path, Some(backing), rng).await?.is_none() {
                return Ok(());
            }
            Overlay::Existing(path.clone())
        };
        let act = self.begin_act(format!("a snapshot: {overlay:?}"));
        let (began, frozen) = {
            let mut chronicle = self.chronicle.borrow_mut();
            let began = chronicle.acts.get(act).map_or(NEVER, |act| act.began);
            chronicle.frozen.push(Frozen {
                name: active,
                needs: former,
                held: FrozenContent::Moment(began, NEVER),
                until: NEVER,
            });
            (began, chronicle.frozen.len() - 1)
        };
        let taken = endure(self.patience(rng), self.live.snapshot(&overlay)).await;
        let done = if let Some(done) = taken {
            self.guest.judge("a snapshot", done)?
        } else {
            self.guest.excuse();
            None
        };
        self.end_act(act, if done.is_some() { "" } else { ", failed or given up" });
        let mut chronicle = self.chronicle.borrow_mut();
        let ended = chronicle.acts.get(act).map_or(NEVER, |act| act.ended);
        match (done, self.chain().first() == Some(&path)) {
            (Some(()), _) => chronicle.frozen[frozen].held = FrozenContent::Moment(began, ended),
            // It is in use, but the image below was not reported as durable.
            (None, true) => {}
            (None, false) => chronicle.frozen[frozen].until = began,
        }
        Ok(())
    }

    fn job_options(rng: &mut SmallRng) -> JobOptions {
        let mut options = JobOptions::new("job");
        options.pacing = match rng.random_range(0..4) {
            0 => Pacing::default(),
            1 => Pacing::Adaptive {
                deadline: Some(Duration::from_millis(rng.random_range(1..100))),
                max_impact: None,
            },
            _ => Pacing::None,
        };
        options.speed = if rng.random_bool(0.1) { 4 << 20 } else { 0 };
        options.on_error = [OnError::Report, OnError::Ignore, OnError::Stop, OnError::Enospc]
            [rng.random_range(0..4)];
        options.auto_finalize = rng.random_bool(0.9);
        options
    }

    async fn stream(&self, rng: &mut SmallRng) -> Result<(), String> {
        let depth = self.live.depth();
        let top = if rng.random() { 0 } else { rng.random_range(0..depth - 1) };
        let base = rng.random_range(top + 1..=depth);
        let options = StreamOptions {
            top: self.layer(top).filter(|_| top > 0),
            base: self.layer(base),
            backing_file: None,
            ..StreamOptions::default()
        };
        let act = self.begin_act(format!("a stream into layer {top} from above {base} of {depth}"));
        match isobath_jobs::stream(self.live, options, Self::job_options(rng)) {
            Ok((job, run)) => self.run(act, &job, run, rng).await,
            Err(error) => self.refused(act, &error),
        }
    }

    async fn commit(&self, active: bool, rng: &mut SmallRng) -> Result<(), String> {
        let depth = self.live.depth();
        let top = if active { 0 } else { rng.random_range(1..depth - 1) };
        let base = rng.random_range(top + 1..depth);
        let options = CommitOptions {
            top: self.layer(top).filter(|_| top > 0),
            base: self.layer(base),
            backing_file: None,
            ..CommitOptions::default()
        };
        let act = self.begin_act(format!("a commit of layer {top} into {base} of {depth}"));
        let (chain, now) = (self.chain(), self.host.tick());
        if let Some(name) = chain.get(base) {
            self.chronicle.borrow_mut().overwrite(&chain, top, name, now);
        }
        match isobath_jobs::commit(self.live, options, Self::job_options(rng)) {
            Ok((job, run)) => self.run(act, &job, run, rng).await,
            Err(error) => self.refused(act, &error),
        }
    }

    async fn mirror(&self, rng: &mut SmallRng) -> Result<(), String> {
        let path = self.next_image();
        let sync = [MirrorSync::Full, MirrorSync::Full, MirrorSync::Top, MirrorSync::None]
            [rng.random_range(0..4)];
        let below = self.live.layers().get(1).cloned();
        let backing = below
            .filter(|_| sync == MirrorSync::Top)
            .map(|layer| (layer.name().display().to_string(), layer.format().name()));
        let sync =
            if sync == MirrorSync::Top && backing.is_none() { MirrorSync::Full } else { sync };
        if self.make(&path, backing, rng).await?.is_none() {
            return Ok(());
        }
        let restart_log = self.options.restart_log && rng.random();
        let format = Some(ImageFormat::Qcow2);
        let options = self.options.clone().format(format).restart_log(restart_log);
        let opening = Disk::open(self.host.any(), &path, &options);
        let Some(opened) = endure(Patience::Endless, opening).await else { return Ok(()) };
        let Some(target) = self.guest.judge("opening a target", opened)? else { return Ok(()) };
        let target = LiveDisk::new(target, &options, Arc::new(self.clock.clone()));
        let act = self.begin_act(format!("a mirror ({sync:?}) to {}", path.display()));
        match isobath_jobs::mirror(
            self.live,
            &target,
            MirrorOptions { sync },
            Self::job_options(rng),
        ) {
            // Data that is not copied would be lost if the target replaced the disk.
            Ok((job, run)) if sync == MirrorSync::None => {
                self.steer(act, &job, run, true, rng).await
            }
            Ok((job, run)) => self.run(act, &job, run, rng).await,
            Err(error) => self.refused(act, &error),
        }
    }

    async fn resize(&self, rng: &mut SmallRng) -> Result<(), String> {
        let (least, most) = (self.begin.busy, self.begin.start.size());
        let size = rng.random_range(least..=most + most / 2).next_multiple_of(512).max(least);
        let mode = match preallocation(rng) {
            // A raw image has no metadata.
            Preallocation::Metadata => Preallocation::Off,
            // A large disk would fill the simulator's memory.
            Preallocation::Full if most > MOST_FILLED => Preallocation::Falloc,
            other => other,
        };
        let act =
            self.begin_act(format!("a change of size to {size}, preallocation {}", mode.name()));
        let resizing = self.guest.resize(&**self.live, size, mode);
        match endure(self.patience(rng), resizing).await {
            Some(done) => done?,
            None => self.guest.excuse(),
        }
        self.end_act(act, "");
        Ok(())
    }

    fn refused(&self, act: usize, error: &isobath_disk::DiskError) -> Result<(), String> {
        self.end_act(act, ", refused");
        if self.guest.excuses(error) { Ok(()) } else { Err(format!("a job was refused: {error}")) }
    }

    async fn run(
        &self,
        act: usize,
        job: &Job,
        run: impl Future<Output = ()>,
        rng: &mut SmallRng,
    ) -> Result<(), String> {
        let leaves = rng.random_bool(0.15);
        self.steer(act, job, run, leaves, rng).await
    }

    /// Runs a job, and controls it randomly meanwhile. One that `leaves` is cancelled.
    async fn steer(
        &self,
        act: usize,
        job: &Job,
        run: impl Future<Output = ()>,
        leaves: bool,
        rng: &mut SmallRng,
    ) -> Result<(), String> {
        let ended = Cell::new(None);
        let patience = self.patience(rng);
        let running = async {
            let done = endure(patience, run).await.is_some();
            if !done {
                // The interrupted operation makes others fail.
                self.guest.excuse();
            }
            ended.set(Some(done));
        };
        let pauses = rng.random_bool(0.3);
        let patient = rng.random_range(1..30);
        let steering = async {
            let mut looks = 0_u32;
            while ended.get().is_none() {
                self.clock.sleep(Duration::from_micros(rng.random_range(20..800))).await;
                looks += 1;
                // A refused verb comes too late, or too early.
                match job.status() {
                    JobStatus::Ready if leaves => drop(job.cancel(rng.random())),
                    JobStatus::Ready if looks > patient / 4 => drop(job.complete()),
                    JobStatus::Pending => drop(job.finalize()),
                    _ if leaves && looks > patient => drop(job.cancel(rng.random())),
                    _ if job.io_status() != IoStatus::Ok => {
                        let _ = if rng.random_bool(0.8) { job.resume() } else { job.cancel(true) };
                    }
                    _ if pauses && looks % 8 == 3 => drop(job.pause()),
                    _ if pauses && looks % 8 == 6 => drop(job.resume()),
                    _ if looks > 400 => drop(job.cancel(true)),
                    _ => {}
                }
            }
        };
        futures_util::join!(running, steering);
        let (how, error) = (ended.get(), job.error().map(|error| error.to_string()));
        self.end_act(
            act,
            &match (how, &error) {
                (Some(true), None) => format!(", {}", job.status().name()),
                (Some(true), Some(error)) => format!(", failed: {error}"),
                _ => ", given up".into(),
            },
        );
        match error {
            // An image with an inconsistent bitmap cannot be lengthened.
            Some(error) if self.begin.bitmaps && error.contains("is inconsistent") => Ok(()),
            // Nor can anything on a full device.
            Some(error) if self.begin.fixed && error.contains("No space left") => Ok(()),
            Some(error) if !self.guest.excuses(&error) => Err(format!("a job failed: {error}")),
            _ => Ok(()),
        }
    }
}

/// The files of a disk's layers, from the active one down.
pub(super) fn names(live: &LiveDisk<AnyHost>) -> Vec<PathBuf> {
    live.layers().iter().map(|layer| layer.name().to_owned()).collect()
}
