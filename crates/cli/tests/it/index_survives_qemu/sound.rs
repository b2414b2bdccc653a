//! QEMU finds images with an index sound, whatever they and the layers below them are.

use super::chains::{isobath, qemu_img};
use super::judge::every_case;
use isobath_testkit::args;
use isobath_testkit::qemu;
use std::fs;
use std::path::Path;

/// Clusters of 512 bytes leave no room for the extension in a header that QEMU wrote.
const NO_ROOM: &str = "cluster_size=512";

const OVERLAYS: &[&str] = &[
    NO_ROOM,
    "cluster_size=4k",
    "cluster_size=64k",
    "cluster_size=2M",
    "extended_l2=on,cluster_size=16k",
    "extended_l2=on",
    "compat=0.10,cluster_size=4k",
    "refcount_bits=1,cluster_size=4k",
    "refcount_bits=16,cluster_size=1k",
    "refcount_bits=64,cluster_size=4k",
    "compression_type=zstd,cluster_size=8k",
    "lazy_refcounts=on,cluster_size=4k",
];

/// Format, options and size of a base, and what is written into it.
const BASES: &[(&str, &str, u64, &str)] = &[
    ("raw", "", 1 << 20, "write -P 1 100k 300k"),
    ("qcow2", "cluster_size=64k", 1 << 20, "write -P 2 100k 300k"),
    ("qcow2", "cluster_size=512", 1 << 20, "write -P 3 100k 300k"),
    ("qcow2", "cluster_size=64k", 1 << 20, "write -c -P 4 128k 512k"),
    ("qcow2", "data_file=data,cluster_size=64k", 1 << 20, "write -P 5 100k 300k"),
    ("qcow2", "data_file=data,data_file_raw=on", 1 << 20, "write -P 6 100k 300k"),
    ("qcow2", "cluster_size=4k", 700 * 512, "write -P 7 100k 200k"),
    ("raw", "", 333 * 512, "write -P 8 100k 50k"),
    ("qcow2", "extended_l2=on,cluster_size=32k", 5 << 20, "write -P 9 100k 300k"),
];

/// The sizes of overlays, in bytes.
const SIZES: [u64; 3] = [1 << 20, (1 << 20) + 1536, 900 * 512];

/// Fails the test unless QEMU finds nothing wrong with the image, and reads what isobath reads.
#[track_caller]
fn assert_sound(directory: &Path, image: &str) -> Vec<u8> {
    let check = qemu_img(directory, ["check", "-f", "qcow2", image]).ok();
    let said = check.text();
    let nothing = said.starts_with("No errors were found on the image.\n");
    assert!(nothing && check.stderr.is_empty() && !said.contains("leak"), "{}", check.report());
    let _ = isobath(directory, ["check", "-q", image]).ok();
    let theirs = qemu::read_disk(&directory.join(image), "qcow2");
    let _ = isobath(directory, ["convert", "-f", "qcow2", "-O", "raw", image, "ours.raw"]).ok();
    assert!(theirs == fs::read(directory.join("ours.raw")).unwrap());
    theirs
}

/// Whether an image's index holds; `None` if it has none.
#[track_caller]
fn holds(directory: &Path, image: &str) -> Option<bool> {
    let info = isobath(directory, ["info", "--output=json", image]).ok().json();
    info["format-specific"]["data"]["direct-access-index"]["valid"].as_bool()
}

#[track_caller]
fn overlay(directory: &Path, by_isobath: bool, image: &str, below: (&str, &str), of: (&str, u64)) {
    let arguments = args!["create", "-q", "-f", "qcow2", "-b", below.0, "-F", below.1];
    let arguments = [arguments, args!["-o", of.0, image, of.1.to_string()]].concat();
    let made =
        if by_isobath { isobath(directory, arguments) } else { qemu_img(directory, arguments) };
    let _ = made.ok();
}

#[test]
fn every_kind_of_overlay_on_every_kind_of_base() {
    let share = if every_case() { 3 } else { 9 };
    for (number, options) in OVERLAYS.iter().enumerate() {
        for (shift, (format, base, size, command)) in BASES.iter().enumerate() {
            // Two overlays, the upper of another kind.
            let other = OVERLAYS[(number + shift + 1) % OVERLAYS.len()];
            if *options == other || (number + shift) % share != 0 {
                continue;
            }
            println!("{other} on {options} on {format} {base}");
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path();
            let mut arguments = args!["create", "-q", "-f", *format];
            if !base.is_empty() {
                // QEMU looks for a data file from where it runs.
                let here = format!("data_file={}/data", path.display());
                arguments.extend(args!["-o", base.replace("data_file=data", &here)]);
            }
            let _ = qemu_img(path, [arguments, args!["base", size.to_string()]].concat()).ok();
            let _ = qemu::io(&path.join("base"), format, &[*command]).ok();
            for by_isobath in [true, false] {
                let sizes = (SIZES[number % 3], SIZES[shift % 3]);
                overlay(path, by_isobath, "one", ("base", format), (options, sizes.0));
                let writes = ["write -P 20 130k 200k", "write -z 160k 30k", "write -P 21 17 5"];
                if by_isobath {
                    assert_sound(path, "one");
                    assert_eq!(holds(path, "one"), Some(true));
                    let commands = writes.map(|command| args!["-c", command]).concat();
                    let _ = isobath(path, [args!["io", "one"], commands].concat()).ok();
                } else {
                    let _ = qemu::io(&path.join("one"), "qcow2", &writes).ok();
                }
                assert_sound(path, "one");
                overlay(path, by_isobath, "two", ("one", "qcow2"), (other, sizes.1));
                let before = assert_sound(path, "two");
                assert_eq!(holds(path, "two"), by_isobath.then_some(true));
                let index = isobath(path, ["index", "two"]);
                if other == NO_ROOM && !by_isobath {
                    assert!(
                        index.code() == 1 && index.stderr.contains("no room"),
                        "{}",
                        index.report()
                    );
                } else {
                    let _ = index.ok();
                    assert_eq!(holds(path, "two"), Some(true));
                    let _ = isobath(path, ["index", "--verify", "two"]).ok();
                }
                assert!(before == assert_sound(path, "two"));
                let write = ["io", "-c", "write -P 22 250k 99k", "two"];
                let _ = isobath(path, write).ok();
                let before = assert_sound(path, "two");
                let _ = isobath(path, ["index", "-q", "--drop", "two"]).ok();
                assert_eq!(holds(path, "two"), None);
                assert!(before == assert_sound(path, "two"));
            }
        }
    }
}
