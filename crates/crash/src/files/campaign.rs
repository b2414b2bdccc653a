//! Recording a workload, and many crashes of it.

use super::guest;
use super::judge::{Before, Judge, Promises, Way};
use super::loss::Losses;
use super::serve;
use super::trace;
use super::workload::Workload;
use crate::content::Content;
use crate::record::Record;
use crate::state::{Fate, Replay};
use isobath_disk::{MetadataMode, OpenOptions};
use isobath_storage_test::recorder::{Change, Entry};
use isobath_testkit::qemu;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use std::collections::HashSet;
use std::fs;
use std::io;
use std::sync::Mutex;
use std::thread;

/// What to do.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// The workload.
    pub workload: Workload,
    /// The metadata mode.
    pub mode: MetadataMode,
    /// Crash states for one run of the workload.
    pub states: usize,
    /// The seed of requests and states.
    pub seed: u64,
    /// How many states are checked concurrently.
    pub threads: usize,
    /// Makes every other sync of the host do nothing, to verify that this is detected.
    pub sabotage: bool,
}

/// The results.
#[derive(Clone, Debug, Default)]
pub struct Totals {
    /// States that passed.
    pub states: u64,
    /// Of these, states that QEMU refused before they were recovered.
    pub refused: u64,
    /// States with leaked clusters before they were recovered.
    pub leaking: u64,
    /// States whose recovered disk QEMU read, too.
    pub read_by_qemu: u64,
    /// States that lost something.
    pub losses: Losses,
    /// Changes of the files.
    pub changes: u64,
    /// Syncs of the files.
    pub syncs: u64,
    /// Digests of the choices made, to count different states.
    pub different: HashSet<u64>,
}

impl Totals {
    /// Adds another's.
    pub fn add(&mut self, other: &Self) {
        self.states += other.states;
        self.refused += other.refused;
        self.leaking += other.leaking;
        self.read_by_qemu += other.read_by_qemu;
        self.losses += other.losses;
        self.changes += other.changes;
        self.syncs += other.syncs;
        self.different.extend(&other.different);
    }
}

/// Runs a workload and crashes it.
///
/// # Errors
/// Describes the failure, and where the failing image is.
pub fn run(settings: &Settings) -> Result<Totals, String> {
    let named = |error: String| {
        format!(
            "{} on real files, --metadata {}, seed {:#x}: {error}",
            settings.workload.name(),
            settings.mode.name(),
            settings.seed
        )
    };
    run_workload(settings).map_err(named)
}

fn run_workload(settings: &Settings) -> Result<Totals, String> {
    let directory = tempfile::tempdir().map_err(|error| format!("no directory: {error}"))?;
    let image = directory.path().join("disk.qcow2");
    settings.workload.make_image(&image)?;
    let read = || fs::read(&image).map_err(|error| format!("the image: {error}"));
    let start = read()?;
    let mut options = OpenOptions::new().writable(true).metadata(settings.mode);
    options.journal_size = journal_size(settings.seed);
    // Either zones fill up, or the disk fits into one.
    options.zone_size = settings.seed.is_multiple_of(2).then_some(1 << 20);
    let (entries, promises) =
        serve::record(&image, &options, |frontend| match settings.workload {
            Workload::Guest => guest::run(frontend).map(Promises::Files),
            workload => workload.run(frontend, settings.seed).map(Promises::Sectors),
        })?;
    let record = trace::record(&entries, &image, &start)?;
    closed_well(&record, &entries, &read()?)?;
    if qemu::check(&image).code() != 0 {
        return Err(format!("closed, {}", qemu::check(&image).report()));
    }
    let record = if settings.sabotage { sabotaged(record) } else { record };

    let mut rng = SmallRng::seed_from_u64(settings.seed);
    let mut moments: Vec<(usize, u64)> =
        (0..settings.states).map(|_| (trace::moment(&entries, &mut rng), rng.random())).collect();
    moments.sort_unstable();
    let totals = Mutex::new(Totals::default());
    let threads = settings.threads.max(1);
    let crash = |thread: usize| {
        let judge = Judge::new(settings.mode, &promises)?;
        let mut replay = Replay::new(&record);
        for (position, seed) in moments.iter().skip(thread).step_by(threads) {
            replay.advance(trace::crash(*position));
            let more = one(settings, &judge, &replay, *position, *seed)?;
            totals.lock().unwrap_or_else(std::sync::PoisonError::into_inner).add(&more);
        }
        Ok::<_, String>(())
    };
    thread::scope(|scope| {
        let crash = &crash;
        let running: Vec<_> =
            (0..threads).map(|thread| scope.spawn(move || crash(thread))).collect();
        for thread in running {
            match thread.join() {
                Ok(done) => done?,
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        Ok::<_, String>(())
    })?;
    let mut totals = totals.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    let syncs = entries.iter().filter(|entry| matches!(entry.change, Change::Flush { .. })).count();
    totals.syncs = syncs as u64;
    totals.changes = (entries.len() - syncs) as u64;
    Ok(totals)
}

/// Size of the journal: that of a small disk, or enough for data of a large one.
fn journal_size(seed: u64) -> Option<u64> {
    match seed % 3 {
        0 => None,
        size => Some(size << 20),
    }
}

/// Checks that the record leads to the file's contents.
fn closed_well(record: &Record, entries: &[Entry], file: &[u8]) -> Result<(), String> {
    let mut replay = Replay::new(record);
    replay.advance(trace::crash(entries.len()));
    let whole = replay.build(&Fate::ALL_KEPT, 512, &mut SmallRng::seed_from_u64(0));
    let matches = whole.files.first().is_some_and(|(_, content)| **content == Content::from(file));
    if matches { Ok(()) } else { Err("what was recorded does not lead to the file".into()) }
}

/// The record of a host whose every other sync does nothing.
fn sabotaged(mut record: Record) -> Record {
    let mut number = 0;
    record.flushes.retain(|_| {
        number += 1;
        number % 2 == 0
    });
    record
}

/// Builds one state, and checks it.
fn one(
    settings: &Settings,
    judge: &Judge<'_>,
    replay: &Replay<'_>,
    position: usize,
    seed: u64,
) -> Result<Totals, String> {
    let mut rng = SmallRng::seed_from_u64(seed);
    let fate = Fate::random(replay.pending(), &mut rng);
    let grain = if rng.random_bool(0.7) { 512 } else { 4096 };
    let state = replay.build(&fate, grain, &mut rng);
    let way = if rng.random() { Way::Open } else { Way::Repair };
    let by_qemu = rng.random_range(0..10) == 0;
    let whole = replay.build(&Fate::ALL_KEPT, grain, &mut rng);
    let (Some((_, bytes)), Some((_, whole))) = (state.files.first(), whole.files.first()) else {
        return Err("there is no image".into());
    };
    let (bytes, whole) = (&bytes.to_vec()[..], &whole.to_vec()[..]);
    match judge.judge(bytes, position, way, by_qemu) {
        Ok(before) => Ok(Totals {
            states: 1,
            refused: u64::from(before == Before::Refused),
            leaking: u64::from(before == Before::Leaking),
            read_by_qemu: u64::from(by_qemu),
            losses: Losses::of(bytes, whole),
            // A choice among the changes of this run of the workload.
            different: HashSet::from([state.print ^ settings.seed.rotate_left(32)]),
            ..Totals::default()
        }),
        Err(error) => {
            let kept = if settings.sabotage { Ok("not kept".into()) } else { keep(bytes, seed) };
            let kept = kept.unwrap_or_else(|error| format!("not kept: {error}"));
            Err(format!(
                "a crash after entry {position} of the record, {} in grains of {grain} bytes, {} \
                 changes pending, recovered by {way:?}; the image it left is {kept}\n{error}\n{}",
                fate.name(),
                replay.pending(),
                replay.describe().join("\n")
            ))
        }
    }
}

/// Keeps an image for inspection.
fn keep(bytes: &[u8], seed: u64) -> io::Result<String> {
    let path = std::env::temp_dir().join(format!("isobath-crash-{seed:016x}.qcow2"));
    fs::write(&path, bytes)?;
    Ok(path.display().to_string())
}
