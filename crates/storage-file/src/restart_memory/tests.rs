//! What other users leave in the directory that all share. A test cannot act for two users, so that it takes the part
//! of the other one for itself.

use super::found::{find, is_theirs};
use super::mapped::create;
use super::shelf::{Image, Shelf};
use super::sys;
use isobath_storage::FileId;
use isobath_storage::restart_memory::{Mark, RESTART_MEMORY_BYTES, RestartMemory};
use rustix::fs::{FlockOperation, flock};
use rustix::process::{Resource, Rlimit, setrlimit};
use std::fs::{self, File, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::Ordering;
use std::{env, iter, thread};

const MARK: Mark = [1, 2, 3];
const FILE: FileId = FileId { device: 0xa, inode: 0xb };
/// A user who is not the one who runs the tests.
const STRANGER: u32 = 4_000_000_000;
/// The image of another one.
const IMAGE: Image = Image { owner: 4_000_000_001, mode: 0o644 };

fn leave(memory: &Path, mark: Mark) -> PathBuf {
    let mut bytes: Vec<u8> = mark.iter().flat_map(|word| word.to_ne_bytes()).collect();
    bytes.resize(RESTART_MEMORY_BYTES, 0);
    fs::create_dir_all(memory.parent().unwrap()).unwrap();
    fs::write(memory, bytes).unwrap();
    fs::set_permissions(memory, Permissions::from_mode(0o600)).unwrap();
    memory.to_owned()
}

#[test]
fn what_another_user_left_is_not_waited_for_and_does_not_hide_the_owners_log() {
    let shared = tempfile::tempdir().unwrap();
    let tester = sys::effective_user();
    let seen_by_stranger =
        |owner| Shelf::new(shared.path(), STRANGER, Image { owner, ..IMAGE }, FILE);
    for place in ["isobath-a-b", "isobath-77/a-b"] {
        let planted = leave(&shared.path().join(place), [0; 3]);
        let held = File::open(&planted).unwrap();
        held.lock().unwrap();
        for owner in [IMAGE.owner, tester] {
            assert!(find(&seen_by_stranger(owner), MARK, true).unwrap().is_none(), "{place}");
        }
        let log = leave(&shared.path().join("isobath-88/a-b"), MARK);
        let found = find(&seen_by_stranger(tester), MARK, true).unwrap().unwrap();
        assert_eq!(found.name(), log.to_str().unwrap());
        found.remove();
        assert!(!log.exists() && planted.exists());
        fs::remove_file(planted).unwrap();
    }
}

#[test]
fn a_fitting_log_of_a_user_who_does_not_own_the_image_is_neither_used_nor_passed_over() {
    let shared = tempfile::tempdir().unwrap();
    for place in ["isobath-a-b", "isobath-77/a-b"] {
        let log = leave(&shared.path().join(place), MARK);
        let stranger = Shelf::new(shared.path(), STRANGER, Image { mode: 0o664, ..IMAGE }, FILE);
        let error = find(&stranger, MARK, true).err().unwrap().to_string();
        let tester = sys::effective_user().to_string();
        assert!(error.contains(log.to_str().unwrap()) && error.contains(&tester), "{error}");
        fs::remove_file(log).unwrap();
    }
}

#[test]
fn a_log_counts_if_its_user_may_write_to_the_image() {
    let shared = tempfile::tempdir().unwrap();
    let log = leave(&shared.path().join("isobath-77/a-b"), MARK);
    chown(&log, Some(77), None).unwrap();
    let found = |image| {
        let shelf = Shelf::new(shared.path(), sys::effective_user(), image, FILE);
        find(&shelf, MARK, true).map(|found| found.is_some()).map_err(|error| error.to_string())
    };
    for (mode, counts) in [(0o600, false), (0o644, false), (0o664, true), (0o646, true)] {
        let found = found(Image { mode, ..IMAGE });
        assert_eq!(found.is_err(), counts, "{mode:o}: {found:?}");
    }
    assert_eq!(found(Image { owner: 77, mode: 0o600 }), Ok(true));
    // Nobody can tell what is in a log that he may not read.
    assert!(!is_theirs(&ErrorKind::PermissionDenied.into()));
}

#[test]
fn whatever_has_the_name_of_a_users_directory_memory_is_created_and_found() {
    let shared = tempfile::tempdir().unwrap();
    let user = sys::effective_user();
    let shelf = Shelf::new(shared.path(), user, IMAGE, FILE);
    let plain = shared.path().join(format!("isobath-{user}"));
    let elsewhere = shared.path().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    symlink(&elsewhere, &plain).unwrap();
    let memory = create(&shelf).unwrap();
    for (word, value) in memory.words().iter().zip(MARK) {
        word.store(value, Ordering::Relaxed);
    }
    let first = memory.name();
    assert!(first.starts_with(&format!("{}.", plain.display())), "{first}");
    assert!(memory.is_there() && fs::read_dir(&elsewhere).unwrap().next().is_none());
    drop(memory);
    // What was in the way may be gone when the log is looked for.
    let found = || find(&shelf, MARK, false).unwrap().unwrap().name();
    assert_eq!(found(), first);
    fs::remove_file(&plain).unwrap();
    assert_eq!(found(), first);
    fs::create_dir(&plain).unwrap();
    assert_eq!(found(), first);
}

#[test]
fn nobody_else_may_write_to_a_users_directory() {
    let shared = tempfile::tempdir().unwrap();
    let user = sys::effective_user();
    let directory = shared.path().join(format!("isobath-{user}"));
    fs::create_dir(&directory).unwrap();
    fs::set_permissions(&directory, Permissions::from_mode(0o777)).unwrap();
    let memory = create(&Shelf::new(shared.path(), user, IMAGE, FILE)).unwrap();
    assert_eq!(memory.name(), directory.join("a-b").to_str().unwrap());
    assert_eq!(fs::metadata(&directory).unwrap().permissions().mode() & 0o7777, 0o711);
    memory.remove();
    assert!(!directory.exists(), "an empty directory goes with the last log");
}

/// The directory of a process that runs out of descriptors.
const SHARED: &str = "ISOBATH_TEST_SHARED";

#[test]
fn who_is_out_of_descriptors_does_not_pass_over_a_log() {
    let Some(shared) = env::var_os(SHARED) else {
        let shared = tempfile::tempdir().unwrap();
        leave(&shared.path().join("isobath-88/a-b"), MARK);
        // A process of its own: other tests need descriptors.
        let mut child = Command::new(env::current_exe().unwrap());
        child.args([
            "--exact",
            "restart_memory::tests::who_is_out_of_descriptors_does_not_pass_over_a_log",
        ]);
        assert!(child.env(SHARED, shared.path()).status().unwrap().success());
        return;
    };
    let shelf = Shelf::new(Path::new(&shared), sys::effective_user(), IMAGE, FILE);
    let limit = Rlimit { current: Some(40), maximum: Some(40) };
    setrlimit(Resource::Nofile, limit).unwrap();
    let mut held: Vec<File> = iter::from_fn(|| File::open("/dev/null").ok()).collect();
    let mut refused = 0;
    while find(&shelf, MARK, true).map_or(true, |found| found.unwrap().words().is_empty()) {
        refused += 1;
        drop(held.pop().expect("it is found once there are descriptors"));
    }
    assert!(refused > 1, "{refused}");
}

#[test]
fn a_directory_that_is_kept_outlives_the_memory_in_it() {
    let shared = tempfile::tempdir().unwrap();
    let user = sys::effective_user();
    let shelf = Shelf::new(shared.path(), user, Image { owner: user, ..IMAGE }, FILE);
    let directory = shared.path().join(format!("isobath-{user}"));
    create(&shelf).unwrap().remove();
    assert!(!directory.exists(), "nobody keeps it");
    let (kept, lock) = shelf.keep().unwrap();
    assert_eq!(kept, directory);
    let again = shelf.keep().unwrap();
    create(&shelf).unwrap().remove();
    assert!(directory.exists());
    drop((lock, again));
    create(&shelf).unwrap().remove();
    assert!(!directory.exists());
}

#[test]
fn a_directory_that_is_being_removed_is_made_anew_for_who_keeps_it() {
    let shared = tempfile::tempdir().unwrap();
    let user = sys::effective_user();
    let shelf = || Shelf::new(shared.path(), user, Image { owner: user, ..IMAGE }, FILE);
    let (directory, kept) = shelf().keep().unwrap();
    Shelf::remove_unused(&directory);
    assert!(directory.exists(), "it is kept");
    // Its removal begins.
    flock(&kept, FlockOperation::LockExclusive).unwrap();
    thread::scope(|scope| {
        let keeping = scope.spawn(|| shelf().keep().unwrap());
        fs::remove_dir(&directory).unwrap();
        drop(kept);
        let (again, lock) = keeping.join().unwrap();
        assert_eq!(again, directory);
        Shelf::remove_unused(&directory);
        assert!(directory.exists());
        drop(lock);
    });
    fs::write(directory.join("other"), "").unwrap();
    Shelf::remove_unused(&directory);
    assert!(directory.exists(), "another server has made a file in it");
    fs::remove_file(directory.join("other")).unwrap();
    Shelf::remove_unused(&directory);
    assert!(!directory.exists());
}
