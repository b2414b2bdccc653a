//! File systems for guests, created and checked on the host without mounting them.

use crate::args;
use crate::process::run_program;
use crate::qemu;
use crate::tools;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

/// The block size of the file systems made here.
const BLOCK: u64 = 4096;

/// Creates a raw file of `size` bytes with an empty ext4 file system.
#[track_caller]
pub fn make_ext4(raw: &Path, size: u64) {
    make_ext4_from(raw, size, None);
}

/// Creates a raw file of `size` bytes (at least 16 MiB) with an ext4 file system from which a guest can run: busybox,
/// its commands as links, the mount points, and `files`, each a name and its content, in `/data`.
#[track_caller]
pub fn make_root(raw: &Path, size: u64, files: &[(&str, &[u8])]) {
    let tree = tempfile::tempdir().expect("a temporary directory");
    let root = tree.path();
    for directory in ["bin", "dev", "proc", "sys", "run", "tmp", "data"] {
        fs::create_dir(root.join(directory)).expect("make a directory");
    }
    let busybox = tools::require("busybox");
    fs::copy(&busybox, root.join("bin/busybox")).expect("copy busybox");
    for command in run_program(&busybox, ["--list"]).ok().text().lines() {
        if command != "busybox" {
            symlink("busybox", root.join("bin").join(command)).expect("make a link");
        }
    }
    for (name, content) in files {
        fs::write(root.join("data").join(name), content).expect("write a file");
    }
    make_ext4_from(raw, size, Some(root));
}

/// Fails the test unless `e2fsck -fn` finds the file system on a disk clean. A journal to replay is a failure too: the
/// guest must have unmounted the file system, or remounted it read-only.
#[track_caller]
pub fn assert_ext4_clean(image: &Path, format: &str) {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let raw = directory.path().join("raw");
    qemu::to_raw(image, format, &raw);
    let _ = run_program(tools::require("e2fsck"), args!["-f", "-n", raw]).ok();
}

/// Where a file's bytes are on a raw ext4 file system created by this module: runs of whole blocks as (offset, length)
/// in bytes, in file order.
#[track_caller]
pub fn file_runs(raw: &Path, name: &str) -> Vec<(u64, u64)> {
    let request = format!("blocks {name}");
    let done = run_program(tools::require("debugfs"), args!["-R", request, raw]).ok();
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for block in done.text().split_whitespace() {
        let offset = block.parse::<u64>().expect("a block's number") * BLOCK;
        match runs.last_mut() {
            Some((start, length)) if *start + *length == offset => *length += BLOCK,
            _ => runs.push((offset, BLOCK)),
        }
    }
    assert!(!runs.is_empty(), "no such file\n{}", done.report());
    runs
}

/// Copies a file out of the ext4 file system on a disk.
#[track_caller]
pub fn read_ext4_file(image: &Path, format: &str, name: &str, to: &Path) {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let raw = directory.path().join("raw");
    qemu::to_raw(image, format, &raw);
    let request = format!("dump {name} {}", to.display());
    let done = run_program(tools::require("debugfs"), args!["-R", request, raw]).ok();
    // debugfs always exits with 0.
    assert!(to.exists() && !done.stderr.contains("not found"), "{}", done.report());
}

#[track_caller]
fn make_ext4_from(raw: &Path, size: u64, tree: Option<&Path>) {
    fs::File::create(raw).and_then(|file| file.set_len(size)).expect("make a raw file");
    let mut arguments =
        args!["-q", "-F", "-b", BLOCK.to_string(), "-m", "0", "-E", "root_owner=0:0"];
    if let Some(tree) = tree {
        arguments.extend(args!["-d", tree]);
    }
    arguments.push(raw.into());
    let _ = run_program(tools::require("mkfs.ext4"), arguments).ok();
}
