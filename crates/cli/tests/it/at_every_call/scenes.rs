//! The images that commands run on, and the commands.

use super::tracer::{Deed, trace};
use crate::programs::{isobath, qemu_img};
use crate::serving::ISOBATH;
use isobath_testkit::process::{Finished, run};
use isobath_testkit::{args, qemu};
use rand::RngExt;
use rand::rngs::StdRng;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::Command;

/// The images of every scene, each above those that it reads: `other` is outside the chain of the last four.
pub(super) const IMAGES: [&str; 6] = ["target", "other", "base", "low", "mid", "top"];
/// The size of the lower disks, in bytes.
const SIZE: u64 = 1 << 20;
/// The size of `mid` and `top`.
const LARGER: u64 = 3 << 19;
/// Where no image has data.
pub(super) const FREE: u64 = 768 << 10;
pub(super) const FREE_LENGTH: u64 = 64 << 10;

/// The bytes of each file of a directory.
pub(super) type State = BTreeMap<String, Vec<u8>>;

pub(super) fn state(directory: &Path) -> State {
    let files = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap());
    let file = |entry: fs::DirEntry| {
        (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap())
    };
    files.map(file).collect()
}

/// Removes the files of a directory, and what killed writers left in memory for the next ones.
pub(super) fn clear(directory: &Path) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let (file, user) =
            (fs::metadata(&path).unwrap(), fs::metadata("/proc/self").unwrap().uid());
        let log = format!("/dev/shm/isobath-{user}/{:x}-{:x}", file.dev(), file.ino());
        let _ = fs::remove_file(log);
        fs::remove_file(path).unwrap();
    }
}

/// Makes a directory hold these files, with holes where they are zero.
pub(super) fn restore(directory: &Path, state: &State) {
    clear(directory);
    for (name, bytes) in state {
        let file = File::create(directory.join(name)).unwrap();
        file.set_len(bytes.len() as u64).unwrap();
        for (block, at) in bytes.chunks(4096).zip((0..).step_by(4096)) {
            if block != &[0; 4096][..block.len()] {
                file.write_all_at(block, at).unwrap();
            }
        }
    }
}

pub(super) struct Scene {
    pub(super) name: &'static str,
    pub(super) state: State,
}

/// How the images of a scene are made.
struct Sort {
    name: &'static str,
    /// As for `qemu-img create -o`, but for the backing file.
    options: &'static str,
    /// More commands of `qemu-img`, or of `isobath`, on the finished chain.
    then: &'static [&'static [&'static str]],
}

const SNAPSHOTS: &[&[&str]] =
    &[&["snapshot", "-c", "one", "top"], &["snapshot", "-c", "one", "base"]];
const BITMAPS: &[&[&str]] = &[
    &["bitmap", "--add", "top", "bits"],
    &["bitmap", "--add", "top", "more"],
    &["bitmap", "--add", "base", "bits"],
];

const SORTS: [Sort; 9] = [
    Sort { name: "large", options: "cluster_size=64k", then: &[] },
    Sort { name: "small", options: "cluster_size=4k,refcount_bits=64", then: &[] },
    Sort { name: "tiny", options: "cluster_size=512", then: &[] },
    Sort { name: "old", options: "cluster_size=4k,compat=0.10", then: &[] },
    Sort { name: "lazy", options: "cluster_size=16k,lazy_refcounts=on,extended_l2=on", then: &[] },
    Sort { name: "snapshots", options: "cluster_size=4k", then: SNAPSHOTS },
    Sort { name: "bitmaps", options: "cluster_size=8k", then: BITMAPS },
    Sort { name: "data", options: "cluster_size=8k,data_file=@.data", then: &[] },
    Sort { name: "index", options: "cluster_size=4k", then: &[&["index", "top"]] },
];

/// Runs `qemu-io` in a directory: it looks for external data files there.
pub(super) fn qemu_io(directory: &Path, image: &str, commands: &[String]) -> Finished {
    let commands = commands.iter().flat_map(|command| ["-c", command]);
    let mut command = Command::new(qemu::program("qemu-io"));
    run(command.current_dir(directory).args(["-f", "qcow2"]).args(commands).arg(image))
}

/// All scenes, made in a directory.
pub(super) fn scenes(directory: &Path, rng: &mut StdRng) -> Vec<Scene> {
    let mut all = Vec::new();
    for sort in &SORTS {
        restore(directory, &State::new());
        make(directory, sort, rng);
        all.push(Scene { name: sort.name, state: state(directory) });
    }
    restore(directory, &all[1].state);
    damage(&directory.join("top"), rng);
    all.push(Scene { name: "damaged", state: state(directory) });
    restore(directory, &all[0].state);
    leave_open(directory);
    all.push(Scene { name: "unclosed", state: state(directory) });
    all
}

fn make(directory: &Path, sort: &Sort, rng: &mut StdRng) {
    let mut below = None;
    for (number, name) in IMAGES.into_iter().enumerate() {
        let mut options = sort.options.replace('@', name);
        if matches!(name, "target" | "other") {
            below = None;
        }
        if let Some(below) = below {
            let _ = write!(options, ",backing_file={below},backing_fmt=qcow2");
        }
        let size = if number < 4 { SIZE } else { LARGER };
        let size = size.to_string();
        let create = args!["create", "-q", "-f", "qcow2", "-o", options, name, size];
        let _ = qemu_img(directory, create).ok();
        let mut writes = Vec::new();
        for write in 0..6 {
            let at = rng.random_range(0..FREE / 512 - 128) * 512;
            let length = rng.random_range(1..128_u64) * 512;
            let tag = number * 40 + write + 1;
            let what = if write == 5 { "write -z" } else { &format!("write -P {tag}") };
            writes.push(format!("{what} {at} {length}"));
        }
        // Something of each image can be seen in the top.
        writes.push(format!("write -P {} {} 4k", number + 1, (number as u64 + 220) << 12));
        let _ = qemu_io(directory, name, &writes).ok();
        below = Some(name);
    }
    for command in sort.then {
        let done = match command[0] {
            "index" => isobath(directory, *command),
            _ => qemu_img(directory, *command),
        };
        let _ = done.ok();
    }
}

/// Changes refcounts, so that some clusters leak, and others have a reference too few.
fn damage(image: &Path, rng: &mut StdRng) {
    let mut bytes = fs::read(image).unwrap();
    let long = |bytes: &[u8], at: usize| {
        u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) as usize
    };
    let block = long(&bytes, long(&bytes, 48));
    let clusters = bytes.len() / 4096;
    for _ in 0..6 {
        let entry = block + 8 * rng.random_range(4..clusters);
        bytes[entry + 7] = rng.random_range(0..3);
    }
    fs::write(image, bytes).unwrap();
}

/// Leaves the top with what a killed writer leaves.
fn leave_open(directory: &Path) {
    let before = state(directory);
    // After a few flushes there is a journal.
    let mut arguments = args!["io"];
    for at in 0..12 {
        let write = format!("write -P {} {}k 64k", at + 1, at * 64);
        arguments.extend(args!["-c", write, "-c", "flush"]);
    }
    arguments.extend(args!["top"]);
    let mut command = program(&arguments);
    let made = trace(directory, &mut command, usize::MAX, Deed::Nothing).calls;
    for at in (0..made.len()).rev() {
        restore(directory, &before);
        let _ = trace(directory, &mut program(&arguments), at, Deed::Kill);
        if fs::read(directory.join("top")).unwrap()[72..79] != [0; 7] {
            return;
        }
    }
    panic!("a killed writer leaves an image that was not closed");
}

/// The program with arguments.
pub(super) fn program(arguments: &[OsString]) -> Command {
    let mut command = Command::new(ISOBATH);
    command.env("ISOBATH_LOG", "warn").args(arguments);
    command
}

/// What a second run does after an interrupted one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Again {
    /// It completes.
    Completes,
    /// It completes, or says that there is nothing to do if it was done.
    OrFails,
    /// It does it another time.
    Another,
    /// It completes, or names a file that has left the chain, with the command that deletes it.
    Names,
}

/// A command on a scene.
#[derive(Clone)]
pub(super) struct Step {
    pub(super) name: &'static str,
    pub(super) arguments: Vec<OsString>,
    /// Images of which each sector is as before or as after while it is not complete.
    pub(super) mixed: &'static [&'static str],
    /// An image that is as it may be while it is not complete.
    pub(super) target: Option<&'static str>,
    /// The scene that it is for; any of the first ones if `None`.
    pub(super) only: Option<&'static str>,
    pub(super) again: Again,
}

fn writes() -> Vec<OsString> {
    let mut arguments = args!["io"];
    for command in [
        "write -P 91 0 8k",
        "flush",
        "write -P 92 100k 40k",
        "flush",
        "write -z 144k 52k",
        "flush",
        "write -P 93 300k 6k",
        "flush",
        "discard 200k 64k",
        "write -P 94 700k 8k",
        "flush",
        "write -P 95 1000k 8k",
    ] {
        arguments.extend(args!["-c", command]);
    }
    arguments.extend(args!["top"]);
    arguments
}

pub(super) fn steps() -> Vec<Step> {
    let step = |name, arguments| Step {
        name,
        arguments,
        mixed: &[],
        target: None,
        only: None,
        again: Again::Completes,
    };
    let whole = [
        step("flatten", args!["chain", "flatten", "top"]),
        step("flatten-mid", args!["chain", "flatten", "mid"]),
        step("rebase-base", args!["rebase", "-b", "base", "-F", "qcow2", "top"]),
        step("rebase-other", args!["rebase", "-b", "other", "-F", "qcow2", "top"]),
        step("rebase-none", args!["rebase", "-b", "", "top"]),
        step("rebase-compressed", args!["rebase", "-c", "-b", "other", "-F", "qcow2", "top"]),
        step("rebase-unsafe", args!["rebase", "-u", "-b", "base", "-F", "qcow2", "top"]),
        step("snapshot-apply", args!["snapshot", "-a", "one", "top"]),
        step("bitmap-clear", args!["bitmap", "--clear", "top", "bits"]),
        step("bitmap-disable", args!["bitmap", "--disable", "top", "bits"]),
        step("bitmap-merge", args!["bitmap", "--merge", "more", "top", "bits"]),
        step("amend-lazy", args!["amend", "-o", "lazy_refcounts=on", "top"]),
        step("amend-old", args!["amend", "-o", "compat=0.10", "top"]),
        step("amend-new", args!["amend", "-o", "compat=1.1", "top"]),
        step("grow", args!["resize", "top", "40M"]),
        step("shrink", args!["resize", "--shrink", "top", "900k"]),
        step("index", args!["index", "top"]),
    ];
    let retain = Step {
        again: Again::Names,
        ..step("retain", args!["chain", "retain", "--keep-last", "1", "--apply", "top"])
    };
    let once = |name, arguments| Step { again: Again::OrFails, ..step(name, arguments) };
    let once = [
        once("delete", args!["chain", "delete", "top", "mid"]),
        once("delete-low", args!["chain", "delete", "top", "low"]),
        once("merge", args!["chain", "merge", "low", "top"]),
        once("snapshot-delete", args!["snapshot", "-d", "one", "top"]),
        once("bitmap-add", args!["bitmap", "--add", "top", "new"]),
        once("bitmap-remove", args!["bitmap", "--remove", "top", "bits"]),
    ];
    let commit = |name, arguments, mixed| Step { mixed, ..step(name, arguments) };
    let others = [
        commit("commit", args!["commit", "top"], &["mid"]),
        commit("commit-drop", args!["commit", "-d", "top"], &["mid"]),
        commit("commit-base", args!["commit", "-b", "base", "top"], &["base", "low", "mid"]),
        commit("commit-mid", args!["commit", "-d", "-b", "low", "mid"], &["low"]),
        commit("io", writes(), &["top"]),
        Step {
            again: Again::Another,
            ..step("snapshot-create", args!["snapshot", "-c", "new", "top"])
        },
        Step { only: Some("damaged"), ..step("check", args!["check", "-r", "all", "top"]) },
        Step { only: Some("unclosed"), ..step("seal", args!["seal", "top"]) },
        Step { only: Some("unclosed"), ..step("check-open", args!["check", "-r", "all", "top"]) },
        Step { only: Some("unclosed"), ..step("resize-open", args!["resize", "top", "2M"]) },
    ];
    let target = |name, arguments| Step { target: Some("target"), ..step(name, arguments) };
    let targets = [
        target("convert", args!["convert", "-O", "qcow2", "top", "target"]),
        target("convert-into", args!["convert", "-n", "-O", "qcow2", "base", "target"]),
        target(
            "convert-over",
            args!["convert", "-B", "base", "-F", "qcow2", "-O", "qcow2", "top", "target"],
        ),
        target("create", args!["create", "-q", "-f", "qcow2", "target", "2M"]),
        target(
            "create-over",
            args!["create", "-q", "-f", "qcow2", "-b", "top", "-F", "qcow2", "target"],
        ),
        target("dd", args!["dd", "-O", "qcow2", "if=top", "of=target", "bs=64k"]),
    ];
    whole.into_iter().chain([retain]).chain(once).chain(others).chain(targets).collect()
}
