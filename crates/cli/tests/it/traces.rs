//! What is read of a chain in a store is recorded, and fetched ahead by servers that start later.

use crate::programs::isobath;
use crate::s3;
use crate::served_from_stores::{Place, in_bucket};
use crate::serving::{ISOBATH, assert_same_bytes};
use isobath_testkit::process::{Finished, Ready, Server, run};
use isobath_testkit::{args, until};
use std::fs;
use std::os::unix::net::UnixListener;
use std::process::Command;

const VM: &str = "s3://bucket/some/vm";

/// What a server says once it has followed a trace to its end.
const FETCHED: &str = "fetched ahead what the chain's trace has";

/// A chain in a bucket.
struct Bucket {
    place: Place,
    store: s3::Server,
}

impl Bucket {
    fn new() -> Self {
        let (place, store) = (Place::new(6, ""), s3::Server::start());
        let bucket = Self { place, store };
        let _ = isobath(bucket.place.path(), args!["pull", "-q", &bucket.place.vm(), "."]).ok();
        let _ = bucket.run(&["push", "-q", "5.qcow2", VM]).ok();
        bucket
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(ISOBATH);
        in_bucket(&mut command, &self.store).env("ISOBATH_LOG", "info");
        command.current_dir(self.place.path()).args(arguments);
        command
    }

    fn run(&self, arguments: &[&str]) -> Finished {
        run(&mut self.command(arguments))
    }

    fn serve(&self, cache: &str, options: &[&str]) -> Server {
        let serve = ["serve", VM, "--nbd", "unix:n", "--cache-dir", cache];
        let mut command = self.command(&[&serve, options].concat());
        Server::start_after_kill(&mut command, Ready::Line("-blockdev"))
    }

    /// What a server has written to its log.
    fn log(&self) -> String {
        fs::read_to_string(self.place.path().join("log")).unwrap_or_default()
    }

    /// Waits until all of the chain's trace is here.
    fn is_fetched(&self) {
        until("all of it is here", || self.log().contains(FETCHED));
    }

    /// Reads all of the disk.
    fn is_read(&self) {
        let uri = format!("nbd+unix:///vm?socket={}", self.place.path().join("n").display());
        assert_same_bytes(&uri, &self.place.expected());
    }

    /// The requests for data since they were last counted.
    fn of_data(&self) -> usize {
        let of = |kind: &str| self.store.requests().iter().filter(|one| one.contains(kind)).count();
        of("/layers/") + of("/indexes/")
    }
}

#[test]
fn what_was_recorded_is_here_before_it_is_read() {
    let bucket = Bucket::new();
    let trace = bucket.place.path().join("boot.trace");
    for (round, sandbox) in ["strict", "off"].into_iter().enumerate() {
        let _ = fs::remove_file(&trace);
        let record = ["--record-trace", "boot.trace", "--sandbox", sandbox];
        let server = bucket.serve(&format!("first-{sandbox}"), &record);
        bucket.is_read();
        assert_eq!(fs::metadata(&trace).unwrap().len(), 0);
        let _ = server.stop().ok();
        if round > 0 {
            let removed = bucket.run(&["remote", "trace", "--remove", VM]).ok().text();
            assert!(removed.contains("fetch nothing ahead"), "{removed}");
        }
        let said = bucket.run(&["remote", "trace", VM, "boot.trace"]).ok().text();
        assert!(said.starts_with(&format!("Servers of '{VM}' fetch ")), "{said}");
        let _ = bucket.run(&["remote", "verify", VM]).ok();

        bucket.store.fail(Vec::new());
        let log = ["--sandbox", sandbox, "--log", "log"];
        let server = bucket.serve(&format!("second-{sandbox}"), &log);
        bucket.is_fetched();
        assert!(bucket.of_data() > 0);
        bucket.store.fail(Vec::new());
        bucket.is_read();
        assert_eq!(bucket.of_data(), 0, "{:?}", bucket.store.requests());
        let _ = server.stop().ok();
        fs::remove_file(bucket.place.path().join("log")).unwrap();
    }
}

#[test]
fn what_is_read_through_an_overlay_is_recorded() {
    let bucket = Bucket::new();
    let overlay = ["--overlay", "top.qcow2"];
    let server = bucket.serve("first", &[&overlay[..], &["--record-trace", "t"]].concat());
    bucket.is_read();
    let _ = server.stop().ok();
    let _ = bucket.run(&["remote", "trace", "-q", VM, "t"]).ok();
    let twice = [VM, "--overlay", "other.qcow2", "--log", "log"];
    let server = bucket.serve("second", &[&overlay[..], &twice].concat());
    bucket.is_fetched();
    bucket.store.fail(Vec::new());
    bucket.is_read();
    assert_eq!(bucket.of_data(), 0, "{:?}", bucket.store.requests());
    let _ = server.stop().ok();
    assert_eq!(bucket.log().matches(FETCHED).count(), 1, "one chain is followed once");
}

#[test]
fn a_server_that_was_killed_is_started_again_with_the_same_command_line() {
    let bucket = Bucket::new();
    let record = ["--record-trace", "t"];
    let server = bucket.serve("cache", &record);
    let beside = ["serve", VM, "--nbd", "unix:m", "--cache-dir", "cache", "--record-trace", "t"];
    let refused = bucket.run(&beside).exits(1);
    assert!(refused.stderr.contains("another process has locked it"), "{}", refused.report());
    let _ = server.kill();
    assert_eq!(fs::metadata(bucket.place.path().join("t")).unwrap().len(), 0);
    let server = bucket.serve("cache", &record);
    bucket.is_read();
    let _ = server.stop().ok();
    let _ = bucket.run(&["remote", "trace", "-q", VM, "t"]).ok();
}

#[test]
fn a_server_that_does_not_start_leaves_no_trace() {
    let bucket = Bucket::new();
    let trace = bucket.place.path().join("t");
    let _listener = UnixListener::bind(bucket.place.path().join("n")).unwrap();
    let serve = ["serve", VM, "--nbd", "unix:n", "--cache-dir", "cache", "--record-trace", "t"];
    for found in [false, true] {
        if found {
            fs::write(&trace, "").unwrap();
        }
        let refused = bucket.run(&[&serve[..], &["--sandbox", "off"]].concat()).exits(1);
        assert!(refused.stderr.contains("cannot listen on unix:n"), "{}", refused.report());
        assert_eq!(trace.exists(), found, "what was there is left");
    }
    // A confined server cannot remove it.
    let _ = bucket.run(&[&serve[..], &["--sandbox", "strict"]].concat()).exits(1);
    assert_eq!(fs::metadata(&trace).unwrap().len(), 0);
}

#[test]
fn a_trace_takes_the_place_of_no_file_and_is_of_one_chain() {
    let bucket = Bucket::new();
    let path = bucket.place.path();
    fs::write(path.join("precious"), "precious").unwrap();
    let serve = ["serve", "--nbd", "unix:n", "--cache-dir", "cache", "--record-trace"];
    for (arguments, said) in [
        (&["precious", VM][..], "cannot create the trace 'precious'"),
        (&["missing/t", VM], "cannot create the trace 'missing/t'"),
        (&["t", "5.qcow2"], "records what is read of one chain in a store"),
        (&["t", VM, VM], "records what is read of one chain in a store"),
        (&["t", "s3://bucket/some/none"], "has no chain 'none'"),
    ] {
        for sandbox in ["off", "strict"] {
            let options = [&serve[..], arguments, &["--sandbox", sandbox]].concat();
            let refused = bucket.run(&options).exits(1);
            assert!(refused.stderr.contains(said), "{}", refused.report());
            let left = fs::read(path.join("t"));
            assert!(left.is_err() || sandbox == "strict" && left.unwrap().is_empty(), "{said}");
            let _ = fs::remove_file(path.join("t"));
        }
    }
    assert_eq!(fs::read(path.join("precious")).unwrap(), b"precious");
    fs::write(path.join("empty"), "").unwrap();
    for (file, said) in
        [("precious", "it is too short"), ("empty", "it is empty"), ("none", "No such file")]
    {
        let refused = bucket.run(&["remote", "trace", VM, file]).exits(1).stderr;
        assert!(refused.contains(said) && refused.contains(&format!("'{file}'")), "{refused}");
    }
    let refused = bucket.run(&["remote", "trace", VM]).exits(1).stderr;
    assert!(refused.contains("FILE"), "{refused}");
}
