//! `isobath io` does and prints what `qemu-io` does and prints.

use isobath_testkit::process::{Finished, run_program};
use isobath_testkit::{args, qemu};
use std::fs;
use std::io::Write;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const ISOBATH: &str = env!("CARGO_BIN_EXE_isobath");

/// Commands, and the options before them. Times differ; everything else is the same.
const SEQUENCES: &[&[&str]] = &[
    &["write -P 7 0 64k", "read -P 7 0 64k", "read -P 8 0 64k", "read -v 0 48", "map"],
    &["read -P 7 -s 10 -l 20 0 64k", "read -P 0 -s 4 100 1000", "read -P 1 -l 10 0 5"],
    &[
        "write -P 3 1000 3000",
        "readv -P 3 1000 1000 1000",
        "readv -v 990 10 13",
        "readv -P 9 0 1 2",
    ],
    &["writev -P 0x41 5 100 200 300", "read -v 0 700", "write -P 0102 5 5", "read -v 4 8"],
    &["write -z 0 64k", "write -z -u 64k 64k", "map", "alloc 0 1M", "alloc 64k 100", "alloc 2M"],
    &["write 0 1M", "discard 64k 64k", "discard -q 0 4k", "discard -C 0 512", "read 0 1M"],
    &["write -c 64k 64k", "write -c -P 9 512k 128k", "read -P 9 512k 128k", "write -c 63k 64k"],
    &["write -c 100 64k", "write -c 0 100", "write -c -z 0 64k", "write -f -c 0 64k"],
    &["write -C 0 512", "read -vC 0 3", "write -q 0 512", "read -qP 3 0 1", "write -f 0 512"],
    &["aio_write -P 5 0 64k", "aio_flush", "aio_read -P 6 0 64k", "aio_flush", "aio_read -v 5 20"],
    &["aio_write -P 5 0 64k 64k", "aio_flush", "aio_read -qP 5 0 128k", "aio_write -q -zu 0 64k"],
    &["aio_read 3M 1", "aio_flush", "aio_write 3M 1", "aio_flush", "aio_write -u 0 1"],
    &["length", "truncate 2M", "length", "read -P 0 1M 1M", "truncate 512k", "length", "map"],
    &["read 0 2M", "read 1M 1", "readv 1M 1", "write 2M 1", "writev 2M 1", "discard 2M 1"],
    &[
        "read 0 x",
        "read x 0",
        "read -1 3",
        "write 0 1e3",
        "write 0 99999999999999999999",
        "write 0 1Z",
    ],
    &["read 0 3G", "readv 0 3G", "readv 0 2G 2G", "write 0 3G", "write -z 0 3G", "discard 0 3G"],
    &["read -P 300 0 1", "read -P x 0 1", "write -u 0 1", "write -n 0 1", "write -z -P 1 0 1"],
    &[
        "write 0 1.5k",
        "write 0 1K",
        "write 0x10 0x20",
        "write 0 1b",
        "write 0 -P 7 5",
        "read -- 0 5",
    ],
    &["write 0 0", "read 0 0", "discard 0 0", "alloc 0 0", "alloc x", "alloc 0 -1", "sleep x"],
    &["help nothing", "sleep 1", "flush", "quit", "length"],
    &["nothing", "length"],
    &["read", "read 0", "flush x", "map x", "truncate", "sleep 1 1", "length"],
    &["write -s /nonexistent 0 512", "truncate x", "length"],
    &["write -b -P 5 0 64k", "read -b -P 5 0 64k", "read -b -P 5 4k 62k", "read -b -v 65520 512"],
    &["read -b -P 0 0 64k", "read -b -P 0 1G 512", "write -b -P 6 1G 1M", "read -bP 6 1G 1M"],
    &["write -b 1 512", "write -b 0 100", "read -b 1 512", "read -b 0 100", "write -b 0 3G"],
    &["write -b -c -P 3 1M 512", "read -b -P 3 1M 512", "write -b -z 0 512", "write -b -f 0 512"],
    &["write -b -P 5 0 64k", "map", "length", "read -P 0x55 256k 100k", "truncate 2M", "map"],
];

/// A disk of 1 MiB with something at 256 KiB.
fn image(directory: &Path, name: &str) -> PathBuf {
    let image = directory.join(name);
    qemu::create(&image, "qcow2", 1 << 20, "");
    let _ = qemu::io(&image, "qcow2", &["write -P 0x55 256k 100k"]).ok();
    image
}

/// A text without times and rates, which follow the number of requests, and without the words that
/// explain a command.
fn timeless(text: &str) -> String {
    let line = |line: &str| -> String {
        if let Some((amount, _)) = line.split_once(", 1 ops; ") {
            return format!("{amount}, 1 ops\n");
        }
        if let Some((name, _)) = line.split_once(" [-") {
            return format!("{name}\n");
        }
        let mut fields = line.split(',');
        match (fields.next(), fields.next(), fields.next(), fields.count()) {
            (Some(bytes), Some("1"), Some(_), 2) => format!("{bytes},1\n"),
            _ => format!("{line}\n"),
        }
    };
    text.lines().map(line).collect()
}

fn io(program: &Path, first: &[&str], image: &Path, commands: &[&str]) -> Finished {
    let mut arguments: Vec<_> = args![];
    arguments.extend(first.iter().map(Into::into));
    for command in commands {
        arguments.extend(args!["-c", command]);
    }
    arguments.push(image.into());
    run_program(program, arguments)
}

#[track_caller]
fn assert_alike(options: &[&str], commands: &[&str]) {
    let directory = tempfile::tempdir().unwrap();
    let (one, other) = (image(directory.path(), "one"), image(directory.path(), "other"));
    let own_options: Vec<_> = ["io"].iter().chain(options).copied().collect();
    let own = io(Path::new(ISOBATH), &own_options, &one, commands);
    let theirs = io(&qemu::program("qemu-io"), options, &other, commands);
    let context = format!("{}\n{}", own.report(), theirs.report());
    assert_eq!(timeless(&own.text()), timeless(&theirs.text()), "{context}");
    assert_eq!(own.code(), theirs.code(), "{context}");
    qemu::assert_clean(&one);
    let _ = qemu::img(args!["compare", "-f", "qcow2", "-F", "qcow2", one, other]).ok();
}

#[test]
fn the_same_output_exit_code_and_disk() {
    for commands in SEQUENCES {
        assert_alike(&["-f", "qcow2"], commands);
    }
}

/// The command of that name, as it is called in QEMU.
fn linked(directory: &Path) -> PathBuf {
    let link = directory.join("qemu-io");
    if !link.exists() {
        symlink(ISOBATH, &link).unwrap();
    }
    link
}

#[test]
fn a_reopening_changes_or_keeps_options_as_in_qemu() {
    let directory = tempfile::tempdir().unwrap();
    let image = image(directory.path(), "image");
    let top = directory.path().join("top");
    let create = args!["create", "-q", "-f", "qcow2", "-b", &image, "-F", "qcow2", &top];
    let _ = qemu::img(create).ok();
    for commands in [
        &["reopen -o node-name=foo"][..],
        &["reopen -o file.node-name=foo"],
        &["reopen -o driver=raw"],
        &["reopen -o file.driver=qcow2", "reopen -o file.driver=file"],
        &["reopen -o driver=qcow2", "write 0 512"],
        &["reopen -r -o read-only=on"],
        &["reopen -w -o read-only=foo"],
        &["reopen -c none -o cache.direct=on"],
        &["reopen -c directsync -o cache.no-flush=on"],
        &["reopen -o read-only=foo"],
        &["reopen -o cache.no-flush=bar"],
        &["reopen -o cache.direct=baz"],
        &["reopen -o auto-read-only=qux"],
        &["reopen -r", "reopen -o read-only=off", "write 0 512"],
        &["reopen -o cache.direct=on", "write 0 512", "reopen -o cache.direct=off", "read 0 512"],
        &["reopen -o bogus=1"],
    ] {
        let own = io(&linked(directory.path()), &["-f", "qcow2"], &image, commands);
        let theirs = io(&qemu::program("qemu-io"), &["-f", "qcow2"], &image, commands);
        let context = format!("{commands:?}\n{}\n{}", own.report(), theirs.report());
        assert_eq!(timeless(&own.text()), timeless(&theirs.text()), "{context}");
        assert_eq!(own.stderr, theirs.stderr, "{context}");
        assert_eq!(own.code(), theirs.code(), "{context}");
    }
    for (open, reopen) in [
        ("node-name=foo", "node-name=foo"),
        ("file.node-name=foo", "file.node-name=foo"),
        ("backing.node-name=foo", "backing.node-name=foo"),
        ("node-name=foo", "node-name=bar"),
        ("lazy-refcounts=on", "backing.driver=qcow2"),
        ("lazy-refcounts=on", "backing.driver=file"),
        ("lazy-refcounts=on", "backing.node-name=foo"),
    ] {
        let (open, reopen) =
            (format!("open -o {open} {}", top.display()), format!("reopen -o {reopen}"));
        let run = |program: &Path| {
            let commands = args!["-c", &open, "-c", &reopen, "-c", "length"];
            run_program(program, commands)
        };
        let (own, theirs) = (run(&linked(directory.path())), run(&qemu::program("qemu-io")));
        let context = format!("{open} {reopen}\n{}\n{}", own.report(), theirs.report());
        assert_eq!(
            (own.text(), own.stderr, own.status),
            (theirs.text(), theirs.stderr, theirs.status),
            "{context}"
        );
    }
    // QEMU refuses this of an image that is open for writing.
    let read_only = ["reopen -o read-only=on", "write 0 512", "reopen -w", "write 512 512"];
    let some = io(Path::new(ISOBATH), &["io"], &image, &read_only).exits(1);
    assert!(some.text().starts_with("wrote 512/512 bytes at offset 512\n"), "{}", some.report());
    assert!(some.stderr.contains("read-only"), "{}", some.report());
    // An image that was opened without its backing file stays read-only.
    let alone = args!["io", "--no-backing", "-r", "-c", "reopen -w", "-c", "write 0 512", &top];
    let alone = run_program(ISOBATH, alone).exits(1);
    assert!(!alone.text().contains("wrote"), "{}", alone.report());
}

#[test]
fn a_compressed_write_beside_one_through_a_filter_is_kept() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    qemu::create(&image, "qcow2", 2 << 20, "cluster_size=2M");
    let _ = qemu::io(&image, "qcow2", &["write -P 3 0 2M"]).ok();
    let opts = format!(
        "driver=compress,file.driver=qcow2,file.file.driver=file,file.file.filename={}",
        image.display()
    );
    // The filter reads the cluster and writes all of it.
    let commands = ["aio_write -P 1 0 512", "write -c -P 2 0 2M", "aio_flush", "read -P 2 512 1M"];
    let mut arguments = args!["io", "--image-opts"];
    for command in commands {
        arguments.extend(args!["-c", command]);
    }
    arguments.push(opts.into());
    let done = run_program(ISOBATH, arguments).ok();
    assert!(!done.text().contains("failed"), "{}", done.report());
}

#[test]
fn a_filter_compresses_what_is_written() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    qemu::create(&image, "qcow2", (1 << 20) + 512, "");
    let opts = format!(
        "driver=compress,file.driver=qcow2,file.file.driver=file,file.file.filename={}",
        image.display()
    );
    let commands = [
        "write -P 1 0 200k",
        "write -P 2 270000 100000",
        "write -P 3 1M 512",
        "discard 512k 64k",
        "write -z 64k 64k",
        "read -P 2 270000 100000",
    ];
    let mut arguments = args!["io", "--image-opts"];
    for command in commands {
        arguments.extend(args!["-c", command]);
    }
    arguments.push((&opts).into());
    let done = run_program(ISOBATH, arguments).ok();
    assert!(!done.text().contains("failed"), "{}", done.report());
    let reads = [
        "read -P 1 0 64k",
        "read -P 0 64k 64k",
        "read -P 1 128k 72k",
        "read -P 0 200k 65200",
        "read -P 2 270000 100000",
        "read -P 3 1M 512",
    ];
    let read = qemu::io(&image, "qcow2", &reads).ok();
    assert!(!read.text().contains("failed"), "{}", read.report());
    let check = qemu::img(args!["check", "--output=json", &image]).json();
    assert_eq!(check["compressed-clusters"], check["allocated-clusters"], "{check}");
    // It writes to no image that cannot hold such clusters.
    let raw = directory.path().join("raw");
    fs::write(&raw, [0; 4096]).unwrap();
    let opts = format!(
        "driver=compress,file.driver=raw,file.file.driver=file,file.file.filename={}",
        raw.display()
    );
    let refused =
        run_program(ISOBATH, args!["io", "--image-opts", "-c", "write 0 512", opts]).exits(1);
    assert!(refused.stderr.contains("Compression is not supported"), "{}", refused.report());
}

#[test]
fn a_disk_without_contents_is_named_by_options_only() {
    let directory = tempfile::tempdir().unwrap();
    let null = r#"json:{"driver":"null-co","size":1048576,"read-zeroes":true}"#;
    let commands = ["write 0 64k", "read -P 0 0 64k", "length", "write 1M 512", "info"];
    let own = io(Path::new(ISOBATH), &["io"], Path::new(null), &commands);
    let theirs = io(&qemu::program("qemu-io"), &[], Path::new(null), &commands);
    assert_eq!(timeless(&own.text()), timeless(&theirs.text()));
    assert_eq!(own.code(), theirs.code());
    let copy = directory.path().join("copy");
    let _ = run_program(ISOBATH, args!["convert", "-O", "raw", null, &copy]).ok();
    assert!(fs::read(&copy).unwrap() == vec![0; 1 << 20]);
    let whole = run_program(ISOBATH, args!["io", "-c", "length", "null-co://"]).ok();
    assert_eq!(whole.text(), "1 GiB\n");
    // In the place of other files of an image.
    let image = image(directory.path(), "image");
    let top = directory.path().join("top");
    let create = args!["create", "-q", "-f", "qcow2", "-b", &image, "-F", "qcow2", &top];
    let _ = qemu::img(create).ok();
    let _ = qemu::io(&top, "qcow2", &["write -P 7 512k 512"]).ok();
    let below = format!(
        "driver=qcow2,file.filename={},backing.driver=null-co,backing.size=2M",
        top.display()
    );
    let read = io(
        Path::new(ISOBATH),
        &["io", "--image-opts", "-r"],
        Path::new(&below),
        &["read -P 0 256k 100k", "read -P 7 512k 512"],
    );
    assert!(!read.ok().text().contains("failed"));
    for (arguments, says) in [
        (args!["io", "-f", "null-co", "-c", "length", &image], "only allowed filename"),
        (args!["io", "-c", "length", "null-co://x"], "only allowed filename"),
        (args!["io", "-c", "length", r#"json:{"driver":"null-co","bogus":1}"#], "bogus"),
        (args!["create", "-f", "raw", "null-co://", "1M"], "null"),
    ] {
        let refused = run_program(ISOBATH, &arguments).exits(1);
        assert!(refused.stderr.contains(says), "{arguments:?}: {}", refused.report());
    }
    // No image's header names one.
    for backing in [
        "null-co://",
        r#"json:{"driver":"null-co"}"#,
        r#"json:{"driver":"raw","file":{"driver":"null-co"}}"#,
    ] {
        let top = directory.path().join("top");
        let create =
            args!["create", "-q", "-u", "-f", "qcow2", "-b", backing, "-F", "raw", &top, "1M"];
        let _ = qemu::img(create).ok();
        let refused = run_program(ISOBATH, args!["io", "-c", "read 0 512", &top]).exits(1);
        assert!(refused.stderr.contains("backing file"), "{}", refused.report());
    }
}

#[test]
fn a_read_only_image_is_left_alone() {
    for command in
        ["write 0 1", "write -z 0 1", "writev 0 1", "aio_write 0 1", "discard 0 1", "truncate 5M"]
    {
        assert_alike(&["-r"], &[command, "length", "read -P 0x55 256k 100k", "flush"]);
    }
}

#[test]
fn the_page_cache_is_used_or_not() {
    for mode in [&["-n"][..], &["-t", "none"], &["-t", "writeback"]] {
        let commands = ["write -P 1 3 100000", "read -P 1 3 100000", "read -P 0x55 300k 1k"];
        assert_alike(mode, &commands);
    }
}

#[test]
fn an_image_in_use_is_opened_by_force_only() {
    let directory = tempfile::tempdir().unwrap();
    let image = image(directory.path(), "image");
    let _server = qemu::nbd(&image, "qcow2", &directory.path().join("sock"), &[]);
    let locked = run_program(ISOBATH, args!["io", "-c", "length", &image]).exits(1);
    assert!(locked.stderr.contains("lock"), "{}", locked.report());
    let forced =
        run_program(ISOBATH, args!["io", "-r", "-U", "-c", "read -P 0x55 256k 1k", &image]).ok();
    assert!(forced.text().starts_with("read 1024/1024"), "{}", forced.report());
}

#[test]
fn commands_come_from_the_standard_input_too() {
    let directory = tempfile::tempdir().unwrap();
    let image = image(directory.path(), "image");
    let run = |input: &[u8]| {
        let mut child = Command::new(ISOBATH)
            .arg("io")
            .arg(&image)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(input).unwrap();
        let done = child.wait_with_output().unwrap();
        (timeless(&String::from_utf8(done.stdout).unwrap()), done.status.code())
    };
    let wrote = "wrote 512/512 bytes at offset 0\n512 bytes, 1 ops\n";
    let (text, code) = run(b"aio_write -P 3 0 512\n\naio_flush\nlength\nread -qP 3 0 512");
    assert_eq!((text, code), (format!("{wrote}1 MiB\n"), Some(0)));
    assert_eq!(run(b"read -qP 4 0 1\nquit\nlength\n").1, Some(1));
    assert_eq!(run(b"aio_write -P 4 0 512\n").0, wrote, "the end waits for requests");
}

#[test]
fn a_write_takes_its_bytes_from_a_file() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("bytes");
    let bytes: Vec<u8> = (0..=255).chain(7..99).collect();
    fs::write(&file, &bytes).unwrap();
    let write = format!("write -s {} 100 1000", file.display());
    let directory = tempfile::tempdir().unwrap();
    let image = image(directory.path(), "image");
    let _ = io(Path::new(ISOBATH), &["io"], &image, &[&write]).ok();
    let expected: Vec<u8> = bytes.iter().cycle().take(1000).copied().collect();
    assert!(qemu::read_disk(&image, "qcow2")[100..1100] == expected);
    fs::write(&file, []).unwrap();
    let empty = io(Path::new(ISOBATH), &["io"], &image, &[&write]).exits(1);
    assert!(empty.stderr.contains("file is empty"), "{}", empty.report());
}
