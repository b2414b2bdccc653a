//! Tables that point where they must not.

use super::images::{IMAGE, Image, at, base, made, overlay, plain, with_snapshot_and_bitmap};
use super::survive::{guarded, host_with, open, start_of, survive, unharmed, writable};
use futures_executor::block_on;
use isobath_disk::{NewDisk, OpenOptions, ZeroFlags};
use isobath_qcow2::header::field;
use isobath_storage::IoBuf;
use isobath_storage::memory::MemoryHost;
use isobath_testkit::qemu;
use std::fs;

const COPIED: u64 = 1 << 63;

/// Where the header's changeable fields end; QEMU's and ours write only to those before.
const HEADER: usize = 112;

/// The byte of the header that says that the image is corrupt, and the bit.
const CORRUPT_BIT: (usize, u8) = (field::INCOMPATIBLE_FEATURES + 7, 2);

/// What reading the first cluster, and writing to it in several ways, says. The tables at `kept` must
/// be as they were.
fn first_cluster(image: &Image, kept: &[(usize, usize)]) -> (String, String) {
    let bytes = image.bytes.clone();
    let kept = kept.to_vec();
    guarded("first cluster", move || {
        block_on(async {
            let host = host_with(&bytes);
            let read = match open(host.clone(), &OpenOptions::default()).await {
                Ok(disk) => disk.read(0, IoBuf::zeroed(4096)).await.map(drop),
                Err(error) => Err(error),
            };
            let mut written = Vec::new();
            for way in 0..5 {
                let host = host_with(&bytes);
                let result = match open(host.clone(), &writable()).await {
                    Ok(disk) => {
                        let unmap = ZeroFlags { may_unmap: way == 2, only_fast: false };
                        let result = match way {
                            0 => disk.write(100, IoBuf::copy_of(&[0xee; 200])).await.map(drop),
                            1 | 2 => disk.write_zeroes(0, 4096, unmap).await,
                            3 => disk.discard(0, 4096).await,
                            _ => disk.write(0, IoBuf::copy_of(&[0xee; 9000])).await.map(drop),
                        };
                        // What was released must not be given out, and overwritten, either.
                        let more = IoBuf::copy_of(&vec![0xdd; 300_000]);
                        let _ = disk.flush().await;
                        let _ = disk.write(400_000, more).await;
                        let _ = disk.close().await;
                        result
                    }
                    Err(error) => Err(error),
                };
                let mut after = start_of(&host, bytes.len()).await;
                // Who finds out marks the image.
                after[CORRUPT_BIT.0] &= !CORRUPT_BIT.1;
                for (start, end) in &kept {
                    let same = after[*start..*end] == bytes[*start..*end];
                    assert!(same, "way {way}: the table at {start} was overwritten");
                }
                unharmed(&host);
                written.extend(result.err().map(|error| error.to_string()));
            }
            let read = read.err().map_or(String::new(), |error| error.to_string());
            (read, written.first().cloned().unwrap_or_default())
        })
    })
}

#[test]
fn guest_data_upon_the_images_own_tables_is_not_written() {
    let valid = block_on(made(&plain()));
    let l1 = valid.get64(at::L1_OFFSET);
    let block = valid.refcount_block() as u64;
    let table = valid.get64(at::REFCOUNT_TABLE);
    let l2 = valid.l2() as u64;
    for (name, target) in
        [("L1 table", l1), ("L2 table", l2), ("block", block), ("refcount table", table)]
    {
        let mut image = valid.clone();
        image.put64(valid.l2(), COPIED | target);
        let (_, written) = first_cluster(&image, &[(0, 48), (l1 as usize, l1 as usize + 8)]);
        assert!(
            written.contains("image.qcow2"),
            "{name}: written as if nothing were wrong: {written}"
        );
        survive(name, &image.bytes);
    }
}

#[test]
fn an_l2_table_upon_other_tables_is_not_written() {
    let valid = block_on(made(&plain()));
    let l1 = valid.get64(at::L1_OFFSET) as usize;
    let block = valid.refcount_block() as u64;
    let table = valid.get64(at::REFCOUNT_TABLE);
    for target in [l1 as u64, block, table] {
        let mut image = valid.clone();
        image.put64(l1, COPIED | target);
        let (_, written) = first_cluster(&image, &[(0, HEADER)]);
        assert!(!written.is_empty(), "an L2 table at {target} is written to");
        survive("an L2 table upon another", &image.bytes);
    }
}

#[test]
fn offsets_past_the_end_or_unaligned_are_named() {
    let valid = block_on(made(&plain()));
    let l1 = valid.get64(at::L1_OFFSET) as usize;
    let l2 = valid.l2();
    for (place, entry, word) in
        [(l1, COPIED | (1 << 50), "L1"), (l1, COPIED | 0x1200, "L1"), (l2, COPIED | 0x1200, "L2")]
    {
        let mut image = valid.clone();
        image.put64(place, entry);
        let (read, written) = first_cluster(&image, &[(0, HEADER)]);
        for message in [read, written] {
            assert!(
                message.contains("image.qcow2") && message.contains(word),
                "{entry:#x}: {message:?}"
            );
        }
        survive("an offset", &image.bytes);
    }
    // Data past the end: it was cut off.
    let mut image = valid.clone();
    image.put64(l2, COPIED | (1 << 50));
    survive("data past the end", &image.bytes);
}

/// The commands of `qemu-io`, and the same by us, that replace the first cluster or part of it.
#[derive(Clone, Copy, Debug)]
enum Replacing {
    Discard(usize),
    Zeroes(usize),
    Unmap(usize),
    Data(usize),
}

impl Replacing {
    fn of_qemu(self) -> String {
        match self {
            Self::Discard(length) => format!("discard 0 {length}"),
            Self::Zeroes(length) => format!("write -z 0 {length}"),
            Self::Unmap(length) => format!("write -z -u 0 {length}"),
            Self::Data(length) => format!("write -P 7 0 {length}"),
        }
    }

    async fn by_us(self, host: &MemoryHost) -> isobath_disk::Result<()> {
        let disk = open(host.clone(), &writable()).await?;
        let flags = |may_unmap| ZeroFlags { may_unmap, only_fast: false };
        let result = match self {
            Self::Discard(length) => disk.discard(0, length as u64).await,
            Self::Zeroes(length) => disk.write_zeroes(0, length as u64, flags(false)).await,
            Self::Unmap(length) => disk.write_zeroes(0, length as u64, flags(true)).await,
            Self::Data(length) => disk.write(0, IoBuf::copy_of(&vec![7; length])).await.map(drop),
        };
        let _ = disk.close().await;
        result
    }
}

/// What cannot be interpreted is no obstacle to who wants it replaced as a whole, as in QEMU.
#[test]
fn a_cluster_with_an_invalid_entry_is_replaced_where_qemu_does_that() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("image.qcow2");
    let subclusters = NewDisk::default().cluster_size(16384).extended_l2(true);
    let backed = NewDisk::default().cluster_size(16384).extended_l2(true);
    let backed = backed.backing_file("base.raw", "raw");
    fs::write(directory.path().join("base.raw"), base()).unwrap();
    for (new, what) in [
        (plain(), "plain"),
        (overlay(), "overlay"),
        (subclusters, "subclusters"),
        (backed, "subclusters of an overlay"),
    ] {
        let cluster = new.cluster_size as usize;
        let mut image = block_on(made(&new));
        image.put64(image.l2(), COPIED | 0x1200);
        let mut succeeded = 0;
        let all = [Replacing::Discard, Replacing::Zeroes, Replacing::Unmap, Replacing::Data];
        for (replacing, length) in
            all.into_iter().flat_map(|one| [512, cluster / 2, cluster].map(|length| (one, length)))
        {
            let (replacing, whole) = (replacing(length), length == cluster);
            fs::write(&path, &image.bytes).unwrap();
            let theirs = qemu::io(&path, "qcow2", &[replacing.of_qemu()]);
            let said = [String::from_utf8_lossy(&theirs.stdout).as_ref(), &theirs.stderr].concat();
            let theirs = !said.contains("failed") && !said.contains("error");
            let host = host_with(&image.bytes);
            let ours = block_on(replacing.by_us(&host));
            // QEMU also zeroes subclusters of a cluster that it cannot read.
            assert!(!theirs || ours.is_ok() || !whole, "{what}: {replacing:?}: {ours:?}");
            assert!(theirs || ours.is_err(), "{what}: {replacing:?}: QEMU refuses that");
            if theirs && ours.is_ok() {
                let read = |bytes: &[u8]| {
                    let host = host_with(bytes);
                    let read = async {
                        let disk = open(host, &OpenOptions::default()).await?;
                        disk.read(0, IoBuf::zeroed(2 * cluster)).await
                    };
                    block_on(read).map(|data| data.to_vec()).map_err(|error| error.to_string())
                };
                let [one, other] = [host.contents(IMAGE).unwrap(), fs::read(&path).unwrap()]
                    .map(|disk| read(&disk));
                // QEMU keeps the offset in some cases, which leaves a cluster that it cannot read.
                if other.is_ok() {
                    assert!(one == other, "{what}: {replacing:?}: differs from QEMU's");
                }
                succeeded += usize::from(one.is_ok());
            }
        }
        assert!(succeeded >= 3, "{what}: {succeeded}");
    }
}

#[test]
fn two_guest_clusters_in_one_host_cluster_survive() {
    let valid = block_on(made(&plain()));
    let mut image = valid.clone();
    let first = valid.get64(valid.l2());
    image.put64(valid.l2() + 8, first);
    image.put64(valid.l2() + 16, first);
    survive("a shared cluster", &image.bytes);
    let (_, _) = first_cluster(&image, &[(0, HEADER)]);
}

#[test]
fn damaged_compressed_data_is_an_error() {
    let mut valid = block_on(made(&plain()));
    let entry = valid.get64(valid.l2() + 5 * 8);
    assert!(entry >> 62 == 1, "cluster 5 is compressed");
    let place = (entry & ((1 << 58) - 1)) as usize;
    valid.bytes[place..place + 20].fill(0xff);
    let bytes = valid.bytes.clone();
    let message = guarded("damaged compressed data", move || {
        block_on(async {
            let disk = open(host_with(&bytes), &OpenOptions::default()).await.unwrap();
            disk.read(5 * 4096, IoBuf::zeroed(4096)).await.unwrap_err().to_string()
        })
    });
    assert!(message.contains("image.qcow2") && message.contains("compressed"), "{message}");
    survive("damaged compressed data", &valid.bytes);
    // Far away, past the end, and of the greatest length.
    for entry in [1 << 62 | 0x3fff_ffff_ffff_ffff, 1 << 62 | (1 << 45), 1 << 62] {
        let mut image = valid.clone();
        image.put64(valid.l2() + 5 * 8, entry);
        survive("a compressed cluster elsewhere", &image.bytes);
    }
}

#[test]
fn hostile_refcounts_give_out_no_cluster_in_use() {
    // All refcounts zero: every cluster looks free, the tables' own too.
    for new in [plain(), overlay()] {
        let mut image = block_on(made(&new));
        let block = image.refcount_block();
        image.bytes[block..block + 4096].fill(0);
        let l1 = image.get64(at::L1_OFFSET) as usize;
        let _ = first_cluster(&image, &[(0, 48), (l1, l1 + 8)]);
        survive("refcounts of zero", &image.bytes);
        // All at their maximum.
        image.bytes[block..block + 4096].fill(0xff);
        survive("refcounts at their maximum", &image.bytes);
    }
}

#[test]
fn hostile_snapshot_tables_and_bitmap_directories() {
    let valid = with_snapshot_and_bitmap();
    let table = valid.get64(at::SNAPSHOTS_OFFSET) as usize;
    // l1_table_offset, l1_size, id and name sizes, extra data size.
    for (place, value) in [
        (table, u64::MAX),
        (table, 0x1001),
        (table, valid.get64(at::L1_OFFSET)),
        (table + 8, u64::MAX),
        (table + 8, 0x7fff_ffff_0001_0001),
        (table + 32, u64::MAX),
        (table + 32, 0x0000_0000_ffff_ffff),
    ] {
        let mut image = valid.clone();
        image.put64(place, value);
        survive("a snapshot table", &image.bytes);
    }
    let mut image = valid.clone();
    image.put32(at::SNAPSHOTS, 65_536);
    survive("65536 snapshots", &image.bytes);
    // The table upon the header, upon the L1 table, and where it repeats itself without end.
    for offset in [0, valid.get64(at::L1_OFFSET), table as u64] {
        let mut image = valid.clone();
        image.put64(at::SNAPSHOTS_OFFSET, offset);
        image.put32(at::SNAPSHOTS, 40_000);
        survive("a snapshot table elsewhere", &image.bytes);
    }
    let bitmaps = (112..400).step_by(8).find(|at| valid.get32(*at) == 0x2385_2875).unwrap();
    for (place, value) in [
        (bitmaps + 8, u64::from(u32::MAX) << 32),
        (bitmaps + 16, u64::MAX),
        (bitmaps + 16, 64 << 20),
        (bitmaps + 24, u64::MAX),
        (bitmaps + 24, 0),
        (bitmaps + 24, valid.get64(at::L1_OFFSET)),
        (bitmaps + 24, valid.refcount_block() as u64),
    ] {
        let mut image = valid.clone();
        image.put64(place, value);
        let _ = first_cluster(&image, &[(0, 48)]);
        survive("a bitmap directory", &image.bytes);
    }
}

#[test]
fn an_image_marked_dirty_whose_tables_are_bad_is_not_written() {
    let valid = block_on(made(&plain()));
    let mut image = valid.clone();
    image.put64(at::INCOMPATIBLE, 1);
    image.put64(valid.l2(), COPIED | 0x1200);
    survive("dirty with bad tables", &image.bytes);
}
