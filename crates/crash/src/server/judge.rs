//! Checks of a server's chain after a crash.

use super::bitmaps;
use super::chronicle::{Frozen, FrozenContent};
use super::history::Happened;
use super::schedule::Schedule;
use crate::clock::SimClock;
use crate::executor::run;
use crate::guest::{Look, Oracle};
use crate::host::{Access, Conduct, Memories, SimHost};
use crate::image::{Kind as ImageKind, Start};
use crate::look::look;
use crate::mode::Mode;
use crate::record::{Files, Tick, file};
use crate::recover::{Case, Passed, SIZE_FOR_QEMU, Way, examine, recover, recover_wild, sound};
use isobath_disk::{Disk, LiveDisk, OpenOptions, Repair};
use isobath_jobs::pace::Pacing;
use isobath_jobs::{CommitOptions, JobOptions, StreamOptions};
use isobath_qcow2::{AutoclearFeatures, Header, IncompatibleFeatures};
use isobath_storage::StorageExt;
use rand::rngs::SmallRng;
use rand::{Rng, RngExt, SeedableRng};
use std::path::Path;
use std::sync::Arc;

/// How a server has ended.
#[derive(Clone, Debug)]
pub enum Death {
    /// The machine lost its power.
    Power,
    /// It was killed, and left this memory.
    Killed(Memories),
    /// It was killed, and its files were restored from an earlier copy. The memory is newer.
    RolledBack(Memories),
}

impl Death {
    /// The name, for totals.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Power => "power loss",
            Self::Killed(_) => "killed",
            Self::RolledBack(_) => "killed and rolled back",
        }
    }
}

/// A state, and how the server ended.
pub struct Crashed {
    /// The files' contents.
    pub files: Files,
    /// The moment that they belong to.
    pub tick: Tick,
    /// How the server ended.
    pub death: Death,
}

/// Checks one state, and recovers it in this way.
///
/// # Errors
/// What is wrong with it.
pub fn judge(
    happened: &Happened,
    mode: &Mode,
    state: &Crashed,
    way: Way,
    qemu: bool,
    seed: u64,
    passed: &mut Vec<Passed>,
) -> Result<(), String> {
    let mut rng = SmallRng::seed_from_u64(seed);
    let tick = state.tick;
    let Some(active) = happened.chronicle.chain_at(tick).first() else { return Ok(()) };
    let access = match &state.death {
        Death::Power => Access::None,
        Death::Killed(memories) | Death::RolledBack(memories) => Access::Left(memories.clone()),
    };
    let oracle = match &state.death {
        // All completed writes must be there.
        Death::Killed(_) => Oracle::of_kill(&happened.log, tick - 1),
        Death::Power | Death::RolledBack(_) => Oracle::of_crash(&happened.log, tick),
    };
    let host = Conduct { access, ..happened.host.clone() };
    let killed = !matches!(state.death, Death::Power);
    let header = happened.begin.header(&state.files, active);
    let mut new = happened.begin.start.new.clone();
    if let Some(header) = &header {
        new.cluster_size = 1 << header.cluster_bits;
        new.version = header.version;
        new.backing_file.clone_from(&header.backing_file);
        let has_file = header.incompatible.contains(IncompatibleFeatures::DATA_FILE);
        new.data_file = header.data_file().filter(|_| has_file).map(str::to_owned);
        new.data_file_raw = has_file && header.autoclear.contains(AutoclearFeatures::DATA_FILE_RAW);
    }
    let start = Start {
        files: state.files.clone(),
        image: active.clone(),
        content: Arc::clone(&happened.begin.start.content),
        new,
        snapshot: None,
        dirty: false,
    };
    let image = happened.begin.images.iter().find(|image| image.name == *active);
    let oracle = Arc::new(oracle);
    let case = Case {
        mode,
        start: &start,
        kind: ImageKind::Plain,
        atomic: happened.host.atomic,
        alone: start.new.data_file_raw.then(|| Arc::clone(&oracle)),
        oracle,
        lives: 2,
        leaked: image.map_or(0, |image| image.leaked),
        // QEMU knows nothing of the memory.
        qemu: qemu && !killed && start.size() < SIZE_FOR_QEMU,
        host,
        may_leak: killed || header.is_none(),
    };
    if happened.lies {
        return recover_wild(state.files.clone(), &case, rng.random());
    }
    run(below(happened, mode, state, &case, &mut rng))??;
    run(jobs_again(happened, mode, state, &case, &mut rng))??;
    if header.is_none() {
        // A raw image replaced the disk's.
        passed.push(Passed { way: Way::Open, qemu: false });
        return run(look_at_raw(happened, state, &case))?;
    }
    let mut files = state.files.clone();
    if let Death::Killed(memories) = &state.death
        && rng.random_bool(0.2)
    {
        files = run(denied(memories, mode, state, &case, &mut rng))??;
    }
    recover(files, &case, way, rng.random(), passed)
}

/// The disk is opened by a user who may not use the remaining memory, or not yet, or finds it damaged: the disk must
/// have the guaranteed contents, or not be opened and stay unchanged. Returns the files after that.
async fn denied(
    memories: &Memories,
    mode: &Mode,
    state: &Crashed,
    case: &Case<'_>,
    rng: &mut SmallRng,
) -> Result<Files, String> {
    let access = match rng.random_range(0..3) {
        0 => Access::Denied(memories.clone(), libc::EACCES),
        1 => Access::Denied(memories.clone(), libc::EWOULDBLOCK),
        _ => Access::Left(memories.damaged(rng)),
    };
    let conduct = Conduct { access, ..case.host.clone() };
    let host = SimHost::new(state.files.clone(), conduct);
    for (what, writable) in [("read", false), ("opened", true)] {
        let options = mode.options(writable, rng.random());
        let Ok(disk) = Disk::open(host.any(), &case.start.image, &options).await else {
            continue;
        };
        let look = look(&disk, &case.oracle.interest()).await;
        let look = look.map_err(|error| format!("{what} by somebody else, {error}"))?;
        let checked = case.oracle.check(&look);
        checked.map_err(|error| format!("{what} by somebody else, {error}"))?;
        if writable {
            return Ok(state.files.clone());
        }
    }
    Ok(host.files())
}

async fn read(
    happened: &Happened,
    files: &Files,
    image: &Path,
    case: &Case<'_>,
    interest: &[std::ops::Range<u64>],
) -> Result<Look, String> {
    let host = SimHost::new(files.clone(), Conduct { access: Access::None, ..case.host.clone() });
    let shown = |what: &str, error: isobath_disk::DiskError| {
        format!("{} could not be {what}: {error}", image.display())
    };
    let options = OpenOptions::new().format(happened.begin.format(image));
    let disk = Disk::open(host.any(), image, &options).await;
    let disk = disk.map_err(|error| shown("opened read-only", error))?;
    look(&disk, interest).await.map_err(|error| shown("read", error))
}

async fn look_at_raw(happened: &Happened, state: &Crashed, case: &Case<'_>) -> Result<(), String> {
    let (image, interest) = (&case.start.image, case.oracle.interest());
    let look = read(happened, &state.files, image, case, &interest).await?;
    case.oracle.check(&look)
}

/// Checks the images below the active one, and all bitmaps.
async fn below(
    happened: &Happened,
    mode: &Mode,
    state: &Crashed,
    case: &Case<'_>,
    rng: &mut SmallRng,
) -> Result<(), String> {
    let chain = happened.chronicle.chain_at(state.tick);
    let host = SimHost::new(state.files.clone(), case.host.clone());
    // One of them.
    let others = chain.get(1..).unwrap_or_default();
    if !others.is_empty() && rng.random_bool(0.5) {
        let image = &others[rng.random_range(0..others.len())];
        let header = happened.begin.header(&state.files, image);
        let dirty = |header: &Header| header.incompatible.contains(IncompatibleFeatures::DIRTY);
        if mode.consistent && header.is_some_and(|header| !dirty(&header)) {
            let (report, findings) = examine(&host, image, Repair::None).await?;
            sound(&format!("{}: after the crash", image.display()), &report, &findings)?;
        }
    }
    let frozen: Vec<_> = happened.chronicle.frozen_at(state.tick).collect();
    let is_above = |frozen: &&Frozen| happened.chronicle.is_above_commit(&frozen.name, state.tick);
    let above: Vec<_> = frozen.iter().copied().filter(is_above).collect();
    // One of all, and one whose data a commit has moved.
    for (often, frozen) in [(0.5, frozen), (1.0, above)] {
        if frozen.is_empty() || !rng.random_bool(often) {
            continue;
        }
        let frozen = frozen[rng.random_range(0..frozen.len())];
        let oracle = happened.chronicle.oracle_of(frozen, &happened.log, state.tick);
        let interest = oracle.as_ref().map(Oracle::interest).unwrap_or_default();
        let look = read(happened, &state.files, &frozen.name, case, &interest).await?;
        let same = match (&oracle, &frozen.held) {
            (Some(oracle), _) => oracle.check(&look),
            (None, FrozenContent::Bytes(content)) => match look.content.first_difference(content) {
                None => Ok(()),
                Some(at) => Err(format!("it has changed at byte {at}")),
            },
            (None, FrozenContent::Moment(..)) => Ok(()),
        };
        same.map_err(|error| format!("{}, below the disk: {error}", frozen.name.display()))?;
    }
    for image in &happened.begin.images {
        let Some(content) = file(&state.files, &image.name) else { continue };
        // The layers below it are a different matter: writing to them changes its contents.
        let below = happened.chronicle.is_undermined(&image.name, &image.needs, state.tick);
        let header = happened.begin.header(&state.files, &image.name);
        if below || header.is_none_or(|header| header.bitmaps().is_none()) {
            continue;
        }
        let name = image.name.display();
        let look = read(happened, &state.files, &image.name, case, &[]).await?;
        let rest = bitmaps::unchanged(content, &look.content, &image.content)
            .map_err(|error| format!("{name}: {error}"))?;
        let end = look.content.len().min(image.content.len());
        let changed = rest.and_then(|rest| rest.first_difference(&image.content));
        if let Some(at) = changed.filter(|at| *at < end) {
            return Err(format!("{name}: a bitmap says that byte {at} has not changed"));
        }
    }
    if rng.random_bool(0.15) {
        // Repairs everything, and checks that it reads as before.
        for (image, _) in &state.files {
            let header = happened.begin.header(&state.files, image);
            if header.is_some() && chain.contains(image) {
                let (report, findings) = examine(&host, image, Repair::All).await?;
                sound(&format!("{}: after check -r all", image.display()), &report, &findings)?;
            }
        }
        let (image, interest) = (&case.start.image, case.oracle.interest());
        let look = read(happened, &host.files(), image, case, &interest).await?;
        case.oracle.check(&look).map_err(|error| format!("all images repaired, {error}"))?;
    }
    Ok(())
}

/// Starts an interrupted job again, or another one, and checks that it completes.
async fn jobs_again(
    happened: &Happened,
    mode: &Mode,
    state: &Crashed,
    case: &Case<'_>,
    rng: &mut SmallRng,
) -> Result<(), String> {
    if !rng.random_bool(0.1) {
        return Ok(());
    }
    let clock = SimClock::default();
    let host = SimHost::new(state.files.clone(), case.host.clone());
    let format = happened.begin.format(&case.start.image);
    let options = mode.options(true, rng.random()).format(format);
    let opened = Disk::open(host.any(), &case.start.image, &options).await;
    let disk = opened.map_err(|error| format!("the disk was not opened: {error}"))?;
    let interest = case.oracle.interest();
    let shown = |error: isobath_disk::DiskError| format!("the disk could not be read: {error}");
    let found = look(&disk, &interest).await.map_err(shown)?;
    case.oracle.check(&found)?;
    let live = LiveDisk::new(disk, &options, Arc::new(clock.clone()));
    let depth = live.depth();
    if depth < 2 {
        return Ok(());
    }
    let mut job = JobOptions::new("again");
    job.pacing = Pacing::None;
    let layer = |at: usize| live.layers().get(at).map(|layer| layer.storage().id());
    let failed = |error: isobath_disk::DiskError| format!("a job after the crash: {error}");
    let mut tasks = Schedule::new(clock, rng.next_u64());
    let (job, what) = if depth > 2 && rng.random() {
        let top = rng.random_range(1..depth - 1);
        let base = rng.random_range(top + 1..depth);
        let options = CommitOptions {
            top: layer(top),
            base: layer(base),
            backing_file: None,
            ..CommitOptions::default()
        };
        let (job, run) = isobath_jobs::commit(&live, options, job).map_err(failed)?;
        tasks.add(async {
            run.await;
            Ok(())
        });
        (job, format!("a commit of layer {top} into {base} of {depth}"))
    } else {
        let top = rng.random_range(0..depth - 1);
        let base = rng.random_range(top + 1..=depth);
        let top_layer = layer(top).filter(|_| top > 0);
        let options =
            StreamOptions { top: top_layer, base: layer(base), ..StreamOptions::default() };
        let streamed = isobath_jobs::stream(&live, options, job);
        let (job, run) = streamed.map_err(failed)?;
        tasks.add(async {
            run.await;
            Ok(())
        });
        (job, format!("a stream into layer {top} from above {base} of {depth}"))
    };
    tasks.run(|| ())?;
    if let Some(error) = job.error().map(|error| error.to_string()) {
        // An image with an inconsistent bitmap cannot be lengthened.
        if error.contains("is inconsistent") {
            return Ok(());
        }
        if case.host.fixed && error.contains("No space left") {
            return Ok(());
        }
        return Err(format!("after the crash, {what} failed: {error}"));
    }
    let same = |look: Look, when: &str| match look.content.first_difference(&found.content) {
        None => Ok(()),
        Some(at) => Err(format!("after the crash, {what}: {when}, byte {at} is another")),
    };
    same(look(&*live, &interest).await.map_err(shown)?, "while it is open")?;
    live.close().await.map_err(|error| format!("after the crash, {what}: closing: {error}"))?;
    drop(live);
    same(read(happened, &host.files(), &case.start.image, case, &interest).await?, "closed")
}
