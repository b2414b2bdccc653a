//! `isobath create` makes what `qemu-img create` makes, says the same, and refuses the same.

use crate::serving::ISOBATH;
use isobath_testkit::process::{Finished, Ready, Server, run};
use isobath_testkit::qemu;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

/// Runs `create` by one program in a directory.
fn create(program: &Path, directory: &Path, arguments: &[&str]) -> Finished {
    run(Command::new(program).arg("create").args(arguments).current_dir(directory))
}

/// Two directories with the same base images: one for QEMU, one for Isobath.
struct Pair {
    theirs: tempfile::TempDir,
    ours: tempfile::TempDir,
}

impl Pair {
    fn new() -> Self {
        let pair =
            Self { theirs: tempfile::tempdir().unwrap(), ours: tempfile::tempdir().unwrap() };
        for directory in [&pair.theirs, &pair.ours] {
            let at = |name| directory.path().join(name);
            qemu::create(&at("base.qcow2"), "qcow2", 5 << 20, "cluster_size=4k");
            fs::write(at("base.raw"), vec![3; 70_000]).unwrap();
            fs::create_dir(at("sub")).unwrap();
        }
        pair
    }

    fn run(&self, arguments: &[&str]) -> (Finished, Finished) {
        let theirs = create(&qemu::program("qemu-img"), self.theirs.path(), arguments);
        let ours = create(Path::new(env!("CARGO_BIN_EXE_isobath")), self.ours.path(), arguments);
        (theirs, ours)
    }
}

/// What `qemu-img info` says of an image, but for where it is and how much space it takes.
fn described(image: &Path) -> serde_json::Value {
    let mut info = qemu::info(image);
    for key in ["filename", "full-backing-filename", "actual-size"] {
        info.as_object_mut().unwrap().remove(key);
    }
    info
}

#[test]
fn images_with_every_option_are_alike() {
    let pair = Pair::new();
    for arguments in [
        &["-f", "qcow2", "x", "10M"][..],
        &["-f", "qcow2", "x", "1000"],
        &["-f", "qcow2", "x", "0"],
        &["-f", "qcow2", "-o", "size=3M", "x"],
        &["-f", "qcow2", "-o", "cluster_size=512,refcount_bits=1", "x", "40M"],
        &["-f", "qcow2", "-o", "cluster_size=2M", "-o", "lazy_refcounts=on", "x", "1T"],
        &["-f", "qcow2", "-o", "compat=0.10", "x", "1.5M"],
        &["-f", "qcow2", "-o", "compat=v3,refcount_bits=64,compression_type=zstd", "x", "1G"],
        &["-f", "qcow2", "-o", "extended_l2=on,cluster_size=128k", "x", "1G"],
        &["-f", "qcow2", "-o", "preallocation=metadata,cluster_size=4k", "x", "5M"],
        &["-f", "qcow2", "-o", "preallocation=falloc", "x", "2M"],
        &["-f", "qcow2", "-o", "preallocation=full,extended_l2=on", "x", "2M"],
        &["-f", "qcow2", "-o", "data_file=data", "x", "2M"],
        &["-f", "qcow2", "-o", "data_file=data,data_file_raw=on", "x", "2M"],
        &["-f", "qcow2", "-o", "data_file=data,preallocation=full", "x", "2M"],
        &["-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", "x"],
        &["-f", "qcow2", "-b", "base.raw", "-F", "raw", "x"],
        &["-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", "x", "20M"],
        &["-f", "qcow2", "-b", "../base.qcow2", "-F", "qcow2", "sub/x"],
        &["-f", "qcow2", "-o", "backing_file=base.qcow2,backing_fmt=qcow2,compat=v2", "x"],
        &["-f", "qcow2", "-u", "-b", "not-there", "-F", "qcow2", "x", "1M"],
        &["-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", "-q", "x"],
        &["x", "3M"],
        &["-f", "raw", "x", "1000"],
        &["-f", "raw", "-o", "preallocation=full", "x", "64k"],
        &["-f", "raw", "-o", "preallocation=falloc", "x", "64k"],
    ] {
        let name = arguments.iter().rev().find(|name| name.ends_with('x')).unwrap();
        let (theirs, ours) = pair.run(arguments);
        let (theirs, ours) = (theirs.ok(), ours.ok());
        assert_eq!(ours.text(), theirs.text());
        assert_eq!(ours.stderr, "", "{}", ours.command);
        let images = [pair.theirs.path().join(name), pair.ours.path().join(name)];
        assert_eq!(described(&images[1]), described(&images[0]), "{}", ours.command);
        let length = |path: &Path| fs::metadata(path).unwrap().len();
        if arguments.contains(&"-u") {
            // Without its backing file neither can be opened.
        } else if arguments.contains(&"qcow2") {
            // QEMU looks for a data file in the working directory.
            let judge = |arguments: &[&str]| {
                let mut command = Command::new(qemu::program("qemu-img"));
                run(command.args(arguments).current_dir(pair.ours.path())).ok()
            };
            let _ = judge(&["check", "-q", name]);
            // How much of what fallocate has made counts as data is the file system's to say.
            let strictly = if ours.command.contains("falloc") { "-q" } else { "-s" };
            if !ours.command.contains("data_file") {
                let _ = judge(&["compare", strictly, images[0].to_str().unwrap(), name]);
            }
        } else {
            assert_eq!(length(&images[1]), length(&images[0]), "{}", ours.command);
        }
        if ours.command.contains("data_file") {
            let data = [pair.theirs.path().join("data"), pair.ours.path().join("data")];
            assert_eq!(length(&data[1]), length(&data[0]), "{}", ours.command);
        }
        if ours.command.contains("falloc") || ours.command.contains("full") {
            let file = if ours.command.contains("data_file") { "data" } else { name };
            let space = |directory: &Path| fs::metadata(directory.join(file)).unwrap().blocks();
            let (theirs, ours) = (space(pair.theirs.path()), space(pair.ours.path()));
            assert!(ours >= theirs / 8 * 7, "{ours} sectors of {theirs} are allocated");
        }
    }
}

#[test]
fn what_qemu_refuses_is_refused_and_leaves_nothing_behind() {
    let pair = Pair::new();
    for (arguments, message) in [
        (&["-f", "qcow2", "x"][..], "Image creation needs a size parameter"),
        (&["-f", "qcow2", "-b", "base.qcow2", "x"], "without backing format"),
        (&["-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", "-u", "x"], "needs a size parameter"),
        (&["-f", "qcow2", "-b", "not-there", "-F", "qcow2", "x"], "not-there"),
        (&["-f", "qcow2", "-b", "base.raw", "-F", "qcow2", "x"], "base.raw"),
        (&["-f", "qcow2", "-b", "base.qcow2", "-F", "nonsense", "x"], "Unknown driver 'nonsense'"),
        (&["-f", "qcow2", "-F", "qcow2", "x", "1M"], "without backing file"),
        (&["-f", "raw", "-b", "base.raw", "-F", "raw", "x", "1M"], "Backing file not supported"),
        (
            &["-f", "qcow2", "-o", "cluster_size=3k", "x", "1M"],
            "power of two between 512 and 2048k",
        ),
        (
            &["-f", "qcow2", "-o", "cluster_size=4M", "x", "1M"],
            "power of two between 512 and 2048k",
        ),
        (&["-f", "qcow2", "-o", "refcount_bits=5", "x", "1M"], "may not exceed 64 bits"),
        (&["-f", "qcow2", "-o", "compat=0.1", "x", "1M"], "does not accept value '0.1'"),
        (
            &["-f", "qcow2", "-o", "compat=0.10,refcount_bits=8", "x", "1M"],
            "use version=v3 or greater",
        ),
        (
            &["-f", "qcow2", "-o", "compat=0.10,lazy_refcounts=on", "x", "1M"],
            "use version=v3 or greater",
        ),
        (&["-f", "qcow2", "-o", "compression_type=lz4", "x", "1M"], "does not accept value 'lz4'"),
        (
            &["-f", "qcow2", "-o", "extended_l2=on,cluster_size=4k", "x", "1M"],
            "at least 16384 bytes",
        ),
        (&["-f", "qcow2", "-o", "data_file_raw=on", "x", "1M"], "data-file-raw requires data-file"),
        (&["-f", "qcow2", "-o", "preallocation=some", "x", "1M"], "does not accept value 'some'"),
        (&["-f", "qcow2", "-o", "lazy_refcounts=maybe", "x", "1M"], "expects 'on' or 'off'"),
        (&["-f", "qcow2", "-o", "nonsense=1", "x", "1M"], "Invalid parameter 'nonsense'"),
        (&["-f", "qcow2", "x", "1x"], "size"),
        (&["-f", "qcow2", "x", "9E"], "Must be between 0 and 9223372036854775807."),
        (&["-f", "nonsense", "x", "1M"], "nonsense"),
        (&["-f", "qcow2", "no/such/directory", "1M"], "No such file or directory"),
        (&["-f", "raw", "-o", "cluster_size=4k", "x", "1M"], "Invalid parameter 'cluster_size'"),
        (&["-f", "qcow2", "-o", "cluster_size=512", "x", "1T"], "larger cluster"),
    ] {
        let (theirs, ours) = pair.run(arguments);
        let (_, ours) = (theirs.exits(1), ours.exits(1));
        assert!(ours.stderr.contains(message), "{}", ours.report());
        assert!(!pair.ours.path().join("x").exists(), "{}", ours.report());
    }
}

#[test]
fn an_image_in_use_or_below_is_not_overwritten() {
    let pair = Pair::new();
    // By Isobath alone: with another name for it QEMU would overwrite the backing file.
    let ours = |arguments: &[&str]| {
        create(Path::new(env!("CARGO_BIN_EXE_isobath")), pair.ours.path(), arguments)
    };
    let base = pair.ours.path().join("base.qcow2");
    let before = fs::read(&base).unwrap();
    let made = ours(&["-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", "base.qcow2"]);
    assert!(made.exits(1).stderr.contains("same filename as the backing file"));
    fs::hard_link(&base, pair.ours.path().join("linked")).unwrap();
    let made = ours(&["-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", "linked"]);
    assert!(made.exits(1).stderr.contains("part of its chain"));
    let _ = ours(&["-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", "top"]).ok();
    let top = ["-f", "qcow2", "-b", "top", "-F", "qcow2", "./base.qcow2"];
    let made = ours(&top);
    assert!(made.exits(1).stderr.contains("part of its chain"));
    assert!(fs::read(&base).unwrap() == before, "the base was written to");

    let socket = pair.ours.path().join("socket");
    let server = qemu::nbd(&base, "qcow2", &socket, &[]);
    let made = ours(&["-f", "qcow2", "base.qcow2", "1M"]);
    assert!(made.exits(1).stderr.contains("lock"), "somebody uses it");
    let made = ours(&["-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", "over"]);
    let _ = made.ok();
    drop(server);
    assert_eq!(fs::metadata(&base).unwrap().len(), before.len() as u64);
}

/// An image that is exported by NBD is its own backing file, source or target under another kind of name.
#[test]
fn what_a_server_exports_is_not_replaced_by_what_is_made_of_it() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let contents = [vec![5; 1 << 16], vec![0; 1 << 20]].concat();
    fs::write(at("disk"), &contents).unwrap();
    for options in [&[][..], &["--read-only"]] {
        let mut command = Command::new(ISOBATH);
        command.current_dir(directory.path());
        command.args(["serve", "--format", "raw", "disk", "--nbd", "unix:s"]).args(options);
        let server = Server::start(&mut command, Ready::Line("-blockdev"));
        let export = "nbd+unix:///disk?socket=s";
        for line in [
            &["create", "-f", "qcow2", "-b", export, "-F", "raw", "disk"][..],
            &["create", "-f", "qcow2", "-u", "-b", export, "-F", "raw", "disk", "1M"],
            &["create", "-f", "vdi", "disk", "1M"],
            &["convert", "-f", "raw", "-O", "qcow2", export, "disk"],
            &["convert", "-f", "raw", "-O", "raw", export, "disk"],
            &["convert", "-n", "-f", "raw", "-O", "raw", export, "disk"],
            &["convert", "-U", "-f", "raw", "-O", "vdi", export, "disk"],
            &["dd", "-f", "raw", "-O", "raw", &format!("if={export}"), "of=disk"],
            &["dd", "-f", "raw", "-O", "vpc", &format!("if={export}"), "of=disk"],
        ] {
            let done = run(Command::new(ISOBATH).args(line).current_dir(directory.path())).exits(1);
            assert!(done.stderr.contains("lock"), "{line:?}: {}", done.report());
            assert!(fs::read(at("disk")).unwrap() == contents, "{line:?}");
        }
        let _ = server.stop().ok();
    }
}

/// Without locks nothing but the files tells.
#[test]
fn a_copy_does_not_replace_its_source_that_is_read_without_locks() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    qemu::create(&at("base"), "qcow2", 1 << 20, "");
    qemu::create_overlay(&at("top"), &at("base"), "qcow2", "");
    let _ = qemu::io(&at("top"), "qcow2", &["write -P 5 0 64k"]).ok();
    fs::hard_link(at("base"), at("hard")).unwrap();
    std::os::unix::fs::symlink("top", at("link")).unwrap();
    let before = ["base", "top"].map(|name| fs::read(at(name)).unwrap());
    for target in ["top", "link", "base", "hard"] {
        for line in [
            &["convert", "-U", "-O", "qcow2", "top", target][..],
            &["convert", "-U", "-O", "vdi", "top", target],
            &["convert", "-U", "-n", "-O", "qcow2", "top", target],
            &["dd", "-U", "-O", "raw", "if=top", &format!("of={target}")],
        ] {
            let done = run(Command::new(ISOBATH).args(line).current_dir(directory.path())).exits(1);
            assert!(done.stderr.contains("one of the images to copy"), "{}", done.report());
            assert!(["base", "top"].map(|name| fs::read(at(name)).unwrap()) == before, "{line:?}");
        }
    }
}
