//! Encrypted disks that continue in other images than those in which they were opened.

use crate::common::Ticking;
use futures_executor::block_on;
use futures_util::future::join;
use isobath_disk::encryption::{Secret, Secrets};
use isobath_disk::{Disk, LiveDisk, NewDisk, NewEncryption, OpenOptions, Overlay, create};
use isobath_jobs::{CommitOptions, Job, JobOptions, JobStatus, MirrorOptions, MirrorSync};
use isobath_storage::IoBuf;
use isobath_storage::memory::MemoryHost;
use isobath_storage_test::any::{AnyHost, ToAny};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const SIZE: u64 = 1 << 20;

fn secret() -> Arc<Secret> {
    Arc::new(Secret::new(b"of the night".to_vec()).unwrap())
}

async fn image(host: &MemoryHost, name: &str, encrypted: bool, below: Option<&str>) {
    let mut new = NewDisk::new(SIZE);
    if let Some(below) = below {
        new = new.backing_file(below, "qcow2");
    }
    if encrypted {
        let mut encryption = NewEncryption::new(secret());
        encryption.options.iter_time = Duration::from_millis(1);
        new.encryption = Some(encryption);
    }
    new.open_backing = false;
    create(&host.any(), Path::new(name), &new).await.unwrap();
}

/// Options with the secret of the image with so many images above it.
fn options(depth: Option<usize>) -> OpenOptions {
    let mut options = OpenOptions::new().writable(true);
    let mut secrets = Secrets::default();
    if let Some(depth) = depth {
        secrets.set(depth, secret());
    }
    options.secrets = secrets;
    options
}

async fn live(host: &MemoryHost, name: &str, depth: Option<usize>) -> Arc<LiveDisk<AnyHost>> {
    let options = options(depth);
    let disk = Disk::open(host.any(), Path::new(name), &options).await.unwrap();
    LiveDisk::new(disk, &options, Arc::new(Ticking::default()))
}

async fn complete(job: &Job) {
    let mut asked = false;
    loop {
        let changed = job.changed();
        match job.status() {
            JobStatus::Ready if !asked => {
                job.complete().unwrap();
                asked = true;
            }
            JobStatus::Concluded | JobStatus::Null => return,
            _ => {}
        }
        changed.await;
    }
}

/// The disk takes a snapshot, whose overlay is encrypted by the same secret.
async fn takes_a_snapshot(host: &MemoryHost, live: Arc<LiveDisk<AnyHost>>) {
    live.snapshot(&Overlay::Create("overlay".into())).await.unwrap();
    live.write(4096, IoBuf::copy_of(&[8; 4096])).await.unwrap();
    live.close().await.unwrap();
    drop(live);
    let name = Path::new("overlay");
    assert!(Disk::open(host.any(), name, &options(None)).await.is_err(), "it is not encrypted");
    let disk = Disk::open(host.any(), name, &options(Some(0))).await.unwrap();
    let read = disk.read(0, IoBuf::zeroed(8192)).await.unwrap();
    assert!(read[..4096] == [7; 4096] && read[4096..] == [8; 4096]);
}

#[test]
fn a_disk_that_was_mirrored_to_an_encrypted_image_takes_snapshots() {
    block_on(async {
        let host = MemoryHost::new();
        image(&host, "plain", false, None).await;
        image(&host, "target", true, None).await;
        let disk = live(&host, "plain", None).await;
        disk.write(0, IoBuf::copy_of(&[7; 4096])).await.unwrap();
        let target = live(&host, "target", Some(0)).await;
        let mirror = MirrorOptions { sync: MirrorSync::Full };
        let (job, work) =
            isobath_jobs::mirror(&disk, &target, mirror, JobOptions::new("mirror")).unwrap();
        join(work, complete(&job)).await;
        assert_eq!(disk.current().layers().next().unwrap().name(), Path::new("target"));
        takes_a_snapshot(&host, disk).await;
    });
}

#[test]
fn a_disk_that_was_committed_to_an_encrypted_base_takes_snapshots() {
    block_on(async {
        let host = MemoryHost::new();
        image(&host, "base", true, None).await;
        image(&host, "top", false, Some("base")).await;
        let disk = live(&host, "top", Some(1)).await;
        disk.write(0, IoBuf::copy_of(&[7; 4096])).await.unwrap();
        let (job, work) =
            isobath_jobs::commit(&disk, CommitOptions::default(), JobOptions::new("commit"))
                .unwrap();
        join(work, complete(&job)).await;
        assert_eq!(disk.current().layers().next().unwrap().name(), Path::new("base"));
        takes_a_snapshot(&host, disk).await;
    });
}
