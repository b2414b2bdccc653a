//! Stamps: every change of a file changes them, and reading does not.

use isobath_ring::block_on;
use isobath_ring::{Config, Executor};
use isobath_storage::memory::MemoryHost;
use isobath_storage::{
    Host, IoBuf, Locking, OpenMode, Operation, Stamp, Storage, StorageExt, ZeroMode,
};
use isobath_storage_file::{FileHost, syncs};
use isobath_storage_test::fault::{Fault, FaultHost, Plan};
use isobath_storage_test::recorder::RecorderHost;
use std::fs::{self, File, FileTimes};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, SystemTime};
use tempfile::TempDir;

const READ: OpenMode = OpenMode { writable: false, direct: false, locking: Locking::Exclusive };
const WRITE: OpenMode = OpenMode { writable: true, ..READ };

fn directory() -> TempDir {
    TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

async fn settled(file: &impl Storage) -> Stamp {
    // A busy machine can make one try take too long.
    for _ in 0..20 {
        if let Some(stamp) = file.settled_stamp().await.unwrap() {
            assert_eq!(file.stamp().await.unwrap(), Some(stamp));
            return stamp;
        }
    }
    panic!("the stamp of {} does not settle", file.name().display());
}

/// Each change through the storage itself, at once after a settled stamp.
async fn changes_show<H: Host>(host: &H, name: &Path) {
    let file = host.create(name, WRITE).await.unwrap();
    file.write_at(0, IoBuf::copy_of(&[1; 8192])).await.unwrap();
    let mut last = settled(&file).await;
    assert_eq!((last.length, last.inode), (8192, file.id().inode));
    for change in 0..6 {
        match change {
            // The same bytes are a change too.
            0 => drop(file.write_at(0, IoBuf::copy_of(&[1; 8192])).await.unwrap()),
            1 => drop(file.write_vectored_at(5, vec![IoBuf::copy_of(b"x")]).await.unwrap()),
            2 => file.set_len(5000).await.unwrap(),
            3 => file.set_len(8192).await.unwrap(),
            4 => file.write_zeroes(0, 4096, ZeroMode::default()).await.unwrap(),
            _ => file.discard(0, 4096).await.unwrap(),
        }
        let next = settled(&file).await;
        assert_ne!(next, last, "change {change}");
        last = next;
    }
    drop(file);
    let file = host.open(name, READ).await.unwrap();
    for _ in 0..3 {
        file.read_at(0, IoBuf::zeroed(8192)).await.unwrap();
        file.allocation(0).await.unwrap();
        file.flush().await.unwrap();
        assert_eq!(settled(&file).await, last, "reading changes nothing");
    }
    drop(file);
    let file = host.create(name, WRITE).await.unwrap();
    assert_ne!(settled(&file).await, last);
}

#[test]
fn changes_show_on_every_host() {
    let directory = directory();
    let name = directory.path().join("image");
    let executor = Executor::new(&Config::default()).unwrap();
    executor.block_on(changes_show(&FileHost, &name));
    block_on(changes_show(&FileHost, &name));
    block_on(changes_show(&MemoryHost::new(), &name));
    block_on(changes_show(&RecorderHost::new(MemoryHost::new()), &name));
    block_on(changes_show(&FaultHost::new(MemoryHost::new(), Plan::default()), &name));
}

#[test]
fn changes_behind_the_back_show() {
    let directory = directory();
    let path = directory.path().join("image");
    fs::write(&path, [1; 4096]).unwrap();
    let other = File::options().write(true).open(&path).unwrap();
    let times = fs::metadata(&path).unwrap();
    let back = FileTimes::new()
        .set_modified(times.modified().unwrap())
        .set_accessed(times.accessed().unwrap());
    block_on(async {
        let file = FileHost.open(&path, READ).await.unwrap();
        let mut last = settled(&file).await;
        let before = last;
        for change in 0..4 {
            match change {
                0 => fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap(),
                1 => std::os::unix::fs::FileExt::write_all_at(&other, &[2], 7).unwrap(),
                // The time of the last write is set to what it was before that write.
                2 => other.set_times(back).unwrap(),
                _ => other.set_len(4095).unwrap(),
            }
            let next = settled(&file).await;
            assert_ne!(next, last, "change {change}");
            assert_ne!(next, before, "change {change}");
            last = next;
        }
    });
}

#[test]
fn a_stamp_is_made_durable_by_a_sync() {
    let directory = directory();
    let path = directory.path().join("image");
    fs::write(&path, [1; 4096]).unwrap();
    Executor::new(&Config::default()).unwrap().block_on(async {
        let file = FileHost.open(&path, WRITE).await.unwrap();
        file.write_at(0, IoBuf::copy_of(b"changed")).await.unwrap();
        let before = syncs();
        file.sync_stamp().await.unwrap();
        assert!(syncs() > before);
    });
}

#[test]
fn a_time_in_the_future_never_settles() {
    let directory = directory();
    let path = directory.path().join("image");
    fs::write(&path, [1; 4096]).unwrap();
    let future = SystemTime::now() + Duration::from_hours(1);
    File::options().write(true).open(&path).unwrap().set_modified(future).unwrap();
    let executor = Executor::new(&Config::default()).unwrap();
    executor.block_on(async {
        let file = FileHost.open(&path, READ).await.unwrap();
        assert!(file.stamp().await.unwrap().is_some());
        assert_eq!(file.settled_stamp().await.unwrap(), None);
    });
}

#[test]
fn file_systems_that_others_change_have_no_stamp() {
    block_on(async {
        let unlocked = OpenMode { locking: Locking::Unlocked, ..READ };
        let file = FileHost.open(Path::new("/proc/self/cmdline"), unlocked).await.unwrap();
        assert_eq!(file.stamp().await.unwrap(), None);
        assert_eq!(file.settled_stamp().await.unwrap(), None);
    });
}

#[test]
fn copies_in_memory_that_went_different_ways_differ() {
    let host = MemoryHost::new();
    host.insert("a", &[0; 100]);
    host.insert("b", &[0; 100]);
    let (one, two) = (host.deep_copy(), host.deep_copy());
    let replaced = host.deep_copy();
    replaced.insert("a", &[1; 100]);
    block_on(async {
        let mut stamps = Vec::new();
        for (host, bytes) in
            [(&host, None), (&one, Some(b"x")), (&two, Some(b"y")), (&replaced, None)]
        {
            let file = host.open(Path::new("a"), WRITE).await.unwrap();
            if let Some(bytes) = bytes {
                file.write_at(5, IoBuf::copy_of(bytes)).await.unwrap();
            }
            stamps.push(file.settled_stamp().await.unwrap().unwrap());
        }
        for (index, stamp) in stamps.iter().enumerate() {
            assert!(!stamps[..index].contains(stamp), "{stamps:?}");
        }
        let copy = host.deep_copy().open(Path::new("a"), READ).await.unwrap();
        assert_eq!(copy.stamp().await.unwrap(), Some(stamps[0]));
    });
}

#[test]
fn asking_for_a_stamp_can_fail() {
    let memory = MemoryHost::new();
    memory.insert("a", b"x");
    let plan = Plan::default();
    let host = FaultHost::new(memory, plan.clone());
    block_on(async {
        let file = host.open(Path::new("a"), READ).await.unwrap();
        plan.add(Fault::new(Operation::Query, 0));
        assert_eq!(file.stamp().await.unwrap_err().errno(), libc::EIO);
        plan.add(Fault::new(Operation::Query, 0));
        assert_eq!(file.settled_stamp().await.unwrap_err().errno(), libc::EIO);
    });
}
