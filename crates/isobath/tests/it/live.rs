//! Snapshots, streams, commits and mirrors beside random requests: the guest sees nothing of them,
//! each former active image holds what was there at its moment, and QEMU finds every image that is
//! left in order.

use crate::common::{Ticking, export, make};
use futures_executor::block_on;
use futures_util::future::{Either, join_all, select};
use isobath_disk::{
    Disk, LiveDisk, MetadataMode, NewDisk, OpenOptions, Overlay, ZeroFlags, create,
};
use isobath_jobs::pace::Pacing;
use isobath_jobs::{
    CommitOptions, Job, JobOptions, JobStatus, MirrorOptions, MirrorSync, StreamOptions,
};
use isobath_qcow2::NewImage;
use isobath_storage::memory::MemoryHost;
use isobath_storage::{FileId, IoBuf, Locking, Operation, StorageExt};
use isobath_storage_test::any::{AnyHost, ToAny};
use isobath_storage_test::fault::{Fault, FaultHost, Plan};
use isobath_storage_test::give_way;
use isobath_testkit::{model::Model, qemu, seed::Seed};
use rand::rngs::{SmallRng, StdRng};
use rand::{Rng, RngExt, SeedableRng};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

type TestHost = FaultHost<MemoryHost>;

/// Bursts of requests after which the whole disk is compared, which takes longer than they do.
const COMPARED_EVERY: u32 = 8;
/// Bursts of requests after which a guest that waits for a job rests.
const BUSY: u32 = 4_000;
/// Disks are a number of these long.
const SECTOR: usize = 512;

struct World {
    memory: MemoryHost,
    host: TestHost,
    plan: Plan,
    live: Arc<LiveDisk<AnyHost>>,
    model: Model,
    /// What images held when they became backing files.
    moments: BTreeMap<PathBuf, Vec<u8>>,
    /// Bytes that requests may have changed, while a snapshot is made.
    touched: Option<Vec<bool>>,
    count: u32,
    bursts: u32,
}

fn options(rng: &mut StdRng) -> OpenOptions {
    let modes = MetadataMode::ALL;
    let mut options =
        OpenOptions::new().writable(true).metadata(modes[rng.random_range(0..modes.len())]);
    options.map_cache = rng.random_bool(0.5).then_some(64 << 10);
    options
}

fn random_image(rng: &mut StdRng, size: u64) -> NewImage {
    let mut image = NewImage::new(size);
    image.version = if rng.random_bool(0.1) { 2 } else { 3 };
    image.cluster_bits = rng.random_range(9..=16);
    if image.version == 3 && rng.random_bool(0.3) {
        image.extended_l2 = true;
        image.cluster_bits = rng.random_range(14..=16);
    }
    image
}

/// Fills an image with something, compressed clusters among it: `layout` says where, `rng` with what.
async fn fill(
    host: &TestHost,
    name: &str,
    model: &mut Model,
    layout: &mut StdRng,
    rng: &mut StdRng,
) {
    let options = OpenOptions::new().writable(true);
    let disk = Disk::open(host.any(), Path::new(name), &options).await.unwrap();
    let size = disk.size();
    for _ in 0..layout.random_range(0..12) {
        let (offset, length) = range(layout, size);
        if layout.random_bool(0.2) {
            model.fill(offset, length, 0);
            disk.write_zeroes(offset, length, ZeroFlags::default()).await.unwrap();
            continue;
        }
        let bytes = random_bytes(rng, length);
        model.write(offset, &bytes);
        disk.write(offset, IoBuf::copy_of(&bytes)).await.unwrap();
    }
    let cluster = 1u64 << disk.layers().next().unwrap().header().unwrap().cluster_bits;
    for _ in 0..layout.random_range(0..6) {
        // The same place, of another part of the disk.
        let offset = rng.random_range(0..size) / cluster * cluster;
        let length = cluster.min(size - offset);
        let bytes = vec![rng.random(); length as usize];
        model.write(offset, &bytes);
        disk.write_compressed(offset, IoBuf::copy_of(&bytes)).await.unwrap();
    }
    disk.close().await.unwrap();
}

fn random_bytes(rng: &mut StdRng, length: u64) -> Vec<u8> {
    let mut bytes = vec![0; length as usize];
    match rng.random_range(0..4) {
        0 => {}
        1 => bytes.fill(rng.random()),
        // From a generator that is no slower than the disk.
        _ => SmallRng::seed_from_u64(rng.random()).fill_bytes(&mut bytes),
    }
    bytes
}

fn range(rng: &mut StdRng, size: u64) -> (u64, u64) {
    let most: u64 = if rng.random_bool(0.2) { 1 << 18 } else { 1 << 13 };
    let mut offset = rng.random_range(0..size);
    let mut length = rng.random_range(1..=most);
    if rng.random_bool(0.6) {
        let unit: u64 = 1 << rng.random_range(9..=16);
        offset = offset / unit * unit;
        length = length.next_multiple_of(unit);
    }
    (offset, length.min(size - offset))
}

impl World {
    async fn new(rng: &mut StdRng) -> Self {
        let memory = MemoryHost::new();
        memory.set_clone_alignment(rng.random_bool(0.4).then_some(512));
        let plan = Plan::new();
        plan.delay(rng.random());
        let host = FaultHost::new(memory.clone(), plan.clone());
        let size = rng.random_range(1..4 << 11) * 512;
        let mut model = Model::new(size);
        let mut below: Option<(String, &str)> = None;
        if rng.random_bool(0.3) {
            let mut bytes = vec![0; rng.random_range(1..=size as usize)];
            rng.fill_bytes(&mut bytes);
            memory.insert("base.raw", &bytes);
            model = Model::from_bytes(&bytes);
            below = Some(("base.raw".into(), "raw"));
        }
        let depth = rng.random_range(1..=4);
        let (alike, seed) = (rng.random_bool(0.5), rng.random());
        for layer in 0..depth {
            let top = layer + 1 == depth;
            let shown = if top { size } else { rng.random_range(1..=size / 512) * 512 };
            // As snapshots of one image have it: what lies at an offset of one lies there in others too.
            let mut layout = StdRng::seed_from_u64(if alike { seed } else { rng.random() });
            let mut image = random_image(&mut layout, shown);
            if let Some((file, format)) = &below {
                image.backing_file = Some(file.clone());
                image.backing_format = Some((*format).into());
            }
            model.resize(shown);
            let name = format!("layer{layer}.qcow2");
            println!("{name}: {image:?}");
            make(&memory, &name, &image).await;
            fill(&host, &name, &mut model, &mut layout, rng).await;
            below = Some((name, "qcow2"));
        }
        let (name, _) = below.unwrap();
        let live = Self::open(&host, Path::new(&name), rng).await;
        Self {
            memory,
            host,
            plan,
            live,
            model,
            moments: BTreeMap::new(),
            touched: None,
            count: 0,
            bursts: 0,
        }
    }

    async fn open(host: &TestHost, name: &Path, rng: &mut StdRng) -> Arc<LiveDisk<AnyHost>> {
        let options = options(rng);
        let disk = Disk::open(host.any(), name, &options).await;
        let disk = match disk {
            // An image of version 2 cannot have a journal.
            Err(_) if options.metadata != MetadataMode::Ordered => {
                let options = options.clone().metadata(MetadataMode::Auto);
                let disk = Disk::open(host.any(), name, &options).await.unwrap();
                return LiveDisk::new(disk, &options, Arc::new(Ticking::default()));
            }
            disk => disk.unwrap(),
        };
        LiveDisk::new(disk, &options, Arc::new(Ticking::default()))
    }

    /// Requests that do not overlap, issued together, until the other side is `done`. A guest that is busy for long
    /// rests then: a job that is slower than its writes cannot end before.
    async fn guest(&mut self, rng: &mut StdRng, done: &Cell<bool>) {
        self.burst(rng).await;
        let mut rounds = 0;
        while !done.get() {
            rounds += 1;
            if rounds < BUSY {
                self.burst(rng).await;
            } else {
                give_way(1).await;
            }
            assert!(rounds < 1_000_000, "the other side never ends");
        }
    }

    async fn burst(&mut self, rng: &mut StdRng) {
        let live = &self.live;
        let mut taken: Vec<(u64, u64)> = Vec::new();
        let mut discarded: Vec<(u64, u64)> = Vec::new();
        let mut changes: Vec<Pin<Box<dyn Future<Output = ()> + '_>>> = Vec::new();
        let cluster = 1u64 << 17;
        for _ in 0..rng.random_range(1..6) {
            let (mut offset, mut length) = range(rng, live.size());
            let kind = rng.random_range(0..100);
            if kind >= 92 {
                offset = offset / cluster * cluster;
                length = length.next_multiple_of(cluster).min(live.size() - offset);
            }
            if taken.iter().any(|(o, l)| offset < o + l && *o < offset + length) {
                continue;
            }
            taken.push((offset, length));
            if let Some(touched) = self.touched.as_mut().filter(|_| !(50..92).contains(&kind)) {
                touched[offset as usize..(offset + length) as usize].fill(true);
            }
            match kind {
                0..40 => {
                    let bytes = random_bytes(rng, length);
                    self.model.write(offset, &bytes);
                    changes.push(Box::pin(async move {
                        live.write(offset, IoBuf::copy_of(&bytes)).await.unwrap();
                    }));
                }
                40..50 => {
                    self.model.fill(offset, length, 0);
                    let flags = ZeroFlags { may_unmap: rng.random(), only_fast: false };
                    changes.push(Box::pin(async move {
                        live.write_zeroes(offset, length, flags).await.unwrap();
                    }));
                }
                50..92 => {
                    let expected = self.model.read(offset, length as usize);
                    changes.push(Box::pin(async move {
                        let got = live.read(offset, IoBuf::zeroed(length as usize)).await.unwrap();
                        assert!(*got == expected, "read of {length} bytes at {offset}");
                    }));
                }
                _ => {
                    self.model.discard(offset, length);
                    discarded.push((offset, length));
                    changes.push(Box::pin(async move {
                        live.discard(offset, length).await.unwrap();
                    }));
                }
            }
        }
        if rng.random_bool(0.2) {
            changes.push(Box::pin(async move { live.flush().await.unwrap() }));
        }
        join_all(changes).await;
        // What a discard left is what the disk shows from then on.
        for (offset, length) in discarded {
            let left = live.read(offset, IoBuf::zeroed(length as usize)).await.unwrap();
            self.model.adopt_range(offset, &left).unwrap_or_else(|mismatch| panic!("{mismatch}"));
        }
        self.bursts += 1;
        if self.bursts.is_multiple_of(COMPARED_EVERY) {
            let whole = self.whole().await;
            self.model.check(&whole).unwrap_or_else(|mismatch| panic!("{mismatch}"));
        }
    }

    async fn whole(&self) -> Vec<u8> {
        let size = self.live.size() as usize;
        self.live.read(0, IoBuf::zeroed(size)).await.unwrap().to_vec()
    }

    async fn snapshot(&mut self, rng: &mut StdRng) {
        let former = self.live.layers()[0].name().to_owned();
        self.count += 1;
        let path = PathBuf::from(format!("snapshot{}.qcow2", self.count));
        let overlay = if rng.random_bool(0.5) {
            Overlay::Create(path)
        } else {
            let new = NewDisk::new(self.live.size())
                .cluster_size(1 << rng.random_range(9..=16))
                .backing_file(former.to_str().unwrap(), self.live.layers()[0].format().name())
                .open_backing(false);
            create(&self.host.any(), &path, &new).await.unwrap();
            Overlay::Existing(path)
        };
        let before = self.whole().await;
        self.touched = Some(vec![false; before.len()]);
        let live = Arc::clone(&self.live);
        let done = Cell::new(false);
        let change = async {
            live.snapshot(&overlay).await.unwrap();
            done.set(true);
        };
        futures_util::join!(change, self.guest(rng, &done));
        let touched = self.touched.take().unwrap();
        let held = self.content(&former).await;
        let wrong = |n: &usize| !touched[*n] && held[*n] != before[*n];
        // Most sectors were not touched.
        let sectors = (0..before.len()).step_by(SECTOR).map(|at| at..at + SECTOR);
        let differ = sectors.filter(|sector| held[sector.clone()] != before[sector.clone()]);
        let wrong: Vec<usize> = differ.flatten().filter(wrong).collect();
        if let Some(at) = wrong.first() {
            let count = wrong.len();
            panic!(
                "{}: byte {at} is {:#x} instead of {:#x}, {count} bytes differ; {overlay:?}",
                former.display(),
                held[*at],
                before[*at]
            );
        }
        self.moments.insert(former, held);
    }

    /// What an image of the chain holds with those below it.
    async fn content(&self, image: &Path) -> Vec<u8> {
        let options = OpenOptions::new().locking(Locking::Unlocked);
        let disk = Disk::open(self.memory.any(), image, &options).await.unwrap();
        let size = disk.size() as usize;
        disk.read(0, IoBuf::zeroed(size)).await.unwrap().to_vec()
    }

    fn layer(&self, at: usize) -> FileId {
        self.live.layers()[at].storage().id()
    }

    async fn job(&mut self, rng: &mut StdRng) {
        let depth = self.live.depth();
        let mut job = JobOptions::new("job");
        job.pacing = match rng.random_range(0..3) {
            0 => Pacing::None,
            1 => Pacing::default(),
            _ => Pacing::Threshold { threshold: 1e12, pause_time: Duration::from_millis(1) },
        };
        if rng.random_bool(0.2) {
            job.speed = 1 << 20;
        }
        let kind = rng.random_range(0..3);
        let (job, run): (Arc<Job>, Pin<Box<dyn Future<Output = ()>>>) = if kind == 2 {
            self.count += 1;
            let path = PathBuf::from(format!("mirror{}.qcow2", self.count));
            let mut new = NewDisk::new(self.live.size());
            let below = self.live.layers().get(1).cloned();
            let top = rng.random_bool(0.5) && below.is_some();
            if top && let Some(below) = below {
                new.backing_file = Some(below.name().to_str().unwrap().into());
                new.backing_format = Some(below.format().name().into());
            }
            create(&self.host.any(), &path, &new).await.unwrap();
            let target = Self::open(&self.host, &path, rng).await;
            let sync = if top { MirrorSync::Top } else { MirrorSync::Full };
            let (job, run) =
                isobath_jobs::mirror(&self.live, &target, MirrorOptions { sync }, job).unwrap();
            (job, Box::pin(run))
        } else {
            let top = rng.random_range(0..depth - 1);
            let base = rng.random_range(top + 1..depth + usize::from(kind == 0));
            println!("from layer {top} from above to {base}");
            let (top_file, base_file) =
                ((top > 0).then(|| self.layer(top)), (base < depth).then(|| self.layer(base)));
            if kind == 0 {
                let options =
                    StreamOptions { top: top_file, base: base_file, ..StreamOptions::default() };
                let (job, run) = isobath_jobs::stream(&self.live, options, job).unwrap();
                // What was taken is not what the image holds any more.
                self.forget(top..base.min(depth));
                (job, Box::pin(run))
            } else {
                let options = CommitOptions {
                    top: top_file,
                    base: base_file,
                    backing_file: None,
                    ..CommitOptions::default()
                };
                let (job, run) = isobath_jobs::commit(&self.live, options, job).unwrap();
                self.forget(top..depth);
                (job, Box::pin(run))
            }
        };
        println!("{job:?} {kind}, {depth} layers, {:?}", job.options());
        let cancel = rng.random_bool(0.2).then(|| rng.random_range(0..40));
        let force = rng.random_bool(0.5);
        let pause = rng.random_bool(0.3);
        let done = Cell::new(false);
        let steer = async {
            let (mut rounds, mut asked) = (0u32, false);
            loop {
                rounds += 1;
                match job.status() {
                    JobStatus::Ready if cancel.is_none() && !asked => {
                        asked = job.complete().is_ok();
                    }
                    JobStatus::Concluded | JobStatus::Null => return,
                    _ => {}
                }
                if cancel.is_some_and(|at| rounds == at + 1) {
                    let _ = job.cancel(force);
                }
                if pause && rounds % 10 == 5 {
                    let _ = job.pause();
                }
                if pause && rounds % 10 == 8 {
                    let _ = job.resume();
                }
                assert!(rounds < 1_000_000, "{job:?} never ends");
                give_way(3).await;
            }
        };
        let run = async {
            run.await;
            done.set(true);
        };
        futures_util::join!(run, steer, self.guest(rng, &done));
        assert!(job.error().is_none(), "{:?}", job.error());
        let whole = self.whole().await;
        self.model.check(&whole).unwrap_or_else(|mismatch| panic!("{job:?}: {mismatch}"));
    }

    fn forget(&mut self, layers: std::ops::Range<usize>) {
        for layer in &self.live.layers()[layers] {
            self.moments.remove(layer.name());
        }
    }

    /// Closes the disk and looks at everything from outside.
    async fn end(self) {
        let active = self.live.layers()[0].name().to_owned();
        for (image, held) in &self.moments {
            assert!(self.content(image).await == *held, "{} has changed", image.display());
        }
        let format = self.live.layers()[0].format().name();
        let names: Vec<_> = self.live.layers().iter().map(|l| l.name().to_owned()).collect();
        self.live.close().await.unwrap();
        let size = self.live.size() as usize;
        drop(self.live);
        let options = OpenOptions::default();
        let disk = Disk::open(self.memory.any(), &active, &options).await.unwrap();
        let found: Vec<_> = disk.layers().map(|layer| layer.name().to_owned()).collect();
        assert_eq!(found, names, "the chain in the files is not the one that was served");
        let bytes = disk.read(0, IoBuf::zeroed(size)).await.unwrap();
        self.model.check(&bytes).unwrap_or_else(|mismatch| panic!("reopened: {mismatch}"));
        drop(disk);
        let directory = export(&self.memory);
        for name in names.iter().filter(|name| name.extension().is_some_and(|e| e == "qcow2")) {
            let checked = qemu::check(&directory.path().join(name));
            assert!([0, 3].contains(&checked.code()), "{}", checked.report());
        }
        let raw = qemu::read_disk(&directory.path().join(&active), format);
        self.model.check(&raw).unwrap_or_else(|mismatch| panic!("QEMU: {mismatch}"));
    }
}

async fn history(rng: &mut StdRng) {
    let mut world = World::new(rng).await;
    let live = Arc::clone(&world.live);
    let changes = async {
        for _ in 0..rng.random_range(2..8) {
            if world.live.depth() < 2 || rng.random_bool(0.4) {
                world.snapshot(rng).await;
            } else {
                world.job(rng).await;
            }
            for _ in 0..rng.random_range(0..4) {
                world.burst(rng).await;
            }
        }
    };
    // As a server does what nobody waits for.
    let upkeep = live.upkeep();
    match select(pin!(changes), pin!(upkeep)).await {
        Either::Left(((), _)) => {}
        // A raw image needs none.
        Either::Right((ended, changes)) => {
            ended.unwrap();
            changes.await;
        }
    }
    drop(live);
    world.end().await;
}

#[test]
fn the_guest_sees_nothing_of_what_happens_to_the_chain() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    for _ in 0..16 {
        block_on(history(&mut rng));
    }
}

/// A base whose writes, or flushes, fail after some.
async fn failing_commit(rng: &mut StdRng, operation: Operation, errno: i32) {
    let mut world = World::new(rng).await;
    let base = world.live.layers().last().unwrap().name().to_owned();
    for _ in 0..3 {
        world.snapshot(rng).await;
        world.burst(rng).await;
    }
    let active = world.live.layers()[0].name().to_owned();
    let depth = world.live.depth();
    let skipped = if operation == Operation::Flush { 0 } else { rng.random_range(0..4) };
    world.plan.add(Fault::new(operation, skipped).errno(errno).of(&base).forever());
    let options = |id: &str| {
        let mut options = JobOptions::new(id);
        options.pacing = Pacing::None;
        options
    };
    let top = Some(world.layer(1));
    let commit = CommitOptions { top, ..CommitOptions::default() };
    let (job, run) = isobath_jobs::commit(&world.live, commit.clone(), options("doomed")).unwrap();
    let layers: Vec<_> = world.live.layers().iter().map(|l| l.name().to_owned()).collect();
    for layer in &layers[1..] {
        world.moments.remove(layer);
    }
    let done = Cell::new(false);
    let run = async {
        Box::pin(run).await;
        done.set(true);
    };
    futures_util::join!(run, world.guest(rng, &done));
    // With nothing to bring down there is nothing to fail.
    if job.error().is_some() {
        assert_eq!(world.live.depth(), depth);
    }
    assert_eq!(world.live.layers()[0].name(), active);
    world.plan.clear();
    world.burst(rng).await;
    if job.error().is_some() {
        match isobath_jobs::commit(&world.live, commit, options("again")) {
            Ok((job, run)) => {
                assert_eq!(operation, Operation::Write, "what a flush has lost is still read");
                done.set(false);
                let run = async {
                    Box::pin(run).await;
                    done.set(true);
                };
                futures_util::join!(run, world.guest(rng, &done));
                assert!(job.error().is_none(), "{:?}", job.error());
            }
            Err(error) => {
                assert_eq!(operation, Operation::Flush, "{error}");
                assert!(
                    error.to_string().contains("a flush of block job commit ('doomed') failed")
                );
            }
        }
    }
    // The next attempt finds everything as it was.
    let snapshot = world.live.snapshot(&Overlay::Create("after.qcow2".into())).await;
    snapshot.unwrap();
    world.burst(rng).await;
    world.end().await;
}

#[test]
fn a_job_that_fails_leaves_the_chain_as_it_was() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    for errno in [libc::ENOSPC, libc::EIO].repeat(4) {
        block_on(failing_commit(&mut rng, Operation::Write, errno));
        block_on(failing_commit(&mut rng, Operation::Flush, errno));
    }
}
