//! Chains on a real S3 server, the Versity gateway: signatures, conditions and uploads in parts that are not ours.
//!
//! `make s3-server` builds the server and runs these tests. Other runs leave them out: the server is built with a
//! toolchain that this project does not need else.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by a panic")]
#![allow(dead_code, reason = "what the tests of stores share is more than these use")]

#[path = "../it/chains.rs"]
mod chains;
#[path = "../it/proxy.rs"]
mod proxy;

use chains::Chain;
use isobath_remote::store::{Bucket, Limits, Outcome, Store};
use isobath_remote::{
    Collection, Depth, Error, Names, Progress, Pushed, Replace, Result, Target, check, collect,
    list, pull, push, remove,
};
use isobath_testkit::process::PATIENCE;
use object_store::aws::AmazonS3Builder;
use proxy::{Proxy, Rule, Upstream, Way};
use reqwest::ClientBuilder;
use std::cell::RefCell;
use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Asks the server itself, whatever proxy the environment names.
fn direct() -> ClientBuilder {
    ClientBuilder::new().no_proxy()
}

/// The server, on a socket of its directory, and the port through which it is reached, also when it was started again.
struct Gateway {
    directory: TempDir,
    running: RefCell<Child>,
    proxy: Proxy,
}

impl Gateway {
    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        for part in ["data/bucket", "metadata"] {
            fs::create_dir_all(directory.path().join(part)).unwrap();
        }
        let running = RefCell::new(Self::run(directory.path()));
        let proxy = Proxy::start(Upstream::Unix(directory.path().join("socket")));
        Self { directory, running, proxy }
    }

    fn run(directory: &Path) -> Child {
        let tool =
            PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../target/tools/bin/versitygw");
        assert!(tool.exists(), "{} is missing: run 'make s3-server'", tool.display());
        let socket = directory.join("socket");
        // A server that was killed leaves it.
        let _ = fs::remove_file(&socket);
        let mut command = Command::new(tool);
        command
            .args(["--quiet", "--keep-alive", "--access", "key", "--secret", "secret", "--port"])
            .arg(&socket);
        command
            .args(["posix", "--sidecar"])
            .arg(directory.join("metadata"))
            .arg(directory.join("data"));
        let mut running = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let deadline = Instant::now() + PATIENCE;
        while UnixStream::connect(&socket).is_err() {
            assert!(
                running.try_wait().unwrap().is_none() && Instant::now() < deadline,
                "the server has ended"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        running
    }

    fn kill(&self) {
        let mut running = self.running.borrow_mut();
        running.kill().unwrap();
        running.wait().unwrap();
    }

    fn start_again(&self) {
        *self.running.borrow_mut() = Self::run(self.directory.path());
    }

    fn store(&self) -> Bucket {
        self.store_of("secret", &Arc::default())
    }

    fn store_of(&self, secret: &str, progress: &Arc<Progress>) -> Bucket {
        let builder = AmazonS3Builder::new()
            .with_bucket_name("bucket")
            .with_region("us-east-1")
            .with_access_key_id("key")
            .with_secret_access_key(secret)
            .with_endpoint(&self.proxy.endpoint)
            .with_allow_http(true);
        let limits = Limits { pause: Duration::from_millis(5), ..Limits::default() };
        Bucket::of_s3(builder, direct, "some/prefix", limits, progress).unwrap()
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let running = self.running.get_mut();
        let _ = running.kill();
        let _ = running.wait();
    }
}

fn send(store: &dyn Store, name: &str, chain: &Chain) -> Result<Pushed> {
    push(
        store,
        name,
        &chain.layers(),
        Some(&chain.index()),
        Replace::Unchanged,
        &Progress::default(),
    )
}

#[track_caller]
fn comes_back(store: &dyn Store, name: &str, chain: &Chain) {
    let checked = check(store, name, Depth::Digests, &Progress::default()).unwrap();
    assert_eq!(checked.problems, Vec::<String>::new());
    let directory = tempfile::tempdir().unwrap();
    let target = Target { directory: directory.path().to_owned(), name: None };
    let pulled = pull(store, name, &target, Names::Kept, &Progress::default()).unwrap();
    chain.is_part(directory.path(), true);
    chain.reads_as(&pulled.image);
}

fn gc(store: &dyn Store, break_lock: bool) -> Result<isobath_remote::Collected> {
    let how = Collection { grace: Duration::ZERO, dry_run: false, break_lock };
    collect(store, &how, &Progress::default())
}

#[test]
fn chains_are_pushed_listed_verified_pulled_removed_and_collected() {
    let (gateway, mut chain) = (Gateway::start(), Chain::new());
    let store = gateway.store();
    // The base is longer than a part.
    assert_eq!(send(&store, "vm", &chain).unwrap().sent, 3);
    comes_back(&store, "vm", &chain);
    chain.grow("next.qcow2");
    assert_eq!(send(&store, "vm", &chain).unwrap().sent, 1);
    assert_eq!(send(&store, "other", &Chain::small("disk.qcow2", 7)).unwrap().sent, 1);
    let names: Vec<String> = list(&store).unwrap().into_iter().map(|listed| listed.name).collect();
    assert_eq!(names, ["other", "vm"]);
    remove(&store, "other").unwrap();
    // The heads and the index of the shorter chain, and four objects of the other.
    assert_eq!(gc(&store, false).unwrap().objects, 6);
    comes_back(&store, "vm", &chain);
    assert!(store.head("gc.lock").unwrap().is_none() && store.list("pushes/").unwrap().is_empty());
}

#[test]
fn conditional_puts_keep_their_conditions() {
    let gateway = Gateway::start();
    let store = gateway.store();
    assert_eq!(store.put_if("gc.lock", b"one", None).unwrap(), Outcome::Done);
    assert_eq!(store.put_if("gc.lock", b"two", None).unwrap(), Outcome::Changed);
    let (bytes, version) = store.get("gc.lock", 100).unwrap().unwrap();
    assert_eq!(bytes, b"one");
    assert_eq!(store.put_if("gc.lock", b"three", Some(&version)).unwrap(), Outcome::Done);
    assert_eq!(store.put_if("gc.lock", b"four", Some(&version)).unwrap(), Outcome::Changed);
    store.delete("gc.lock").unwrap();
    assert_eq!(store.put_if("gc.lock", b"five", Some(&version)).unwrap(), Outcome::Changed);
    assert!(store.head("gc.lock").unwrap().is_none());
    store.delete("gc.lock").unwrap();
}

#[test]
fn of_two_pushes_to_a_name_at_once_one_is_told_of_the_other_or_both_follow_each_other() {
    let gateway = Gateway::start();
    let chains = [1, 2].map(|byte| Chain::small("disk.qcow2", byte));
    let store = gateway.store();
    let pushed = std::thread::scope(|scope| {
        let pushes = [0, 1].map(|number| {
            let (chain, store) = (&chains[number], &store);
            scope.spawn(move || send(store, "vm", chain))
        });
        pushes.map(|pushing| pushing.join().unwrap())
    });
    let done = pushed.iter().filter(|pushed| pushed.is_ok()).count();
    assert!(done > 0, "{pushed:?}");
    assert!(
        pushed.iter().all(|pushed| matches!(pushed, Ok(_) | Err(Error::Conflict(_)))),
        "{pushed:?}"
    );
    if done == 1 {
        comes_back(&store, "vm", &chains[usize::from(pushed[1].is_ok())]);
    }
    // Objects of one or of both.
    gc(&store, false).unwrap();
    assert!(check(&store, "vm", Depth::Digests, &Progress::default()).unwrap().problems.is_empty());
}

#[test]
fn wrong_keys_are_refused_at_once_and_the_message_says_so() {
    let (gateway, chain) = (Gateway::start(), Chain::small("disk.qcow2", 1));
    let store = gateway.store_of("wrong", &Arc::default());
    let error = send(&store, "vm", &chain).unwrap_err().to_string();
    assert!(error.contains("403") && error.contains("manifests/vm.json"), "{error}");
    assert!(!error.contains("given up") && !error.contains("wrong"), "{error}");
    let error = list(&store).unwrap_err().to_string();
    assert!(error.contains("403"), "{error}");
    let error = gc(&store, false).unwrap_err().to_string();
    assert!(error.contains("403"), "{error}");
    assert!(gateway.store().list("").unwrap().is_empty());
}

#[test]
fn a_push_goes_on_when_the_server_is_killed_and_started_again() {
    let (gateway, chain) = (Gateway::start(), Chain::new());
    let store = gateway.store();
    for at in [1, 20_000, 3 << 20, 9 << 20] {
        // The connection ends there, and no other is accepted before the server is back.
        gateway.proxy.set(Rule::Hold);
        std::thread::scope(|scope| {
            let pushing = scope.spawn(|| send(&store, "vm", &chain));
            gateway.proxy.set(Rule::CutOnce(Way::Up, at));
            isobath_testkit::until("so many bytes", || gateway.proxy.counted() > at);
            gateway.kill();
            gateway.start_again();
            pushing.join().unwrap().unwrap();
        });
        gateway.proxy.set(Rule::Pass);
        comes_back(&store, "vm", &chain);
        remove(&store, "vm").unwrap();
        gc(&store, false).unwrap();
    }
}

#[test]
fn a_push_that_was_interrupted_anywhere_is_pushed_again() {
    let (gateway, chain) = (Gateway::start(), Chain::new());
    for at in [1, 20_000, 3 << 20, 9 << 20] {
        let progress = Arc::new(Progress::default());
        let interrupted = gateway.store_of("secret", &progress);
        gateway.proxy.set(Rule::CutOnce(Way::Up, at));
        let pushed = std::thread::scope(|scope| {
            let pushing = scope.spawn(|| {
                push(
                    &interrupted,
                    "vm",
                    &chain.layers(),
                    Some(&chain.index()),
                    Replace::Unchanged,
                    &progress,
                )
            });
            isobath_testkit::until("so many bytes", || gateway.proxy.counted() > at);
            progress.cancel();
            pushing.join().unwrap()
        });
        assert!(
            matches!(pushed, Ok(_) | Err(Error::Interrupted | Error::Unsettled(_))),
            "{pushed:?}"
        );
        gateway.proxy.set(Rule::Pass);
        let store = gateway.store();
        send(&store, "vm", &chain).unwrap();
        comes_back(&store, "vm", &chain);
        remove(&store, "vm").unwrap();
        gc(&store, false).unwrap();
    }
}
