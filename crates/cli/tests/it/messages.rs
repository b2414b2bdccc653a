//! Messages say what is wrong and what to do about it.

use crate::programs::{isobath, qemu_img};
use crate::serving::ISOBATH;
use isobath_testkit::process::run;
use isobath_testkit::{args, qemu};
use std::fs;
use std::process::Command;

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
fn only_a_command_that_has_it_names_the_option_to_read_without_a_lock() {
    let directory = tempfile::tempdir().unwrap();
    let base = directory.path().join("base");
    qemu::create(&base, "qcow2", 1 << 20, "");
    qemu::create_overlay(&directory.path().join("top"), &base, "qcow2", "");
    // Somebody writes to the backing file, which each of these commands only reads.
    let _server = qemu::nbd(&base, "qcow2", &directory.path().join("sock"), &[]);
    let refused = |arguments: &str| {
        let done = isobath(directory.path(), arguments.split(' ')).exits(1);
        assert!(done.stderr.contains("Failed to get shared \"write\" lock"), "{}", done.report());
        done.stderr
    };
    for without in [
        "serve top",
        "commit top",
        "chain flatten top",
        "index top",
        "resize top 2M",
        "qemu-nbd top",
        "check -r all base",
        "io -c read top",
        "rebase -b  top",
        "bench -w top",
    ] {
        let said = refused(without);
        assert!(said.contains("Close it there first"), "{said}");
        assert!(!said.contains("-U") && !said.contains("--force-share"), "{said}");
    }
    for with in [
        "map top",
        "index --verify top",
        "convert -O raw top copy",
        "measure top",
        "check base",
        "io -r -c read top",
        "bench -c 1 top",
    ] {
        let said = refused(with);
        assert!(said.contains("or read it without a lock with -U (--force-share)"), "{said}");
        let (command, rest) = with.split_once(' ').unwrap();
        let done = isobath(directory.path(), format!("{command} -U {rest}").split(' '));
        assert!(!done.stderr.contains("lock"), "{}", done.report());
    }
}

#[test]
fn an_image_that_the_command_itself_has_open_is_not_said_to_be_another_processs() {
    let directory = tempfile::tempdir().unwrap();
    qemu::create(&directory.path().join("disk"), "qcow2", 1 << 20, "");
    let twice = isobath(directory.path(), args!["serve", "--nbd", "unix:sock", "disk", "disk"]);
    let twice = twice.exits(1);
    assert!(twice.stderr.contains("(it is open in this program itself)"), "{}", twice.report());
}

#[test]
fn who_cannot_reach_a_server_is_told_why() {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("file"), "mine").unwrap();
    drop(std::os::unix::net::UnixListener::bind(directory.path().join("left")).unwrap());
    let long = "x".repeat(120);
    for (socket, says) in [
        ("none", "No such file or directory\n"),
        ("file", "it is no socket"),
        ("left", "no server listens there"),
        (long.as_str(), "its path has 120 bytes; a socket's has at most 107"),
    ] {
        let done = isobath(directory.path(), args!["ctl", socket, "jobs"]).exits(1);
        assert!(done.stderr.contains(says), "{}", done.report());
    }
}

#[test]
fn a_wrong_word_is_answered_with_the_nearest_one_and_the_right_help() {
    let directory = tempfile::tempdir().unwrap();
    for (line, says, help) in [
        ("convrt", "Command not found: convrt; did you mean 'convert'?", ""),
        ("ctl s nosuch", "Command not found: nosuch\n", "ctl "),
        ("ctl s snapshoot x", "Command not found: snapshoot; did you mean 'snapshot'?", "ctl "),
        ("ctl s jobs more", "unexpected argument 'more'", "ctl SOCKET jobs "),
        ("chain surve", "Command not found: surve; did you mean 'survey'?", "chain "),
        (
            "serve --pidfile p x",
            "unrecognized option '--pidfile'; did you mean '--pid-file'?",
            "serve ",
        ),
        ("serve --port 1 x", "'--port'; use --nbd [HOST:]PORT, or 'isobath qemu-nbd'", "serve "),
        ("serve -k s x", "'-k'; use --nbd unix:PATH, or 'isobath qemu-nbd'", "serve "),
        ("info a b", "Expecting one image file name\n", "info "),
        ("qemu-nbd a b", "isobath: Invalid number of arguments\n", "qemu-nbd "),
        ("create -f qcow2 x 10GiB", "'10GiB': write 10G, which counts in powers of 1024", "-"),
    ] {
        let done = isobath(directory.path(), line.split(' ')).exits(1);
        assert!(done.stderr.contains(says), "{}", done.report());
        let pointer = format!("Try 'isobath {help}--help' for more information");
        assert_eq!(done.stderr.contains(&pointer), help != "-", "{}", done.report());
    }
    // Under the name of QEMU's program there is nothing that it does not say.
    let link = directory.path().join("qemu-img");
    std::os::unix::fs::symlink(ISOBATH, &link).unwrap();
    for line in ["infoo", "info a b", "info --backing-chian a", "create -f qcow2 x 10GiB"] {
        let words: Vec<&str> = line.split(' ').collect();
        let ours = run(Command::new(&link).current_dir(directory.path()).args(&words)).exits(1);
        let theirs = qemu_img(directory.path(), &words).exits(1);
        assert_eq!(ours.stderr, theirs.stderr, "{line}");
    }
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
    qemu::create(&directory.path().join("disk"), "qcow2", 1 << 20, "");
    let survey = isobath(directory.path(), args!["chain", "survey", "."]).ok().text();
    assert!(survey.contains("\n1 qcow2 image forms 1 chain, 1 file in all\n"), "{survey}");
}

#[test]
fn a_refused_creation_says_first_what_qemu_says() {
    let directory = tempfile::tempdir().unwrap();
    let link = directory.path().join("qemu-img");
    std::os::unix::fs::symlink(ISOBATH, &link).unwrap();
    fs::write(directory.path().join("text"), "no image").unwrap();
    for line in [
        "-o compat=0.9 new 1M",
        "-o compat=0.10,refcount_bits=1 new 1M",
        "-o compat=0.10,lazy_refcounts=on new 1M",
        "-o preallocation=none new 1M",
        "-o compression_type=gzip new 1M",
        "-o extended_l2=on,cluster_size=4k new 1M",
        "-o data_file_raw=on new 1M",
        "-o cluster_size=3 new 1M",
        "-o compat=0.9 new",
        "-o preallocation=x -u -b base -F qcow2 new",
        "-o data_file_raw=on,extended_l2=on,cluster_size=4k new 1M",
        "-o compat=0.10,extended_l2=on,lazy_refcounts=on new 1M",
        "-o compat=0.10,data_file_raw=on,refcount_bits=1 new 1M",
        "-o compat=0.10,data_file=data,compression_type=zstd new 1M",
        "-o compat=0.10,compression_type=zstd new 1M",
        "new 9E",
        "none/new 1M",
        "-b none -F qcow2 new",
    ] {
        let words: Vec<&str> =
            ["create", "-f", "qcow2"].into_iter().chain(line.split(' ')).collect();
        let ours = run(Command::new(&link).current_dir(directory.path()).args(&words)).exits(1);
        let _ = fs::remove_file(directory.path().join("new"));
        let theirs = qemu_img(directory.path(), &words).exits(1);
        let _ = fs::remove_file(directory.path().join("new"));
        assert_eq!(ours.text(), theirs.text(), "{}", ours.report());
        assert_eq!(ours.stderr, theirs.stderr, "{line}");
    }
}

#[test]
fn a_feature_that_is_not_known_is_named_as_by_qemu_and_is_no_journal() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("disk");
    for bit in [5, 8, 60, 61, 62, 63] {
        qemu::create(&image, "qcow2", 1 << 20, "");
        let mut bytes = fs::read(&image).unwrap();
        // Bits are counted from the lowest, in the last of eight bytes.
        bytes[79 - bit / 8] |= 1 << (bit % 8);
        fs::write(&image, bytes).unwrap();
        for command in ["info", "check", "map"] {
            let theirs = qemu_img(directory.path(), args![command, "disk"]).exits(1);
            let ours = isobath(directory.path(), args![command, "disk"]).exits(1);
            let says = theirs.stderr.trim_end().replacen("qemu-img:", "isobath:", 1);
            assert!(ours.stderr.starts_with(&says), "{}{}", ours.report(), theirs.report());
            assert!(!ours.stderr.contains("journal"), "{}", ours.report());
        }
    }
}

#[test]
fn a_base_that_was_changed_since_its_index_is_no_reason_for_a_warning() {
    let directory = tempfile::tempdir().unwrap();
    let [base, top] = ["base", "top"].map(|name| directory.path().join(name));
    qemu::create(&base, "qcow2", 1 << 20, "");
    let create = args!["create", "-f", "qcow2", "-b", "base", "-F", "qcow2", "top"];
    let _ = isobath(directory.path(), create).ok();
    // QEMU writes to what the index is of, and then to what has it.
    for (image, command) in [(&base, "write -P 1 0 64k"), (&top, "write -P 2 64k 64k")] {
        let _ = qemu::io(image, "qcow2", &[command]).ok();
        for arguments in [
            args!["map", "top"],
            args!["info", "top"],
            args!["io", "-c", "read -P 1 0 4k", "-c", "write -P 2 64k 4k", "top"],
        ] {
            let done = isobath(directory.path(), arguments).ok();
            assert_eq!(done.stderr, "", "{}", done.report());
            assert!(!done.text().contains("failed"), "{}", done.report());
        }
    }
}
