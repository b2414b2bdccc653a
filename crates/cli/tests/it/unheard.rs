//! Nobody listens: stderr is a full disk, a pipe without a reader, or a full one that nobody reads; so
//! may stdout be.

use crate::frontends::Unmounted;
use crate::serving::{ISOBATH, QemuIo};
use isobath_testkit::process::{Finished, Ready, Server, run, run_program};
use isobath_testkit::{args, qemu};
use std::ffi::{CString, OsString};
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

const MIB: u64 = 1 << 20;

/// What a command printed, without what the file system decides.
fn without_allocation(text: &str) -> String {
    text.lines().filter(|line| !line.contains("disk size:")).collect()
}

/// The program, with shell words such as `2>/dev/full` behind its command line.
fn shell(directory: &Path, arguments: &[&str], redirected: &str) -> Command {
    let mut command = Command::new("sh");
    command.current_dir(directory).arg("-c").arg(format!("exec \"$@\" {redirected}"));
    command.args(["sh", ISOBATH]).args(arguments);
    command
}

/// An image of 4 MiB full of `5`, whose cluster 16 is not to be read, and an empty file `file`.
fn damaged(directory: &Path) -> PathBuf {
    let image = directory.join("disk");
    qemu::create(&image, "qcow2", 4 * MIB, "");
    let _ = qemu::io(&image, "qcow2", &["write -P 5 0 4M"]).ok();
    break_cluster(&image, 16);
    File::create(directory.join("file")).unwrap();
    image
}

/// Lets the L2 entry of a cluster of the first table lead to where no cluster begins.
fn break_cluster(image: &Path, cluster: u64) {
    let file = OpenOptions::new().read(true).write(true).open(image).unwrap();
    let be64 = |at: u64| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, at).unwrap();
        u64::from_be_bytes(bytes)
    };
    let table = be64(be64(40)) & 0x00ff_ffff_ffff_fe00;
    let at = table + cluster * 8;
    file.write_all_at(&(be64(at) | 0x200).to_be_bytes(), at).unwrap();
}

/// A named pipe, open at both ends, that has no room left.
fn full_pipe(path: &Path) -> File {
    let name = CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: the name is a C string that lives during the call.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    let mut options = OpenOptions::new();
    let mut pipe =
        options.read(true).write(true).custom_flags(libc::O_NONBLOCK).open(path).unwrap();
    // By single bytes at last, so that not one more fits.
    for piece in [&[b'.'; 4096][..], b"."] {
        let refused = loop {
            if let Err(error) = pipe.write(piece) {
                break error;
            }
        };
        assert_eq!(refused.kind(), ErrorKind::WouldBlock);
    }
    pipe
}

#[test]
fn a_command_ends_the_same_whatever_becomes_of_its_messages() {
    let directory = tempfile::tempdir().unwrap();
    let image = damaged(directory.path());
    let copy = fs::read(&image).unwrap();
    for arguments in [
        &["info", "missing"][..],
        &["info", "--no-such-option"],
        &["check", "disk"],
        &["convert", "-O", "raw", "disk", "copy"],
        &["io", "-c", "read 0 4M", "-c", "nonsense", "-c", "write -s missing 0 1", "disk"],
        &["io", "-r", "-c", "write 0 4k", "disk"],
        &["compare", "disk", "missing"],
        &["check", "-r", "all", "disk"],
        &["info", "disk"],
        &["serve", "missing"],
        &["serve", "--nbd", "unix:/no/such/directory/socket", "disk"],
    ] {
        let ended = |redirected: &str| {
            fs::write(&image, &copy).unwrap();
            run(&mut shell(directory.path(), arguments, redirected))
        };
        let heard = ended("");
        assert!(heard.code() >= 0, "{}", heard.report());
        for redirected in ["2>/dev/full", "2>&-"] {
            let unheard = ended(redirected);
            let said = |done: &Finished| (done.code(), without_allocation(&done.text()));
            let same = said(&unheard) == said(&heard);
            assert!(same, "{redirected}: {}{}", unheard.report(), heard.report());
        }
        // A pipe whose reader is gone.
        fs::write(&image, &copy).unwrap();
        let mut left = Command::new("bash");
        left.current_dir(directory.path()).args([
            "-c",
            "set -o pipefail; { \"$@\" 2>&1 >/dev/null; echo $? >code; } | true",
            "bash",
            ISOBATH,
        ]);
        let _ = run(left.args(arguments));
        let code = fs::read_to_string(directory.path().join("code")).unwrap();
        assert_eq!(code.trim(), heard.code().to_string(), "{arguments:?}");
    }
}

#[test]
fn output_that_cannot_be_written_is_an_error_that_says_so() {
    let directory = tempfile::tempdir().unwrap();
    qemu::create(&directory.path().join("disk"), "qcow2", MIB, "");
    for arguments in [
        &["info", "disk"][..],
        &["info", "--output=json", "disk"],
        &["--help"],
        &["--version"],
        &["serve", "--help"],
        &["completions", "bash"],
        &["map", "disk"],
        &["check", "disk"],
        &["measure", "disk"],
        &["compare", "disk", "disk"],
        &["io", "-c", "length", "disk"],
        &["chain", "survey", "."],
        &["convert", "-p", "-O", "raw", "disk", "copy"],
    ] {
        let done: Finished = run(&mut shell(directory.path(), arguments, ">/dev/full")).exits(1);
        assert!(done.stderr.contains("No space left on device"), "{}", done.report());
        // A reader that has left is no news.
        let done = run(&mut shell(directory.path(), arguments, "| true"));
        assert!(done.stderr.is_empty(), "{}", done.report());
    }
}

/// Serves a damaged image with such a stderr; requests that log something are answered all the same,
/// and so are those after them.
fn is_served(redirected: &str) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    damaged(path);
    let _pipe = full_pipe(&path.join("pipe"));
    let _unmounted = Unmounted(path.join("file"));
    let options = ["serve", "--nbd", "unix:nbd", "--fuse", "file", "disk"];
    let server = Server::start(&mut shell(path, &options, redirected), Ready::Line("-blockdev"));
    let uri = format!("nbd+unix:///?socket={}", path.join("nbd").display());
    let mut client = QemuIo::open("raw", uri);
    let file = File::open(path.join("file")).unwrap();
    for _ in 0..3 {
        let text = client.run("read 1M 64k");
        assert!(text.contains("Input/output error"), "{redirected}: {text}");
        client.ok("read -P 5 2M 64k");
        let mut bytes = [0; 4096];
        let error = file.read_at(&mut bytes, MIB).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EIO), "{redirected}");
        file.read_exact_at(&mut bytes, 2 * MIB).unwrap();
        assert_eq!(bytes, [5; 4096], "{redirected}");
    }
    drop((client, file));
    let _ = server.stop().ok();
}

#[test]
fn a_server_whose_stderr_is_a_full_disk_serves() {
    is_served("2>/dev/full");
}

#[test]
fn a_server_whose_stderr_is_a_pipe_that_nobody_reads_serves() {
    is_served("2>pipe");
}

#[test]
fn names_do_nothing_to_a_terminal() {
    let directory = tempfile::tempdir().unwrap();
    let name = "a\u{202e}b\x1b[31m\u{9b}.qcow2";
    let image = directory.path().join(name);
    qemu::create(&image, "qcow2", MIB, "");
    let overlay = directory.path().join("over");
    qemu::create_overlay(&overlay, &image, "qcow2", "");
    let harmless = |text: &str| {
        text.chars()
            .all(|c| c == '\n' || !c.is_control() && !('\u{202a}'..='\u{202e}').contains(&c))
    };
    let mut arguments: Vec<Vec<OsString>> = ["info", "check", "map", "measure", "snapshot"]
        .iter()
        .map(|command| args![*command, &image])
        .collect();
    arguments.push(args!["info", "--backing-chain", &overlay]);
    arguments.push(args!["map", &overlay]);
    arguments.push(args!["index", &overlay]);
    arguments.push(args!["chain", "survey", directory.path()]);
    arguments.push(args!["info", "-f", "qcow2", directory.path().join(format!("{name}.not"))]);
    arguments.push(args!["create", "-f", "qcow2", directory.path().join("n\u{202e}"), "1M"]);
    arguments.push(args!["compare", &image, directory.path()]);
    arguments.push(args!["serve", "--nbd", "unix:/no\u{202e}/such", &image]);
    for arguments in arguments {
        let done = run_program(ISOBATH, &arguments);
        assert!(harmless(&done.text()) && harmless(&done.stderr), "{:?}", done.report());
    }
    let mut command = Command::new(ISOBATH);
    command.current_dir(directory.path()).env("ISOBATH_LOG", "trace");
    command.args(["serve", "--nbd", "unix:s\u{202e}\x1b"]).arg(&image);
    let server = Server::start(&mut command, Ready::Line("-blockdev"));
    assert!(harmless(&server.output()), "{:?}", server.output());
    let done = server.stop().ok();
    assert!(harmless(&done.stderr), "{:?}", done.stderr);
}
