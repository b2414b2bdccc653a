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
#[path = "../it/servers.rs"]
mod servers;
#[path = "../it/stores.rs"]
mod stores;

use isobath_testkit::process::PATIENCE;
use proxy::{Proxy, Upstream};
use std::cell::RefCell;
use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

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
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let running = self.running.get_mut();
        let _ = running.kill();
        let _ = running.wait();
    }
}

#[test]
fn chains_are_pushed_listed_verified_pulled_removed_and_collected() {
    servers::chains_live(&Gateway::start().proxy);
}

#[test]
fn ranges_of_objects_are_read_and_what_is_missing_is_called_missing() {
    servers::ranges_are_read(&Gateway::start().proxy);
}

#[test]
fn conditional_puts_keep_their_conditions() {
    servers::conditions_are_kept(&Gateway::start().proxy);
}

#[test]
fn of_two_pushes_to_a_name_at_once_one_is_told_of_the_other_or_both_follow_each_other() {
    servers::pushes_meet(&Gateway::start().proxy);
}

#[test]
fn wrong_keys_are_refused_at_once_and_the_message_says_so() {
    servers::wrong_keys_are_refused(&Gateway::start().proxy);
}

#[test]
fn a_pull_goes_on_when_connections_end() {
    servers::pulls_outlive_connections(&Gateway::start().proxy);
}

#[test]
fn a_push_goes_on_when_the_server_is_killed_and_started_again() {
    let gateway = Gateway::start();
    servers::pushes_outlive_the_server(&gateway.proxy, &|| {
        gateway.kill();
        gateway.start_again();
    });
}

#[test]
fn a_push_that_was_interrupted_anywhere_is_pushed_again() {
    servers::interrupted_pushes_are_repeated(&Gateway::start().proxy);
}
