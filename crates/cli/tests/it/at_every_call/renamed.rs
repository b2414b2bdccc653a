//! A directory that is renamed while a command works below it.

use super::scenes::program;
use super::tracer::{Deed, Kind, trace};
use isobath_testkit::qemu;
use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use tempfile::TempDir;

/// A chain with a layer in a directory of its own, and a file of the same name in another directory.
fn chain() -> TempDir {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    for directory in ["u/d", "golden"] {
        fs::create_dir_all(at(directory)).unwrap();
    }
    qemu::create(&at("u/base"), "qcow2", 1 << 20, "");
    qemu::create_overlay(&at("u/d/mid"), Path::new("../base"), "qcow2", "");
    qemu::create_overlay(&at("u/top"), Path::new("d/mid"), "qcow2", "");
    fs::write(at("golden/mid"), "golden").unwrap();
    root
}

#[test]
fn only_the_layer_itself_is_deleted_whatever_becomes_of_its_directory() {
    let arguments = ["chain", "delete", "u/top", "d/mid"].map(OsString::from);
    let run = |root: &Path, at, deed: Deed<'_>| trace(root, &mut program(&arguments), at, deed);
    let root = chain();
    let undisturbed = run(root.path(), usize::MAX, Deed::Nothing);
    assert_eq!(undisturbed.finished.code(), 0, "{}", undisturbed.finished.report());
    assert!(!root.path().join("u/d/mid").exists());
    let mut deleted = 0;
    let calls = undisturbed.calls.iter().enumerate();
    for (at, call) in calls.filter(|(_, call)| call.kind == Kind::Name) {
        let root = chain();
        let [layers, moved, golden] =
            ["u/d", "u/moved", "golden"].map(|name| root.path().join(name));
        let mut exchange = || {
            fs::rename(&layers, &moved).unwrap();
            symlink(&golden, &layers).unwrap();
        };
        let done = run(root.path(), at, Deed::Hold(&mut exchange));
        let report = done.finished.report();
        assert_eq!(fs::read(golden.join("mid")).unwrap(), b"golden", "{}: {report}", call.text);
        // What is said is what was done.
        assert_eq!(
            moved.join("mid").exists(),
            done.finished.code() != 0,
            "{}: {report}",
            call.text
        );
        deleted += usize::from(done.finished.code() == 0);
    }
    assert!(deleted > 0, "no call deletes the layer");
}
