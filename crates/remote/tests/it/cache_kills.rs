//! Users of a cache that are killed at any system call, or at any other moment, leave nothing wrong and nothing behind.

use crate::cache::{Layer, files, names, open_within};
use isobath_remote::BLOCK;
use isobath_remote::Digest;
use isobath_remote::cache::{Cache, LEAST_LIMIT, ObjectKind};
use isobath_remote::store::Version;
use std::io::{BufRead, BufReader};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

/// Set for a process that is to be alone, and what it is told.
const TOLD: &str = "ISOBATH_TEST_CACHE";

fn version() -> Version {
    Version { tag: Some("tag".to_owned()), number: None }
}

fn open(directory: &Path) -> Arc<Cache> {
    open_within(directory, LEAST_LIMIT)
}

/// Does a little of everything.
fn use_all(directory: &Path, layers: &[Layer]) {
    let cache = open(directory);
    for (number, of_store) in layers.iter().enumerate() {
        let layer = of_store.open(&cache);
        for block in 0..layer.blocks() {
            of_store.read(&layer, block);
            layer.fill(block, of_store.block(block));
            of_store.read(&layer, block);
        }
        let object = number.to_string().into_bytes();
        cache.keep(ObjectKind::Heads, &Digest::of(&object), &object).unwrap();
        cache.keep_manifest(&format!("s3://b/{number}"), &object, &version());
    }
    cache.tidy().unwrap();
}

/// Checks what is there.
fn check(directory: &Path, layers: &[Layer]) {
    let cache = open(directory);
    isobath_testkit::until("nobody else tidies up", || cache.tidy().unwrap());
    for (number, of_store) in layers.iter().enumerate() {
        let layer = of_store.open(&cache);
        of_store.present(&layer);
        // Everything can be kept that there is room for.
        assert!(layer.is_attached());
        let object = number.to_string().into_bytes();
        if let Some(held) = cache.object(ObjectKind::Heads, &Digest::of(&object)) {
            assert_eq!(**held.bytes(), object);
        }
        if let Some(manifest) = cache.manifest(&format!("s3://b/{number}")) {
            assert_eq!((manifest.bytes(), manifest.version()), (&*object, &version()));
        }
    }
    for inner in ["", "layers", "objects", "manifests"] {
        let left = names(&directory.join(inner));
        assert!(!left.iter().any(|name| name.starts_with(".new-")), "{left:?}");
    }
    let inner = directory.join("layers");
    // The cache's own thread may just be removing what is empty.
    isobath_testkit::until("there are data for each map", || {
        files(&inner, ".map").len() == files(&inner, ".data").len()
    });
}

/// Runs `work` in a child that is killed at its system call number `number`; whether it was.
fn is_killed_at(number: usize, work: impl FnOnce()) -> bool {
    // SAFETY: this process has no other thread that does anything. The child does not return.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: system calls without memory.
        unsafe {
            libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0);
            libc::raise(libc::SIGSTOP);
        }
        let done = catch_unwind(AssertUnwindSafe(work));
        // SAFETY: ends the process.
        unsafe { libc::_exit(i32::from(done.is_err())) };
    }
    assert!(child > 0);
    let wait = || {
        let mut status = 0;
        // SAFETY: `status` is a live value.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        status
    };
    let mut stops = 0;
    let mut status = wait();
    while libc::WIFSTOPPED(status) {
        // Each call stops twice: before and after it.
        if stops == 2 * number + 1 {
            // SAFETY: a system call without memory.
            unsafe { libc::kill(child, libc::SIGKILL) };
        }
        stops += 1;
        // SAFETY: as above.
        unsafe { libc::ptrace(libc::PTRACE_SYSCALL, child, 0, 0) };
        status = wait();
    }
    if libc::WIFSIGNALED(status) {
        assert_eq!(libc::WTERMSIG(status), libc::SIGKILL);
        return true;
    }
    assert_eq!(status, 0, "the child failed");
    false
}

#[test]
fn who_is_killed_at_any_system_call_leaves_right_blocks_and_no_files() {
    if std::env::var_os(TOLD).is_none() {
        let mut alone = Command::new(std::env::current_exe().unwrap());
        let name = "cache_kills::who_is_killed_at_any_system_call_leaves_right_blocks_and_no_files";
        let ended = alone.args(["--exact", name]).env(TOLD, "1").output().unwrap();
        let text = String::from_utf8_lossy(&ended.stdout);
        assert!(ended.status.success() && text.contains("1 passed"), "{text}");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let layers = [Layer::new(1, 2 * BLOCK), Layer::new(2, 3)];
    let mut number = 0;
    // In an empty directory, and in the one that was left.
    loop {
        let empty = tempfile::tempdir().unwrap();
        let one = is_killed_at(number, || use_all(empty.path(), &layers));
        check(empty.path(), &layers);
        let other = is_killed_at(number, || use_all(directory.path(), &layers));
        check(directory.path(), &layers);
        if !one && !other {
            break;
        }
        number += 1;
    }
    assert!(number > 50, "only {number} calls");
}

/// What a user in a process of its own does until it is killed: fills and reads blocks, and evicts.
fn work(directory: &Path, seed: u64) {
    let layers = [Layer::new(1, 50 * BLOCK), Layer::new(2, 30 * BLOCK + 5)];
    let cache = open(directory);
    let mut state = seed;
    let mut next = |most: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) % most
    };
    println!("\nworking");
    loop {
        let opened: Vec<_> = layers.iter().map(|layer| layer.open(&cache)).collect();
        for _ in 0..64 {
            let number = next(2) as usize;
            let (of_store, layer) = (&layers[number], &opened[number]);
            let block = next(layer.blocks());
            match next(8) {
                0..3 => drop(layer.fill(block, of_store.block(block))),
                3 => layer.doubt(block),
                _ => drop(of_store.read(layer, block)),
            }
        }
        cache.tidy().unwrap();
    }
}

fn start(directory: &Path, seed: usize) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([
        "--exact",
        "cache_kills::users_that_are_killed_do_not_harm_others",
        "--nocapture",
    ]);
    command.env(TOLD, format!("{seed} {}", directory.display())).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line == "working"));
    child
}

#[test]
fn users_that_are_killed_do_not_harm_others() {
    if let Ok(told) = std::env::var(TOLD) {
        let (seed, directory) = told.split_once(' ').unwrap();
        work(Path::new(directory), seed.parse().unwrap());
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let layers = [Layer::new(1, 50 * BLOCK), Layer::new(2, 30 * BLOCK + 5)];
    let cache = open(directory.path());
    let mut children: Vec<Child> = (0..2).map(|seed| start(directory.path(), seed)).collect();
    for round in 2..10 {
        let opened: Vec<_> = layers.iter().map(|layer| layer.open(&cache)).collect();
        let mut blocks = 0;
        for (of_store, layer) in layers.iter().zip(&opened) {
            for block in 0..layer.blocks() {
                layer.fill(block, of_store.block(block));
                blocks += u64::from(of_store.read(layer, block));
            }
        }
        assert!(blocks > 0);
        let slot = round % 2;
        // It fails if the child has ended by itself: by a block that was wrong.
        assert!(children[slot].try_wait().unwrap().is_none(), "a user has failed");
        children[slot].kill().unwrap();
        children[slot].wait().unwrap();
        children[slot] = start(directory.path(), round);
    }
    for mut child in children {
        assert!(child.try_wait().unwrap().is_none(), "a user has failed");
        child.kill().unwrap();
        child.wait().unwrap();
    }
    drop(cache);
    check(directory.path(), &layers);
}
