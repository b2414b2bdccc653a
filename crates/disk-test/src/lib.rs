//! The disk engine, compiled once for all tests.
//!
//! The engine is generic over its host, and the compiler makes its code where a host's type is first known. A test
//! program for [`AnyHost`] that links this crate takes the code from here, if it is compiled at optimisation level 0
//! or 1: the compiler shares it only there. What the [`tour`] leaves out is compiled again in each program, and so are
//! futures, since this crate is optimised.

#![allow(clippy::large_futures, reason = "they are polled where they are made")]

use futures_util::{FutureExt, join};
use isobath_disk::{
    Amend, BitmapAction, BitmapEditor, CheckEvent, CheckOptions, Compare, CopyOptions, Disk,
    DiskCopy, DiskError, InfoOptions, LiveDisk, NewDisk, OpenOptions, Overlay, Preallocation,
    Rebase, Repair, Result, ZeroFlags, amend, apply_snapshot, backing_chain_info, check, create,
    create_snapshot, delete_snapshot, info, measure, read_bitmap,
};
use isobath_jobs::{
    CommitOptions, Job, JobOptions, JobStatus, MirrorOptions, StreamOptions, commit, mirror, stream,
};
use isobath_storage::{BoxFuture, IoBuf, StorageExt};
use isobath_storage_test::any::AnyHost;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const SIZE: u64 = 4 << 20;
const CLUSTER: u64 = 64 << 10;

/// Does everything once that the engine can do, with images in `/tour` on `host`, in an executor of `isobath_ring`.
///
/// # Errors
/// Those of the engine.
pub fn tour(host: AnyHost) -> BoxFuture<'static, Result<()>> {
    Box::pin(async move {
        requests(&host).await?;
        offline(&host).await?;
        live(&host).await
    })
}

fn filled(byte: u8) -> IoBuf {
    let mut buf = IoBuf::zeroed(CLUSTER as usize);
    buf.fill(byte);
    buf
}

async fn requests(host: &AnyHost) -> Result<()> {
    let (base, top) = (Path::new("/tour/base"), Path::new("/tour/top"));
    create(host, base, &NewDisk::new(SIZE)).await?;
    create(host, top, &NewDisk::overlay("base", "qcow2")).await?;
    let writable = OpenOptions::new().writable(true);
    let disk = Disk::open(host.clone(), base, &writable).await?;
    disk.write(0, filled(1)).await?;
    disk.write_compressed(CLUSTER, filled(2)).await?;
    disk.close().await?;
    drop(disk);
    let disk = Disk::open(host.clone(), top, &writable).await?;
    disk.begin_restart_log().await?;
    disk.write(512, IoBuf::zeroed(512)).await?;
    disk.write_zeroes(2 * CLUSTER, CLUSTER, ZeroFlags::default()).await?;
    disk.discard(0, CLUSTER).await?;
    disk.flush().await?;
    disk.read(0, IoBuf::zeroed(CLUSTER as usize)).await?;
    disk.block_status(0, SIZE, 64).await?;
    disk.resize(2 * SIZE, Preallocation::Metadata, false).await?;
    disk.tidy().await?;
    // It has no end.
    let _ = disk.upkeep().now_or_never();
    disk.expand_zeroes().await?;
    disk.write_index(|_| ()).await?;
    let _mismatches = disk.verify_index(|_| ()).await?;
    disk.drop_index().await?;
    disk.close().await
}

async fn offline(host: &AnyHost) -> Result<()> {
    let (base, top) = (Path::new("/tour/base"), Path::new("/tour/top"));
    let (read, writable) = (OpenOptions::new(), OpenOptions::new().writable(true));
    create_snapshot(host, base, &writable, "then", Duration::from_secs(1)).await?;
    apply_snapshot(host, base, &writable, "then").await?;
    delete_snapshot(host, base, &writable, "then").await?;
    let change = Amend { lazy_refcounts: Some(true), ..Amend::default() };
    amend(host, base, &writable, &change).await?;
    let mut editor = BitmapEditor::open(host, base, &writable).await?;
    editor.apply("bits", &BitmapAction::Add(None)).await?;
    editor.finish().await?;
    read_bitmap(host, base, &read, "bits").await?;
    let options = CheckOptions { repair: Repair::All, ..CheckOptions::default() };
    check(host, base, &options, &mut |_: CheckEvent<'_>| ()).await?;
    info(host, top, &InfoOptions::default()).await?;
    backing_chain_info(host, top, &InfoOptions::default()).await?;

    let copy = Path::new("/tour/copy");
    create(host, copy, &NewDisk::new(2 * SIZE)).await?;
    let from = Arc::new(Disk::open(host.clone(), top, &read).await?);
    measure(&NewDisk::new(2 * SIZE), Some(&from)).await?;
    let to = Arc::new(Disk::open(host.clone(), copy, &writable).await?);
    let copying = DiskCopy::new(vec![Arc::clone(&from)], Arc::clone(&to), CopyOptions::default())?;
    copying.count_data().await?;
    copying.work().await?;
    let comparison = Compare::new(from, Arc::clone(&to), false);
    comparison.work().await.map_err(|error| DiskError::Unsupported(format!("{error:?}")))?;
    drop(comparison);
    drop(copying);
    to.close().await?;
    drop(to);

    let disk = Arc::new(Disk::open(host.clone(), top, &writable).await?);
    let rebase = Rebase::new(Arc::clone(&disk), None, false);
    rebase.work().await?;
    rebase.finish(None).await?;
    disk.close().await
}

async fn live(host: &AnyHost) -> Result<()> {
    let options = OpenOptions::new().writable(true);
    let live = LiveDisk::open(host.clone(), Path::new("/tour/base"), &options).await?;
    live.begin_restart_log().await?;
    for (number, name) in ["one", "two", "three"].into_iter().enumerate() {
        live.write(number as u64 * CLUSTER, filled(3)).await?;
        live.snapshot(&Overlay::Create(Path::new("/tour").join(name))).await?;
    }
    live.write_zeroes(0, CLUSTER, ZeroFlags::default()).await?;
    live.discard(CLUSTER, CLUSTER).await?;
    live.read(0, IoBuf::zeroed(CLUSTER as usize)).await?;
    live.block_status(0, SIZE, 64).await?;
    live.flush().await?;
    let _ = live.upkeep().now_or_never();
    let below = live.layers().get(2).map(|layer| layer.storage().id());
    let options = StreamOptions { base: below, ..StreamOptions::default() };
    let (job, run) = stream(&live, options, JobOptions::new("stream"))?;
    run.await;
    ended(&job)?;
    let (job, run) = commit(
        &live,
        CommitOptions { top: below, ..CommitOptions::default() },
        JobOptions::new("commit"),
    )?;
    run.await;
    ended(&job)?;
    live.make_empty().await?;
    live.resize(2 * SIZE, Preallocation::Off, false).await?;
    let target = Path::new("/tour/target");
    create(host, target, &NewDisk::new(2 * SIZE)).await?;
    let target = LiveDisk::open(host.clone(), target, &OpenOptions::new().writable(true)).await?;
    let (job, run) = mirror(&live, &target, MirrorOptions::default(), JobOptions::new("mirror"))?;
    join!(run, complete(&job));
    ended(&job)?;
    drop(target);
    live.close().await
}

/// Completes a job once that is possible, or returns when it has ended.
pub async fn complete(job: &Job) {
    loop {
        let changed = job.changed();
        match job.status() {
            // It may be over by now.
            JobStatus::Ready => return drop(job.complete()),
            JobStatus::Concluded | JobStatus::Null => return,
            _ => changed.await,
        }
    }
}

/// Fails as the job has failed.
fn ended(job: &Job) -> Result<()> {
    job.error().map_or(Ok(()), |error| Err(DiskError::Unsupported(error.to_string())))
}
