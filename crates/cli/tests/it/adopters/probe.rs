//! Servers: what they export.

use super::Side;
use isobath_testkit::process::{Finished, run};
use isobath_testkit::{args, tools, until, until_some};
use serde_json::Value;
use std::fs;
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// A TCP port that nobody uses now, below those that the kernel gives to others.
pub(super) fn free_port() -> u16 {
    let first = 10_240 + u16::try_from(std::process::id() % 16_384).unwrap();
    let free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    (first..32_768).find(free).expect("a free port")
}

/// What of an export both programs must agree on.
fn export(uri: &str) -> Option<Value> {
    let done = run(Command::new(tools::require("nbdinfo")).args(args!["--json", uri]));
    if done.code() != 0 {
        return None;
    }
    let shown = done.json();
    let export = shown["exports"][0].as_object()?;
    let kept = export.iter().filter(|(key, _)| {
        key.starts_with("can_")
            || ["export-size", "is_read_only", "contexts"].contains(&key.as_str())
    });
    Some(kept.map(|(key, value)| (key.clone(), value.clone())).collect())
}

/// Runs a server, asks what it exports, and ends it. Without an export, it has ended before.
pub(super) fn serve(mut command: Command, uri: &str, side: &Side) -> (Finished, Option<Value>) {
    let log = side.directory.join("server.log");
    let file = fs::File::create(&log).unwrap();
    command.stdin(Stdio::null()).stdout(file.try_clone().unwrap()).stderr(file).process_group(0);
    let shown = format!("{command:?}");
    let mut child = command.spawn().unwrap();
    if has_word(&shown, &["--fork", "--daemonize"]) {
        // It ends once the daemon can be asked: before that it may listen, and not have all of its exports.
        until("the server runs in the background", || child.try_wait().unwrap().is_some());
    }
    let exported = until_some("the server shows its export, or fails", || {
        if let Some(found) = export(uri) {
            return Some(Some(found));
        }
        let failed = child.try_wait().unwrap().is_some_and(|status| !status.success());
        failed.then_some(None)
    });
    let daemons = daemons(&side.directory);
    // Another server ends when its client has left: a signal would race with that.
    let is_ended =
        has_word(&shown, &["-t", "--persistent", "qemu-storage-daemon"]) || exported.is_none();
    if is_ended {
        end(&mut child, &daemons);
    }
    // QEMU notices a signal that comes just before it waits when something else happens, such as a connection.
    let wake = || is_ended.then(|| export(uri));
    let status = until_some("the server has ended", || {
        child.try_wait().unwrap().or_else(|| {
            wake();
            None
        })
    });
    for process in daemons {
        until("the daemon has ended", || {
            let is_there = Path::new(&format!("/proc/{process}")).exists();
            if is_there {
                wake();
            }
            !is_there
        });
    }
    let stderr = fs::read_to_string(&log).unwrap();
    (Finished { command: shown, status, stdout: Vec::new(), stderr }, exported)
}

/// The processes that files in the directory name.
fn daemons(directory: &Path) -> Vec<i32> {
    let files = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let files = files.filter(|file| file.extension().is_some_and(|end| end == "pid"));
    files.filter_map(|file| fs::read_to_string(file).ok()?.trim().parse().ok()).collect()
}

/// Whether a command line has one of these words.
fn has_word(command: &str, words: &[&str]) -> bool {
    command.split([' ', '"']).any(|word| words.contains(&word))
}

/// Ends a server, in the background or not.
fn end(child: &mut Child, daemons: &[i32]) {
    let own = i32::try_from(child.id()).unwrap();
    for process in daemons.iter().filter(|daemon| **daemon != own) {
        terminate(*process);
    }
    if child.try_wait().unwrap().is_none() {
        terminate(own);
    }
}

fn terminate(process: i32) {
    let _ = run(Command::new("kill").arg(process.to_string()));
}
