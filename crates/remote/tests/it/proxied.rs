//! Transfers over connections that end, stop and change bytes: they are whole, or fail with a clear error.

use crate::chains::{Chain, fetch, is_whole, qemu_img, send};
use crate::proxy::{Proxy, Rule, Upstream, Way};
use crate::s3::Server;
use crate::servers::{bucket, patient};
use isobath_remote::Error;
use isobath_remote::store::{Limits, Store};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Bytes between two places of a sweep: no divisor of what requests have.
const STEP: usize = 211;

/// Two images of some KiB.
fn tiny() -> Chain {
    let directory = tempfile::tempdir().unwrap();
    let options = ["create", "-q", "-f", "qcow2", "-o", "cluster_size=512"];
    qemu_img(directory.path(), &[&options[..], &["base.qcow2", "8K"]].concat());
    let backing = ["-b", "base.qcow2", "-F", "qcow2", "top.qcow2"];
    qemu_img(directory.path(), &[&options[..], &backing].concat());
    Chain { directory, names: vec!["base.qcow2".to_owned(), "top.qcow2".to_owned()] }
}

struct Between {
    server: Server,
    proxy: Proxy,
    chain: Chain,
}

impl Between {
    fn new() -> Self {
        let server = Server::start();
        let address = server.endpoint.strip_prefix("http://").unwrap().to_owned();
        Self { proxy: Proxy::start(Upstream::Tcp(address)), server, chain: tiny() }
    }

    /// A client's connections are its own: each store is a new client.
    fn store(&self, limits: Limits) -> impl Store {
        bucket(&self.proxy.endpoint, "secret", limits, &Arc::default())
    }

    fn direct(&self) -> impl Store {
        bucket(&self.server.endpoint, "secret", patient(), &Arc::default())
    }
}

/// Every file in a directory is one of the chain's, whatever its name.
#[track_caller]
fn has_only_whole_files(directory: &Path, chain: &Chain) {
    let own = [0, 1].map(|number| fs::read(chain.path(number)).unwrap());
    for entry in fs::read_dir(directory).unwrap() {
        assert!(own.contains(&fs::read(entry.unwrap().path()).unwrap()));
    }
}

#[test]
fn a_connection_that_ends_once_at_any_byte_changes_nothing() {
    let between = Between::new();
    for way in [Way::Up, Way::Down] {
        for at in (0..).step_by(STEP) {
            between.server.set_objects(BTreeMap::default());
            between.proxy.set(Rule::CutOnce(way, at));
            let store = between.store(patient());
            send(&store, "vm", &between.chain)
                .unwrap_or_else(|error| panic!("{way:?} {at}: {error}"));
            let pushed = between.proxy.counted();
            is_whole(&between.direct(), "vm");
            between.proxy.set(Rule::CutOnce(way, at));
            let directory = tempfile::tempdir().unwrap();
            fetch(&store, "vm", directory.path()).unwrap();
            between.chain.is_part(directory.path(), true);
            if pushed.max(between.proxy.counted()) < at {
                assert!(at > 3000, "{at} bytes");
                break;
            }
        }
    }
}

#[test]
fn connections_that_all_end_after_some_bytes_leave_something_whole_or_nothing() {
    let between = Between::new();
    let overall = Duration::from_millis(40);
    let hasty = || between.store(Limits { overall, ..patient() });
    send(&between.direct(), "old", &between.chain).unwrap();
    let (mut failed, mut done) = (0, 0);
    for way in [Way::Up, Way::Down] {
        for at in (0..9000).step_by(STEP * 5) {
            between.server.set_objects(BTreeMap::default());
            between.proxy.set(Rule::CutEach(way, at));
            match send(&hasty(), "vm", &between.chain) {
                Ok(_) => {
                    done += 1;
                    is_whole(&between.direct(), "vm");
                }
                Err(error @ Error::Store(_)) => {
                    failed += 1;
                    assert!(error.to_string().contains("store"), "{error}");
                    if between.direct().head("manifests/vm.json").unwrap().is_some() {
                        is_whole(&between.direct(), "vm");
                    }
                }
                Err(error) => panic!("{way:?} {at}: {error}"),
            }
            // The next one goes on.
            between.proxy.set(Rule::Pass);
            send(&between.store(patient()), "vm", &between.chain).unwrap();
            is_whole(&between.direct(), "vm");
            between.proxy.set(Rule::CutEach(way, at));
            let directory = tempfile::tempdir().unwrap();
            match fetch(&hasty(), "vm", directory.path()) {
                Ok(_) => between.chain.is_part(directory.path(), true),
                Err(error) => {
                    assert!(matches!(error, Error::Store(_)), "{way:?} {at}: {error}");
                    between.chain.is_part(directory.path(), false);
                }
            }
        }
    }
    assert!(failed > 0 && failed + done > 16, "{failed} {done}");
}

#[test]
fn a_pull_through_which_any_bit_changes_is_whole_or_fails() {
    let between = Between::new();
    send(&between.direct(), "vm", &between.chain).unwrap();
    let (mut failed, mut done) = (0, 0);
    for at in (0..).step_by(STEP / 4) {
        between.proxy.set(Rule::Flip(at));
        let directory = tempfile::tempdir().unwrap();
        match fetch(&between.store(patient()), "vm", directory.path()) {
            Ok(_) => done += 1,
            Err(error) => {
                let refused = matches!(error, Error::Damaged(_) | Error::Refused(_));
                assert!(refused, "{at}: {error}");
                failed += 1;
            }
        }
        has_only_whole_files(directory.path(), &between.chain);
        if between.proxy.counted() <= at && at > 4000 {
            break;
        }
    }
    assert!(failed > 5 && done > 5, "{failed} {done}");
}

#[test]
fn a_server_that_refuses_or_holds_connections_for_a_while_is_waited_for() {
    let between = Between::new();
    between.proxy.set(Rule::Refuse(5));
    send(&between.store(patient()), "vm", &between.chain).unwrap();
    assert_eq!(between.proxy.counted(), 5);
    is_whole(&between.direct(), "vm");
    let before = between.proxy.connections();
    between.proxy.set(Rule::Hold);
    let directory = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        let pulling = scope.spawn(|| fetch(&between.store(patient()), "vm", directory.path()));
        isobath_testkit::until("a connection", || between.proxy.connections() > before);
        between.proxy.set(Rule::Pass);
        pulling.join().unwrap().unwrap();
    });
    between.chain.is_part(directory.path(), true);
}
