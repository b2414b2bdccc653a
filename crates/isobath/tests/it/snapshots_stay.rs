//! Internal snapshots, made by QEMU, hold what they held whatever is written afterwards.

use crate::common::make;
use isobath_disk::sabotage::Sabotage;
use isobath_disk::{
    BitmapAction, BitmapEditor, CheckOptions, Disk, MetadataMode, OpenOptions, Repair, ZeroFlags,
    apply_snapshot, check, create_snapshot, delete_snapshot,
};
use isobath_qcow2::NewImage;
use isobath_ring::block_on;
use isobath_storage::memory::MemoryHost;
use isobath_storage::{IoBuf, Operation};
use isobath_storage_file::FileHost;
use isobath_storage_test::any::{AnyHost, ToAny};
use isobath_storage_test::fault::{Fault, FaultHost, Plan};
use isobath_testkit::{args, qemu};
use std::fs;
use std::panic::catch_unwind;
use std::path::Path;
use std::time::Duration;

const SIZE: u64 = 1 << 20;

async fn open(image: &Path) -> Disk<AnyHost> {
    let options = OpenOptions::new().writable(true);
    Disk::open(FileHost.any(), image, &options).await.unwrap()
}

/// A disk full of sevens with a snapshot of that.
fn with_snapshot(image: &Path, options: &str) {
    qemu::create(image, "qcow2", SIZE, options);
    let _ = qemu::io(image, "qcow2", &[format!("write -P 7 0 {SIZE}")]).ok();
    let _ = qemu::img(args!["snapshot", "-c", "sevens", image]).ok();
}

fn assert_snapshot_stays(image: &Path) {
    qemu::assert_clean(image);
    let raw = image.with_extension("raw");
    let _ = qemu::img(args!["convert", "-l", "sevens", "-O", "raw", image, &raw]).ok();
    let bytes = fs::read(raw).unwrap();
    assert_eq!(bytes.iter().position(|byte| *byte != 7), None, "the snapshot changed");
}

#[test]
fn a_partly_zeroed_cluster_stays_the_snapshots() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image.qcow2");
    with_snapshot(&image, "extended_l2=on");
    block_on(async {
        let disk = open(&image).await;
        disk.read(0, IoBuf::zeroed(65536)).await.unwrap();
        // Whole subclusters in the table, the rest of one as data.
        let flags = ZeroFlags { may_unmap: true, only_fast: false };
        disk.write_zeroes(0, 2048 + 1536, flags).await.unwrap();
        disk.write(6000, IoBuf::copy_of(&[9; 100])).await.unwrap();
        disk.close().await.unwrap();
    });
    let mut expected = vec![7; SIZE as usize];
    expected[..3584].fill(0);
    expected[6000..6100].fill(9);
    assert!(qemu::read_disk(&image, "qcow2") == expected);
    assert_snapshot_stays(&image);
}

#[test]
fn zeroes_writes_and_discards_spare_the_snapshot() {
    for options in ["", "extended_l2=on", "compat=0.10", "cluster_size=512"] {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("image.qcow2");
        with_snapshot(&image, options);
        block_on(async {
            let disk = open(&image).await;
            for (n, offset) in (0..SIZE - 200_000).step_by(70_001).enumerate() {
                let flags = ZeroFlags { may_unmap: n % 2 == 0, only_fast: false };
                disk.write_zeroes(offset, 30_000, flags).await.unwrap();
                disk.write(offset + 20_000, IoBuf::copy_of(&vec![9; 20_000])).await.unwrap();
                disk.discard(offset + 45_000, 65_536).await.unwrap();
            }
            disk.close().await.unwrap();
        });
        assert_snapshot_stays(&image);
    }
}

#[test]
fn a_change_that_fails_leaves_the_image_as_it_was() {
    let mut injected = ["create", "apply", "delete", "bitmap"].map(|deed| (deed, 0));
    for (deed, injected) in &mut injected {
        for operation in [Operation::Write, Operation::SetLength, Operation::Flush] {
            for after in 0.. {
                let plan = Plan::new();
                let failed = block_on(one_change(deed, &plan, operation, after));
                if plan.injected() == 0 {
                    break;
                }
                assert!(failed, "{deed}: {operation:?} {after} failed, and nobody says so");
                *injected += 1;
            }
        }
    }
    assert!(injected.iter().all(|(_, count)| *count > 5), "{injected:?}");
}

#[test]
fn a_change_may_take_the_clusters_for_which_the_refcount_table_has_to_grow() {
    // A table of one cluster counts 2 MiB.
    let mut grown = [0; 2];
    for clusters in 3880..4000 {
        block_on(async {
            let host = MemoryHost::new();
            let name = Path::new("disk.qcow2");
            let mut image = NewImage::new(4 << 20);
            (image.cluster_bits, image.refcount_order) = (9, 6);
            make(&host, "disk.qcow2", &image).await;
            let options = OpenOptions::new().writable(true).metadata(MetadataMode::Ordered);
            let disk = Disk::open(host.any(), name, &options).await.unwrap();
            disk.write(0, IoBuf::copy_of(&vec![1; clusters * 512])).await.unwrap();
            disk.close().await.unwrap();
            drop(disk);
            let table_clusters = || host.contents("disk.qcow2").unwrap()[56..60].to_vec();
            let before = table_clusters();
            if clusters % 2 == 0 {
                let taken = Duration::from_secs(1);
                create_snapshot(&host.any(), name, &options, "now", taken).await.unwrap();
            } else {
                let mut editor = BitmapEditor::open(&host.any(), name, &options).await.unwrap();
                editor.apply("bits", &BitmapAction::Add(Some(512))).await.unwrap();
                Box::pin(editor.finish()).await.unwrap();
            }
            grown[clusters % 2] += usize::from(table_clusters() != before);
            let none = CheckOptions::default();
            let report = check(&host.any(), name, &none, &mut |_| {}).await.unwrap();
            assert!(report.is_clean(), "{clusters}: {report:?}");
        });
    }
    assert!(grown.iter().all(|times| (1..30).contains(times)), "the table has grown {grown:?}");
}

#[test]
fn what_a_failed_change_takes_and_does_not_free_is_found() {
    let broken = Sabotage::KeptTaken.begin();
    let failed = catch_unwind(a_change_that_fails_leaves_the_image_as_it_was);
    drop(broken);
    assert!(failed.is_err());
}

/// Changes an image while one operation fails, and says whether the change did.
async fn one_change(deed: &str, plan: &Plan, operation: Operation, after: u64) -> bool {
    let memory = MemoryHost::new();
    let name = Path::new("disk.qcow2");
    make(&memory, "disk.qcow2", &NewImage::new(1 << 20)).await;
    let options = OpenOptions::new().writable(true);
    let taken = Duration::from_secs(1);
    let write = async |tag: u8| {
        let disk = Disk::open(memory.any(), name, &options).await.unwrap();
        disk.write(0, IoBuf::copy_of(&[tag; 4096])).await.unwrap();
        disk.close().await.unwrap();
    };
    write(1).await;
    create_snapshot(&memory.any(), name, &options, "then", taken).await.unwrap();
    write(2).await;
    let host = FaultHost::new(memory.clone(), plan.clone()).any();
    plan.add(Fault::new(operation, after).errno(libc::ENOSPC));
    let done = match deed {
        "create" => create_snapshot(&host, name, &options, "now", taken).await,
        "apply" => apply_snapshot(&host, name, &options, "then").await,
        "delete" => delete_snapshot(&host, name, &options, "then").await,
        _ => match BitmapEditor::open(&host, name, &options).await {
            Ok(mut editor) => match editor.apply("bits", &BitmapAction::Add(None)).await {
                Ok(()) => Box::pin(editor.finish()).await,
                failed => failed,
            },
            Err(error) => Err(error),
        },
    };
    drop(host);
    let what = format!("{deed}, {operation:?} {after}: {done:?}");
    let disk = Disk::open(memory.any(), name, &OpenOptions::new().writable(true)).await.unwrap();
    let found = disk.read(0, IoBuf::zeroed(4096)).await.unwrap();
    disk.close().await.unwrap();
    drop(disk);
    let both = deed == "apply" && found.iter().all(|byte| *byte == 1);
    assert!(both || found.iter().all(|byte| *byte == 2), "{what}");
    // After a failed flush nothing more is written: what was taken is lost until a repair.
    if operation == Operation::Flush {
        let leaks = CheckOptions { repair: Repair::Leaks, ..CheckOptions::default() };
        check(&memory.any(), name, &leaks, &mut |_| {}).await.unwrap();
    }
    let report = check(&memory.any(), name, &CheckOptions::default(), &mut |_| {}).await.unwrap();
    assert!(report.is_clean(), "{what}: {report:?}");
    done.is_err()
}
