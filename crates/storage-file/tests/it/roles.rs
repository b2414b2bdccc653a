//! Handles whose role changes while they are open: writers that become readers, readers that admit a writer of the same
//! process.

use crate::qemu;
use crate::qemu::QemuIo;
use isobath_ring::block_on;
use isobath_ring::{Config, Executor, Worker, spawn};
use isobath_storage::memory::MemoryHost;
use isobath_storage::{
    Host, IoBuf, Locking, OpenMode, Storage, StorageError, StorageExt, ZeroMode,
};
use isobath_storage_file::{FileHost, FileStorage};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tempfile::TempDir;

/// No lock will be released soon, so do not wait.
const READ_ONLY: OpenMode =
    OpenMode { writable: false, direct: false, locking: Locking::Immediate };
const WRITABLE: OpenMode = OpenMode { writable: true, ..READ_ONLY };

fn directory() -> TempDir {
    TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// The flags of this process's descriptors of a file.
fn descriptors(path: &Path) -> Vec<i32> {
    let links = fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().path());
    links
        .filter(|link| fs::read_link(link).is_ok_and(|target| target == path))
        .filter_map(|link| {
            let number = link.file_name()?.to_str()?.to_owned();
            let info = fs::read_to_string(format!("/proc/self/fdinfo/{number}")).ok()?;
            let flags = info.lines().find_map(|line| line.strip_prefix("flags:"))?.trim();
            i32::from_str_radix(flags, 8).ok()
        })
        .collect()
}

fn kind<T>(result: Result<T, StorageError>) -> ErrorKind {
    result.map(drop).unwrap_err().kind()
}

async fn bytes(file: &impl Storage, offset: u64, length: usize) -> Vec<u8> {
    file.read_at(offset, IoBuf::zeroed(length)).await.unwrap().to_vec()
}

/// Checks for every host.
async fn writers_become_readers<H: Host>(host: &H, name: &Path, direct: bool) {
    let writable = OpenMode { direct, ..WRITABLE };
    let file = host.create(name, writable).await.unwrap();
    file.write_at(0, IoBuf::copy_of(&[7; 9000])).await.unwrap();
    assert!(!file.is_read_only());
    for _ in 0..2 {
        file.retire().await.unwrap();
        assert!(file.is_read_only());
        let refused = [
            file.write_at(0, IoBuf::copy_of(b"x")).await.map(drop),
            file.write_vectored_at(0, vec![IoBuf::copy_of(b"x")]).await.map(drop),
            file.write_zeroes(0, 1, ZeroMode::default()).await,
            file.discard(0, 1).await,
            file.set_len(1).await,
            file.clone_range(&file, 0, 4096, 4096).await.map(drop),
        ];
        for result in refused {
            let error = result.unwrap_err();
            assert!(error.to_string().contains("has been made read-only since"), "{error}");
        }
        assert_eq!(file.clone_alignment(), None);
        file.flush().await.unwrap();
        assert_eq!(bytes(&file, 8999, 2).await, [7, 0]);
        assert_eq!(file.len().await.unwrap(), 9000);
    }
    let reader = host.open(name, READ_ONLY).await.unwrap();
    assert_eq!(kind(host.open(name, writable).await), ErrorKind::ResourceBusy);
    reader.retire().await.unwrap();
    assert_eq!(bytes(&reader, 0, 1).await, [7]);
    drop(file);
    assert_eq!(kind(host.open(name, writable).await), ErrorKind::ResourceBusy);
    drop(reader);
    drop(host.open(name, writable).await.unwrap());
}

async fn readers_admit_a_writer<H: Host>(host: &H, name: &Path, direct: bool) {
    let (writable, read_only) = (OpenMode { direct, ..WRITABLE }, OpenMode { direct, ..READ_ONLY });
    let file = host.create(name, writable).await.unwrap();
    file.write_at(0, IoBuf::copy_of(b"before")).await.unwrap();
    assert_eq!(kind(file.admit_writer(true).await), ErrorKind::InvalidInput);
    drop(file);

    let reader = host.open(name, read_only).await.unwrap();
    reader.admit_writer(false).await.unwrap();
    assert_eq!(kind(host.open(name, writable).await), ErrorKind::ResourceBusy);
    for _ in 0..2 {
        reader.admit_writer(true).await.unwrap();
    }
    let writer = host.open(name, writable).await.unwrap();
    assert_eq!(kind(host.open(name, writable).await), ErrorKind::ResourceBusy);
    assert_eq!(kind(host.open(name, read_only).await), ErrorKind::ResourceBusy);
    writer.write_at(2, IoBuf::copy_of(b"tween and after")).await.unwrap();
    assert_eq!(bytes(&reader, 0, 17).await, b"between and after");
    assert_eq!(kind(reader.admit_writer(false).await), ErrorKind::ResourceBusy);
    // Nothing has changed by that.
    writer.set_len(9).await.unwrap();
    assert_eq!(reader.len().await.unwrap(), 9);
    drop(writer);
    let writer = host.open(name, writable).await.unwrap();
    writer.retire().await.unwrap();
    reader.admit_writer(false).await.unwrap();
    assert_eq!(kind(host.open(name, writable).await), ErrorKind::ResourceBusy);
    drop(writer);
    assert_eq!(kind(host.open(name, writable).await), ErrorKind::ResourceBusy);
    assert_eq!(bytes(&reader, 0, 10).await, b"between a\0");
    reader.admit_writer(true).await.unwrap();
    drop(host.open(name, writable).await.unwrap());
    drop(reader);
    let writer = host.open(name, writable).await.unwrap();
    writer.retire().await.unwrap();
    writer.admit_writer(true).await.unwrap();
    drop(host.open(name, writable).await.unwrap());
}

#[test]
fn handles_in_memory() {
    let host = MemoryHost::new();
    block_on(writers_become_readers(&host, Path::new("/one"), false));
    block_on(readers_admit_a_writer(&host, Path::new("/two"), false));
}

#[test]
fn handles_of_files() {
    let executor = Executor::new(&Config::default()).unwrap();
    for direct in [false, true] {
        let directory = directory();
        let (one, two) = (directory.path().join("one"), directory.path().join("two"));
        executor.block_on(writers_become_readers(&FileHost, &one, direct));
        executor.block_on(readers_admit_a_writer(&FileHost, &two, direct));
        block_on(writers_become_readers(&FileHost, &one, direct));
        block_on(readers_admit_a_writer(&FileHost, &two, direct));
        // No right to keep a descriptor is left, but nobody has to give one up.
        let host = FileHost::with_descriptors(12);
        let _kept = [(); 6].map(|()| block_on(host.open(&one, READ_ONLY)).unwrap());
        executor.block_on(readers_admit_a_writer(&host, &two, direct));
        let three = directory.path().join("three");
        executor.block_on(writers_become_readers(&host, &three, direct));
    }
}

#[test]
fn qemu_reads_what_is_no_longer_written() {
    let (_directory, base, top) = qemu::chain();
    let file = block_on(FileHost.open(&base, WRITABLE)).unwrap();
    assert!(qemu::opens(&["-r"], &base).is_err());
    assert!(qemu::opens(&[], &top).is_err(), "its backing file is written to");
    block_on(file.retire()).unwrap();
    qemu::opens(&["-r"], &base).unwrap();
    qemu::opens(&[], &top).unwrap();
    let error = qemu::opens(&[], &base).unwrap_err();
    assert!(error.contains("Failed to get \"write\" lock"), "{error}");
    drop(file);
    qemu::opens(&[], &base).unwrap();
}

#[test]
fn others_never_write_what_this_process_is_let_into() {
    let (_directory, base, top) = qemu::chain();
    let reader = block_on(FileHost.open(&base, READ_ONLY)).unwrap();
    let kept_out = |when: &str| {
        let error = qemu::opens(&[], &base).expect_err(when);
        assert!(error.contains("Failed to get \"write\" lock"), "{when}: {error}");
    };
    kept_out("it only reads");
    block_on(reader.admit_writer(true)).unwrap();
    kept_out("it lets its process in");
    qemu::opens(&["-r"], &base).unwrap();
    let other = QemuIo::open(&["-r"], &base);
    for _ in 0..2 {
        assert_eq!(kind(block_on(FileHost.open(&base, WRITABLE))), ErrorKind::ResourceBusy);
        kept_out("its process was refused");
    }
    drop(other);
    for dropped in [true, false] {
        let writer = block_on(FileHost.open(&base, WRITABLE)).unwrap();
        kept_out("its process writes");
        assert!(qemu::opens(&["-r"], &base).is_err());
        assert_eq!(kind(block_on(FileHost.open(&base, WRITABLE))), ErrorKind::ResourceBusy);
        kept_out("a second writer was refused");
        assert_eq!(kind(block_on(reader.admit_writer(false))), ErrorKind::ResourceBusy);
        if dropped {
            drop(writer);
            kept_out("its process has written");
        } else {
            block_on(writer.retire()).unwrap();
            kept_out("its writer is a reader");
            drop(writer);
            kept_out("its writer has ended");
        }
    }
    qemu::opens(&["-r"], &base).unwrap();
    block_on(reader.admit_writer(false)).unwrap();
    kept_out("it only reads again");
    block_on(reader.admit_writer(true)).unwrap();
    drop(reader);
    qemu::opens(&[], &top).unwrap();
    qemu::opens(&[], &base).unwrap();
}

/// A thousand snapshots: each file is written, then read.
#[test]
fn writers_that_have_ended_share_descriptors() {
    const LIMIT: usize = 8;
    let directory = directory();
    let host = FileHost::with_descriptors(LIMIT);
    let paths: Vec<PathBuf> =
        (0..100).map(|index| directory.path().join(index.to_string())).collect();
    let executor = Executor::new(&Config::default()).unwrap();
    executor.block_on(async {
        let mut files = Vec::new();
        for (path, index) in paths.iter().zip(0_u8..) {
            let file = host.create(path, WRITABLE).await.unwrap();
            file.write_at(0, IoBuf::copy_of(&[index; 100])).await.unwrap();
            file.retire().await.unwrap();
            files.push(file);
            let open: Vec<_> = paths.iter().flat_map(|path| descriptors(path)).collect();
            assert!(open.len() <= LIMIT, "{open:?}");
            assert!(open.iter().all(|flags| flags & libc::O_ACCMODE == libc::O_RDONLY));
        }
        for _ in 0..2 {
            for (file, index) in files.iter().zip(0_u8..) {
                assert_eq!(bytes(file, 0, 100).await, [index; 100]);
            }
        }
        // They must be as they were when their writing ended.
        fs::write(&paths[50], [1; 99]).unwrap();
        let error = files[50].read_at(0, IoBuf::zeroed(1)).await.unwrap_err();
        assert!(error.to_string().contains("length 100, now 99"), "{error}");
        // Changed by the writer that was let in, they are another.
        files[60].admit_writer(true).await.unwrap();
        for file in &files[61..] {
            file.len().await.unwrap();
        }
        let writer = host.open(&paths[60], WRITABLE).await.unwrap();
        writer.write_at(0, IoBuf::copy_of(&[61; 200])).await.unwrap();
        assert_eq!(bytes(&files[60], 100, 100).await, [61; 100]);
        drop(writer);
        files[60].admit_writer(false).await.unwrap();
        for file in &files[61..] {
            file.len().await.unwrap();
        }
        assert_eq!(descriptors(&paths[60]), []);
        assert_eq!(bytes(&files[60], 0, 100).await, [61; 100]);
    });
}

#[test]
fn operations_under_way_end_on_the_writers_descriptor() {
    for direct in [false, true] {
        let directory = directory();
        let path = directory.path().join("image");
        let executor = Executor::new(&Config::default()).unwrap();
        executor.block_on(async {
            let file =
                Arc::new(FileHost.create(&path, OpenMode { direct, ..WRITABLE }).await.unwrap());
            let operations: Vec<_> = (0..64_u64)
                .map(|index| {
                    let file = file.clone();
                    spawn(async move {
                        let offset = index * 70_000;
                        match index % 4 {
                            0 => file.write_zeroes(offset, 70_000, ZeroMode::default()).await,
                            1 => file.discard(offset, 70_000).await,
                            _ => {
                                let buf = IoBuf::copy_of(&vec![index as u8; 70_000]);
                                file.write_at(offset, buf).await.map(drop)
                            }
                        }
                    })
                })
                .collect();
            // Every one has begun.
            isobath_ring::yield_now().await;
            file.retire().await.unwrap();
            assert_eq!(descriptors(&path), [libc::O_CLOEXEC | 0o100_000 | direct_flag(direct)]);
            let length = file.len().await.unwrap();
            for operation in operations {
                operation.await.unwrap().unwrap();
            }
            assert_eq!(file.len().await.unwrap(), length, "nothing was under way any more");
            for index in (0..64).filter(|index| index % 4 > 1) {
                assert_eq!(bytes(&*file, index * 70_000, 70_000).await, vec![index as u8; 70_000]);
            }
        });
    }
}

fn direct_flag(direct: bool) -> i32 {
    if direct { libc::O_DIRECT } else { 0 }
}

/// Its end is the writer's, so it must not wait for it; and what it began is completed later.
#[test]
fn a_dropped_call_leaves_a_handle_that_can_be_retired() {
    let directory = directory();
    let path = directory.path().join("image");
    let executor = Executor::new(&Config::default()).unwrap();
    for turns in 0..40 {
        executor.block_on(async {
            let file = FileHost.create(&path, WRITABLE).await.unwrap();
            file.write_at(0, IoBuf::copy_of(b"bytes")).await.unwrap();
            {
                let mut retire = std::pin::pin!(file.retire());
                for _ in 0..turns {
                    let done = std::future::poll_fn(|context| {
                        std::task::Poll::Ready(retire.as_mut().poll(context).is_ready())
                    });
                    if done.await {
                        break;
                    }
                    isobath_ring::yield_now().await;
                }
            }
            assert_eq!(kind(FileHost.open(&path, WRITABLE).await), BUSY);
            file.flush().await.unwrap();
            file.retire().await.unwrap();
            assert!(file.is_read_only());
            drop(FileHost.open(&path, READ_ONLY).await.unwrap());
            assert_eq!(kind(FileHost.open(&path, WRITABLE).await), BUSY);
            assert_eq!(bytes(&file, 0, 5).await, b"bytes");
        });
    }
}

const BUSY: ErrorKind = ErrorKind::ResourceBusy;

/// Threads read through few descriptors what a third one lets writers at, again and again.
#[test]
fn readers_on_other_threads_notice_nothing() {
    const FILES: usize = 12;
    let directory = directory();
    let host = FileHost::with_descriptors(6);
    let files: Vec<FileStorage> = (0..FILES)
        .map(|index| {
            let path = directory.path().join(index.to_string());
            fs::write(&path, [index as u8; 3000]).unwrap();
            block_on(host.open(&path, READ_ONLY)).unwrap()
        })
        .collect();
    let files = Arc::new(files);
    let done = Arc::new(AtomicBool::new(false));
    let workers: Vec<_> =
        (0..2).map(|_| Worker::start("reader", &Config::default()).unwrap()).collect();
    let readers: Vec<_> = workers
        .iter()
        .zip([3, 5])
        .map(|(worker, step)| {
            let (files, done) = (files.clone(), done.clone());
            worker.handle().spawn_with(move || async move {
                let mut index = 0;
                while !done.load(Ordering::Relaxed) {
                    index = (index + step) % FILES;
                    assert_eq!(bytes(&files[index], 0, 3000).await, [index as u8; 3000]);
                }
            })
        })
        .collect();
    Executor::new(&Config::default()).unwrap().block_on(async {
        for round in 0..200 {
            let index = round * 7 % FILES;
            let file = &files[index];
            file.admit_writer(true).await.unwrap();
            let writer = host.open(file.name(), WRITABLE).await.unwrap();
            writer.write_at(0, IoBuf::copy_of(&[index as u8; 3000])).await.unwrap();
            if round % 2 == 0 {
                writer.retire().await.unwrap();
            } else {
                drop(writer);
            }
            file.admit_writer(false).await.unwrap();
        }
    });
    done.store(true, Ordering::Relaxed);
    for reader in readers {
        reader.wait().unwrap();
    }
}

/// By its name another file would be found, or none.
#[test]
fn a_file_that_was_renamed_or_removed_is_retired_too() {
    let directory = directory();
    let path = directory.path().join("image");
    let host = FileHost::with_descriptors(2);
    let open = || -> FileStorage {
        let file = block_on(host.create(&path, WRITABLE)).unwrap();
        block_on(file.write_at(0, IoBuf::copy_of(b"mine"))).unwrap();
        file
    };
    let removed = open();
    fs::remove_file(&path).unwrap();
    let replaced = open();
    fs::rename(&path, directory.path().join("renamed")).unwrap();
    fs::write(&path, "other").unwrap();
    block_on(async {
        for file in [&removed, &replaced] {
            file.retire().await.unwrap();
            assert!(file.write_at(0, IoBuf::copy_of(b"x")).await.is_err());
        }
        let others = ["one", "two", "three"].map(|name| directory.path().join(name));
        for other in &others {
            fs::write(other, "").unwrap();
        }
        let mut held = Vec::new();
        for other in &others {
            held.push(host.open(other, READ_ONLY).await.unwrap());
        }
        for file in [&removed, &replaced] {
            assert_eq!(bytes(file, 0, 4).await, b"mine");
        }
    });
}
