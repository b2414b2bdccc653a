//! Memory of files that survives the process.

use isobath_ring::block_on;
use isobath_storage::restart_memory::{Mark, RESTART_MEMORY_BYTES, RestartMemory};
use isobath_storage::{Host, Locking, MemoryUse, OpenMode, Storage, StorageExt};
use isobath_storage_file::{FileHost, RestartDirectories};
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

/// How memory begins that is found, and other memory.
const MARK: Mark = [1, 2, 3];
const OTHER: Mark = [1, 2, 4];

/// Leaves the mark in memory, and a number in another word.
fn leave(memory: &dyn RestartMemory, number: u64) {
    for (word, value) in memory.words().iter().zip(MARK) {
        word.store(value, Ordering::Relaxed);
    }
    memory.words()[7].store(number, Ordering::Relaxed);
}

/// A file with a name of its own in `/dev/shm`, which goes when this does.
struct Own {
    directory: tempfile::TempDir,
    memory: PathBuf,
    /// Another process would remove the directory of the memory while that is empty.
    _kept: RestartDirectories,
}

impl Own {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("file"), "x").unwrap();
        let id = block_on(open(directory.path())).id();
        let user = fs::metadata("/proc/self").unwrap().uid();
        let memory = format!("/dev/shm/isobath-{user}/{:x}-{:x}", id.device, id.inode);
        let memory = PathBuf::from(memory);
        // What a run left that was aborted is of another file with this inode number.
        let _ = fs::remove_file(&memory);
        for number in 0..9 {
            let _ = fs::remove_file(memory.with_added_extension(format!("aside-{number}")));
        }
        Self { directory, memory, _kept: RestartDirectories::keep().unwrap() }
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.memory);
    }
}

async fn open(directory: &Path) -> impl Storage + use<> {
    FileHost.open(&directory.join("file"), OpenMode::default()).await.unwrap()
}

#[test]
fn it_stays_until_it_is_removed_and_has_one_user() {
    let own = Own::new();
    let file = block_on(open(own.directory.path()));
    let restart_memory = |how| block_on(file.restart_memory(how));
    assert!(restart_memory(MemoryUse::Take(MARK)).unwrap().is_none() && !own.memory.exists());
    let first = restart_memory(MemoryUse::Create).unwrap().unwrap();
    assert_eq!(first.words().len() * 8, RESTART_MEMORY_BYTES);
    assert!(first.words().iter().all(|word| word.load(Ordering::Relaxed) == 0));
    leave(&*first, 42);
    assert_eq!(fs::metadata(&own.memory).unwrap().permissions().mode() & 0o777, 0o600);
    let busy = restart_memory(MemoryUse::Create).err().unwrap();
    assert_eq!(busy.kind(), std::io::ErrorKind::WouldBlock);
    assert!(first.is_there());
    drop(first);
    let looks = [MemoryUse::Look(MARK), MemoryUse::Glance(MARK), MemoryUse::Look(MARK)];
    let looks = looks.map(|how| restart_memory(how).unwrap().unwrap());
    assert!(looks.iter().all(|look| look.words()[7].load(Ordering::Relaxed) == 42));
    drop(looks);
    let again = restart_memory(MemoryUse::Take(MARK)).unwrap().unwrap();
    assert_eq!(again.words()[7].load(Ordering::Relaxed), 42);
    again.remove();
    assert!(
        !again.is_there()
            && !own.memory.exists()
            && restart_memory(MemoryUse::Take(MARK)).unwrap().is_none()
    );
}

#[test]
fn who_looks_for_it_waits_for_a_process_that_is_ending() {
    let own = Own::new();
    let file = block_on(open(own.directory.path()));
    let ending = block_on(file.restart_memory(MemoryUse::Create)).unwrap().unwrap();
    leave(&*ending, 42);
    let found = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let file = block_on(open(own.directory.path()));
            let found = block_on(file.restart_memory(MemoryUse::Take(MARK))).unwrap().unwrap();
            found.words()[7].load(Ordering::Relaxed)
        });
        // The other thread most likely asks before this; if not, it finds what is asserted all the same.
        std::thread::sleep(std::time::Duration::from_millis(50));
        drop(ending);
        waiting.join().unwrap()
    });
    assert_eq!(found, 42);
}

/// Puts a file in memory's place that begins with the mark.
fn plant(memory: &Path, length: usize, mode: u32) {
    let mut bytes: Vec<u8> = MARK.iter().flat_map(|word| word.to_ne_bytes()).collect();
    bytes.resize(length, 0);
    fs::write(memory, bytes).unwrap();
    fs::set_permissions(memory, Permissions::from_mode(mode)).unwrap();
}

const USES: [MemoryUse; 3] =
    [MemoryUse::Take(MARK), MemoryUse::Look(MARK), MemoryUse::Glance(MARK)];

#[test]
fn a_log_that_is_damaged_or_that_others_could_write_to_is_refused() {
    let own = Own::new();
    let file = block_on(open(own.directory.path()));
    let refused = |what: &str| {
        for how in USES {
            let error = block_on(file.restart_memory(how)).err().expect(what).to_string();
            assert!(error.contains(own.memory.to_str().unwrap()), "{error}");
        }
        fs::remove_file(&own.memory).unwrap();
    };
    plant(&own.memory, RESTART_MEMORY_BYTES, 0o644);
    refused("others may read it");
    plant(&own.memory, RESTART_MEMORY_BYTES / 2, 0o600);
    refused("it is too short");
    plant(&own.memory, RESTART_MEMORY_BYTES * 2, 0o600);
    refused("it is too long");
    let second = own.memory.with_extension("second");
    plant(&own.memory, RESTART_MEMORY_BYTES, 0o600);
    fs::hard_link(&own.memory, &second).unwrap();
    refused("it has two names");
    fs::remove_file(&second).unwrap();
    assert!(block_on(file.restart_memory(MemoryUse::Create)).unwrap().is_some());
}

#[test]
fn what_is_no_log_of_the_image_is_passed_over_and_not_waited_for() {
    let own = Own::new();
    let file = block_on(open(own.directory.path()));
    let passed = |how| assert!(block_on(file.restart_memory(how)).unwrap().is_none(), "{how:?}");
    let elsewhere = own.directory.path().join("elsewhere");
    plant(&elsewhere, RESTART_MEMORY_BYTES, 0o600);
    fs::create_dir_all(own.memory.parent().unwrap()).unwrap();
    symlink(&elsewhere, &own.memory).unwrap();
    USES.into_iter().for_each(passed);
    fs::remove_file(&own.memory).unwrap();
    fs::create_dir(&own.memory).unwrap();
    USES.into_iter().for_each(passed);
    fs::remove_dir(&own.memory).unwrap();
    plant(&own.memory, RESTART_MEMORY_BYTES, 0o600);
    let locked = fs::File::open(&own.memory).unwrap();
    locked.lock().unwrap();
    passed(MemoryUse::Take(OTHER));
    passed(MemoryUse::Stale);
}

#[test]
fn memory_that_was_found_may_be_truncated_at_any_moment() {
    let own = Own::new();
    let file = block_on(open(own.directory.path()));
    let memory = block_on(file.restart_memory(MemoryUse::Create)).unwrap().unwrap();
    leave(&*memory, 42);
    drop(memory);
    let found = block_on(file.restart_memory(MemoryUse::Take(MARK))).unwrap().unwrap();
    fs::OpenOptions::new().write(true).open(&own.memory).unwrap().set_len(0).unwrap();
    assert_eq!(found.words()[7].load(Ordering::Relaxed), 42);
    assert_eq!(found.words().len() * 8, RESTART_MEMORY_BYTES);
    found.store(6, 17).unwrap();
    assert_eq!(found.words()[6].load(Ordering::Relaxed), 17);
    assert_eq!(fs::read(&own.memory).unwrap()[48..], 17_u64.to_ne_bytes());
    found.remove();
    assert!(!own.memory.exists());
}

#[test]
fn new_memory_replaces_what_this_user_left() {
    let own = Own::new();
    let file = block_on(open(own.directory.path()));
    plant(&own.memory, RESTART_MEMORY_BYTES, 0o600);
    let planted = fs::OpenOptions::new().write(true).open(&own.memory).unwrap();
    let memory = block_on(file.restart_memory(MemoryUse::Create)).unwrap().unwrap();
    assert!(memory.words().iter().all(|word| word.load(Ordering::Relaxed) == 0));
    // It is not mapped.
    planted.set_len(0).unwrap();
    leave(&*memory, 42);
    assert!(memory.is_there());
}

#[test]
fn a_log_of_an_earlier_version_is_found() {
    let own = Own::new();
    let file = block_on(open(own.directory.path()));
    let name = own.memory.file_name().unwrap().to_str().unwrap();
    let former = PathBuf::from(format!("/dev/shm/isobath-{name}"));
    plant(&former, RESTART_MEMORY_BYTES, 0o600);
    // Another one, of another journal, does not hide it.
    let memory = block_on(file.restart_memory(MemoryUse::Create)).unwrap().unwrap();
    assert_eq!(memory.name(), own.memory.to_str().unwrap());
    let found = block_on(file.restart_memory(MemoryUse::Take(MARK))).unwrap().unwrap();
    assert_eq!(found.name(), former.to_str().unwrap());
    found.remove();
    assert!(!former.exists() && own.memory.exists());
}

#[test]
fn what_is_set_aside_stays_and_is_not_found_any_more() {
    let own = Own::new();
    let file = block_on(open(own.directory.path()));
    let mut names = Vec::new();
    for number in 1..=2 {
        let memory = block_on(file.restart_memory(MemoryUse::Create)).unwrap().unwrap();
        leave(&*memory, number);
        names.push(memory.set_aside().unwrap().unwrap());
        assert!(!memory.is_there() && memory.set_aside().unwrap().is_none());
        assert!(block_on(file.restart_memory(MemoryUse::Take(MARK))).unwrap().is_none());
    }
    for (name, number) in names.iter().zip(1..=2) {
        assert_eq!(u64::from(fs::read(name).unwrap()[56]), number);
        fs::remove_file(name).unwrap();
    }
}

#[test]
fn who_reads_without_locks_leaves_it_to_the_one_who_writes() {
    let own = Own::new();
    let file = block_on(open(own.directory.path()));
    let mode = OpenMode { writable: true, ..OpenMode::default() };
    drop(file);
    let name = own.directory.path().join("file");
    let writer = block_on(FileHost.open(&name, mode)).unwrap();
    // Not even one that cannot be used is looked at.
    plant(&own.memory, RESTART_MEMORY_BYTES, 0o666);
    let mode = OpenMode { locking: Locking::Unlocked, ..OpenMode::default() };
    let file = block_on(FileHost.open(&name, mode)).unwrap();
    assert!(block_on(file.restart_memory(MemoryUse::Glance(MARK))).unwrap().is_none());
    drop(writer);
    assert!(block_on(file.restart_memory(MemoryUse::Glance(MARK))).is_err());
}
