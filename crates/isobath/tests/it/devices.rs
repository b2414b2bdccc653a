//! Images on block devices: of a fixed length, and holding anything where nothing was written.

use crate::common::{findings, make};
use futures_executor::block_on;
use isobath_disk::{Disk, MetadataMode, OpenOptions, Preallocation};
use isobath_qcow2::NewImage;
use isobath_storage::memory::MemoryHost;
use isobath_storage::{Host, IoBuf, OpenMode, Storage, StorageExt};
use isobath_storage_test::any::{AnyHost, ToAny};
use isobath_testkit::qemu;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

const NAME: &str = "device";
const CLUSTER: u64 = 4096;

/// A device of `clusters` with an empty image on it.
async fn device(size: u64, clusters: u64, refcount_order: u32) -> MemoryHost {
    let host = MemoryHost::new();
    let mut image = NewImage::new(size);
    image.cluster_bits = CLUSTER.trailing_zeros();
    image.refcount_order = refcount_order;
    make(&host, NAME, &image).await;
    let mode = OpenMode { writable: true, ..OpenMode::default() };
    let file = host.open(Path::new(NAME), mode).await.unwrap();
    let used = file.len().await.unwrap();
    let rest = vec![0xdd; (clusters * CLUSTER - used) as usize];
    file.write_at(used, IoBuf::copy_of(&rest)).await.unwrap();
    host.set_devices(true);
    host
}

async fn open(host: &MemoryHost, metadata: MetadataMode) -> Disk<AnyHost> {
    let options = OpenOptions::new().writable(true).metadata(metadata).journal_size(64 << 10);
    Disk::open(host.any(), Path::new(NAME), &options).await.unwrap()
}

async fn assert_clean(host: &MemoryHost) {
    let found = findings(host, NAME).await;
    assert!(found.is_empty(), "{found:?}");
}

/// The image has these clusters as they were written, and no errors.
async fn assert_has(host: &MemoryHost, metadata: MetadataMode, clusters: &[u64]) {
    let disk = open(host, metadata).await;
    for n in clusters {
        let found = disk.read(n * CLUSTER, IoBuf::zeroed(CLUSTER as usize)).await;
        assert!(*found.unwrap() == bytes(*n), "{n}");
    }
    disk.close().await.unwrap();
    drop(disk);
    assert_clean(host).await;
}

fn bytes(tag: u64) -> Vec<u8> {
    vec![(tag % 255) as u8 + 1; CLUSTER as usize]
}

/// Data, then a longer L1 table, then a longer refcount table: each is found room for.
#[test]
fn tables_grow_on_a_device() {
    for metadata in MetadataMode::ALL {
        block_on(async {
            // A refcount block counts 512 clusters, and a table of one cluster lists 512 of those.
            let host = device(1 << 20, 40 << 10, 6).await;
            let disk = open(&host, metadata).await;
            disk.write(0, IoBuf::copy_of(&bytes(0))).await.unwrap();
            disk.flush().await.unwrap();
            disk.resize(4 << 30, Preallocation::Off, false).await.unwrap();
            let count = 600;
            for n in 1..count {
                disk.write(n * CLUSTER * 513, IoBuf::copy_of(&bytes(n))).await.unwrap();
                if n % 37 == 0 {
                    disk.flush().await.unwrap();
                }
            }
            disk.close().await.unwrap();
            drop(disk);
            let disk = open(&host, metadata).await;
            for n in 0..count {
                let at = n * CLUSTER * 513;
                let found = disk.read(at, IoBuf::zeroed(2 * CLUSTER as usize)).await.unwrap();
                assert!(found[..CLUSTER as usize] == bytes(n), "{n}");
                assert!(found[CLUSTER as usize..].iter().all(|byte| *byte == 0), "behind {n}");
            }
            disk.close().await.unwrap();
            drop(disk);
            assert_clean(&host).await;
        });
    }
}

/// A device that has room for all of its disk, and for no journal beside it, takes all of the guest's data.
#[test]
fn a_journal_takes_no_room_that_the_guest_needs() {
    for metadata in MetadataMode::ALL {
        // The header, the L1 table, one L2 table, the refcount table and a block.
        for spare in [5, 8, 9, 13, 20, 40, 300] {
            block_on(async {
                let size = 1 << 20;
                let host = device(size, size / CLUSTER + spare, 4).await;
                let options = OpenOptions::new().writable(true).metadata(metadata);
                let disk = Disk::open(host.any(), Path::new(NAME), &options).await.unwrap();
                for n in 0..size / CLUSTER {
                    disk.write(n * CLUSTER, IoBuf::copy_of(&bytes(n))).await.unwrap();
                    if n % 50 == 0 {
                        disk.flush().await.unwrap();
                    }
                }
                disk.close().await.unwrap();
                drop(disk);
                assert_clean(&host).await;
            });
        }
    }
}

/// A guest that fills a device is told so, and can go on with what there is.
#[test]
fn a_full_device_fails_writes_and_nothing_else() {
    for metadata in MetadataMode::ALL {
        for clusters in 40..60 {
            block_on(async {
                let host = device(4 << 20, clusters, 4).await;
                let disk = open(&host, metadata).await;
                let mut written = Vec::new();
                for n in 0..64 {
                    match disk.write(n * CLUSTER, IoBuf::copy_of(&bytes(n))).await {
                        Ok(_) => written.push(n),
                        Err(error) => assert_eq!(error.errno(), libc::ENOSPC, "{error}"),
                    }
                    disk.flush().await.unwrap();
                }
                assert!(!written.is_empty() && written.len() < 64, "{written:?}");
                // What is freed can be used again.
                let first = written.remove(0);
                disk.discard(first * CLUSTER, CLUSTER).await.unwrap();
                disk.flush().await.unwrap();
                disk.flush().await.unwrap();
                disk.write(63 * CLUSTER, IoBuf::copy_of(&bytes(63))).await.unwrap();
                written.push(63);
                disk.close().await.unwrap();
                drop(disk);
                assert_has(&host, metadata, &written).await;
            });
        }
    }
}

/// An index that finds no room is not written, and the disk goes on.
#[test]
fn an_index_for_which_a_device_has_no_room_is_refused() {
    block_on(async {
        let base = MemoryHost::new();
        let mut image = NewImage::new(4 << 20);
        image.cluster_bits = CLUSTER.trailing_zeros();
        make(&base, "base", &image).await;
        let (mut written, mut refused) = (0, 0);
        for spare in 2..12 {
            let host = MemoryHost::new();
            host.insert("base", &base.contents("base").unwrap());
            image.backing_file = Some("base".into());
            image.backing_format = Some("qcow2".into());
            make(&host, NAME, &image).await;
            let mut all = host.contents(NAME).unwrap();
            all.resize(all.len() + spare * CLUSTER as usize, 0xdd);
            host.insert(NAME, &all);
            host.set_devices(true);
            let disk = open(&host, MetadataMode::Ordered).await;
            disk.write(0, IoBuf::copy_of(&bytes(1))).await.unwrap();
            disk.flush().await.unwrap();
            match disk.write_index(|_| {}).await {
                Ok(_) => written += 1,
                Err(error) => {
                    assert_eq!(error.errno(), libc::ENOSPC, "{error}");
                    refused += 1;
                }
            }
            disk.write(0, IoBuf::copy_of(&bytes(2))).await.unwrap();
            disk.flush().await.unwrap();
            disk.close().await.unwrap();
            drop(disk);
            assert_has(&host, MetadataMode::Ordered, &[]).await;
        }
        assert!(written > 0 && refused > 0, "{written} written, {refused} refused");
    });
}

/// What QEMU says of the image: its bitmaps' marks, in order of their names.
fn marks(host: &MemoryHost) -> Vec<bool> {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join(NAME);
    fs::write(&image, host.contents(NAME).unwrap()).unwrap();
    let info = qemu::img(["info", "--output=json", image.to_str().unwrap()]).ok().json();
    let bitmaps = info["format-specific"]["data"]["bitmaps"].as_array().unwrap().clone();
    let is_marked = |bitmap: &Value| bitmap["flags"].to_string().contains("in-use");
    bitmaps.iter().map(is_marked).collect()
}

/// A bitmap that finds no room for its bits stays marked as inconsistent, and the image can be closed. One that needs
/// none is stored.
#[test]
fn an_image_on_a_full_device_can_be_closed_whatever_its_bitmaps_need() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join(NAME);
    qemu::create(&image, "qcow2", 4 << 20, "cluster_size=4096");
    for bitmap in ["a", "b"] {
        let _ = qemu::img(["bitmap", "--add", image.to_str().unwrap(), bitmap]).ok();
    }
    let made = fs::read(&image).unwrap();
    let mut seen = BTreeSet::new();
    for (metadata, spare) in
        MetadataMode::ALL.into_iter().flat_map(|mode| (0..6).map(move |n| (mode, n)))
    {
        block_on(async {
            let host = MemoryHost::new();
            let used = made.len() as u64 / CLUSTER;
            let mut contents = made.clone();
            contents.resize(((used + 24) * CLUSTER) as usize, 0xdd);
            host.insert(NAME, &contents);
            host.set_devices(true);
            let disk = open(&host, metadata).await;
            let mut written = Vec::new();
            for n in 0..32 {
                match disk.write(n * CLUSTER, IoBuf::copy_of(&bytes(n))).await {
                    Ok(_) => written.push(n),
                    Err(error) => assert_eq!(error.errno(), libc::ENOSPC, "{error}"),
                }
            }
            assert!(written.len() < 32);
            for n in written.drain(..spare) {
                disk.discard(n * CLUSTER, CLUSTER).await.unwrap();
            }
            disk.close().await.unwrap();
            drop(disk);
            seen.insert(marks(&host));
            assert_has(&host, metadata, &written).await;
        });
    }
    let expected = [vec![false, false], vec![false, true], vec![true, true]];
    assert_eq!(seen, BTreeSet::from(expected));
}
