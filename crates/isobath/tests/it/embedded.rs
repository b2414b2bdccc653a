//! Mappings that travel in their data: what a flush costs, what a crash leaves, and that a plain image
//! remains.

use crate::common::{export, findings, has_journal, make};
use crate::heads::Reads;
use futures_executor::block_on;
use futures_util::future::join;
use isobath_disk::sabotage::Sabotage;
use isobath_disk::{Disk, DiskError, Layer, MetadataMode, OpenOptions, Preallocation, see_layers};
use isobath_qcow2::NewImage;
use isobath_storage::memory::MemoryHost;
use isobath_storage::{Host, IoBuf, Storage};
use isobath_storage_test::any::{AnyHost, ToAny};
use isobath_storage_test::fault::{FaultHost, Plan};
use isobath_storage_test::give_way;
use isobath_storage_test::pass_through::{Call, Hooks, HostCall, HostHooks, PassThrough};
use isobath_storage_test::recorder::{Change, Record, RecorderHost};
use isobath_testkit::qemu;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const NAME: &str = "disk.qcow2";
const CLUSTER: u64 = 64 << 10;
const SIZE: u64 = 16 << 20;

fn options() -> OpenOptions {
    OpenOptions::new().writable(true).metadata(MetadataMode::Embedded).zone_size(4 << 20)
}

async fn open(host: impl ToAny) -> Disk<AnyHost> {
    Disk::open(host.any(), Path::new(NAME), &options()).await.unwrap()
}

/// Compresses well, also a sector alone.
fn text(tag: u8, length: u64) -> IoBuf {
    let line = format!("line {tag} of a log that says the same again and again\n");
    IoBuf::copy_of(&line.bytes().cycle().take(length as usize).collect::<Vec<_>>())
}

/// Does not compress.
fn noise(tag: u8, length: u64) -> IoBuf {
    let mut rng = SmallRng::seed_from_u64(u64::from(tag));
    IoBuf::copy_of(&(0..length).map(|_| rng.random()).collect::<Vec<u8>>())
}

/// A first sector that does not compress, in a block that does.
fn mixed(tag: u8, length: u64) -> IoBuf {
    let mut bytes = text(tag, length);
    bytes[..512].copy_from_slice(&noise(tag, 512));
    bytes
}

async fn read<H: Host>(disk: &Disk<H>, at: u64, length: u64) -> IoBuf {
    disk.read(at, IoBuf::zeroed(length as usize)).await.unwrap()
}

async fn plain() -> MemoryHost {
    let host = MemoryHost::new();
    make(&host, NAME, &NewImage::new(SIZE)).await;
    host
}

/// An image with a base that is written all over.
async fn overlay() -> MemoryHost {
    let host = MemoryHost::new();
    host.insert("base.raw", &vec![0xbb; SIZE as usize]);
    let mut image = NewImage::new(SIZE);
    image.backing_file = Some("base.raw".into());
    image.backing_format = Some("raw".into());
    make(&host, NAME, &image).await;
    host
}

/// Writes and syncs since some place in a record.
fn requests(record: &Record, from: usize) -> (usize, usize) {
    let entries = record.entries();
    let new = entries.get(from..).unwrap_or_default();
    let syncs = new.iter().filter(|e| matches!(e.change, Change::Flush { .. })).count();
    let writes = new.iter().filter(|e| matches!(e.change, Change::Write { .. })).count();
    (writes, syncs)
}

/// The file as a crash leaves it where everything written has reached the disk.
fn copy(host: &MemoryHost) -> MemoryHost {
    let copy = MemoryHost::new();
    for name in ["base.raw", NAME] {
        if let Some(bytes) = host.contents(name) {
            copy.insert(name, &bytes);
        }
    }
    copy
}

/// The disk as it is recovered from a crash: read-only, then for writing, then by QEMU's eyes.
async fn assert_recovers(host: &MemoryHost, expected: &[u8]) {
    let crashed = copy(host);
    let options = OpenOptions::default();
    let disk = Disk::open(crashed.any(), Path::new(NAME), &options).await.unwrap();
    assert_same(&read(&disk, 0, expected.len() as u64).await, expected);
    drop(disk);
    let disk = open(crashed.clone()).await;
    assert!(!has_journal(&crashed, NAME));
    assert_same(&read(&disk, 0, expected.len() as u64).await, expected);
    disk.close().await.unwrap();
    let directory = export(&crashed);
    let image = directory.path().join(NAME);
    qemu::assert_clean(&image);
    assert_same(&qemu::read_disk(&image, "qcow2"), expected);
}

fn assert_same(found: &[u8], expected: &[u8]) {
    if found != expected {
        let differs = found.iter().zip(expected).position(|(a, b)| a != b);
        panic!("{} bytes instead of {}, at {differs:?}", found.len(), expected.len());
    }
}

#[test]
fn an_append_is_one_write_and_one_sync() {
    block_on(async {
        let host = RecorderHost::new(plain().await);
        let record = host.record();
        let disk = open(host).await;
        for n in 0..3 {
            disk.write(n * CLUSTER, text(1, CLUSTER)).await.unwrap();
            disk.flush().await.unwrap();
        }
        for (k, length) in [4096, 16384, 65536].into_iter().enumerate() {
            for n in 0..4 {
                let from = record.entries().len();
                disk.write((16 * (k as u64 + 1) + n) * CLUSTER, text(2, length)).await.unwrap();
                disk.flush().await.unwrap();
                assert_eq!(requests(&record, from), (1, 1), "{length} {n}");
            }
        }
        disk.close().await.unwrap();
    });
}

#[test]
fn every_case_of_the_paper_survives_a_crash() {
    block_on(async {
        for host in [plain().await, overlay().await] {
            let base = host.contents("base.raw").unwrap_or_else(|| vec![0; SIZE as usize]);
            let mut model = base.clone();
            let disk = open(host.clone()).await;
            let mut step = async |at: u64, bytes: IoBuf| {
                model[at as usize..at as usize + bytes.len()].copy_from_slice(&bytes);
                disk.write(at, bytes).await.unwrap();
                disk.flush().await.unwrap();
                assert_same(&read(&disk, 0, SIZE).await, &model);
                assert_recovers(&host, &model).await;
            };
            for n in 0..3 {
                step(n * CLUSTER, text(1, CLUSTER)).await;
            }
            assert!(has_journal(&host, NAME));
            // First writes that touch the lead block or do not, that compress or do not.
            step(16 * CLUSTER, text(2, 4096)).await;
            step(17 * CLUSTER, mixed(3, 4096)).await;
            step(18 * CLUSTER + 8192, noise(4, 4096)).await;
            step(19 * CLUSTER, noise(5, CLUSTER)).await;
            step(20 * CLUSTER + 100, text(6, 3 * CLUSTER)).await;
            // Writes to other blocks, and over lead blocks.
            step(16 * CLUSTER + 4096, noise(7, 4096)).await;
            step(16 * CLUSTER, text(8, 4096)).await;
            step(16 * CLUSTER + 1024, noise(9, 512)).await;
            step(17 * CLUSTER, mixed(10, 4096)).await;
            step(16 * CLUSTER + 10, text(11, 100)).await;
            step(16 * CLUSTER, noise(12, 4096)).await;
            step(16 * CLUSTER, noise(13, 8192)).await;
            step(18 * CLUSTER + 100, text(14, 5 * CLUSTER)).await;
            disk.close().await.unwrap();
            assert!(!has_journal(&host, NAME));
            assert_recovers(&host, &model).await;
        }
    });
}

/// Clusters are discarded while embedded lead blocks are made plain: their space is returned to the host, and what is
/// read from it meanwhile is no record.
#[test]
fn a_resize_meets_the_discard_of_embedded_clusters() {
    block_on(async {
        for turns in 0..60 {
            let host = plain().await;
            let plan = Plan::new();
            let disk = open(FaultHost::new(host.clone(), plan.clone())).await;
            let mut model = vec![0; 16 * CLUSTER as usize];
            for n in 0..16 {
                let bytes = text(1, CLUSTER);
                model[(n * CLUSTER) as usize..][..bytes.len()].copy_from_slice(&bytes);
                disk.write(n * CLUSTER, bytes).await.unwrap();
                disk.flush().await.unwrap();
            }
            let odd: Vec<u64> = (1..16).step_by(2).map(|n| n * CLUSTER).collect();
            for at in &odd {
                disk.discard(*at, CLUSTER).await.unwrap();
                model[*at as usize..][..CLUSTER as usize].fill(0);
            }
            plan.delay(turns * 7919);
            let resize = async {
                give_way(turns).await;
                disk.resize(SIZE - CLUSTER, Preallocation::Off, true).await
            };
            let (flushed, resized) = futures_util::join!(disk.flush(), resize);
            flushed.unwrap();
            resized.unwrap();
            assert_same(&read(&disk, 0, 16 * CLUSTER).await, &model);
            disk.close().await.unwrap();
            if turns % 20 == 0 {
                model.resize((SIZE - CLUSTER) as usize, 0);
                assert_recovers(&host, &model).await;
            }
        }
    });
}

/// The journal is set up anew, and what it lists of zones is made anew too, whatever lists there were before.
#[test]
fn a_journal_that_is_set_up_again_may_be_too_small_at_once() {
    block_on(async {
        let host = MemoryHost::new();
        let mut image = NewImage::new(SIZE);
        image.cluster_bits = 12;
        make(&host, NAME, &image).await;
        let options = options().journal_size(64 << 10);
        let disk = Disk::open(host.any(), Path::new(NAME), &options).await.unwrap();
        let put = async |at: u64, length: u64| {
            disk.write(at, text(1, length)).await.unwrap();
            disk.flush().await.unwrap();
        };
        put(0, SIZE / 2).await;
        for number in 0..20 {
            put(SIZE / 2 + number * 4096, 4096).await;
        }
        disk.resize(SIZE * 2, Preallocation::Off, false).await.unwrap();
        for number in 0..4 {
            put(SIZE + number * 4096, 4096).await;
            // More than a record holds.
            disk.discard(number * (SIZE / 8), SIZE / 8).await.unwrap();
            disk.flush().await.unwrap();
        }
        for number in 0..4 {
            assert!(read(&disk, SIZE + number * 4096, 4096).await[..] == text(1, 4096)[..]);
        }
        disk.close().await.unwrap();
        drop(disk);
        assert_eq!(findings(&host, NAME).await, Vec::<String>::new());
    });
}

/// Holds back the writes that prepare a zone, of 1 MiB, until they may go on. Those before it is `armed` set up the
/// journal.
#[derive(Clone, Default)]
struct HeldBack {
    armed: Arc<AtomicBool>,
    begun: Arc<AtomicBool>,
    go: Arc<AtomicBool>,
}

impl HostHooks for HeldBack {
    type File = Self;
    type Begun = ();

    async fn begin(&self, _request: HostCall, _name: &Path) -> isobath_storage::Result<()> {
        Ok(())
    }

    fn end(&self, _request: HostCall, _name: &Path, (): ()) {}

    fn file(&self, _file: &impl Storage) -> Self {
        self.clone()
    }
}

impl Hooks for HeldBack {
    type Begun = ();

    async fn begin(&self, _file: &impl Storage, request: Call<'_>) -> isobath_storage::Result<()> {
        if let Call::Write { bufs, .. } = request
            && self.armed.load(Ordering::SeqCst)
            && bufs.iter().map(IoBuf::len).sum::<usize>() == 1 << 20
            && bufs.iter().all(|buf| buf.iter().all(|byte| *byte == 0))
        {
            self.begun.store(true, Ordering::SeqCst);
            while !self.go.load(Ordering::SeqCst) {
                give_way(1).await;
            }
        }
        Ok(())
    }

    async fn end(
        &self,
        _file: &impl Storage,
        (): (),
        _done: Option<Call<'_>>,
    ) -> isobath_storage::Result<()> {
        Ok(())
    }
}

/// Whether data stays that is written once the zones are gone, while zeroes were still on their way to one.
async fn stays_when_zones_end() -> bool {
    let memory = plain().await;
    memory.set_gains_from_written_space(true);
    let held = HeldBack::default();
    let disk = open(PassThrough::around(memory.clone(), held.clone())).await;
    let data = noise(9, 2 << 20);
    let work = async {
        let mut at = 0;
        while !held.begun.load(Ordering::SeqCst) {
            disk.write(at, text(1, CLUSTER)).await.unwrap();
            disk.flush().await.unwrap();
            held.armed.store(true, Ordering::SeqCst);
            give_way(10).await;
            at += CLUSTER;
            assert!(at < SIZE / 2, "no zone is prepared");
        }
        let change = async {
            disk.resize(SIZE * 2, Preallocation::Off, false).await.unwrap();
            let written = disk.write(SIZE, IoBuf::copy_of(&data)).await;
            written.unwrap();
            disk.flush().await.unwrap();
        };
        let go_on = async {
            give_way(2000).await;
            held.go.store(true, Ordering::SeqCst);
        };
        join(change, go_on).await;
        give_way(100).await;
        disk.close().await.unwrap();
    };
    let (kept, ()) = join(disk.upkeep(), work).await;
    kept.unwrap();
    drop(disk);
    let directory = export(&memory);
    qemu::assert_clean(&directory.path().join(NAME));
    let disk = open(memory).await;
    let found = read(&disk, SIZE, data.len() as u64).await;
    disk.close().await.unwrap();
    *found == *data
}

#[test]
fn a_zone_ends_only_once_it_is_prepared() {
    block_on(async {
        assert!(stays_when_zones_end().await);
        let _broken = Sabotage::ZonePreparedLate.begin();
        assert!(!stays_when_zones_end().await, "the test finds what it is for");
    });
}

/// Who only asks for a disk's files does not wait for a recovery.
#[test]
fn a_killed_disks_files_are_listed_without_its_journal_and_lead_blocks() {
    block_on(async {
        let memory = plain().await;
        let disk = open(memory.clone()).await;
        for cluster in 0..32 {
            disk.write(cluster * CLUSTER, text(cluster as u8, CLUSTER)).await.unwrap();
            disk.flush().await.unwrap();
        }
        drop(disk);
        assert!(has_journal(&memory, NAME));
        let read_by = async |listed: bool| {
            let reads = Reads::default();
            let host = PassThrough::around(memory.clone(), reads.clone());
            let name = Path::new(NAME);
            let options = OpenOptions::new();
            if listed {
                let mut files = Vec::new();
                let see = |layer: &Layer<_>| {
                    files.push(layer.name().to_owned());
                    Ok::<_, DiskError>(())
                };
                see_layers(&host.any(), name, &options, see).await.unwrap();
                assert_eq!(files, [name]);
            } else {
                Disk::open(host.any(), name, &options).await.unwrap();
            }
            let bytes: u64 = reads.bytes.lock().values().sum();
            bytes
        };
        let mut unrecovered = OpenOptions::new();
        unrecovered.recovers = false;
        let refused = Disk::open(memory.any(), Path::new(NAME), &unrecovered).await;
        let error = refused.err().unwrap().to_string();
        assert!(error.contains("a disk has what its journal has"), "{error}");
        let (listed, recovered) = (read_by(true).await, read_by(false).await);
        assert!(listed < CLUSTER && recovered > 1 << 20, "{listed} bytes, {recovered}");
    });
}
