//! Where io_uring is forbidden, as in many containers, everything works.

use crate::frontends::Unmounted;
use crate::live::{DEVICE, ISOBATH, Live};
use crate::vhost_raw::{FEATURES, Raw};
use isobath_testkit::forbidden::{IO_URING, THREADS, forbid};
use isobath_testkit::process::{Finished, run};
use isobath_testkit::{args, bytes, qemu, tools};
use serde_json::json;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

const MIB: u64 = 1 << 20;

/// Runs a command of the program in a directory, where some system calls fail.
fn isobath<I>(directory: &Path, arguments: I, calls: &[i64], error: i32) -> Finished
where
    I: IntoIterator,
    I::Item: AsRef<OsStr>,
{
    let mut command = Command::new(ISOBATH);
    command.current_dir(directory).env_remove("ISOBATH_IO").args(arguments);
    run(forbid(&mut command, calls, error))
}

#[test]
fn a_write_beyond_the_limit_on_files_fails_and_ends_nothing() {
    for io in ["threads", "io_uring"] {
        let directory = tempfile::tempdir().unwrap();
        qemu::create(&directory.path().join("disk"), "qcow2", 64 * MIB, "");
        let mut command = Command::new("sh");
        // In units of 512 or 1024 bytes.
        command.args(["-c", "ulimit -f 4096; exec \"$0\" \"$@\"", ISOBATH]);
        command.current_dir(directory.path()).env("ISOBATH_IO", io);
        command.args(["io", "-c", "write -P 1 0 16M", "-c", "read 0 512", "disk"]);
        let done = run(&mut command).exits(1);
        let all = format!("{}{}", done.stderr, done.text());
        assert!(all.contains("File too large"), "{io}: {}", done.report());
        assert!(all.contains("read 512/512"), "{io}: {}", done.report());
    }
}

#[test]
fn commands_on_images_work() {
    for error in [libc::EPERM, libc::ENOSYS, libc::EACCES, libc::EINVAL] {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path();
        qemu::create(&place.join("base"), "qcow2", 64 * MIB, "");
        let _ = qemu::io(&place.join("base"), "qcow2", &["write -P 1 0 8M"]).ok();
        for arguments in [
            "create -f qcow2 -b base -F qcow2 disk",
            "io -c write\t-P\t2\t1M\t3M -c discard\t2M\t64k -c flush -c read\t-P\t2\t1M\t64k disk",
            "info disk",
            "check disk",
            "convert -f qcow2 -O raw disk raw",
            "convert -c -f qcow2 -O qcow2 disk packed",
            "compare disk packed",
            "map disk",
            "bench -c 200 -d 8 -w disk",
            "bench -c 200 -d 8 -n -t none disk",
            "resize disk 65M",
            "commit disk",
        ] {
            let arguments = arguments.split(' ').map(|argument| argument.replace('\t', " "));
            let done = isobath(place, arguments, IO_URING, error).ok();
            assert!(done.stderr.is_empty(), "{}", done.report());
        }
        for image in ["base", "disk", "packed"] {
            qemu::assert_clean(&place.join(image));
        }
        let mut expected = vec![1; 8 << 20];
        expected[1 << 20..4 << 20].fill(2);
        expected[2 << 20..(2 << 20) + (64 << 10)].fill(0);
        let raw = fs::read(place.join("raw")).unwrap();
        assert_eq!(bytes::first_difference(&raw[..8 << 20], &expected), None);
    }
}

#[test]
fn a_server_works_through_every_door_and_says_what_it_lacks() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    qemu::create(&path("disk"), "qcow2", 64 * MIB, "");
    File::create(path("file")).unwrap();
    let _unmounted = Unmounted(path("file"));
    let doors = ["--fuse", "file", "--vhost-user-blk", "unix:vhost"];
    let live = Live::start_as(directory.path(), "disk", &doors, |command| {
        forbid(command.env_remove("ISOBATH_IO"), IO_URING, libc::EPERM);
    });

    let source: Vec<u8> = (0..64 * MIB).map(|at| (at / 4096 % 251) as u8).collect();
    fs::write(path("source"), &source).unwrap();
    let nbdcopy = tools::require("nbdcopy");
    let copy = |from: &str, to: &str| {
        let done = run(Command::new(&nbdcopy).current_dir(directory.path()).args([from, to]));
        let _ = done.ok();
    };
    copy("source", &live.uri());
    copy(&live.uri(), "copy");
    assert_eq!(bytes::first_difference(&fs::read(path("copy")).unwrap(), &source), None);
    let _ = qemu::img(args!["convert", "-O", "raw", live.uri(), path("converted")]).ok();
    assert_eq!(bytes::first_difference(&fs::read(path("converted")).unwrap(), &source), None);

    let guest = Raw::start(&path("vhost"), 1, 8, FEATURES);
    guest.assert_works(0);
    let file = File::options().read(true).write(true).open(path("file")).unwrap();
    let mut block = [0; 4096];
    file.read_exact_at(&mut block, 5 * MIB).unwrap();
    assert_eq!(block[..], source[5 << 20..][..4096]);
    file.write_all_at(&[0xee; 4096], 5 * MIB).unwrap();
    file.sync_all().unwrap();

    let mut control = live.control();
    control.snapshot("overlay").unwrap();
    file.write_all_at(&[0xdd; 4096], 6 * MIB).unwrap();
    drop((file, guest));
    control.start("block-commit", &json!({})).unwrap();
    let _ = control.wait_for(&["BLOCK_JOB_READY"]).unwrap();
    control.execute("block-job-complete", &json!({"device": DEVICE})).unwrap();
    control.completed().unwrap();
    drop(control);

    let done = live.stop();
    assert_eq!(done.stderr.lines().count(), 1, "{}", done.report());
    assert!(done.stderr.contains("isobath: io_uring is forbidden"), "{}", done.report());
    qemu::assert_clean(&path("disk"));
    let _ = qemu::io(&path("disk"), "qcow2", &["read -P 0xee 5M 4k", "read -P 0xdd 6M 4k"]).ok();
}

#[test]
fn files_are_used_even_if_no_thread_can_be_started() {
    let directory = tempfile::tempdir().unwrap();
    let both = [IO_URING, THREADS].concat();
    let commands: [&[&str]; 3] = [
        &["create", "-f", "qcow2", "disk", "64M"],
        &["io", "-c", "write -P 3 1M 1M", "-c", "flush", "-c", "read -P 3 1M 1M", "disk"],
        &["check", "disk"],
    ];
    for arguments in commands {
        let _ = isobath(directory.path(), arguments, &both, libc::EPERM).ok();
    }
    qemu::assert_clean(&directory.path().join("disk"));
}

#[test]
fn a_lack_of_locked_memory_is_explained_with_the_limit() {
    let directory = tempfile::tempdir().unwrap();
    qemu::create(&directory.path().join("disk"), "qcow2", MIB, "");
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -l 64; exec \"$0\" \"$@\"", ISOBATH, "info", "disk"]);
    command.current_dir(directory.path()).env_remove("ISOBATH_IO");
    let refused = run(forbid(&mut command, IO_URING, libc::ENOMEM)).exits(1);
    let expected = "the limit on locked memory (ulimit -l) is 64 KiB: raise it, or set \
                    ISOBATH_IO=threads";
    assert!(refused.stderr.contains(expected), "{}", refused.report());
    let _ = run(command.env("ISOBATH_IO", "threads")).ok();
}

#[test]
fn whoever_insists_on_io_uring_is_told_why_there_is_none() {
    let directory = tempfile::tempdir().unwrap();
    let info = |value: &str| {
        let mut command = Command::new(ISOBATH);
        command.current_dir(directory.path()).env("ISOBATH_IO", value).args(["info", "disk"]);
        run(forbid(&mut command, IO_URING, libc::EPERM))
    };
    qemu::create(&directory.path().join("disk"), "qcow2", MIB, "");
    let _ = info("threads").ok();
    let refused = info("io_uring").exits(1);
    assert!(refused.stderr.contains("kernel.io_uring_disabled"), "{}", refused.report());
    let unknown = info("uring").exits(1);
    let expected = "isobath: ISOBATH_IO is uring: it may be io_uring, threads, or unset\n";
    assert_eq!(unknown.stderr, expected);
}
