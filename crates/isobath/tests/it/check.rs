//! Checks and repairs: what they survive, and what a crash in their middle leaves.

use futures_executor::block_on;
use isobath_disk::{
    CheckEvent, CheckOptions, CheckReport, Disk, DiskError, NewDisk, OpenOptions, Preallocation,
    Repair, ZeroFlags, check, create,
};
use isobath_qcow2::header::field;
use isobath_qcow2::{CompressionType, Header, HostCluster, L1Entry, L2Entry, RefcountTableEntry};
use isobath_storage::IoBuf;
use isobath_storage::memory::MemoryHost;
use isobath_storage_test::any::ToAny;
use isobath_storage_test::recorder::{Fate, RecorderHost};
use isobath_testkit::seed::Seed;
use rand::RngExt;
use rand::rngs::StdRng;
use std::path::Path;

const NAME: &str = "disk.qcow2";

fn name() -> &'static Path {
    Path::new(NAME)
}

async fn examine(host: &impl ToAny, repair: Repair) -> Result<CheckReport, DiskError> {
    let options = CheckOptions { repair, ..CheckOptions::default() };
    check(&host.any(), name(), &options, &mut |_| {}).await
}

/// An image with data, zeroes, holes and what a discard leaves.
async fn make(new: &NewDisk, rng: &mut StdRng) -> MemoryHost {
    let host = MemoryHost::new();
    let new = new.clone().size(2 << 20);
    create(&host.any(), name(), &new).await.unwrap();
    let options = OpenOptions::new().writable(true);
    let disk = Disk::open(host.any(), name(), &options).await.unwrap();
    for _ in 0..20 {
        let length = rng.random_range(1..50_000);
        let offset = rng.random_range(0..(2 << 20) - length);
        match rng.random_range(0..10) {
            0 => disk.discard(offset, length).await.unwrap(),
            1 => disk.write_zeroes(offset, length, ZeroFlags::default()).await.unwrap(),
            _ => {
                let bytes = vec![rng.random_range(1..=255); length as usize];
                disk.write(offset, IoBuf::copy_of(&bytes)).await.unwrap();
            }
        }
    }
    disk.close().await.unwrap();
    host
}

fn small() -> NewDisk {
    NewDisk::default().cluster_size(4096)
}

async fn content(host: impl ToAny) -> Vec<u8> {
    let disk = Disk::open(host.any(), name(), &OpenOptions::default()).await.unwrap();
    disk.read(0, IoBuf::zeroed(disk.size() as usize)).await.unwrap().to_vec()
}

fn change(host: &MemoryHost, change: impl FnOnce(&mut Vec<u8>, &Header)) {
    let mut bytes = host.contents(NAME).unwrap();
    let header = Header::parse(&bytes).unwrap();
    change(&mut bytes, &header);
    host.insert(NAME, &bytes);
}

fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// Changes `count` refcounts of the first refcount block, each to 0 or 2 or so.
fn spoil_refcounts(bytes: &mut [u8], header: &Header, count: usize, rng: &mut StdRng) {
    let geometry = header.geometry().unwrap();
    let entry = RefcountTableEntry::read(bytes, header.refcount_table_offset.get() as usize / 8);
    let at = entry.unwrap().offset(&geometry).unwrap().unwrap().get() as usize;
    for _ in 0..count {
        let cluster = HostCluster::new(rng.random_range(1..100));
        let (_, index) = geometry.refcount_position(cluster);
        let block = &mut bytes[at..at + geometry.cluster_size() as usize];
        geometry.refcount_order().write(block, index, rng.random_range(0..4)).unwrap();
    }
}

#[test]
fn images_of_every_kind_are_clean_after_writes() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    for new in [
        NewDisk::default(),
        small(),
        small().cluster_size(512),
        small().cluster_size(2 << 20),
        small().version(2),
        small().refcount_bits(1),
        small().refcount_bits(64),
        small().cluster_size(16 << 10).extended_l2(true),
        small().lazy_refcounts(true).compression_type(CompressionType::Zstd),
        small().preallocation(Preallocation::Metadata),
        small().preallocation(Preallocation::Full),
        small().data_file("data"),
        small().data_file("data").data_file_raw(true),
    ] {
        let report = block_on(async {
            let host = make(&new, &mut rng).await;
            examine(&host, Repair::None).await.unwrap()
        });
        assert!(report.is_clean() && report.allocated_clusters > 0, "{new:?}: {report:?}");
    }
}

/// Crashes at every moment of a repair, with any part of what is not yet durable lost or torn.
async fn crash_in_repairs(damaged: &MemoryHost, rng: &mut StdRng) {
    let before = content(damaged.clone()).await;
    let found = examine(damaged, Repair::None).await.unwrap();
    assert!(!found.is_clean());
    let base = damaged.deep_copy();
    let host = RecorderHost::new(damaged.deep_copy());
    let record = host.record();
    let report = examine(&host, Repair::All).await.unwrap();
    assert!(report.is_clean(), "{report:?}");
    assert!(!record.is_empty());
    for end in 0..=record.len() {
        for _ in 0..4 {
            let fate = |rng: &mut StdRng| match rng.random_range(0..3) {
                0 => Fate::Kept,
                1 => Fate::Lost,
                // Sectors are written whole.
                _ => Fate::Torn(rng.random_range(0..16) * 512),
            };
            let crashed = record.replay(&base, end, |_, _| fate(rng)).await.unwrap();
            let after = examine(&crashed, Repair::None).await.unwrap();
            assert!(after.corruptions <= found.corruptions, "at {end}: {found:?} {after:?}");
            assert!(content(crashed.clone()).await == before, "at {end}: the disk changed");
            let again = examine(&crashed, Repair::All).await.unwrap();
            assert!(again.is_clean(), "at {end}: {again:?}");
            assert!(content(crashed.clone()).await == before, "at {end}: the disk changed");
        }
    }
}

#[test]
fn a_crash_while_refcounts_are_corrected_makes_nothing_worse() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    block_on(async {
        for _ in 0..5 {
            let host = make(&small(), &mut rng).await;
            change(&host, |bytes, header| spoil_refcounts(bytes, header, 10, &mut rng));
            crash_in_repairs(&host, &mut rng).await;
        }
    });
}

#[test]
fn a_crash_while_the_refcounts_are_rebuilt_makes_nothing_worse() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    block_on(async {
        for damage in 0..3 {
            let host = make(&small().refcount_bits(32), &mut rng).await;
            change(&host, |bytes, header| {
                let table = header.refcount_table_offset.get() as usize;
                match damage {
                    0 => bytes[table..table + 8].fill(0),
                    1 => bytes[table + 7] = 1,
                    _ => bytes[field::REFCOUNT_TABLE_CLUSTERS + 3] = 0,
                }
                // And flags of entries.
                let l1 = header.l1_table_offset.get() as usize;
                bytes[l1] ^= 0x80;
            });
            // Without a refcount table it is no image to open.
            if damage < 2 {
                crash_in_repairs(&host, &mut rng).await;
            } else {
                assert!(examine(&host, Repair::None).await.unwrap().corruptions > 0);
                assert!(examine(&host, Repair::All).await.unwrap().is_clean());
            }
        }
    });
}

#[test]
fn a_table_that_may_be_guest_data_is_not_written() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    block_on(async {
        let host = make(&small(), &mut rng).await;
        // A second L1 entry comes to lead to a data cluster: its bytes look like wrong entries.
        change(&host, |bytes, header| {
            let geometry = header.geometry().unwrap();
            let l1 = header.l1_table_offset.get() as usize;
            let table = L1Entry::from_raw(be64(bytes, l1)).offset(&geometry).unwrap().unwrap();
            let entries = (0..512).map(|n| table.get() as usize + n * 8);
            let data = entries.map(|at| be64(bytes, at)).find(|raw| raw >> 63 == 1).unwrap();
            bytes[l1 + 8..l1 + 16].copy_from_slice(&data.to_be_bytes());
        });
        let before = content(host.clone()).await;
        let length = host.contents(NAME).unwrap().len();
        let bytes = host.contents(NAME).unwrap();
        let _ = examine(&host, Repair::All).await.unwrap();
        assert!(before == content(host.clone()).await);
        // Whatever happened to the tables, no cluster of data has changed.
        let header = Header::parse(&bytes).unwrap();
        let geometry = header.geometry().unwrap();
        let l1 = header.l1_table_offset.get() as usize;
        let table = L1Entry::from_raw(be64(&bytes, l1)).offset(&geometry).unwrap().unwrap();
        let after = host.contents(NAME).unwrap();
        for index in 0..512 {
            let entry = L2Entry::read(&bytes[table.get() as usize..], index, &geometry).unwrap();
            if let Some(at) = entry.kind(&geometry).ok().and_then(|kind| kind.host_cluster()) {
                let at = at.get() as usize;
                // The last cluster of the file may be cut short.
                let end = (at + 4096).min(bytes.len());
                assert_eq!(bytes[at..end], after[at..end]);
            }
        }
        assert!(after.len() >= length);
    });
}

#[test]
fn leaks_stay_while_an_entry_leads_nowhere() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    block_on(async {
        let host = make(&small(), &mut rng).await;
        change(&host, |bytes, header| {
            let l1 = header.l1_table_offset.get() as usize;
            bytes[l1 + 1] = 0x10;
        });
        let found = examine(&host, Repair::None).await.unwrap();
        assert!(found.corruptions > 0 && found.leaks > 1, "{found:?}");
        let refcounts = |host: &MemoryHost| {
            let bytes = host.contents(NAME).unwrap();
            let header = Header::parse(&bytes).unwrap();
            let table = header.refcount_table_offset.get() as usize;
            let block = be64(&bytes, table) as usize;
            bytes[block..block + 4096].to_vec()
        };
        let before = refcounts(&host);
        for repair in [Repair::Leaks, Repair::All] {
            let mut said = String::new();
            let options = CheckOptions { repair, ..CheckOptions::default() };
            let mut listen = |event: CheckEvent<'_>| {
                if let CheckEvent::Finding(text) = event {
                    said += text;
                }
            };
            let report = check(&host.any(), name(), &options, &mut listen).await.unwrap();
            assert_eq!((report.leaks, report.leaks_fixed), (found.leaks, 0));
            assert!(report.corruptions > 0 && said.contains("leaked clusters are not freed"));
            assert_eq!(refcounts(&host), before);
        }
    });
}

#[test]
fn an_image_that_was_not_closed_is_repaired_when_it_is_opened_for_writing() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    block_on(async {
        let host = make(&small().lazy_refcounts(true), &mut rng).await;
        let before = content(host.clone()).await;
        change(&host, |bytes, header| {
            spoil_refcounts(bytes, header, 30, &mut rng);
            bytes[field::INCOMPATIBLE_FEATURES + 7] = 1;
        });
        assert!(content(host.clone()).await == before, "reading needs no refcounts");
        assert!(!examine(&host, Repair::None).await.unwrap().is_clean());
        let options = OpenOptions::new().writable(true);
        let disk = Disk::open(host.any(), name(), &options).await.unwrap();
        disk.write(1 << 20, IoBuf::copy_of(&vec![9; 100_000])).await.unwrap();
        disk.close().await.unwrap();
        drop(disk);
        let report = examine(&host, Repair::None).await.unwrap();
        assert!(report.is_clean(), "{report:?}");
        let header = Header::parse(&host.contents(NAME).unwrap()).unwrap();
        assert!(header.incompatible.is_empty());
        let after = content(host).await;
        assert!(after[..1 << 20] == before[..1 << 20]);
    });
}

#[test]
fn an_image_that_was_not_closed_and_cannot_be_repaired_is_not_written() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    block_on(async {
        let host = make(&small(), &mut rng).await;
        change(&host, |bytes, header| {
            bytes[header.l1_table_offset.get() as usize + 6] ^= 2;
            bytes[field::INCOMPATIBLE_FEATURES + 7] = 1;
        });
        let options = OpenOptions::new().writable(true);
        let error = Disk::open(host.any(), name(), &options).await.err().unwrap();
        assert!(error.to_string().contains("not cluster aligned"), "{error}");
        assert_eq!(host.contents(NAME).unwrap()[field::INCOMPATIBLE_FEATURES + 7], 1);
    });
}

/// The places of an image that are not guest data: header, tables.
fn metadata(bytes: &[u8]) -> Vec<usize> {
    let header = Header::parse(bytes).unwrap();
    let at = |offset: u64, length: usize| offset as usize..offset as usize + length;
    let l1 = header.l1_table_offset.get();
    let l2 = be64(bytes, l1 as usize) & 0x00ff_ffff_ffff_fe00;
    let table = header.refcount_table_offset.get();
    let block = be64(bytes, table as usize);
    [at(0, 120), at(l1, 32), at(l2, 256), at(table, 16), at(block, 256)]
        .into_iter()
        .flatten()
        .filter(|at| *at < bytes.len())
        .collect()
}

#[test]
fn whatever_the_bytes_are_a_check_ends_with_a_report_or_a_reason() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    block_on(async {
        for new in [small(), small().cluster_size(16 << 10).extended_l2(true)] {
            let good = make(&new, &mut rng).await.contents(NAME).unwrap();
            let places = metadata(&good);
            for _ in 0..400 {
                let mut bytes = good.clone();
                for _ in 0..rng.random_range(1..6) {
                    bytes[places[rng.random_range(0..places.len())]] = rng.random();
                }
                if rng.random_range(0..8) == 0 {
                    bytes.truncate(rng.random_range(0..bytes.len()));
                }
                let host = MemoryHost::new();
                host.insert(NAME, &bytes);
                let found = examine(&host, Repair::None).await;
                assert!(host.contents(NAME).unwrap() == bytes, "a check alone changes nothing");
                let repaired = examine(&host, Repair::All).await;
                if let (Ok(found), Ok(repaired)) = (found, repaired)
                    && repaired.is_clean()
                {
                    let again = examine(&host, Repair::None).await.unwrap();
                    assert!(again.is_clean(), "{found:?} {repaired:?} {again:?}");
                }
            }
        }
    });
}

#[test]
fn claims_of_huge_tables_cost_nothing() {
    let seed = Seed::new();
    let mut rng = seed.rng();
    block_on(async {
        let host = make(&small(), &mut rng).await;
        let good = host.contents(NAME).unwrap();
        let put = |at: usize, value: &[u8]| {
            let mut bytes = good.clone();
            bytes[at..at + value.len()].copy_from_slice(value);
            host.insert(NAME, &bytes);
        };
        put(field::L1_SIZE, &(1u32 << 22).to_be_bytes());
        let error = examine(&host, Repair::None).await.unwrap_err().to_string();
        assert!(error.contains("L1 table") && error.contains("l1_size 4194304"), "{error}");
        put(field::NB_SNAPSHOTS, &u32::MAX.to_be_bytes());
        assert_eq!(examine(&host, Repair::None).await.unwrap().check_errors, 1);
        put(field::NB_SNAPSHOTS, &[0, 0, 255, 255, 0, 0, 0, 0, 0, 0, 0x10, 0]);
        let report = examine(&host, Repair::All).await.unwrap();
        assert_eq!((report.check_errors, report.corruptions_fixed), (1, 0), "{report:?}");
        put(field::REFCOUNT_TABLE_CLUSTERS, &2048u32.to_be_bytes());
        assert!(examine(&host, Repair::None).await.unwrap().corruptions > 0);
    });
}
