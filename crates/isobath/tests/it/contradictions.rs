//! Images whose tables contradict each other: a repair keeps what may be data, and a write that finds out
//! changes nothing and marks the image.

use futures_executor::block_on;
use futures_util::future::join;
use isobath_disk::{
    CheckOptions, CheckReport, Disk, DiskError, MetadataMode, NewDisk, OpenOptions, Preallocation,
    Repair, ZeroFlags, check, create,
};
use isobath_qcow2::header::field;
use isobath_qcow2::{Geometry, Header, HostCluster, IncompatibleFeatures, RefcountTableEntry};
use isobath_storage::memory::MemoryHost;
use isobath_storage::{Host, IoBuf, Locking, OpenMode, Storage};
use isobath_storage_test::any::{AnyHost, ToAny};
use isobath_storage_test::fault::{FaultHost, Plan};
use isobath_storage_test::give_way;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::path::Path;

const NAME: &str = "disk.qcow2";
const SIZE: usize = 8 << 20;
/// Of the small disk's clusters.
const CLUSTER: usize = 4096;

fn name() -> &'static Path {
    Path::new(NAME)
}

async fn examine(host: &MemoryHost, repair: Repair) -> Result<CheckReport, DiskError> {
    let options = CheckOptions { repair, ..CheckOptions::default() };
    check(&host.any(), name(), &options, &mut |_| {}).await
}

async fn open(host: &MemoryHost, metadata: MetadataMode) -> Result<Disk<AnyHost>, DiskError> {
    let options = OpenOptions::new().writable(true).metadata(metadata);
    Disk::open(host.any(), name(), &options).await
}

/// An image of random bytes in its first half, without a hole.
async fn make(new: &NewDisk) -> MemoryHost {
    let host = MemoryHost::new();
    let new = new.clone().size(SIZE as u64).cluster_size(CLUSTER as u64);
    create(&host.any(), name(), &new).await.unwrap();
    let disk = open(&host, MetadataMode::Ordered).await.unwrap();
    let mut bytes = vec![0; SIZE / 2];
    StdRng::seed_from_u64(5).fill_bytes(&mut bytes);
    disk.write(0, IoBuf::copy_of(&bytes)).await.unwrap();
    disk.close().await.unwrap();
    drop(disk);
    host
}

async fn content(host: &MemoryHost) -> Vec<u8> {
    let disk = Disk::open(host.any(), name(), &OpenOptions::default()).await.unwrap();
    disk.read(0, IoBuf::zeroed(SIZE)).await.unwrap().to_vec()
}

/// The image's bytes, to be changed.
struct Image {
    bytes: Vec<u8>,
    header: Header,
    geometry: Geometry,
}

impl Image {
    fn of(host: &MemoryHost) -> Self {
        let bytes = host.contents(NAME).unwrap();
        let header = Header::parse(&bytes).unwrap();
        let geometry = header.geometry().unwrap();
        Self { bytes, header, geometry }
    }

    fn l1(&self) -> usize {
        self.header.l1_table_offset.get() as usize
    }

    fn table(&self) -> usize {
        self.header.refcount_table_offset.get() as usize
    }

    fn block(&self) -> usize {
        RefcountTableEntry::read(&self.bytes, self.table() / 8)
            .and_then(|entry| entry.offset(&self.geometry).unwrap())
            .map_or(0, |at| at.get() as usize)
    }

    fn get(&self, at: usize) -> u64 {
        u64::from_be_bytes(self.bytes[at..at + 8].try_into().unwrap())
    }

    fn put(&mut self, at: usize, value: u64) {
        self.bytes[at..at + 8].copy_from_slice(&value.to_be_bytes());
    }

    /// The first L2 table, and the host cluster of a guest cluster.
    fn l2(&self) -> usize {
        (self.get(self.l1()) & 0x00ff_ffff_ffff_fe00) as usize
    }

    fn host_of(&self, guest: usize) -> u64 {
        (self.get(self.l2() + guest * 8) & 0x00ff_ffff_ffff_fe00) / CLUSTER as u64
    }

    fn set_refcount(&mut self, cluster: u64, value: u64) {
        let (_, index) = self.geometry.refcount_position(HostCluster::new(cluster));
        let (block, order) = (self.block(), self.geometry.refcount_order());
        order.write(&mut self.bytes[block..block + CLUSTER], index, value).unwrap();
    }

    fn refcounts(&self) -> &[u8] {
        &self.bytes[self.block()..self.block() + CLUSTER]
    }

    fn into(self) -> MemoryHost {
        let host = MemoryHost::new();
        host.insert(NAME, &self.bytes);
        host
    }
}

fn is_marked(host: &MemoryHost) -> bool {
    let bytes = host.contents(NAME).unwrap();
    Header::parse(&bytes).unwrap().incompatible.contains(IncompatibleFeatures::CORRUPT)
}

#[test]
fn a_repair_changes_no_data_where_l1_size_is_too_large() {
    block_on(async {
        let good = make(&NewDisk::default()).await;
        let before = content(&good).await;
        // Each reaches further: into the L2 tables, the first data, all of it.
        for entries in [600_u32, 1200, 4096, 100_000] {
            let mut image = Image::of(&good);
            let at = field::L1_SIZE;
            image.bytes[at..at + 4].copy_from_slice(&entries.to_be_bytes());
            let end = image.l1() + entries as usize * 8;
            let length = image.bytes.len().max(end);
            image.bytes.resize(length, 0);
            let host = image.into();
            for repair in [Repair::Leaks, Repair::All] {
                let report = examine(&host, repair).await.unwrap();
                assert!(!report.is_clean(), "{entries}: {report:?}");
                assert!(content(&host).await == before, "{entries}, {repair:?}: the disk changed");
            }
        }
    });
}

#[test]
fn a_repair_frees_nothing_where_an_l1_entry_is_obviously_wrong() {
    block_on(async {
        let good = make(&NewDisk::default()).await;
        let image = Image::of(&good);
        let (l1, l2, table) = (image.l1() as u64, image.l2() as u64, image.table() as u64);
        let (copied, second) = (1 << 63, image.get(image.l1() + 8));
        for (index, wrong) in [
            (0, l1 | copied),
            (0, l1),
            (0, copied),
            (0, 1 << 57),
            (0, table | copied),
            (0, image.block() as u64 | copied),
            (1, l2 | copied),
            (0, second),
        ] {
            let mut image = Image::of(&good);
            let at = image.l1() + index * 8;
            image.put(at, wrong);
            let before = image.refcounts().to_vec();
            let host = image.into();
            let found = examine(&host, Repair::None).await.unwrap();
            assert!(found.corruptions > 0, "{wrong:#x}: {found:?}");
            for repair in [Repair::Leaks, Repair::All, Repair::All] {
                let report = examine(&host, repair).await.unwrap();
                assert!(report.corruptions > 0, "{wrong:#x}: {report:?}");
                assert_eq!((report.leaks, report.leaks_fixed), (found.leaks, 0), "{wrong:#x}");
                let after = Image::of(&host);
                let order = after.geometry.refcount_order();
                for cluster in 0..after.bytes.len() / CLUSTER {
                    let kept =
                        order.read(after.refcounts(), cluster) >= order.read(&before, cluster);
                    assert!(kept, "{wrong:#x}, {repair:?}: cluster {cluster} was freed");
                }
            }
        }
    });
}

#[test]
fn entries_that_lead_to_a_table_free_nothing() {
    block_on(async {
        let good = make(&NewDisk::default()).await;
        let image = Image::of(&good);
        for wrong in [0, image.l1(), image.l2()] {
            let mut image = Image::of(&good);
            let at = image.l2() + 8 * 7;
            // Offset 0 says that there is nothing; with the flag of a cluster that was.
            image.put(at, wrong as u64 | 1 << 63);
            let host = image.into();
            let found = examine(&host, Repair::None).await.unwrap();
            assert_eq!(found.leaks, 1, "{wrong:#x}: {found:?}");
            let report = examine(&host, Repair::All).await.unwrap();
            assert_eq!((report.leaks, report.leaks_fixed), (1, 0), "{wrong:#x}: {report:?}");
        }
    });
}

#[test]
fn two_references_are_not_one_where_refcounts_are_narrow() {
    block_on(async {
        // A data cluster that an L1 entry takes for a table has two references, of which refcounts of one
        // bit can hold one.
        let good = make(&NewDisk::default().refcount_bits(1)).await;
        let mut image = Image::of(&good);
        let (data, at) = (image.host_of(3), image.l1() + 8);
        image.put(at, (data * CLUSTER as u64) | 1 << 63);
        let start = data as usize * CLUSTER;
        let before = image.bytes[start..start + CLUSTER].to_vec();
        let host = image.into();
        let _ = examine(&host, Repair::All).await.unwrap();
        assert!(Image::of(&host).bytes[start..start + CLUSTER] == before);
    });
}

#[test]
fn a_header_that_seems_free_is_found_and_repaired() {
    block_on(async {
        let mut image = Image::of(&make(&NewDisk::default()).await);
        image.set_refcount(0, 0);
        let host = image.into();
        assert_eq!(examine(&host, Repair::None).await.unwrap().corruptions, 1);
        assert_eq!(examine(&host, Repair::All).await.unwrap().corruptions_fixed, 1);
        assert!(examine(&host, Repair::None).await.unwrap().is_clean());
    });
}

/// Writes something new; what it says, with the disk as it is after that.
async fn write(host: &MemoryHost, mode: MetadataMode) -> Result<(), DiskError> {
    let disk = open(host, mode).await?;
    let free = SIZE as u64 / 2 + 8192;
    let written = disk.write(free, IoBuf::copy_of(&[7; 3 * CLUSTER])).await.map(drop);
    let flushed = disk.flush().await;
    let read = disk.read(0, IoBuf::zeroed(SIZE / 2)).await;
    assert!(read.is_ok(), "reads go on");
    if written.is_err() {
        let again = disk.write(0, IoBuf::copy_of(&[8; 512])).await;
        assert!(matches!(again, Err(DiskError::Poisoned { .. })), "{again:?}");
    }
    let closed = disk.close().await;
    written.and(flushed).and(closed)
}

const MODES: [MetadataMode; 4] = MetadataMode::ALL;

#[test]
fn nothing_is_written_where_a_table_seems_free() {
    block_on(async {
        let good = make(&NewDisk::default()).await;
        let before = content(&good).await;
        let image = Image::of(&good);
        let own = [0, image.l1(), image.l2(), image.table(), image.block()];
        let data = image.host_of(0);
        for mode in MODES {
            for table in own {
                let mut image = Image::of(&good);
                image.set_refcount((table / CLUSTER) as u64, 0);
                // And data, which is what would be written over.
                image.set_refcount(data, 0);
                let damaged = image.bytes.clone();
                let host = image.into();
                let error = write(&host, mode).await.unwrap_err().to_string();
                assert!(error.contains("has refcount 0"), "{table:#x}, {mode:?}: {error}");
                assert!(is_marked(&host), "{table:#x}, {mode:?}");
                let mut after = host.contents(NAME).unwrap();
                after[field::INCOMPATIBLE_FEATURES + 7] &= !2;
                assert!(after == damaged, "{table:#x}, {mode:?}: more than the mark was written");
                assert!(content(&host).await == before);

                let error = open(&host, mode).await.err().unwrap().to_string();
                assert!(error.contains("corrupt bit"), "{error}");
                assert!(examine(&host, Repair::All).await.unwrap().is_clean());
                assert!(!is_marked(&host));
                write(&host, mode).await.unwrap();
                assert!(content(&host).await[..SIZE / 2] == before[..SIZE / 2]);
            }
        }
    });
}

#[test]
fn version_2_has_no_mark_but_takes_no_writes_either() {
    block_on(async {
        let mut image = Image::of(&make(&NewDisk::default().version(2)).await);
        image.set_refcount(0, 0);
        let damaged = image.bytes.clone();
        let host = image.into();
        assert!(write(&host, MetadataMode::Auto).await.is_err());
        assert!(host.contents(NAME).unwrap() == damaged);
    });
}

#[test]
fn an_image_is_marked_where_data_lies_on_a_table() {
    block_on(async {
        let good = make(&NewDisk::default()).await;
        for mode in MODES {
            let mut image = Image::of(&good);
            let (at, l1) = (image.l2(), image.l1() as u64);
            image.put(at, l1 | 1 << 63);
            let host = image.into();
            let disk = open(&host, mode).await.unwrap();
            let error = disk.write(0, IoBuf::copy_of(&[1; 512])).await.unwrap_err();
            assert!(error.to_string().contains("own tables"), "{error}");
            assert!(is_marked(&host));
            assert!(disk.read(CLUSTER as u64, IoBuf::zeroed(512)).await.is_ok());
            let error = disk.write_zeroes(65536, 4096, ZeroFlags::default()).await.unwrap_err();
            assert!(matches!(error, DiskError::Poisoned { .. }), "{error}");
        }
    });
}

#[test]
fn tables_in_one_place_are_not_written() {
    block_on(async {
        let good = make(&NewDisk::default()).await;
        let image = Image::of(&good);
        let (l1, l2) = (image.l1(), image.l2() as u64);
        let (table, block) = (image.table(), image.block() as u64);
        let end = image.bytes.len().next_multiple_of(CLUSTER) as u64;
        for (at, value, reason) in [
            (l1 + 8, l2 | 1 << 63, "the L2 table of L1 entry 1"),
            (l1 + 8, l1 as u64 | 1 << 63, "the L2 table of L1 entry 1"),
            (table, 0, "no refcount block"),
            (table, l2, "refcount block 0"),
            (table + 8, block, "refcount block 1"),
            (table, end, "past the end of the file"),
            (table + 8, table as u64, "refcount block 1"),
        ] {
            let mut image = Image::of(&good);
            image.put(at, value);
            let damaged = image.bytes.clone();
            let host = image.into();
            let error = open(&host, MetadataMode::Auto).await.err().unwrap();
            assert!(matches!(error, DiskError::Corrupt { .. }), "{error}");
            assert!(error.to_string().contains(reason), "{error}");
            assert!(host.contents(NAME).unwrap() == damaged);
        }
    });
}

#[test]
fn a_close_does_not_cut_off_data_that_seems_free() {
    block_on(async {
        let good = make(&NewDisk::default()).await;
        let before = content(&good).await;
        for mode in MODES {
            let mut image = Image::of(&good);
            let last = (0..SIZE / 2 / CLUSTER).map(|guest| image.host_of(guest)).max().unwrap();
            image.set_refcount(last, 0);
            let host = image.into();
            let disk = open(&host, mode).await.unwrap();
            // A change that needs no cluster.
            disk.write_zeroes(0, 4096, ZeroFlags::default()).await.unwrap();
            disk.close().await.unwrap();
            drop(disk);
            assert!(content(&host).await[4096..] == before[4096..], "{mode:?}");
        }
    });
}

#[test]
fn an_image_that_does_not_name_its_data_file_is_not_called_clean() {
    block_on(async {
        let good = make(&NewDisk::default().data_file("data")).await;
        assert!(examine(&good, Repair::None).await.unwrap().is_clean());
        let mut image = Image::of(&good);
        // The end of the extensions, where they begin.
        let at = 112;
        assert_eq!(image.bytes[at..at + 4], [0x44, 0x41, 0x54, 0x41], "the data file's name");
        image.bytes[at..at + 4].fill(0);
        let host = image.into();
        assert_eq!(examine(&host, Repair::All).await.unwrap().check_errors, 1);
    });
}

#[test]
fn data_at_another_offset_of_a_data_file_is_neither_read_nor_written() {
    block_on(async {
        let good = make(&NewDisk::default().data_file("data")).await;
        let mut image = Image::of(&good);
        let at = image.l2() + 8 * 5;
        let other = image.get(at) + 2 * CLUSTER as u64;
        image.put(at, other);
        let host = image.into();
        host.insert("data", &good.contents("data").unwrap());
        assert_eq!(examine(&host, Repair::None).await.unwrap().corruptions, 1);
        let disk = open(&host, MetadataMode::Ordered).await.unwrap();
        let offset = 5 * CLUSTER as u64;
        let read = disk.read(offset, IoBuf::zeroed(512)).await.unwrap_err().to_string();
        assert!(read.contains("must equal the guest offset"), "{read}");
        assert!(disk.write(offset, IoBuf::copy_of(&[1; 512])).await.is_err());
        assert!(is_marked(&host));
        assert!(host.contents("data").unwrap() == good.contents("data").unwrap());
    });
}

#[test]
fn nothing_is_written_far_behind_the_end_of_the_file() {
    block_on(async {
        let good = make(&NewDisk::default()).await;
        for mode in MODES {
            let mut image = Image::of(&good);
            let at = image.l2() + 8 * 5;
            image.put(at, 0x8024_bf4e_2a8a_7000);
            let before = image.bytes.len();
            let host = image.into();
            let disk = open(&host, mode).await.unwrap();
            for length in [512, CLUSTER] {
                let bytes = IoBuf::copy_of(&vec![1; length]);
                let error = disk.write(5 * CLUSTER as u64, bytes).await.unwrap_err().to_string();
                assert!(error.contains("past the end of the file"), "{mode:?}: {error}");
            }
            // That part of the disk is lost, and nothing else.
            disk.write(6 * CLUSTER as u64, IoBuf::copy_of(&[1; 512])).await.unwrap();
            disk.close().await.unwrap();
            drop(disk);
            let mode = OpenMode { writable: false, direct: false, locking: Locking::default() };
            let length = host.open(name(), mode).await.unwrap().len().await.unwrap();
            assert_eq!(length, before as u64);
        }
    });
}

/// A refcount that is too low, and a cluster that is taken once more because of it: the other reference goes while the
/// new one is not in the file yet.
#[test]
fn a_reference_that_was_not_counted_ends_none_that_is() {
    let damaged = block_on(async {
        let good = make(&NewDisk::default()).await;
        let mut image = Image::of(&good);
        let host = image.host_of(5);
        image.set_refcount(host, 0);
        image
    });
    let mut found = 0;
    for mode in MODES {
        for turns in 0..60 {
            let memory = MemoryHost::new();
            memory.insert(NAME, &damaged.bytes);
            let plan = Plan::new();
            plan.delay(turns);
            let host = FaultHost::new(memory, plan);
            let options = OpenOptions::new().writable(true).metadata(mode);
            let disk = block_on(Disk::open(host.any(), name(), &options)).unwrap();
            let bytes = IoBuf::copy_of(&[7; CLUSTER]);
            let write = disk.write(SIZE as u64 / 2 + 8192, bytes);
            let others = async {
                give_way(turns).await;
                let discarded = disk.discard(5 * CLUSTER as u64, CLUSTER as u64).await;
                (discarded.map(drop), disk.flush().await)
            };
            let (written, (discarded, flushed)) = block_on(Box::pin(join(write, others)));
            let failed = [discarded, flushed, written.map(drop), block_on(disk.close())];
            let failed: Vec<_> = failed.into_iter().filter_map(Result::err).collect();
            found += u32::from(matches!(failed.first(), Some(DiskError::Corrupt { .. })));
            for error in failed {
                assert!(
                    matches!(error, DiskError::Corrupt { .. } | DiskError::Poisoned { .. }),
                    "{mode:?}, {turns} turns: {error}"
                );
            }
        }
    }
    assert!(found > 0, "the cluster was not taken in any of them");
}

#[test]
fn an_entry_with_a_place_past_any_file_is_damage() {
    block_on(async {
        let host = MemoryHost::new();
        let new = NewDisk::new(1 << 20).cluster_size(512);
        create(&host.any(), name(), &new).await.unwrap();
        let disk = open(&host, MetadataMode::Ordered).await.unwrap();
        disk.write(0, IoBuf::copy_of(&[7; 8192])).await.unwrap();
        disk.close().await.unwrap();
        drop(disk);
        for mode in MODES {
            let mut image = Image::of(&host);
            let at = image.l2() + 8 * 5;
            image.put(at, 1 << 63 | 1 << 55);
            let host = image.into();
            for (from, length) in [(5 * 512, 512), (4 * 512, 2048)] {
                let disk = match open(&host, mode).await {
                    Ok(disk) => disk,
                    Err(error) => {
                        assert!(error.to_string().contains("corrupt bit"), "{error}");
                        continue;
                    }
                };
                let error = disk.write_zeroes(from, length, ZeroFlags::default()).await;
                let error = error.unwrap_err();
                assert!(matches!(error, DiskError::Corrupt { .. }), "{mode:?}: {error}");
                assert!(error.to_string().contains("too large"), "{mode:?}: {error}");
                let _ = disk.close().await;
            }
        }
    });
}

/// Places that an entry of a damaged image may name and that must not be written to, with what the error says.
fn bad_places(image: &Image) -> [(u64, &'static str); 4] {
    [
        (image.l1() as u64, "own tables"),
        (image.l2() as u64, "own tables"),
        (image.table() as u64, "own tables"),
        (1 << 40, "past the end of the file"),
    ]
}

/// Runs `change` on an image whose fifth cluster lies in a place that must not be written to: it fails, and only the
/// header's cluster may be another (the mark, or a journal).
async fn must_refuse(change: impl AsyncFn(&Disk<AnyHost>) -> Result<(), DiskError>) {
    let good = make(&NewDisk::default()).await;
    for (place, reason) in bad_places(&Image::of(&good)) {
        for mode in MODES {
            let mut image = Image::of(&good);
            let at = image.l2() + 8 * 5;
            image.put(at, place | 1 << 63);
            let damaged = image.bytes.clone();
            let host = image.into();
            let disk = open(&host, mode).await.unwrap();
            let error = change(&disk).await.unwrap_err().to_string();
            assert!(error.contains(reason), "{mode:?}: {error}");
            assert_eq!(is_marked(&host), reason == "own tables");
            assert_eq!(disk.size(), SIZE as u64);
            drop(disk);
            assert_eq!(Image::of(&host).header.size, SIZE as u64);
            let left = host.contents(NAME).unwrap();
            assert!(left[CLUSTER..damaged.len()] == damaged[CLUSTER..], "{mode:?}, {place:#x}");
        }
    }
}

/// A clone is a write without bytes of its own.
#[test]
fn nothing_is_cloned_over_a_table_or_far_behind_the_end_of_the_file() {
    let host = MemoryHost::new();
    host.insert("source", &[9; CLUSTER]);
    block_on(must_refuse(async |disk| {
        let source = host.any().open(Path::new("source"), OpenMode::default()).await?;
        disk.clone_in(5 * CLUSTER as u64, CLUSTER as u64, &source, 0).await.map(drop)
    }));
}

#[test]
fn a_disk_whose_last_cluster_would_lie_on_a_table_is_not_shrunk() {
    block_on(must_refuse(async |disk| {
        disk.resize(5 * CLUSTER as u64 + 512, Preallocation::Off, true).await
    }));
}

/// While a write is on its way, its place becomes that of a table: that cannot be prevented, but it is found out.
#[test]
fn a_write_beside_which_its_place_became_a_table_does_not_succeed() {
    let mut image = Image::of(&block_on(make(&NewDisk::default())));
    let free = image.host_of(5);
    image.set_refcount(free, 0);
    let mut met = 0;
    for mode in MODES {
        for (seed, turns) in (1..9).flat_map(|seed| (0..12).map(move |turns| (seed, turns))) {
            let memory = MemoryHost::new();
            memory.insert(NAME, &image.bytes);
            let plan = Plan::new();
            plan.delay(seed * 7919);
            let host = FaultHost::new(memory.clone(), plan);
            let options = OpenOptions::new().writable(true).metadata(mode);
            let disk = block_on(Disk::open(host.any(), name(), &options)).unwrap();
            let own = 5 * CLUSTER as u64;
            block_on(disk.read(own, IoBuf::zeroed(512))).unwrap();
            let write = async {
                give_way(turns).await;
                disk.write(own, IoBuf::copy_of(&[9; 512])).await
            };
            let table = disk.write(SIZE as u64 - 512, IoBuf::copy_of(&[8; 512]));
            let (written, _) = block_on(Box::pin(join(write, table)));
            let _ = block_on(disk.flush());
            drop(disk);
            let after = Image::of(&memory);
            let at = free as usize * CLUSTER;
            let over = after.bytes[at..at + 512] == [9; 512];
            let tables = (1..4).map(|entry| after.get(after.l1() + 8 * entry));
            let is_table =
                tables.map(|entry| entry & 0x00ff_ffff_ffff_fe00).any(|o| o == at as u64);
            assert!(
                !(over && is_table) || is_marked(&memory),
                "{mode:?}, {seed}, {turns} turns: {written:?}"
            );
            met += u32::from(over && written.is_err());
        }
    }
    assert!(met > 0, "no write was on its way");
}

/// The refcount of a cluster with data says that it is free: the next table takes it.
#[test]
fn data_is_not_written_over_what_became_a_table() {
    block_on(async {
        let good = make(&NewDisk::default()).await;
        let mut met = 0;
        for mode in MODES {
            let mut image = Image::of(&good);
            let free = image.host_of(5);
            image.set_refcount(free, 0);
            let host = image.into();
            let disk = open(&host, mode).await.unwrap();
            let own = 5 * CLUSTER as u64;
            // From now on the place is known.
            disk.read(own, IoBuf::zeroed(512)).await.unwrap();
            disk.write(SIZE as u64 - 512, IoBuf::copy_of(&[8; 512])).await.unwrap();
            disk.flush().await.unwrap();
            let is_table = |host: &MemoryHost| {
                let image = Image::of(host);
                (1..4).any(|entry| {
                    image.get(image.l1() + 8 * entry) & 0x00ff_ffff_ffff_fe00
                        == free * CLUSTER as u64
                })
            };
            let of_all = host.contents(NAME).unwrap();
            let table = free as usize * CLUSTER..(free as usize + 1) * CLUSTER;
            let written = disk.write(own, IoBuf::copy_of(&[9; 512])).await;
            if is_table(&host) {
                met += 1;
                let error = written.unwrap_err().to_string();
                assert!(error.contains("own tables"), "{mode:?}: {error}");
                assert!(is_marked(&host));
                assert!(host.contents(NAME).unwrap()[table.clone()] == of_all[table]);
            }
        }
        assert!(met > 0, "the cluster did not become a table");
    });
}

/// The refcounts of a long run of clusters with data say that they are free, and the journal takes them.
#[test]
fn data_is_not_written_over_the_journal() {
    block_on(async {
        let good = make(&NewDisk::default()).await;
        for mode in [MetadataMode::Journal, MetadataMode::Embedded] {
            let mut image = Image::of(&good);
            let lost = 100..600;
            let at: Vec<u64> = lost.clone().map(|guest| image.host_of(guest)).collect();
            for host in &at {
                image.set_refcount(*host, 0);
            }
            let host = image.into();
            let options = OpenOptions::new().writable(true).metadata(mode).journal_size(1 << 20);
            let disk = Disk::open(host.any(), name(), &options).await.unwrap();
            for guest in lost.clone() {
                disk.read((guest * CLUSTER) as u64, IoBuf::zeroed(512)).await.unwrap();
            }
            for number in 0..5 {
                let at = (SIZE / 2 + number * CLUSTER) as u64;
                disk.write(at, IoBuf::copy_of(&[8; CLUSTER])).await.unwrap();
                disk.flush().await.unwrap();
            }
            let area = Image::of(&host).header.journal().copied().unwrap();
            let first = area.area_offset.get() / CLUSTER as u64;
            let last = first + area.area_length / CLUSTER as u64;
            let ours: Vec<usize> =
                lost.clone().filter(|g| (first..last).contains(&at[g - 100])).collect();
            assert!(ours.len() > 200, "the journal does not lie there");
            let error = disk.write((ours[0] * CLUSTER) as u64, IoBuf::copy_of(&[9; 512])).await;
            let error = error.unwrap_err().to_string();
            assert!(error.contains("its journal"), "{mode:?}: {error}");
            assert!(is_marked(&host));
        }
    });
}

/// Clusters past the end of a truncated image are counted: its journal does not take their place.
#[test]
fn a_journal_is_not_put_where_a_truncated_image_had_data() {
    block_on(async {
        let good = make(&NewDisk::default()).await;
        for mode in [MetadataMode::Journal, MetadataMode::Embedded] {
            let mut image = Image::of(&good);
            let last = image.host_of(SIZE / 2 / CLUSTER - 1) as usize;
            image.bytes.truncate((last - 300) * CLUSTER);
            let host = image.into();
            let options = OpenOptions::new().writable(true).metadata(mode).journal_size(1 << 20);
            let disk = Disk::open(host.any(), name(), &options).await.unwrap();
            // A change that needs no cluster.
            disk.write_zeroes(0, 4096, ZeroFlags::default()).await.unwrap();
            disk.flush().await.unwrap();
            let area = Image::of(&host).header.journal().copied().unwrap();
            assert!(area.area_offset.get() > (last * CLUSTER) as u64, "{mode:?}: {area:?}");
        }
    });
}

/// Deduplication can leave such images; QEMU reads them.
#[test]
fn adjacent_clusters_that_share_a_compressed_one_are_read_together() {
    block_on(async {
        let host = MemoryHost::new();
        let new = NewDisk::new(1 << 20).cluster_size(CLUSTER as u64);
        create(&host.any(), name(), &new).await.unwrap();
        let disk = open(&host, MetadataMode::Ordered).await.unwrap();
        let pattern: Vec<u8> = (0..CLUSTER).map(|at| (at / 512 * 7) as u8).collect();
        disk.write_compressed(0, IoBuf::copy_of(&pattern)).await.unwrap();
        disk.close().await.unwrap();
        drop(disk);
        let mut image = Image::of(&host);
        let (at, entry) = (image.l2(), image.get(image.l2()));
        image.put(at + 8, entry);
        image.put(at + 16, entry);
        image.set_refcount(entry % (1 << 40) / CLUSTER as u64, 3);
        let host = image.into();
        assert!(examine(&host, Repair::None).await.unwrap().is_clean());
        let disk = open(&host, MetadataMode::Ordered).await.unwrap();
        for (from, length) in [(0, 3 * CLUSTER), (512, 2 * CLUSTER), (CLUSTER + 512, CLUSTER)] {
            let read = disk.read(from as u64, IoBuf::zeroed(length)).await.unwrap();
            let expected: Vec<u8> = (from..from + length).map(|at| pattern[at % CLUSTER]).collect();
            assert!(read[..] == expected, "{length} bytes from {from}");
        }
    });
}
