//! A vhost-user-blk server as a process of its own, to be killed.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::expect_used)]

use isobath_testkit::process::{Ready, Server};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Starts the example program on an image.
pub fn start(socket: &Path, image: &Path, arguments: &[&str]) -> Server {
    let mut command = Command::new(example());
    command.args([socket.as_os_str(), image.as_os_str(), "1".as_ref()]).args(arguments);
    Server::start(&mut command, Ready::Line("serving"))
}

/// The program of `examples/vhost_user.rs`, which cargo builds beside the tests.
fn example() -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let example = tests.parent().and_then(Path::parent).unwrap().join("examples/vhost_user");
    assert!(example.exists(), "build it: cargo build -p isobath-export --example vhost_user");
    example
}
