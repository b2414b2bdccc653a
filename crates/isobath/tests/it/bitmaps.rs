//! Persistent bitmaps never miss a change: while an image is open, QEMU takes those that track writes for inconsistent;
//! afterwards they have every change, whatever made it.

use crate::common::{Ticking, complete};
use futures_util::join;
use isobath_disk::{Disk, LiveDisk, NewDisk, OpenOptions, ZeroFlags, create, read_bitmap};
use isobath_jobs::pace::Pacing;
use isobath_jobs::{CommitOptions, JobOptions};
use isobath_storage::memory::MemoryHost;
use isobath_storage::{IoBuf, Operation};
use isobath_storage_test::any::ToAny;
use isobath_storage_test::fault::{Fault, FaultHost, Plan};
use isobath_testkit::qemu;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

const CLUSTER: u64 = 64 << 10;
const SIZE: u64 = 4 << 20;

/// An image with a bitmap that tracks writes, as QEMU makes it, below an empty overlay.
async fn images() -> MemoryHost {
    let directory = tempfile::tempdir().unwrap();
    let base = directory.path().join("base.qcow2");
    qemu::create(&base, "qcow2", SIZE, "");
    let _ = qemu::img(["bitmap", "--add", base.to_str().unwrap(), "changes"]).ok();
    let host = MemoryHost::new();
    host.insert("base.qcow2", &std::fs::read(&base).unwrap());
    let new = NewDisk::new(SIZE).backing_file("base.qcow2", "qcow2");
    create(&host.any(), Path::new("top.qcow2"), &new).await.unwrap();
    host
}

/// Whether QEMU takes the bitmap for one that knows every change.
fn is_trusted(host: &MemoryHost) -> bool {
    let directory = tempfile::tempdir().unwrap();
    let base = directory.path().join("base.qcow2");
    std::fs::write(&base, host.contents("base.qcow2").unwrap()).unwrap();
    let info = qemu::img(["info", base.to_str().unwrap()]).ok().text();
    assert!(info.contains("changes"), "{info}");
    !info.contains("in-use")
}

fn options() -> OpenOptions {
    OpenOptions::new().writable(true)
}

/// The ranges that the bitmap claims to have changed.
async fn changes(host: &MemoryHost) -> Vec<Range<u64>> {
    let base = Path::new("base.qcow2");
    let bits = read_bitmap(&host.any(), base, &OpenOptions::new(), "changes").await.unwrap();
    bits.ranges().collect()
}

#[test]
fn a_commit_is_noted_whether_it_copies_or_shares() {
    for (kind, clones) in (0..3).flat_map(|kind| [(kind, true), (kind, false)]) {
        futures_executor::block_on(async {
            let host = images().await;
            host.set_clone_alignment(clones.then_some(512));
            assert!(is_trusted(&host));
            let top = Path::new("top.qcow2");
            let disk = Disk::open(host.any(), top, &options()).await.unwrap();
            let live = LiveDisk::new(disk, &options(), Arc::new(Ticking::default()));
            let bytes = IoBuf::copy_of(&vec![7; 2 * CLUSTER as usize]);
            let changed = match kind {
                0 => {
                    drop(live.write(CLUSTER, bytes).await.unwrap());
                    CLUSTER..3 * CLUSTER
                }
                1 => {
                    drop(live.write(CLUSTER + 512, bytes).await.unwrap());
                    CLUSTER..4 * CLUSTER
                }
                _ => {
                    live.write_zeroes(CLUSTER, CLUSTER, ZeroFlags::default()).await.unwrap();
                    CLUSTER..2 * CLUSTER
                }
            };
            live.flush().await.unwrap();
            let job = JobOptions { pacing: Pacing::None, ..JobOptions::new("commit") };
            let (job, work) = isobath_jobs::commit(&live, CommitOptions::default(), job).unwrap();
            join!(work, complete(&job));
            assert!(job.error().is_none(), "{:?}", job.error());
            assert!(!is_trusted(&host), "kind {kind}, clones: {clones}");
            live.close().await.unwrap();
            drop(live);
            assert!(is_trusted(&host), "kind {kind}, clones: {clones}");
            assert_eq!(changes(&host).await, [changed], "kind {kind}, clones: {clones}");
        });
    }
}

/// A close that failed while it brought bitmaps up to date can be asked for again.
#[test]
fn a_close_that_failed_is_made_up_for_by_another() {
    futures_executor::block_on(async {
        let image = images().await.contents("base.qcow2").unwrap();
        let directory = tempfile::tempdir().unwrap();
        let base = directory.path().join("base.qcow2");
        std::fs::write(&base, image).unwrap();
        let _ = qemu::img(["bitmap", "--add", base.to_str().unwrap(), "others"]).ok();
        let image = std::fs::read(&base).unwrap();
        let (mut failed, mut made_up) = (0, 0);
        for (operation, after) in [Operation::Write, Operation::Flush]
            .into_iter()
            .flat_map(|operation| (0..40).map(move |after| (operation, after)))
        {
            let host = MemoryHost::new();
            host.insert("base.qcow2", &image);
            let plan = Plan::new();
            let faulty = FaultHost::new(host.clone(), plan.clone());
            let path = Path::new("base.qcow2");
            let disk = Disk::open(faulty.any(), path, &options()).await.unwrap();
            drop(disk.write(CLUSTER, IoBuf::copy_of(&[7; 4096])).await.unwrap());
            disk.flush().await.unwrap();
            plan.add(Fault::new(operation, after).errno(libc::EIO));
            let first = disk.close().await;
            plan.clear();
            let second = disk.close().await;
            failed += u32::from(first.is_err());
            made_up += u32::from(first.is_err() && second.is_ok());
            drop(disk);
            if first.is_ok() || second.is_ok() {
                std::fs::write(&base, host.contents("base.qcow2").unwrap()).unwrap();
                // A table whose write failed may be in the file: what it refers to is left.
                let checked = qemu::check(&base);
                let leaks = u64::from(first.is_err());
                assert!(
                    checked.json()["leaks"].as_u64().unwrap_or(0) <= leaks,
                    "{}",
                    checked.report()
                );
                assert!([0, 3].contains(&checked.code()), "{}", checked.report());
                // One that was not brought up to date stays inconsistent.
                if !is_trusted(&host) {
                    assert!(plan.injected() > 0, "{operation:?} {after}");
                    continue;
                }
                for bitmap in ["changes", "others"] {
                    let (host, options) = (host.any(), OpenOptions::new());
                    let bits = read_bitmap(&host, path, &options, bitmap).await.unwrap();
                    let ranges: Vec<_> = bits.ranges().collect();
                    let written = CLUSTER..2 * CLUSTER;
                    assert_eq!(ranges, std::slice::from_ref(&written), "{operation:?} {after}");
                }
            }
        }
        assert!(failed > 3 && made_up > 1, "{failed} failed, {made_up} made up for");
    });
}
