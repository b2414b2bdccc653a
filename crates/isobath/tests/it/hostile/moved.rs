//! Names that come to mean other files while an image is opened or used.

use super::names::{naming, within};
use futures_util::future::join;
use isobath_disk::{Disk, LiveDisk, MetadataMode, NewDisk, OpenOptions, create};
use isobath_jobs::{CommitOptions, JobOptions};
use isobath_ring::block_on;
use isobath_storage::{Host, IoBuf, OpenMode, Result, StorageExt};
use isobath_storage_file::{FileHost, FileStorage};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Files, of which one is replaced by a link between the judgement of its name and its opening.
#[derive(Clone)]
struct Swapped {
    name: PathBuf,
    target: PathBuf,
    /// How often.
    swaps: Arc<AtomicU32>,
}

impl Host for Swapped {
    type File = FileStorage;

    async fn open(&self, name: &Path, mode: OpenMode) -> Result<FileStorage> {
        if name == self.name {
            fs::remove_file(name).unwrap();
            symlink(&self.target, name).unwrap();
            self.swaps.fetch_add(1, Ordering::Relaxed);
        }
        FileHost.open(name, mode).await
    }

    async fn create(&self, name: &Path, mode: OpenMode) -> Result<FileStorage> {
        FileHost.create(name, mode).await
    }

    async fn remove(&self, name: &Path) -> Result<()> {
        FileHost.remove(name).await
    }

    async fn remove_file(&self, name: &Path, file: &FileStorage) -> Result<bool> {
        FileHost.remove_file(name, file).await
    }

    fn canonical(&self, name: &Path) -> Result<PathBuf> {
        FileHost.canonical(name)
    }
}

#[test]
fn what_counts_is_the_file_that_an_untrusted_image_has_opened() {
    let (directory, image) = naming("base", Some("raw"));
    let outside = tempfile::tempdir().unwrap();
    let (inside, secret) = (directory.path().join("other"), outside.path().join("secret"));
    fs::write(&inside, [7; 4096]).unwrap();
    fs::write(&secret, [0x5e; 4096]).unwrap();
    let name = directory.path().canonicalize().unwrap().join("base");
    let image = image.canonicalize().unwrap();
    for (target, refused) in [(inside, false), (secret, true)] {
        let _ = fs::remove_file(&name);
        fs::write(&name, [7; 4096]).unwrap();
        let host = Swapped { name: name.clone(), target, swaps: Arc::default() };
        let opened = block_on(async {
            let options = OpenOptions::new().trust(within(directory.path()));
            let disk = Disk::open(host.clone(), &image, &options).await?;
            disk.read(0, IoBuf::zeroed(4096)).await.map(|bytes| bytes.to_vec())
        });
        assert!(host.swaps.load(Ordering::Relaxed) > 0);
        match opened {
            Ok(bytes) => assert!(!refused && bytes == [7; 4096], "{}", bytes[0]),
            Err(error) => assert!(refused && error.to_string().contains("outside"), "{error}"),
        }
    }
}

#[test]
fn a_commit_does_not_write_to_a_file_that_has_taken_its_bases_name() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let (base, top, other) = (path("base"), path("top"), path("other"));
    block_on(async {
        for name in [&base, &other] {
            create(&FileHost, name, &NewDisk::new(1 << 20)).await.unwrap();
        }
        let overlay = NewDisk::new(1 << 20).backing_file("base", "qcow2");
        create(&FileHost, &top, &overlay).await.unwrap();
        let options = OpenOptions::new().writable(true);
        let live = LiveDisk::open(FileHost, &top, &options).await.unwrap();
        live.write(0, IoBuf::copy_of(&[1; 4096])).await.unwrap();
        // One that was not closed: who opens it for writing recovers it.
        let crashed = OpenOptions::new().writable(true).metadata(MetadataMode::Journal);
        let disk = Disk::open(FileHost, &other, &crashed).await.unwrap();
        disk.write(0, IoBuf::copy_of(&[2; 4096])).await.unwrap();
        disk.flush().await.unwrap();
        drop(disk);
        let before = fs::read(&other).unwrap();
        fs::rename(&base, path("moved")).unwrap();
        fs::rename(&other, &base).unwrap();
        let commit = CommitOptions {
            base: Some(live.layers()[1].storage().id()),
            ..CommitOptions::default()
        };
        let (job, work) = isobath_jobs::commit(&live, commit, JobOptions::new("commit")).unwrap();
        join(work, isobath_disk_test::complete(&job)).await;
        let error = job.error().unwrap().to_string();
        assert!(error.contains("another file"), "{error}");
        assert!(fs::read(&base).unwrap() == before);
        live.close().await.unwrap();
    });
}
