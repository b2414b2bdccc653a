//! A journal in the image: what it costs, what it leaves, and who may look at it meanwhile.

use crate::common::{assert_consistent, export, has_journal, make};
use futures_executor::block_on;
use futures_util::future::join_all;
use isobath_disk::{
    CheckOptions, Disk, MetadataMode, NewDisk, OpenOptions, Preallocation, Repair, check, create,
};
use isobath_qcow2::NewImage;
use isobath_storage::memory::MemoryHost;
use isobath_storage::{Host, IoBuf, OpenMode, Storage};
use isobath_storage_test::any::{AnyHost, ToAny};
use isobath_storage_test::recorder::{Change, Record, RecorderHost};
use isobath_testkit::qemu;
use std::path::Path;

const NAME: &str = "disk.qcow2";
const CLUSTER: u64 = 64 << 10;

async fn open(host: impl ToAny, metadata: MetadataMode) -> Disk<AnyHost> {
    let options = OpenOptions::new().writable(true).metadata(metadata);
    Disk::open(host.any(), Path::new(NAME), &options).await.unwrap()
}

async fn close<H: Host>(disk: Disk<H>) {
    disk.close().await.unwrap();
}

async fn open_read_only(host: &MemoryHost) -> Disk<AnyHost> {
    Disk::open(host.any(), Path::new(NAME), &OpenOptions::default()).await.unwrap()
}

fn bytes(tag: u8, length: u64) -> IoBuf {
    IoBuf::copy_of(&vec![tag; length as usize])
}

async fn write<H: Host>(disk: &Disk<H>, at: u64, tag: u8, length: u64) {
    disk.write(at, bytes(tag, length)).await.unwrap();
}

async fn assert_reads<H: Host>(disk: &Disk<H>, at: u64, tag: u8, length: u64) {
    let found = disk.read(at, IoBuf::zeroed(length as usize)).await.unwrap();
    assert!(found.iter().all(|byte| *byte == tag), "at {at} for {tag}: {:?}", &found[..16]);
}

fn syncs(record: &Record) -> usize {
    record.entries().iter().filter(|e| matches!(e.change, Change::Flush { .. })).count()
}

/// An image with a base of 64 MiB, written all over.
async fn overlay() -> MemoryHost {
    let host = MemoryHost::new();
    host.insert("base.raw", &vec![0xbb; 64 << 20]);
    let mut image = NewImage::new(64 << 20);
    image.backing_file = Some("base.raw".into());
    image.backing_format = Some("raw".into());
    make(&host, NAME, &image).await;
    host
}

#[test]
fn one_flush_is_one_sync() {
    block_on(async {
        let host = RecorderHost::new(overlay().await);
        let record = host.record();
        let disk = open(host, MetadataMode::Journal).await;
        write(&disk, 0, 1, CLUSTER).await;
        disk.flush().await.unwrap();
        let mut expected = syncs(&record);
        for n in 1..500 {
            // Appends of whole clusters, parts that are copied from the base, writes again to what was
            // just flushed, and to what was flushed long ago.
            match n % 4 {
                0 => write(&disk, n * CLUSTER, 2, CLUSTER).await,
                1 => write(&disk, n * CLUSTER + 4096, 3, 4096).await,
                2 => write(&disk, (n - 1) * CLUSTER + 8192, 4, 4096).await,
                _ => write(&disk, 0, 5, 4096).await,
            }
            disk.flush().await.unwrap();
            expected += 1;
            assert_eq!(syncs(&record), expected, "flush {n}");
        }
        // Nothing to tell is one sync too; several at once share.
        disk.flush().await.unwrap();
        assert_eq!(syncs(&record), expected + 1);
        join_all((0..8).map(|n| {
            let disk = &disk;
            async move {
                write(disk, (600 + n) * CLUSTER, 6, 4096).await;
                disk.flush().await.unwrap();
            }
        }))
        .await;
        assert!(syncs(&record) <= expected + 1 + 8);
        close(disk).await;
    });
}

#[test]
fn an_image_that_was_not_closed_is_refused_by_qemu_read_here_and_recovered() {
    block_on(async {
        let host = overlay().await;
        let disk = open(host.clone(), MetadataMode::Journal).await;
        for n in 0..40 {
            write(&disk, n * CLUSTER, n as u8, 4096).await;
            disk.flush().await.unwrap();
            // What the last record vouches for is written again, and kept for the next.
            write(&disk, n * CLUSTER + 512, n as u8 | 0x80, 512).await;
            assert_reads(&disk, n * CLUSTER + 512, n as u8 | 0x80, 512).await;
        }
        disk.flush().await.unwrap();
        drop(disk);
        assert!(has_journal(&host, NAME));
        let directory = export(&host);
        let refused = qemu::check(&directory.path().join(NAME));
        assert_ne!(refused.code(), 0);
        assert!(refused.report().contains("isobath check -r all"), "{}", refused.report());

        let before = host.contents(NAME).unwrap();
        let disk = open_read_only(&host).await;
        let holds = async |disk: &Disk<AnyHost>| {
            for n in 0..40 {
                assert_reads(disk, n * CLUSTER, n as u8, 512).await;
                assert_reads(disk, n * CLUSTER + 512, n as u8 | 0x80, 512).await;
                assert_reads(disk, n * CLUSTER + 1024, n as u8, 3072).await;
                assert_reads(disk, n * CLUSTER + 4096, 0xbb, 4096).await;
            }
        };
        holds(&disk).await;
        drop(disk);
        let options = CheckOptions::default();
        let report = check(&host.any(), Path::new(NAME), &options, &mut |_| {}).await.unwrap();
        assert!(report.is_clean() && report.allocated_clusters == 40, "{report:?}");
        assert!(before == host.contents(NAME).unwrap(), "a check without repair wrote something");

        let options = CheckOptions { repair: Repair::All, ..CheckOptions::default() };
        let report = check(&host.any(), Path::new(NAME), &options, &mut |_| {}).await.unwrap();
        assert!(report.is_clean() && report.leaks_fixed == 0, "{report:?}");
        assert!(!has_journal(&host, NAME));
        assert_consistent(&host, NAME);
        holds(&open_read_only(&host).await).await;
    });
}

#[test]
fn a_close_leaves_a_plain_image_that_is_as_short_as_can_be() {
    block_on(async {
        let host = MemoryHost::new();
        host.set_gains_from_written_space(true);
        make(&host, NAME, &NewImage::new(1 << 30)).await;
        let disk = open(host.clone(), MetadataMode::Journal).await;
        for n in 0..300 {
            write(&disk, n * CLUSTER, 7, CLUSTER).await;
            disk.flush().await.unwrap();
        }
        let open_length = host.contents(NAME).unwrap().len() as u64;
        close(disk).await;
        assert!(!has_journal(&host, NAME));
        assert_consistent(&host, NAME);
        let length = host.contents(NAME).unwrap().len() as u64;
        assert!(length < open_length, "nothing was ahead");
        // Header, tables, data, and the hole where the journal was.
        assert!(length <= 310 * CLUSTER + (4 << 20), "{length}");
        // A second session finds room for its journal there.
        let disk = open(host.clone(), MetadataMode::Journal).await;
        write(&disk, 300 * CLUSTER, 7, 4096).await;
        disk.flush().await.unwrap();
        close(disk).await;
        assert!(host.contents(NAME).unwrap().len() as u64 <= length + CLUSTER);
        assert_consistent(&host, NAME);
    });
}

#[test]
fn who_seldom_flushes_gets_no_journal_unless_it_is_asked_for() {
    block_on(async {
        let host = overlay().await;
        let disk = open(host.clone(), MetadataMode::Auto).await;
        for n in 0..3 {
            write(&disk, n * CLUSTER, 1, 4096).await;
            disk.flush().await.unwrap();
            disk.flush().await.unwrap();
            assert!(!has_journal(&host, NAME), "after {n}");
        }
        write(&disk, 9 * CLUSTER, 1, 4096).await;
        disk.flush().await.unwrap();
        assert!(has_journal(&host, NAME));
        close(disk).await;

        let host = MemoryHost::new();
        let mut image = NewImage::new(1 << 20);
        image.version = 2;
        make(&host, NAME, &image).await;
        let options = OpenOptions::new().writable(true).metadata(MetadataMode::Journal);
        let refused = Disk::open(host.any(), Path::new(NAME), &options).await.err().unwrap();
        assert!(refused.to_string().contains("version 3"), "{refused}");
        let disk = open(host.clone(), MetadataMode::Auto).await;
        for n in 0..9 {
            write(&disk, n * CLUSTER, 1, 4096).await;
            disk.flush().await.unwrap();
        }
        close(disk).await;
        assert_consistent(&host, NAME);
    });
}

#[test]
fn a_journal_makes_way_for_other_changes_and_comes_back() {
    block_on(async {
        let host = overlay().await;
        let disk = open(host.clone(), MetadataMode::Journal).await;
        let step = async |n: u64| {
            write(&disk, n * CLUSTER, n as u8, 4096).await;
            disk.flush().await.unwrap();
            assert!(has_journal(&host, NAME));
        };
        step(1).await;
        disk.resize(128 << 20, Preallocation::Off, false).await.unwrap();
        step(2).await;
        disk.write_index(|_| {}).await.unwrap();
        step(3).await;
        disk.resize(32 << 20, Preallocation::Off, true).await.unwrap();
        step(4).await;
        assert!(disk.drop_index().await.unwrap());
        step(5).await;
        for n in 1..=5 {
            assert_reads(&disk, n * CLUSTER, n as u8, 4096).await;
        }
        close(disk).await;
        assert_consistent(&host, NAME);
    });
}

#[test]
fn what_is_too_much_for_a_record_goes_without_one() {
    block_on(async {
        let host = MemoryHost::new();
        make(&host, NAME, &NewImage { cluster_bits: 9, ..NewImage::new(64 << 20) }).await;
        let options = OpenOptions::new()
            .writable(true)
            .metadata(MetadataMode::Journal)
            .journal_size(16 << 10);
        let disk = Disk::open(host.any(), Path::new(NAME), &options).await.unwrap();
        for round in 0..3 {
            write(&disk, round << 20, 1 + round as u8, 8 << 20).await;
            disk.flush().await.unwrap();
        }
        assert_reads(&disk, 2 << 20, 3, 8 << 20).await;
        close(disk).await;
        assert_consistent(&host, NAME);
        let disk = open_read_only(&host).await;
        assert_reads(&disk, 0, 1, 1 << 20).await;
        assert_reads(&disk, 2 << 20, 3, 8 << 20).await;
    });
}

#[test]
fn a_file_of_absurd_length_is_closed_at_once() {
    block_on(async {
        let host = MemoryHost::new();
        make(&host, NAME, &NewImage { cluster_bits: 9, ..NewImage::new(1 << 20) }).await;
        let mode = OpenMode { writable: true, ..OpenMode::default() };
        let file = host.open(Path::new(NAME), mode).await.unwrap();
        file.set_len(1 << 50).await.unwrap();
        drop(file);
        let disk = open(host.clone(), MetadataMode::Journal).await;
        disk.write(0, IoBuf::copy_of(&[7; 512])).await.unwrap();
        disk.flush().await.unwrap();
        close(disk).await;
        let disk = open_read_only(&host).await;
        assert_eq!(&*disk.read(0, IoBuf::zeroed(512)).await.unwrap(), &[7; 512]);
        assert_consistent(&host, NAME);
    });
}

/// A guest's flush to an overlay makes durable what it wrote before, by a server that was killed before its sync, too.
#[test]
fn an_image_that_was_not_closed_is_synced_before_anything_is_written_above_it() {
    block_on(async {
        for closed in [false, true] {
            let host = overlay().await;
            let disk = open(host.clone(), MetadataMode::Journal).await;
            write(&disk, 0, 1, CLUSTER).await;
            disk.flush().await.unwrap();
            if closed {
                disk.close().await.unwrap();
            }
            drop(disk);
            assert_eq!(has_journal(&host, NAME), !closed);
            let top = Path::new("top.qcow2");
            let new = NewDisk::new(64 << 20).backing_file(NAME, "qcow2");
            create(&host.any(), top, &new).await.unwrap();
            for writable in [false, true] {
                let host = RecorderHost::new(host.deep_copy());
                let record = host.record();
                let options = OpenOptions::new().writable(writable);
                let disk = Disk::open(host.any(), top, &options).await.unwrap();
                let below = Path::new(NAME);
                let synced = record.entries().iter().any(|entry| {
                    *entry.file == *below && matches!(entry.change, Change::Flush { .. })
                });
                assert_eq!(synced, writable && !closed, "writable: {writable}, closed: {closed}");
                assert_reads(&disk, 0, 1, CLUSTER).await;
                disk.close().await.unwrap();
            }
        }
    });
}
