//! Processes that push, pull, collect, set traces and fill a cache are killed at any system call of any of their
//! threads, one after the other on the same store: nothing is lost, and nothing is wrong.

use crate::cache::{open_within, tidy};
use crate::chains::{Chain, fetch, gc, verify};
use crate::stores::Aged;
use isobath_remote::served::{self, RemoteHost};
use isobath_remote::store::{Directory, Store};
use isobath_remote::{Address, LocalLayer, Manifest, Progress, Replace, push, remove, set_trace};
use isobath_ring::block_on;
use isobath_storage::{Host, IoBuf, OpenMode, Storage};
use isobath_testkit::seed::Seed;
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, SystemTime};

/// Set for the process that is to be alone.
const ALONE: &str = "ISOBATH_TEST_STORE_KILLS";

/// How many kills, unless `ISOBATH_REMOTE_KILLS` says so.
const KILLS: u64 = 60;

const DAY: Duration = Duration::from_hours(24);

/// Bytes of the cache.
const CACHE: u64 = 64 << 20;

/// Layers of the longest chain.
const LAYERS: usize = 5;

const NAMES: [&str; 2] = ["vm", "other"];

/// What a process does that may be killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    /// Pushes so many layers under the name with this number.
    Push(usize, usize),
    /// Records what is read of that chain, and sets it as its trace.
    Trace(usize),
    /// Pulls it.
    Pull(usize),
    /// Reads it through the cache.
    Read(usize),
    /// Removes it.
    Remove(usize),
    /// Collects what no chain has.
    Collect,
}

impl Action {
    const KINDS: usize = 6;

    fn kind(self) -> usize {
        match self {
            Self::Push(..) => 0,
            Self::Trace(_) => 1,
            Self::Pull(_) => 2,
            Self::Read(_) => 3,
            Self::Remove(_) => 4,
            Self::Collect => 5,
        }
    }

    fn random(random: &mut Random) -> Self {
        let name = random.below(2) as usize;
        match random.below(16) {
            0..6 => Self::Push(name, random.below(LAYERS as u64) as usize + 1),
            6..8 => Self::Trace(name),
            8..10 => Self::Pull(name),
            10..13 => Self::Read(name),
            13 => Self::Remove(name),
            _ => Self::Collect,
        }
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) % most
    }
}

/// The store, the cache, and the chain whose beginnings are pushed.
struct Stage {
    chain: Chain,
    directory: tempfile::TempDir,
}

impl Stage {
    fn new() -> Self {
        let mut chain = Chain::new();
        (chain.names.len()..LAYERS).for_each(|number| chain.grow(&format!("more-{number}.qcow2")));
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("store")).unwrap();
        Self { chain, directory }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn store(&self) -> Directory {
        Directory::open(&self.path("store")).unwrap()
    }

    fn layers(&self, count: usize) -> Vec<LocalLayer> {
        self.chain.layers().into_iter().take(count).collect()
    }

    /// The manifest of a chain, if there is one, as another process sees it.
    fn manifest(&self, name: usize) -> Option<Vec<u8>> {
        fs::read(self.path(&format!("store/manifests/{}.json", NAMES[name]))).ok()
    }

    /// A chain as a server reads it, and its layers' files from the base up.
    fn served(&self, name: usize) -> (std::sync::Arc<served::Chain>, Vec<served::RemoteFile>) {
        let cache = open_within(&self.path("cache"), CACHE);
        let address = format!("file://{}/{}", self.path("store").display(), NAMES[name]);
        let address = Address::parse(&address).unwrap();
        let limit = Some(Duration::from_mins(5));
        let chain = served::Chain::open(&address, &cache, limit).unwrap();
        let host = RemoteHost::default();
        host.add(&chain);
        let names: Vec<_> = chain.layers().map(|(name, _)| name).collect();
        let open = |name: &PathBuf| block_on(host.open(name, OpenMode::default())).unwrap();
        let files = names.iter().rev().map(open).collect();
        (chain, files)
    }

    /// Reads places of all layers, and compares them with the files that were pushed.
    fn read(&self, files: &[served::RemoteFile]) {
        for (number, file) in files.iter().enumerate() {
            let local = fs::File::open(self.chain.path(number)).unwrap();
            let length = local.metadata().unwrap().len();
            for place in 0..8 {
                let offset = length / 8 * place;
                let most = usize::try_from((length - offset).min(70_000)).unwrap();
                let mut expected = vec![0; most];
                local.read_exact_at(&mut expected, offset).unwrap();
                let found = block_on(file.read_at(offset, IoBuf::zeroed(most))).unwrap();
                assert!(found[..] == expected[..], "layer {number} at {offset}");
            }
        }
    }

    /// Does something in a process of its own. What fails there fails the test.
    fn act(&self, action: Action) {
        let store = self.store();
        match action {
            Action::Push(name, layers) => {
                let (layers, progress) = (self.layers(layers), Progress::default());
                push(&store, NAMES[name], &layers, None, Replace::Unchanged, &progress).unwrap();
            }
            Action::Trace(name) => {
                let (chain, files) = self.served(name);
                let recording = chain.record();
                self.read(&files);
                let (trace, progress) = (recording.trace(), Progress::default());
                let set = |trace| {
                    set_trace(&store, NAMES[name], trace, Replace::Unchanged, &progress).unwrap()
                };
                set(None);
                set(Some(&trace));
            }
            Action::Pull(name) => {
                fs::create_dir_all(self.path("pulled")).unwrap();
                fetch(&store, NAMES[name], &self.path("pulled")).unwrap();
            }
            Action::Read(name) => {
                let (chain, files) = self.served(name);
                if let Some(thread) = chain.follow_trace().unwrap() {
                    thread.join().unwrap();
                }
                self.read(&files);
            }
            Action::Remove(name) => remove(&store, NAMES[name]).unwrap(),
            Action::Collect => drop(gc(&Aged(&store), DAY, true).unwrap()),
        }
    }

    /// Checks everything that is there, in a process of its own. `before` are the manifests before the action.
    fn check(&self, action: Action, was_killed: bool, before: &[Option<Vec<u8>>; 2]) {
        let store = self.store();
        for (name, before) in before.iter().enumerate() {
            let now = self.manifest(name);
            if now.is_some() {
                assert_eq!(verify(&store, NAMES[name]).unwrap().problems, Vec::<String>::new());
            }
            let is_own = matches!(action,
                Action::Push(own, _) | Action::Trace(own) | Action::Remove(own) if own == name);
            if now == *before && (was_killed || !is_own) {
                continue;
            }
            let decoded = now.map(|bytes| Manifest::decode(NAMES[name], &bytes).unwrap());
            match action {
                Action::Push(_, layers) if is_own => {
                    assert_eq!(decoded.expect("it was pushed").layers.len(), layers);
                }
                Action::Trace(_) if is_own => {
                    let before = Manifest::decode(NAMES[name], before.as_ref().unwrap()).unwrap();
                    let decoded = decoded.expect("it stays");
                    assert_eq!(decoded.layers, before.layers);
                    assert!(was_killed || decoded.trace.is_some());
                }
                Action::Remove(_) if is_own => assert!(decoded.is_none()),
                _ => panic!("{action:?} has changed '{}'", NAMES[name]),
            }
        }
        let lock = self.path("store/gc.lock");
        assert!(!lock.exists() || was_killed && action == Action::Collect, "a lock is left");
        let pulled = self.path("pulled");
        if pulled.exists() {
            self.chain.is_part(&pulled, false);
        }
    }

    /// What somebody does who finds all of it: it works, and leaves nothing behind.
    fn use_all(&self) {
        let store = self.store();
        gc(&Aged(&store), DAY, true).unwrap();
        // What was begun an hour ago is swept by a collection a day later.
        store.sweep(SystemTime::now() + DAY).unwrap();
        let mut layers = BTreeSet::new();
        for (name, called) in NAMES.iter().enumerate() {
            if self.manifest(name).is_some() {
                let (chain, files) = self.served(name);
                assert_eq!(files.len(), chain.depth());
                self.read(&files);
                let directory = tempfile::tempdir().unwrap();
                fetch(&store, called, directory.path()).unwrap();
                self.chain.is_part(directory.path(), false);
                assert_eq!(fs::read_dir(directory.path()).unwrap().count(), chain.depth());
                let bytes = self.manifest(name).unwrap();
                let manifest = Manifest::decode(called, &bytes).unwrap();
                layers.extend(manifest.layers.iter().map(|layer| layer.digest.to_string()));
            }
        }
        let names = |inner: &str| -> BTreeSet<String> {
            let Ok(entries) = fs::read_dir(self.path("store").join(inner)) else {
                return BTreeSet::new();
            };
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
        };
        assert_eq!(names("layers"), layers, "what no chain has is collected");
        for inner in ["pushes", "tables", "heads", "traces", "manifests"] {
            let left = names(inner);
            let is_needed = |name: &String| inner != "pushes" && !name.starts_with('.');
            assert!(left.iter().all(is_needed), "{inner}: {left:?}");
            assert!(!layers.is_empty() || left.is_empty(), "{inner}: {left:?}");
        }
        if self.path("cache").exists() {
            tidy(&open_within(&self.path("cache"), CACHE));
        }
    }
}

/// Runs `work` in a child, which must succeed.
fn apart(work: impl FnOnce()) {
    let (killed, _) = traced(None, work);
    assert!(!killed);
}

/// More calls than anything makes here.
const NEVER: usize = usize::MAX / 4;

/// Runs `work` in a child that is killed when its threads have made so many system calls together, if that is given.
/// Whether it was, and how many there were.
fn traced(calls: Option<usize>, work: impl FnOnce()) -> (bool, usize) {
    // SAFETY: this process has no other thread that does anything. The child does not return.
    let child = unsafe { libc::fork() };
    if child == 0 {
        if calls.is_some() {
            // SAFETY: system calls without memory.
            unsafe {
                if libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) != 0 {
                    libc::_exit(3);
                }
                libc::raise(libc::SIGSTOP);
            }
        }
        let done = catch_unwind(AssertUnwindSafe(work));
        // SAFETY: ends the process.
        unsafe { libc::_exit(i32::from(done.is_err())) };
    }
    assert!(child > 0);
    let (mut is_first, mut stops) = (true, 0);
    loop {
        let mut status = 0;
        // SAFETY: `status` is a live value. This process has no other children.
        let found = unsafe { libc::waitpid(-1, &raw mut status, libc::__WALL) };
        assert!(found > 0, "{}", std::io::Error::last_os_error());
        if !libc::WIFSTOPPED(status) {
            if found != child {
                continue;
            }
            if libc::WIFSIGNALED(status) {
                assert_eq!(libc::WTERMSIG(status), libc::SIGKILL);
                return (true, stops / 2);
            }
            assert_eq!(status, 0, "the child failed");
            return (false, stops / 2);
        }
        let mut signal = libc::WSTOPSIG(status);
        if is_first {
            let options =
                libc::PTRACE_O_TRACESYSGOOD | libc::PTRACE_O_TRACECLONE | libc::PTRACE_O_EXITKILL;
            // SAFETY: a system call without memory.
            unsafe { libc::ptrace(libc::PTRACE_SETOPTIONS, child, 0, options) };
            is_first = false;
        }
        if signal == libc::SIGTRAP | 0x80 {
            // Each call stops twice: before and after it.
            if calls.is_some_and(|calls| stops == 2 * calls + 1) {
                // SAFETY: a system call without memory.
                unsafe { libc::kill(child, libc::SIGKILL) };
            }
            stops += 1;
        }
        // Those are of the tracing: a call, a new thread, the first stop of one.
        if [libc::SIGTRAP | 0x80, libc::SIGTRAP, libc::SIGSTOP].contains(&signal) {
            signal = 0;
        }
        // SAFETY: a system call without memory. A thread that was killed meanwhile is gone.
        unsafe { libc::ptrace(libc::PTRACE_SYSCALL, found, 0, signal) };
    }
}

/// All kills of a run, in the process that is alone.
fn run(kills: u64, seed: u64) {
    let stage = Stage::new();
    let mut random = Random(seed);
    // How many calls each kind of action has made so far.
    let mut most = [0; Action::KINDS];
    let mut killed = [0_u64; Action::KINDS];
    while killed.iter().sum::<u64>() < kills {
        let action = Action::random(&mut random);
        let before = [0, 1].map(|name| stage.manifest(name));
        if let Action::Trace(name) | Action::Pull(name) | Action::Read(name) | Action::Remove(name) =
            action
            && before[name].is_none()
        {
            continue;
        }
        if random.below(4) == 0 {
            let _ = fs::remove_dir_all(stage.path("pulled"));
        }
        let kind = action.kind();
        // The first of a kind, and some later ones, go through, and tell how many calls they make.
        let calls = match most[kind] {
            most if most > 0 && random.below(6) > 0 => random.below(most as u64) as usize,
            _ => NEVER,
        };
        println!("{action:?}, {calls} calls");
        let (was_killed, made) = traced(Some(calls), || stage.act(action));
        most[kind] = most[kind].max(made);
        killed[kind] += u64::from(was_killed);
        apart(|| stage.check(action, was_killed, &before));
        if was_killed && action == Action::Collect || random.below(8) == 0 {
            apart(|| stage.use_all());
        }
    }
    let [pushes, traces, pulls, reads, removals, collections] = killed;
    println!(
        "killed pushes: {pushes}, traces: {traces}, pulls: {pulls}, readers: {reads}, removals: {removals}, \
         collections: {collections}"
    );
    println!("{kills} kills");
}

#[test]
fn whoever_is_killed_at_a_store_loses_nothing() {
    let told = std::env::var("ISOBATH_REMOTE_KILLS");
    let kills: u64 = told.map_or(KILLS, |told| told.parse().expect("a number of kills"));
    let seed = Seed::new();
    if std::env::var_os(ALONE).is_some() {
        return run(kills, seed.value());
    }
    let mut alone = Command::new(std::env::current_exe().unwrap());
    let name = "store_kills::whoever_is_killed_at_a_store_loses_nothing";
    alone.args(["--exact", name, "--nocapture", "--test-threads=1"]).env(ALONE, "1");
    alone.env("ISOBATH_SEED", seed.value().to_string());
    assert!(alone.status().unwrap().success());
}
