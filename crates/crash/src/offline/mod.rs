//! Commands on images that nobody else uses, crashed at any moment: internal snapshots are taken, applied and deleted,
//! persistent bitmaps are added, changed and removed, options are amended, an image gets another backing file, and is
//! committed or merged with those below.
//!
//! There are no other requests, so what a disk may hold is one of few contents: that before the command, and that after
//! it.

mod deed;
mod truth;

use self::deed::{Deed, choose};
use self::truth::{Truth, differ};
use crate::executor::run;
use crate::host::{Conduct, SimHost};
use crate::image::{self, IMAGE, Kind};
use crate::outcome::{ATOMIC, Failure, Settings, Totals, device, guarded};
use crate::record::Files;
use crate::recover::{examine, has_bit, header_of, sound};
use crate::state::{Fate, Replay, random_grain};
use isobath_disk::sabotage::Sabotage;
use isobath_disk::{Disk, DiskError, OpenOptions, Repair};
use isobath_qcow2::IncompatibleFeatures;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use std::path::{Path, PathBuf};

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

/// Refusals that the state of an image justifies.
const REFUSALS: [&str; 9] = [
    "more references than refcounts of",
    "Cannot downgrade an image",
    "prevent downgrade of image",
    "Cannot decrease refcount entry width",
    "compat=0.10 requires refcount_bits=16",
    "require compatibility level 1.1",
    "Lazy refcounts only supported with compatibility level 1.1",
    "Device has active dirty bitmaps",
    "Cannot store dirty bitmaps in qcow2 v2 files",
];

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
    // What there is before: some snapshots, with writes after each. Commands that replace the backing file, or write to
    // it, need an image without any.
    let mut made = 0;
    let snapshots = start.new.backing_file.is_none() || rng.random_bool(0.3);
    for number in 0..if snapshots { rng.random_range(0..3) } else { 0 } {
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
        let deed = choose(&before, &host.files(), made + number, &mut rng);
        story.push(format!("{deed:?}"));
        before.may_mark_more = deed.writes();
        let after = deed.after(&before);
        let files = host.files();
        let written = deed.writes_to(&files);
        let others: Files = files
            .iter()
            .filter(|(name, _)| name != Path::new(IMAGE) && Some(name) != written.as_ref())
            .cloned()
            .collect();
        let expected = Expected { before: &before, after: &after, others: &others };
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
                let judged = run(judge(&state.files, &deed, &expected, rng.random()))?;
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
        run(expected.done("after the command", &deed, &left))??;
        for (name, content) in left {
            host.insert(name, (*content).clone());
        }
        before = run(Truth::read(&host.files()))??;
    }
    totals.histories += 1;
    Ok(())
}

/// Runs a command; `false` if the image does not allow it, and it has changed nothing.
async fn done(deed: &Deed, host: &SimHost) -> Result<bool, String> {
    let before = Truth::read(&host.files()).await?;
    match deed.run(host).await {
        Ok(()) => Ok(true),
        Err(error) if REFUSALS.iter().any(|refusal| error.contains(refusal)) => {
            differ("refused", &Truth::read(&host.files()).await?, &before)?;
            let (report, findings) = examine(host, Path::new(IMAGE), Repair::None).await?;
            sound("refused,", &report, &findings)?;
            Ok(false)
        }
        Err(error) => Err(format!("{} failed: {error}", deed.name())),
    }
}

fn version_of(files: &Files, image: &Path) -> Option<u32> {
    let (_, content) = files.iter().find(|(name, _)| name == image)?;
    header_of(content).map(|header| header.version)
}

fn moments(end: u64, rng: &mut SmallRng) -> Vec<u64> {
    let mut ticks: Vec<u64> =
        (0..rng.random_range(15..40)).map(|_| rng.random_range(1..=end)).collect();
    ticks.push(end);
    ticks.sort_unstable();
    ticks.dedup();
    ticks
}

/// What must be there.
struct Expected<'a> {
    before: &'a Truth,
    after: &'a Truth,
    /// The files that the command only reads.
    others: &'a Files,
}

impl Expected<'_> {
    /// Verifies that the command has done what it should.
    async fn done(&self, when: &str, deed: &Deed, files: &Files) -> Result<(), String> {
        differ(when, &Truth::read(files).await?, self.after)?;
        self.untouched(when, files)?;
        let disk = self.after.disk.to_vec();
        deed.effect(files, &disk).await.map_err(|error| format!("{when}, {error}"))
    }

    fn untouched(&self, when: &str, files: &Files) -> Result<(), String> {
        match self.others.iter().find(|other| !files.contains(other)) {
            Some((name, _)) => Err(format!("{when}, {} is changed", name.display())),
            None => Ok(()),
        }
    }
}

/// Looks at what a crash has left, recovers it, and runs the command again.
async fn judge(
    files: &Files,
    deed: &Deed,
    expected: &Expected<'_>,
    seed: u64,
) -> Result<(), String> {
    let mut rng = SmallRng::seed_from_u64(seed);
    let image = Path::new(IMAGE);
    let Expected { before, after, .. } = *expected;
    let found = Truth::read(files).await?;
    let or_lost = |truth: &Truth| Truth { may_lose_bitmaps: deed.writes(), ..truth.clone() };
    let (before, after) = (&or_lost(before), &or_lost(after));
    let changed = differ("after the crash", &found, after).is_ok();
    if !changed {
        differ("after the crash", &found, before)?;
    }
    expected.untouched("after the crash", files)?;
    let host = SimHost::new(files.clone(), Conduct::default());
    for name in deed.writes_to(files).iter().map(PathBuf::as_path).chain([image]) {
        let raw = name == Path::new("base.raw");
        // Version 2 cannot say that COPIED flags may be wrong while a snapshot is taken.
        let unsaid = deed.is_of_snapshots() && version_of(files, name) == Some(2);
        if !raw && !unsaid && !has_bit(files, name, IncompatibleFeatures::DIRTY) {
            let (report, findings) = examine(&host, name, Repair::None).await?;
            sound(&format!("after the crash, {}:", name.display()), &report, &findings)?;
        }
    }
    let failed = |error: DiskError| format!("after the crash: {error}");
    if rng.random() {
        let options = OpenOptions::new().writable(true);
        let disk = Disk::open(host.any(), image, &options).await.map_err(failed)?;
        disk.close().await.map_err(failed)?;
        drop(disk);
    } else {
        let (report, findings) = examine(&host, image, Repair::All).await?;
        sound("after check -r all", &report, &findings)?;
    }
    let same = if changed { after } else { before };
    differ("after recovery", &Truth::read(&host.files()).await?, same)?;
    // What moves data below the disk is not seen in it.
    if !changed || deed.moves_data() {
        deed.run(&host).await.map_err(|error| format!("run again, {}: {error}", deed.name()))?;
        let again = Expected { before, after, ..*expected };
        again.done("run again", deed, &host.files()).await?;
    }
    examine(&host, image, Repair::Leaks).await?;
    let (report, findings) = examine(&host, image, Repair::None).await?;
    if !report.is_clean() {
        return Err(format!("check -r leaks does not mend it:\n    {}", findings.join("\n    ")));
    }
    differ("in the end", &Truth::read(&host.files()).await?, after)
}
