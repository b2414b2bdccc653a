//! Requests that fail or are given up half-way leave nothing behind that a later one could meet: neither
//! in a cluster that becomes a table or another's data, nor in what a journal has of it.

use crate::common::{ALWAYS, Ticking, findings, make, run};
use futures_executor::block_on;
use isobath_disk::{Disk, DiskError, LiveDisk, MetadataMode, OpenOptions, Overlay, ZeroFlags};
use isobath_qcow2::NewImage;
use isobath_storage::memory::MemoryHost;
use isobath_storage::{Host, IoBuf, Operation};
use isobath_storage_test::any::{AnyHost, ToAny};
use isobath_storage_test::fault::{Fault, FaultHost, Plan};
use isobath_testkit::bytes::first_other_than;
use isobath_testkit::seed::Seed;
use rand::RngExt;
use rand::rngs::StdRng;
use std::path::Path;
use std::sync::Arc;

const NAME: &str = "disk.qcow2";
const CLUSTER: u64 = 4096;
const SIZE: u64 = 64 << 20;
/// In the range of an L2 table that does not exist yet.
const FAR: u64 = 10 << 20;

async fn image() -> MemoryHost {
    let host = MemoryHost::new();
    // Then small writes are kept for the next record.
    host.set_gains_from_written_space(true);
    let mut image = NewImage::new(SIZE);
    image.cluster_bits = CLUSTER.trailing_zeros();
    make(&host, NAME, &image).await;
    host
}

fn options(metadata: MetadataMode) -> OpenOptions {
    OpenOptions::new().writable(true).metadata(metadata).journal_size(64 << 10)
}

async fn open(host: impl ToAny, metadata: MetadataMode) -> Disk<AnyHost> {
    Disk::open(host.any(), Path::new(NAME), &options(metadata)).await.unwrap()
}

async fn write<H: Host>(disk: &Disk<H>, at: u64, tag: u8, length: u64) {
    disk.write(at, IoBuf::copy_of(&vec![tag; length as usize])).await.unwrap();
}

async fn assert_reads<H: Host>(disk: &Disk<H>, at: u64, tag: u8) {
    let found = disk.read(at, IoBuf::zeroed(CLUSTER as usize)).await.unwrap();
    assert_eq!(first_other_than(tag, &found), None, "at {at} for {tag:#x}: {:x?}", &found[..16]);
}

/// Nothing is wrong with the image; without a journal a crash may cost space.
async fn assert_sound(host: &MemoryHost, metadata: MetadataMode) {
    let mut found = findings(host, NAME).await;
    if matches!(metadata, MetadataMode::Ordered | MetadataMode::Auto) {
        found.retain(|text| !text.starts_with("Leaked cluster"));
    }
    assert!(found.is_empty(), "{found:?}");
}

/// One half of a write lies in place, the other in a new cluster behind the file's end, and is kept; the
/// first fails. Then something needs a new table.
async fn fail_and_make_a_table(plan: &Plan, disk: &Disk<AnyHost>) {
    for n in 0..3 {
        write(disk, n * 2 * CLUSTER, 1, CLUSTER).await;
        disk.flush().await.unwrap();
    }
    plan.add(Fault::new(Operation::Write, 0));
    let bytes = IoBuf::copy_of(&[0x5a; CLUSTER as usize]);
    assert!(disk.write(CLUSTER / 2, bytes).await.is_err());
    plan.clear();
    write(disk, FAR, 7, CLUSTER).await;
    disk.flush().await.unwrap();
    assert_reads(disk, FAR, 7).await;
}

#[test]
fn a_failed_write_is_not_replayed_over_a_table() {
    for metadata in MetadataMode::ALL {
        block_on(async {
            let (memory, plan) = (image().await, Plan::new());
            let disk = open(FaultHost::new(memory.clone(), plan.clone()), metadata).await;
            fail_and_make_a_table(&plan, &disk).await;
            // A crash that loses nothing.
            drop(disk);
            let disk = open(memory.clone(), metadata).await;
            assert_reads(&disk, FAR, 7).await;
            disk.close().await.unwrap();
            drop(disk);
            assert_sound(&memory, metadata).await;
        });
    }
}

#[test]
fn a_failed_write_is_not_put_over_a_table_by_a_checkpoint() {
    for metadata in MetadataMode::ALL {
        block_on(async {
            let (memory, plan) = (image().await, Plan::new());
            let disk = open(FaultHost::new(memory.clone(), plan.clone()), metadata).await;
            fail_and_make_a_table(&plan, &disk).await;
            for n in 0..12 {
                write(&disk, (20 + n) * CLUSTER, 9, CLUSTER).await;
                disk.flush().await.unwrap();
            }
            disk.close().await.unwrap();
            drop(disk);
            let disk = open(memory.clone(), MetadataMode::Auto).await;
            assert_reads(&disk, FAR, 7).await;
            disk.close().await.unwrap();
            drop(disk);
            assert_sound(&memory, metadata).await;
        });
    }
}

/// What a cluster may hold: any of these.
struct Cluster {
    now: Vec<u8>,
    after_a_crash: Vec<u8>,
}

const CLUSTERS: u64 = 24;

async fn request(disk: &Disk<AnyHost>, kind: u8, at: u64, tag: u8) -> bool {
    let done = match kind {
        0..5 => disk.write(at, IoBuf::copy_of(&[tag; CLUSTER as usize])).await.map(drop),
        5 | 6 => {
            disk.write_compressed(at, IoBuf::copy_of(&[tag; CLUSTER as usize])).await.map(drop)
        }
        7 => disk.discard(at, CLUSTER).await,
        8 => {
            let flags = ZeroFlags { may_unmap: tag & 1 == 1, only_fast: false };
            disk.write_zeroes(at, CLUSTER, flags).await
        }
        _ => disk.flush().await,
    };
    done.is_ok()
}

/// Requests of which some fail and some are given up at any await; the disk's content is checked all the
/// while, after a crash that loses nothing, and after a close.
fn history(rng: &mut StdRng) {
    let metadata = MetadataMode::ALL[rng.random_range(0..4)];
    let memory = block_on(image());
    let new = || Cluster { now: vec![0], after_a_crash: vec![0] };
    let mut model: Vec<Cluster> = (0..CLUSTERS).map(|_| new()).collect();
    for _ in 0..3 {
        let plan = Plan::new();
        plan.delay(rng.random());
        let disk = block_on(open(FaultHost::new(memory.clone(), plan.clone()), metadata));
        let mut poisoned = false;
        for _ in 0..rng.random_range(20..120) {
            let (kind, cluster) = (rng.random_range(0..12), rng.random_range(0..CLUSTERS));
            // Spread over tables, of which each maps 2 MiB.
            let (at, tag) = (cluster * (1 << 20), rng.random_range(1..=255));
            let fails = rng.random_bool(0.2);
            if fails && kind < 9 {
                let after = rng.random_range(0..3);
                let operation =
                    [Operation::Write, Operation::Write, Operation::Read][rng.random_range(0..3)];
                plan.add(Fault::new(operation, after));
            }
            let turns = if rng.random_bool(0.2) { rng.random_range(1..40) } else { ALWAYS };
            let ended = run(request(&disk, kind, at, tag), turns);
            plan.clear();
            let new = match kind {
                0..7 => tag,
                7 | 8 => 0,
                _ if ended == Some(true) => {
                    for place in &mut model {
                        place.after_a_crash.clone_from(&place.now);
                    }
                    continue;
                }
                _ => {
                    // A flush that was given up leaves a disk that takes no more writes.
                    poisoned = true;
                    continue;
                }
            };
            if poisoned {
                assert_ne!(
                    ended,
                    Some(true),
                    "a disk of which a flush was given up took a request"
                );
                continue;
            }
            let place = &mut model[cluster as usize];
            if ended == Some(true) {
                place.now.clear();
            }
            place.now.push(new);
            place.after_a_crash.push(new);
        }
        if rng.random() && !poisoned {
            match block_on(disk.close()) {
                Ok(()) => {
                    for place in &mut model {
                        place.after_a_crash.clone_from(&place.now);
                    }
                }
                // A write commits where much has gathered, and that has failed.
                Err(DiskError::Poisoned { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
        drop(disk);
        let disk = block_on(open(memory.clone(), metadata));
        for (cluster, place) in model.iter_mut().enumerate() {
            let may = &mut place.after_a_crash;
            let at = cluster as u64 * (1 << 20);
            let found = block_on(disk.read(at, IoBuf::zeroed(CLUSTER as usize))).unwrap();
            for sector in found.chunks(512) {
                assert!(
                    sector.iter().all(|byte| *byte == sector[0]) && may.contains(&sector[0]),
                    "cluster {cluster} holds {:x?} instead of one of {may:x?}",
                    &sector[..4]
                );
            }
            *may = found.chunks(512).map(|sector| sector[0]).collect();
            may.dedup();
            place.now.clone_from(may);
        }
        block_on(disk.close()).unwrap();
        drop(disk);
        // The commit that sets a journal up does without one, and a crash in it may cost space.
        block_on(assert_sound(&memory, MetadataMode::Ordered));
    }
}

#[test]
fn requests_that_fail_or_are_given_up_leave_nothing_behind() {
    let mut rng = Seed::new().rng();
    for _ in 0..60 {
        history(&mut rng);
    }
}

/// A flush given up half-way, and another.
#[test]
fn a_flush_after_one_that_was_given_up_promises_nothing_that_is_not_so() {
    for metadata in MetadataMode::ALL {
        for turns in 1..60 {
            let (memory, plan) = (block_on(image()), Plan::new());
            plan.delay(turns * 7919);
            let host = FaultHost::new(memory.clone(), plan);
            let disk = block_on(open(host, metadata));
            block_on(write(&disk, 0, 1, CLUSTER));
            block_on(disk.flush()).unwrap();
            block_on(write(&disk, FAR, 2, CLUSTER));
            drop(run(disk.flush(), turns));
            let second = block_on(disk.flush());
            drop(disk);
            if second.is_ok() {
                let disk = block_on(open(memory.clone(), metadata));
                block_on(assert_reads(&disk, FAR, 2));
            }
        }
    }
}

/// Takes a snapshot that may fail or be given up, and then another; whether the first one succeeded.
fn second_snapshot(metadata: MetadataMode, fault: Option<Fault>, turns: u64) -> bool {
    let (memory, plan) = (block_on(image()), Plan::new());
    let case = format!("{metadata:?}, {fault:?}, {turns} turns");
    let disk = block_on(open(FaultHost::new(memory.clone(), plan.clone()), metadata));
    let live = LiveDisk::new(disk, &options(metadata), Arc::new(Ticking::default()));
    let write = |at, tag| live.write(at, IoBuf::copy_of(&[tag; CLUSTER as usize]));
    block_on(write(0, 1)).unwrap();
    plan.delay(7919);
    if let Some(fault) = fault {
        plan.add(fault);
    }
    let first = run(live.snapshot(&Overlay::Create("first".into())), turns);
    plan.clear();
    let done = matches!(first, Some(Ok(())));
    match block_on(Box::pin(live.snapshot(&Overlay::Create("second".into())))) {
        Ok(()) => {}
        // It was a commit that failed or was given up.
        Err(DiskError::Poisoned { .. }) if !done => return false,
        Err(error) => panic!("{case}: {error}"),
    }
    block_on(write(FAR, 2)).unwrap();
    block_on(live.close()).unwrap_or_else(|error| panic!("{case}: {error}"));
    drop(live);
    let disk = block_on(Disk::open(memory.any(), Path::new("second"), &options(metadata))).unwrap();
    block_on(assert_reads(&disk, 0, 1));
    block_on(assert_reads(&disk, FAR, 2));
    done
}

#[test]
fn a_snapshot_that_failed_or_was_given_up_is_finished_before_the_next() {
    for metadata in MetadataMode::ALL {
        let mut turns = 1;
        while !second_snapshot(metadata, None, turns) {
            turns += 1;
        }
        for operation in [Operation::Read, Operation::Write, Operation::Query, Operation::SetLength]
        {
            let mut after = 0;
            while !second_snapshot(metadata, Some(Fault::new(operation, after)), ALWAYS) {
                after += 1;
            }
        }
    }
}
