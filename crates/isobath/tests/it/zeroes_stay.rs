//! The zeroes that a layer has, by a write or a job, stay when what is below it changes.

use crate::common::{Ticking, complete};
use futures_executor::block_on;
use futures_util::{FutureExt, join};
use isobath_disk::encryption::{Secret, Secrets};
use isobath_disk::pausing::{Held, OnFailure, Policies};
use isobath_disk::throttle::Direction;
use isobath_disk::{
    Below, Disk, ImageFormat, LiveDisk, MetadataMode, NewDisk, NewEncryption, OpenOptions,
    ZeroFlags, create,
};
use isobath_jobs::pace::Pacing;
use isobath_jobs::{JobOptions, MirrorOptions, MirrorSync, StreamOptions};
use isobath_storage::memory::MemoryHost;
use isobath_storage::window::WindowHost;
use isobath_storage::{IoBuf, Operation, Result, Storage, StorageError, StorageExt};
use isobath_storage_test::any::{AnyHost, ToAny};
use isobath_storage_test::pass_through::{Call, Hooks, HostCall, HostHooks, PassThrough};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

const SIZE: usize = 1 << 20;
const CLUSTER: usize = 64 << 10;
const FLAGS: ZeroFlags = ZeroFlags { may_unmap: true, only_fast: false };

async fn open(host: &MemoryHost, name: &str, mode: MetadataMode) -> Arc<LiveDisk<AnyHost>> {
    let options = OpenOptions::new().writable(true).metadata(mode);
    let disk = Disk::open(host.any(), Path::new(name), &options).await.unwrap();
    LiveDisk::new(disk, &options, Arc::new(Ticking::default()))
}

async fn make(host: &MemoryHost, name: &str, new: NewDisk) {
    create(&host.any(), Path::new(name), &new).await.unwrap();
}

/// A qcow2 overlay of the raw file `base`.
fn over_base() -> NewDisk {
    NewDisk::new(SIZE as u64).backing_file("base", "raw")
}

/// The bytes of a disk above a base that has become one of ones.
async fn above_ones(host: &MemoryHost, name: &str) -> Vec<u8> {
    host.insert("base", &vec![1; SIZE]);
    let disk = Disk::open(host.any(), Path::new(name), &OpenOptions::new()).await.unwrap();
    disk.read(0, IoBuf::zeroed(SIZE)).await.unwrap().to_vec()
}

fn job() -> JobOptions {
    JobOptions { pacing: Pacing::None, ..JobOptions::new("job") }
}

#[test]
fn a_zero_write_of_a_part_is_recorded_in_every_mode() {
    block_on(async {
        for mode in MetadataMode::ALL {
            for (version, extended_l2) in [(2, false), (3, false), (3, true)] {
                if version < 3 && mode != MetadataMode::Auto {
                    // Version 2 can have no journal.
                    continue;
                }
                let host = MemoryHost::new();
                host.insert("base", &vec![0; SIZE]);
                let mut new = over_base();
                (new.version, new.extended_l2) = (version, extended_l2);
                make(&host, "overlay", new).await;
                let disk = open(&host, "overlay", mode).await;
                disk.write_zeroes(512, 1024, FLAGS).await.unwrap();
                disk.write_zeroes((3 * CLUSTER - 512) as u64, 1024, FLAGS).await.unwrap();
                disk.close().await.unwrap();
                drop(disk);
                let bytes = above_ones(&host, "overlay").await;
                let what = format!("{mode:?}, version {version}, {extended_l2}");
                assert!(bytes[512..1536].iter().all(|byte| *byte == 0), "{what}");
                let around = 3 * CLUSTER - 512..3 * CLUSTER + 512;
                assert!(bytes[around].iter().all(|byte| *byte == 0), "{what}");
                assert!(bytes[8 * CLUSTER..].iter().all(|byte| *byte == 1), "{what}");
            }
        }
    });
}

/// Files that cannot zero anything fast.
#[derive(Clone, Copy)]
struct Slow;

impl HostHooks for Slow {
    type Begun = ();
    type File = Self;

    async fn begin(&self, _request: HostCall, _name: &Path) -> Result<()> {
        Ok(())
    }

    fn end(&self, _request: HostCall, _name: &Path, (): ()) {}

    fn file(&self, _file: &impl Storage) -> Self {
        *self
    }
}

impl Hooks for Slow {
    type Begun = ();

    async fn begin(&self, file: &impl Storage, request: Call<'_>) -> Result<()> {
        match request {
            Call::WriteZeroes { offset, length, mode } if mode.only_fast => {
                let error = std::io::Error::from_raw_os_error(libc::EOPNOTSUPP);
                let operation = Operation::WriteZeroes;
                Err(StorageError::at(operation, file.name(), offset, length, error))
            }
            _ => Ok(()),
        }
    }

    async fn end(&self, _file: &impl Storage, (): (), _done: Option<Call<'_>>) -> Result<()> {
        Ok(())
    }
}

#[test]
fn a_zero_write_that_must_be_fast_is_refused_where_a_raw_data_file_is_not() {
    block_on(async {
        let host = PassThrough::around(MemoryHost::new(), Slow).any();
        let new = NewDisk::new(SIZE as u64).data_file("data").data_file_raw(true);
        create(&host, Path::new("disk"), &new).await.unwrap();
        let options = OpenOptions::new().writable(true);
        let disk = Disk::open(host, Path::new("disk"), &options).await.unwrap();
        disk.write_zeroes(0, CLUSTER as u64, FLAGS).await.unwrap();
        let fast = ZeroFlags { only_fast: true, ..FLAGS };
        for (offset, length) in [(0, CLUSTER as u64), (512, 1024)] {
            let error = disk.write_zeroes(offset, length, fast).await.unwrap_err();
            assert_eq!(error.errno(), libc::ENOTSUP, "{error}");
            disk.write_zeroes(offset, length, FLAGS).await.unwrap();
        }
        disk.close().await.unwrap();
    });
}

/// Zeroes of what is encrypted are data.
#[test]
fn a_zero_write_that_must_be_fast_is_no_failure_of_an_encrypted_files_storage() {
    block_on(async {
        let secret = Arc::new(Secret::new(b"of the night".to_vec()).unwrap());
        let host = WindowHost::new(MemoryHost::new().any());
        let mut encryption = NewEncryption::new(Arc::clone(&secret));
        encryption.options.iter_time = Duration::from_millis(1);
        let mut new = NewDisk::new(SIZE as u64).format(ImageFormat::Luks);
        new.encryption = Some(encryption);
        create(&host, Path::new("disk.luks"), &new).await.unwrap();
        let mut secrets = Secrets::default();
        secrets.set(0, secret);
        let options = OpenOptions::new().writable(true).format(ImageFormat::Luks).secrets(secrets);
        let disk = Disk::open(host, Path::new("disk.luks"), &options).await.unwrap();
        let disk = LiveDisk::new(disk, &options, Arc::new(Ticking::default()));
        let policies = Policies { writes: OnFailure::Stop, ..Policies::default() };
        disk.pausing().set_policies(policies);
        let fast = ZeroFlags { only_fast: true, ..FLAGS };
        let error = disk.write_zeroes(0, 4096, fast).await.unwrap_err();
        assert_eq!(error.errno(), libc::ENOTSUP, "{error}");
        let pausing = disk.pausing();
        let hold = pausing.hold(pausing.round(), Direction::Write, &error);
        assert_eq!(hold.now_or_never(), Some(Held::Fails));
        assert_eq!(pausing.state().failures, Vec::new());
        disk.write_zeroes(0, 4096, FLAGS).await.unwrap();
        disk.close().await.unwrap();
    });
}

#[test]
fn zeroes_that_become_those_of_version_2_stay_if_the_named_backing_file_is_not_open() {
    block_on(async {
        let host = MemoryHost::new();
        host.insert("base", &vec![1; SIZE]);
        make(&host, "overlay", over_base()).await;
        let options = OpenOptions::new().writable(true).backing_files(vec![Below::Nothing]);
        let disk = Disk::open(host.any(), Path::new("overlay"), &options).await.unwrap();
        disk.write_zeroes(0, SIZE as u64, FLAGS).await.unwrap();
        disk.expand_zeroes().await.unwrap();
        disk.close().await.unwrap();
        drop(disk);
        assert!(above_ones(&host, "overlay").await.iter().all(|byte| *byte == 0));
    });
}

#[test]
fn a_stream_takes_along_zeroes_past_the_end_of_what_stays_below() {
    block_on(async {
        let host = MemoryHost::new();
        host.insert("base", &vec![0; CLUSTER]);
        make(&host, "middle", over_base()).await;
        let middle = open(&host, "middle", MetadataMode::Auto).await;
        let zeroes = 8 * CLUSTER..9 * CLUSTER;
        middle.write_zeroes(zeroes.start as u64, CLUSTER as u64, FLAGS).await.unwrap();
        let data = 9 * CLUSTER..10 * CLUSTER;
        middle.write(data.start as u64, IoBuf::zeroed(CLUSTER)).await.unwrap();
        middle.close().await.unwrap();
        drop(middle);
        make(&host, "top", NewDisk::new(SIZE as u64).backing_file("middle", "qcow2")).await;
        let top = open(&host, "top", MetadataMode::Auto).await;
        let base = Some(top.layers()[2].storage().id());
        let options = StreamOptions { base, ..StreamOptions::default() };
        let (job, work) = isobath_jobs::stream(&top, options, job()).unwrap();
        Box::pin(async { join!(work, complete(&job)) }).await;
        assert!(job.error().is_none(), "{:?}", job.error());
        assert_eq!(top.layers().len(), 2);
        top.close().await.unwrap();
        drop(top);
        let bytes = above_ones(&host, "top").await;
        for range in [zeroes, data] {
            assert!(bytes[range].iter().all(|byte| *byte == 0));
        }
        assert!(bytes[..8 * CLUSTER].iter().all(|byte| *byte == 1));
    });
}

#[test]
fn a_mirror_has_every_byte_of_the_disk_whatever_is_below_its_target() {
    for version in [2, 3] {
        for backing in [false, true] {
            block_on(Box::pin(mirror_over_zeroes(version, backing)));
        }
    }
}

/// Mirrors to a target whose header names a backing file, which is open or, like that of one added with `"backing":
/// null`, not. The file has other data afterwards.
async fn mirror_over_zeroes(version: u32, backing: bool) {
    let host = MemoryHost::new();
    // It reads as zeroes, and nothing says that it will not.
    make(&host, "zero", NewDisk::new(SIZE as u64)).await;
    let mut new = NewDisk::new(SIZE as u64).backing_file("zero", "qcow2");
    new.version = version;
    make(&host, "target", new).await;
    make(&host, "source", NewDisk::new(SIZE as u64)).await;
    let source = open(&host, "source", MetadataMode::Auto).await;
    source.write(CLUSTER as u64, IoBuf::copy_of(&vec![7; CLUSTER])).await.unwrap();
    let options = OpenOptions::new().writable(true).backing(backing);
    let target = Disk::open(host.any(), Path::new("target"), &options).await.unwrap();
    assert_eq!(target.depth(), if backing { 2 } else { 1 });
    let target = LiveDisk::new(target, &options, Arc::new(Ticking::default()));
    let sync = MirrorOptions { sync: MirrorSync::Full };
    let (job, work) = isobath_jobs::mirror(&source, &target, sync, job()).unwrap();
    Box::pin(async { join!(work, complete(&job)) }).await;
    assert!(job.error().is_none(), "{:?}", job.error());
    source.close().await.unwrap();
    drop((source, target));
    let zero = open(&host, "zero", MetadataMode::Auto).await;
    zero.write(0, IoBuf::copy_of(&vec![1; SIZE])).await.unwrap();
    zero.close().await.unwrap();
    drop(zero);
    let bytes = above_ones(&host, "target").await;
    let mut expected = vec![0; SIZE];
    expected[CLUSTER..2 * CLUSTER].fill(7);
    assert!(bytes == expected, "version {version}, backing file open: {backing}");
}

#[test]
fn a_mirror_overwrites_a_target_that_is_damaged() {
    block_on(async {
        let host = MemoryHost::new();
        for name in ["source", "target"] {
            make(&host, name, NewDisk::new(SIZE as u64)).await;
            let disk = open(&host, name, MetadataMode::Auto).await;
            disk.write(0, IoBuf::copy_of(&vec![9; CLUSTER])).await.unwrap();
            disk.close().await.unwrap();
        }
        // The offset of its first cluster is not aligned.
        let mut bytes = host.contents("target").unwrap();
        let number = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
        let l2 = (number(number(40) as usize) & 0x00ff_ffff_ffff_fe00) as usize;
        let entry = number(l2) + 512;
        bytes[l2..l2 + 8].copy_from_slice(&entry.to_be_bytes());
        host.insert("target", &bytes);
        let source = open(&host, "source", MetadataMode::Auto).await;
        let target = open(&host, "target", MetadataMode::Auto).await;
        let _ = target.read(0, IoBuf::zeroed(512)).await.unwrap_err();
        let sync = MirrorOptions { sync: MirrorSync::Full };
        let (job, work) = isobath_jobs::mirror(&source, &target, sync, job()).unwrap();
        Box::pin(async { join!(work, complete(&job)) }).await;
        assert!(job.error().is_none(), "{:?}", job.error());
        let bytes = target.read(0, IoBuf::zeroed(2 * CLUSTER)).await.unwrap();
        assert!(bytes[..CLUSTER] == vec![9; CLUSTER] && bytes[CLUSTER..] == vec![0; CLUSTER]);
        source.close().await.unwrap();
    });
}
