//! Files that are opened by descriptors that were handed in.

use crate::qemu::{chain, opens};
use isobath_ring::block_on;
use isobath_storage::{Host, IoBuf, Locking, OpenMode, Result, Roles, Storage, StorageExt};
use isobath_storage_file::{FileHost, FileStorage, HandedIn, descriptor_sets};
use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

const READ: OpenMode = OpenMode { writable: false, direct: false, locking: Locking::Immediate };
const WRITE: OpenMode = OpenMode { writable: true, ..READ };
const DIRECT: OpenMode = OpenMode { direct: true, ..WRITE };

fn open(set: u64, mode: OpenMode) -> Result<FileStorage> {
    block_on(FileHost.open(&name(set), mode))
}

fn name(set: u64) -> PathBuf {
    format!("/dev/fdset/{set}").into()
}

fn read_only(path: &Path) -> OwnedFd {
    File::open(path).unwrap().into()
}

fn flagged(path: &Path, flags: i32) -> OwnedFd {
    OpenOptions::new().read(true).write(true).custom_flags(flags).open(path).unwrap().into()
}

/// A number that no other test uses, even when the set is gone.
fn new_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1000);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// A new set of these descriptors, and their numbers.
fn set(descriptors: Vec<OwnedFd>) -> (u64, Vec<RawFd>) {
    let numbers = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
    let set = new_number();
    for descriptor in descriptors {
        let descriptor = HandedIn::new(descriptor).unwrap();
        assert_eq!(descriptor_sets::add(descriptor, Some(set), None, true), set);
    }
    (set, numbers)
}

fn shown(set: u64) -> Option<Vec<RawFd>> {
    let found = descriptor_sets::all().into_iter().find(|shown| shown.number == set)?;
    Some(found.descriptors.into_iter().map(|(number, _)| number).collect())
}

#[test]
fn a_set_is_opened_by_the_descriptor_that_fits() {
    let (_directory, base, _top) = chain();
    let (one, _) = set(vec![read_only(&base)]);
    let error = open(one, WRITE).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PermissionDenied);
    assert!(error.to_string().contains("/dev/fdset/"), "{error}");
    assert!(error.to_string().contains("open for reading and writing"), "{error}");
    let file = open(one, READ).unwrap();
    let length = base.metadata().unwrap().len();
    assert_eq!(block_on(file.len()).unwrap(), length);
    drop(file);
    let (both, _) = set(vec![read_only(&base), flagged(&base, 0)]);
    let file = open(both, WRITE).unwrap();
    block_on(file.write_at(length, IoBuf::copy_of(b"more"))).unwrap();
    block_on(file.flush()).unwrap();
    assert_eq!(base.metadata().unwrap().len(), length + 4);
}

#[test]
fn users_of_copies_of_one_descriptor_keep_each_other_out_as_others_do() {
    let (_directory, base, _top) = chain();
    let original = flagged(&base, 0);
    let same = original.try_clone().unwrap();
    let (one, _) = set(vec![original]);
    let (another, _) = set(vec![same]);
    for (first, second) in [(one, one), (one, another)] {
        let writer = open(first, WRITE).unwrap();
        for mode in [WRITE, READ] {
            let error = open(second, mode).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ResourceBusy, "{mode:?}");
        }
        assert!(opens(&["-r"], &base).is_err());
        assert!(block_on(FileHost.open(&base, READ)).is_err());
        drop(writer);
        let readers = [open(first, READ).unwrap(), open(second, READ).unwrap()];
        assert_eq!(open(first, WRITE).unwrap_err().kind(), ErrorKind::ResourceBusy);
        let [gone, stays] = readers;
        drop(gone);
        opens(&["-r"], &base).unwrap();
        assert!(opens(&[], &base).is_err(), "one reader is left");
        drop(stays);
        // The descriptors themselves hold no lock.
        opens(&[], &base).unwrap();
    }
}

/// Locks or unlocks the byte that denies writing through a descriptor, as another program that has a copy of it.
fn lock_elsewhere(descriptor: RawFd, kind: i32) {
    // SAFETY: zeroes are valid; the structure is only read.
    let locked = unsafe {
        let mut lock: libc::flock = std::mem::zeroed();
        (lock.l_type, lock.l_start, lock.l_len) = (kind as i16, 201, 1);
        libc::fcntl(descriptor, libc::F_OFD_SETLK, &raw const lock)
    };
    assert_eq!(locked, 0);
}

#[test]
fn an_open_file_that_another_program_has_locked_is_refused() {
    let (_directory, base, _top) = chain();
    let (set, numbers) = set(vec![flagged(&base, 0)]);
    lock_elsewhere(numbers[0], libc::F_RDLCK);
    for mode in [READ, WRITE] {
        let error = open(set, mode).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ResourceBusy);
        assert!(error.to_string().contains("open the file anew"), "{error}");
    }
    // It takes no locks, and releases none.
    let unlocked = open(set, OpenMode { locking: Locking::Unlocked, ..READ }).unwrap();
    assert!(open(set, WRITE).is_err());
    drop(unlocked);
    assert!(opens(&[], &base).is_err());
    lock_elsewhere(numbers[0], libc::F_UNLCK);
    drop(open(set, WRITE).unwrap());
}

#[test]
fn a_writer_that_retires_goes_on_reading_and_keeps_writers_out() {
    let (_directory, base, _top) = chain();
    for more in [vec![], vec![read_only(&base)]] {
        let all = std::iter::once(flagged(&base, 0)).chain(more).collect();
        let (set, _) = set(all);
        let file = open(set, WRITE).unwrap();
        assert!(opens(&["-r"], &base).is_err());
        block_on(Roles::retire(&file)).unwrap();
        assert!(file.is_read_only());
        opens(&["-r"], &base).unwrap();
        assert!(opens(&[], &base).is_err());
        assert_eq!(open(set, WRITE).unwrap_err().kind(), ErrorKind::ResourceBusy);
        // As for a commit into it.
        block_on(Roles::admit_writer(&file, true)).unwrap();
        let writer = open(set, WRITE).unwrap();
        assert!(opens(&["-r"], &base).is_err());
        drop(writer);
        block_on(Roles::admit_writer(&file, false)).unwrap();
        opens(&["-r"], &base).unwrap();
        assert!(opens(&[], &base).is_err());
        let _ = block_on(file.read_at(0, IoBuf::zeroed(512))).unwrap();
        drop(file);
        opens(&[], &base).unwrap();
    }
}

#[test]
fn a_writer_whose_set_has_lost_its_descriptors_retires_to_a_copy_of_its_own() {
    let (_directory, base, _top) = chain();
    let (set, _) = set(vec![flagged(&base, 0)]);
    let file = open(set, WRITE).unwrap();
    assert!(descriptor_sets::remove(set, None));
    block_on(Roles::retire(&file)).unwrap();
    // It is in use as before, and not opened by another name.
    assert_eq!(shown(set), Some(Vec::new()));
    let _ = block_on(file.read_at(0, IoBuf::zeroed(512))).unwrap();
    opens(&["-r"], &base).unwrap();
    assert!(opens(&[], &base).is_err());
    drop(file);
    assert_eq!(shown(set), None);
    opens(&[], &base).unwrap();
}

fn status(descriptor: RawFd) -> i32 {
    // SAFETY: no memory is involved.
    unsafe { libc::fcntl(descriptor, libc::F_GETFL) }
}

#[test]
fn what_others_have_copies_of_is_not_changed() {
    let (_directory, base, _top) = chain();
    let (appending, _) = set(vec![flagged(&base, libc::O_APPEND)]);
    let error = open(appending, WRITE).unwrap_err();
    assert!(error.to_string().contains("for appending"), "{error}");
    drop(open(appending, READ).unwrap());
    let (cached, numbers) = set(vec![flagged(&base, libc::O_SYNC)]);
    let error = open(cached, DIRECT).unwrap_err();
    assert!(error.to_string().contains("opened with O_DIRECT"), "{error}");
    let before = status(numbers[0]);
    drop(open(cached, WRITE).unwrap());
    assert_eq!(status(numbers[0]), before);
    let (paths, _) = set(vec![flagged(&base, libc::O_PATH)]);
    assert_eq!(open(paths, READ).unwrap_err().kind(), ErrorKind::PermissionDenied);
}

#[test]
fn the_page_cache_is_bypassed_where_the_descriptor_does() {
    let (_directory, base, _top) = chain();
    let opened = OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(&base);
    // Not every file system has it.
    let Ok(direct) = opened else { return };
    let (set, _) = set(vec![direct.into()]);
    let error = open(set, WRITE).unwrap_err();
    assert!(error.to_string().contains("--cache none"), "{error}");
    let file = open(set, DIRECT).unwrap();
    block_on(file.write_at(1, IoBuf::copy_of(b"unaligned"))).unwrap();
    assert_eq!(&*block_on(file.read_at(1, IoBuf::zeroed(9))).unwrap(), b"unaligned");
}

#[test]
fn a_set_lasts_as_long_as_it_has_descriptors_or_copies_in_use() {
    let (_directory, base, _top) = chain();
    let (one, numbers) = set(vec![read_only(&base), flagged(&base, 0)]);
    let file = open(one, READ).unwrap();
    assert!(descriptor_sets::remove(one, Some(numbers[0])));
    assert!(!descriptor_sets::remove(one, Some(numbers[0])));
    assert_eq!(shown(one), Some(vec![numbers[1]]));
    assert!(descriptor_sets::remove(one, None));
    assert_eq!(shown(one), Some(Vec::new()));
    let _ = block_on(file.read_at(0, IoBuf::zeroed(512))).unwrap();
    drop(file);
    assert_eq!(shown(one), None);
    let error = open(one, READ).unwrap_err();
    assert!(error.to_string().contains("there is no descriptor set"), "{error}");
    // A client's sets go with it unless they are used.
    let used = Some(new_number());
    let handed_in = HandedIn::new(flagged(&base, 0)).unwrap();
    let used = descriptor_sets::add(handed_in, used, None, false);
    let file = open(used, WRITE).unwrap();
    let handed_in = HandedIn::new(read_only(&base)).unwrap();
    let unused = Some(new_number());
    let unused = descriptor_sets::add(handed_in, unused, Some("x".into()), false);
    descriptor_sets::forget_unused();
    assert!(shown(used).is_some() && shown(unused).is_none());
    drop(file);
}

#[test]
fn names_beside_a_descriptor_lead_nowhere() {
    let host = FileHost;
    let (_directory, base, _top) = chain();
    let (set, _) = set(vec![flagged(&base, 0)]);
    for name in ["base.qcow2", &format!("+{set}"), &format!("0{set}"), ""] {
        let beside = Path::new("/dev/fdset").join(name);
        let error = block_on(host.open(&beside, READ)).unwrap_err();
        assert!(error.to_string().contains("no directory"), "{name}: {error}");
    }
    assert_eq!(host.canonical(&name(set)).unwrap(), name(set));
    assert!(block_on(host.remove(&name(set))).is_err());
    let file = block_on(host.create(&name(set), WRITE)).unwrap();
    assert_eq!(block_on(file.len()).unwrap(), 0);
}
