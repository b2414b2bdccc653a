//! Commands that change which layers a chain has, on random chains: every disk reads as before, byte for byte as after
//! QEMU's command where it has one, and QEMU finds every image clean.

use crate::programs::{isobath, qemu_img};
use isobath_testkit::chain::{Chain, Commands, Writer};
use isobath_testkit::ops::Shape;
use isobath_testkit::seed::Seed;
use isobath_testkit::{args, qemu};
use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

const SIZE: u64 = 3 << 20;

/// Images of one chain, the base first, and what their disks hold.
struct Layers {
    directory: PathBuf,
    names: Vec<String>,
    disks: Vec<Vec<u8>>,
}

impl Layers {
    fn random(directory: &Path, rng: &mut StdRng) -> Self {
        let mut chain = Chain::new(directory, SIZE + rng.random_range(0..64) * 4096);
        let (qemu, ours) =
            (Commands::qemu(), Commands::isobath(Path::new(crate::serving::ISOBATH)));
        let count = rng.random_range(2..=6);
        let writers: [&dyn Writer; 2] = [&qemu, &ours];
        for layer in 0..count {
            let cluster = 1 << rng.random_range(12..=16);
            let options = match rng.random_range(0..6) {
                0 => format!("compat=0.10,cluster_size={cluster}"),
                1 => format!("extended_l2=on,cluster_size={}", cluster.max(1 << 14)),
                _ => format!("cluster_size={cluster}"),
            };
            if layer > 0 && rng.random_bool(0.3) {
                let size = SIZE + rng.random_range(0..64) * 4096;
                chain.model_mut().resize(size);
            }
            let shape = Shape { size: chain.model().size(), longest: 200 << 10, unit: 512 };
            let writer = *writers.choose(rng).unwrap();
            let mut ops = shape.ops(rng, 8);
            ops.retain(|op| op.io_command().is_some());
            chain.add(writer, &options, &ops);
        }
        let name = |layer: &isobath_testkit::chain::Layer| {
            layer.path.file_name().unwrap().to_str().unwrap().to_owned()
        };
        let names: Vec<_> = chain.layers().iter().map(name).collect();
        // Names in headers that are relative to the images, so that a copy of the directory is a copy of the chain.
        for pair in names.windows(2) {
            let rebase = args!["rebase", "-u", "-b", &pair[0], "-F", "qcow2", &pair[1]];
            let _ = qemu_img(directory, rebase).ok();
        }
        let mut layers = Self { directory: directory.to_owned(), names, disks: Vec::new() };
        layers.disks = layers.read();
        layers
    }

    fn read(&self) -> Vec<Vec<u8>> {
        self.names.iter().map(|name| qemu::read_disk(&self.directory.join(name), "qcow2")).collect()
    }

    fn copy(&self, to: &Path) -> Self {
        fs::create_dir(to).unwrap();
        for name in &self.names {
            fs::copy(self.directory.join(name), to.join(name)).unwrap();
        }
        Self { directory: to.to_owned(), names: self.names.clone(), disks: self.disks.clone() }
    }

    /// The image at this place is not part of the chain any more.
    fn forget(&mut self, place: usize) {
        self.names.remove(place);
        self.disks.remove(place);
    }

    #[track_caller]
    fn assert_hold(&self, what: &str) {
        for (name, (disk, now)) in self.names.iter().zip(self.disks.iter().zip(self.read())) {
            assert!(disk.len() == now.len(), "{what}: {name} has {} bytes", now.len());
            if let Some(at) = disk.iter().zip(&now).position(|(one, other)| one != other) {
                panic!("{what}: {name} differs at {at}: {:#x}, not {:#x}", now[at], disk[at]);
            }
            qemu::assert_clean(&self.directory.join(name));
        }
    }
}

/// What a commit of a disk leaves in a base.
fn committed(top: &[u8], base: &[u8]) -> Vec<u8> {
    let mut disk = top.to_vec();
    disk.extend(base.iter().skip(top.len()));
    disk
}

/// Runs the same command by both programs, each on its own copy.
#[track_caller]
fn both(ours: &Layers, theirs: &Layers, arguments: &[OsString]) {
    let one = isobath(&ours.directory, arguments).ok();
    let other = qemu_img(&theirs.directory, arguments).ok();
    assert_eq!(one.text(), other.text(), "{arguments:?}");
}

fn one_case(rng: &mut StdRng, case: u32) {
    let directory = tempfile::tempdir().unwrap();
    let mut ours = Layers::random(directory.path(), rng);
    let mut theirs = ours.copy(&directory.path().join("qemu"));
    let count = ours.names.len();
    let top = rng.random_range(1..count);
    let below = rng.random_range(0..top);
    let what;
    match rng.random_range(0..5) {
        0 => {
            what = format!("case {case}: commit of layer {top}");
            let commit = args!["commit", &ours.names[top]];
            both(&ours, &theirs, &commit);
            for layers in [&mut ours, &mut theirs] {
                layers.disks[top - 1] = committed(&layers.disks[top], &layers.disks[top - 1]);
            }
        }
        1 => {
            what = format!("case {case}: commit of layer {top} into {below}");
            let commit = args!["commit", "-b", &ours.names[below], &ours.names[top]];
            both(&ours, &theirs, &commit);
            for layers in [&mut ours, &mut theirs] {
                layers.disks[below] = committed(&layers.disks[top], &layers.disks[below]);
                for place in (below + 1..top).rev() {
                    layers.forget(place);
                }
            }
        }
        2 => {
            let target = if rng.random_bool(0.2) { "" } else { &ours.names[below] };
            what = format!("case {case}: rebase of layer {top} onto '{target}'");
            let mut rebase = args!["rebase", "-b", target];
            rebase.extend(if target.is_empty() { args![] } else { args!["-F", "qcow2"] });
            rebase.push((&ours.names[top]).into());
            both(&ours, &theirs, &rebase);
        }
        3 => {
            what = format!("case {case}: merge of layers {below} to {top}");
            let (from, to) = (&ours.names[below], &ours.names[top]);
            let _ = isobath(&ours.directory, args!["chain", "merge", from, to]).ok();
            let info = qemu::info(&ours.directory.join(to));
            let backing = below.checked_sub(1).map(|below| ours.names[below].as_str());
            assert_eq!(info["backing-filename"].as_str(), backing, "{what}");
        }
        _ => {
            what = format!("case {case}: deletion of layer {below}");
            let (active, layer) = (&ours.names[count - 1], &ours.names[below]);
            let _ = isobath(&ours.directory, args!["chain", "delete", active, layer]).ok();
            assert!(!ours.directory.join(layer).exists(), "{what}");
            ours.forget(below);
        }
    }
    ours.assert_hold(&what);
    theirs.assert_hold(&format!("qemu-img, {what}"));
}

#[test]
fn every_disk_reads_as_before() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    for case in 0..12 {
        one_case(&mut rng, case);
    }
}
