//! Memory of files that survives the process.

use isobath_ring::block_on;
use isobath_storage::restart_memory::RESTART_MEMORY_BYTES;
use isobath_storage::{Host, Locking, MemoryUse, OpenMode, Storage, StorageExt};
use isobath_storage_file::FileHost;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

/// A file with a name of its own in `/dev/shm`, which goes when this does.
struct Own {
    directory: tempfile::TempDir,
    memory: PathBuf,
}

impl Own {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("file"), "x").unwrap();
        let id = block_on(open(directory.path())).id();
        let memory = Path::new("/dev/shm").join(format!("isobath-{:x}-{:x}", id.device, id.inode));
        // What a run left that was aborted is of another file with this inode number.
        let _ = fs::remove_file(&memory);
        for number in 0..9 {
            let _ = fs::remove_file(memory.with_added_extension(format!("aside-{number}")));
        }
        Self { directory, memory }
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
    assert!(restart_memory(MemoryUse::Take).unwrap().is_none() && !own.memory.exists());
    let first = restart_memory(MemoryUse::Create).unwrap().unwrap();
    assert_eq!(first.words().len() * 8, RESTART_MEMORY_BYTES);
    assert!(first.words().iter().all(|word| word.load(Ordering::Relaxed) == 0));
    first.words()[7].store(42, Ordering::Relaxed);
    assert_eq!(fs::metadata(&own.memory).unwrap().permissions().mode() & 0o777, 0o600);
    let busy = restart_memory(MemoryUse::Create).err().unwrap();
    assert_eq!(busy.kind(), std::io::ErrorKind::WouldBlock);
    assert!(first.is_there());
    drop(first);
    let looks = [MemoryUse::Look, MemoryUse::Glance, MemoryUse::Look];
    let looks = looks.map(|how| restart_memory(how).unwrap().unwrap());
    assert!(looks.iter().all(|look| look.words()[7].load(Ordering::Relaxed) == 42));
    drop(looks);
    let again = restart_memory(MemoryUse::Take).unwrap().unwrap();
    assert_eq!(again.words()[7].load(Ordering::Relaxed), 42);
    again.remove();
    assert!(
        !again.is_there()
            && !own.memory.exists()
            && restart_memory(MemoryUse::Take).unwrap().is_none()
    );
}

#[test]
fn who_looks_for_it_waits_for_a_process_that_is_ending() {
    let own = Own::new();
    let file = block_on(open(own.directory.path()));
    let ending = block_on(file.restart_memory(MemoryUse::Create)).unwrap().unwrap();
    ending.words()[7].store(42, Ordering::Relaxed);
    let found = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let file = block_on(open(own.directory.path()));
            let found = block_on(file.restart_memory(MemoryUse::Take)).unwrap().unwrap();
            found.words()[7].load(Ordering::Relaxed)
        });
        // The other thread most likely asks before this; if not, it finds what is asserted all the same.
        std::thread::sleep(std::time::Duration::from_millis(50));
        drop(ending);
        waiting.join().unwrap()
    });
    assert_eq!(found, 42);
}

#[test]
fn what_may_be_somebody_elses_is_not_used() {
    let own = Own::new();
    let file = block_on(open(own.directory.path()));
    let elsewhere = own.directory.path().join("elsewhere");
    let refused = |what: &str| {
        for how in [MemoryUse::Create, MemoryUse::Take, MemoryUse::Look, MemoryUse::Glance] {
            let error = block_on(file.restart_memory(how)).err().expect(what).to_string();
            assert!(error.contains(own.memory.to_str().unwrap()), "{error}");
        }
        if own.memory.is_dir() {
            fs::remove_dir(&own.memory).unwrap();
        } else {
            fs::remove_file(&own.memory).unwrap();
        }
    };
    fs::write(&elsewhere, vec![0; RESTART_MEMORY_BYTES]).unwrap();
    fs::set_permissions(&elsewhere, Permissions::from_mode(0o600)).unwrap();
    symlink(&elsewhere, &own.memory).unwrap();
    refused("a link");
    fs::create_dir(&own.memory).unwrap();
    refused("a directory");
    fs::write(&own.memory, vec![0; RESTART_MEMORY_BYTES]).unwrap();
    fs::set_permissions(&own.memory, Permissions::from_mode(0o644)).unwrap();
    refused("others may read it");
    fs::write(&own.memory, vec![0; RESTART_MEMORY_BYTES / 2]).unwrap();
    fs::set_permissions(&own.memory, Permissions::from_mode(0o600)).unwrap();
    refused("it is too short");
    let second = own.memory.with_extension("second");
    fs::write(&own.memory, vec![0; RESTART_MEMORY_BYTES]).unwrap();
    fs::set_permissions(&own.memory, Permissions::from_mode(0o600)).unwrap();
    fs::hard_link(&own.memory, &second).unwrap();
    refused("it has two names");
    fs::remove_file(&second).unwrap();
    assert!(block_on(file.restart_memory(MemoryUse::Create)).unwrap().is_some());
}

#[test]
fn what_is_set_aside_stays_and_is_not_found_any_more() {
    let own = Own::new();
    let file = block_on(open(own.directory.path()));
    let mut names = Vec::new();
    for number in 1..=2 {
        let memory = block_on(file.restart_memory(MemoryUse::Create)).unwrap().unwrap();
        memory.words()[7].store(number, Ordering::Relaxed);
        names.push(memory.set_aside().unwrap().unwrap());
        assert!(!memory.is_there() && memory.set_aside().unwrap().is_none());
        assert!(block_on(file.restart_memory(MemoryUse::Take)).unwrap().is_none());
    }
    for (name, number) in names.iter().zip(1..=2) {
        assert_eq!(fs::read(name).unwrap()[56], number);
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
    // Not even one that may be somebody else's is looked at.
    fs::create_dir(&own.memory).unwrap();
    let mode = OpenMode { locking: Locking::Unlocked, ..OpenMode::default() };
    let file = block_on(FileHost.open(&name, mode)).unwrap();
    assert!(block_on(file.restart_memory(MemoryUse::Glance)).unwrap().is_none());
    drop(writer);
    assert!(block_on(file.restart_memory(MemoryUse::Glance)).is_err());
    fs::remove_dir(&own.memory).unwrap();
}
