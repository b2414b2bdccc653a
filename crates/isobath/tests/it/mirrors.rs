//! Mirrors: what their targets hold when they end, and what may be done with them before.

use crate::common::Ticking;
use futures_executor::block_on;
use futures_util::join;
use isobath_disk::{Disk, DiskError, LiveDisk, NewDisk, OpenOptions, Preallocation, create};
use isobath_jobs::pace::Pacing;
use isobath_jobs::{Job, JobOptions, JobStatus, MirrorOptions, MirrorSync};
use isobath_storage::IoBuf;
use isobath_storage::memory::MemoryHost;
use isobath_storage_test::any::{AnyHost, ToAny};
use std::path::Path;
use std::sync::Arc;

const SIZE: u64 = 80 << 20;
const PIECE: usize = 64 << 10;

async fn live(host: &MemoryHost, name: &str) -> Arc<LiveDisk<AnyHost>> {
    create(&host.any(), Path::new(name), &NewDisk::new(SIZE)).await.unwrap();
    let options = OpenOptions::new().writable(true);
    let disk = Disk::open(host.any(), Path::new(name), &options).await.unwrap();
    LiveDisk::new(disk, &options, Arc::new(Ticking::default()))
}

async fn write(disk: &LiveDisk<AnyHost>, offset: u64, byte: u8) {
    disk.write(offset, IoBuf::copy_of(&vec![byte; PIECE])).await.unwrap();
}

async fn until(job: &Job, status: JobStatus) {
    loop {
        let changed = job.changed();
        match job.status() {
            JobStatus::Null if status == JobStatus::Concluded => return,
            now if now == status => return,
            _ => {}
        }
        assert!(job.error().is_none(), "{:?}", job.error());
        changed.await;
    }
}

/// A guest writes while the job is about to end: to one place, then to another.
async fn left(writes_last: bool) {
    let host = MemoryHost::new();
    let (source, target) = (live(&host, "source.qcow2").await, live(&host, "target.qcow2").await);
    write(&source, 0, 1).await;
    let options =
        JobOptions { pacing: Pacing::None, auto_finalize: false, ..JobOptions::new("mirror") };
    let sync = MirrorOptions { sync: MirrorSync::Full };
    let (job, work) = isobath_jobs::mirror(&source, &target, sync, options).unwrap();
    let guest = async {
        until(&job, JobStatus::Ready).await;
        // More than is ever left for the end.
        for piece in 0..64 {
            write(&source, piece << 20, 2).await;
        }
        job.cancel(false).unwrap();
        until(&job, JobStatus::Pending).await;
        if writes_last {
            write(&source, 0, 3).await;
            source.discard(1 << 20, PIECE as u64).await.unwrap();
            write(&source, SIZE - PIECE as u64, 4).await;
        }
        job.finalize().unwrap();
        until(&job, JobStatus::Concluded).await;
    };
    join!(Box::pin(work), guest);
    assert!(job.error().is_none(), "{:?}", job.error());
    for (name, disk) in [("source", &source), ("target", &target)] {
        assert!(disk.layers()[0].name().to_string_lossy().starts_with(name));
    }
    // What the guest writes from now on is not the copy's any more.
    let read = |disk: Arc<LiveDisk<AnyHost>>| async move {
        disk.read(0, IoBuf::zeroed(SIZE as usize)).await.unwrap()
    };
    let expected = read(Arc::clone(&source)).await;
    write(&source, 0, 5).await;
    target.close().await.unwrap();
    drop(target);
    let name = Path::new("target.qcow2");
    let copy = Disk::open(host.any(), name, &OpenOptions::new()).await.unwrap();
    let found = copy.read(0, IoBuf::zeroed(SIZE as usize)).await.unwrap();
    let differs = found.iter().zip(expected.iter()).position(|(found, expected)| found != expected);
    assert_eq!(differs, None);
}

#[test]
fn a_mirror_that_is_left_holds_the_disk_as_it_was_at_one_moment() {
    for writes_last in [false, true] {
        block_on(left(writes_last));
    }
}

#[test]
fn the_target_of_a_mirror_is_its_own_until_it_ends() {
    block_on(async {
        let host = MemoryHost::new();
        let source = live(&host, "source.qcow2").await;
        let target = live(&host, "target.qcow2").await;
        let third = live(&host, "third.qcow2").await;
        let sync = MirrorOptions { sync: MirrorSync::Full };
        let job = |id| JobOptions { pacing: Pacing::None, ..JobOptions::new(id) };
        let (mirror, work) = isobath_jobs::mirror(&source, &target, sync, job("first")).unwrap();
        let refused = |error: DiskError| {
            let error = error.to_string();
            assert!(error.contains("in use by block job"), "{error}");
        };
        let operator = async {
            until(&mirror, JobStatus::Ready).await;
            refused(target.resize(SIZE / 2, Preallocation::Off, true).await.unwrap_err());
            refused(source.resize(2 * SIZE, Preallocation::Off, false).await.unwrap_err());
            let to_target = isobath_jobs::mirror(&third, &target, sync, job("second"));
            refused(to_target.map(drop).unwrap_err());
            let from_target = isobath_jobs::mirror(&target, &third, sync, job("third"));
            refused(from_target.map(drop).unwrap_err());
            mirror.cancel(true).unwrap();
            until(&mirror, JobStatus::Concluded).await;
            target.resize(SIZE / 2, Preallocation::Off, true).await.unwrap();
            third.resize(2 * SIZE, Preallocation::Off, false).await.unwrap();
        };
        join!(Box::pin(work), operator);
    });
}
