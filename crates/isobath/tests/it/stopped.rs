//! What cannot be, and is met all the same, stops the disk: the request fails, no later one changes anything, and
//! what was flushed is there when the image is opened again.

use crate::common::{findings, make};
use futures_executor::block_on;
use futures_util::FutureExt;
use isobath_disk::sabotage::Sabotage;
use isobath_disk::{Disk, DiskError, MetadataMode, OpenOptions};
use isobath_qcow2::NewImage;
use isobath_storage::IoBuf;
use isobath_storage::memory::MemoryHost;
use isobath_storage_test::any::{AnyHost, ToAny};
use std::panic::AssertUnwindSafe;
use std::path::Path;

const NAME: &str = "disk.qcow2";
const CLUSTER: usize = 65536;

async fn open(host: &MemoryHost, metadata: MetadataMode) -> Disk<AnyHost> {
    let options = OpenOptions::new().writable(true).metadata(metadata);
    Disk::open(host.any(), Path::new(NAME), &options).await.unwrap()
}

async fn write(disk: &Disk<AnyHost>, cluster: usize) -> isobath_disk::Result<IoBuf> {
    disk.write((cluster * CLUSTER) as u64, IoBuf::copy_of(&vec![7; CLUSTER])).await
}

async fn first_byte(disk: &Disk<AnyHost>, cluster: usize) -> u8 {
    disk.read((cluster * CLUSTER) as u64, IoBuf::zeroed(512)).await.unwrap()[0]
}

/// What was flushed is read, and nothing more is written, also by a close.
async fn is_stopped(host: &MemoryHost, disk: Disk<AnyHost>, metadata: MetadataMode) {
    assert_eq!(first_byte(&disk, 0).await, 7);
    let poisoned = |done: Result<(), DiskError>| {
        let error = done.unwrap_err();
        assert!(matches!(error, DiskError::Poisoned { .. }), "{error}");
        assert!(
            error.to_string().contains("internal error") || error.to_string().contains("panicked"),
            "{error}"
        );
    };
    poisoned(write(&disk, 2).await.map(drop));
    poisoned(disk.flush().await);
    poisoned(disk.close().await);
    drop(disk);
    let mut found = findings(host, NAME).await;
    if metadata == MetadataMode::Ordered {
        // As after a crash.
        found.retain(|text| !text.starts_with("Leaked cluster"));
    }
    assert_eq!(found, Vec::<String>::new());
    let again = open(host, metadata).await;
    assert_eq!(first_byte(&again, 0).await, 7);
    // It was never flushed.
    assert!(matches!(first_byte(&again, 1).await, 0 | 7));
    write(&again, 1).await.unwrap();
    again.close().await.unwrap();
    drop(again);
    assert_eq!(findings(host, NAME).await, Vec::<String>::new());
}

async fn with_a_flushed_cluster(metadata: MetadataMode) -> (MemoryHost, Disk<AnyHost>) {
    let host = MemoryHost::new();
    make(&host, NAME, &NewImage::new(64 << 20)).await;
    let disk = open(&host, metadata).await;
    write(&disk, 0).await.unwrap();
    disk.flush().await.unwrap();
    (host, disk)
}

#[test]
fn an_invariant_that_does_not_hold_is_named_and_stops_the_disk() {
    for metadata in [MetadataMode::Ordered, MetadataMode::Journal, MetadataMode::Embedded] {
        block_on(async {
            let (host, disk) = with_a_flushed_cluster(metadata).await;
            let broken = Sabotage::LostPlace.begin();
            let mut failed = write(&disk, 1).await;
            // A cluster of a zone has its place from there.
            let mut cluster = 100;
            while failed.is_ok() {
                failed = write(&disk, cluster).await;
                cluster += 1;
            }
            drop(broken);
            let error = failed.unwrap_err();
            assert!(matches!(error, DiskError::Internal { .. }), "{error}");
            let text = error.to_string();
            assert!(text.contains("a cluster that is written has a place"), "{text}");
            assert!(text.contains(NAME) && !text.contains("check -r"), "{text}");
            is_stopped(&host, disk, metadata).await;
        });
    }
}

#[test]
fn a_request_that_panics_stops_the_disk() {
    for metadata in [MetadataMode::Ordered, MetadataMode::Journal] {
        block_on(async {
            let (host, disk) = with_a_flushed_cluster(metadata).await;
            let broken = Sabotage::ForeignUnit.begin();
            let panicked = AssertUnwindSafe(write(&disk, 1)).catch_unwind().await;
            drop(broken);
            let payload = panicked.unwrap_err();
            let text = payload.downcast_ref::<String>().unwrap();
            assert!(text.contains("units are changed in their own slice"), "{text}");
            is_stopped(&host, disk, metadata).await;
        });
    }
}
