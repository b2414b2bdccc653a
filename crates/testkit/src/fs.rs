//! File systems for guests, made and checked on the host without mounting them.

use crate::args;
use crate::process::run_program;
use crate::qemu;
use crate::tools;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

/// Makes a raw file of `size` bytes with an empty ext4.
#[track_caller]
pub fn make_ext4(raw: &Path, size: u64) {
    make_ext4_from(raw, size, None);
}

/// Makes a raw file of `size` bytes (16 MiB or more) with an ext4 from which a guest can run:
/// busybox, its commands as links, and the directories to mount on.
#[track_caller]
pub fn make_root(raw: &Path, size: u64) {
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
    make_ext4_from(raw, size, Some(root));
}

/// Fails the test unless `e2fsck -fn` finds nothing wrong on a disk. With a journal to replay that
/// is not so: the guest must have unmounted, or remounted read-only.
#[track_caller]
pub fn assert_ext4_clean(image: &Path, format: &str) {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let raw = directory.path().join("raw");
    qemu::to_raw(image, format, &raw);
    let _ = run_program(tools::require("e2fsck"), args!["-f", "-n", raw]).ok();
}

/// Copies a file out of the ext4 on a disk.
#[track_caller]
pub fn read_ext4_file(image: &Path, format: &str, name: &str, to: &Path) {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let raw = directory.path().join("raw");
    qemu::to_raw(image, format, &raw);
    let request = format!("dump {name} {}", to.display());
    let done = run_program(tools::require("debugfs"), args!["-R", request, raw]).ok();
    // debugfs exits with 0 whatever happens.
    assert!(to.exists() && !done.stderr.contains("not found"), "{}", done.report());
}

#[track_caller]
fn make_ext4_from(raw: &Path, size: u64, tree: Option<&Path>) {
    fs::File::create(raw).and_then(|file| file.set_len(size)).expect("make a raw file");
    let mut arguments = args!["-q", "-F", "-m", "0", "-E", "root_owner=0:0"];
    if let Some(tree) = tree {
        arguments.extend(args!["-d", tree]);
    }
    arguments.push(raw.into());
    let _ = run_program(tools::require("mkfs.ext4"), arguments).ok();
}
