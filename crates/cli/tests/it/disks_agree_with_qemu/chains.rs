//! Random chains made by QEMU, for tests that do the same with `isobath` and `qemu-img`.

pub(crate) use crate::programs::{isobath, qemu_img};

use isobath_testkit::args;
use isobath_testkit::qemu;
use rand::RngExt;
use rand::rngs::StdRng;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

/// Both commands say the same, with the same exit code.
#[track_caller]
pub(crate) fn assert_same(directory: &Path, arguments: &[OsString]) {
    let theirs = qemu_img(directory, arguments);
    let ours = isobath(directory, arguments);
    assert!(
        (theirs.code(), theirs.text()) == (ours.code(), ours.text()),
        "{}\n{}",
        theirs.report(),
        ours.report()
    );
}

/// Options of a qcow2 image, as for `-o`.
pub(crate) fn random_options(rng: &mut StdRng) -> String {
    if rng.random_bool(0.15) {
        return format!("compat=0.10,cluster_size={}", 512 << rng.random_range(0..=12));
    }
    let extended = rng.random_bool(0.3);
    let least = if extended { 5 } else { 0 };
    format!(
        "cluster_size={},refcount_bits={},extended_l2={},compression_type={}",
        512u64 << rng.random_range(least..=12),
        1 << rng.random_range(0..=6),
        if extended { "on" } else { "off" },
        if rng.random() { "zstd" } else { "zlib" },
    )
}

/// A size in bytes: whole sectors.
pub(crate) fn random_size(rng: &mut StdRng) -> u64 {
    let unit: u64 = if rng.random() { 512 } else { 1 << 16 };
    // Some have more than an index of raw images has in a page.
    let more = if rng.random_bool(0.1) { 64 << 20 } else { 0 };
    more + rng.random_range(1..=(4 << 20) / unit) * unit
}

/// Writes, zeroes and discards by qemu-io.
#[track_caller]
pub(crate) fn scribble(image: &Path, format: &str, size: u64, rng: &mut StdRng) {
    scribble_without(&[], image, format, size, rng);
}

/// As [`scribble`], without commands that begin so.
#[track_caller]
pub(crate) fn scribble_without(
    unwanted: &[&str],
    image: &Path,
    format: &str,
    size: u64,
    rng: &mut StdRng,
) {
    let mut commands = Vec::new();
    for _ in 0..rng.random_range(0..12) {
        let mut offset = rng.random_range(0..size);
        let mut length = rng.random_range(1..=400_000);
        if rng.random_bool(0.7) {
            let unit: u64 = 1 << rng.random_range(9..=16);
            offset = offset / unit * unit;
            length = length / unit * unit + unit;
        }
        let length = length.min(size - offset);
        commands.push(match rng.random_range(0..10) {
            0..5 => format!("write -P {} {offset} {length}", rng.random_range(0..=255)),
            5 => format!("write -z {offset} {length}"),
            6 => format!("write -z -u {offset} {length}"),
            7 => format!("discard {offset} {length}"),
            _ if format == "qcow2" => {
                let start = offset >> 20 << 20;
                let length = (1 << 20).min(size - start);
                format!("write -c -P {} {start} {length}", rng.random_range(0..=255))
            }
            _ => format!("write -P 0 {offset} {length}"),
        });
    }
    commands.retain(|command| !unwanted.iter().any(|start| command.starts_with(start)));
    if !commands.is_empty() {
        let _ = qemu::io(image, format, &commands);
    }
}

/// A chain in a directory of its own; the active image is `top.qcow2`, or a raw one.
pub(crate) struct Chain {
    pub(crate) directory: tempfile::TempDir,
    pub(crate) top: PathBuf,
    pub(crate) format: &'static str,
    pub(crate) size: u64,
}

/// Makes a chain of one to four images.
#[track_caller]
pub(crate) fn random_chain(rng: &mut StdRng) -> Chain {
    let directory = tempfile::tempdir().unwrap();
    let depth = rng.random_range(1..=4);
    let mut below: Option<(String, &'static str)> = None;
    let mut size = 0;
    for layer in 0..depth {
        size = random_size(rng);
        let format = if layer == 0 && rng.random_bool(0.3) { "raw" } else { "qcow2" };
        let name = format!("layer{layer}.{format}");
        let mut arguments = args!["create", "-q", "-f", format];
        if let Some((below, format)) = &below {
            arguments.extend(args!["-b", below, "-F", *format]);
        }
        if format == "qcow2" {
            let mut options = random_options(rng);
            if rng.random_bool(0.15) && (below.is_none() || options.contains("extended_l2=on")) {
                options.push_str(",preallocation=metadata");
            }
            arguments.extend(args!["-o", options]);
        }
        arguments.extend(args![&name, size.to_string()]);
        println!("{arguments:?}");
        let _ = qemu_img(directory.path(), arguments).ok();
        let image = directory.path().join(&name);
        scribble(&image, format, size, rng);
        if format == "qcow2" && qemu::check(&image).code() != 0 {
            // QEMU 7.2 miscounts some images to which compressed clusters and others are written.
            return random_chain(rng);
        }
        below = Some((name, format));
    }
    let (name, format) = below.unwrap();
    Chain { top: directory.path().join(name), directory, format, size }
}

impl Chain {
    /// The name of the active image's file.
    pub(crate) fn name(&self) -> &OsStr {
        self.top.file_name().unwrap()
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }
}

/// Fails the test unless QEMU reads the same bytes from both, whatever is allocated.
#[track_caller]
pub(crate) fn assert_same_content(one: &Path, one_format: &str, other: &Path, other_format: &str) {
    let arguments = args!["compare", "-f", one_format, "-F", other_format, one, other];
    let text = qemu::img(arguments).ok().text();
    assert_eq!(text, "Images are identical.\n");
}
