//! What was answered is there after the server was killed, at whatever moment, without a flush.
//!
//! A kill drops the disk and everything that is under way, and leaves what was written to files, and
//! the memory that belongs to them. Nothing else is kept.

use crate::common::{ALWAYS, Ticking, complete, export, findings, make, run};
use futures_executor::block_on;
use futures_util::future::{LocalBoxFuture, join_all};
use isobath_disk::{
    CheckOptions, Disk, ImageFormat, LiveDisk, MetadataMode, NewDisk, OpenOptions, Overlay,
    Preallocation, Repair, WhenLocked, ZeroFlags, check, create,
};
use isobath_jobs::pace::Pacing;
use isobath_jobs::{CommitOptions, JobOptions, MirrorOptions, MirrorSync};
use isobath_qcow2::{Header, IncompatibleFeatures, NewImage};
use isobath_storage::memory::MemoryHost;
use isobath_storage::{Host, IoBuf, Locking, MemoryUse, OpenMode, Operation, Storage, StorageExt};
use isobath_storage_file::FileHost;
use isobath_storage_test::any::{AnyHost, ToAny};
use isobath_storage_test::fault::{Fault, FaultHost, Plan};
use isobath_storage_test::give_way;
use isobath_storage_test::recorder::{Change, Entry, Record, RecorderHost};
use isobath_testkit::bytes::{first_difference, first_other_than};
use isobath_testkit::{digest, qemu, seed::Seed};
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};
use std::cell::{Cell, RefCell};
use std::fmt;
use std::fs::Permissions;
use std::ops::Range;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

type TestHost = FaultHost<MemoryHost>;

const NAME: &str = "disk.qcow2";
const SECTOR: usize = 512;
const HISTORIES: u32 = 30;

/// A change that the guest asks for.
#[derive(Clone)]
struct Request {
    range: Range<u64>,
    bytes: Vec<u8>,
    kind: Kind,
}

/// Without the bytes, which nobody could read.
impl fmt::Debug for Request {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { range, bytes, kind } = self;
        write!(out, "{kind:?} of {range:?}, digest {:016x}", digest(bytes))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Write,
    Zero { unmap: bool },
    Discard,
}

struct World {
    memory: MemoryHost,
    name: PathBuf,
    options: OpenOptions,
    /// What the guest was told.
    model: Vec<u8>,
    snapshots: u32,
}

fn random_image(rng: &mut StdRng, size: u64) -> NewImage {
    let mut image = NewImage::new(size);
    image.cluster_bits = rng.random_range(9..=21);
    image.refcount_order = rng.random_range(2..=6);
    if rng.random_bool(0.3) {
        image.extended_l2 = true;
        image.cluster_bits = rng.random_range(14..=16);
    }
    image
}

impl World {
    async fn new(rng: &mut StdRng) -> Self {
        let size = rng.random_range(1..=3 << 11) * SECTOR as u64;
        let memory = MemoryHost::new();
        // Then small writes are kept for the next record.
        memory.set_gains_from_written_space(rng.random_bool(0.7));
        let mut image = random_image(rng, size);
        let mut model = vec![0; size as usize];
        if rng.random_bool(0.5) {
            rng.fill_bytes(&mut model);
            memory.insert("base.raw", &model);
            image.backing_file = Some("base.raw".into());
            image.backing_format = Some("raw".into());
        }
        println!("{image:?}");
        make(&memory, NAME, &image).await;
        let modes = [MetadataMode::Auto, MetadataMode::Journal, MetadataMode::Embedded];
        let journals = [None, Some(256 << 10), Some(64 << 10), Some(16 << 10)];
        let mut options = OpenOptions::new()
            .writable(true)
            .metadata(modes[rng.random_range(0..3)])
            .restart_log(true);
        options.journal_size = journals[rng.random_range(0..4)];
        options.map_cache = rng.random_bool(0.3).then_some(64 << 10);
        println!("{options:?}");
        Self { memory, name: NAME.into(), options, model, snapshots: 0 }
    }

    fn host(&self, rng: &mut StdRng) -> TestHost {
        let plan = Plan::new();
        plan.delay(rng.random());
        FaultHost::new(self.memory.clone(), plan)
    }

    /// Opens the disk, killed at it some times before. Whoever only reads it meanwhile sees what there is then.
    fn open(&self, rng: &mut StdRng) -> Arc<LiveDisk<AnyHost>> {
        let mut seen = vec![self.look()];
        for _ in 0..rng.random_range(0..4) {
            let turns = rng.random_range(1..600);
            drop(run(open_live(&self.host(rng), &self.name, &self.options), turns));
            seen.push(self.look());
        }
        let host = self.host(rng);
        let disk = run(open_live(&host, &self.name, &self.options), ALWAYS).unwrap();
        let found = block_on(read(&disk, &(0..self.model.len() as u64)));
        for (kills, seen) in seen.iter().enumerate() {
            let differs = first_difference(seen, &found);
            assert_eq!(differs, None, "after {kills} kills a reader sees something else there");
        }
        disk
    }

    /// What a layer holds by itself and through those below it.
    fn contents_of(&self, layer: &Path) -> Vec<u8> {
        block_on(async {
            let options = OpenOptions::new().locking(Locking::Unlocked);
            let disk = Disk::open(self.memory.any(), layer, &options).await.unwrap();
            disk.read(0, IoBuf::zeroed(disk.size() as usize)).await.unwrap().to_vec()
        })
    }

    /// What a reader sees, who changes nothing.
    fn look(&self) -> Vec<u8> {
        let before = self.memory.contents(&self.name);
        let looked = block_on(async {
            let disk = Disk::open(self.memory.any(), &self.name, &OpenOptions::new()).await;
            let disk = disk.unwrap();
            disk.read(0, IoBuf::zeroed(self.model.len())).await.unwrap().to_vec()
        });
        assert!(self.memory.contents(&self.name) == before, "a reader has changed the image");
        looked
    }

    fn requests(&self, rng: &mut StdRng) -> Vec<Request> {
        let size = self.model.len() as u64;
        let mut requests: Vec<Request> = Vec::new();
        for _ in 0..rng.random_range(1..10) {
            let most: u64 =
                if rng.random_bool(0.1) { 1 << 20 } else { 1 << rng.random_range(9..=15) };
            let mut start = rng.random_range(0..size);
            let unit: u64 = 1 << rng.random_range(9..=13);
            start = start / unit * unit;
            let end = size.min(start + rng.random_range(1..=most).next_multiple_of(unit));
            let range = start..end;
            if requests.iter().any(|r| r.range.start < range.end && range.start < r.range.end) {
                continue;
            }
            let length = (end - start) as usize;
            let mut bytes = vec![0; length];
            let kind = match rng.random_range(0..10) {
                0 => Kind::Zero { unmap: rng.random() },
                1 => Kind::Discard,
                2 => {
                    bytes.fill(rng.random());
                    Kind::Write
                }
                _ => {
                    rng.fill_bytes(&mut bytes);
                    Kind::Write
                }
            };
            requests.push(Request { range, bytes, kind });
        }
        requests
    }

    /// Takes over what is read of requests that were not answered, which may be there in parts.
    async fn adopt(&mut self, disk: &LiveDisk<AnyHost>, pending: &[Request]) {
        for request in pending {
            let found = read(disk, &request.range).await;
            for (n, sector) in found.chunks(SECTOR).enumerate() {
                let at = request.range.start as usize + n * SECTOR;
                let old = &self.model[at..at + sector.len()];
                let new = &request.bytes[n * SECTOR..n * SECTOR + sector.len()];
                assert!(sector == old || sector == new, "at {at}, not answered: {request:?}");
            }
            self.put(request.range.start, &found);
        }
    }

    fn put(&mut self, at: u64, bytes: &[u8]) {
        self.model[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
    }

    async fn compare(&self, disk: &LiveDisk<AnyHost>) {
        let found = read(disk, &(0..self.model.len() as u64)).await;
        assert_eq!(first_difference(&found, &self.model), None, "differs there");
    }
}

async fn read(disk: &LiveDisk<AnyHost>, range: &Range<u64>) -> Vec<u8> {
    let length = (range.end - range.start) as usize;
    disk.read(range.start, IoBuf::zeroed(length)).await.unwrap().to_vec()
}

/// Copies all that the layers above it have into the base, as a commit without a server does: it reads their files.
async fn commit_offline(disk: &Arc<LiveDisk<AnyHost>>) {
    let options = CommitOptions { keep_chain: true, ..CommitOptions::default() };
    let job = JobOptions { pacing: Pacing::None, ..JobOptions::new("commit") };
    let (job, work) = isobath_jobs::commit(disk, options, job).unwrap();
    futures_util::join!(work, complete(&job));
    assert!(job.error().is_none(), "{:?}", job.error());
}

/// Does the requests and perhaps flushes, makes a snapshot or changes the size; says which of the
/// requests were answered. `None` if the server is killed meanwhile.
fn burst(
    world: &mut World,
    disk: &Arc<LiveDisk<AnyHost>>,
    requests: &[Request],
    rng: &mut StdRng,
    turns: u64,
) -> (Vec<bool>, bool) {
    let answered: Vec<Cell<bool>> = requests.iter().map(|_| Cell::new(false)).collect();
    let mut work: Vec<LocalBoxFuture<'_, ()>> = Vec::new();
    for (request, answered) in requests.iter().zip(&answered) {
        let (at, length) = (request.range.start, request.range.end - request.range.start);
        work.push(Box::pin(async move {
            match request.kind {
                Kind::Write => {
                    disk.write(at, IoBuf::copy_of(&request.bytes)).await.unwrap();
                }
                Kind::Zero { unmap } => {
                    let flags = ZeroFlags { may_unmap: unmap, only_fast: false };
                    disk.write_zeroes(at, length, flags).await.unwrap();
                }
                Kind::Discard => disk.discard(at, length).await.unwrap(),
            }
            answered.set(true);
        }));
    }
    let other = rng.random_range(0..100);
    if other < 15 {
        work.push(Box::pin(async { disk.flush().await.unwrap() }));
    } else if other < 18 {
        work.push(Box::pin(async {
            // As large as it is: the journal is out of use for a moment.
            Box::pin(disk.resize(disk.size(), Preallocation::Off, false)).await.unwrap();
        }));
    } else if other < 20 {
        world.snapshots += 1;
        let overlay = Overlay::Create(format!("overlay{}.qcow2", world.snapshots).into());
        work.push(Box::pin(async move { disk.snapshot(&overlay).await.unwrap() }));
    }
    let ended = run(join_all(work), turns).is_some();
    (answered.iter().map(Cell::get).collect(), ended)
}

fn history(rng: &mut StdRng) {
    let mut world = block_on(World::new(rng));
    let mut pending: Vec<Request> = Vec::new();
    for round in 0..rng.random_range(2..6) {
        let disk = world.open(rng);
        block_on(world.adopt(&disk, &pending));
        pending.clear();
        println!("round {round}");
        block_on(world.compare(&disk));
        let lives = rng.random_range(0..40);
        for step in 0..=lives {
            let mut requests = world.requests(rng);
            // A discard acts on whole clusters only: what it does not zero stays.
            let cluster = disk.layers()[0].header().unwrap().cluster_bits;
            let size = world.model.len() as u64;
            for request in &mut requests {
                if request.kind == Kind::Discard {
                    let Range { start, end } = request.range.clone();
                    let first = start.next_multiple_of(1 << cluster);
                    let last = if end == size { end } else { end >> cluster << cluster };
                    request.bytes.copy_from_slice(&world.model[start as usize..end as usize]);
                    if first < last {
                        request.bytes[(first - start) as usize..(last - start) as usize].fill(0);
                    }
                }
            }
            let killed = step == lives;
            let turns = if killed { rng.random_range(1..300) } else { ALWAYS };
            let (answered, _) = burst(&mut world, &disk, &requests, rng, turns);
            for (request, answered) in requests.into_iter().zip(answered) {
                if answered {
                    world.put(request.range.start, &request.bytes);
                } else {
                    pending.push(request);
                }
            }
            disk.layers()[0].name().clone_into(&mut world.name);
        }
        // Killed.
    }
    let disk = world.open(rng);
    block_on(async {
        world.adopt(&disk, &pending).await;
        world.compare(&disk).await;
    });
    if disk.depth() > 1 && rng.random() {
        block_on(commit_offline(&disk));
        block_on(world.compare(&disk));
        let base = disk.layers().last().unwrap().name().to_owned();
        assert!(world.contents_of(&base).starts_with(&world.model), "the base lacks something");
    }
    let layers = disk.layers();
    let below = layers.iter().skip(1).filter(|layer| layer.header().is_some());
    let below: Vec<PathBuf> = below.map(|layer| layer.name().to_owned()).collect();
    drop(layers);
    run(disk.close(), ALWAYS).unwrap().unwrap();
    drop(disk);
    assert!(!has_survivor(&world.memory, &world.name), "memory is left");
    // A kill during a snapshot leaves the former active image with its journal, which QEMU does not read.
    for layer in below {
        let options = CheckOptions { repair: Repair::Leaks, ..CheckOptions::default() };
        let report = block_on(check(&world.memory.any(), &layer, &options, &mut |_| {})).unwrap();
        assert!(report.is_clean(), "{}: {report:?}", layer.display());
    }
    let directory = export(&world.memory);
    let image = directory.path().join(&world.name);
    // A kill in a commit before the journal is set up costs space.
    let checked = qemu::check(&image);
    assert!([0, 3].contains(&checked.code()), "{}", checked.report());
    assert!(qemu::read_disk(&image, "qcow2") == world.model, "QEMU reads otherwise");
}

fn has_survivor(memory: &MemoryHost, name: &Path) -> bool {
    // At once: the memory is never busy.
    let file = run(memory.open(name, OpenMode::default()), 1).unwrap().unwrap();
    run(file.restart_memory(MemoryUse::Stale), 1).unwrap().unwrap().is_some()
}

#[test]
fn what_was_answered_is_there_after_a_kill() {
    let mut rng = Seed::new().rng();
    for number in 0..HISTORIES {
        let seed: u64 = rng.random();
        println!("history {number}, seed {seed}");
        history(&mut StdRng::seed_from_u64(seed));
    }
}

const CLUSTER: u64 = 64 << 10;

fn logged() -> OpenOptions {
    OpenOptions::new().writable(true).restart_log(true)
}

/// An overlay of 64 MiB over a base of 8 MiB that is written all over.
async fn overlay(cluster_bits: u32) -> MemoryHost {
    let host = MemoryHost::new();
    host.insert("base.raw", &vec![0xbb; 8 << 20]);
    let mut image = NewImage::new(64 << 20);
    image.cluster_bits = cluster_bits;
    image.backing_file = Some("base.raw".into());
    image.backing_format = Some("raw".into());
    make(&host, NAME, &image).await;
    host
}

async fn open(host: impl ToAny, options: &OpenOptions) -> Disk<AnyHost> {
    Disk::open(host.any(), Path::new(NAME), options).await.unwrap()
}

async fn write<H: Host>(disk: &Disk<H>, at: u64, tag: u8, length: usize) {
    disk.write(at, IoBuf::copy_of(&vec![tag; length])).await.unwrap();
}

async fn assert_reads<H: Host>(disk: &Disk<H>, at: u64, tag: u8, length: usize) {
    let found = disk.read(at, IoBuf::zeroed(length)).await.unwrap();
    assert_eq!(first_other_than(tag, &found), None, "at {at} for {tag}: {:?}", &found[..16]);
}

fn syncs(record: &Record) -> usize {
    record.entries().iter().filter(|e| matches!(e.change, Change::Flush { .. })).count()
}

/// Writes new clusters, and again what a record vouches for, none of it flushed; then is killed.
async fn leave(host: impl ToAny, first: u64) {
    let disk = open(host, &logged()).await;
    // The journal is set up for the first.
    write(&disk, (first + 3) * CLUSTER, 4, 4096).await;
    write(&disk, first * CLUSTER, 1, 4096).await;
    disk.flush().await.unwrap();
    write(&disk, first * CLUSTER + 512, 2, 512).await;
    write(&disk, (first + 1) * CLUSTER + 4096, 3, 4096).await;
    disk.write_zeroes((first + 2) * CLUSTER, CLUSTER, ZeroFlags::default()).await.unwrap();
}

/// What [`leave`] was answered for is there.
async fn assert_left<H: Host>(disk: &Disk<H>, first: u64) {
    assert_reads(disk, first * CLUSTER, 1, 512).await;
    assert_reads(disk, first * CLUSTER + 512, 2, 512).await;
    assert_reads(disk, (first + 1) * CLUSTER, 0xbb, 4096).await;
    assert_reads(disk, (first + 1) * CLUSTER + 4096, 3, 4096).await;
    assert_reads(disk, (first + 2) * CLUSTER, 0, CLUSTER as usize).await;
}

/// Only what was flushed is there.
async fn assert_lost<H: Host>(disk: &Disk<H>, first: u64) {
    assert_reads(disk, first * CLUSTER, 1, 4096).await;
    assert_reads(disk, (first + 1) * CLUSTER, 0xbb, 2 * CLUSTER as usize).await;
}

async fn close<H: Host>(disk: Disk<H>, memory: &MemoryHost) {
    disk.close().await.unwrap();
    drop(disk);
    let directory = export(memory);
    qemu::assert_clean(&directory.path().join(NAME));
    assert!(!has_survivor(memory, Path::new(NAME)));
}

#[test]
fn no_write_waits_for_a_sync() {
    block_on(async {
        let memory = overlay(16).await;
        let host = RecorderHost::new(memory.clone());
        let record = host.record();
        let disk = open(host, &logged()).await;
        // The journal is set up for the first.
        write(&disk, 0, 1, 4096).await;
        let before = syncs(&record);
        for n in 1..200 {
            write(&disk, n * CLUSTER, n as u8, 4096).await;
            write(&disk, n * CLUSTER + 512, 0xee, 512).await;
        }
        assert_eq!(syncs(&record), before);
        drop(disk);
        let disk = open(memory.clone(), &logged().restart_log(false)).await;
        for n in 1..200 {
            assert_reads(&disk, n * CLUSTER, n as u8, 512).await;
            assert_reads(&disk, n * CLUSTER + 512, 0xee, 512).await;
        }
        close(disk, &memory).await;
    });
}

#[test]
fn after_a_power_failure_and_without_such_memory_there_is_what_was_flushed() {
    block_on(async {
        let memory = overlay(16).await;
        leave(memory.clone(), 0).await;
        memory.forget_restart_memories();
        let disk = open(memory.clone(), &logged()).await;
        assert_lost(&disk, 0).await;
        drop(disk);
        memory.set_restart_memories(false);
        leave(memory.clone(), 8).await;
        let disk = open(memory.clone(), &logged()).await;
        assert_lost(&disk, 8).await;
        close(disk, &memory).await;
    });
}

#[test]
fn where_a_log_is_required_nothing_is_lost_or_the_image_is_refused() {
    block_on(async {
        let memory = overlay(16).await;
        let required = async |name: &str, options: &OpenOptions| {
            let live = open_live(&memory, name, options).await;
            live.require_restart_log().await.map_err(|error| error.to_string())
        };
        let ordered = required(NAME, &logged().metadata(MetadataMode::Ordered)).await.unwrap_err();
        assert!(ordered.contains("metadata mode 'ordered'"), "{ordered}");
        let mut old = NewImage::new(1 << 20);
        old.version = 2;
        make(&memory, "old.qcow2", &old).await;
        let old = required("old.qcow2", &logged()).await.unwrap_err();
        assert!(old.contains("a journal needs version 3"), "{old}");
        assert_eq!(required(NAME, &logged()).await, Ok(()));
        assert_eq!(required(NAME, &logged().writable(false)).await, Ok(()), "nothing is written");

        let live = open_live(&memory, NAME, &logged()).await;
        live.require_restart_log().await.unwrap();
        memory.forget_restart_memories();
        memory.set_restart_memories(false);
        // The log is looked at before anything else waits.
        let mut upkeep = std::pin::pin!(live.upkeep());
        let header = async || {
            let mode = OpenMode { locking: Locking::Unlocked, ..OpenMode::default() };
            let file = memory.open(Path::new(NAME), mode).await.unwrap();
            Header::parse(&file.read_at(0, IoBuf::zeroed(65536)).await.unwrap()).unwrap()
        };
        assert!(header().await.incompatible.contains(IncompatibleFeatures::JOURNAL));
        while header().await.incompatible.contains(IncompatibleFeatures::JOURNAL) {
            assert!(futures_util::poll!(upkeep.as_mut()).is_pending());
        }
        for n in 0..4 {
            live.write(n * CLUSTER + 512, IoBuf::copy_of(&[n as u8 + 1; 4096])).await.unwrap();
        }
        drop((header, live));
        // Killed, and there is no log.
        let without = required(NAME, &logged()).await.unwrap_err();
        assert!(without.contains("there is no restart memory in /dev/shm"), "{without}");
        // There was no journal either, so that those who use the disk go on with all that they wrote.
        let disk = open(memory.clone(), &logged().continues(true)).await;
        for n in 0..4 {
            assert_reads(&disk, n * CLUSTER + 512, n as u8 + 1, 4096).await;
        }
        close(disk, &memory).await;
        // In a raw image all is written in place.
        let raw = logged().format(Some(ImageFormat::Raw));
        assert_eq!(required("base.raw", &raw).await, Ok(()));
    });
}

#[test]
fn where_clients_go_on_an_image_without_the_log_that_fits_is_refused_and_stays_as_it_is() {
    let goes_on = || logged().continues(true);
    let refused = async |host: AnyHost, name: &Path| {
        let error = Disk::open(host, name, &goes_on()).await.err().unwrap().to_string();
        assert!(error.contains("they were told had completed"), "{error}");
        error
    };
    block_on(async {
        // Its server has closed it, or has left the log.
        let memory = overlay(16).await;
        open(memory.clone(), &goes_on()).await.close().await.unwrap();
        // Only the log shows that nobody else has written.
        let unknown = goes_on().only_with_log(true);
        let raw = unknown.clone().format(Some(ImageFormat::Raw));
        for (name, options) in [(NAME, &unknown), ("base.raw", &raw)] {
            let error = Disk::open(memory.any(), Path::new(name), options).await.err().unwrap();
            assert!(error.to_string().contains("nobody knows whether"), "{error}");
        }
        let live = open_live(&memory, NAME, &goes_on()).await;
        live.require_restart_log().await.unwrap();
        drop(live);
        // Nothing was written.
        open(memory.clone(), &unknown).await.close().await.unwrap();
        // What is not as it was is refused before it is changed.
        leave(memory.clone(), 4).await;
        let before = memory.contents(NAME).unwrap();
        let locked = goes_on().when_locked(Some(WhenLocked(Arc::new(|_| Err("changed".into())))));
        let error = Disk::open(memory.any(), Path::new(NAME), &locked).await.err().unwrap();
        assert!(error.to_string().contains("changed"), "{error}");
        assert!(memory.contents(NAME).unwrap() == before);
        open(memory.clone(), &unknown).await.close().await.unwrap();
        leave(memory.clone(), 0).await;
        let disk = open(memory.clone(), &goes_on()).await;
        assert_left(&disk, 0).await;
        drop(disk);

        leave(memory.clone(), 8).await;
        memory.forget_restart_memories();
        let before = memory.contents(NAME).unwrap();
        // However often it is attempted.
        for _ in 0..2 {
            let error = refused(memory.any(), Path::new(NAME)).await;
            assert!(error.contains("the log of its unflushed writes is not there"), "{error}");
            assert!(memory.contents(NAME).unwrap() == before);
        }
        // Without those clients it is as after a power failure.
        let disk = open(memory.clone(), &logged()).await;
        assert_lost(&disk, 8).await;
        // The journal is set up for the first.
        write(&disk, 19 * CLUSTER, 9, 4096).await;
        disk.flush().await.unwrap();
        let earlier = memory.contents(NAME).unwrap();
        write(&disk, 20 * CLUSTER, 9, 4096).await;
        disk.flush().await.unwrap();
        write(&disk, 21 * CLUSTER, 9, 4096).await;
        disk.flush().await.unwrap();
        write(&disk, 22 * CLUSTER, 9, 4096).await;
        drop(disk);
        let later = memory.contents(NAME).unwrap();
        let put = async |bytes: &[u8]| {
            let mode = OpenMode { writable: true, ..OpenMode::default() };
            let file = memory.open(Path::new(NAME), mode).await.unwrap();
            file.set_len(bytes.len() as u64).await.unwrap();
            file.write_at(0, IoBuf::copy_of(bytes)).await.unwrap();
        };
        put(&earlier).await;
        for _ in 0..2 {
            let error = refused(memory.any(), Path::new(NAME)).await;
            assert!(error.contains("is of a later state of the image"), "{error}");
            assert!(memory.contents(NAME).unwrap() == earlier);
        }
        // The log was left alone.
        put(&later).await;
        let disk = open(memory.clone(), &goes_on()).await;
        assert_reads(&disk, 22 * CLUSTER, 9, 4096).await;
        close(disk, &memory).await;
    });
    isobath_ring::block_on(async {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join(NAME);
        qemu::create(&image, "qcow2", 64 << 20, "");
        let disk = Disk::open(FileHost.any(), &image, &logged()).await.unwrap();
        write(&disk, 0, 7, 4096).await;
        disk.flush().await.unwrap();
        write(&disk, CLUSTER, 8, 4096).await;
        drop(disk);
        use_up(&image);
        let log = log_of(&image);
        for _ in 0..2 {
            let error = refused(FileHost.any(), &image).await;
            assert!(error.contains("does not match it"), "{error}");
            assert!(log.exists());
        }
        let disk = Disk::open(FileHost.any(), &image, &logged()).await.unwrap();
        assert_reads(&disk, 0, 7, 4096).await;
        assert_reads(&disk, CLUSTER, 0, 4096).await;
        disk.close().await.unwrap();
        std::fs::remove_file(format!("{}.aside-0", log.display())).unwrap();
    });
}

/// An entry that refers to new data in an external data file may be durable only behind it, also in a recovery.
#[test]
fn data_in_another_file_is_durable_before_an_entry_that_a_log_adds() {
    block_on(async {
        let memory = MemoryHost::new();
        memory.insert("base.raw", &vec![0xbb; 8 << 20]);
        let new = NewDisk::new(64 << 20).data_file("data").backing_file("base.raw", "raw");
        create(&memory.any(), Path::new(NAME), &new).await.unwrap();
        let disk = open(memory.clone(), &logged()).await;
        // With the table of the others.
        write(&disk, 0, 1, 4096).await;
        disk.close().await.unwrap();
        drop(disk);
        let disk = open(memory.clone(), &logged()).await;
        write(&disk, 3 * CLUSTER, 4, 4096).await;
        disk.flush().await.unwrap();
        write(&disk, CLUSTER + 4096, 3, 4096).await;
        // Killed. What was written is not durable in either file.
        drop(disk);
        let bytes = memory.contents(NAME).unwrap();
        let header = Header::parse(&bytes).unwrap();
        let l1 = header.l1_table_offset.get() as usize;
        let entry = u64::from_be_bytes(bytes[l1..l1 + 8].try_into().unwrap());
        let table = entry & 0x00ff_ffff_ffff_fe00;
        let host = RecorderHost::new(memory.clone());
        let record = host.record();
        let disk = open(host, &logged()).await;
        let mut durable = false;
        let mut entries = 0;
        for Entry { file, change, .. } in record.entries() {
            match change {
                Change::Flush { .. } => durable |= *file == *Path::new("data"),
                Change::Write(at, _)
                    if *file == *Path::new(NAME) && (table..table + CLUSTER).contains(&at) =>
                {
                    entries += 1;
                    assert!(durable, "the entry may be in the file before its data");
                }
                _ => {}
            }
        }
        assert!(entries > 0, "the log was not applied");
        assert_reads(&disk, CLUSTER, 0xbb, 4096).await;
        assert_reads(&disk, CLUSTER + 4096, 3, 4096).await;
        disk.close().await.unwrap();
        drop(disk);
        assert_eq!(findings(&memory, NAME).await, Vec::<String>::new());
    });
}

#[test]
fn a_log_is_not_applied_once_the_image_was_recovered_elsewhere() {
    block_on(async {
        for killed_there in [false, true] {
            let memory = overlay(16).await;
            leave(memory.clone(), 0).await;
            // Another machine does not see the log, and uses the image.
            memory.set_restart_memories(false);
            let disk = open(memory.clone(), &logged()).await;
            write(&disk, CLUSTER, 7, 3 * CLUSTER as usize).await;
            disk.flush().await.unwrap();
            if killed_there {
                drop(disk);
            } else {
                disk.close().await.unwrap();
                drop(disk);
            }
            memory.set_restart_memories(true);
            assert!(has_survivor(&memory, Path::new(NAME)));
            let disk = open(memory.clone(), &logged()).await;
            assert_reads(&disk, 0, 1, 4096).await;
            assert_reads(&disk, CLUSTER, 7, 3 * CLUSTER as usize).await;
            close(disk, &memory).await;
        }
    });
}

/// A commit without a server reads the tables in the file, and a recovery has made it longer.
#[test]
fn a_commit_finds_the_tables_that_a_log_has_added() {
    const SIZE: u64 = 256 << 10;
    // Of what one table of the smallest clusters describes.
    const TABLE: u64 = 32 << 10;
    block_on(async {
        let memory = MemoryHost::new();
        memory.insert("base.raw", &vec![1; SIZE as usize]);
        let mut image = NewImage::new(SIZE);
        image.cluster_bits = 9;
        image.backing_file = Some("base.raw".into());
        image.backing_format = Some("raw".into());
        make(&memory, NAME, &image).await;
        let live = open_live(&memory, NAME, &logged()).await;
        for start in (0..SIZE).step_by(TABLE as usize) {
            // Without data: the file does not end behind the tables because of that.
            live.write_zeroes(start, SECTOR as u64, ZeroFlags::default()).await.unwrap();
        }
        drop(live);
        // Killed.
        let live = open_live(&memory, NAME, &logged()).await;
        commit_offline(&live).await;
        live.close().await.unwrap();
        let mut expected = vec![1; SIZE as usize];
        for part in expected.chunks_mut(TABLE as usize) {
            part[..SECTOR].fill(0);
        }
        assert!(memory.contents("base.raw").unwrap() == expected);
    });
}

#[test]
fn a_log_that_was_asked_for_later_has_everything_too() {
    for metadata in [MetadataMode::Auto, MetadataMode::Journal, MetadataMode::Embedded] {
        for mirrored in [false, true] {
            block_on(async {
                let memory = overlay(16).await;
                let options = logged().restart_log(false).metadata(metadata);
                let live = open_live(&memory, NAME, &options).await;
                let tagged = |tag: u8| IoBuf::copy_of(&[tag; 4096]);
                live.write(0, tagged(1)).await.unwrap();
                live.flush().await.unwrap();
                live.write(CLUSTER, tagged(2)).await.unwrap();
                live.begin_restart_log().await.unwrap();
                live.write(2 * CLUSTER, tagged(3)).await.unwrap();
                let mut image = NAME;
                if mirrored {
                    image = "target.qcow2";
                    make(&memory, image, &NewImage::new(64 << 20)).await;
                    let target = open_live(&memory, image, &options).await;
                    let job = JobOptions { pacing: Pacing::None, ..JobOptions::new("mirror") };
                    let sync = MirrorOptions { sync: MirrorSync::Full };
                    let (job, work) = isobath_jobs::mirror(&live, &target, sync, job).unwrap();
                    futures_util::join!(work, complete(&job));
                    assert!(job.error().is_none(), "{:?}", job.error());
                    assert_eq!(live.layers()[0].name(), Path::new(image));
                }
                live.write(3 * CLUSTER, tagged(4)).await.unwrap();
                live.write(512, IoBuf::copy_of(&[5; 512])).await.unwrap();
                // A record of the journal that the log belongs to.
                live.flush().await.unwrap();
                live.write(4 * CLUSTER, tagged(6)).await.unwrap();
                drop(live);
                // Killed.
                let live = open_live(&memory, image, &logged()).await;
                for (at, tag) in [
                    (0, 1),
                    (512, 5),
                    (CLUSTER, 2),
                    (2 * CLUSTER, 3),
                    (3 * CLUSTER, 4),
                    (4 * CLUSTER, 6),
                ] {
                    let found = live.read(at, IoBuf::zeroed(512)).await.unwrap();
                    assert!(found.iter().all(|byte| *byte == tag), "{metadata:?} at {at}");
                }
                live.close().await.unwrap();
            });
        }
    }
}

async fn open_live(
    host: &impl ToAny,
    name: impl AsRef<Path>,
    options: &OpenOptions,
) -> Arc<LiveDisk<AnyHost>> {
    let disk = Disk::open(host.any(), name.as_ref(), options).await.unwrap();
    LiveDisk::new(disk, options, Arc::new(Ticking::default()))
}

#[test]
fn a_log_is_not_applied_to_an_image_that_was_put_back() {
    block_on(async {
        let memory = overlay(16).await;
        let disk = open(memory.clone(), &logged()).await;
        write(&disk, 3 * CLUSTER, 4, 4096).await;
        disk.flush().await.unwrap();
        // A copy of the image while it is in use.
        let before = memory.contents(NAME).unwrap();
        write(&disk, 0, 1, 4096).await;
        write(&disk, CLUSTER, 2, 4096).await;
        disk.flush().await.unwrap();
        disk.discard(0, CLUSTER).await.unwrap();
        write(&disk, 2 * CLUSTER, 3, 4096).await;
        drop(disk);
        // It is put back into the same file, which the log belongs to.
        let mode = OpenMode { writable: true, ..OpenMode::default() };
        let file = memory.open(Path::new(NAME), mode).await.unwrap();
        file.set_len(before.len() as u64).await.unwrap();
        file.write_at(0, IoBuf::copy_of(&before)).await.unwrap();
        drop(file);
        assert!(has_survivor(&memory, Path::new(NAME)));
        let top = above(&memory).await;
        let disk = Disk::open(memory.any(), top, &OpenOptions::new()).await.unwrap();
        assert_reads(&disk, 3 * CLUSTER, 4, 4096).await;
        assert_reads(&disk, 0, 0xbb, 3 * CLUSTER as usize).await;
        drop(disk);
        let writable = OpenOptions::new().writable(true);
        let refused = Disk::open(memory.any(), top, &writable).await.err().unwrap().to_string();
        assert!(refused.contains("does not match") && refused.contains(NAME), "{refused}");
        let disk = open(memory.clone(), &logged()).await;
        assert_reads(&disk, 3 * CLUSTER, 4, 4096).await;
        assert_reads(&disk, 0, 0xbb, 3 * CLUSTER as usize).await;
        close(disk, &memory).await;
    });
}

/// The file of an image's log.
fn log_of(image: &Path) -> PathBuf {
    let (image, user) =
        (std::fs::metadata(image).unwrap(), std::fs::metadata("/proc/self").unwrap().uid());
    format!("/dev/shm/isobath-{user}/{:x}-{:x}", image.dev(), image.ino()).into()
}

/// The log that a killed server of a version before these directories left.
fn log_of_before(image: &Path) -> PathBuf {
    let image = std::fs::metadata(image).unwrap();
    format!("/dev/shm/isobath-{:x}-{:x}", image.dev(), image.ino()).into()
}

#[test]
fn a_killed_server_of_an_earlier_version_has_left_its_log_elsewhere() {
    isobath_ring::block_on(async {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join(NAME);
        qemu::create(&image, "qcow2", 64 << 20, "");
        let disk = Disk::open(FileHost.any(), &image, &logged()).await.unwrap();
        write(&disk, 0, 7, 4096).await;
        drop(disk);
        std::fs::rename(log_of(&image), log_of_before(&image)).unwrap();
        let read = Disk::open(FileHost.any(), &image, &OpenOptions::new()).await.unwrap();
        assert_reads(&read, 0, 7, 4096).await;
        drop(read);
        let disk = Disk::open(FileHost.any(), &image, &logged()).await.unwrap();
        assert_reads(&disk, 0, 7, 4096).await;
        disk.close().await.unwrap();
        assert!(!log_of_before(&image).exists() && !log_of(&image).exists());
    });
}

#[test]
fn an_image_whose_log_is_truncated_is_not_opened() {
    isobath_ring::block_on(async {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join(NAME);
        qemu::create(&image, "qcow2", 64 << 20, "");
        let disk = Disk::open(FileHost.any(), &image, &logged()).await.unwrap();
        write(&disk, 0, 7, 4096).await;
        drop(disk);
        let log = std::fs::OpenOptions::new().write(true).open(log_of(&image)).unwrap();
        log.set_len(4096).unwrap();
        for options in [OpenOptions::new(), logged()] {
            let refused = Disk::open(FileHost.any(), &image, &options).await.err().unwrap();
            assert!(refused.to_string().contains("it is damaged: it is too short"), "{refused}");
        }
        std::fs::remove_file(log_of(&image)).unwrap();
    });
}

#[test]
fn an_image_whose_log_cannot_be_used_is_not_opened() {
    isobath_ring::block_on(async {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join(NAME);
        qemu::create(&image, "qcow2", 64 << 20, "");
        let top = directory.path().join("top");
        qemu::create_overlay(&top, &image, "qcow2", "");
        let disk = Disk::open(FileHost.any(), &image, &logged()).await.unwrap();
        write(&disk, 0, 7, 4096).await;
        drop(disk);
        let log = log_of(&image).display().to_string();
        let before = std::fs::read(&image).unwrap();
        std::fs::set_permissions(&log, Permissions::from_mode(0o666)).unwrap();
        let repair = CheckOptions { repair: Repair::All, ..CheckOptions::default() };
        let read = OpenOptions::new();
        let refused = [
            Disk::open(FileHost.any(), &image, &read).await.err().unwrap().to_string(),
            Disk::open(FileHost.any(), &top, &read).await.err().unwrap().to_string(),
            Disk::open(FileHost.any(), &top, &logged()).await.err().unwrap().to_string(),
            Disk::open(FileHost.any(), &image, &logged()).await.err().unwrap().to_string(),
            check(&FileHost.any(), &image, &repair, &mut |_| {}).await.err().unwrap().to_string(),
        ];
        for error in refused {
            assert!(error.contains(NAME) && error.contains(&log), "{error}");
        }
        assert!(std::fs::read(&image).unwrap() == before, "it was changed");
        std::fs::set_permissions(&log, Permissions::from_mode(0o600)).unwrap();
        let disk = Disk::open(FileHost.any(), &image, &logged()).await.unwrap();
        assert_reads(&disk, 0, 7, 4096).await;
        disk.close().await.unwrap();
    });
}

#[test]
fn a_repair_brings_it_in_and_who_only_reads_sees_it_too() {
    block_on(async {
        let memory = overlay(16).await;
        leave(memory.clone(), 0).await;
        let before = memory.contents(NAME);
        let read = open(memory.clone(), &OpenOptions::default()).await;
        assert_left(&read, 0).await;
        drop(read);
        assert!(memory.contents(NAME) == before);
        let options = CheckOptions { repair: Repair::Leaks, ..CheckOptions::default() };
        let report = check(&memory.any(), Path::new(NAME), &options, &mut |_| {}).await.unwrap();
        assert!(report.is_clean());
        let disk = open(memory.clone(), &OpenOptions::default()).await;
        assert_left(&disk, 0).await;
    });
}

#[test]
fn more_than_there_is_room_for_is_durable_before_it_is_answered() {
    let memory = block_on(overlay(9));
    let plan = Plan::new();
    plan.delay(5);
    let host = FaultHost::new(memory.clone(), plan);
    let disk = run(open(host, &logged()), ALWAYS).unwrap();
    run(disk.write(0, IoBuf::zeroed(512)), ALWAYS).unwrap().unwrap();
    let step = 16 << 20;
    let zeroes = (0..4).map(|n| disk.write_zeroes(n * step, step, ZeroFlags::default()));
    for zeroed in run(join_all(zeroes), ALWAYS).unwrap() {
        zeroed.unwrap();
    }
    run(disk.write(step, IoBuf::copy_of(&[5; 512])), ALWAYS).unwrap().unwrap();
    drop(disk);
    block_on(async {
        let disk = open(memory.clone(), &logged()).await;
        assert_reads(&disk, step, 5, 512).await;
        assert_reads(&disk, 0, 0, step as usize).await;
        assert_reads(&disk, step + 512, 0, 3 * step as usize - 512).await;
        close(disk, &memory).await;
    });
}

#[test]
fn files_have_it_too() {
    isobath_ring::block_on(async {
        let directory = tempfile::tempdir().unwrap();
        let (image, base) = (directory.path().join(NAME), directory.path().join("base.raw"));
        std::fs::write(&base, vec![0xbb; 64 << 20]).unwrap();
        qemu::create(&image, "qcow2", 64 << 20, "backing_file=base.raw,backing_fmt=raw");
        let open = async || Disk::open(FileHost.any(), &image, &logged()).await.unwrap();
        for round in 0..3_u8 {
            let disk = open().await;
            for n in 0..round {
                assert_reads(&disk, u64::from(n) * 9 * CLUSTER, n, 4096).await;
                assert_reads(&disk, (u64::from(n) * 9 + 1) * CLUSTER, n, 4096).await;
            }
            write(&disk, u64::from(round) * 9 * CLUSTER, round, 4096).await;
            write(&disk, (u64::from(round) * 9 + 1) * CLUSTER, round, 4096).await;
        }
        let disk = open().await;
        disk.close().await.unwrap();
        drop(disk);
        qemu::assert_clean(&image);
        let file = FileHost.open(&image, OpenMode::default()).await.unwrap();
        assert!(file.restart_memory(MemoryUse::Stale).await.unwrap().is_none());
    });
}

/// Kills in commits that go in place, where clusters are released while others are written.
#[test]
fn what_a_commit_in_place_releases_is_not_written_over_after_a_kill() {
    let mut rng = Seed::new().rng();
    for _ in 0..400 {
        let seed: u64 = rng.random();
        let rng = &mut StdRng::seed_from_u64(seed);
        let memory = MemoryHost::new();
        memory.set_gains_from_written_space(true);
        let mut image = NewImage::new(8 << 20);
        image.cluster_bits = 12;
        block_on(make(&memory, NAME, &image));
        let plan = Plan::new();
        plan.delay(rng.random());
        let host = FaultHost::new(memory.clone(), plan.clone());
        let options = logged().journal_size(64 << 10);
        let disk = run(open(host, &options), ALWAYS).unwrap();
        run(write(&disk, 0, 1, 4096), ALWAYS).unwrap();
        run(disk.flush(), ALWAYS).unwrap().unwrap();
        // Kept, in clusters behind the file's end.
        for n in 0..4 {
            run(write(&disk, (10 + n) * 4096, 0x40 + n as u8, 4096), ALWAYS).unwrap();
        }
        // They go, and so much else is to be told that it does not fit into a record.
        run(disk.discard(10 * 4096, 4 * 4096), ALWAYS).unwrap().unwrap();
        let flags = ZeroFlags { may_unmap: true, only_fast: false };
        run(disk.write_zeroes(4 << 20, 4 << 20, flags), ALWAYS).unwrap().unwrap();
        let answered = RefCell::new(Vec::new());
        let mut work: Vec<LocalBoxFuture<'_, ()>> =
            vec![Box::pin(async { disk.flush().await.unwrap() })];
        for task in 0..4_u64 {
            let (disk, answered) = (&disk, &answered);
            let pauses: Vec<u32> = (0..8).map(|_| rng.random_range(0..30)).collect();
            work.push(Box::pin(async move {
                for (n, pause) in (0..).zip(pauses) {
                    give_way(pause.into()).await;
                    let (cluster, byte) = (100 + task * 100 + n, (task * 10 + n + 100) as u8);
                    write(disk, cluster * 4096, byte, 4096).await;
                    answered.borrow_mut().push((cluster, byte));
                }
            }));
        }
        let until = rng.random_range(1..160);
        drop(run(join_all(work), until));
        drop(disk);
        let disk = run(open(memory.clone(), &options), ALWAYS).unwrap();
        for (cluster, byte) in answered.into_inner() {
            println!("seed {seed}: cluster {cluster}, killed after {until} turns");
            run(assert_reads(&disk, cluster * 4096, byte, 4096), ALWAYS).unwrap();
        }
    }
}

#[test]
fn what_was_answered_is_there_if_any_write_failed_before() {
    let mut lost = 0;
    for operation in [Operation::Write, Operation::WriteZeroes, Operation::SetLength] {
        for after in 0..40 {
            let plan = Plan::new();
            let answered: Vec<bool> = block_on(async {
                let memory = overlay(16).await;
                let disk = open(FaultHost::new(memory.clone(), plan.clone()), &logged()).await;
                plan.add(Fault::new(operation, after).errno(libc::EIO));
                let mut answered = Vec::new();
                for step in 0..8 {
                    let buf = IoBuf::copy_of(&vec![step as u8 + 1; 4096]);
                    answered.push(disk.write(step * CLUSTER, buf).await.is_ok());
                    if step % 3 == 2 {
                        let _ = disk.flush().await;
                    }
                }
                // Killed.
                drop(disk);
                let disk = open(memory, &logged()).await;
                for (step, _) in (0..).zip(&answered).filter(|(_, answered)| **answered) {
                    assert_reads(&disk, step * CLUSTER, step as u8 + 1, 4096).await;
                }
                answered
            });
            lost += plan.injected();
            assert!(plan.injected() > 0 || answered.iter().all(|answered| *answered));
        }
    }
    assert!(lost > 10, "only {lost} operations failed");
}

/// Makes an overlay of the image that [`leave`] left.
async fn above(memory: &MemoryHost) -> &'static Path {
    let mut image = NewImage::new(64 << 20);
    image.backing_file = Some(NAME.into());
    image.backing_format = Some("qcow2".into());
    make(memory, "top.qcow2", &image).await;
    Path::new("top.qcow2")
}

#[test]
fn what_a_guest_flushes_to_an_overlay_makes_durable_what_it_wrote_below_before() {
    block_on(async {
        let memory = overlay(16).await;
        leave(memory.clone(), 0).await;
        let top = above(&memory).await;
        let before = memory.contents(NAME);
        let disk = Disk::open(memory.any(), top, &OpenOptions::new()).await.unwrap();
        assert_left(&disk, 0).await;
        drop(disk);
        assert!(memory.contents(NAME) == before, "a reader has changed the image below");
        let disk = Disk::open(memory.any(), top, &OpenOptions::new().writable(true)).await.unwrap();
        assert_left(&disk, 0).await;
        write(&disk, 20 * CLUSTER, 9, 4096).await;
        disk.flush().await.unwrap();
        drop(disk);
        assert!(!has_survivor(&memory, Path::new(NAME)));
        memory.forget_restart_memories();
        let disk = Disk::open(memory.any(), top, &OpenOptions::new()).await.unwrap();
        assert_left(&disk, 0).await;
        assert_reads(&disk, 20 * CLUSTER, 9, 4096).await;
    });
}

/// Says of every free cluster that it is in use, as a program may that knows nothing of the log.
fn use_up(image: &Path) {
    let mut bytes = std::fs::read(image).unwrap();
    let number = |bytes: &[u8], at: usize| {
        u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) as usize
    };
    let block = number(&bytes, number(&bytes, 48));
    for count in bytes[block..block + CLUSTER as usize].chunks_mut(2) {
        if count == [0, 0] {
            count[1] = 1;
        }
    }
    std::fs::write(image, bytes).unwrap();
}

#[test]
fn a_log_that_does_not_match_is_set_aside_and_nothing_is_written_above_it() {
    isobath_ring::block_on(async {
        let directory = tempfile::tempdir().unwrap();
        let (image, top) = (directory.path().join(NAME), directory.path().join("top"));
        qemu::create(&image, "qcow2", 64 << 20, "");
        qemu::create_overlay(&top, &image, "qcow2", "");
        let disk = Disk::open(FileHost.any(), &image, &logged()).await.unwrap();
        // The journal is set up for the first.
        write(&disk, 0, 7, 4096).await;
        disk.flush().await.unwrap();
        write(&disk, CLUSTER, 8, 4096).await;
        drop(disk);
        use_up(&image);
        let log = log_of(&image);
        let log_bytes = std::fs::read(&log).unwrap();
        let before = std::fs::read(&image).unwrap();
        for (name, writable) in [(&image, false), (&top, false)] {
            let options = OpenOptions::new().writable(writable);
            let disk = Disk::open(FileHost.any(), name, &options).await.unwrap();
            assert_reads(&disk, 0, 7, 4096).await;
            assert_reads(&disk, CLUSTER, 0, 4096).await;
        }
        let refused = Disk::open(FileHost.any(), &top, &OpenOptions::new().writable(true)).await;
        let error = refused.err().unwrap().to_string();
        assert!(error.contains("does not match") && error.contains(NAME), "{error}");
        assert!(std::fs::read(&image).unwrap() == before && log.exists());
        let repair = CheckOptions { repair: Repair::All, ..CheckOptions::default() };
        let _ = check(&FileHost.any(), &image, &repair, &mut |_| {}).await.unwrap();
        let aside = PathBuf::from(format!("{}.aside-0", log.display()));
        assert!(!log.exists() && std::fs::read(&aside).unwrap()[64..] == log_bytes[64..]);
        std::fs::remove_file(aside).unwrap();
        let disk = Disk::open(FileHost.any(), &top, &OpenOptions::new().writable(true)).await;
        let disk = disk.unwrap();
        assert_reads(&disk, 0, 7, 4096).await;
        disk.close().await.unwrap();
    });
}

/// Each write takes a new cluster, which does not make the file longer, and each discard gives one back that is not
/// taken again before a flush.
#[test]
fn clusters_that_small_writes_take_without_a_flush_are_found_whatever_their_size() {
    for (bits, length, rounds) in [(21, 512, 200), (19, 512, 200), (16, 1, 1400), (9, 1, 1400)] {
        let memory = MemoryHost::new();
        memory.set_gains_from_written_space(true);
        let mut image = NewImage::new(64 << 20);
        image.cluster_bits = bits;
        block_on(make(&memory, NAME, &image));
        let options = OpenOptions::new().writable(true).metadata(MetadataMode::Journal);
        let options = options.restart_log(true);
        let host = FaultHost::new(memory, Plan::new());
        let open = || run(open_live(&host, Path::new(NAME), &options), ALWAYS).unwrap();
        let disk = open();
        block_on(async {
            let write = async |at: u64, byte: u8, length: usize| {
                disk.write(at, IoBuf::copy_of(&vec![byte; length])).await.unwrap();
            };
            for number in 0..5 {
                write((16 + number * 2) << 20, 1, 512).await;
                disk.flush().await.unwrap();
            }
            for _ in 0..rounds {
                write(0, 2, length).await;
                disk.discard(0, 1 << bits).await.unwrap();
            }
            write(0, 3, 512).await;
            write(40 << 20, 4, 512).await;
        });
        drop(disk);
        let disk = open();
        for (at, byte) in [(0, 3), (40 << 20, 4), (24 << 20, 1)] {
            let found = block_on(read(&disk, &(at..at + 512)));
            assert_eq!(first_other_than(byte, &found), None, "clusters of 2^{bits} bytes, at {at}");
        }
        block_on(disk.close()).unwrap();
    }
}
