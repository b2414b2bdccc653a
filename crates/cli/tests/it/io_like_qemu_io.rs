//! `isobath io` does and prints what `qemu-io` does and prints.

use isobath_testkit::process::{Finished, run_program};
use isobath_testkit::{args, qemu};
use std::fs;
use std::io::Write;
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
