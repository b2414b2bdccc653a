//! `scripts/sweep` removes what killed runs left, and nothing that is in use.

use crate::serving::Served;
use isobath_testkit::process::{Finished, run};
use isobath_testkit::{fuse, qemu};
use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime};
use tempfile::{Builder, TempDir};

fn sweep(directory: &Path) -> Finished {
    run(Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/sweep")).arg(directory))
        .ok()
}

/// A disk served as the file `mounted`.
fn served(directory: &Path) -> Served {
    let (image, mounted) = (directory.join("disk"), directory.join("mounted"));
    qemu::create(&image, "qcow2", 1 << 20, "");
    File::create(&mounted).unwrap();
    Served::start(&[&image], &["--fuse", mounted.to_str().unwrap()])
}

#[test]
fn a_mount_whose_server_was_killed_is_unmounted_and_one_that_is_served_stays() {
    let directories = [TempDir::new().unwrap(), TempDir::new().unwrap()];
    let [killed, alive] = directories.each_ref().map(|directory| served(directory.path()));
    let [dead, stays] = directories.each_ref().map(|directory| directory.path().join("mounted"));
    let _ = killed.server.kill();
    let error = dead.metadata().expect_err("the mount is dead");
    assert!(error.raw_os_error().is_some_and(fuse::tells_end), "{error}");
    let done = sweep(directories[0].path());
    assert!(done.stderr.contains("whose server is gone"), "{}", done.report());
    assert_eq!(dead.metadata().unwrap().len(), 0, "the file below the mount is seen again");
    assert_eq!(sweep(directories[1].path()).stderr, "");
    assert_eq!(stays.metadata().unwrap().len(), 1 << 20);
    alive.stop();
}

#[test]
fn what_lies_in_memory_is_removed_unless_it_is_locked() {
    let made = |prefix: &str| Builder::new().prefix(prefix).tempdir_in("/dev/shm").unwrap();
    let (left, locked) = (made("isobath-bench-"), made("isobath-papers-"));
    let before = SystemTime::now() - Duration::from_hours(1);
    let aged = |directory: &TempDir| -> io::Result<File> {
        fs::write(directory.path().join("disk.raw"), "data")?;
        let handle = File::open(directory.path())?;
        handle.set_modified(before)?;
        Ok(handle)
    };
    drop(aged(&left).unwrap());
    let lock = aged(&locked).unwrap();
    lock.lock_shared().unwrap();
    let done = sweep(left.path());
    assert!(!left.path().exists(), "{}", done.report());
    assert_eq!(sweep(locked.path()).stderr, "");
    assert!(locked.path().join("disk.raw").exists());
    drop(lock);
    sweep(locked.path());
    assert!(!locked.path().exists());
}
