//! A host without space fails the requests that need some, and nothing else: flushes succeed, and everything goes on
//! once there is space again.

use crate::common::{findings, make};
use futures_executor::block_on;
use isobath_disk::{Disk, DiskError, MetadataMode, OpenOptions, ZeroFlags};
use isobath_qcow2::NewImage;
use isobath_storage::IoBuf;
use isobath_storage::memory::MemoryHost;
use isobath_storage_test::any::{AnyHost, ToAny};
use isobath_storage_test::space::{Space, SpaceHost};
use isobath_testkit::bytes::first_other_than;
use isobath_testkit::seed::Seed;
use rand::RngExt;
use rand::rngs::StdRng;
use std::path::Path;

const NAME: &str = "disk.qcow2";
/// The disk is divided into parts, each of which a request changes whole.
const PARTS: u64 = 96;

struct Case {
    metadata: MetadataMode,
    cluster_bits: u32,
    gains: bool,
}

impl Case {
    /// Some parts are a cluster, others more or less.
    fn part(&self) -> u64 {
        1 << (self.cluster_bits + 1).max(12)
    }

    /// Far enough apart for several tables.
    fn at(&self, part: u64) -> u64 {
        part * self.part() * 7
    }

    async fn image(&self) -> MemoryHost {
        let host = MemoryHost::new();
        host.set_gains_from_written_space(self.gains);
        let mut image = NewImage::new(self.at(PARTS));
        image.cluster_bits = self.cluster_bits;
        make(&host, NAME, &image).await;
        host
    }

    async fn open(&self, host: AnyHost) -> Disk<AnyHost> {
        let options = OpenOptions::new().writable(true).metadata(self.metadata);
        Disk::open(host, Path::new(NAME), &options.journal_size(64 << 10)).await.unwrap()
    }

    /// Makes a part hold `tag`. It is the same however often it is repeated.
    async fn change(&self, disk: &Disk<AnyHost>, part: u64, tag: u8) -> Result<(), DiskError> {
        let (at, length) = (self.at(part), self.part());
        if tag == 0 {
            let flags = ZeroFlags { may_unmap: part.is_multiple_of(2), only_fast: false };
            return disk.write_zeroes(at, length, flags).await;
        }
        disk.write(at, IoBuf::copy_of(&vec![tag; length as usize])).await.map(drop)
    }
}

fn assert_no_space(case: &str, error: &DiskError) {
    let full =
        matches!(error.errno(), libc::ENOSPC) && !matches!(error, DiskError::Poisoned { .. });
    assert!(full, "{case}: {error}");
}

async fn history(case: &Case, rng: &mut StdRng) {
    let told = format!("{:?}, clusters of 2^{}", case.metadata, case.cluster_bits);
    let (memory, space) = (case.image().await, Space::unlimited());
    space.has(NAME, memory.contents(NAME).unwrap().len() as u64);
    let host = SpaceHost::with(memory.clone(), space.clone());
    let mut model = vec![0; PARTS as usize];
    for _ in 0..2 {
        let disk = case.open(host.any()).await;
        for _ in 0..6 {
            space.leave(rng.random_range(0..20) * case.part() / 2);
            let mut failed = Vec::new();
            for _ in 0..rng.random_range(4..30) {
                let (part, tag) = (rng.random_range(0..PARTS), rng.random_range(0..4));
                match case.change(&disk, part, tag).await {
                    Ok(()) => {
                        model[part as usize] = tag;
                        failed.retain(|(other, _)| *other != part);
                    }
                    Err(error) => {
                        assert_no_space(&told, &error);
                        failed.retain(|(other, _)| *other != part);
                        failed.push((part, tag));
                    }
                }
                if rng.random_bool(0.1) {
                    disk.flush().await.unwrap_or_else(|error| panic!("{told}: a flush: {error}"));
                }
            }
            disk.flush().await.unwrap_or_else(|error| panic!("{told}: a flush: {error}"));
            space.make_room();
            for (part, tag) in failed {
                case.change(&disk, part, tag).await.unwrap();
                model[part as usize] = tag;
            }
        }
        for (part, tag) in model.iter().enumerate() {
            let buf = IoBuf::zeroed(case.part() as usize);
            let found = disk.read(case.at(part as u64), buf).await.unwrap();
            assert_eq!(first_other_than(*tag, &found), None, "{told}: part {part}");
        }
        space.leave(0);
        disk.close().await.unwrap_or_else(|error| panic!("{told}: the close: {error}"));
        drop(disk);
        space.make_room();
        let found = findings(&memory, NAME).await;
        assert!(found.is_empty(), "{told}: {found:?}");
    }
    assert!(space.refused() > 0, "{told}: there was always space");
}

#[test]
fn only_requests_that_need_space_fail_without_it_and_they_can_be_repeated() {
    let mut rng = Seed::new().rng();
    for metadata in MetadataMode::ALL {
        for cluster_bits in [9, 12, 16] {
            for gains in [false, true] {
                for _ in 0..4 {
                    block_on(history(&Case { metadata, cluster_bits, gains }, &mut rng));
                }
            }
        }
    }
}
