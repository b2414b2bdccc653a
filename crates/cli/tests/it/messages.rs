//! Messages say what is wrong and what to do about it.

use crate::programs::isobath;
use isobath_testkit::{args, qemu};
use std::fs;

#[test]
fn who_wants_to_write_is_not_told_how_to_read() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("disk");
    qemu::create(&image, "qcow2", 1 << 20, "");
    let _server = qemu::nbd(&image, "qcow2", &directory.path().join("sock"), &[]);
    let written = isobath(directory.path(), args!["resize", "disk", "2M"]).exits(1);
    assert!(written.stderr.contains("Close it there first"), "{}", written.report());
    assert!(!written.stderr.contains("-U"), "{}", written.report());
    let read = isobath(directory.path(), args!["map", "disk"]).exits(1);
    assert!(read.stderr.contains("-U (--force-share)"), "{}", read.report());
}

#[test]
fn a_server_that_cannot_listen_says_why_and_announces_nothing() {
    let directory = tempfile::tempdir().unwrap();
    qemu::create(&directory.path().join("disk"), "qcow2", 1 << 20, "");
    fs::write(directory.path().join("file"), "mine").unwrap();
    let long = format!("unix:/tmp/{}", "x".repeat(120));
    for (options, says) in [
        (args!["--nbd", "unix:file"], "there is a file that is no socket"),
        (args!["--nbd", &long], "its path has 125 bytes; a socket's has at most 107"),
        (args!["--nbd", "unix:sock", "--pid-file", "none/pid"], "No such file or directory\n"),
    ] {
        let done = isobath(directory.path(), [args!["serve", "disk"], options].concat()).exits(1);
        assert!(done.stderr.contains(says), "{}", done.report());
        assert_eq!(done.text(), "", "{}", done.report());
    }
    assert_eq!(fs::read(directory.path().join("file")).unwrap(), b"mine");
}

#[test]
fn a_wrong_format_or_command_is_named() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("raw"), [0; 4096]).unwrap();
    let wrong = isobath(directory.path(), args!["info", "-f", "qcow2", "raw"]).exits(1);
    assert!(wrong.stderr.ends_with(": Image is not in qcow2 format\n"), "{}", wrong.report());
    let job = isobath(directory.path(), args!["stream", "raw"]).exits(1);
    assert!(job.stderr.contains("'isobath ctl SOCKET stream'"), "{}", job.report());
    let survey = isobath(directory.path(), args!["chain", "survey", "."]).ok();
    assert!(survey.text().starts_with("1 file in 1 directory, "), "{}", survey.report());
}
