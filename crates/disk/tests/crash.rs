//! Crashes: what was flushed is there, what was not is old or new, and the image is consistent but
//! for leaked clusters, whatever part of the unsynced writes reached the disk, in whatever order.

#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

mod common;

use common::{assert_consistent, make, random_fates};
use futures_executor::block_on;
use futures_util::future::join_all;
use isobath_disk::{BlockDevice, Disk, MetadataMode, OpenOptions, ZeroFlags};
use isobath_qcow2::NewImage;
use isobath_storage::fault::{FaultHost, Plan};
use isobath_storage::memory::MemoryHost;
use isobath_storage::recorder::RecorderHost;
use isobath_storage::{Host, IoBuf};
use isobath_testkit::seed::Seed;
use rand::RngExt;
use rand::rngs::StdRng;
use std::path::Path;

const SECTOR: u64 = 512;
const NAME: &str = "disk.qcow2";
const BASE: &str = "base.raw";

/// What each sector may hold. A sector's content is named by a tag: 0 for zeroes, else a number that
/// fills it.
#[derive(Clone)]
struct Oracle {
    flushed: Vec<u64>,
    /// Written since the last flush, with the record's length when the write began.
    later: Vec<Vec<(usize, u64)>>,
}

fn sector(tag: u64) -> Vec<u8> {
    tag.to_le_bytes().repeat(SECTOR as usize / 8)
}

fn tag(bytes: &[u8]) -> Option<u64> {
    let tag = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    (bytes == sector(tag)).then_some(tag)
}

impl Oracle {
    fn write(&mut self, sectors: std::ops::Range<u64>, tag: u64, began: usize) {
        for sector in sectors {
            self.later[sector as usize].push((began, tag));
        }
    }

    /// Everything written so far is flushed.
    fn flush(&mut self) {
        for (flushed, later) in self.flushed.iter_mut().zip(&mut self.later) {
            if let Some((_, tag)) = later.last() {
                *flushed = *tag;
            }
            later.clear();
        }
    }

    /// Checks a disk after a crash at `end` entries of the record.
    fn check(&self, sector: usize, found: Option<u64>, end: usize) {
        let allowed = found.is_some_and(|found| {
            found == self.flushed[sector]
                || self.later[sector].iter().any(|(began, tag)| *began < end && *tag == found)
        });
        assert!(
            allowed,
            "sector {sector} holds {found:?}; flushed {}, since then {:?}",
            self.flushed[sector], self.later[sector]
        );
    }
}

async fn open<H: Host>(host: H, metadata: MetadataMode) -> Disk<H> {
    let options = OpenOptions {
        writable: true,
        metadata,
        journal_size: Some(128 << 10),
        ..OpenOptions::default()
    };
    Disk::open(host, Path::new(NAME), &options).await.unwrap()
}

async fn tags<H: Host>(disk: &Disk<H>) -> Vec<Option<u64>> {
    let bytes = disk.read(0, IoBuf::zeroed(disk.size() as usize)).await.unwrap();
    bytes.chunks(SECTOR as usize).map(tag).collect()
}

struct Crash {
    end: usize,
    oracle: Oracle,
}

/// Runs a random history and gives the oracle at some moments of it.
async fn history(
    host: RecorderHost<FaultHost<MemoryHost>>,
    oracle: &mut Oracle,
    rng: &mut StdRng,
    overlay: bool,
    mode: MetadataMode,
) -> Vec<Crash> {
    let record = host.record();
    let disk = open(host, mode).await;
    let sectors = disk.size() / SECTOR;
    let mut next_tag = 1 << 32;
    let mut crashes = Vec::new();
    for _ in 0..rng.random_range(2..8) {
        let began = record.len();
        let mut taken: Vec<std::ops::Range<u64>> = Vec::new();
        let (mut writes, mut zeroes, mut discards) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..rng.random_range(1..8) {
            let start = rng.random_range(0..sectors);
            let most = if rng.random_bool(0.2) { 2048 } else { 16 };
            let range = start..(start + rng.random_range(1..=most)).min(sectors);
            if taken.iter().any(|t| range.start < t.end && t.start < range.end) {
                continue;
            }
            taken.push(range.clone());
            let (offset, length) = (range.start * SECTOR, (range.end - range.start) * SECTOR);
            match rng.random_range(0..10) {
                0..7 => {
                    next_tag += 1;
                    oracle.write(range, next_tag, began);
                    let bytes = sector(next_tag).repeat((length / SECTOR) as usize);
                    writes.push(disk.write(offset, IoBuf::copy_of(&bytes)));
                }
                7..9 => {
                    oracle.write(range, 0, began);
                    let flags = ZeroFlags { may_unmap: rng.random(), only_fast: false };
                    zeroes.push(disk.write_zeroes(offset, length, flags));
                }
                _ => {
                    // Whole clusters become zeroes, the rest stays.
                    let size = 1 << disk.layers().next().unwrap().header().unwrap().cluster_bits;
                    let first = offset.next_multiple_of(size) / SECTOR;
                    let mut last = (offset + length) / size * size / SECTOR;
                    if range.end == sectors {
                        last = sectors;
                    }
                    if first < last {
                        oracle.write(first..last, 0, began);
                    }
                    discards.push(disk.discard(offset, length));
                }
            }
        }
        let flush = rng.random_bool(0.3);
        let (written, zeroed, discarded, flushed) =
            futures_util::join!(join_all(writes), join_all(zeroes), join_all(discards), async {
                if flush { disk.flush().await } else { Ok(()) }
            },);
        for result in written {
            result.unwrap();
        }
        for result in zeroed.into_iter().chain(discarded) {
            result.unwrap();
        }
        flushed.unwrap();
        // Any moment since the last one, as far as the oracle is the same: nothing was flushed
        // that it counts as flushed.
        for _ in 0..2 {
            let end = rng.random_range(began..=record.len());
            crashes.push(Crash { end, oracle: oracle.clone() });
        }
        if rng.random_bool(0.6) {
            disk.flush().await.unwrap();
            oracle.flush();
            crashes.push(Crash { end: record.len(), oracle: oracle.clone() });
        }
    }
    if !overlay || rng.random_bool(0.5) {
        let began = record.len();
        disk.close().await.unwrap();
        crashes.push(Crash { end: rng.random_range(began..=record.len()), oracle: oracle.clone() });
    }
    crashes
}

async fn crash_and_recover(rng: &mut StdRng) {
    let base = MemoryHost::new();
    let sectors = rng.random_range(1..8 << 10);
    let mut image = NewImage::new(sectors * SECTOR);
    image.cluster_bits = rng.random_range(9..=16);
    image.refcount_order = rng.random_range(0..=6);
    image.extended_l2 = image.cluster_bits >= 14 && rng.random_bool(0.5);
    let overlay = rng.random_bool(0.5);
    let mut flushed = vec![0; sectors as usize];
    if overlay {
        let tags: Vec<u64> = (1..=sectors).collect();
        let bytes: Vec<u8> = tags.iter().flat_map(|tag| sector(*tag)).collect();
        base.insert(BASE, &bytes);
        image.backing_file = Some(BASE.into());
        image.backing_format = Some("raw".into());
        flushed = tags;
    }
    let mode = MetadataMode::ALL[rng.random_range(0..3)];
    println!("{mode:?} {image:?}");
    make(&base, NAME, &image).await;
    base.set_gains_from_written_space(rng.random());
    let mut oracle = Oracle { later: vec![Vec::new(); flushed.len()], flushed };
    let plan = Plan::new();
    plan.delay(rng.random());
    let host = RecorderHost::new(FaultHost::new(base.deep_copy(), plan));
    let record = host.record();
    for crash in history(host, &mut oracle, rng, overlay, mode).await {
        let keep: f64 = rng.random();
        let fate = random_fates(rng, keep);
        let left = record.replay(&base, crash.end, fate).await.unwrap();
        let disk = open(left.clone(), mode).await;
        for (sector, found) in tags(&disk).await.into_iter().enumerate() {
            crash.oracle.check(sector, found, crash.end);
        }
        // It goes on as if nothing had happened.
        let bytes = sector(7).repeat(sectors.min(100) as usize);
        disk.write(0, IoBuf::copy_of(&bytes)).await.unwrap();
        disk.close().await.unwrap();
        assert_consistent(&left, NAME);
    }
}

#[test]
fn a_crash_loses_nothing_that_was_flushed() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    for _ in 0..25 {
        block_on(crash_and_recover(&mut rng));
    }
}
