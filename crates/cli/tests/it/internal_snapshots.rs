//! Internal snapshots, taken, applied and deleted by both programs in turn: each disk is what it was, and QEMU finds
//! nothing wrong.

use crate::programs::{isobath, qemu_img};
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
