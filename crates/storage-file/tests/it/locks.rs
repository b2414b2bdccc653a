//! Image locks against QEMU, in both directions.

use crate::qemu::{QemuIo, chain, opens, run};
use isobath_ring::block_on;
use isobath_ring::{Config, Executor, sleep, spawn};
use isobath_storage::{Host, Locking, OpenMode, Result, StorageExt};
use isobath_storage_file::{FileHost, FileStorage};
use std::io::ErrorKind;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;
use tempfile::TempDir;

const READ: OpenMode = OpenMode { writable: false, direct: false, locking: Locking::Exclusive };
const WRITE: OpenMode = OpenMode { writable: true, ..READ };
const ALONE: OpenMode = OpenMode { locking: Locking::Alone, ..WRITE };
const PRESENT: OpenMode = OpenMode { locking: Locking::Present, ..READ };

fn open(path: &Path, mode: OpenMode) -> Result<FileStorage> {
    block_on(FileHost.open(path, mode))
}

#[test]
fn qemu_keeps_out_of_what_is_written_here() {
    let (_directory, _, top) = chain();
    let file = open(&top, WRITE).unwrap();
    let error = opens(&[], &top).unwrap_err();
    assert!(error.contains("Failed to get \"write\" lock"), "{error}");
    let error = opens(&["-r"], &top).unwrap_err();
    assert!(error.contains("Failed to get shared \"write\" lock"), "{error}");
    opens(&["-r", "-U"], &top).unwrap();
    let info = run("qemu-img", &["info", top.to_str().unwrap()]);
    assert!(!info.status.success());
    drop(file);
    opens(&[], &top).unwrap();
}

#[test]
fn qemu_reads_what_is_read_here_and_does_not_write_it() {
    let (_directory, base, top) = chain();
    let file = open(&top, READ).unwrap();
    opens(&["-r"], &top).unwrap();
    let error = opens(&[], &top).unwrap_err();
    assert!(error.contains("Failed to get \"write\" lock"), "{error}");
    drop(file);

    // A backing file is opened for reading: an overlay on it may be written, itself not.
    let backing = open(&base, READ).unwrap();
    opens(&[], &top).unwrap();
    assert!(opens(&[], &base).is_err());
    drop(backing);
    opens(&[], &base).unwrap();
}

#[test]
fn what_qemu_writes_is_refused_here() {
    let (_directory, base, top) = chain();
    let qemu = QemuIo::open(&[], &top);
    let error = open(&top, WRITE).unwrap_err().to_string();
    assert!(error.contains("Failed to get \"write\" lock"), "{error}");
    assert!(error.contains("Is another process using the image ["), "{error}");
    let error = open(&top, READ).unwrap_err().to_string();
    assert!(error.contains("Failed to get shared \"write\" lock"), "{error}");
    assert!(error.contains(isobath_storage::lock::READ_REFUSED), "{error}");
    assert!(error.contains(isobath_storage::lock::WAY_OUT), "{error}");
    open(&top, OpenMode { locking: Locking::Unlocked, ..READ }).unwrap();
    // Its backing file it only reads.
    open(&base, READ).unwrap();
    assert!(open(&base, WRITE).is_err());
    drop(qemu);
    open(&top, WRITE).unwrap();
    open(&base, WRITE).unwrap();
}

#[test]
fn what_qemu_reads_can_be_read_here_and_not_written() {
    let (_directory, _, top) = chain();
    let qemu = QemuIo::open(&["-r"], &top);
    open(&top, READ).unwrap();
    let error = open(&top, WRITE).unwrap_err().to_string();
    assert!(error.contains("Failed to get \"write\" lock"), "{error}");
    assert!(block_on(FileHost.create(&top, WRITE)).is_err());
    assert!(top.metadata().unwrap().len() > 0, "a locked image is not truncated");
    drop(qemu);
    open(&top, WRITE).unwrap();
}

#[test]
fn a_raw_image_that_qemu_writes_is_refused_here() {
    let directory = TempDir::new().unwrap();
    let raw = directory.path().join("disk.raw");
    std::fs::write(&raw, vec![0; 1 << 20]).unwrap();
    let qemu = QemuIo::open(&["-f", "raw"], &raw);
    assert!(open(&raw, READ).is_err());
    assert!(open(&raw, WRITE).is_err());
    drop(qemu);
    let file = open(&raw, WRITE).unwrap();
    assert!(opens(&["-f", "raw"], &raw).is_err());
    drop(file);
    let file = open(&raw, READ).unwrap();
    assert!(opens(&["-f", "raw"], &raw).is_err());
    opens(&["-r", "-f", "raw"], &raw).unwrap();
    drop(file);
}

#[test]
fn an_image_that_another_process_holds_is_free_again_when_it_is_killed() {
    let (_directory, _, top) = chain();
    let mut qemu = QemuIo::open(&[], &top);
    qemu.0.kill().unwrap();
    qemu.0.wait().unwrap();
    open(&top, WRITE).unwrap();
}

/// A killed program's locks outlive it until its last operations have ended.
#[test]
fn an_image_that_is_let_go_of_soon_is_waited_for() {
    const SOON: Duration = Duration::from_millis(50);
    let (_directory, _, top) = chain();
    let executor = Executor::new(&Config::default()).unwrap();
    for (held, wanted) in [(WRITE, WRITE), (WRITE, READ), (READ, WRITE)] {
        let file = open(&top, held).unwrap();
        executor.block_on(async {
            let holder = spawn(async move {
                sleep(SOON).await;
                drop(file);
            });
            FileHost.open(&top, wanted).await.unwrap();
            holder.await.unwrap();
        });
        let file = open(&top, held).unwrap();
        let holder = std::thread::spawn(move || {
            std::thread::sleep(SOON);
            drop(file);
        });
        open(&top, wanted).unwrap();
        holder.join().unwrap();
    }
    let file = open(&top, WRITE).unwrap();
    let qemu = opens(&[], &top).unwrap_err();
    let error = executor.block_on(FileHost.open(&top, WRITE)).unwrap_err().to_string();
    assert!(
        qemu.contains("\"write\" lock") && error.contains("Failed to get \"write\" lock"),
        "{error}"
    );
    drop(file);
}

#[test]
fn a_file_that_is_to_be_deleted_is_used_by_nobody() {
    let (_directory, base, _) = chain();
    let file = open(&base, ALONE).unwrap();
    for arguments in [&["-r"] as &[&str], &["-r", "-U"]] {
        let error = opens(arguments, &base).unwrap_err();
        assert!(error.contains("lock"), "{error}");
    }
    for mode in [READ, WRITE, PRESENT] {
        let error = open(&base, mode).unwrap_err().to_string();
        assert!(error.contains("Failed to get"), "{error}");
    }
    drop(file);
    for arguments in [&[] as &[&str], &["-r"], &["-r", "-U"]] {
        let qemu = QemuIo::open(arguments, &base);
        assert!(open(&base, ALONE).is_err(), "beside qemu-io {arguments:?}");
        drop(qemu);
        drop(open(&base, ALONE).unwrap());
    }
}

#[test]
fn a_file_that_is_only_named_is_written_by_others() {
    let (_directory, _, top) = chain();
    let file = open(&top, PRESENT).unwrap();
    opens(&[], &top).unwrap();
    open(&top, WRITE).unwrap();
    assert!(open(&top, ALONE).is_err());
    drop(file);
    let qemu = QemuIo::open(&[], &top);
    open(&top, PRESENT).unwrap();
    drop(qemu);
}

/// Otherwise it would write to a file that nobody finds.
#[test]
fn who_waits_for_a_file_gets_the_one_that_has_its_name_then() {
    const SOON: Duration = Duration::from_millis(50);
    let (directory, base, top) = chain();
    let executor = Executor::new(&Config::default()).unwrap();
    for mode in [READ, WRITE, ALONE] {
        let file = open(&top, ALONE).unwrap();
        let new = directory.path().join("new.qcow2");
        std::fs::copy(&base, &new).unwrap();
        let replaces = {
            let top = top.clone();
            async move {
                sleep(SOON).await;
                std::fs::rename(new, top).unwrap();
                drop(file);
            }
        };
        executor.block_on(async {
            let replaced = spawn(replaces);
            let found = FileHost.open(&top, mode).await.unwrap();
            replaced.await.unwrap();
            assert_eq!(found.id().inode, std::fs::metadata(&top).unwrap().ino(), "{mode:?}");
        });
        let file = open(&top, ALONE).unwrap();
        let deletes = {
            let top = top.clone();
            async move {
                sleep(SOON).await;
                std::fs::remove_file(top).unwrap();
                drop(file);
            }
        };
        executor.block_on(async {
            let deleted = spawn(deletes);
            let error = FileHost.open(&top, mode).await.err().map(|error| error.kind());
            assert_eq!(error, Some(ErrorKind::NotFound), "{mode:?}");
            deleted.await.unwrap();
        });
        std::fs::copy(&base, &top).unwrap();
    }
}

/// Holds a lock on one byte of a file until it is dropped.
fn lock_byte(path: &Path, byte: i64) -> std::fs::File {
    let file = std::fs::File::open(path).unwrap();
    // SAFETY: a description of zeroes is valid; the kernel reads it during the call.
    unsafe {
        let mut lock: libc::flock = std::mem::zeroed();
        lock.l_type = libc::F_RDLCK as libc::c_short;
        (lock.l_start, lock.l_len) = (byte, 1);
        assert_eq!(libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock), 0);
    }
    file
}

/// Permission by permission: in use from byte 100 on, denied from byte 200 on.
#[test]
fn only_the_permissions_that_matter_conflict() {
    let (_directory, _, top) = chain();
    let conflicts = |byte| {
        let _other = lock_byte(&top, byte);
        let reader = open(&top, READ).is_err();
        (reader, open(&top, WRITE).is_err())
    };
    for byte in [102, 104, 150, 202, 204] {
        assert_eq!(conflicts(byte), (false, false), "byte {byte}");
    }
    for byte in [101, 103, 200] {
        assert_eq!(conflicts(byte), (true, true), "byte {byte}");
    }
    for byte in [201, 203] {
        assert_eq!(conflicts(byte), (false, true), "byte {byte}");
    }
    assert_eq!(conflicts(100), (false, false), "reading is denied to nobody");
}
