//! A raw image whose format nobody named: whoever may write to it does not decide what it is opened as next.

use crate::programs::{isobath, qemu_img};
use isobath_testkit::process::{Ready, Server};
use isobath_testkit::{args, qemu};
use std::fs;
use std::path::Path;
use std::process::Command;

const MIB: usize = 1 << 20;

/// Beginnings of images of every format that QEMU detects and that needs no more than a sector.
fn beginnings() -> Vec<(&'static str, Vec<u8>)> {
    let directory = tempfile::tempdir().unwrap();
    let evil = args!["create", "-q", "-f", "qcow2", "-u", "-b", "/etc/passwd", "-F", "raw", "evil"];
    let _ = qemu_img(directory.path(), [evil, args!["1M"]].concat()).ok();
    let mut all = vec![("qcow2", fs::read(directory.path().join("evil")).unwrap())];
    let luks = args!["--object", "secret,id=s,data=abc", "-o", "key-secret=s,iter-time=10"];
    for format in ["qcow", "qed", "vmdk", "vdi", "vhdx", "vpc", "luks", "parallels"] {
        let mut create = args!["create", "-q", "-f", format];
        create.extend(if format == "luks" { luks.clone() } else { Vec::new() });
        let _ = qemu_img(directory.path(), [create, args![format, "1M"]].concat()).ok();
        all.push((format, fs::read(directory.path().join(format)).unwrap()));
    }
    for (_, start) in &mut all {
        start.resize(512, 0);
    }
    all
}

/// A raw image, and overlays of it that do not name its format, as QEMU made them until version 6.0.
fn raw_and_overlays(directory: &Path, start: &[u8], overlays: &[&str]) {
    let mut disk = vec![7; MIB];
    disk[..512].fill(1);
    fs::write(directory.join("raw"), &disk).unwrap();
    fs::write(directory.join("sector"), start).unwrap();
    for overlay in overlays {
        let create = args!["create", "-q", "-f", "qcow2", "-b", "raw", "-F", "raw", overlay];
        let _ = qemu_img(directory, create).ok();
        let mut bytes = fs::read(directory.join(overlay)).unwrap();
        let place = bytes.windows(4).position(|four| four == [0xe2, 0x79, 0x2a, 0xca]).unwrap();
        bytes[place..place + 4].copy_from_slice(b"none");
        fs::write(directory.join(overlay), bytes).unwrap();
        let write = format!("write -s {} 0 512", directory.join("sector").display());
        let _ = qemu::io(&directory.join(overlay), "qcow2", &[&write, "write -P 9 64k 64k"]).ok();
    }
}

#[test]
pub(crate) fn a_commit_does_not_turn_it_into_an_image_of_another_format() {
    for (format, start) in beginnings() {
        let directory = tempfile::tempdir().unwrap();
        let work = directory.path();
        raw_and_overlays(work, &start, &["ours", "theirs", "served"]);
        let before = qemu::read_disk(&work.join("ours"), "qcow2");
        let sector = || fs::read(work.join("raw")).unwrap()[..512].to_vec();
        let old = sector();
        let theirs = qemu_img(work, args!["commit", "theirs"]).exits(1);
        assert!(theirs.stderr.contains("not permitted"), "{format}: {}", theirs.report());
        let ours = isobath(work, args!["commit", "ours"]).exits(1);
        assert!(ours.stderr.contains("was detected as raw"), "{format}: {}", ours.report());
        assert!(sector() == old, "{format}");

        let mut command = Command::new(crate::serving::ISOBATH);
        command.current_dir(work).args(["serve", "served", "--nbd", "unix:nbd"]);
        command.args(["--export-name", "vm", "--qmp", "unix:qmp"]);
        let server = Server::start(&mut command, Ready::Line("-blockdev"));
        let live = isobath(work, args!["ctl", "qmp", "commit"]).exits(1);
        assert!(live.stderr.contains("was detected as raw"), "{format}: {}", live.report());
        assert!(sector() == old, "{format}");
        let _ = isobath(work, args!["ctl", "qmp", "quit"]).ok();
        let _ = server.wait().ok();
        for overlay in ["ours", "theirs", "served"] {
            let disk = qemu::read_disk(&work.join(overlay), "qcow2");
            assert!(disk == before, "{format}: {overlay}");
        }

        // Who names the format gets what was asked for.
        let _ = isobath(work, args!["rebase", "-u", "-b", "raw", "-F", "raw", "ours"]).ok();
        let _ = isobath(work, args!["commit", "ours"]).ok();
        assert!(sector() == start, "{format}");
    }
}

#[test]
pub(crate) fn no_write_or_zeroing_of_any_part_of_the_first_sector_turns_it_into_another() {
    for (format, start) in beginnings() {
        let directory = tempfile::tempdir().unwrap();
        let work = directory.path();
        let file = |from: usize, to: usize| {
            let part = format!("{from}-{to}");
            fs::write(work.join(&part), &start[from..to]).unwrap();
            format!("write -s {part} {from} {}", to - from)
        };
        // In one piece, and in two of which neither may say it all.
        for cut in [0, 2, 66] {
            fs::write(work.join("raw"), vec![0; MIB]).unwrap();
            let parts = [file(0, cut.max(1)), file(cut, 512)];
            let refused = parts.iter().any(|part| {
                let done = isobath(work, args!["io", "-c", part, "raw"]);
                done.text().contains("Operation not permitted")
            });
            assert!(refused, "{format}, {cut}");
            let info = isobath(work, args!["info", "raw"]).ok().text();
            assert!(info.contains("file format: raw"), "{format}, {cut}: {info}");
            let _ = isobath(work, args!["io", "-f", "raw", "-c", file(0, 512), "raw"]).ok();
            assert!(fs::read(work.join("raw")).unwrap()[..512] == start, "{format}");
        }
    }
    // A version of 1 << 24 is none; without that byte it is 2.
    let directory = tempfile::tempdir().unwrap();
    let mut disk = vec![0; MIB];
    disk[..8].copy_from_slice(b"QFI\xfb\x01\0\0\x02");
    for command in ["write -z 4 1", "write -P 0 4 1"] {
        fs::write(directory.path().join("raw"), &disk).unwrap();
        let _ = isobath(directory.path(), args!["io", "-c", command, "raw"]).exits(1);
        assert!(fs::read(directory.path().join("raw")).unwrap() == disk, "{command}");
    }
}
