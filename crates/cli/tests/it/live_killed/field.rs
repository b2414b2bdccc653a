//! A chain, its servers, and who uses them.

use super::{Doing, NEVER, SECTORS, SIZE};
use crate::live::clients::{Frontend, Kill};
use crate::live::load::{Log, Shared, Stamps, Window, run};
use crate::live::{DEVICE, ISOBATH, Live};
use isobath_qmp::client::ClientError;
use isobath_testkit::process::{Finished, run as run_command};
use isobath_testkit::qemu;
use isobath_testkit::seed::Seed;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;
use tempfile::TempDir;

/// The second disk of a server that has two.
pub(super) const OTHER: &str = "other";

/// What an image below the active one must hold.
pub(super) enum Expected {
    /// What was found there before.
    Found(Stamps),
    /// What was written until some moment since the server started.
    Written(Window),
}

/// A change of the chain that was asked for and not confirmed.
pub(super) enum Unsure {
    /// The file may be the active image; since when.
    Snapshot(String, u64),
    /// The base of the commit, or the target of the mirror, may be the active image.
    Complete(String),
}

/// A job as it was asked for: the command, its top and its base.
#[derive(Clone, Debug)]
pub(super) struct Task {
    pub(super) command: &'static str,
    pub(super) top: String,
    pub(super) base: String,
}

/// A chain and what is known of it.
pub(super) struct Field {
    pub(super) directory: TempDir,
    pub(super) rng: StdRng,
    /// From the base up to the active image.
    pub(super) chain: Vec<String>,
    pub(super) expected: BTreeMap<String, Expected>,
    /// What the disk held when the server was started, and what the other disk did.
    pub(super) before: Stamps,
    pub(super) other: Stamps,
    pub(super) shared: Shared,
    pub(super) unsure: Option<Unsure>,
    /// The job that the server was killed in.
    pub(super) interrupted: Option<Task>,
    pub(super) epoch: u32,
    pub(super) files: usize,
    /// What a client wrote through an export that was added.
    pub(super) added: Option<Log>,
    /// The disk's size, and one that it may have since a kill.
    pub(super) size: u64,
    pub(super) may_be: u64,
    /// Answers to a client that is given the disk later outlive the server.
    pub(super) lasting: bool,
}

/// How a server is started, and by which frontends its disks are used.
struct Setting {
    metadata: &'static str,
    options: Vec<String>,
    frontends: Vec<Frontend>,
    /// Answers outlive the server, by disk.
    survives: [bool; 2],
    two: bool,
}

impl Drop for Field {
    fn drop(&mut self) {
        for file in ["fuse", "fuse2"] {
            let path = self.path(file);
            let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
            if mounts.lines().any(|line| line.split(' ').nth(1) == path.to_str()) {
                let _ = run_command(Command::new("umount").arg("-l").arg(path));
            }
        }
    }
}

impl Field {
    pub(super) fn new(seed: &Seed) -> Self {
        let directory = tempfile::tempdir().unwrap();
        for image in ["base", OTHER] {
            let path = directory.path().join(image);
            qemu::create(&path, "qcow2", SIZE as u64, "cluster_size=16k");
        }
        for file in ["fuse", "fuse2"] {
            let _ = File::create(directory.path().join(file)).unwrap();
        }
        Self {
            directory,
            rng: seed.rng(),
            chain: vec!["base".into()],
            expected: BTreeMap::new(),
            before: Stamps::none(SECTORS as usize),
            other: Stamps::none(SECTORS as usize),
            shared: Shared::default(),
            unsure: None,
            interrupted: None,
            epoch: 0,
            files: 0,
            added: None,
            size: SIZE as u64,
            may_be: SIZE as u64,
            lasting: false,
        }
    }

    pub(super) fn path(&self, file: &str) -> PathBuf {
        self.directory.path().join(file)
    }

    pub(super) fn active(&self) -> String {
        self.chain.last().unwrap().clone()
    }

    fn setting(&mut self, doing: Doing) -> Setting {
        let metadata = ["auto", "journal", "ordered", "embedded"][self.rng.random_range(0..4)];
        let threads = ["1", "2"][self.rng.random_range(0..2)];
        let mut options = vec!["--metadata", metadata, "--threads", threads];
        let two = self.rng.random_ratio(1, 3);
        // An export that is added is the first of its kind.
        let vhost = doing != Doing::Export && self.rng.random_ratio(1, 2);
        let fuse = self.rng.random_ratio(1, 2);
        let mut frontends = vec![Frontend::Nbd(self.path("nbd"), DEVICE.into())];
        if vhost {
            options.extend(["--vhost-user-blk", "unix:vhost"]);
            frontends.push(Frontend::Vhost(self.path("vhost")));
        }
        if fuse {
            options.extend(["--fuse", "fuse"]);
            frontends.push(Frontend::Fuse(self.path("fuse")));
        }
        // In mode `ordered` only a flush makes anything last.
        let lasting = metadata != "ordered";
        self.lasting = lasting;
        let mut survives = [vhost && lasting, false];
        // The two frontends of the first disk that its loads use; then that of the other disk.
        let mut used = Vec::new();
        for _ in 0..2 {
            used.push(frontends[self.rng.random_range(0..frontends.len())].clone());
        }
        if two {
            options.extend([OTHER, "--export-name", OTHER]);
            let mut frontends = vec![Frontend::Nbd(self.path("nbd"), OTHER.into())];
            if vhost && self.rng.random_ratio(1, 2) {
                options.extend(["--vhost-user-blk", "unix:vhost2"]);
                frontends.push(Frontend::Vhost(self.path("vhost2")));
                survives[1] = lasting;
            }
            if fuse && self.rng.random_ratio(1, 2) {
                options.extend(["--fuse", "fuse2"]);
                frontends.push(Frontend::Fuse(self.path("fuse2")));
            }
            used.push(frontends[self.rng.random_range(0..frontends.len())].clone());
        }
        let options = options.into_iter().map(str::to_owned).collect();
        Setting { metadata, options, frontends: used, survives, two }
    }

    fn start(&self, image: &str, setting: &Setting) -> Live {
        let options: Vec<&str> = setting.options.iter().map(String::as_str).collect();
        Live::start(self.directory.path(), image, &options)
    }

    /// Serves the disk under load, does something, and kills the server meanwhile. Says what came of it.
    pub(super) fn round(&mut self, doing: Doing) -> String {
        self.epoch += 1;
        let setting = self.setting(doing);
        let live = self.start(&self.active(), &setting);
        let shared = std::mem::take(&mut self.shared);
        // Sooner rather than later.
        let delay = Duration::from_micros(self.rng.random_range(0_u64..300).pow(2));
        let stamp = self.epoch << 24;
        // The next server is started while the last one dies, if it is known what it is to serve.
        let known = matches!(
            doing,
            Doing::StreamIntoActive | Doing::StreamBelow | Doing::CommitBelow | Doing::Load
        );
        let hurry = known && self.rng.random_ratio(1, 2);
        let active = Mutex::new(self.active());
        let seeds: Vec<u64> = setting.frontends.iter().map(|_| self.rng.random()).collect();
        let directory = self.directory.path().to_owned();
        let (logs, result, next) = thread::scope(|scope| {
            let third = SECTORS / 3;
            let parts = [0..third, third..2 * third, 0..SECTORS];
            let loads: Vec<_> = setting
                .frontends
                .iter()
                .zip(parts)
                .zip(&seeds)
                .enumerate()
                .map(|(number, ((frontend, part), seed))| {
                    let survives = setting.survives[number / 2];
                    let shared = &shared;
                    let mut rng = StdRng::seed_from_u64(*seed);
                    scope.spawn(move || run(frontend, part, shared, stamp, survives, &mut rng))
                })
                .collect();
            let (armed, killer) = mpsc::channel();
            let (server, shared, active, setting) = (&live.server, &shared, &active, &setting);
            let next = scope.spawn(move || {
                let _ = killer.recv();
                thread::sleep(delay);
                let kill = || shared.kill.carry_out(|| server.signal(libc::SIGKILL));
                if !hurry {
                    kill();
                    return None;
                }
                let image = active.lock().unwrap().clone();
                let options: Vec<&str> = setting.options.iter().map(String::as_str).collect();
                let start = || Live::start(&directory, &image, &options);
                Some(while_looked_at(server.pid(), || {
                    kill();
                    start()
                }))
            });
            let result = if doing == Doing::Index {
                thread::sleep(Duration::from_millis(20));
                drop(armed);
                Ok(())
            } else {
                self.change(doing, &mut live.control(), shared, active, armed)
            };
            let logs: Vec<_> = loads.into_iter().map(thread::ScopedJoinHandle::join).collect();
            (logs, result, next.join().unwrap())
        });
        self.shared = shared;
        self.shared.kill = Kill::default();
        let done = live.server.wait();
        assert_eq!(done.code(), -1, "{}", done.report());
        // An error that the server gave a client is in its log, so it is not taken for one of the kill.
        let failed = ["ERROR", "request failed"].iter().any(|word| done.stderr.contains(word));
        assert!(!failed, "{}", done.report());
        // What a load has panicked for was printed when it did.
        let logs: Result<Vec<Log>, _> = logs.into_iter().collect();
        let Ok(logs) = logs else { panic!("a load failed; {}", done.report()) };
        let text = self.describe(doing, &setting, &result, hurry);
        self.judged(&setting, logs, next, &text, &done);
        if doing == Doing::Index {
            self.index();
        }
        text
    }

    fn describe(
        &self,
        doing: Doing,
        setting: &Setting,
        result: &Result<(), ClientError>,
        hurry: bool,
    ) -> String {
        let way = match (result, &self.unsure, &self.interrupted) {
            (Ok(()), ..) => "after it",
            (_, Some(Unsure::Snapshot(..)), _) => "in a snapshot",
            (_, Some(Unsure::Complete(_)), _) => "in completion",
            (_, _, Some(_)) => "in the job",
            _ => "between",
        };
        let hurry = if hurry { ", the next server in a hurry" } else { "" };
        let metadata = setting.metadata;
        let frontends = &setting.frontends;
        let kinds: Vec<&str> = frontends
            .iter()
            .map(|frontend| match frontend {
                Frontend::Nbd(..) => "nbd",
                Frontend::Vhost(_) => "vhost-user-blk",
                Frontend::Fuse(_) => "fuse",
            })
            .collect();
        format!("{doing:?} with {metadata}, loads by {kinds:?}: killed {way}{hurry}")
    }

    /// Judges the disks by what their clients were told.
    fn judged(
        &mut self,
        setting: &Setting,
        mut logs: Vec<Log>,
        next: Option<Live>,
        text: &str,
        done: &Finished,
    ) {
        let fail = |error: String| -> ! { panic!("{text}: {error}\n{}", done.report()) };
        let others = logs.split_off(logs.len().min(2));
        logs.extend(self.added.take());
        let mut served = None;
        if let Some(live) = next {
            served = Some(self.read_served(&live).unwrap_or_else(|error| fail(error)));
            let _ = live.stop();
        } else if logs.iter().any(Log::survives)
            && !matches!(self.unsure, Some(Unsure::Complete(_)))
        {
            // What a client was told is with the next writer of the image that was active. That may be a
            // backing file now.
            let mut live = self.start(&self.active(), setting);
            if self.settle_snapshot() {
                let _ = live.stop();
                live = self.start(&self.active(), setting);
            }
            served = Some(self.read_served(&live).unwrap_or_else(|error| fail(error)));
            let _ = live.stop();
        }
        self.settle_snapshot();
        self.judge(&logs, served).unwrap_or_else(|error| fail(error));
        if setting.two {
            self.judge_other(&others).unwrap_or_else(|error| fail(error));
        }
    }

    /// Finishes what was interrupted, and finds every image in order.
    pub(super) fn end(&mut self) {
        let live = Live::start(self.directory.path(), &self.active(), &[]);
        if let Some(task) = self.interrupted.take() {
            let active = Mutex::new(self.active());
            self.job(task, &mut live.control(), None, &active).unwrap();
        }
        let _ = live.stop();
        self.judge(&[], None).unwrap();
        for file in &self.chain {
            qemu::assert_clean(&self.path(file));
        }
    }

    /// Kills who writes the chain's index.
    fn index(&mut self) {
        let active = self.active();
        let mut command = Command::new(ISOBATH);
        let mut child = command
            .current_dir(self.directory.path())
            .args(["index", "-q", &active])
            .spawn()
            .unwrap();
        thread::sleep(Duration::from_micros(self.rng.random_range(0_u64..160).pow(2)));
        let _ = child.kill();
        let _ = child.wait().unwrap();
        self.judge(&[], None).unwrap_or_else(|error| panic!("killed in an index: {error}"));
    }
}

/// Does something while others look at a process's memory, which keeps what it holds for longer.
fn while_looked_at<T>(pid: u32, work: impl FnOnce() -> T) -> T {
    let path = PathBuf::from(format!("/proc/{pid}/smaps"));
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| look(&path, &done));
        }
        let _ends = EndsLooks(&done);
        work()
    })
}

/// Ends who looks when it is dropped, by a panic too.
struct EndsLooks<'a>(&'a AtomicBool);

impl Drop for EndsLooks<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

fn look(path: &Path, done: &AtomicBool) {
    while !done.load(Ordering::SeqCst) {
        if fs::read(path).is_err() {
            thread::yield_now();
        }
    }
}

/// What counts after a kill: what was flushed, or answered where answers outlive the server.
pub(super) fn promised(from: u64) -> Window {
    Window { from, until: NEVER, flushed: true }
}
