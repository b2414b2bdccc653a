//! A file that grows is made longer before its end is reached, where writes past it would wait for each other.

use crate::common::{ALWAYS, assert_consistent, make, run};
use futures_executor::block_on;
use futures_util::future::try_join_all;
use isobath_disk::{CheckOptions, Disk, MetadataMode, NewDisk, OpenOptions, check, create};
use isobath_qcow2::NewImage;
use isobath_storage::memory::MemoryHost;
use isobath_storage::{Host, IoBuf, OpenMode, Result, Storage, StorageExt};
use isobath_storage_file::FileHost;
use isobath_storage_test::any::{AnyHost, ToAny};
use isobath_storage_test::pass_through::{Call, Hooks, HostCall, HostHooks, PassThrough};
use isobath_testkit::qemu;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const NAME: &str = "image";
const CLUSTER: u64 = 64 << 10;
const MODES: [MetadataMode; 3] =
    [MetadataMode::Ordered, MetadataMode::Journal, MetadataMode::Embedded];

/// Counts what makes a file longer.
#[derive(Clone, Default)]
struct Growth {
    writes: Arc<AtomicU64>,
    /// Writes past the end.
    past: Arc<AtomicU64>,
    hints: Arc<AtomicU64>,
}

impl Growth {
    fn counts(&self) -> [u64; 3] {
        [&self.writes, &self.past, &self.hints].map(|count| count.load(Ordering::Relaxed))
    }
}

impl HostHooks for Growth {
    type File = Self;
    type Begun = ();

    async fn begin(&self, _request: HostCall, _name: &Path) -> Result<()> {
        Ok(())
    }

    fn end(&self, _request: HostCall, _name: &Path, (): ()) {}

    fn file(&self, _file: &impl Storage) -> Self {
        self.clone()
    }
}

impl Hooks for Growth {
    type Begun = ();

    async fn begin(&self, file: &impl Storage, request: Call<'_>) -> Result<()> {
        match request {
            Call::Write { offset, bufs } => {
                let length: usize = bufs.iter().map(IoBuf::len).sum();
                let past = offset + length as u64 > file.len().await?;
                self.writes.fetch_add(1, Ordering::Relaxed);
                self.past.fetch_add(past.into(), Ordering::Relaxed);
            }
            Call::ExpectLength(_) => {
                self.hints.fetch_add(1, Ordering::Relaxed);
            }
            _ => {}
        }
        Ok(())
    }

    async fn end(&self, _file: &impl Storage, (): (), _done: Option<Call<'_>>) -> Result<()> {
        Ok(())
    }
}

/// Writes to clusters of the disk, in order.
async fn write(disk: &Disk<AnyHost>, clusters: impl IntoIterator<Item = u64>) {
    for cluster in clusters {
        let bytes = IoBuf::copy_of(&[cluster as u8 | 1; 4096]);
        disk.write(cluster * CLUSTER, bytes).await.unwrap();
    }
}

async fn assert_holds(disk: &Disk<AnyHost>, clusters: impl IntoIterator<Item = u64>) {
    for cluster in clusters {
        let read = disk.read(cluster * CLUSTER, IoBuf::zeroed(CLUSTER as usize)).await.unwrap();
        let (written, rest) = read.split_at(4096);
        assert!(written.iter().all(|byte| *byte == cluster as u8 | 1), "cluster {cluster}");
        assert!(rest.iter().all(|byte| *byte == 0), "cluster {cluster}");
    }
}

fn options(metadata: MetadataMode) -> OpenOptions {
    OpenOptions::new().writable(true).metadata(metadata)
}

#[test]
fn hardly_a_write_to_a_new_cluster_makes_a_direct_file_longer() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image.qcow2");
    for (direct, metadata) in MODES.map(|mode| (true, mode)).into_iter().chain([(false, MODES[0])])
    {
        block_on(async {
            create(&FileHost.any(), &image, &NewDisk::new(4 << 30)).await.unwrap();
            let growth = Growth::default();
            let host = PassThrough::around(FileHost, growth.clone()).any();
            let options = options(metadata).direct(direct);
            let mode = OpenMode { direct, ..OpenMode::default() };
            let file = FileHost.open(&image, OpenMode { writable: true, ..mode }).await.unwrap();
            // By file system.
            let lengthens = file.extends_one_at_a_time();
            assert!(direct || !lengthens);
            drop(file);
            let disk = Disk::open(host, &image, &options).await.unwrap();
            // Eight at a time, as a guest's queue has them.
            for first in (0..2000).step_by(8) {
                let writes = (first..first + 8).map(|cluster| {
                    let bytes = IoBuf::copy_of(&[cluster as u8 | 1; 4096]);
                    disk.write(cluster * CLUSTER, bytes)
                });
                try_join_all(writes).await.unwrap();
            }
            let [writes, past, hints] = growth.counts();
            let length = image.metadata().unwrap().len();
            if lengthens {
                assert!(past < writes / 20, "{metadata:?}: {past} of {writes}");
                assert!((4..24).contains(&hints), "{metadata:?}: {hints}");
            } else {
                assert!(hints == 0 && past > 1000, "{past} {hints}");
            }
            assert_holds(&disk, 0..2000).await;
            disk.close().await.unwrap();
            drop(disk);
            let closed = image.metadata().unwrap().len();
            // Data, its tables, refcounts, the header; a journal's area is a hole behind which there are tables.
            assert!(closed <= 2000 * CLUSTER + (24 << 20), "{metadata:?}: {closed}");
            assert!(closed < length || !lengthens, "{metadata:?}: nothing was ahead");
            let checked = qemu::check(&image);
            assert_eq!(checked.code(), 0, "{}", checked.report());
            let disk = Disk::open(FileHost.any(), &image, &OpenOptions::new()).await.unwrap();
            assert_holds(&disk, 0..2000).await;
        });
    }
}

#[test]
fn a_file_that_a_killed_process_left_too_long_is_cut_again() {
    for metadata in MODES {
        block_on(async {
            let host = MemoryHost::new();
            make(&host, NAME, &NewImage::new(4 << 30)).await;
            let disk = Disk::open(host.any(), Path::new(NAME), &options(metadata)).await.unwrap();
            write(&disk, 0..300).await;
            disk.flush().await.unwrap();
            drop(disk);
            let left = host.contents(NAME).unwrap().len() as u64;
            assert!(left > 320 * CLUSTER, "{metadata:?}: nothing was ahead: {left}");

            // Whoever only reads it or checks it finds nothing wrong.
            let read = OpenOptions::new();
            let disk = Disk::open(host.any(), Path::new(NAME), &read).await.unwrap();
            assert_holds(&disk, 0..300).await;
            drop(disk);
            let options = CheckOptions::default();
            let report = check(&host.any(), Path::new(NAME), &options, &mut |_| {}).await.unwrap();
            assert!(report.is_clean(), "{metadata:?}: {report:?}");

            let writable = self::options(metadata);
            let disk = Disk::open(host.any(), Path::new(NAME), &writable).await.unwrap();
            assert_holds(&disk, 0..300).await;
            // What was left is used, and more.
            write(&disk, 300..900).await;
            assert_holds(&disk, 0..900).await;
            let open = host.contents(NAME).unwrap().len() as u64;
            disk.close().await.unwrap();
            let closed = host.contents(NAME).unwrap().len() as u64;
            assert!(closed < open, "{metadata:?}: nothing was ahead");
            assert!(closed <= 900 * CLUSTER + (8 << 20), "{metadata:?}: {closed}, {left}");
            assert_consistent(&host, NAME);
        });
    }
}

/// Clusters that a truncated file has lost do not read as zeroes because the file was made longer.
#[test]
fn a_truncated_file_is_not_made_longer_over_what_it_has_lost() {
    block_on(async {
        let host = MemoryHost::new();
        make(&host, NAME, &NewImage::new(1 << 30)).await;
        let options = options(MetadataMode::Ordered);
        let disk = Disk::open(host.any(), Path::new(NAME), &options).await.unwrap();
        write(&disk, 0..40).await;
        disk.discard(20 * CLUSTER, 4 * CLUSTER).await.unwrap();
        disk.close().await.unwrap();
        // Clusters 20 to 23 of the disk were where the file ends now, and the others behind them.
        let bytes = host.contents(NAME).unwrap();
        let lost = bytes.windows(4096).step_by(4096).position(|block| block == [25; 4096]).unwrap();
        host.insert(NAME, &bytes[..(lost * 4096) - 4 * CLUSTER as usize]);

        let disk = Disk::open(host.any(), Path::new(NAME), &options).await.unwrap();
        let read = async |cluster: u64| {
            let read = disk.read(cluster * CLUSTER, IoBuf::zeroed(4096)).await;
            read.map(|bytes| bytes[0]).map_err(|error| error.to_string())
        };
        for new in 100..103 {
            write(&disk, [new]).await;
            assert_eq!(read(new).await, Ok(new as u8 | 1));
            assert_eq!(read(19).await, Ok(19));
            for lost in [24, 30, 39] {
                let error = read(lost).await.unwrap_err();
                assert!(error.contains("truncated"), "{error}");
            }
        }
    });
}

/// A request that is given up while the file is made longer loses nothing.
#[test]
fn a_write_may_be_given_up_at_any_turn_while_the_file_grows() {
    for turns in 0..40 {
        let host = MemoryHost::new();
        block_on(make(&host, NAME, &NewImage::new(1 << 30)));
        let options = options(MetadataMode::Ordered);
        let disk = block_on(Disk::open(host.any(), Path::new(NAME), &options)).unwrap();
        for cluster in 0..64 {
            let turns = if cluster % 3 == 0 { turns } else { ALWAYS };
            run(write(&disk, [cluster]), turns);
        }
        let kept = (0..64).filter(|cluster| cluster % 3 != 0);
        block_on(async {
            assert_holds(&disk, kept.clone()).await;
            disk.close().await.unwrap();
            assert_consistent(&host, NAME);
            drop(disk);
            let disk = Disk::open(host.any(), Path::new(NAME), &OpenOptions::new()).await.unwrap();
            assert_holds(&disk, kept).await;
        });
    }
}
