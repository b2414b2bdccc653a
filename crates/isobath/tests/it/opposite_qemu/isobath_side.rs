//! Operations through the library.

use crate::opposite_qemu::chain::Task;
use crate::opposite_qemu::history::{JobKind, Session};
use crate::opposite_qemu::op::{Fill, Op};
use futures_util::future::{LocalBoxFuture, join_all, join3, try_join_all};
use isobath_disk::{
    BlockDevice, CheckEvent, CheckOptions, CheckReport, Disk, Layer, LiveDisk, NewDisk,
    OpenOptions, Preallocation, Repair, ZeroFlags, check, create,
};
use isobath_jobs::{CommitOptions, Job, JobOptions, JobStatus};
use isobath_jobs::{MirrorOptions, MirrorSync, StreamOptions};
use isobath_ring::{Config, Executor, Worker};
use isobath_storage::{FileId, IoBuf, Storage, StorageExt};
use isobath_storage_file::FileHost;
use isobath_storage_test::any::{AnyHost, ToAny};
use isobath_testkit::bytes::first_other_than;
use isobath_testkit::model::Model;
use std::fmt::Display;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

type Request = Pin<Box<dyn Future<Output = Result<Vec<u8>, String>>>>;

/// A request that has not ended by then hangs.
const PATIENCE: Duration = Duration::from_mins(5);

/// Runs `work` on a ring of its own.
pub(crate) fn on_ring<T>(work: impl Future<Output = T>) -> T {
    let executor = Executor::new(&Config::default()).unwrap();
    executor
        .block_on(isobath_ring::timeout(PATIENCE, work))
        .unwrap_or_else(|_| panic!("isobath hangs: nothing for {PATIENCE:?}"))
}

/// The bytes of a fill.
pub(crate) fn bytes(fill: Fill, noises: &[Vec<u8>], length: u64) -> Vec<u8> {
    match fill {
        Fill::Byte(byte) => vec![byte; length as usize],
        Fill::Noise(number) => {
            let (noise, mut left) = (&noises[usize::from(number)], length as usize);
            let mut bytes = Vec::with_capacity(left);
            while left > 0 {
                let part = left.min(noise.len());
                bytes.extend_from_slice(&noise[..part]);
                left -= part;
            }
            bytes
        }
    }
}

async fn open(image: &Path, options: OpenOptions) -> Disk<AnyHost> {
    done(Disk::open(FileHost.any(), image, &options).await, "open")
}

fn done<T, E: Display>(result: Result<T, E>, what: impl Display) -> T {
    result.unwrap_or_else(|error| panic!("isobath: {what}: {error}"))
}

/// Opens the image, carries out the batches one after another, each all at once, and closes it. The
/// model tells what reads must give, and takes the changes.
pub(crate) async fn session(
    image: &Path,
    session: Session,
    batches: &[Vec<Op>],
    noises: &Arc<[Vec<u8>]>,
    model: &mut Model,
) {
    let disk = Arc::new(open(image, options(session)).await);
    let cluster = cluster(disk.layers().next().unwrap());
    carry_out_all(&disk, session, cluster, batches, noises, model).await;
    if session.dropped {
        done(disk.flush().await, "flush");
    } else {
        let disk = Arc::into_inner(disk).unwrap();
        done(disk.close().await, "close");
    }
}

fn options(session: Session) -> OpenOptions {
    OpenOptions::new()
        .writable(true)
        .direct(session.direct)
        .map_cache(session.map_cache)
        .metadata(session.metadata)
}

fn cluster<S: Storage>(layer: &Layer<S>) -> u64 {
    1 << layer.header().unwrap().cluster_bits
}

/// The same beside a job.
pub(crate) async fn job(
    image: &Path,
    session: Session,
    task: &Task,
    batches: &[Vec<Op>],
    noises: &Arc<[Vec<u8>]>,
    model: &mut Model,
) {
    let options = options(session);
    let live = done(LiveDisk::open(FileHost.any(), image, &options).await, "open");
    let cluster = cluster(&live.layers()[0]);
    if task.warm {
        let bytes = whole(&live).await;
        done(model.check(&bytes), "a read of all before the job");
    }
    let (job, work) = start(&live, task, &options).await;
    let requests = carry_out_all(&live, session, cluster, batches, noises, model);
    join3(work, steer(&job), requests).await;
    assert!(job.error().is_none(), "isobath: {:?}: {:?}", task.kind, job.error());
    let bytes = whole(&live).await;
    done(model.adopt(&bytes), "a read of all after the job");
    if session.dropped {
        done(live.flush().await, "flush");
    } else {
        done(live.close().await, "close");
    }
}

async fn start(
    live: &Arc<LiveDisk<AnyHost>>,
    task: &Task,
    options: &OpenOptions,
) -> (Arc<Job>, LocalBoxFuture<'static, ()>) {
    let layers = live.layers();
    let file = |number: usize| layers[layers.len() - 1 - number].storage().id();
    let top: Option<FileId> = (task.top + 1 < layers.len()).then(|| file(task.top));
    let base = task.base.map(file);
    let job = JobOptions::new("job");
    match task.kind {
        JobKind::Stream => {
            let options = StreamOptions { top, base, backing_file: None, change_snapshots: true };
            let (job, work) = done(isobath_jobs::stream(live, options, job), "stream");
            (job, Box::pin(work))
        }
        JobKind::Commit => {
            let options = CommitOptions { top, base, ..CommitOptions::default() };
            let (job, work) = done(isobath_jobs::commit(live, options, job), "commit");
            (job, Box::pin(work))
        }
        JobKind::Mirror | JobKind::MirrorTop => {
            let target = task.target.as_deref().unwrap();
            let target =
                done(LiveDisk::open(FileHost.any(), target, options).await, "open the target");
            let whole = task.kind == JobKind::Mirror;
            let sync = if whole { MirrorSync::Full } else { MirrorSync::Top };
            let (job, work) =
                done(isobath_jobs::mirror(live, &target, MirrorOptions { sync }, job), "mirror");
            (job, Box::pin(work))
        }
    }
}

/// Completes the job when it is ready, and waits for its end.
async fn steer(job: &Job) {
    let mut asked = false;
    loop {
        let changed = job.changed();
        match job.status() {
            JobStatus::Ready if !asked => {
                done(job.complete(), "complete");
                asked = true;
            }
            JobStatus::Concluded | JobStatus::Null => return,
            _ => {}
        }
        changed.await;
    }
}

async fn whole(live: &LiveDisk<AnyHost>) -> Vec<u8> {
    let part = 1 << 20;
    let mut bytes = Vec::with_capacity(live.size() as usize);
    for offset in (0..live.size()).step_by(part) {
        let length = (live.size() - offset).min(part as u64);
        bytes.extend(done(live.read(offset, IoBuf::zeroed(length as usize)).await, "read").iter());
    }
    bytes
}

/// What clients ask of a disk, and what only an image that is alone takes.
trait Device: BlockDevice {
    fn write_compressed(&self, offset: u64, buf: IoBuf) -> impl Future<Output = Written>;
}

type Written = isobath_disk::Result<IoBuf>;

impl Device for Disk<AnyHost> {
    fn write_compressed(&self, offset: u64, buf: IoBuf) -> impl Future<Output = Written> {
        Self::write_compressed(self, offset, buf)
    }
}

impl Device for LiveDisk<AnyHost> {
    fn write_compressed(&self, offset: u64, buf: IoBuf) -> impl Future<Output = Written> {
        self.write(offset, buf)
    }
}

/// The batches, one after another.
async fn carry_out_all<D: Device>(
    disk: &Arc<D>,
    session: Session,
    cluster: u64,
    batches: &[Vec<Op>],
    noises: &Arc<[Vec<u8>]>,
    model: &mut Model,
) {
    let second = session.two_threads.then(|| Worker::start("second", &Config::default()).unwrap());
    for batch in batches {
        let requests = batch.iter().enumerate().map(|(number, op)| {
            let request = request(disk.clone(), *op, cluster, noises.clone());
            let second = second.as_ref().filter(|_| number % 2 == 1);
            async move {
                match second {
                    Some(worker) => done(worker.handle().spawn_with(request).await, op),
                    None => request().await,
                }
            }
        });
        for (op, answer) in batch.iter().zip(join_all(requests).await) {
            let bytes = done(answer, op);
            if let Op::Read { offset, .. } = op {
                done(model.check_range(*offset, &bytes), op);
            }
        }
        for op in batch {
            apply(model, *op, model.size(), cluster, noises);
            if let Op::Race { .. } = op {
                settle(&**disk, *op, model).await;
            }
        }
    }
}

/// One operation: what starts it on a thread. Gives the bytes of a read, or what failed.
fn request<D: Device>(
    disk: Arc<D>,
    op: Op,
    cluster: u64,
    noises: Arc<[Vec<u8>]>,
) -> impl FnOnce() -> Request + Send {
    move || {
        Box::pin(async move {
            carry_out(&*disk, op, cluster, &noises).await.map_err(|error| error.to_string())
        })
    }
}

async fn carry_out<D: Device>(
    disk: &D,
    op: Op,
    cluster: u64,
    noises: &[Vec<u8>],
) -> isobath_disk::Result<Vec<u8>> {
    let (offset, length) = op.range(disk.size(), cluster);
    match op {
        Op::Write { fill, .. } => {
            let data = bytes(fill, noises, length);
            let buf = disk.write(offset, IoBuf::copy_of(&data)).await?;
            assert!(*buf == *data, "isobath: {op}: the buffer came back changed");
        }
        Op::Zero { unmap, .. } => {
            let flags = ZeroFlags { may_unmap: unmap, only_fast: false };
            disk.write_zeroes(offset, length, flags).await?;
        }
        Op::Discard { .. } => disk.discard(offset, length).await?,
        Op::Compressed { fill, .. } => {
            let data = bytes(fill, noises, length);
            for (at, part) in
                (offset..).step_by(cluster as usize).zip(data.chunks(cluster as usize))
            {
                disk.write_compressed(at, IoBuf::copy_of(part)).await?;
            }
        }
        Op::Read { .. } => {
            return Ok(disk.read(offset, IoBuf::zeroed(length as usize)).await?.to_vec());
        }
        Op::Race { .. } => {
            try_join_all(op.racers().into_iter().map(|(offset, length, byte)| async move {
                disk.write(offset, IoBuf::copy_of(&vec![byte; length as usize])).await
            }))
            .await?;
        }
        Op::Flush => disk.flush().await?,
    }
    Ok(Vec::new())
}

/// Every byte of a race's range must be that of one of its writes; the model takes it over.
async fn settle<D: Device>(disk: &D, op: Op, model: &mut Model) {
    let (start, length) = op.range(disk.size(), 1);
    let data = done(disk.read(start, IoBuf::zeroed(length as usize)).await, op);
    for (offset, length, byte) in op.racers() {
        for at in offset..offset + length {
            let seen = data[(at - start) as usize];
            let of_one = op.racers().iter().any(|(offset, length, byte)| {
                seen == *byte && (*offset..offset + length).contains(&at)
            });
            assert!(of_one, "isobath: {op}: byte {at} is {seen:#04x}, which none wrote ({byte})");
        }
        model.write(offset, &data[(offset - start) as usize..(offset - start + length) as usize]);
    }
}

/// Does to the model what the operation does to the disk.
pub(crate) fn apply(model: &mut Model, op: Op, size: u64, cluster: u64, noises: &[Vec<u8>]) {
    let (offset, length) = op.range(size, cluster);
    match op {
        Op::Write { fill, .. } | Op::Compressed { fill, .. } => {
            model.write(offset, &bytes(fill, noises, length));
        }
        Op::Zero { .. } => model.fill(offset, length, 0),
        Op::Discard { .. } => model.discard(offset, length),
        Op::Race { .. } => {
            for (offset, length, byte) in op.racers() {
                model.fill(offset, length, byte);
            }
        }
        Op::Read { .. } | Op::Flush => {}
    }
}

/// Reads the whole disk, and what it says of its state, against the model.
pub(crate) async fn verify(image: &Path, model: &Model) {
    let options = OpenOptions::new().map_cache(64 << 10);
    let disk = open(image, options).await;
    assert!(disk.size() == model.size(), "isobath: size {} not {}", disk.size(), model.size());
    let offsets: Vec<u64> = (0..disk.size()).step_by(1 << 20).collect();
    let disk = &disk;
    join_all(offsets.iter().map(|offset| async move {
        let length = (disk.size() - offset).min(1 << 20);
        let data = done(disk.read(*offset, IoBuf::zeroed(length as usize)).await, "read");
        done(model.check_range(*offset, &data), "read of the whole disk");
    }))
    .await;
    let mut at = 0;
    while at < disk.size() {
        let runs = done(disk.block_status(at, disk.size() - at, 64).await, "block status");
        assert!(!runs.is_empty(), "isobath: no status at {at}");
        for run in runs {
            let end = at + run.length;
            assert!(run.length > 0 && end <= disk.size(), "isobath: status up to {end}");
            let reads_zero = || first_other_than(0, &model.read(at, run.length as usize)).is_none();
            assert!(!run.zero || reads_zero(), "isobath: status of {at}: {run:?} is not zero");
            at = end;
        }
    }
    assert!(at == disk.size(), "isobath: status up to {at}");
}

/// What Isobath's own check says of an image, and its lines.
pub(crate) fn checked(image: &Path) -> (CheckReport, Vec<String>) {
    let mut lines = Vec::new();
    let report = on_ring(check(&FileHost.any(), image, &CheckOptions::default(), &mut |event| {
        if let CheckEvent::Finding(line) = event {
            lines.push(line.to_owned());
        }
    }));
    (done(report, "check"), lines)
}

/// Brings what the journal of an image holds to its place.
pub(crate) fn recover(image: &Path) {
    let options = CheckOptions { repair: Repair::All, ..CheckOptions::default() };
    let report =
        done(on_ring(check(&FileHost.any(), image, &options, &mut |_| {})), "check -r all");
    assert!(report.is_clean() && report.leaks_fixed == 0, "{report:?}");
}

/// Makes an image.
pub(crate) fn make(image: &Path, new: &NewDisk) {
    done(on_ring(create(&FileHost.any(), image, new)), "create");
}

/// Changes the size of an image's disk.
pub(crate) fn resize(image: &Path, size: u64) {
    on_ring(async {
        let disk = open(image, OpenOptions::new().writable(true)).await;
        done(Box::pin(disk.resize(size, Preallocation::Off, true)).await, "resize");
        assert!(disk.size() == size, "isobath: resize: the size is {}", disk.size());
        done(disk.close().await, "close");
    });
}

/// Opens an image for writing and closes it: what a crash left is mended.
pub(crate) fn mend(image: &Path) {
    on_ring(async {
        let disk = open(image, OpenOptions::new().writable(true)).await;
        done(disk.close().await, "close");
    });
}
