//! A disk that is stopped: what is in flight ends and is durable, and nothing else begins until it goes on.

use crate::common::{Ticking, make};
use futures_executor::block_on;
use futures_util::FutureExt;
use futures_util::future::join;
use isobath_disk::throttle::Direction;
use isobath_disk::{Disk, DiskError, LiveDisk, MetadataMode, OpenOptions, Overlay, ZeroFlags};
use isobath_qcow2::NewImage;
use isobath_storage::IoBuf;
use isobath_storage::memory::MemoryHost;
use isobath_storage_test::any::{AnyHost, ToAny};
use isobath_storage_test::fault::{FaultHost, Plan};
use isobath_testkit::bytes::first_other_than;
use std::cell::RefCell;
use std::future::Future;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;

const NAME: &str = "disk.qcow2";
const PIECE: u64 = 64 << 10;
/// More than is discarded or made zero in one step.
const LARGE: u64 = 512 << 20;

/// A disk whose storage takes its time.
fn disk(memory: &MemoryHost) -> Arc<LiveDisk<AnyHost>> {
    let plan = Plan::new();
    let host = FaultHost::new(memory.clone(), plan.clone());
    let options = OpenOptions::new().writable(true).metadata(MetadataMode::Ordered);
    let disk = block_on(async {
        make(memory, NAME, &NewImage::new(LARGE)).await;
        Disk::open(host.any(), Path::new(NAME), &options).await.unwrap()
    });
    plan.delay(7919);
    LiveDisk::new(disk, &options, Arc::new(Ticking::default()))
}

/// A client's write, as a frontend passes it on.
async fn write(disk: &LiveDisk<AnyHost>, piece: u64, tag: u8) -> Result<(), DiskError> {
    let _inside = disk.pausing().pass(Direction::Write).await;
    disk.write(piece * PIECE, IoBuf::copy_of(&vec![tag; PIECE as usize])).await.map(drop)
}

async fn zero(disk: &LiveDisk<AnyHost>, offset: u64, length: u64) -> Result<(), DiskError> {
    let _inside = disk.pausing().pass(Direction::Write).await;
    disk.write_zeroes(offset, length, ZeroFlags { may_unmap: true, only_fast: false }).await
}

async fn flush(disk: &LiveDisk<AnyHost>) -> Result<(), DiskError> {
    let _inside = disk.pausing().pass_flush().await;
    disk.flush().await
}

/// A copy of the files that is made now has this.
fn assert_holds(memory: &MemoryHost, name: &str, piece: u64, tag: u8) {
    let found = block_on(async {
        let copy = memory.deep_copy();
        let disk = Disk::open(copy.any(), Path::new(name), &OpenOptions::new()).await.unwrap();
        disk.read(piece * PIECE, IoBuf::zeroed(PIECE as usize)).await.unwrap()
    });
    assert_eq!(first_other_than(tag, &found), None, "piece {piece}: {:x?}", &found[..16]);
}

/// Runs a request until it is in flight. It may be made several times.
fn in_flight<F: Future<Output = Result<(), DiskError>>>(make: impl Fn() -> F) -> Pin<Box<F>> {
    loop {
        let mut request = Box::pin(make());
        if request.as_mut().now_or_never().is_none() {
            return request;
        }
    }
}

/// Stops a disk on which this request is in flight: the stop must wait for it.
async fn stop_beside(
    disk: &LiveDisk<AnyHost>,
    request: impl Future<Output = Result<(), DiskError>>,
) {
    disk.pausing().stop();
    let ended = RefCell::new(Vec::new());
    let request = async {
        request.await.unwrap();
        ended.borrow_mut().push("the request");
    };
    let settled = async {
        disk.settle().await.unwrap();
        ended.borrow_mut().push("the stop");
    };
    join(request, settled).await;
    assert_eq!(*ended.borrow(), ["the request", "the stop"]);
}

#[test]
fn a_stop_waits_for_what_is_in_flight_and_makes_it_durable() {
    let memory = MemoryHost::new();
    let disk = disk(&memory);
    block_on(stop_beside(&disk, in_flight(|| write(&disk, 1, 7))));
    assert_holds(&memory, NAME, 1, 7);
    disk.pausing().resume();
    // A flush is in flight as well, and what is carried out in steps is one request.
    block_on(stop_beside(&disk, in_flight(|| flush(&disk))));
    disk.pausing().resume();
    block_on(stop_beside(&disk, in_flight(|| zero(&disk, 0, LARGE))));
    assert_holds(&memory, NAME, 1, 0);
    disk.pausing().resume();
    block_on(disk.close()).unwrap();
}

/// Stops a disk while a snapshot is made, and a write came after it. Whether the snapshot had not ended before.
fn stop_beside_a_snapshot(turns: u64) -> bool {
    let memory = MemoryHost::new();
    let disk = disk(&memory);
    let overlay = Overlay::Create("top.qcow2".into());
    let mut snapshot = Box::pin(disk.snapshot(&overlay));
    for _ in 0..turns {
        if (&mut snapshot).now_or_never().is_some() {
            return false;
        }
    }
    let mut written = Box::pin(write(&disk, 1, 7));
    let stopped = async {
        if let Some(done) = written.as_mut().now_or_never() {
            return done.unwrap();
        }
        stop_beside(&disk, written).await;
    };
    let (taken, ()) = block_on(join(snapshot, stopped));
    taken.unwrap();
    assert_holds(&memory, "top.qcow2", 1, 7);
    disk.pausing().resume();
    block_on(disk.close()).unwrap();
    true
}

#[test]
fn a_request_that_waits_for_a_snapshot_is_waited_for() {
    let mut turns = 1;
    while stop_beside_a_snapshot(turns) {
        turns += 1;
    }
    assert!(turns > 10, "the snapshot takes its time: {turns}");
}

#[test]
fn a_stopped_disk_begins_nothing_until_it_goes_on() {
    let memory = MemoryHost::new();
    let disk = disk(&memory);
    disk.pausing().stop();
    block_on(disk.settle()).unwrap();
    let mut written = Box::pin(write(&disk, 1, 7));
    let mut zeroed = Box::pin(zero(&disk, PIECE * 2, PIECE));
    let mut flushed = Box::pin(flush(&disk));
    for _ in 0..1000 {
        assert!((&mut written).now_or_never().is_none());
        assert!((&mut zeroed).now_or_never().is_none() && (&mut flushed).now_or_never().is_none());
    }
    assert_eq!(disk.guest().in_flight, 0);
    assert_holds(&memory, NAME, 1, 0);
    // A snapshot does not wait.
    block_on(Box::pin(disk.snapshot(&Overlay::Create("top.qcow2".into())))).unwrap();
    disk.pausing().resume();
    block_on(async {
        written.await.unwrap();
        zeroed.await.unwrap();
        flushed.await.unwrap();
    });
    assert_holds(&memory, NAME, 1, 0);
    assert_holds(&memory, "top.qcow2", 1, 7);
    block_on(disk.close()).unwrap();
}

#[test]
fn the_files_of_a_stopped_disk_stay_as_they_are() {
    for metadata in MetadataMode::ALL {
        let memory = MemoryHost::new();
        // Then space is prepared ahead, and small writes are kept for the next record.
        memory.set_gains_from_written_space(true);
        let options = OpenOptions::new().writable(true).metadata(metadata);
        let disk = block_on(async {
            make(&memory, NAME, &NewImage::new(LARGE)).await;
            let disk = Disk::open(memory.any(), Path::new(NAME), &options).await.unwrap();
            LiveDisk::new(disk, &options, Arc::new(Ticking::default()))
        });
        let mut upkeep = Box::pin(disk.upkeep());
        let mut attend = |times: u32| {
            for _ in 0..times {
                assert!((&mut upkeep).now_or_never().is_none());
            }
        };
        for piece in 0..400 {
            block_on(write(&disk, piece, 7)).unwrap();
            if piece.is_multiple_of(4) {
                block_on(flush(&disk)).unwrap();
            }
            attend(1);
        }
        disk.pausing().stop();
        block_on(disk.settle()).unwrap();
        let contents = || memory.contents(NAME).unwrap();
        let before = contents();
        attend(200);
        assert!(before == contents(), "{metadata:?}");
        assert_holds(&memory, NAME, 399, 7);
        disk.pausing().resume();
        attend(200);
        // What waited is done now.
        let changes = metadata == MetadataMode::Embedded;
        assert_eq!(before != contents(), changes, "{metadata:?}");
        drop(upkeep);
        block_on(disk.close()).unwrap();
    }
}
