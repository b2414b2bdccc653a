//! Commands on images that nobody else uses, crashed at any moment: internal snapshots are taken, applied and deleted,
//! and an image gets another backing file.
//!
//! There are no other requests, so what a disk may hold is one of few contents: that before the command, and that after
//! it.

use crate::content::Content;
use crate::executor::run;
use crate::host::{Conduct, SimHost};
use crate::image::{self, IMAGE, Kept, Kind, show_snapshot};
use crate::look::look;
use crate::outcome::{ATOMIC, Failure, Settings, Totals, device, guarded};
use crate::record::Files;
use crate::recover::{examine, has_bit, header_of, sound};
use crate::state::{Fate, Replay, random_grain};
use isobath_disk::sabotage::Sabotage;
use isobath_disk::{
    Disk, DiskError, OpenOptions, Rebase, Repair, apply_snapshot, create_snapshot, delete_snapshot,
};
use isobath_image::snapshots::read_snapshots;
use isobath_qcow2::IncompatibleFeatures;
use isobath_storage::{Host, OpenMode, Storage};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// The images that commands are run on.
const IMAGES: [Kind; 7] = [
    Kind::Plain,
    Kind::Overlay,
    Kind::Chain,
    Kind::Snapshot,
    Kind::Compressed,
    Kind::Subclusters,
    Kind::Refcounts,
];

/// A command.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Deed {
    Take(String),
    Apply(String),
    Delete(String),
    /// On another image, or on none; what is copied may be compressed.
    Rebase(Option<String>, bool),
}

impl Deed {
    const fn name(&self) -> &'static str {
        match self {
            Self::Take(_) => "snapshot -c",
            Self::Apply(_) => "snapshot -a",
            Self::Delete(_) => "snapshot -d",
            Self::Rebase(..) => "rebase",
        }
    }

    async fn run(&self, host: &SimHost) -> Result<(), DiskError> {
        let (image, options) = (Path::new(IMAGE), OpenOptions::new());
        match self {
            Self::Take(name) => {
                create_snapshot(host, image, &options, name, Duration::from_secs(1)).await
            }
            Self::Apply(name) => apply_snapshot(host, image, &options, name).await,
            Self::Delete(name) => delete_snapshot(host, image, &options, name).await,
            Self::Rebase(onto, compressed) => {
                let disk = Disk::open(host.clone(), image, &options.writable(true)).await?;
                let disk = Arc::new(disk);
                let below = match onto {
                    None => None,
                    Some(name) => {
                        let options = OpenOptions::new();
                        Some(Arc::new(Disk::open(host.clone(), Path::new(name), &options).await?))
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
}

/// What the disk and its snapshots are.
#[derive(Clone, Debug, PartialEq)]
struct Truth {
    disk: Arc<Content>,
    snapshots: Vec<(String, Arc<Content>)>,
}

impl Truth {
    fn snapshot(&self, name: &str) -> Option<&Arc<Content>> {
        self.snapshots.iter().find(|(other, _)| other == name).map(|(_, content)| content)
    }

    /// After a command.
    fn after(&self, deed: &Deed) -> Self {
        let mut after = self.clone();
        match deed {
            Deed::Take(name) => after.snapshots.push((name.clone(), Arc::clone(&self.disk))),
            Deed::Apply(name) => {
                after.disk = self.snapshot(name).map_or_else(Arc::default, Arc::clone);
            }
            Deed::Delete(name) => after.snapshots.retain(|(other, _)| other != name),
            Deed::Rebase(..) => {}
        }
        after
    }

    /// As files have it.
    async fn read(files: &Files) -> Result<Self, String> {
        let disk = read_disk(files).await?;
        let host = SimHost::new(files.clone(), Conduct::default());
        let found = async {
            let file = host.open(Path::new(IMAGE), OpenMode::default()).await?;
            let length = file.len().await?;
            let content = host.contents(IMAGE);
            let Some(header) = header_of(&content) else { return Ok(Vec::new()) };
            read_snapshots(&file, Path::new(IMAGE), &header, length).await
        };
        let found = found.await.map_err(|error| format!("the snapshot table: {error}"))?;
        let mut snapshots = Vec::new();
        for snapshot in found {
            let kept = Kept {
                l1_offset: snapshot.l1_table_offset.get(),
                l1_size: snapshot.l1_size,
                content: Arc::new(Content::zeroes(snapshot.disk_size.unwrap_or(disk.len()))),
            };
            let name = snapshot.name_text();
            let content = read_disk(&show_snapshot(files, Path::new(IMAGE), &kept)).await;
            snapshots.push((name.clone(), content.map_err(|error| format!("{name}: {error}"))?));
        }
        Ok(Self { disk, snapshots })
    }
}

async fn read_disk(files: &Files) -> Result<Arc<Content>, String> {
    let host = SimHost::new(files.clone(), Conduct::default());
    let disk = Disk::open(host, Path::new(IMAGE), &OpenOptions::new()).await;
    let disk = disk.map_err(|error| format!("it could not be opened read-only: {error}"))?;
    let read = look(&disk, &[]).await;
    Ok(Arc::new(read.map_err(|error| format!("it could not be read: {error}"))?.content))
}

/// Runs one history with all its crashes.
///
/// # Errors
/// What is wrong.
pub fn run_offline(settings: &Settings, seed: u64) -> Result<Totals, Box<Failure>> {
    guarded(seed, |totals, story| history(settings, seed, totals, story))
}

fn history(
    settings: &Settings,
    seed: u64,
    totals: &mut Totals,
    story: &mut Vec<String>,
) -> Result<(), String> {
    let mut rng = SmallRng::seed_from_u64(seed);
    let kind = settings.kind.unwrap_or(IMAGES[rng.random_range(0..IMAGES.len())]);
    let start = image::make(kind, rng.random(), &mut rng)?;
    story.push(format!("{kind}: {}", start.describe()));
    let host = SimHost::new(start.files.clone(), Conduct::default());
    let _broken = settings.defect.map(Sabotage::begin);
    // What there is before: some snapshots, with writes after each.
    let mut made = 0;
    for number in 0..rng.random_range(0..3) {
        let deed = Deed::Take(format!("snapshot{number}"));
        if !run(done(&deed, &host))?? {
            return Ok(());
        }
        run(image::fill(&host, IMAGE, 100 + 10 * number, start.compresses(), &mut rng))?
            .map_err(|error| error.to_string())?;
        made += 1;
    }
    let mut before = run(Truth::read(&host.files()))??;
    let deeds = rng.random_range(1..=2);
    for number in 0..deeds {
        let deed = choose(&before, &start.files, made + number, &mut rng);
        story.push(format!("{deed:?}"));
        let after = before.after(&deed);
        let files = host.files();
        let conduct = Conduct {
            seed: rng.random(),
            delay: rng.random_range(0..4),
            record: true,
            discarded: [Some(0), None, Some(0xdd)][rng.random_range(0..3)],
            atomic: ATOMIC[rng.random_range(0..2)],
            ..Conduct::default()
        };
        let atomic = conduct.atomic;
        let at_work = SimHost::new(files, conduct);
        if !run(done(&deed, &at_work))?? {
            break;
        }
        let record = at_work.record();
        let mut replay = Replay::new(&record);
        for tick in moments(record.end, &mut rng) {
            replay.advance(tick);
            for _ in 0..=replay.pending().min(3) {
                let fate = Fate::random(replay.pending(), &mut rng);
                let grain = random_grain(atomic, &mut rng);
                let state = replay.build(&fate, grain, &mut rng);
                let judged = run(judge(&state.files, &deed, &before, &after, rng.random()))?;
                if let Err(error) = judged {
                    if settings.trace {
                        story.extend(record.tell());
                    }
                    story.push(format!("{fate:?} in grains of {grain} bytes, of these changes:"));
                    story.extend(replay.describe());
                    let fate = fate.name();
                    return Err(format!("{}, crash at {tick}, {fate}: {error}", deed.name()));
                }
                totals.states += 1;
                totals.count("command", deed.name(), 1);
                totals.count("history", kind.name(), 1);
                totals.count("fate", fate.name(), 1);
                totals.count("device", device(atomic), 1);
            }
        }
        let left = at_work.files();
        let found = run(Truth::read(&left))??;
        differ("after the command", &found, &after)?;
        for (name, content) in left {
            host.insert(name, (*content).clone());
        }
        before = after;
    }
    totals.histories += 1;
    Ok(())
}

/// Runs a command; `false` if refcounts are too narrow for it, and it has changed nothing.
async fn done(deed: &Deed, host: &SimHost) -> Result<bool, String> {
    let before = Truth::read(&host.files()).await?;
    match deed.run(host).await {
        Ok(()) => Ok(true),
        Err(error) if error.to_string().contains("more references than refcounts of") => {
            differ("refused", &Truth::read(&host.files()).await?, &before)?;
            let (report, findings) = examine(host, Path::new(IMAGE), Repair::None).await?;
            sound("refused,", &report, &findings)?;
            Ok(false)
        }
        Err(error) => Err(format!("{} failed: {error}", deed.name())),
    }
}

fn moments(end: u64, rng: &mut SmallRng) -> Vec<u64> {
    let mut ticks: Vec<u64> =
        (0..rng.random_range(15..40)).map(|_| rng.random_range(1..=end)).collect();
    ticks.push(end);
    ticks.sort_unstable();
    ticks.dedup();
    ticks
}

fn choose(truth: &Truth, files: &Files, number: u32, rng: &mut SmallRng) -> Deed {
    let any = |rng: &mut SmallRng| {
        let count = truth.snapshots.len();
        (count > 0).then(|| truth.snapshots[rng.random_range(0..count)].0.clone())
    };
    let below: Vec<String> = files
        .iter()
        .map(|(name, _)| name.display().to_string())
        .filter(|name| name != IMAGE)
        .collect();
    match (rng.random_range(0..8), any(rng)) {
        (0..2, Some(name)) => Deed::Apply(name),
        (2, Some(name)) => Deed::Delete(name),
        // A snapshot shows the backing file too, and would show another one.
        (3..6, None) if !below.is_empty() => {
            let onto =
                rng.random_bool(0.7).then(|| below[rng.random_range(0..below.len())].clone());
            Deed::Rebase(onto, rng.random_bool(0.2))
        }
        _ => Deed::Take(format!("snapshot{number}")),
    }
}

fn differ(when: &str, found: &Truth, wanted: &Truth) -> Result<(), String> {
    if let Some(at) = found.disk.first_difference(&wanted.disk) {
        return Err(format!("{when}, the disk differs at byte {at}"));
    }
    let names = |truth: &Truth| truth.snapshots.iter().map(|(name, _)| name.clone()).collect();
    let (found_names, wanted_names): (Vec<_>, Vec<_>) = (names(found), names(wanted));
    if found_names != wanted_names {
        return Err(format!("{when}, there are {found_names:?} and not {wanted_names:?}"));
    }
    for ((name, found), (_, wanted)) in found.snapshots.iter().zip(&wanted.snapshots) {
        if let Some(at) = found.first_difference(wanted) {
            return Err(format!("{when}, the snapshot {name} differs at byte {at}"));
        }
    }
    Ok(())
}

/// Looks at what a crash has left, recovers it, and runs the command again.
async fn judge(
    files: &Files,
    deed: &Deed,
    before: &Truth,
    after: &Truth,
    seed: u64,
) -> Result<(), String> {
    let mut rng = SmallRng::seed_from_u64(seed);
    let image = Path::new(IMAGE);
    let found = Truth::read(files).await?;
    let done = differ("after the crash", &found, after).is_ok();
    if !done {
        differ("after the crash", &found, before)?;
    }
    let host = SimHost::new(files.clone(), Conduct::default());
    if !has_bit(files, image, IncompatibleFeatures::DIRTY) {
        let (report, findings) = examine(&host, image, Repair::None).await?;
        sound("after the crash", &report, &findings)?;
    }
    let failed = |error: DiskError| format!("after the crash: {error}");
    if rng.random() {
        let options = OpenOptions::new().writable(true);
        let disk = Disk::open(host.clone(), image, &options).await.map_err(failed)?;
        disk.close().await.map_err(failed)?;
        drop(disk);
    } else {
        let (report, findings) = examine(&host, image, Repair::All).await?;
        sound("after check -r all", &report, &findings)?;
    }
    let same = if done { after } else { before };
    differ("after recovery", &Truth::read(&host.files()).await?, same)?;
    if !done {
        deed.run(&host).await.map_err(|error| format!("run again, {}: {error}", deed.name()))?;
        differ("run again", &Truth::read(&host.files()).await?, after)?;
    }
    examine(&host, image, Repair::Leaks).await?;
    let (report, findings) = examine(&host, image, Repair::None).await?;
    if !report.is_clean() {
        return Err(format!("check -r leaks does not mend it:\n    {}", findings.join("\n    ")));
    }
    differ("in the end", &Truth::read(&host.files()).await?, after)
}
