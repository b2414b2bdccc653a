//! Memory of files that outlives the process.

use isobath_storage::block_on;
use isobath_storage::file::FileHost;
use isobath_storage::survivor::SURVIVOR_BYTES;
use isobath_storage::{Host, OpenMode, Storage};
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
        let name = format!("isobath-{:x}-{:x}", id.device, id.inode);
        Self { directory, memory: Path::new("/dev/shm").join(name) }
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
    assert!(file.survivor(false).is_none() && !own.memory.exists());
    let first = file.survivor(true).unwrap();
    assert_eq!(first.words().len() * 8, SURVIVOR_BYTES);
    assert!(first.words().iter().all(|word| word.load(Ordering::Relaxed) == 0));
    first.words()[7].store(42, Ordering::Relaxed);
    assert_eq!(fs::metadata(&own.memory).unwrap().permissions().mode() & 0o777, 0o600);
    assert!(file.survivor(true).is_none(), "it is in use");
    drop(first);
    let again = file.survivor(false).unwrap();
    assert_eq!(again.words()[7].load(Ordering::Relaxed), 42);
    again.remove();
    assert!(!own.memory.exists() && file.survivor(false).is_none());
}

#[test]
fn what_may_be_somebody_elses_is_not_used() {
    let own = Own::new();
    let file = block_on(open(own.directory.path()));
    let elsewhere = own.directory.path().join("elsewhere");
    let refused = |what: &str| {
        assert!(file.survivor(true).is_none(), "{what}");
        assert!(file.survivor(false).is_none(), "{what}");
        if own.memory.is_dir() {
            fs::remove_dir(&own.memory).unwrap();
        } else {
            fs::remove_file(&own.memory).unwrap();
        }
    };
    fs::write(&elsewhere, vec![0; SURVIVOR_BYTES]).unwrap();
    fs::set_permissions(&elsewhere, Permissions::from_mode(0o600)).unwrap();
    symlink(&elsewhere, &own.memory).unwrap();
    refused("a link");
    fs::create_dir(&own.memory).unwrap();
    refused("a directory");
    fs::write(&own.memory, vec![0; SURVIVOR_BYTES]).unwrap();
    fs::set_permissions(&own.memory, Permissions::from_mode(0o644)).unwrap();
    refused("others may read it");
    fs::write(&own.memory, vec![0; SURVIVOR_BYTES / 2]).unwrap();
    fs::set_permissions(&own.memory, Permissions::from_mode(0o600)).unwrap();
    refused("it is too short");
    let second = own.memory.with_extension("second");
    fs::write(&own.memory, vec![0; SURVIVOR_BYTES]).unwrap();
    fs::set_permissions(&own.memory, Permissions::from_mode(0o600)).unwrap();
    fs::hard_link(&own.memory, &second).unwrap();
    refused("it has two names");
    fs::remove_file(&second).unwrap();
    assert!(file.survivor(true).is_some());
}
