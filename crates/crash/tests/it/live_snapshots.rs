//! Crashes while snapshots of a disk in use are made: the chain up to the overlay that was asked for
//! last, and the one without it, hold what was promised, and so does every snapshot.

use futures_util::future::join_all;
use isobath_crash::campaign::ATOMIC;
use isobath_crash::executor::{pause, run};
use isobath_crash::guest::{Before, Log, Oracle};
use isobath_crash::host::{Conduct, Faults, FlushFault, SimHost};
use isobath_crash::image::{self, IMAGE, Kind, Start};
use isobath_crash::mode::{MODES, Mode};
use isobath_crash::plan::{self, Request};
use isobath_crash::record::{Files, NEVER, Tick};
use isobath_crash::state::{Fate, Replay, random_grain};
use isobath_crash::value::{Sort, Value};
use isobath_disk::jobs::clock::SystemClock;
use isobath_disk::{
    BlockDevice, CheckEvent, CheckOptions, Disk, LiveDisk, NewDisk, Overlay, Repair, ZeroFlags,
    check, create,
};
use isobath_storage::memory::MemoryHost;
use isobath_storage::{IoBuf, Locking};
use isobath_testkit::seed::Seed;
use rand::rngs::SmallRng;
use rand::{Rng, RngExt, SeedableRng};
use std::cell::RefCell;
use std::path::Path;
use std::sync::Arc;

/// Histories in each mode.
const HISTORIES: u64 = 25;
const KINDS: [Kind; 7] = [
    Kind::Plain,
    Kind::Overlay,
    Kind::Chain,
    Kind::Subclusters,
    Kind::Refcounts,
    Kind::Flushes,
    Kind::Embedded,
];
/// Snapshots of each disk.
const SNAPSHOTS: usize = 3;

/// When a snapshot was asked for, and when it was done.
type Moments = (Tick, Tick);

/// The active images, in turn.
fn name(number: usize) -> String {
    if number == 0 { IMAGE.into() } else { format!("overlay{number}.qcow2") }
}

/// The files to begin with: the disk's, and empty overlays.
async fn files(start: &Start) -> Files {
    let host = MemoryHost::new();
    for (name, bytes) in &start.files {
        host.insert(name, bytes);
    }
    for number in 1..=SNAPSHOTS {
        let new = NewDisk {
            size: Some(start.size()),
            cluster_size: start.new.cluster_size,
            extended_l2: start.new.extended_l2,
            backing_file: Some(name(number - 1)),
            backing_format: Some("qcow2".into()),
            ..NewDisk::default()
        };
        create(&host, Path::new(&name(number)), &new).await.unwrap();
    }
    let names = host.names().into_iter();
    names.map(|name| (name.clone(), Arc::new(host.contents(&name).unwrap()))).collect()
}

/// A guest of a disk whose chain changes.
struct Guest<'a> {
    host: &'a SimHost,
    start: &'a Start,
    disk: Arc<LiveDisk<SimHost>>,
    log: &'a RefCell<Log>,
}

impl Guest<'_> {
    fn begin(&self, offset: u64, length: u64, value: Value, name: &'static str) -> usize {
        let began = self.host.tick();
        self.log.borrow_mut().begin(offset..offset + length, value, began, name)
    }

    fn end(&self, number: usize) {
        let ended = self.host.tick();
        self.log.borrow_mut().end(number, ended, true);
    }

    async fn request(&self, request: Request, pattern: u32) {
        match request {
            Request::Write(offset, length, _) | Request::Compressed(offset, length) => {
                let sort = if let Request::Write(.., sort) = request { sort } else { Sort::Plain };
                // Nothing of the files is looked at here.
                let value = match sort {
                    Sort::Zeroes => Value::Zero,
                    Sort::Hostile | Sort::Copied => Value::Pattern(Sort::Mixed, pattern),
                    sort => Value::Pattern(sort, pattern),
                };
                let buf = IoBuf::from(value.bytes(offset..offset + length));
                let number = self.begin(offset, length, value, "a write");
                drop(self.disk.write(offset, buf).await.unwrap());
                self.end(number);
            }
            Request::Zero(offset, length, may_unmap) => {
                let number = self.begin(offset, length, Value::Zero, "a zero-write");
                let flags = ZeroFlags { may_unmap, only_fast: false };
                self.disk.write_zeroes(offset, length, flags).await.unwrap();
                self.end(number);
            }
            Request::Discard(offset, length) => {
                // Whole clusters, and what the disk has of its last one.
                let cluster = self.start.new.cluster_size;
                let first = offset.next_multiple_of(cluster);
                let end = offset + length;
                let last = if end == self.start.size() { end } else { end / cluster * cluster };
                let number = (first < last)
                    .then(|| self.begin(first, last - first, Value::Zero, "a discard"));
                self.disk.discard(offset, length).await.unwrap();
                if let Some(number) = number {
                    self.end(number);
                }
            }
            Request::Read(offset, length) => {
                let _ = self.disk.read(offset, IoBuf::zeroed(length as usize)).await.unwrap();
            }
            Request::Tidy => {}
            Request::Flush => {
                let began = self.host.tick();
                self.disk.flush().await.unwrap();
                self.log.borrow_mut().flushed.push((began, self.host.tick()));
            }
        }
    }

    /// Requests of several tasks, and snapshots beside them.
    async fn work(&self, kind: Kind, seed: u64, snapshots: &RefCell<Vec<Moments>>) {
        let shape = plan::Disk::of(self.start);
        let tasks = (0..3_u32).map(|task| async move {
            let mut rng = SmallRng::seed_from_u64(seed ^ u64::from(task));
            for number in 0..18 {
                pause(rng.random_range(0..12)).await;
                let pattern = 10_000 + task * 100 + number;
                self.request(shape.request(kind, &mut rng), pattern).await;
            }
        });
        let changing = async {
            let mut rng = SmallRng::seed_from_u64(!seed);
            for number in 1..=SNAPSHOTS {
                pause(rng.random_range(0..150)).await;
                let began = self.host.tick();
                snapshots.borrow_mut().push((began, NEVER));
                let overlay = Overlay::Existing(name(number).into());
                self.disk.snapshot(&overlay).await.unwrap();
                snapshots.borrow_mut()[number - 1].1 = self.host.tick();
            }
        };
        futures_util::join!(join_all(tasks), changing);
        if seed & 1 > 0 {
            let began = self.host.tick();
            self.disk.close().await.unwrap();
            self.log.borrow_mut().flushed.push((began, self.host.tick()));
        }
    }
}

/// The disk with an active image, read as it is left.
async fn read(files: &Files, image: &str, mode: &Mode, writable: bool) -> Result<Vec<u8>, String> {
    let host = SimHost::new(files.clone(), Conduct::default());
    let disk = Disk::open(host, Path::new(image), &mode.options(writable, 1)).await;
    let disk = disk.map_err(|error| format!("{image} was not opened: {error}"))?;
    let bytes = disk.read(0, IoBuf::zeroed(disk.size() as usize)).await;
    let bytes = bytes.map_err(|error| format!("{image} could not be read: {error}"))?;
    Ok(bytes.to_vec())
}

/// Checks an image, and repairs it.
async fn recover(host: &SimHost, image: &str, mode: &Mode) -> Result<(), String> {
    let mut events = |_: CheckEvent<'_>| {};
    for repair in [Repair::None, Repair::All, Repair::None] {
        let options =
            CheckOptions { repair, locking: Locking::Unlocked, ..CheckOptions::default() };
        let report = check(host, Path::new(image), &options, &mut events).await;
        let report = report.map_err(|error| format!("{image}, {repair:?}: {error}"))?;
        if mode.consistent && (report.corruptions > 0 || report.check_errors > 0) {
            return Err(format!("{image}, {repair:?}: {report:?}"));
        }
    }
    Ok(())
}

/// What an image held when it became a backing file, or may hold where that was not confirmed.
fn oracle_of_snapshot(log: &Log, (began, ended): Moments, now: Tick) -> Oracle {
    let mut log = log.clone();
    log.flushed.retain(|(_, flushed)| *flushed < began);
    if ended < now {
        log.flushed.push((began, ended));
    }
    Oracle::of_crash(&Arc::new(log), now.min(ended.saturating_add(1)))
}

/// What was judged.
#[derive(Debug, Default)]
struct Judged {
    states: u64,
    amid: u64,
}

/// Judges what a crash at `now` has left.
async fn judge(
    files: &Files,
    mode: &Mode,
    log: &Arc<Log>,
    snapshots: &[Moments],
    now: Tick,
) -> Result<(), String> {
    let begun = snapshots.iter().take_while(|(began, _)| *began < now).count();
    let disk = Oracle::of_crash(log, now);
    let top = name(begun);
    let found = read(files, &top, mode, true).await?;
    disk.check(&found).map_err(|error| format!("{top}: {error}"))?;
    let only_read = read(files, &top, mode, false).await?;
    if only_read != found {
        return Err(format!("{top} shows something else read-only"));
    }
    for (number, moments) in snapshots[..begun].iter().enumerate() {
        let image = name(number);
        let found = read(files, &image, mode, false).await?;
        let oracle = oracle_of_snapshot(log, *moments, now);
        oracle.check(&found).map_err(|error| format!("{image} below {top}: {error}"))?;
    }
    let host = SimHost::new(files.clone(), Conduct::default());
    for number in 0..=begun {
        recover(&host, &name(number), mode).await?;
    }
    if read(&host.files(), &top, mode, false).await? != found {
        return Err(format!("{top} shows something else after a repair"));
    }
    Ok(())
}

/// A history, and crashes at some of its moments. The flushes from `lie` on do nothing.
fn history(mode: Mode, seed: u64, lie: Option<u64>, judged: &mut Judged) -> Result<(), String> {
    let mut rng = SmallRng::seed_from_u64(seed);
    let kind = KINDS[rng.random_range(0..KINDS.len())];
    let start = image::make(kind, false, &mut rng)?;
    let conduct = Conduct {
        seed: rng.random(),
        delay: rng.random_range(0..6),
        record: true,
        discarded: [Some(0), None, Some(0xdd)][rng.random_range(0..3)],
        atomic: ATOMIC[rng.random_range(0..ATOMIC.len())],
        faults: Faults {
            flush: lie.map(|number| (number, FlushFault::Lies)),
            flushes_failing: u64::MAX,
            ..Faults::default()
        },
    };
    let atomic = conduct.atomic;
    let host = SimHost::new(run(files(&start))?, conduct);
    let log = RefCell::new(Log::new(Before::Bytes(Arc::clone(&start.content))));
    let snapshots = RefCell::new(Vec::new());
    let options = mode.options(true, rng.random());
    run(async {
        let disk = Disk::open(host.clone(), Path::new(IMAGE), &options).await;
        let disk = disk.map_err(|error| error.to_string())?;
        let disk = LiveDisk::new(disk, &options, Arc::new(SystemClock::default()));
        let guest = Guest { host: &host, start: &start, disk, log: &log };
        guest.work(kind, rng.next_u64(), &snapshots).await;
        Ok::<_, String>(())
    })??;
    let (log, snapshots) = (Arc::new(log.into_inner()), snapshots.into_inner());
    let record = host.record();
    let mut replay = Replay::new(&record);
    let mut ticks: Vec<Tick> = (0..20).map(|_| rng.random_range(1..=record.end)).collect();
    for (began, ended) in &snapshots {
        ticks.extend((0..8).map(|_| rng.random_range(*began..=*ended + 1).min(record.end)));
    }
    ticks.sort_unstable();
    ticks.dedup();
    for tick in ticks {
        replay.advance(tick);
        let fate = Fate::random(replay.pending(), &mut rng);
        let grain = random_grain(atomic, &mut rng);
        let state = replay.build(&fate, grain, &mut rng);
        judged.states += 1;
        judged.amid +=
            u64::from(snapshots.iter().any(|(began, ended)| *began < tick && tick <= *ended));
        run(judge(&state.files, &mode, &log, &snapshots, tick))?.map_err(|error| {
            format!(
                "{kind}, {}; seed {seed:#x}, {}; a crash at {tick}, snapshots {snapshots:?}: \
                 {error}",
                start.describe(),
                mode.name()
            )
        })?;
    }
    Ok(())
}

#[test]
fn a_crash_leaves_the_old_chain_and_the_new_one() {
    let seed = Seed::new();
    let mut seeds = seed.rng();
    for mode in MODES {
        let mut judged = Judged::default();
        for _ in 0..HISTORIES {
            history(*mode, seeds.random(), None, &mut judged)
                .unwrap_or_else(|error| panic!("{error}"));
        }
        println!("{}: {judged:?}", mode.name());
        assert!(judged.amid > HISTORIES);
    }
}

#[test]
fn flushes_that_do_nothing_are_found() {
    let mut judged = Judged::default();
    for mode in MODES {
        let found = (0..20).any(|seed| history(*mode, seed, Some(3), &mut judged).is_err());
        assert!(found, "{}", mode.name());
    }
}
