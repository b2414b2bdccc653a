//! Commands that change which layers a chain has, on random chains: every disk reads as before, byte for byte as after
//! QEMU's command where it has one, and QEMU finds every image clean.

use crate::programs::{isobath, qemu_img};
use crate::serving::Served;
use isobath_testkit::bytes::first_difference;
use isobath_testkit::chain::{Chain, Commands, Writer};
use isobath_testkit::daemon::Daemon;
use isobath_testkit::ops::Shape;
use isobath_testkit::seed::Seed;
use isobath_testkit::{args, qemu};
use rand::RngExt;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

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
            if let Some(at) = first_difference(disk, &now) {
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
pub(crate) fn every_disk_reads_as_before() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    for case in 0..12 {
        one_case(&mut rng, case);
    }
}

/// Dates the layers below the active image: `ages` are in hours, the base's first.
fn date(layers: &Layers, ages: &[u64]) {
    for (name, hours) in layers.names.iter().zip(ages) {
        let moment = SystemTime::now() - Duration::from_secs(hours * 3600);
        let file = File::options().write(true).open(layers.directory.join(name)).unwrap();
        file.set_modified(moment).unwrap();
    }
}

/// Removes what is not in the directory any more; returns the places of what is.
fn remaining(layers: &mut Layers) -> Vec<usize> {
    let there = |name: &String| layers.directory.join(name).exists();
    let places: Vec<usize> = (0..layers.names.len()).filter(|n| there(&layers.names[*n])).collect();
    layers.names = places.iter().map(|place| layers.names[*place].clone()).collect();
    layers.disks = places.iter().map(|place| layers.disks[*place].clone()).collect();
    places
}

#[test]
pub(crate) fn a_policy_keeps_what_it_names() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    for case in 0..8 {
        let directory = tempfile::tempdir().unwrap();
        let mut layers = Layers::random(directory.path(), &mut rng);
        let count = layers.names.len();
        let active = layers.names[count - 1].clone();
        // A snapshot each 15 hours: no two on one day but the newest.
        let ages: Vec<u64> = (0..count as u64 - 1).map(|n| (count as u64 - n) * 49).collect();
        date(&layers, &ages);
        let indexed = rng.random_bool(0.5);
        if indexed && count > 1 {
            let _ = isobath(directory.path(), args!["index", &active]).ok();
        }
        let shared = rng.random_bool(0.4).then(|| rng.random_range(0..count - 1));
        let aside = directory.path().join("aside");
        if let Some(shared) = shared {
            fs::create_dir(&aside).unwrap();
            let base = format!("../{}", layers.names[shared]);
            let clone = aside.join("clone");
            let create = args!["create", "-q", "-f", "qcow2", "-b", base, "-F", "qcow2", clone];
            let _ = qemu_img(directory.path(), create).ok();
        }
        let newest = rng.random_range(0..3);
        let keep = match rng.random_range(0..3) {
            0 => "forever:daily",
            1 => "80h:all",
            _ => "1h:all,120h:daily",
        };
        let newest_given = newest.to_string();
        let aside_given = aside.to_str().unwrap().to_owned();
        let mut retain = args!["chain", "retain", "--times", "modified", "--keep", keep];
        retain.extend(args!["--keep-last", &newest_given, &active]);
        if shared.is_some() {
            retain.extend(args!["--search", &aside_given]);
        }
        let plan = isobath(directory.path(), &retain).ok();
        assert_eq!(remaining(&mut layers).len(), count, "{}", plan.report());
        let apply = [retain.clone(), args!["--apply"]].concat();
        let done = isobath(directory.path(), &apply).ok();
        let what = format!("case {case}: {shared:?} of {count}\n{}", done.report());
        let age_limit = match keep {
            "forever:daily" => u64::MAX,
            "80h:all" => 80,
            _ => 120,
        };
        let expected: Vec<usize> = (0..count)
            .filter(|place| {
                let kept = |place: usize| {
                    ages[place] <= age_limit || count - 1 - place <= newest || place == 0
                };
                *place == count - 1 || shared.is_some_and(|shared| *place <= shared) || kept(*place)
            })
            .collect();
        assert_eq!(remaining(&mut layers), expected, "{what}");
        layers.assert_hold(&what);
        if shared.is_some() {
            qemu::assert_clean(&aside.join("clone"));
            let clone = qemu::read_disk(&aside.join("clone"), "qcow2");
            let place = expected.iter().position(|place| Some(*place) == shared).unwrap();
            assert!(clone == layers.disks[place], "{what}");
        }
        // There is nothing left to do, and the index, if there was one, is that of the new chain.
        let again = isobath(directory.path(), &apply).ok();
        assert!(again.text().contains("No layers to remove"), "{}", again.report());
        if indexed && layers.names.len() > 1 {
            let _ = isobath(directory.path(), args!["index", "--verify", &active]).ok();
        }
    }
}

#[test]
pub(crate) fn a_served_chain_is_thinned_out_by_its_server() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    let directory = tempfile::tempdir().unwrap();
    let mut layers = Layers::random(directory.path(), &mut rng);
    let count = layers.names.len();
    let ages: Vec<u64> = (0..count as u64 - 1).map(|n| (count as u64 - n) * 49).collect();
    date(&layers, &ages);
    let active = layers.directory.join(&layers.names[count - 1]);
    let socket = directory.path().join("qmp");
    let address = format!("unix:{}", socket.display());
    let served = Served::start(&[&active], &["--qmp", &address, "--export-name", "disk"]);
    let retain = args!["chain", "retain", "--keep-last", "1", "--apply", "--qmp", &socket];
    let done = isobath(directory.path(), retain).ok();
    let read = directory.path().join("read.raw");
    qemu::to_raw(Path::new(&served.uri("disk")), "raw", &read);
    let _ = served.stop();
    let left = remaining(&mut layers);
    let expected: Vec<usize> =
        (0..count).filter(|place| *place == 0 || *place + 2 >= count).collect();
    assert_eq!(left, expected, "{}", done.report());
    assert!(fs::read(read).unwrap() == *layers.disks.last().unwrap());
    layers.assert_hold(&done.report());
}

#[test]
pub(crate) fn internal_snapshots_are_not_lost_with_a_layer() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    for (name, below) in [("a", None), ("b", Some("a")), ("c", Some("b"))] {
        let mut create = args!["create", "-q", "-f", "qcow2"];
        create.extend(below.map_or_else(Vec::new, |below| args!["-b", below, "-F", "qcow2"]));
        create.extend(args![name, "1M"]);
        let _ = qemu_img(path, create).ok();
    }
    let _ = isobath(path, args!["snapshot", "-c", "one", "b"]).ok();
    let refused = isobath(path, args!["chain", "delete", "c", "b"]).exits(1);
    assert!(refused.stderr.contains("has internal snapshots"), "{}", refused.report());
    let retain = args!["chain", "retain", "--keep", "0h:all", "--apply", "c"];
    let kept = isobath(path, retain).ok();
    assert!(kept.text().contains("stays: it has internal snapshots"), "{}", kept.report());
    assert!(path.join("b").exists());
    let _ = isobath(path, args!["chain", "delete", "--keep", "c", "b"]).ok();
    assert!(path.join("b").exists());
}

/// A chain of base, mid and top, each with data of its own, with relative names.
pub(crate) fn three(directory: &Path) {
    fs::create_dir_all(directory).unwrap();
    for (name, below, write) in [
        ("base", None, "write -P 1 0 1M"),
        ("mid", Some("base"), "write -P 2 64k 128k"),
        ("top", Some("mid"), "write -P 3 128k 64k"),
    ] {
        let mut create = args!["create", "-q", "-f", "qcow2"];
        create.extend(below.map_or_else(Vec::new, |below| args!["-b", below, "-F", "qcow2"]));
        create.extend(args![name, "1M"]);
        let _ = qemu_img(directory, create).ok();
        let _ = qemu::io(&directory.join(name), "qcow2", &[write]).ok();
    }
}

/// Another overlay of mid, whose header names it so.
pub(crate) fn another(directory: &Path, image: &str, name: &str) {
    let plain = args!["create", "-q", "-f", "qcow2", image, "1M"];
    let _ = qemu_img(directory, plain).ok();
    let rebase = args!["rebase", "-u", "-b", name, "-F", "qcow2", image];
    let _ = qemu_img(directory, rebase).ok();
}

#[test]
pub(crate) fn a_layer_that_an_image_needs_under_any_name_is_kept() {
    let directory = tempfile::tempdir().unwrap();
    let absolute = directory.path().join("absolute/mid").to_str().unwrap().to_owned();
    let cases = [
        ("plain", "other", "mid"),
        ("dotted", "other", "./mid"),
        ("protocol", "other", "file:mid"),
        ("absolute", "other", &absolute),
        ("linked", "other", "link"),
        ("hard", "other", "hard"),
        ("below", "vms/a/other", "../../mid"),
    ];
    for (case, image, name) in cases {
        let work = directory.path().join(case);
        three(&work);
        fs::create_dir_all(work.join(image).parent().unwrap()).unwrap();
        std::os::unix::fs::symlink("mid", work.join("link")).unwrap();
        fs::hard_link(work.join("mid"), work.join("hard")).unwrap();
        another(&work, image, name);
        // QEMU looks for `file:NAME` in the directory where it runs.
        let read = |to: &str| {
            let _ = qemu_img(&work, args!["convert", "-O", "raw", image, to]).ok();
            fs::read(work.join(to)).unwrap()
        };
        let before = read("before");
        let done = isobath(&work, args!["chain", "delete", "top", "mid"]).ok();
        assert!(done.text().contains("needs it"), "{case}: {}", done.report());
        assert!(read("after") == before, "{case}");
    }
}

#[test]
fn the_name_of_an_image_that_needs_a_layer_does_nothing_to_a_terminal() {
    let directory = tempfile::tempdir().unwrap();
    let work = directory.path();
    three(work);
    another(work, "x\x1b]0;owned\x07\u{202e}", "mid");
    let done = isobath(work, args!["chain", "delete", "top", "mid"]).ok();
    let said = done.text();
    assert!(said.contains(r"x\u{1b}]0;owned\u{7}\u{202e}' needs it"), "{said:?}");
    assert!(!said.contains(['\x1b', '\x07', '\u{202e}']), "{said:?}");
}

#[test]
fn a_layer_whose_name_is_a_symbolic_link_is_deleted_with_it_if_the_file_is_beside_it() {
    for (needed, beside) in [(false, true), (true, true), (false, false)] {
        let directory = tempfile::tempdir().unwrap();
        let work = directory.path();
        three(work);
        let elsewhere = work.join("elsewhere");
        fs::create_dir(&elsewhere).unwrap();
        let file = if beside { work.join("file") } else { elsewhere.join("file") };
        fs::rename(work.join("mid"), &file).unwrap();
        std::os::unix::fs::symlink(&file, work.join("mid")).unwrap();
        // No other layer is beside the file.
        let _ = isobath(work, args!["rebase", "-b", "", "mid"]).ok();
        if needed {
            another(work, "other", "file");
        }
        let before = qemu::read_disk(&work.join("top"), "qcow2");
        let done = isobath(work, args!["chain", "delete", "top", "mid"]);
        let said = done.report();
        assert_eq!(done.code() == 0, beside, "{said}");
        assert_eq!(said.contains("needs it"), needed, "{said}");
        assert_eq!(said.contains("is a symbolic link"), !beside, "{said}");
        let stays = needed || !beside;
        assert_eq!(file.exists(), stays, "{said}");
        assert_eq!(work.join("mid").is_symlink(), stays, "{said}");
        assert!(qemu::read_disk(&work.join("top"), "qcow2") == before);
    }
}

#[test]
pub(crate) fn where_it_is_unknown_who_needs_a_layer_nothing_is_done() {
    let directory = tempfile::tempdir().unwrap();
    let json = r#"json:{"driver":"qcow2","file":{"driver":"file","filename":"mid"}}"#;
    for (case, name) in [("json", json), ("protocol", "nbd:localhost:1"), ("damaged", "mid")] {
        let work = directory.path().join(case);
        three(&work);
        another(&work, "other", name);
        if case == "damaged" {
            let mut bytes = fs::read(work.join("other")).unwrap();
            bytes[4..8].fill(0xff);
            fs::write(work.join("other"), bytes).unwrap();
        }
        let before = fs::read(work.join("top")).unwrap();
        let refused = isobath(&work, args!["chain", "delete", "top", "mid"]).exits(1);
        assert!(
            refused.stderr.contains("which may need the layer"),
            "{case}: {}",
            refused.report()
        );
        assert!(refused.stderr.contains("other"), "{case}: {}", refused.report());
        assert!(work.join("mid").exists(), "{case}");
        assert!(fs::read(work.join("top")).unwrap() == before, "{case}");
        let _ = isobath(&work, args!["chain", "delete", "--keep", "top", "mid"]).ok();
        assert!(work.join("mid").exists(), "{case}");
    }
}

#[test]
pub(crate) fn a_layer_that_a_running_program_uses_is_not_deleted() {
    let directory = tempfile::tempdir().unwrap();
    let (work, elsewhere) = (directory.path().join("chain"), directory.path().join("elsewhere"));
    three(&work);
    fs::create_dir(&elsewhere).unwrap();
    another(&elsewhere, "vm", work.join("mid").to_str().unwrap());
    let vm = elsewhere.join("vm");
    let before = fs::read(work.join("top")).unwrap();
    let assert_refused = |by: &str| {
        let refused = isobath(&work, args!["chain", "delete", "top", "mid"]).exits(1);
        assert!(refused.stderr.contains("may be in use"), "{by}: {}", refused.report());
        assert!(work.join("mid").exists(), "{by}");
        assert!(fs::read(work.join("top")).unwrap() == before, "{by}");
    };
    let served = Served::start(&[&vm], &["--export-name", "disk"]);
    assert_refused("isobath");
    let _ = served.stop();
    let mut daemon = Daemon::start();
    daemon.open_image("vm", &vm, "qcow2", true);
    assert_refused("QEMU");
    drop(daemon);
    let done = isobath(&work, args!["chain", "delete", "--search", "../elsewhere", "top", "mid"]);
    let done = done.ok();
    assert!(done.text().contains("needs it"), "{}", done.report());
    assert!(work.join("mid").exists());
}

#[test]
pub(crate) fn internal_snapshots_that_read_through_a_layer_are_kept() {
    for command in [
        args!["chain", "delete", "top", "mid"],
        args!["chain", "merge", "mid", "top"],
        args!["chain", "flatten", "top"],
    ] {
        let directory = tempfile::tempdir().unwrap();
        let work = directory.path();
        three(work);
        let _ = qemu_img(work, args!["snapshot", "-c", "one", "top"]).ok();
        let read = |to: &str| {
            let convert = args!["convert", "-l", "one", "-O", "raw", "top", to];
            let _ = qemu_img(work, convert).ok();
            fs::read(work.join(to)).unwrap()
        };
        let before = read("before");
        let refused = isobath(work, &command).exits(1);
        assert!(refused.stderr.contains("internal snapshots"), "{}", refused.report());
        assert!(read("after") == before, "{command:?}");
        assert!(work.join("mid").exists(), "{command:?}");
        let retain = args!["chain", "retain", "--keep", "1h:all", "--times", "modified", "--apply"];
        let old = SystemTime::now() - Duration::from_hours(2);
        File::options().write(true).open(work.join("mid")).unwrap().set_modified(old).unwrap();
        let kept = isobath(work, [retain, args!["top"]].concat()).ok();
        assert!(kept.text().contains("internal snapshots of the layer above"), "{}", kept.report());
        assert!(read("again") == before, "{command:?}");
        let disk = qemu::read_disk(&work.join("top"), "qcow2");
        let forced = [command.clone(), args!["--change-snapshots"]].concat();
        let _ = isobath(work, forced).ok();
        assert!(qemu::read_disk(&work.join("top"), "qcow2") == disk, "{command:?}");
    }
}

#[test]
pub(crate) fn an_image_is_not_rebased_onto_what_cannot_be_opened_or_onto_itself() {
    let directory = tempfile::tempdir().unwrap();
    let work = directory.path();
    three(work);
    fs::copy(work.join("base"), work.join("x:y")).unwrap();
    let images = ["base", "mid", "top"];
    let read = || images.map(|image| fs::read(work.join(image)).unwrap());
    let before = read();
    for (name, image) in [("x:y", "mid"), ("top", "mid"), ("mid", "mid"), ("./top", "base")] {
        let rebase = args!["rebase", "-U", "-b", name, "-F", "qcow2", image];
        let refused = isobath(work, rebase).exits(1);
        assert!(refused.stderr.contains("new backing file"), "{}", refused.report());
        assert!(read() == before, "{name}");
    }
    let _ = isobath(work, args!["rebase", "-b", "./x:y", "-F", "qcow2", "mid"]).ok();
    let _ = isobath(work, args!["rebase", "-u", "-b", "gone", "-F", "qcow2", "mid"]).ok();
}

#[test]
pub(crate) fn names_stay_relative_so_that_a_copied_tree_is_a_chain_of_its_own() {
    for command in [
        args!["chain", "merge", "x/mid", "y/top"],
        args!["chain", "delete", "y/top", "x/mid"],
        args!["chain", "delete", "--keep", "y/top", "x/mid"],
    ] {
        let directory = tempfile::tempdir().unwrap();
        let tree = directory.path().join("tree");
        three(&tree.join("x"));
        fs::create_dir(tree.join("y")).unwrap();
        fs::rename(tree.join("x/top"), tree.join("y/top")).unwrap();
        let rebase = args!["rebase", "-u", "-b", "../x/mid", "-F", "qcow2", "y/top"];
        let _ = qemu_img(&tree, rebase).ok();
        let before = qemu::read_disk(&tree.join("y/top"), "qcow2");
        let _ = isobath(&tree, &command).ok();
        assert!(qemu::read_disk(&tree.join("y/top"), "qcow2") == before, "{command:?}");
        let moved = directory.path().join("moved");
        fs::rename(&tree, &moved).unwrap();
        assert!(qemu::read_disk(&moved.join("y/top"), "qcow2") == before, "{command:?}");
        let info = isobath(&moved, args!["info", "y/top"]).ok().text();
        assert!(info.contains("backing file: ../x/base"), "{command:?}: {info}");
    }
    // A name that one of the two gives in full stays in full.
    for (first, second) in [("/x/mid", "base"), ("../x/mid", "/x/base")] {
        let directory = tempfile::tempdir().unwrap();
        let tree = directory.path();
        three(&tree.join("x"));
        fs::create_dir(tree.join("y")).unwrap();
        fs::rename(tree.join("x/top"), tree.join("y/top")).unwrap();
        let full = |name: &str| {
            let before = if name.starts_with('/') { tree.to_str().unwrap() } else { "" };
            format!("{before}{name}")
        };
        for (image, name) in [("x/mid", full(second)), ("y/top", full(first))] {
            let rebase = args!["rebase", "-u", "-b", name, "-F", "qcow2", image];
            let _ = qemu_img(tree, rebase).ok();
        }
        let _ = isobath(tree, args!["chain", "merge", full("/x/mid"), "y/top"]).ok();
        let info = isobath(tree, args!["info", "y/top"]).ok().text();
        assert!(info.contains(&format!("backing file: {}", full("/x/base"))), "{info}");
    }
}

#[test]
pub(crate) fn a_commit_holds_the_image_until_it_is_empty() {
    use rustix::fs::inotify;
    use std::mem::MaybeUninit;
    let directory = tempfile::tempdir().unwrap();
    let work = directory.path();
    three(work);
    let watch = inotify::init(inotify::CreateFlags::NONBLOCK).unwrap();
    // With what lies between them: the kernel tells of the same event twice in a row only once.
    let events = inotify::WatchFlags::CLOSE_WRITE | inotify::WatchFlags::OPEN;
    inotify::add_watch(&watch, work.join("top"), events).unwrap();
    let _ = isobath(work, args!["commit", "top"]).ok();
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut events = inotify::Reader::new(&watch, &mut buffer);
    // Whoever lets go of the image lets another program write to what is emptied next.
    let mut count = 0;
    while let Ok(event) = events.next() {
        count += u32::from(event.events().contains(inotify::ReadFlags::CLOSE_WRITE));
    }
    assert_eq!(count, 1, "top was open for writing, and closed, more than once");
    assert!(
        qemu::read_disk(&work.join("top"), "qcow2") == qemu::read_disk(&work.join("mid"), "qcow2")
    );
    qemu::assert_clean(&work.join("top"));
}

#[test]
pub(crate) fn bitmaps_of_an_emptied_image_stay_usable() {
    let directory = tempfile::tempdir().unwrap();
    let work = directory.path();
    three(work);
    let _ = qemu_img(work, args!["bitmap", "--add", "top", "bits"]).ok();
    let _ = qemu::io(&work.join("top"), "qcow2", &["write -P 5 512k 64k"]).ok();
    let bits = || {
        let info = qemu_img(work, args!["info", "--output", "json", "top"]).ok().text();
        let info: serde_json::Value = serde_json::from_str(&info).unwrap();
        info["format-specific"]["data"]["bitmaps"].to_string()
    };
    let before = bits();
    let _ = isobath(work, args!["commit", "top"]).ok();
    assert_eq!(bits(), before);
}

#[test]
pub(crate) fn a_policy_goes_on_without_a_layer_that_is_in_use() {
    let directory = tempfile::tempdir().unwrap();
    let (work, elsewhere) = (directory.path().join("chain"), directory.path().join("elsewhere"));
    three(&work);
    for (name, below) in [("more", "top"), ("kept", "more"), ("active", "kept")] {
        another(&work, name, below);
    }
    fs::create_dir(&elsewhere).unwrap();
    another(&elsewhere, "vm", work.join("mid").to_str().unwrap());
    let disk = qemu::read_disk(&work.join("active"), "qcow2");
    let _ = isobath(&work, args!["index", "active"]).ok();
    // Of each day the last one stays: mid is merged into top, and more into kept.
    let today =
        SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs() / 86_400;
    for (name, days, second) in
        [("base", 6, 0), ("mid", 5, 0), ("top", 5, 30), ("more", 3, 0), ("kept", 3, 30)]
    {
        let then = Duration::from_secs((today - days) * 86_400 + 36_000 + second);
        let then = SystemTime::UNIX_EPOCH + then;
        File::options().write(true).open(work.join(name)).unwrap().set_modified(then).unwrap();
    }
    let vm = elsewhere.join("vm");
    let served = Served::start(&[&vm], &["--export-name", "disk"]);
    let retain =
        args!["chain", "retain", "--keep", "forever:daily", "--times", "modified", "--apply"];
    let done = isobath(&work, [retain.clone(), args!["active"]].concat()).exits(1);
    assert!(done.stderr.contains("may be in use"), "{}", done.report());
    assert!(work.join("mid").exists() && !work.join("more").exists(), "{}", done.report());
    assert!(qemu::read_disk(&work.join("active"), "qcow2") == disk);
    let _ = isobath(&work, args!["index", "--verify", "active"]).ok();
    let _ = served.stop();
    fs::remove_dir_all(elsewhere).unwrap();
    let _ = isobath(&work, [retain, args!["active"]].concat()).ok();
    assert!(!work.join("mid").exists());
    assert!(qemu::read_disk(&work.join("active"), "qcow2") == disk);
    let _ = isobath(&work, args!["index", "--verify", "active"]).ok();
}

/// What `chain delete top mid` leaves if it is killed before it deletes the file.
fn killed_before_it_deletes(work: &Path) {
    let mid = work.join("mid");
    let kept = fs::read(&mid).unwrap();
    let _ = isobath(work, args!["chain", "delete", "top", "mid"]).ok();
    fs::write(&mid, kept).unwrap();
    note(work, "mid");
}

/// Notes at a file that mid's data goes to top.
fn note(work: &Path, file: &str) {
    let of = |name: &str| fs::metadata(work.join(name)).unwrap();
    let (mid, top) = (of("mid"), of("top"));
    let written = format!("{}.{}", mid.mtime(), mid.mtime_nsec());
    let own = format!("{}:{}:{}:{written}", mid.dev(), mid.ino(), mid.len());
    let text = format!("qcow2 {own} {}:{}", top.dev(), top.ino());
    let none = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(work.join(file), "user.isobath.merge", text.as_bytes(), none).unwrap();
}

#[test]
pub(crate) fn a_killed_deletion_is_finished_by_the_next_one() {
    let directory = tempfile::tempdir().unwrap();
    let work = directory.path();
    three(work);
    let disk = qemu::read_disk(&work.join("top"), "qcow2");
    killed_before_it_deletes(work);
    // A policy names the file, and deletes nothing that it is not given.
    let retain = args!["chain", "retain", "--keep-last", "9", "--apply", "top"];
    let done = isobath(work, retain).exits(1);
    assert!(done.stderr.contains("'isobath chain delete top mid' deletes it"), "{}", done.report());
    assert!(work.join("mid").exists());
    let _ = isobath(work, args!["chain", "delete", "top", "mid"]).ok();
    assert!(!work.join("mid").exists());
    assert!(qemu::read_disk(&work.join("top"), "qcow2") == disk);
}

/// A name, what happens before, and what the next command says.
type Case<'a> = (&'a str, &'a dyn Fn(&Path), &'a str);

#[test]
pub(crate) fn a_layer_stays_whose_merge_was_begun_and_not_finished() {
    let directory = tempfile::tempdir().unwrap();
    let leave = |work: &Path| {
        let rebase = args!["rebase", "-u", "-b", "base", "-F", "qcow2", "top"];
        let _ = qemu_img(work, rebase).ok();
    };
    let put = |work: &Path, from: &str, to: &str| {
        fs::copy(work.join(from), work.join("copy")).unwrap();
        fs::rename(work.join("copy"), work.join(to)).unwrap();
    };
    let cases: [Case<'_>; 8] = [
        ("not noted", &leave, "Did not find 'mid'"),
        (
            "not moved",
            &|work| {
                leave(work);
                note(work, "mid");
            },
            "lacks some of the layer's data",
        ),
        (
            "needed",
            &|work| {
                killed_before_it_deletes(work);
                another(work, "other", "mid");
            },
            "needs it",
        ),
        (
            "with a snapshot",
            &|work| {
                let _ = qemu_img(work, args!["snapshot", "-c", "now", "mid"]).ok();
                leave(work);
                note(work, "mid");
            },
            "internal snapshots",
        ),
        (
            "another overlay",
            &|work| {
                killed_before_it_deletes(work);
                put(work, "top", "top");
            },
            "Did not find 'mid'",
        ),
        (
            "written since",
            &|work| {
                killed_before_it_deletes(work);
                let _ = qemu::io(&work.join("mid"), "qcow2", &["write -P 9 0 64k"]).ok();
            },
            "Did not find 'mid'",
        ),
        (
            "a copy",
            &|work| {
                killed_before_it_deletes(work);
                fs::copy(work.join("mid"), work.join("copy")).unwrap();
                note(work, "copy");
                fs::rename(work.join("copy"), work.join("mid")).unwrap();
            },
            "Did not find 'mid'",
        ),
        (
            "another name",
            &|work| {
                killed_before_it_deletes(work);
                fs::hard_link(work.join("mid"), work.join("kept")).unwrap();
            },
            "Did not find 'mid'",
        ),
    ];
    for (case, prepare, reason) in cases {
        let work = directory.path().join(case);
        three(&work);
        prepare(&work);
        let before = fs::read(work.join("mid")).unwrap();
        let said = isobath(&work, args!["chain", "delete", "top", "mid"]).report();
        assert!(said.contains(reason), "{case}: {said}");
        assert!(fs::read(work.join("mid")).unwrap() == before, "{case}: {said}");
    }
}

#[test]
pub(crate) fn a_deletion_leaves_no_note_where_the_file_stays() {
    let directory = tempfile::tempdir().unwrap();
    for (case, options) in [("needed", args![]), ("kept", args!["--keep"])] {
        let work = directory.path().join(case);
        three(&work);
        another(&work, "other", "mid");
        let delete = [args!["chain", "delete"], options, args!["top", "mid"]].concat();
        let _ = isobath(&work, delete).ok();
        assert!(!is_noted(&work.join("mid")), "{case}");
    }
    // Of a file with two names one is deleted.
    let work = directory.path().join("linked");
    three(&work);
    fs::hard_link(work.join("mid"), work.join("kept")).unwrap();
    let _ = isobath(&work, args!["chain", "delete", "top", "mid"]).ok();
    assert!(!work.join("mid").exists() && !is_noted(&work.join("kept")));
}

fn is_noted(file: &Path) -> bool {
    let mut value = [0; 256];
    rustix::fs::getxattr(file, "user.isobath.merge", &mut value[..]).is_ok()
}
