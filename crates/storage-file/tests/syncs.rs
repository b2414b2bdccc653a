//! The counter of syncs counts what reaches the kernel, and nothing else. The counter is the process's:
//! no other test belongs in this file.

use isobath_ring::{Config, Executor};
use isobath_storage::{Host, IoBuf, OpenMode, Storage, StorageExt};
use isobath_storage_file::{FileHost, syncs};

#[test]
fn every_fdatasync_is_counted_once() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image");
    let mode = OpenMode { writable: true, ..OpenMode::default() };
    Executor::new(&Config::default()).unwrap().block_on(async {
        let file = FileHost.create(&path, mode).await.unwrap();
        file.write_at(0, IoBuf::copy_of(b"data")).await.unwrap();
        assert_eq!(syncs(), 0);
        file.flush().await.unwrap();
        assert_eq!(syncs(), 2, "the file's and its directory's");
        file.flush().await.unwrap();
        assert_eq!(syncs(), 3);
        for _ in 0..2 {
            file.retire().await.unwrap();
            file.flush().await.unwrap();
            assert_eq!(syncs(), 4, "what was written before is durable, and nothing comes after");
        }
        drop(file);
        let file = FileHost.open(&path, OpenMode::default()).await.unwrap();
        file.flush().await.unwrap();
        assert_eq!(syncs(), 5, "others may have written to a file that is only read");
    });
}
