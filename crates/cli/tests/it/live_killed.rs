//! A server that is killed at any moment, while its chain is changed under load, loses nothing that was
//! flushed and leaves every earlier snapshot as it was.

use crate::live::load::{Clock, Log, SECTOR, Stamps, Window, judge, run};
use crate::live::nbd::Nbd;
use crate::live::{Control, DEVICE, Gone, ISOBATH, Live};
use isobath_qmp::client::ClientError;
use isobath_testkit::process::{Finished, run_program};
use isobath_testkit::seed::Seed;
use isobath_testkit::{args, qemu};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::Duration;
use tempfile::TempDir;

const SIZE: usize = 16 << 20;
const SECTORS: u32 = (SIZE / SECTOR) as u32;
const NEVER: u64 = u64::MAX;

/// What the server does when it is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Doing {
    Snapshots,
    StreamIntoActive,
    StreamBelow,
    CommitActive,
    CommitBelow,
}

const ALL: [Doing; 5] = [
    Doing::Snapshots,
    Doing::StreamIntoActive,
    Doing::StreamBelow,
    Doing::CommitActive,
    Doing::CommitBelow,
];

/// What an image below the active one must hold.
enum Expected {
    /// What was found there before.
    Found(Stamps),
    /// What was written until some moment since the server started.
    Written(Window),
}

/// A change of the chain that was asked for and not confirmed.
enum Unsure {
    /// The file may be the active image; since when.
    Snapshot(String, u64),
    /// The base of the commit may be the active image.
    Complete(String),
}

/// A job as it was asked for: the command, its top and its base.
#[derive(Clone, Debug)]
struct Task {
    command: &'static str,
    top: String,
    base: String,
}

/// A chain and what is known of it.
struct Field {
    directory: TempDir,
    rng: StdRng,
    /// From the base up to the active image.
    chain: Vec<String>,
    expected: BTreeMap<String, Expected>,
    /// What the disk held when the server was started.
    before: Stamps,
    clock: Clock,
    unsure: Option<Unsure>,
    /// The job that the server was killed in.
    interrupted: Option<Task>,
    epoch: u32,
    files: usize,
}

impl Field {
    fn new(seed: &Seed) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let base = directory.path().join("base");
        qemu::create(&base, "qcow2", SIZE as u64, "cluster_size=16k");
        Self {
            directory,
            rng: seed.rng(),
            chain: vec!["base".into()],
            expected: BTreeMap::new(),
            before: Stamps::none(SECTORS as usize),
            clock: Clock::default(),
            unsure: None,
            interrupted: None,
            epoch: 0,
            files: 0,
        }
    }

    fn path(&self, file: &str) -> PathBuf {
        self.directory.path().join(file)
    }

    fn active(&self) -> String {
        self.chain.last().unwrap().clone()
    }

    /// Serves the disk under load, does something, and kills the server meanwhile. Says what came of it.
    fn round(&mut self, doing: Doing) -> String {
        self.epoch += 1;
        let metadata = ["auto", "journal", "ordered"][self.rng.random_range(0..3)];
        let options = ["--metadata", metadata, "--threads", "2"];
        let live = Live::start(self.directory.path(), &self.active(), &options);
        let socket = live.nbd();
        let clock = std::mem::take(&mut self.clock);
        let stop = AtomicBool::new(false);
        // Sooner rather than later.
        let delay = Duration::from_micros(self.rng.random_range(0_u64..300).pow(2));
        let stamp = self.epoch << 24;
        let mut rngs: Vec<_> =
            (0..2).map(|_| StdRng::seed_from_u64(self.rng.random::<u64>())).collect();
        let (logs, result) = thread::scope(|scope| {
            let halves = [0..SECTORS / 2, SECTORS / 2..SECTORS];
            let loads: Vec<_> = rngs
                .iter_mut()
                .zip(halves)
                .map(|(rng, half)| {
                    let (clock, stop, socket) = (&clock, &stop, &socket);
                    scope.spawn(move || run((socket, DEVICE), half, (clock, stop), stamp, rng))
                })
                .collect();
            let (armed, killer) = mpsc::channel();
            let server = &live.server;
            scope.spawn(move || {
                let _ = killer.recv();
                thread::sleep(delay);
                server.signal(libc::SIGKILL);
            });
            let result = self.change(doing, &mut live.control(), &clock, armed);
            let logs: Vec<Log> = loads.into_iter().map(|load| load.join().unwrap()).collect();
            (logs, result)
        });
        self.clock = clock;
        let done = live.server.wait();
        assert_eq!(done.code(), -1, "{}", done.report());
        assert!(!done.stderr.contains("ERROR"), "{}", done.report());
        let way = match (&result, &self.unsure, &self.interrupted) {
            (Ok(()), ..) => "after it",
            (_, Some(Unsure::Snapshot(..)), _) => "in a snapshot",
            (_, Some(Unsure::Complete(_)), _) => "in completion",
            (_, _, Some(_)) => "in the job",
            _ => "between",
        };
        let text = format!("{doing:?} with {metadata}: killed {way}");
        self.judge(&logs).unwrap_or_else(|error| panic!("{text}: {error}\n{}", done.report()));
        text
    }

    /// Changes the chain; somewhere on the way the server's death is on its way.
    fn change(
        &mut self,
        doing: Doing,
        control: &mut Control,
        clock: &Clock,
        armed: Sender<()>,
    ) -> Result<(), ClientError> {
        if let Some(task) = self.interrupted.take() {
            self.job(task, control, None)?;
        }
        // Enough layers for a job, with something in each.
        while self.chain.len() < 5 {
            thread::sleep(Duration::from_millis(10));
            self.snapshot(control, clock)?;
        }
        let layers = self.chain.len();
        let base = self.rng.random_range(0..layers - 3);
        let (command, top) = match doing {
            Doing::Snapshots => {
                drop(armed);
                for _ in 0..12 {
                    self.snapshot(control, clock)?;
                }
                return Ok(());
            }
            Doing::StreamIntoActive => ("block-stream", layers - 1),
            Doing::CommitActive => ("block-commit", layers - 1),
            Doing::StreamBelow => ("block-stream", self.rng.random_range(base + 2..layers - 1)),
            Doing::CommitBelow => ("block-commit", self.rng.random_range(base + 1..layers - 1)),
        };
        let task = Task { command, top: self.chain[top].clone(), base: self.chain[base].clone() };
        self.job(task, control, Some(armed))
    }

    fn snapshot(&mut self, control: &mut Control, clock: &Clock) -> Gone<()> {
        self.files += 1;
        let file = format!("s{}", self.files);
        let from = clock.now();
        self.unsure = Some(Unsure::Snapshot(file.clone(), from));
        control.snapshot(&file)?;
        self.unsure = None;
        let window = Window { from, until: clock.now(), flushed: false };
        self.expected.insert(self.active(), Expected::Written(window));
        self.chain.push(file);
        Ok(())
    }

    /// Runs a job to its end. The server is killed some time after `armed` is dropped.
    fn job(
        &mut self,
        task: Task,
        control: &mut Control,
        mut armed: Option<Sender<()>>,
    ) -> Gone<()> {
        let at = |file: &str| self.chain.iter().position(|name| name == file).unwrap();
        let (top, base) = (at(&task.top), at(&task.base));
        let active = top == self.chain.len() - 1;
        self.interrupted = Some(task.clone());
        let mut arguments = json!({"job-id": "j", "base": task.base});
        // A job that is slow enough to be killed in, or as fast as it can be.
        if self.rng.random_ratio(1, 2) && armed.is_some() {
            arguments["speed"] = (32_u64 << 20).into();
        }
        let late = active && task.command == "block-commit" && self.rng.random_ratio(1, 2);
        if !late {
            armed.take();
        }
        let removed;
        if task.command == "block-stream" {
            if !active {
                let nodes = control.nodes()?;
                let node = nodes.into_iter().find(|(_, file)| *file == task.top).unwrap();
                arguments["device"] = node.0.into();
            }
            control.start("block-stream", &arguments)?;
            control.completed()?;
            removed = base + 1..top;
        } else {
            // The images from the base on are being written to.
            let committed = self.expected.remove(&task.top);
            for file in &self.chain[base..top] {
                self.expected.remove(file);
            }
            if active {
                control.start("block-commit", &arguments)?;
                let _ = control.wait_for(&["BLOCK_JOB_READY"])?;
                self.unsure = Some(Unsure::Complete(task.base.clone()));
                drop(armed);
                control.execute("block-job-complete", &json!({"device": "j"}))?;
                control.completed()?;
                self.unsure = None;
            } else {
                arguments["top"] = task.top.clone().into();
                control.start("block-commit", &arguments)?;
                control.completed()?;
                if let Some(committed) = committed {
                    self.expected.insert(task.base, committed);
                }
            }
            removed = base + 1..top + 1;
        }
        self.chain.drain(removed);
        self.interrupted = None;
        let files: Vec<_> = control.nodes()?.into_iter().rev().map(|(_, file)| file).collect();
        assert_eq!(files, self.chain);
        Ok(())
    }

    /// Recovers the images and judges what is in them.
    fn judge(&mut self, logs: &[Log]) -> Result<(), String> {
        let killed = self.clock.now();
        let flushed = |from| Window { from, until: NEVER, flushed: true };
        let unsure = self.unsure.take();
        if let Some(Unsure::Snapshot(file, from)) = &unsure
            && self.backing(file).is_some()
        {
            self.expected.insert(self.active(), Expected::Written(flushed(*from)));
            self.chain.push(file.clone());
        }
        // Who starts the server again finds all, with journals that nobody has looked at.
        let mut served = None;
        if !matches!(unsure, Some(Unsure::Complete(_))) && self.rng.random_ratio(1, 2) {
            let live = Live::start(self.directory.path(), &self.active(), &["--read-only"]);
            let raw = self.path("raw");
            let _ = qemu::img(args!["convert", "-f", "raw", "-O", "raw", live.uri(), &raw]).ok();
            let _ = live.stop();
            served = Some(Stamps::of(&std::fs::read(raw).unwrap())?);
        }
        for file in self.chain.clone() {
            self.recover(&file)?;
        }
        // The images say what the chain is.
        let asked = std::mem::take(&mut self.chain);
        self.chain = self.chain_of(asked.last().unwrap());
        let without = |task: &Task| {
            let at = |file: &str| asked.iter().position(|name| name == file).unwrap();
            let last = at(&task.top) + usize::from(task.command == "block-commit");
            let mut chain = asked.clone();
            chain.drain(at(&task.base) + 1..last);
            chain
        };
        if self.chain != asked {
            let task = self.interrupted.take();
            let shorter = task.as_ref().map(without);
            if shorter.as_ref() != Some(&self.chain) {
                return Err(format!("the chain is {:?}, not {asked:?} or {shorter:?}", self.chain));
            }
        }
        let mut now = self.read(&self.active())?;
        if let Some(served) = served {
            served.compare(&now).map_err(|error| format!("read by the server: {error}"))?;
        }
        let mut judged = judge(&self.before, logs, flushed(killed), &now);
        if let (Err(error), Some(Unsure::Complete(base))) = (&judged, unsure) {
            // Then the base has taken the disk's place.
            let error = error.clone();
            now = self.read(&base)?;
            judged = judge(&self.before, logs, flushed(killed), &now);
            judged = judged.map_err(|other| format!("{error}; in the base: {other}"));
            self.chain = self.chain_of(&base);
            self.interrupted = None;
        }
        judged.map_err(|error| format!("the disk: {error}"))?;

        let chain = self.chain.clone();
        for file in &chain[..chain.len() - 1] {
            let Some(expected) = self.expected.remove(file) else { continue };
            let found = self.read(file)?;
            let judged = match &expected {
                Expected::Found(stamps) => stamps.compare(&found),
                Expected::Written(window) => judge(&self.before, logs, *window, &found),
            };
            judged.map_err(|error| format!("{file} in {chain:?}: {error}"))?;
            self.expected.insert(file.clone(), Expected::Found(found));
        }
        self.expected.retain(|file, _| chain[..chain.len() - 1].contains(file));
        self.before = now;
        Ok(())
    }

    /// What an image names as its backing file; `None` if it is not complete.
    fn backing(&self, file: &str) -> Option<String> {
        let path = self.path(file);
        if !path.exists() {
            return None;
        }
        let done = qemu::img(args!["info", "-U", "--output=json", path]);
        let info = (done.code() == 0).then(|| done.json())?;
        info["backing-filename"].as_str().map(str::to_owned)
    }

    /// The chain below an image, by the images' headers; from the base up.
    fn chain_of(&self, file: &str) -> Vec<String> {
        let mut chain = vec![file.to_owned()];
        while let Some(next) = self.backing(&chain[0]) {
            let name = PathBuf::from(next).file_name().unwrap().to_str().unwrap().to_owned();
            chain.insert(0, name);
        }
        chain
    }

    /// `qemu-img check` of an image, after a recovery if it asks for one. Leaks are repaired.
    fn recover(&self, file: &str) -> Result<(), String> {
        let path = self.path(file);
        let check = || loop {
            // The kernel gives up a killed process's locks a moment after its end.
            let check = qemu::check(&path);
            if !check.stderr.contains("lock") {
                return check;
            }
            thread::sleep(Duration::from_millis(2));
        };
        let mut done: Finished = check();
        if done.stderr.contains("isobath check -r all") || done.code() == 3 {
            let _ = run_program(ISOBATH, args!["check", "-q", "-r", "all", &path]).ok();
            done = check();
        }
        if done.code() == 0 { Ok(()) } else { Err(format!("{file}: {}", done.report())) }
    }

    fn read(&self, file: &str) -> Result<Stamps, String> {
        Stamps::of(&qemu::read_disk(&self.path(file), "qcow2"))
            .map_err(|error| format!("{file} in {:?}: {error}", self.chain))
    }
}

/// Kills servers that do all there is, in turn.
fn kill_again_and_again(rounds: usize, first: usize) {
    let seed = Seed::new();
    let mut field = Field::new(&seed);
    for round in 0..rounds {
        println!("{}", field.round(ALL[(first + round) % ALL.len()]));
    }
    // A server that is not killed finishes what is left.
    let live = Live::start(field.directory.path(), &field.active(), &[]);
    if let Some(task) = field.interrupted.take() {
        field.job(task, &mut live.control(), None).unwrap();
    }
    let _ = live.stop();
    field.judge(&[]).unwrap();
    for file in &field.chain {
        qemu::assert_clean(&field.path(file));
    }
}

#[test]
fn what_was_flushed_is_there_after_a_kill() {
    kill_again_and_again(10, 0);
}

#[test]
fn what_was_flushed_is_there_after_other_kills() {
    kill_again_and_again(10, 3);
}

#[test]
fn what_was_flushed_and_is_not_there_is_told() {
    let directory = tempfile::tempdir().unwrap();
    qemu::create(&directory.path().join("base"), "qcow2", SIZE as u64, "");
    let live = Live::start(directory.path(), "base", &[]);
    let (clock, mut log) = (Clock::default(), Log::default());
    let mut client = Nbd::connect(&live.nbd(), DEVICE).unwrap();
    for stamp in 1..=3 {
        log.put(&mut client, &clock, stamp).unwrap();
    }
    let _ = live.stop();
    let now = Stamps::of(&qemu::read_disk(&directory.path().join("base"), "qcow2")).unwrap();
    let none = Stamps::none(SECTORS as usize);
    let logs = [log];
    // Three moments for each write: it was sent, answered, flushed.
    let window = |from, until| Window { from, until, flushed: true };
    assert_eq!(judge(&none, &logs, window(9, NEVER), &now), Ok(()));
    assert_eq!(judge(&none, &logs, window(0, NEVER), &none), Ok(()));
    assert!(judge(&none, &logs, window(3, NEVER), &none).is_err());
    assert!(judge(&none, &logs, window(3, 6), &now).is_err());
    assert_eq!(judge(&none, &logs, window(3, 7), &now), Ok(()));
}
