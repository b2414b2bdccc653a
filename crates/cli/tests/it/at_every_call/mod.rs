//! Commands that are interrupted at every call: killed there, or told that the call failed, or held while another
//! program uses the images. What is left is as before the command or as after it; and run again, it completes.
//!
//! `ISOBATH_CALLS` is a part of the name of a case, such as `small commit 50 Kill`, or `all` (`make calls`), of which
//! `ISOBATH_CALLS_EVERY` leaves one in so many. A failure prints the command that repeats it; `ISOBATH_CALLS_KEEP` is a
//! directory for its images.

mod beside;
mod judge;
mod renamed;
mod ring;
mod scenes;
mod signalled;
mod tracer;

use beside::{Second, Watched};
use isobath_testkit::digest;
use isobath_testkit::evidence::{Evidence, Run};
use isobath_testkit::process::Finished;
use isobath_testkit::seed::Seed;
use judge::{Judge, Known, Rules, View};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use scenes::{Again, IMAGES, Scene, State, Step, clear, program, restore, scenes, state, steps};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Instant;
use tempfile::TempDir;
use tracer::{Call, Deed, Kind, Traced, trace};

/// Threads that interrupt commands.
const THREADS: usize = 3;
/// Of so many cases one is in `make test`.
const SLICE: usize = 16;
/// Of so many pairs of a scene and a command one is in `make test`.
const PAIRS: u64 = 30;
/// Failures of a command on a scene after which it is left.
const MOST_FAILURES: usize = 3;

/// What is done at a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Case {
    Kill,
    Tear,
    Fail(i32),
    Beside(Second),
}

impl Case {
    /// What can be done at a call.
    fn of(call: &Call, turn: usize) -> Vec<Self> {
        let errors: &[i32] = match call.kind {
            Kind::Open => &[libc::EMFILE],
            Kind::Write => &[libc::ENOSPC, libc::EIO],
            Kind::Allocate => &[libc::ENOSPC, libc::EOPNOTSUPP],
            Kind::Read | Kind::Sync | Kind::Name => &[libc::EIO],
            Kind::Attribute => &[libc::ENOSPC],
            Kind::Lock => &[libc::EAGAIN],
            Kind::Release => &[],
        };
        let mut cases = vec![Self::Kill];
        cases.extend((call.length > 4096).then_some(Self::Tear));
        cases.extend(errors.iter().map(|error| Self::Fail(*error)));
        cases.extend(Second::some(turn).map(Self::Beside));
        cases
    }

    fn count(self) -> usize {
        match self {
            Self::Kill | Self::Tear => 0,
            Self::Fail(_) => 1,
            Self::Beside(_) => 2,
        }
    }
}

/// What was done, by [`Case::count`].
const COUNTED: [&str; 3] = ["kills", "errors", "second programs"];

#[derive(Default)]
struct Tally {
    counts: [u64; 3],
    /// What is worth knowing, with how often it happened.
    notes: BTreeMap<String, u64>,
    failures: Vec<String>,
}

impl Tally {
    fn note(&mut self, what: String) {
        *self.notes.entry(what).or_default() += 1;
    }
}

/// A thread that interrupts commands in a directory of its own.
struct Worker<'a> {
    seed: u64,
    directory: TempDir,
    judge: Judge<'a>,
    /// The command that was last interrupted, and digests of the states from which it was run again, and completed.
    completed: RefCell<(String, BTreeSet<u64>)>,
    tally: &'a Mutex<Tally>,
}

/// A command on a scene, with what it does undisturbed.
struct Undisturbed<'a> {
    scene: &'a Scene,
    step: &'a Step,
    calls: Vec<Call>,
    before: View,
    after: View,
}

impl Undisturbed<'_> {
    fn rules(&self) -> Rules<'_> {
        Rules { step: self.step, before: &self.before, after: &self.after }
    }
}

/// Where images lie: in memory, where there is such a file system.
fn memory() -> PathBuf {
    let memory = Path::new("/dev/shm");
    if memory.is_dir() { memory.to_owned() } else { env::temp_dir() }
}

impl Worker<'_> {
    fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Runs the command undisturbed. `None` if it cannot be run on this scene.
    fn undisturbed<'a>(&self, scene: &'a Scene, step: &'a Step) -> Option<Undisturbed<'a>> {
        restore(self.path(), &scene.state);
        let (directory, mut watched) = (self.path().to_owned(), Watched::default());
        let mut watch = |call: &Call| watched.look(&directory, call);
        let done = self.run(step, usize::MAX, Deed::Watch(&mut watch));
        if done.finished.code() != 0 {
            return None;
        }
        if let Err(what) = watched.verdict() {
            let failed = format!("{} {}: {what}", scene.name, step.name);
            self.tally.lock().unwrap().failures.push(failed);
        }
        let before = self.judge.look(&scene.state, None);
        let after = self.judge.look(&state(self.path()), None);
        Some(Undisturbed { scene, step, calls: done.calls, before, after })
    }

    fn run(&self, step: &Step, at: usize, deed: Deed<'_>) -> Traced {
        trace(self.path(), &mut program(&step.arguments), at, deed)
    }

    /// Does something at a call, and judges what is left.
    fn interrupt(&self, what: &Undisturbed<'_>, at: usize, case: Case) -> Result<(), String> {
        restore(self.path(), &what.scene.state);
        let (deed, error) = match case {
            Case::Beside(second) => return self.beside(what, at, second),
            Case::Kill => (Deed::Kill, false),
            Case::Tear => (Deed::Tear, false),
            Case::Fail(error) => (Deed::Fail(error), true),
        };
        let done = self.run(what.step, at, deed);
        let left = state(self.path());
        let succeeded = error && done.finished.code() == 0;
        let but = what.step.target.filter(|_| !succeeded);
        let view = self.judge.look(&left, but);
        let rules = what.rules();
        self.leaks(what, &left, &view, case)?;
        if error {
            ended_well(&done)?;
            if succeeded {
                self.note(what, "goes on after an error");
                rules.complete(&view).map_err(|what| format!("ends well, but {what}"))?;
                return Ok(());
            }
        }
        rules.between(&view, None)?;
        // From the same files the same comes of it.
        let from = (format!("{} {}", what.scene.name, what.step.name), digest_of(&left));
        let mut completed = self.completed.borrow_mut();
        if completed.0 != from.0 {
            *completed = (from.0, BTreeSet::new());
        }
        if !completed.1.contains(&from.1) {
            self.again(what, &view)?;
            completed.1.insert(from.1);
        }
        Ok(())
    }

    /// The command is run again.
    fn again(&self, what: &Undisturbed<'_>, left: &View) -> Result<(), String> {
        let rules = what.rules();
        let was_done = rules.complete(left).is_ok();
        let mut again = self.run(what.step, usize::MAX, Deed::Nothing);
        ended_well(&again).map_err(|what| format!("run again: {what}"))?;
        if what.step.again == Again::Names && again.finished.code() == 1 {
            let named = again.finished.stderr.clone();
            // From above: each needs those below it.
            for name in IMAGES.iter().rev() {
                let delete = format!("isobath chain delete top {name}");
                if named.contains(&format!("'{delete}' deletes it")) {
                    self.note(what, "names what it has left");
                    let arguments = delete.split(' ').skip(1).map(OsString::from).collect();
                    let named = Step { arguments, ..what.step.clone() };
                    again = self.run(&named, usize::MAX, Deed::Nothing);
                    ended_well(&again).map_err(|what| format!("{delete}: {what}"))?;
                }
            }
        }
        let now = state(self.path());
        let view = self.judge.look(&now, None);
        self.leaks(what, &now, &view, Case::Kill)?;
        let report = |what: String| format!("run again: {what}\n{}", again.finished.report());
        let may_fail = match what.step.again {
            Again::OrFails => was_done,
            Again::Completes | Again::Another | Again::Names => false,
        };
        // As in QEMU, whose message it is: a killed writer of a bitmap leaves it so, and the disk keeps its size.
        if again.finished.stderr.contains("is inconsistent and cannot be used") {
            self.note(what, "cannot be run again: an inconsistent bitmap");
            return rules.between(&view, None).map_err(report);
        }
        if again.finished.code() != 0 && !may_fail {
            return Err(report("it fails".into()));
        }
        // The next one is taken of the same disk; there are two then.
        if what.step.again == Again::Another && was_done {
            return rules.sound(&view, false).map_err(report);
        }
        rules.complete(&view).map_err(report)
    }

    /// Whether leaks are only where they may be.
    fn leaks(
        &self,
        what: &Undisturbed<'_>,
        left: &State,
        view: &View,
        case: Case,
    ) -> Result<(), String> {
        for (name, image) in &view.images {
            let before = what.before.images.get(name).map_or(0, |image| image.leaks);
            if image.leaks > before && what.step.target != Some(name) {
                self.note(what, &format!("{} leave leaks in {name}", COUNTED[case.count()]));
                self.judge.is_mended(left, name)?;
            }
        }
        Ok(())
    }

    fn note(&self, what: &Undisturbed<'_>, text: &str) {
        self.tally.lock().unwrap().note(format!("{}: {text}", what.step.name));
    }

    /// Interrupts a command at some of its calls. Returns whether it can be run on this scene.
    fn all(&self, scene: &Scene, step: &Step, choice: &Choice) -> bool {
        let Some(what) = self.undisturbed(scene, step) else { return false };
        let (mut failures, mut number) = (0, 0);
        for (at, call) in what.calls.iter().enumerate() {
            for case in Case::of(call, at) {
                let name = format!("{} {} {at} {case:?}", scene.name, step.name);
                number += 1;
                if !choice.has(&name, number) {
                    continue;
                }
                let done = self.interrupt(&what, at, case);
                let mut tally = self.tally.lock().unwrap();
                tally.counts[case.count()] += 1;
                let Err(failed) = done else { continue };
                let (seed, text) = (self.seed, &call.text);
                tally.failures.push(format!(
                    "{name}: {failed}\ncommand: {:?}\ncall: {text}\nto repeat: ISOBATH_SEED={seed:#x} \
                     ISOBATH_CALLS='{name}' cargo test -p isobath-cli --test it at_every_call",
                    step.arguments
                ));
                drop(tally);
                if let Some(kept) = env::var_os("ISOBATH_CALLS_KEEP") {
                    let kept = Path::new(&kept).join(name);
                    fs::create_dir_all(&kept).unwrap();
                    restore(&kept, &state(self.path()));
                }
                failures += 1;
                if failures == MOST_FAILURES {
                    return true;
                }
            }
        }
        true
    }
}

fn digest_of(state: &State) -> u64 {
    let files = state.iter().map(|(name, bytes)| format!("{name} {:x} ", digest(bytes)));
    digest(files.collect::<String>().as_bytes())
}

/// Whether the program ended by itself, without a panic, and gave a reason if it failed.
fn ended_well(done: &Traced) -> Result<(), String> {
    let report = || done.finished.report();
    if done.hung {
        return Err(format!("it hangs\n{}", report()));
    }
    well(&done.finished)
}

fn well(done: &Finished) -> Result<(), String> {
    if done.stderr.contains("panicked") || done.status.code().is_none() {
        return Err(format!("it panics\n{}", done.report()));
    }
    if done.code() != 0 && done.stderr.trim().is_empty() {
        return Err(format!("it gives no reason\n{}", done.report()));
    }
    Ok(())
}

/// What is tried.
enum Choice {
    /// One of so many cases.
    All { stride: usize },
    /// What has this in its name.
    Part(String),
    /// One of so many cases of some commands, from this one on.
    Few { stride: usize, first: usize, seed: u64 },
}

impl Choice {
    fn of_environment(seed: &Seed) -> Self {
        match env::var("ISOBATH_CALLS") {
            Ok(all) if all == "all" => {
                let every = env::var("ISOBATH_CALLS_EVERY").ok();
                Self::All { stride: every.map_or(1, |every| every.parse().unwrap()) }
            }
            Ok(part) => Self::Part(part),
            Err(_) => {
                let first = seed.rng().random_range(0..SLICE);
                Self::Few { stride: SLICE, first, seed: seed.value() }
            }
        }
    }

    fn has_step(&self, scene: &str, step: &str) -> bool {
        match self {
            Self::All { .. } => true,
            // A part of a name may be longer than this one.
            Self::Part(part) => {
                let name = format!("{scene} {step} ");
                name.contains(part) || part.contains(&name)
            }
            Self::Few { seed, .. } => {
                (digest(scene.as_bytes()) ^ digest(step.as_bytes()) ^ seed).is_multiple_of(PAIRS)
            }
        }
    }

    fn has(&self, name: &str, number: usize) -> bool {
        match self {
            Self::All { stride } => number.is_multiple_of(*stride),
            Self::Part(part) => name.contains(part),
            Self::Few { stride, first, .. } => number % stride == *first,
        }
    }
}

/// What was done is recorded where it ends, also if a thread panics.
struct Recorded {
    evidence: Option<Evidence>,
    seed: u64,
    begun: Instant,
    tally: Mutex<Tally>,
}

impl Drop for Recorded {
    fn drop(&mut self) {
        let tally = self.tally.lock().unwrap_or_else(PoisonError::into_inner);
        let [kills, errors, seconds] = tally.counts;
        for (what, times) in &tally.notes {
            println!("{times} times: {what}");
        }
        let elapsed = self.begun.elapsed().as_secs_f64();
        println!("{kills} kills, {errors} errors, {seconds} second programs in {elapsed:.0} s");
        let Some(evidence) = &self.evidence else { return };
        let reason = tally.failures.first().cloned();
        let recorded = evidence.add(&Run {
            campaign: "calls",
            count: kills + errors + seconds,
            also: &[(COUNTED[0], kills), (COUNTED[1], errors), (COUNTED[2], seconds)],
            seeds: format!("{:#x}", self.seed),
            failure: reason.or_else(|| thread::panicking().then(|| "a panic".into())),
            seconds: elapsed,
            threads: Some(THREADS),
            ..Run::default()
        });
        if let Err(error) = recorded {
            eprintln!("results are not recorded: {error}");
        }
    }
}

/// Interrupts commands, by several threads.
fn interrupt_all(seed: u64, choice: &Choice, tally: &Mutex<Tally>) {
    let made = TempDir::new_in(memory()).unwrap();
    let scenes = scenes(made.path(), &mut StdRng::seed_from_u64(seed));
    clear(made.path());
    let steps = steps();
    let fits = |scene: &Scene, step: &Step| match step.only {
        Some(only) => only == scene.name,
        None => !matches!(scene.name, "damaged" | "unclosed"),
    };
    let pairs: Vec<_> = scenes
        .iter()
        .flat_map(|scene| steps.iter().map(move |step| (scene, step)))
        .filter(|(scene, step)| fits(scene, step) && choice.has_step(scene.name, step.name))
        .collect();
    let ran: Mutex<BTreeSet<&str>> = Mutex::default();
    let (next, known) = (AtomicUsize::new(0), Known::default());
    let work = || {
        let directory = TempDir::new_in(memory()).unwrap();
        let judge = Judge::new(&memory(), &known);
        let worker = Worker { seed, directory, judge, completed: RefCell::default(), tally };
        while let Some((scene, step)) = pairs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let begun = Instant::now();
            if worker.all(scene, step, choice) {
                ran.lock().unwrap().insert(step.name);
            }
            if !matches!(choice, Choice::Few { .. }) {
                let (counts, took) = (tally.lock().unwrap().counts, begun.elapsed().as_secs_f32());
                println!("{} {}: {took:.1} s; in all {counts:?}", scene.name, step.name);
            }
        }
        clear(worker.path());
    };
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(work);
        }
    });
    let ran = ran.into_inner().unwrap();
    if matches!(choice, Choice::All { .. }) {
        let unfit = steps.iter().map(|step| step.name).filter(|name| !ran.contains(name));
        let unfit = unfit.map(|name| format!("{name} fails on each scene"));
        tally.lock().unwrap().failures.extend(unfit);
    }
}

#[test]
fn interrupted_commands_leave_the_disk_and_complete_when_run_again() {
    let seed = Seed::new();
    let choice = Choice::of_environment(&seed);
    let evidence =
        if matches!(choice, Choice::All { .. }) { Evidence::begin().unwrap() } else { None };
    let (seed, begun) = (seed.value(), Instant::now());
    let recorded = Recorded { evidence, seed, begun, tally: Mutex::default() };
    interrupt_all(seed, &choice, &recorded.tally);
    let failures = recorded.tally.lock().unwrap().failures.clone();
    let count: u64 = recorded.tally.lock().unwrap().counts.iter().sum();
    drop(recorded);
    assert!(count > 0, "ISOBATH_CALLS names no case");
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n\n"));
}

#[test]
fn no_image_is_let_go_while_one_that_reads_it_is_kept() {
    let made = TempDir::new_in(memory()).unwrap();
    let scenes = scenes(made.path(), &mut Seed::new().rng());
    clear(made.path());
    let (known, tally) = (Known::default(), Mutex::default());
    let directory = TempDir::new_in(memory()).unwrap();
    let judge = Judge::new(&memory(), &known);
    let worker = Worker { seed: 0, directory, judge, completed: RefCell::default(), tally: &tally };
    for step in steps() {
        let mut fit = scenes.iter().filter(|scene| step.only.is_none_or(|only| only == scene.name));
        assert!(fit.any(|scene| worker.undisturbed(scene, &step).is_some()), "{}", step.name);
    }
    clear(worker.path());
    let failures = tally.into_inner().unwrap().failures;
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
