//! Internal snapshots, made by QEMU, hold what they held whatever is written afterwards.

use isobath_disk::{Disk, OpenOptions, ZeroFlags};
use isobath_ring::block_on;
use isobath_storage::IoBuf;
use isobath_storage::file::FileHost;
use isobath_storage_test::any::{AnyHost, ToAny};
use isobath_testkit::{args, qemu};
use std::fs;
use std::path::Path;

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
