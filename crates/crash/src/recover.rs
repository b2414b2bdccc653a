//! Recovery from a crash, and checks of its result.

use crate::content::Content;
use crate::executor::run;
use crate::guest::{Before, Log, Look, Oracle};
use crate::history::Guest;
use crate::host::{Conduct, SimHost};
use crate::image::{Kind, Start, show_snapshot};
use crate::look::{SMALL, look, look_raw};
use crate::mode::Mode;
use crate::plan;
use crate::record::{Files, file};
use crate::state::{Fate, Replay, random_grain};
use isobath_disk::{CheckEvent, CheckOptions, CheckReport, Disk, OpenOptions, Repair, check};
use isobath_qcow2::journal::{Journal, Operation, Record};
use isobath_qcow2::{AutoclearFeatures, Header, IncompatibleFeatures};
use isobath_storage::{IoBuf, Locking};
use isobath_testkit::qemu;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

/// How a state after a crash is recovered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Way {
    /// It is opened for writing.
    Open,
    /// It is opened read-only, and then for writing.
    ReadFirst,
    /// It is repaired by `isobath check -r all` before.
    Repair,
    /// The recovery crashes too, repeatedly, at most this many times.
    Crash(u32),
    /// Nothing is guaranteed: every result must be correct, or an error that names the image.
    Wild,
}

impl Way {
    /// A random way.
    pub fn random(rng: &mut SmallRng) -> Self {
        match rng.random_range(0..20) {
            0..11 => Self::Open,
            11..14 => Self::ReadFirst,
            14..16 => Self::Repair,
            _ => Self::Crash(2),
        }
    }

    /// The name, for totals.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Open => "opened",
            Self::ReadFirst => "read, then opened",
            Self::Repair => "check -r all, then opened",
            Self::Wild => "check -r all, then opened if it can be",
            Self::Crash(2) => "crashed in recovery",
            Self::Crash(_) => "crashed in recovery of recovery",
        }
    }
}

/// QEMU is asked about disks of less than this many bytes, which it copies.
pub const SIZE_FOR_QEMU: u64 = 64 << 20;

/// A state after a crash, and what is expected of it.
#[derive(Clone)]
pub struct Case<'a> {
    /// The metadata mode.
    pub mode: &'a Mode,
    /// The history's initial state.
    pub start: &'a Start,
    /// The kind of history.
    pub kind: Kind,
    /// Bytes that the device writes atomically.
    pub atomic: u64,
    /// The contents that the disk may have.
    pub oracle: Arc<Oracle>,
    /// The contents that a raw data file may have on its own; `None` if there is none.
    pub alone: Option<Arc<Oracle>>,
    /// The number of the guest's lives.
    pub lives: u32,
    /// Clusters that were leaked when its last life began: an earlier crash leaked them, or the image was not closed.
    pub leaked: u64,
    /// Whether QEMU checks it too.
    pub qemu: bool,
    /// The properties of the host that stay.
    pub host: Conduct,
    /// Clusters may be leaked.
    pub may_leak: bool,
}

impl Case<'_> {
    /// The host's behaviour without faults.
    fn quiet(&self) -> Conduct {
        Conduct { atomic: self.atomic, ..self.host.clone() }
    }
}

/// A state that was recovered.
#[derive(Clone, Copy, Debug)]
pub struct Passed {
    /// How.
    pub way: Way,
    /// Whether QEMU has checked it.
    pub qemu: bool,
}

/// Checks an image, and repairs it as `repair` says.
pub(crate) async fn examine(
    host: &SimHost,
    image: &Path,
    repair: Repair,
) -> Result<(CheckReport, Vec<String>), String> {
    let options = CheckOptions { repair, locking: Locking::Unlocked, ..CheckOptions::default() };
    let mut findings = Vec::new();
    let mut events = |event: CheckEvent<'_>| {
        if let CheckEvent::Finding(text) = event {
            findings.push(text.to_owned());
        }
    };
    let report = check(&host.any(), image, &options, &mut events).await;
    report.map(|report| (report, findings)).map_err(|error| format!("the check failed: {error}"))
}

pub(crate) fn sound(what: &str, report: &CheckReport, findings: &[String]) -> Result<(), String> {
    if report.corruptions == 0 && report.check_errors == 0 {
        return Ok(());
    }
    Err(format!("{what} the image is corrupt:\n    {}", findings.join("\n    ")))
}

fn few_leaks(
    what: &str,
    report: &CheckReport,
    findings: &[String],
    most: u64,
) -> Result<(), String> {
    if report.leaks <= most {
        return Ok(());
    }
    let findings = findings.join("\n    ");
    Err(format!("{what} {} clusters are leaked; {most} were:\n    {findings}", report.leaks))
}

/// Whether the image's header has one of these bits set.
pub(crate) fn has_bit(files: &Files, image: &Path, bit: IncompatibleFeatures) -> bool {
    let image = files.iter().find(|(name, _)| name == image);
    let header = image.and_then(|(_, content)| header_of(content));
    header.is_some_and(|header| header.incompatible.contains(bit))
}

/// Whether the image's journal is in use and lets no space be lost. An empty record that lists zones means that a
/// commit too large for a record is being written in place: that is only ordered.
fn loses_no_space(files: &Files, image: &Path) -> bool {
    let used = has_bit(files, image, IncompatibleFeatures::JOURNAL);
    let found = files.iter().find(|(name, _)| name == image);
    let Some((_, content)) = found.filter(|_| used) else { return false };
    let empty = header_of(content).and_then(|header| {
        let extension = header.journal()?;
        let start = extension.area_offset.get();
        let area = content.bytes(start..start + extension.area_length);
        let last = Journal::scan(&area, extension).ok()?.last()?;
        let record = Record::parse(area.get(last.at..)?, extension.id).ok()?;
        let lists = |operation: &Operation| matches!(operation, Operation::Zones(_));
        Some(last.tail == last.lsn && record.operations.iter().all(lists))
    });
    empty != Some(true)
}

/// An image's header.
pub(crate) fn header_of(content: &Content) -> Option<Header> {
    Header::parse(&content.bytes(0..content.len().min(HEADER))).ok()
}

/// The bytes that contain a header.
const HEADER: u64 = 64 << 10;

/// The clusters leaked in an image, including those past the end of the file, which do not count until the file grows.
pub(crate) async fn leaks(files: &Files, image: &Path) -> Result<u64, String> {
    let host = SimHost::new(lengthened(files, image), Conduct::default());
    Ok(examine(&host, image, Repair::None).await?.0.leaks)
}

/// The files, with the image extended past its end.
fn lengthened(files: &Files, image: &Path) -> Files {
    let mut files = files.clone();
    for (_, content) in files.iter_mut().filter(|(name, _)| name == image) {
        let cluster = header_of(content).map_or(0, |header| 1 << header.cluster_bits);
        let length = content.len() + (16 * cluster).max(2 << 20);
        Arc::make_mut(content).set_len(length);
    }
    files
}

/// Checks the files that no history may change.
fn untouched(case: &Case<'_>, files: &Files) -> Result<(), String> {
    for (name, bytes) in &case.start.files {
        let own = *name == case.start.image
            || case.start.new.data_file.as_ref().is_some_and(|data| name == Path::new(data));
        let now = files.iter().find(|(other, _)| other == name).map(|(_, bytes)| bytes);
        if !own && now != Some(bytes) {
            return Err(format!("{} was changed", name.display()));
        }
    }
    Ok(())
}

async fn read_all(files: &Files, case: &Case<'_>) -> Result<Look, String> {
    let host = SimHost::new(files.clone(), case.quiet());
    let disk = Disk::open(host.any(), &case.start.image, &case.mode.options(false, 0)).await;
    let disk = disk.map_err(|error| format!("it could not be opened read-only: {error}"))?;
    let read = look(&disk, &case.oracle.interest()).await;
    read.map_err(|error| format!("it could not be read: {error}"))
}

async fn snapshot_stays(files: &Files, case: &Case<'_>) -> Result<(), String> {
    let Some(kept) = &case.start.snapshot else { return Ok(()) };
    let image = &case.start.image;
    let host = SimHost::new(show_snapshot(files, image, kept), case.quiet());
    let disk = Disk::open(host.any(), image, &OpenOptions::default()).await;
    let disk = disk.map_err(|error| format!("the snapshot could not be opened: {error}"))?;
    let read = look(&disk, &[]).await;
    let look = read.map_err(|error| format!("the snapshot could not be read: {error}"))?;
    match look.content.first_difference(&kept.content) {
        None => Ok(()),
        Some(at) => Err(format!("the internal snapshot has changed at byte {at}")),
    }
}

/// Checks that a raw data file, read without the image, is a disk as this oracle allows it.
fn raw_alone(case: &Case<'_>, files: &Files, oracle: &Oracle) -> Result<(), String> {
    let data = case.start.new.data_file.as_deref().and_then(|data| file(files, Path::new(data)));
    let header = file(files, &case.start.image).and_then(header_of);
    let (Some(data), Some(header)) = (data, header) else {
        return Err("the image or its raw data file is gone".into());
    };
    if !header.autoclear.contains(AutoclearFeatures::DATA_FILE_RAW) {
        return Err("the image does not say any more that its data file is raw".into());
    }
    if data.len() < header.size {
        let (length, size) = (data.len(), header.size);
        return Err(format!("the raw data file has {length} bytes, but the disk has {size}"));
    }
    let checked = oracle.check(&look_raw(data, header.size, &oracle.interest()));
    checked.map_err(|error| format!("the raw data file, read on its own: {error}"))
}

/// A few requests for a recovered disk.
fn few(case: &Case<'_>, size: u64, rng: &mut SmallRng) -> Vec<Vec<plan::Request>> {
    let disk = plan::Disk { size, ..plan::Disk::of(case.start) };
    let task = |rng: &mut SmallRng| {
        let count = rng.random_range(1..=3);
        (0..count).map(|_| disk.request(case.kind, rng)).collect::<Vec<_>>()
    };
    (0..rng.random_range(1..=2)).map(|_| task(rng)).collect()
}

/// Opens the disk after a crash, reads it, continues to use it, closes it, and checks it.
async fn go_on(
    host: &SimHost,
    case: &Case<'_>,
    way: Way,
    rng: &mut SmallRng,
) -> Result<(), String> {
    let mut log = Arc::default();
    let gone_on = recover_and_use(host, case, way, rng, &mut log).await;
    gone_on.map_err(|error| {
        let requests = log.tell(u64::MAX).join("\n    ");
        format!("{error}\nafter these requests since the crash:\n    {requests}")
    })
}

async fn recover_and_use(
    host: &SimHost,
    case: &Case<'_>,
    way: Way,
    rng: &mut SmallRng,
    told: &mut Arc<Log>,
) -> Result<(), String> {
    let left = host.files();
    let image = &case.start.image;
    let interest = case.oracle.interest();
    // A journal in use lets no space be lost.
    let journal = !case.may_leak && loses_no_space(&left, image);
    if case.mode.consistent && !has_bit(&left, image, IncompatibleFeatures::DIRTY) {
        let (report, findings) = examine(host, image, Repair::None).await?;
        sound("after the crash", &report, &findings)?;
        if journal {
            few_leaks("after the crash", &report, &findings, case.leaked)?;
        }
    }
    if let Some(alone) = &case.alone {
        raw_alone(case, &left, alone).map_err(|error| format!("after the crash, {error}"))?;
    }
    let mut read = None;
    if way == Way::ReadFirst {
        let bytes = read_all(&left, case).await?;
        case.oracle.check(&bytes).map_err(|error| format!("opened read-only, {error}"))?;
        read = Some(bytes);
    }
    if way == Way::Repair {
        let (report, findings) = examine(host, image, Repair::All).await?;
        sound("after check -r all", &report, &findings)?;
        few_leaks("after check -r all", &report, &findings, 0)?;
    }
    let guest =
        Guest::new(host, case.start, case.mode, Before::default(), case.lives + 1, rng.random());
    let disk = guest.open().await?;
    let found = guest.look(&disk, &interest).await?;
    case.oracle.check(&found)?;
    if read.is_some_and(|read| read != found) {
        return Err("read-only it showed something else than after recovery".into());
    }
    if journal {
        let (report, findings) = examine(host, image, Repair::None).await?;
        sound("after recovery", &report, &findings)?;
        few_leaks("after recovery", &report, &findings, case.leaked)?;
    }
    guest.found(found);
    guest.tasks(&disk, &few(case, disk.size(), rng), None).await?;
    let last = guest.look(&disk, &guest.interest()).await?;
    let closed = rng.random_bool(0.8);
    if closed {
        guest.close(&disk).await?;
    } else {
        guest.tasks(&disk, &[vec![plan::Request::Flush]], None).await?;
    }
    drop(disk);
    let log = Arc::new(guest.into_log());
    *told = Arc::clone(&log);
    log.check_reads(u64::MAX)?;
    let oracle = Oracle::of_present(&log, host.tick());
    oracle.check(&last).map_err(|error| format!("working on after recovery, {error}"))?;
    let mut may_leak = case.may_leak || way != Way::Repair;
    if !closed {
        may_leak |= !loses_no_space(&host.files(), image);
        let again = Guest::new(host, case.start, case.mode, Before::default(), 0, rng.random());
        let disk = again.open().await?;
        let bytes = again.look(&disk, &oracle.interest()).await?;
        oracle.check(&bytes).map_err(|error| format!("opened once more, {error}"))?;
        again.close(&disk).await?;
    }
    let files = host.files();
    let (report, findings) = examine(host, image, Repair::None).await?;
    sound("after it was closed", &report, &findings)?;
    if case.may_leak {
        // A kill leaves refcounts too high if it interrupts a change that announces that.
    } else if report.leaks > 0 && closed {
        let most = if may_leak { leaks(&left, image).await? } else { 0 };
        few_leaks("after it was closed", &report, &findings, most)?;
    } else if !may_leak {
        few_leaks("after it was opened once more and closed", &report, &findings, 0)?;
    }
    if report.leaks > 0 {
        examine(host, image, Repair::Leaks).await?;
        let (report, findings) = examine(host, image, Repair::None).await?;
        if !report.is_clean() {
            let findings = findings.join("\n    ");
            return Err(format!("check -r leaks does not mend it:\n    {findings}"));
        }
    }
    let bytes = read_all(&files, case).await?;
    oracle.check(&bytes).map_err(|error| format!("after it was closed, {error}"))?;
    if let Some(alone) = &case.alone {
        let log = Arc::new(log.after(alone));
        let alone = Oracle::of_present(&log, host.tick());
        raw_alone(case, &files, &alone).map_err(|error| format!("after it was closed, {error}"))?;
    }
    snapshot_stays(&files, case).await?;
    untouched(case, &files)?;
    if case.qemu {
        // A crash may come before the former active image below was closed; then QEMU requires this.
        for name in images_below(&files, image) {
            if has_bit(&files, &name, IncompatibleFeatures::JOURNAL) {
                examine(host, &name, Repair::All).await?;
            }
        }
        ask_qemu(case, &host.files(), &bytes.content)?;
    }
    Ok(())
}

/// The qcow2 images below an image. Other files are none, such as a data file or a raw image, whatever a guest has put
/// into their first sectors.
fn images_below(files: &Files, image: &Path) -> Vec<PathBuf> {
    let mut images = Vec::new();
    let mut above = file(files, image).and_then(header_of);
    while let Some(header) = above {
        let qcow2 = header.backing_format().is_none_or(|format| format != "raw");
        let Some(name) = header.backing_file.filter(|_| qcow2).map(PathBuf::from) else { break };
        above = file(files, &name).and_then(header_of);
        images.push(name);
    }
    images
}

/// Checks that QEMU finds the image clean, and reads the same from it.
fn ask_qemu(case: &Case<'_>, files: &Files, content: &Content) -> Result<(), String> {
    let directory = tempfile::tempdir().map_err(|error| format!("no directory: {error}"))?;
    for (name, bytes) in files {
        std::fs::write(directory.path().join(name), bytes.to_vec())
            .map_err(|error| format!("no file: {error}"))?;
    }
    let path = |name: &str| directory.path().join(name).display().to_string();
    let mut image = format!(
        "driver=qcow2,file.driver=file,file.filename={}",
        path(&case.start.image.to_string_lossy())
    );
    if let Some(data) = &case.start.new.data_file {
        let _ = write!(image, ",data-file.driver=file,data-file.filename={}", path(data));
    }
    // A relative name of a layer's data file is relative to the directory that QEMU runs in.
    let img = |arguments: &[&str]| {
        let mut command = Command::new(qemu::program("qemu-img"));
        qemu::run(command.args(arguments).current_dir(directory.path()))
    };
    let checked = img(&["check", "--image-opts", "--output=json", &image]);
    if checked.code() != 0 {
        return Err(format!("qemu-img check: {}", checked.report()));
    }
    let raw = path("disk");
    let converted = img(&["convert", "--image-opts", "-O", "raw", &image, &raw]);
    if converted.code() != 0 {
        return Err(format!("qemu-img convert: {}", converted.report()));
    }
    match std::fs::read(raw) {
        Ok(read) if Content::from(&read[..]) == *content => Ok(()),
        Ok(_) => Err("QEMU reads something else".into()),
        Err(error) => Err(format!("what QEMU has read: {error}")),
    }
}

/// Recovers one state and checks it; with [`Way::Crash`], also states of crashes during the recovery.
pub fn recover(
    files: Files,
    case: &Case<'_>,
    way: Way,
    seed: u64,
    passed: &mut Vec<Passed>,
) -> Result<(), String> {
    let mut rng = SmallRng::seed_from_u64(seed);
    let Way::Crash(depth) = way else {
        let host = SimHost::new(files, case.quiet());
        run(go_on(&host, case, way, &mut rng))??;
        passed.push(Passed { way, qemu: case.qemu });
        return Ok(());
    };
    let conduct =
        Conduct { seed: rng.random(), delay: rng.random_range(0..4), record: true, ..case.quiet() };
    let image = &case.start.image;
    let interest = case.oracle.interest();
    let leaked = run(leaks(&files, image))??;
    let host = SimHost::new(files, conduct);
    let guest =
        Guest::new(&host, case.start, case.mode, Before::default(), case.lives + 1, rng.random());
    let looked = run(async {
        if rng.random_bool(0.15) {
            examine(&host, image, Repair::All).await?;
        }
        let disk = guest.open().await?;
        let found = guest.look(&disk, &interest).await?;
        case.oracle.check(&found)?;
        let looked = guest.found(found);
        guest.tasks(&disk, &few(case, disk.size(), &mut rng), None).await?;
        guest.close(&disk).await?;
        Ok::<_, String>(looked)
    })??;
    let log = Arc::new(guest.into_log());
    let record = host.record();
    let mut replay = Replay::new(&record);
    let mut ticks: Vec<u64> =
        (0..rng.random_range(1..=3)).map(|_| rng.random_range(1..=record.end)).collect();
    // Recovery itself is short, so some crashes target it.
    if let Some(first) = ticks.first_mut().filter(|_| rng.random()) {
        *first = rng.random_range(1..=looked);
    }
    ticks.sort_unstable();
    for tick in ticks {
        replay.advance(tick);
        let fate = Fate::random(replay.pending(), &mut rng);
        let grain = random_grain(case.atomic, &mut rng);
        let state = replay.build(&fate, grain, &mut rng);
        // Data that the guest has read after the first recovery must not change.
        let oracle = if tick <= looked {
            Arc::clone(&case.oracle)
        } else {
            Arc::new(Oracle::of_crash(&log, tick))
        };
        let alone = case.alone.as_ref().map(|alone| {
            let log = Arc::new(log.after(alone));
            Arc::new(Oracle::of_crash(&log, tick))
        });
        let case = Case { oracle, alone, lives: case.lives + 1, leaked, ..case.clone() };
        let next = if depth > 1 && rng.random_bool(0.5) {
            Way::Crash(depth - 1)
        } else {
            [Way::Open, Way::ReadFirst, Way::Repair][rng.random_range(0..3)]
        };
        recover(state.files, &case, next, rng.random(), passed).map_err(|error| {
            format!(
                "recovery crashed at {tick} of {} (its own changes: {}; {}): {error}",
                record.end,
                replay.pending(),
                fate.name()
            )
        })?;
        passed.push(Passed { way, qemu: false });
    }
    Ok(())
}

/// Recovers a state for which nothing is guaranteed: the result must be an error that names the image, or a clean
/// image.
pub fn recover_wild(files: Files, case: &Case<'_>, seed: u64) -> Result<(), String> {
    let mut rng = SmallRng::seed_from_u64(seed);
    let host = SimHost::new(files, case.quiet());
    let image = &case.start.image;
    run(async {
        let named = |what: &str, error: String| {
            if case.start.files.iter().any(|(name, _)| error.contains(&*name.to_string_lossy())) {
                Ok(())
            } else {
                Err(format!("{what}: the error does not name the image: {error}"))
            }
        };
        let (report, _) = match examine(&host, image, Repair::All).await {
            Ok(examined) => examined,
            Err(error) => return named("check -r all", error),
        };
        let mended = report.corruptions == 0 && report.check_errors == 0;
        if mended {
            let (report, findings) = examine(&host, image, Repair::None).await?;
            sound("after check -r all that mended everything", &report, &findings)?;
        }
        let options = case.mode.options(true, rng.random());
        let disk = match Disk::open(host.any(), image, &options).await {
            Ok(disk) => disk,
            Err(error) => return named("open", error.to_string()),
        };
        let mut readable = true;
        let parts = if disk.size() <= SMALL {
            std::iter::once(0..disk.size()).collect()
        } else {
            case.oracle.interest()
        };
        for part in parts {
            for at in (part.start..part.end.min(disk.size())).step_by(4096) {
                let length = (disk.size() - at).min(4096) as usize;
                if let Err(error) = disk.read(at, IoBuf::zeroed(length)).await {
                    // Lost compressed data is detected only when it is read.
                    named("read", error.to_string())?;
                    readable = false;
                }
            }
        }
        if mended {
            match disk.write(0, IoBuf::zeroed(512)).await {
                Ok(_) => {}
                // Damaged compressed data prevents a write to the rest of its cluster.
                Err(error) if !readable => named("write", error.to_string())?,
                Err(error) => return Err(error.to_string()),
            }
            disk.close().await.map_err(|error| error.to_string())?;
            drop(disk);
            let (report, findings) = examine(&host, image, Repair::None).await?;
            sound("after it was mended and closed", &report, &findings)?;
        }
        untouched(case, &host.files())
    })?
}
