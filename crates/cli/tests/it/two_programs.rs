//! Two programs on one chain: whatever the one does, and whatever the other begins, they never write at the same time,
//! and the one that is refused says who has the image open.

use crate::programs::isobath;
use crate::serving::ISOBATH;
use isobath_testkit::locks::{denies_writing, until_unlocked};
use isobath_testkit::process::{Finished, Ready, Server};
use isobath_testkit::{args, qemu, until};
use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;

const IMAGES: [&str; 3] = ["base", "mid", "top"];

/// A chain of base, mid and top, with data in each, and a raw copy of what top shows.
fn chain(directory: &Path) -> Vec<u8> {
    let below = [None, Some("base"), Some("mid")];
    for ((image, below), tag) in IMAGES.into_iter().zip(below).zip(1..) {
        let path = directory.join(image);
        match below {
            None => qemu::create(&path, "qcow2", 16 << 20, ""),
            Some(below) => {
                let options = format!("backing_file={below},backing_fmt=qcow2");
                qemu::create(&path, "qcow2", 16 << 20, &options);
            }
        }
        let write = format!("write -P {tag} {}M 6M", tag * 3 - 3);
        let _ = qemu::io(&path, "qcow2", &[&write]).ok();
    }
    qemu::read_disk(&directory.join("top"), "qcow2")
}

/// What a program does with the chain for as long as it is let.
enum Use {
    /// It may write to top.
    Write,
    /// It reads top.
    Read,
}

/// Starts the program, waits until it has the chain open, and stops it there.
fn start(directory: &Path, program: &str, arguments: &[OsString]) -> Server {
    let mut command = Command::new(program);
    command.current_dir(directory).args(arguments);
    let started = directory.join("started");
    fs::write(&started, "started").unwrap();
    let server = Server::start(&mut command, Ready::File(&started));
    // Not by an attempt to open it, which could keep the program out. The base is opened last, and from then on none of
    // them is let go: `at_every_call` watches that.
    until("the chain is open", || {
        assert!(server.log().is_empty(), "{}", server.log());
        denies_writing(&directory.join("base"))
    });
    // It is to have the chain open for as long as the test takes.
    server.signal(libc::SIGSTOP);
    server
}

/// Commands that write to top, or to what is below it.
fn writers() -> Vec<Vec<OsString>> {
    let mut all = vec![
        args!["chain", "flatten", "top"],
        args!["chain", "merge", "mid", "top"],
        args!["chain", "delete", "top", "mid"],
        args!["rebase", "-b", "base", "-F", "qcow2", "top"],
        args!["index", "top"],
    ];
    for image in ["top", "mid"] {
        all.extend([
            args!["io", "-c", "write 0 512", image],
            args!["resize", image, "+1M"],
            args!["amend", "-o", "lazy_refcounts=on", image],
            args!["snapshot", "-c", "now", image],
            args!["bitmap", "--add", image, "bits"],
            args!["check", "-r", "all", image],
            args!["commit", image],
            args!["rebase", "-u", "-b", "base", "-F", "qcow2", image],
            args!["seal", image],
            args!["convert", "-n", "-O", "qcow2", "base", image],
            args!["create", "-f", "qcow2", image, "1M"],
            args!["serve", "--nbd", format!("unix:{image}.nbd"), image],
        ]);
    }
    all
}

/// Commands that read top.
fn readers() -> Vec<Vec<OsString>> {
    vec![
        args!["convert", "-O", "raw", "top", "copy"],
        args!["compare", "top", "top"],
        args!["map", "top"],
        args!["io", "-r", "-c", "read 0 512", "top"],
        args!["check", "top"],
        args!["dd", "if=top", "of=copied"],
        args!["measure", "-O", "qcow2", "top"],
    ]
}

/// Runs commands beside one another, and gives what became of each.
fn run(directory: &Path, commands: Vec<Vec<OsString>>) -> Vec<Finished> {
    thread::scope(|scope| {
        let run = |command| scope.spawn(move || isobath(directory, command));
        let running: Vec<_> = commands.into_iter().map(run).collect();
        running.into_iter().map(|one| one.join().unwrap()).collect()
    })
}

fn pairs(program: &str, comm: &str, arguments: &[OsString], what: &Use) {
    let directory = tempfile::tempdir().unwrap();
    let work = directory.path();
    let disk = chain(work);
    let holder = start(work, program, arguments);
    let refused = |done: Finished| {
        let report = done.report();
        assert!(done.code() != 0, "beside {program} {arguments:?}: {report}");
        assert!(done.stderr.contains("lock"), "beside {program} {arguments:?}: {report}");
        let named = format!("'{comm}', process {}", holder.pid());
        // Of many that try at once, the first few are named.
        let is_named = done.stderr.contains(&named) || done.stderr.contains(" more)");
        assert!(is_named, "beside {program} {arguments:?}: {report}");
    };
    run(work, writers()).into_iter().for_each(refused);
    for done in run(work, readers()) {
        match what {
            Use::Write => refused(done),
            Use::Read => assert_eq!(done.code(), 0, "{}", done.report()),
        }
    }
    drop(holder.kill());
    // What it was about to do is not done, or done in part, which nobody sees.
    for image in IMAGES {
        until_unlocked(&work.join(image));
        let _ = isobath(work, args!["check", "-r", "all", image]);
        qemu::assert_clean(&work.join(image));
    }
    assert!(qemu::read_disk(&work.join("top"), "qcow2") == disk, "{program} {arguments:?}");
}

#[test]
fn beside_a_server_nobody_writes() {
    let write = args!["serve", "--nbd", "unix:nbd", "top"];
    pairs(ISOBATH, "isobath", &write, &Use::Write);
    let read = args!["serve", "-r", "--nbd", "unix:nbd", "top"];
    pairs(ISOBATH, "isobath", &read, &Use::Read);
}

#[test]
fn beside_qemus_server_nobody_writes() {
    let nbd = qemu::program("qemu-nbd").to_string_lossy().into_owned();
    let socket = args!["-f", "qcow2", "-k", "nbd"];
    for (options, what) in [(args!["-t"], Use::Write), (args!["-t", "-r"], Use::Read)] {
        let directory = tempfile::tempdir().unwrap();
        let socket = [socket.clone(), args![directory.path().join("s")]].concat();
        let socket = [&socket[..3], &socket[4..]].concat();
        pairs(&nbd, "qemu-nbd", &[options, socket, args!["top"]].concat(), &what);
    }
}

#[test]
fn beside_a_command_that_copies_nobody_writes() {
    for command in [
        args!["commit", "-r", "64k", "top"],
        args!["chain", "flatten", "-r", "64k", "top"],
        args!["chain", "merge", "-r", "64k", "mid", "top"],
        args!["chain", "delete", "-r", "64k", "top", "mid"],
    ] {
        pairs(ISOBATH, "isobath", &command, &Use::Write);
    }
    let convert = args!["convert", "-r", "64k", "-O", "raw", "top", "slow"];
    pairs(ISOBATH, "isobath", &convert, &Use::Read);
}

#[test]
fn beside_qemus_command_that_copies_nobody_writes() {
    let img = qemu::program("qemu-img").to_string_lossy().into_owned();
    let commit = args!["commit", "-f", "qcow2", "-r", "64k", "top"];
    pairs(&img, "qemu-img", &commit, &Use::Write);
    let convert = args!["convert", "-f", "qcow2", "-r", "64k", "-O", "raw", "top", "slow"];
    pairs(&img, "qemu-img", &convert, &Use::Read);
}
