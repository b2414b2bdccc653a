//! Internal snapshots, taken, applied and deleted by both programs in turn: each disk is what it was, and QEMU finds
//! nothing wrong.

use crate::programs::{isobath, qemu_img};
use crate::serving::{Served, assert_same_bytes};
use isobath_image::check::{CheckEvent, CheckOptions, Repair};
use isobath_image::offline::check;
use isobath_qcow2::Snapshot;
use isobath_ring::block_on;
use isobath_storage_file::FileHost;
use isobath_testkit::chain::{Commands, Writer};
use isobath_testkit::ops::Shape;
use isobath_testkit::process::Finished;
use isobath_testkit::seed::Seed;
use isobath_testkit::{args, qemu};
use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use std::ffi::OsString;
use std::path::Path;

const NAME: &str = "disk.qcow2";

struct World<'a> {
    directory: &'a Path,
    disk: Vec<u8>,
    /// Names, and what the disk was.
    snapshots: Vec<(String, Vec<u8>)>,
}

impl World<'_> {
    fn read(&self) -> Vec<u8> {
        qemu::read_disk(&self.directory.join(NAME), "qcow2")
    }

    /// Runs a command by one of the programs.
    fn snapshot(&self, ours: bool, option: &str, name: Option<&str>) -> Finished {
        let mut arguments = args!["snapshot", option];
        arguments.extend(name.map(OsString::from));
        arguments.push(NAME.into());
        let run = if ours { isobath } else { qemu_img };
        run(self.directory, arguments).ok()
    }

    fn step(&mut self, rng: &mut StdRng, number: usize) {
        let ours = rng.random_bool(0.7);
        let any = self.snapshots.choose(rng).map(|(name, _)| name.clone());
        match (rng.random_range(0..10), any) {
            (0..=2, _) => {
                let name = format!("snapshot {number}");
                let _ = self.snapshot(ours, "-c", Some(&name));
                self.snapshots.push((name, self.disk.clone()));
            }
            (3..=4, Some(name)) => {
                let _ = self.snapshot(ours, "-a", Some(&name));
                let taken = self.snapshots.iter().find(|(other, _)| *other == name).unwrap();
                self.disk.clone_from(&taken.1);
            }
            (5, Some(name)) => {
                let _ = self.snapshot(ours, "-d", Some(&name));
                self.snapshots.retain(|(other, _)| *other != name);
            }
            _ => {
                let shape = Shape { size: self.disk.len() as u64, longest: 100 << 10, unit: 512 };
                let mut ops = shape.ops(rng, 4);
                ops.retain(|op| op.io_command().is_some());
                let program = Path::new(crate::serving::ISOBATH);
                let writer = if ours { Commands::isobath(program) } else { Commands::qemu() };
                writer.apply(&self.directory.join(NAME), &ops);
                self.disk = self.read();
            }
        }
    }

    #[track_caller]
    fn verify(&self) {
        let image = self.directory.join(NAME);
        qemu::assert_clean(&image);
        assert!(self.read() == self.disk, "the disk has changed");
        let listed = self.snapshot(true, "-l", None).text().clone();
        assert_eq!(listed, self.snapshot(false, "-l", None).text());
        for (name, disk) in &self.snapshots {
            assert!(listed.contains(name), "{listed}");
            let copy = self.directory.join("copy.raw");
            let convert = args!["convert", "-l", name, "-O", "raw", NAME, &copy];
            let _ = qemu_img(self.directory, convert).ok();
            assert!(std::fs::read(copy).unwrap() == *disk, "{name} has changed");
        }
    }
}

#[test]
fn snapshots_are_what_they_were() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    for _ in 0..4 {
        let directory = tempfile::tempdir().unwrap();
        let cluster = 1 << rng.random_range(9..=16);
        let options = match rng.random_range(0..6) {
            0 => format!("compat=0.10,cluster_size={cluster}"),
            1 => format!("extended_l2=on,cluster_size={}", cluster.max(1 << 14)),
            2 => format!("refcount_bits={},cluster_size={cluster}", 8 << rng.random_range(0..=3)),
            _ => format!("cluster_size={cluster}"),
        };
        println!("{options}");
        let size = (1 << 20) + rng.random_range(0..64) * 4096;
        qemu::create(&directory.path().join(NAME), "qcow2", size, &options);
        let disk = vec![0; size as usize];
        let mut world = World { directory: directory.path(), disk, snapshots: Vec::new() };
        for number in 0..20 {
            world.step(&mut rng, number);
            if number % 4 == 3 {
                world.verify();
            }
        }
    }
}

#[test]
fn a_snapshot_is_read_while_the_disk_goes_on() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let size = 8 << 20;
    qemu::create(&at("base.qcow2"), "qcow2", size, "");
    let _ = qemu::io(&at("base.qcow2"), "qcow2", &["write -P 1 0 6M"]).ok();
    let create = args!["create", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", NAME, "8M"];
    let _ = isobath(directory.path(), create).ok();
    let image = at(NAME);
    let _ = qemu::io(&image, "qcow2", &["write -P 2 1M 1M", "write -z 3M 100k"]).ok();
    let _ = isobath(directory.path(), args!["snapshot", "-c", "one", NAME]).ok();
    let _ = qemu::io(&image, "qcow2", &["write -P 3 1M 5M", "discard 0 1M"]).ok();
    let copy = at("copy.raw");
    let convert = args!["convert", "-l", "one", "-O", "raw", NAME, &copy];
    let _ = qemu_img(directory.path(), convert).ok();

    let served = Served::start(&[&image], &["--snapshot", "one", "--export-name", "one"]);
    assert_same_bytes(&served.uri("one"), &copy);
    let refused = qemu::io(Path::new(&served.uri("one")), "raw", &["write 0 512"]);
    assert_eq!(refused.code(), 1, "{}", refused.report());
    let _ = served.stop();

    let reads = ["-c", "read -P 2 1M 1M", "-c", "read -P 0 3M 100k", "-c", "read -P 1 4M 2M"];
    let io = args!["io", "--load-snapshot", "one"];
    let read = [io.clone(), reads.map(OsString::from).to_vec(), args![NAME]].concat();
    let done = isobath(directory.path(), read).ok();
    assert!(!done.text().contains("failed"), "{}", done.report());
    let done = isobath(directory.path(), [io, args!["-c", "write 0 512", NAME]].concat());
    assert_eq!(done.code(), 1, "{}", done.report());
    let unknown = isobath(directory.path(), args!["io", "--load-snapshot", "two", NAME]);
    assert!(unknown.stderr.contains("Can't find snapshot"), "{}", unknown.report());
    qemu::assert_clean(&image);
}

#[test]
fn what_there_is_not_is_not_applied_or_deleted() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join(NAME);
    qemu::create(&image, "qcow2", 1 << 20, "");
    let before = std::fs::read(&image).unwrap();
    for (option, says) in
        [("-a", "Could not apply snapshot 'x': "), ("-d", "Could not delete snapshot 'x': ")]
    {
        for done in [
            isobath(directory.path(), args!["snapshot", option, "x", NAME]),
            qemu_img(directory.path(), args!["snapshot", option, "x", NAME]),
        ] {
            assert_eq!(done.code(), 1, "{}", done.report());
            assert!(done.stderr.contains(says), "{}", done.report());
        }
    }
    assert!(std::fs::read(&image).unwrap() == before, "the image has changed");
}

#[test]
fn an_amend_of_which_a_part_is_refused_does_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join(NAME);
    qemu::create(&image, "qcow2", 1 << 20, "compat=0.10");
    let _ = qemu::io(&image, "qcow2", &["write -P 1 0 128k"]).ok();
    let _ = isobath(directory.path(), args!["snapshot", "-c", "one", NAME]).ok();
    let before = std::fs::read(&image).unwrap();
    let amend = args!["amend", "-o", "compat=1.1,refcount_bits=1", NAME];
    let done = isobath(directory.path(), amend).exits(1);
    assert!(done.stderr.contains("has a refcount of 2"), "{}", done.report());
    assert!(std::fs::read(&image).unwrap() == before, "the image has changed");
}

#[test]
fn what_is_refused_leaves_an_image_as_long_as_it_is() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join(NAME);
    qemu::create(&image, "qcow2", 1 << 20, "compat=0.10");
    let before = std::fs::read(&image).unwrap();
    assert!(!before.len().is_multiple_of(512), "this is about a file that ends within a sector");
    for refused in [
        args!["amend", "-o", "refcount_bits=8", NAME],
        args!["amend", "-o", "data_file=x", NAME],
        args!["amend", "-o", "lazy_refcounts=on", NAME],
        args!["snapshot", "-d", "none", NAME],
        args!["snapshot", "-a", "none", NAME],
        args!["bitmap", "--add", NAME, "none"],
        args!["resize", "--shrink", NAME, "-2M"],
        args!["resize", NAME, "512k"],
    ] {
        let done = isobath(directory.path(), &refused).exits(1);
        assert!(std::fs::read(&image).unwrap() == before, "{refused:?}: {}", done.report());
    }
}

/// Makes the image one of version 3 whose snapshots lack the disk's size, as a program leaves it that only raises the
/// version of an old image.
fn forget_sizes(image: &Path) {
    let mut bytes = std::fs::read(image).unwrap();
    let table = u64::from_be_bytes(bytes[64..72].try_into().unwrap()) as usize;
    let count = u32::from_be_bytes(bytes[60..64].try_into().unwrap());
    let (mut snapshots, length) = Snapshot::parse_table(&bytes[table..], count).unwrap();
    for snapshot in &mut snapshots {
        (snapshot.disk_size, snapshot.icount) = (None, None);
    }
    bytes.resize(bytes.len().max(table + length), 0);
    bytes[table..table + length].fill(0);
    let shorter = Snapshot::encode_table(&snapshots).unwrap();
    bytes[table..table + shorter.len()].copy_from_slice(&shorter);
    bytes[4..8].copy_from_slice(&3u32.to_be_bytes());
    bytes[72..96].fill(0);
    bytes[96..100].copy_from_slice(&4u32.to_be_bytes());
    bytes[100..104].copy_from_slice(&104u32.to_be_bytes());
    std::fs::write(image, bytes).unwrap();
}

#[test]
fn incomplete_snapshots_are_completed_as_by_qemu() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    qemu::create(&at(NAME), "qcow2", 1 << 20, "compat=0.10");
    for name in ["one", "two"] {
        let _ = qemu::io(&at(NAME), "qcow2", &["write -P 1 0 128k"]).ok();
        let _ = qemu_img(directory.path(), args!["snapshot", "-c", name, NAME]).ok();
    }
    forget_sizes(&at(NAME));
    let disk = qemu::read_disk(&at(NAME), "qcow2");
    let found = isobath(directory.path(), args!["check", NAME]).exits(2);
    for number in 0..2 {
        let error = format!("ERROR snapshot table entry {number} is incomplete");
        assert!(found.stderr.contains(&error), "{}", found.report());
    }
    let leaks_only = isobath(directory.path(), args!["check", "-r", "leaks", NAME]).exits(2);
    assert!(leaks_only.stderr.contains("ERROR snapshot table entry 0"), "{}", leaks_only.report());
    let copy = "copy.qcow2";
    let _ = std::fs::copy(at(NAME), at(copy)).unwrap();
    let theirs = qemu_img(directory.path(), args!["check", "-r", "all", copy]).ok();
    let ours = isobath(directory.path(), args!["check", "-r", "all", NAME]).ok();
    assert_eq!(ours.stderr, theirs.stderr);
    let said = |done: &Finished| done.text().split("Image end offset").next().unwrap().to_owned();
    assert_eq!(said(&ours), said(&theirs));
    qemu::assert_clean(&at(NAME));
    assert!(qemu::read_disk(&at(NAME), "qcow2") == disk, "the disk has changed");
    let list = |name| isobath(directory.path(), args!["snapshot", "-l", name]).ok().text();
    assert_eq!(list(NAME), list(copy));
    let table = |name| {
        let bytes = std::fs::read(at(name)).unwrap();
        let table = u64::from_be_bytes(bytes[64..72].try_into().unwrap()) as usize;
        Snapshot::parse_table(&bytes[table..], 2).unwrap().0
    };
    assert_eq!(table(NAME), table(copy));
}

#[test]
fn incomplete_snapshots_are_errors_while_others_remain() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join(NAME);
    qemu::create(&image, "qcow2", 1 << 20, "compat=0.10");
    let _ = qemu_img(directory.path(), args!["snapshot", "-c", "one", NAME]).ok();
    forget_sizes(&image);
    let mut bytes = std::fs::read(&image).unwrap();
    let l1 = u64::from_be_bytes(bytes[40..48].try_into().unwrap()) as usize;
    // An L2 table past the end of the file.
    bytes[l1..l1 + 8].copy_from_slice(&(1u64 << 40).to_be_bytes());
    std::fs::write(&image, bytes).unwrap();
    let kept = isobath(directory.path(), args!["check", "-r", "all", NAME]).exits(2);
    let error = "ERROR snapshot table entry 0 is incomplete";
    assert!(kept.stderr.contains(error), "{}", kept.report());
}

#[test]
fn a_snapshot_too_small_for_the_disk_is_not_completed_and_the_report_stays() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join(NAME);
    // An L1 table of one entry maps 512 MiB.
    qemu::create(&image, "qcow2", 1 << 20, "compat=0.10");
    let _ = qemu_img(directory.path(), args!["snapshot", "-c", "one", NAME]).ok();
    forget_sizes(&image);
    let larger = isobath(directory.path(), args!["resize", NAME, "2G"]);
    let mut bytes = std::fs::read(&image).unwrap();
    if larger.code() != 0 {
        // As a program leaves it that changes the size alone.
        bytes[24..32].copy_from_slice(&(2u64 << 30).to_be_bytes());
        bytes[36..40].copy_from_slice(&4u32.to_be_bytes());
        std::fs::write(&image, &bytes).unwrap();
    }
    bytes = std::fs::read(&image).unwrap();
    let kept = isobath(directory.path(), args!["check", "-r", "all", NAME]).exits(2);
    for error in ["ERROR snapshot table entry 0 is incomplete", "too small for the snapshot's disk"]
    {
        assert!(kept.stderr.contains(error), "{}", kept.report());
    }
    assert!(kept.text().contains("1 errors were found"), "{}", kept.report());
    assert!(std::fs::read(&image).unwrap() == bytes, "the image has changed");
    // Another snapshot leaves it as it is, and it is applied and deleted as before.
    for option in ["-c", "-a", "-d"] {
        let name = if option == "-c" { "two" } else { "one" };
        let _ = isobath(directory.path(), args!["snapshot", option, name, NAME]).ok();
    }
    qemu::assert_clean(&image);
}

/// Marks an image as corrupt.
fn mark_corrupt(image: &Path) {
    let mut bytes = std::fs::read(image).unwrap();
    bytes[79] |= 2;
    std::fs::write(image, bytes).unwrap();
}

fn is_marked_corrupt(image: &Path) -> bool {
    std::fs::read(image).unwrap()[79] & 2 != 0
}

#[test]
fn a_corrupt_image_whose_snapshots_can_be_completed_is_so_no_more() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join(NAME);
    qemu::create(&image, "qcow2", 1 << 20, "compat=0.10");
    let _ = qemu::io(&image, "qcow2", &["write -P 1 0 128k"]).ok();
    let _ = qemu_img(directory.path(), args!["snapshot", "-c", "one", NAME]).ok();
    forget_sizes(&image);
    let disk = qemu::read_disk(&image, "qcow2");
    mark_corrupt(&image);
    let repaired = isobath(directory.path(), args!["check", "-r", "all", NAME]).ok();
    assert!(!is_marked_corrupt(&image), "{}", repaired.report());
    qemu::assert_clean(&image);
    assert!(qemu::read_disk(&image, "qcow2") == disk, "the disk has changed");
    // It is written to again.
    let _ = isobath(directory.path(), args!["io", "-c", "write 0 64k", NAME]).ok();
}

#[test]
fn a_corrupt_image_whose_snapshots_cannot_be_completed_stays_so() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join(NAME);
    // An L1 table of one entry maps 512 MiB.
    qemu::create(&image, "qcow2", 1 << 20, "compat=0.10");
    let _ = qemu_img(directory.path(), args!["snapshot", "-c", "one", NAME]).ok();
    forget_sizes(&image);
    let _ = isobath(directory.path(), args!["resize", "-q", NAME, "2G"]);
    let mut bytes = std::fs::read(&image).unwrap();
    bytes[24..32].copy_from_slice(&(2u64 << 30).to_be_bytes());
    bytes[36..40].copy_from_slice(&4u32.to_be_bytes());
    std::fs::write(&image, &bytes).unwrap();
    mark_corrupt(&image);
    let kept = isobath(directory.path(), args!["check", "-r", "all", NAME]).exits(2);
    assert!(kept.stderr.contains("too small for the snapshot's disk"), "{}", kept.report());
    assert!(is_marked_corrupt(&image), "{}", kept.report());
}

#[test]
fn what_is_completed_is_the_file_that_was_checked() {
    let directory = tempfile::tempdir().unwrap();
    let (image, moved) = (directory.path().join(NAME), directory.path().join("moved"));
    qemu::create(&image, "qcow2", 1 << 20, "compat=0.10");
    let _ = qemu_img(directory.path(), args!["snapshot", "-c", "one", NAME]).ok();
    forget_sizes(&image);
    let bytes = std::fs::read(&image).unwrap();
    let options = CheckOptions { repair: Repair::All, ..CheckOptions::default() };
    let mut events = |_: CheckEvent<'_>| {
        // Another program does this during the check.
        if !moved.exists() {
            std::fs::rename(&image, &moved).unwrap();
            std::fs::write(&image, &bytes).unwrap();
        }
        let written = qemu::io(&moved, "qcow2", &["write 0 512"]);
        assert!(written.stderr.contains("lock"), "{}", written.report());
    };
    let report = block_on(check(&FileHost, &image, &options, &mut events)).unwrap();
    assert_eq!((report.corruptions, report.corruptions_fixed), (0, 1));
    assert!(std::fs::read(&image).unwrap() == bytes, "the other file has changed");
    qemu::assert_clean(&moved);
}

#[test]
fn a_snapshot_takes_the_machines_state_with_it_and_brings_it_back() {
    let far = "1T";
    for cluster in ["512", "64k"] {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join(NAME);
        qemu::create(&image, "qcow2", 1 << 20, &format!("cluster_size={cluster}"));
        let far = if cluster == "64k" { far } else { "3M" };
        let commands = |commands: &[String]| {
            let mut arguments = args!["io"];
            for command in commands {
                arguments.extend(args!["-c", command]);
            }
            arguments.push(NAME.into());
            isobath(directory.path(), arguments).ok()
        };
        let write = |byte: u8| {
            let disk = format!("write -P {byte} 0 64k");
            [disk, format!("write -b -P {byte} 0 100k"), format!("write -b -P {byte} {far} 4k")]
        };
        let read = |byte: u8| write(byte).map(|command| command.replace("write", "read"));
        let good = |done: &Finished| assert!(!done.text().contains("failed"), "{}", done.report());
        let both = |byte| {
            good(&commands(&read(byte)));
            let reads = read(byte);
            let reads: Vec<&str> = reads.iter().map(String::as_str).collect();
            good(&qemu::io(&image, "qcow2", &reads).ok());
            qemu::assert_clean(&image);
        };
        let snapshot = |ours: bool, option: &str, name: &str| {
            let run = if ours { isobath } else { qemu_img };
            let _ = run(directory.path(), args!["snapshot", option, name, NAME]).ok();
        };
        good(&commands(&write(1)));
        both(1);
        snapshot(true, "-c", "one");
        let second = write(2);
        let second: Vec<&str> = second.iter().map(String::as_str).collect();
        good(&qemu::io(&image, "qcow2", &second).ok());
        both(2);
        snapshot(false, "-c", "two");
        good(&commands(&write(3)));
        for (ours, name, byte) in [(true, "one", 1), (true, "two", 2), (false, "one", 1)] {
            snapshot(ours, "-a", name);
            both(byte);
        }
        snapshot(true, "-d", "one");
        snapshot(true, "-d", "two");
        both(1);
        // A disk that grows is zeroes there.
        let _ = isobath(directory.path(), args!["resize", NAME, "4G"]).ok();
        let grown = qemu::io(&image, "qcow2", &["read -P 0 1M 1023M"]).ok();
        good(&grown);
        qemu::assert_clean(&image);
    }
}

#[test]
fn an_image_whose_refcounts_are_too_small_for_a_snapshot_is_not_called_corrupt() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join(NAME);
    for (bits, fit) in [(1, 0), (2, 2)] {
        qemu::create(&image, "qcow2", 1 << 20, &format!("refcount_bits={bits}"));
        let _ = qemu::io(&image, "qcow2", &["write 0 64k"]).ok();
        let take = |name: &str| isobath(directory.path(), args!["snapshot", "-c", name, NAME]);
        for number in 0..fit {
            let _ = take(&format!("s{number}")).ok();
        }
        let refused = take("more").exits(1);
        let says = format!("more references than refcounts of {bits} bits can count");
        assert!(refused.stderr.contains(&says), "{}", refused.report());
        assert!(refused.stderr.contains("refcount_bits=16"), "{}", refused.report());
        assert!(!refused.stderr.contains("corrupt"), "{}", refused.report());
        assert!(!refused.stderr.contains("check"), "{}", refused.report());
        let theirs = qemu_img(directory.path(), args!["snapshot", "-c", "more", NAME]);
        assert_eq!(theirs.code(), 1, "{}", theirs.report());
        let _ = isobath(directory.path(), args!["check", "-r", "leaks", NAME]).ok();
        let snapshots = qemu_img(directory.path(), args!["snapshot", "-l", NAME]).ok().text();
        assert_eq!(snapshots.matches("00:00:00.000").count(), fit, "{snapshots}");
        qemu::assert_clean(&image);
    }
}
