//! What holds with every server of S3: the tests of those that are not ours do it with each of them.

use crate::chains::{Chain, fetch, gc, is_whole, send, verify};
use crate::proxy::{Proxy, Rule, Way};
use crate::stores::Aged;
use isobath_remote::store::{Bucket, Limits, Outcome, Store};
use isobath_remote::{Digest, Error, Progress, Replace, list, push, remove};
use object_store::aws::AmazonS3Builder;
use reqwest::ClientBuilder;
use std::fs;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// Places in what a push sends: in a request's head, and in the bodies of parts.
const PLACES: [u64; 4] = [1, 20_000, 3 << 20, 9 << 20];

/// Asks the server itself, whatever proxy the environment names.
fn direct() -> ClientBuilder {
    ClientBuilder::new().no_proxy()
}

/// A client of its own, with this secret.
pub(crate) fn bucket(
    endpoint: &str,
    secret: &str,
    limits: Limits,
    progress: &Arc<Progress>,
) -> Bucket {
    let builder = AmazonS3Builder::new()
        .with_bucket_name("bucket")
        .with_region("us-east-1")
        .with_access_key_id("key")
        .with_secret_access_key(secret)
        .with_endpoint(endpoint)
        .with_allow_http(true);
    Bucket::of_s3(builder, direct, "some/prefix", limits, progress).unwrap()
}

/// What fails is tried again at once; nobody waits for the limits.
pub(crate) fn patient() -> Limits {
    Limits { pause: Duration::from_millis(1), ..Limits::default() }
}

pub(crate) fn open(proxy: &Proxy) -> Bucket {
    bucket(&proxy.endpoint, "secret", patient(), &Arc::default())
}

#[track_caller]
fn comes_back(store: &dyn Store, name: &str, chain: &Chain) {
    is_whole(store, name);
    let directory = tempfile::tempdir().unwrap();
    let pulled = fetch(store, name, directory.path()).unwrap();
    chain.is_part(directory.path(), true);
    chain.reads_as(&pulled.image);
}

/// Chains are pushed, listed, verified, pulled, removed and collected.
pub(crate) fn chains_live(proxy: &Proxy) {
    let (store, mut chain) = (open(proxy), Chain::new());
    // The base is longer than a part.
    assert_eq!(send(&store, "vm", &chain).unwrap().sent, 3);
    comes_back(&store, "vm", &chain);
    assert_eq!(send(&store, "vm", &chain).unwrap().sent, 0);
    chain.grow("next.qcow2");
    assert_eq!(send(&store, "vm", &chain).unwrap().sent, 1);
    assert_eq!(send(&store, "other", &Chain::small("disk.qcow2", 7)).unwrap().sent, 1);
    let names: Vec<String> = list(&store).unwrap().into_iter().map(|listed| listed.name).collect();
    assert_eq!(names, ["other", "vm"]);
    remove(&store, "other").unwrap();
    // The heads and the index of the shorter chain, and four objects of the other.
    assert_eq!(gc(&store, Duration::ZERO, false).unwrap().objects, 6);
    comes_back(&store, "vm", &chain);
    assert!(store.head("gc.lock").unwrap().is_none() && store.list("pushes/").unwrap().is_empty());
}

/// Ranges of objects are read, none that goes beyond an end, and what is missing is called missing.
pub(crate) fn ranges_are_read(proxy: &Proxy) {
    let (store, chain) = (open(proxy), Chain::small("disk.qcow2", 1));
    let bytes: Vec<u8> = (0..10_000_u32).map(|at| (at / 256 + at) as u8).collect();
    store.put("layers/a", &bytes).unwrap();
    assert_eq!(store.head("layers/a").unwrap().unwrap().length, 10_000);
    for (offset, length) in [(0, 1), (0, 10_000), (9_999, 1), (4_095, 4_098)] {
        let read = store.read("layers/a", offset, length).unwrap();
        assert!(read == bytes[offset as usize..][..length], "{length} bytes at {offset}");
    }
    for (offset, length) in [(0, 10_001), (9_999, 2), (10_000, 1), (20_000, 1)] {
        let error = store.read("layers/a", offset, length).unwrap_err();
        assert!(matches!(error, Error::Damaged(_)), "{length} bytes at {offset}: {error}");
    }
    assert!(store.head("layers/b").unwrap().is_none());
    assert!(store.get("layers/b", 100).unwrap().is_none());
    let error = store.read("layers/b", 0, 1).unwrap_err();
    assert!(matches!(error, Error::Damaged(_)) && error.to_string().contains("layers/b"));
    store.delete("layers/b").unwrap();
    // A chain without a layer, and no chain.
    send(&store, "vm", &chain).unwrap();
    let layer = format!("layers/{}", Digest::of(&fs::read(chain.top()).unwrap()));
    store.delete(&layer).unwrap();
    let problems = verify(&store, "vm").unwrap().problems;
    assert!(problems.iter().any(|problem| problem.contains(&layer)), "{problems:?}");
    for (name, missing) in [("vm", &*layer), ("other", "other")] {
        let directory = tempfile::tempdir().unwrap();
        let error = fetch(&store, name, directory.path()).unwrap_err().to_string();
        assert!(error.contains(missing), "{error}");
        chain.is_part(directory.path(), false);
    }
}

/// Conditional puts keep their conditions.
pub(crate) fn conditions_are_kept(proxy: &Proxy) {
    let store = open(proxy);
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

/// Of two pushes to a name at once, one is told of the other, or both follow each other.
pub(crate) fn pushes_meet(proxy: &Proxy) {
    let store = open(proxy);
    let chains = [1, 2].map(|byte| Chain::small("disk.qcow2", byte));
    let pushed = thread::scope(|scope| {
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
    gc(&store, Duration::ZERO, false).unwrap();
    is_whole(&store, "vm");
}

/// Wrong keys are refused at once, and the message says so.
pub(crate) fn wrong_keys_are_refused(proxy: &Proxy) {
    let chain = Chain::small("disk.qcow2", 1);
    let store = bucket(&proxy.endpoint, "wrong", patient(), &Arc::default());
    let error = send(&store, "vm", &chain).unwrap_err().to_string();
    assert!(error.contains("403") && error.contains("manifests/vm.json"), "{error}");
    assert!(!error.contains("given up") && !error.contains("wrong"), "{error}");
    let error = list(&store).unwrap_err().to_string();
    assert!(error.contains("403"), "{error}");
    let error = gc(&store, Duration::ZERO, false).unwrap_err().to_string();
    assert!(error.contains("403"), "{error}");
    assert!(open(proxy).list("").unwrap().is_empty());
}

/// A pull goes on when connections end.
pub(crate) fn pulls_outlive_connections(proxy: &Proxy) {
    let (store, chain) = (open(proxy), Chain::new());
    send(&store, "vm", &chain).unwrap();
    // Its hole is not fetched.
    for at in PLACES.map(|at| at / 3) {
        proxy.set(Rule::CutOnce(Way::Down, at));
        let directory = tempfile::tempdir().unwrap();
        fetch(&store, "vm", directory.path()).unwrap();
        assert!(proxy.counted() > at, "{} bytes", proxy.counted());
        chain.is_part(directory.path(), true);
    }
}

/// A push goes on when the server ends and is started again, which `restart` does.
pub(crate) fn pushes_outlive_the_server(proxy: &Proxy, restart: &dyn Fn()) {
    let (store, chain) = (open(proxy), Chain::new());
    for at in PLACES {
        // The connection ends there.
        proxy.set(Rule::Hold);
        thread::scope(|scope| {
            let pushing = scope.spawn(|| send(&store, "vm", &chain));
            proxy.set(Rule::CutOnce(Way::Up, at));
            isobath_testkit::until("so many bytes", || proxy.counted() > at);
            restart();
            pushing.join().unwrap().unwrap();
        });
        proxy.set(Rule::Pass);
        comes_back(&store, "vm", &chain);
        remove(&store, "vm").unwrap();
        gc(&store, Duration::ZERO, false).unwrap();
    }
}

/// A push that was interrupted anywhere is pushed again.
pub(crate) fn interrupted_pushes_are_repeated(proxy: &Proxy) {
    let chain = Chain::new();
    for at in PLACES {
        let progress = Arc::new(Progress::default());
        let interrupted = bucket(&proxy.endpoint, "secret", patient(), &progress);
        proxy.set(Rule::CutOnce(Way::Up, at));
        let pushed = thread::scope(|scope| {
            let (layers, index) = (chain.layers(), chain.index());
            let (store, progress) = (&interrupted, &progress);
            let pushing = scope.spawn(move || {
                push(store, "vm", &layers, Some(&index), Replace::Unchanged, progress)
            });
            isobath_testkit::until("so many bytes", || proxy.counted() > at);
            progress.cancel();
            pushing.join().unwrap()
        });
        assert!(
            matches!(pushed, Ok(_) | Err(Error::Interrupted | Error::Unsettled(_))),
            "{pushed:?}"
        );
        proxy.set(Rule::Pass);
        let store = open(proxy);
        send(&store, "vm", &chain).unwrap();
        comes_back(&store, "vm", &chain);
        remove(&store, "vm").unwrap();
        // The put of a note that was interrupted may have been done.
        gc(&Aged(&store), Duration::ZERO, false).unwrap();
    }
}
