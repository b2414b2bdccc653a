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

/// Makes a raw file of `size` bytes with an empty ext4.
#[track_caller]
pub fn make_ext4(raw: &Path, size: u64) {
    make_ext4_from(raw, size, None);
}

/// Makes a raw file of `size` bytes (16 MiB or more) with an ext4 from which a guest can run:
/// busybox, its commands as links, the directories to mount on, and `files`, each with its name
/// and content, in `/data`.
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

/// Fails the test unless `e2fsck -fn` finds nothing wrong on a disk. It fails if there is a journal to replay: the
/// guest must have unmounted, or remounted read-only.
#[track_caller]
pub fn assert_ext4_clean(image: &Path, format: &str) {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let raw = directory.path().join("raw");
    qemu::to_raw(image, format, &raw);
    let _ = run_program(tools::require("e2fsck"), args!["-f", "-n", raw]).ok();
}

/// The place of a file's bytes on a raw ext4 created by this module: runs of (offset, length in bytes), in the file's
/// order, whole blocks.
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

/// Copies a file out of the ext4 on a disk.
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
