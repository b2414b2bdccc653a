//! Ranges that share the space of another file's.

use crate::mounted::Mounted;
use isobath_ring::block_on;
use isobath_ring::{Config, Executor};
use isobath_storage::memory::MemoryHost;
use isobath_storage::{Host, IoBuf, Locking, OpenMode, Operation, Storage, StorageExt};
use isobath_storage_file::FileHost;
use isobath_storage_test::fault::{Fault, FaultHost, Plan};
use isobath_storage_test::recorder::{Change, Fate, RecorderHost};
use std::io::ErrorKind;
use std::path::Path;
use std::process::Command;

const READ_ONLY: OpenMode =
    OpenMode { writable: false, direct: false, locking: Locking::Exclusive };
const WRITABLE: OpenMode = OpenMode { writable: true, ..READ_ONLY };

fn content(length: usize, seed: usize) -> Vec<u8> {
    (0..length).map(|at| (at * 31 + (at >> 9) + seed * 97) as u8).collect()
}

async fn bytes(file: &impl Storage) -> Vec<u8> {
    let length = file.len().await.unwrap() as usize;
    file.read_at(0, IoBuf::zeroed(length)).await.unwrap().to_vec()
}

/// Checks for every host that can clone ranges.
async fn ranges_are_cloned<H: Host>(host: &H, directory: &Path, direct: bool) {
    let mode = OpenMode { direct, ..WRITABLE };
    let from_name = directory.join("from");
    let from = host.create(&from_name, mode).await.unwrap();
    let mut source = content(40_000, 1);
    from.write_at(0, IoBuf::copy_of(&source)).await.unwrap();
    drop(from);
    let from = host.open(&from_name, OpenMode { direct, ..READ_ONLY }).await.unwrap();
    assert_eq!(from.clone_alignment(), None, "nothing is cloned into what is only read");
    let to = host.create(&directory.join("to"), mode).await.unwrap();
    let block = to.clone_alignment().unwrap();
    assert_eq!(block, 4096);
    let mut model = content(30_000, 2);
    to.write_at(0, IoBuf::copy_of(&model)).await.unwrap();

    assert!(to.clone_range(&from, 0, 0, 0).await.unwrap());
    // Not written to the disk yet, on either side.
    assert!(to.clone_range(&from, 8192, 4096, 12_288).await.unwrap());
    model[4096..16_384].copy_from_slice(&source[8192..20_480]);
    assert_eq!(bytes(&to).await, model);
    // To the end of the source, past the end of the target.
    assert!(to.clone_range(&from, 36_864, 65_536, 40_000 - 36_864).await.unwrap());
    model.resize(65_536, 0);
    model.extend_from_slice(&source[36_864..]);
    assert_eq!(bytes(&to).await, model);
    // Of itself.
    assert!(to.clone_range(&to, 4096, 20_480, 4096).await.unwrap());
    model.copy_within(4096..8192, 20_480);
    assert_eq!(bytes(&to).await, model);

    // An unsupported clone returns an answer, and leaves the bytes unchanged.
    for (from_offset, to_offset, length) in
        [(1, 0, 4096), (0, 512, 4096), (0, 0, 4095), (36_864, 0, 8192), (1 << 40, 0, 4096)]
    {
        let answer = to.clone_range(&from, from_offset, to_offset, length).await.unwrap();
        assert!(!answer, "{from_offset} {to_offset} {length}");
    }
    assert_eq!(bytes(&to).await, model);
    let error = from.clone_range(&to, 0, 0, 4096).await.unwrap_err();
    assert_eq!(error.operation, Operation::Clone);
    assert!(to.clone_range(&from, 0, u64::MAX - 4095, 4096).await.is_err());
    assert!(to.clone_range(&from, u64::MAX - 4095, 0, 4096).await.is_err());

    // They share space, not fate.
    drop(from);
    let from = host.open(&from_name, mode).await.unwrap();
    from.write_at(8192, IoBuf::copy_of(b"changed")).await.unwrap();
    source[8192..8199].copy_from_slice(b"changed");
    to.write_at(4100, IoBuf::copy_of(b"too")).await.unwrap();
    model[4100..4103].copy_from_slice(b"too");
    to.flush().await.unwrap();
    assert_eq!(bytes(&from).await, source);
    assert_eq!(bytes(&to).await, model);
}

/// Nothing is cloned, and that is not an error.
async fn ranges_are_not_cloned<H: Host>(host: &H, directory: &Path) {
    let from = host.create(&directory.join("no-from"), WRITABLE).await.unwrap();
    from.write_at(0, IoBuf::copy_of(&[1; 8192])).await.unwrap();
    let to = host.create(&directory.join("no-to"), WRITABLE).await.unwrap();
    assert_eq!(to.clone_alignment(), None);
    assert!(!to.clone_range(&from, 0, 0, 4096).await.unwrap());
    assert_eq!(to.len().await.unwrap(), 0);
    assert_eq!(from.len().await.unwrap(), 8192);
}

#[test]
fn memory_clones_unless_it_is_told_not_to() {
    let host = MemoryHost::new();
    block_on(ranges_are_cloned(&host, Path::new("/images"), false));
    let wrapped = FaultHost::new(RecorderHost::new(host.clone()), Plan::new());
    block_on(ranges_are_cloned(&wrapped, Path::new("/images"), false));
    host.set_clone_alignment(None);
    block_on(ranges_are_not_cloned(&host, Path::new("/images")));
    block_on(ranges_are_not_cloned(&host.deep_copy(), Path::new("/images")));
}

#[test]
fn a_clone_is_recorded_and_can_fail() {
    let plan = Plan::new();
    let recorder = RecorderHost::new(MemoryHost::new());
    let record = recorder.record();
    let host = FaultHost::new(recorder, plan.clone());
    block_on(async {
        let file = host.create(Path::new("/one"), WRITABLE).await.unwrap();
        file.write_at(0, IoBuf::copy_of(&content(8192, 3))).await.unwrap();
        plan.add(Fault::new(Operation::Clone, 0).errno(libc::ENOSPC));
        let error = file.clone_range(&file, 0, 8192, 4096).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::StorageFull);
        assert!(file.clone_range(&file, 0, 8192, 4096).await.unwrap());
        let last = record.entries().pop().unwrap();
        assert_eq!(last.change, Change::Write(8192, content(8192, 3)[..4096].into()));
        let replayed = record.replay(&MemoryHost::new(), record.len(), |_, _| Fate::Kept).await;
        let replayed = replayed.unwrap().contents("/one").unwrap();
        assert_eq!(replayed[8192..], content(8192, 3)[..4096]);
    });
}

/// The number of runs that a file shares with another, according to the file system.
fn shared_runs(path: &Path) -> usize {
    let output = Command::new("filefrag").arg("-v").arg(path).output();
    let output = output.unwrap_or_else(|error| panic!("filefrag: {error}; install e2fsprogs"));
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().filter(|line| line.contains("shared")).count()
}

#[test]
fn xfs_shares_space() {
    let mounted = Mounted::new("mkfs.xfs", "xfsprogs", &["-q", "-m", "reflink=1"]);
    let executor = Executor::new(&Config::default()).unwrap();
    for direct in [false, true] {
        executor.block_on(ranges_are_cloned(&FileHost, &mounted.path(), direct));
        block_on(ranges_are_cloned(&FileHost, &mounted.path(), direct));
        assert!(shared_runs(&mounted.path().join("to")) > 0);
    }
    // Another file system, seen as such only when it is tried.
    let elsewhere = tempfile::TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    executor.block_on(async {
        let from = FileHost.create(&elsewhere.path().join("from"), WRITABLE).await.unwrap();
        from.write_at(0, IoBuf::copy_of(&[1; 8192])).await.unwrap();
        let to = FileHost.create(&mounted.path().join("other"), WRITABLE).await.unwrap();
        assert!(to.clone_alignment().is_some());
        assert!(!to.clone_range(&from, 0, 0, 4096).await.unwrap());
        assert_eq!(to.len().await.unwrap(), 0);
    });
}

#[test]
fn a_source_that_gave_its_descriptor_up_gets_it_back() {
    let mounted = Mounted::new("mkfs.xfs", "xfsprogs", &["-q", "-m", "reflink=1"]);
    let directory = mounted.path();
    let executor = Executor::new(&Config::default()).unwrap();
    let host = FileHost::with_descriptors(2);
    executor.block_on(async {
        for name in ["a", "b", "c"] {
            let file = host.create(&directory.join(name), WRITABLE).await.unwrap();
            file.write_at(0, IoBuf::copy_of(&content(65_536, 4))).await.unwrap();
        }
        let mut files = Vec::new();
        for name in ["a", "b", "c"] {
            files.push(host.open(&directory.join(name), READ_ONLY).await.unwrap());
        }
        let to = host.create(&directory.join("to"), WRITABLE).await.unwrap();
        for (file, at) in files.iter().zip(0..) {
            assert!(to.clone_range(file, 0, at * 65_536, 65_536).await.unwrap());
        }
        for at in 0..3 {
            let read = to.read_at(at * 65_536, IoBuf::zeroed(65_536)).await.unwrap();
            assert!(*read == content(65_536, 4));
        }
    });
}

#[test]
fn file_systems_that_cannot_say_so() {
    let ext4 = Mounted::new("mkfs.ext4", "e2fsprogs", &["-q", "-F"]);
    let old = Mounted::new("mkfs.xfs", "xfsprogs", &["-q", "-m", "reflink=0"]);
    let executor = Executor::new(&Config::default()).unwrap();
    for mounted in [&ext4, &old] {
        executor.block_on(ranges_are_not_cloned(&FileHost, &mounted.path()));
        block_on(ranges_are_not_cloned(&FileHost, &mounted.path()));
    }
    let memory = tempfile::TempDir::new_in("/dev/shm").unwrap();
    executor.block_on(ranges_are_not_cloned(&FileHost, memory.path()));
}
