//! More files than descriptors: files not in use give up theirs, and are reopened unchanged.

use isobath_ring::block_on;
use isobath_ring::{Config, Worker, spawn};
use isobath_storage::{Host, IoBuf, Locking, OpenMode, Storage, StorageError, StorageExt};
use isobath_storage_file::{FileHost, FileStorage, LimitedHost};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tempfile::TempDir;

const READ: OpenMode = OpenMode { writable: false, direct: false, locking: Locking::Exclusive };
const WRITE: OpenMode = OpenMode { writable: true, ..READ };

fn directory() -> TempDir {
    TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// The files of `directory` to which this process has descriptors.
fn opened(directory: &TempDir) -> Vec<PathBuf> {
    let links = fs::read_dir("/proc/self/fd").unwrap();
    links
        .filter_map(|link| fs::read_link(link.unwrap().path()).ok())
        .filter(|path| path.starts_with(directory.path()))
        .collect()
}

fn content(index: usize) -> Vec<u8> {
    (0..2000).map(|at| (index * 7 + at * 13 + (at >> 8)) as u8).collect()
}

fn make(directory: &TempDir, count: usize) -> Vec<PathBuf> {
    let paths: Vec<_> = (0..count).map(|index| directory.path().join(index.to_string())).collect();
    for (index, path) in paths.iter().enumerate() {
        fs::write(path, content(index)).unwrap();
    }
    paths
}

fn read(file: &FileStorage) -> Result<Vec<u8>, StorageError> {
    block_on(file.read_at(0, IoBuf::zeroed(2000))).map(|buf| buf.to_vec())
}

#[test]
fn many_files_are_read_from_two_threads_through_few_descriptors() {
    const LIMIT: usize = 16;
    const TASKS: usize = 3;
    for direct in [false, true] {
        let directory = directory();
        let host = FileHost::with_descriptors(LIMIT);
        let files: Arc<Vec<FileStorage>> = Arc::new(
            make(&directory, 300)
                .iter()
                .map(|path| block_on(host.open(path, OpenMode { direct, ..READ })).unwrap())
                .collect(),
        );
        assert!(opened(&directory).len() <= LIMIT);
        let workers: Vec<_> =
            (0..2).map(|_| Worker::start("reader", &Config::default()).unwrap()).collect();
        let work: Vec<_> = workers
            .iter()
            .zip(1..)
            .map(|(worker, seed)| {
                let files = files.clone();
                worker.handle().spawn_with(move || async move {
                    let tasks: Vec<_> = (0..TASKS)
                        .map(|task| spawn(read_at_random(files.clone(), seed * 1000 + task)))
                        .collect();
                    for task in tasks {
                        task.await.unwrap();
                    }
                })
            })
            .collect();
        // A file can be closed and another opened while the list is read.
        for _ in 0..20 {
            assert!(opened(&directory).len() <= 2 * LIMIT);
        }
        for work in work {
            work.wait().unwrap();
        }
        drop(workers);
        assert!(opened(&directory).len() <= LIMIT);
        drop(files);
        assert_eq!(opened(&directory).len(), 0);
    }
}

async fn read_at_random(files: Arc<Vec<FileStorage>>, seed: usize) {
    let mut state = seed as u64;
    for _ in 0..700 {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let index = (state >> 33) as usize % files.len();
        let offset = (state >> 13) % 1500;
        let file = &files[index];
        if state >> 62 == 0 {
            assert_eq!(file.len().await.unwrap(), 2000);
        }
        let buf = file.read_at(offset, IoBuf::zeroed(500)).await.unwrap();
        let offset = offset as usize;
        assert!(*buf == content(index)[offset..offset + 500], "file {index}");
    }
}

/// A host with two descriptors, of which one file keeps one; the other files share the second.
fn two(paths: &[PathBuf]) -> (LimitedHost, Vec<FileStorage>) {
    let host = FileHost::with_descriptors(2);
    let files = paths.iter().map(|path| block_on(host.open(path, READ)).unwrap()).collect();
    (host, files)
}

/// The result of reading a file that was changed by `change` while its descriptor was given up.
fn after(change: impl FnOnce(&Path)) -> Result<Vec<u8>, StorageError> {
    let directory = directory();
    let paths = make(&directory, 3);
    let (_host, files) = two(&paths);
    assert_eq!(read(&files[2]).unwrap(), content(2));
    assert!(!opened(&directory).contains(&paths[1]));
    change(&paths[1]);
    let result = read(&files[1]);
    if let Err(error) = &result {
        assert!(error.to_string().contains(paths[1].to_str().unwrap()), "{error}");
    }
    assert_eq!(read(&files[0]).unwrap(), content(0), "the others are not concerned");
    assert_eq!(read(&files[2]).unwrap(), content(2));
    result
}

#[test]
fn a_file_that_was_changed_meanwhile_is_not_read() {
    let touch = |path: &Path, time| fs::File::open(path).unwrap().set_modified(time).unwrap();
    let was = |path: &Path| fs::metadata(path).unwrap().modified().unwrap();

    let error = after(|path| {
        let time = was(path);
        let copy = path.with_extension("copy");
        fs::copy(path, &copy).unwrap();
        touch(&copy, time);
        fs::rename(copy, path).unwrap();
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("replaced by another file while in use"), "{error}");
    assert!(error.contains("reopen the disk"), "{error}");

    let error = after(|path| {
        let time = was(path);
        fs::File::options().write(true).open(path).unwrap().set_len(1999).unwrap();
        touch(path, time);
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("modified while in use (length 2000, now 1999)"), "{error}");

    let error = after(|path| {
        let mut bytes = content(1);
        bytes[1000] ^= 1;
        fs::write(path, bytes).unwrap();
        // Whatever the clock's grain.
        touch(path, SystemTime::now() + Duration::from_secs(1));
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("modified while in use (modification time"), "{error}");

    let error = after(|path| fs::remove_file(path).unwrap()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.to_string().contains("raise the limit on open files"), "{error}");

    let error = after(|path| {
        fs::remove_file(path).unwrap();
        let status = std::process::Command::new("mkfifo").arg(path).status();
        assert!(status.expect("mkfifo; install coreutils").success());
    });
    assert!(error.unwrap_err().to_string().contains("a named pipe"));
}

#[test]
fn what_changes_no_byte_is_no_change() {
    assert_eq!(
        after(|path| fs::hard_link(path, path.with_extension("link")).unwrap()).unwrap(),
        content(1)
    );
    let read_only = |path: &Path| {
        let mut permissions = fs::metadata(path).unwrap().permissions();
        permissions.set_readonly(true);
        fs::set_permissions(path, permissions).unwrap();
    };
    assert_eq!(after(read_only).unwrap(), content(1));
}

#[test]
fn a_writer_keeps_out_readers_that_gave_their_lock_up() {
    let directory = directory();
    let paths = make(&directory, 3);
    let (_host, files) = two(&paths);
    assert_eq!(read(&files[2]).unwrap(), content(2));
    let kept = block_on(FileHost.open(&paths[0], WRITE)).unwrap_err();
    assert_eq!(kept.kind(), ErrorKind::ResourceBusy);
    let writer = block_on(FileHost.open(&paths[1], WRITE)).unwrap();
    let error = read(&files[1]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ResourceBusy, "{error}");
    assert_eq!(read(&files[2]).unwrap(), content(2));
    drop(writer);
    assert_eq!(read(&files[1]).unwrap(), content(1), "nothing was written");
    let error = block_on(FileHost.open(&paths[1], WRITE)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ResourceBusy, "with its descriptor it has its lock again");
}

#[test]
fn files_open_for_writing_keep_their_descriptors() {
    let directory = directory();
    let paths = make(&directory, 9);
    let host = FileHost::with_descriptors(3);
    let writers: Vec<_> =
        paths[..5].iter().map(|path| block_on(host.open(path, WRITE)).unwrap()).collect();
    let readers: Vec<_> =
        paths[5..].iter().map(|path| block_on(host.open(path, READ)).unwrap()).collect();
    for _ in 0..3 {
        for (file, index) in readers.iter().zip(5..) {
            assert_eq!(read(file).unwrap(), content(index));
        }
    }
    let open = opened(&directory);
    assert!(paths[..5].iter().all(|path| open.contains(path)), "{open:?}");
    assert!(open.len() <= 5 + 2, "the one that keeps its own, and one for the others: {open:?}");
    for (file, path) in writers.iter().zip(&paths) {
        block_on(file.write_at(0, IoBuf::copy_of(b"new"))).unwrap();
        block_on(file.flush()).unwrap();
        let error = block_on(FileHost.open(path, READ)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ResourceBusy);
    }
}

/// Operations other than reads, each without a descriptor.
#[test]
fn every_question_gets_the_descriptor_back() {
    let directory = directory();
    let paths = make(&directory, 3);
    let (_host, files) = two(&paths);
    let (file, other) = (&files[1], &files[2]);
    block_on(async {
        for question in 0..6 {
            other.len().await.unwrap();
            assert!(!opened(&directory).contains(&paths[1]));
            match question {
                0 => assert_eq!(file.len().await.unwrap(), 2000),
                1 => assert!(file.allocation(0).await.unwrap().length > 0),
                2 => assert!(file.allocated().await.unwrap() > 0),
                3 => assert_eq!(file.stamp().await.unwrap().unwrap().length, 2000),
                4 => drop(file.settled_stamp().await.unwrap()),
                _ => file.flush().await.unwrap(),
            }
            assert!(opened(&directory).contains(&paths[1]));
        }
        assert!(file.write_at(0, IoBuf::copy_of(b"x")).await.is_err());
    });
}

#[test]
fn a_relative_name_outlives_the_working_directory() {
    let directory = directory();
    make(&directory, 3);
    std::env::set_current_dir(directory.path()).unwrap();
    let (host, files) = two(&["0".into(), "1".into(), "2".into()]);
    std::env::set_current_dir("/").unwrap();
    for _ in 0..2 {
        for (index, file) in files.iter().enumerate() {
            assert_eq!(read(file).unwrap(), content(index));
            assert_eq!(file.name(), Path::new(&index.to_string()));
        }
    }
    assert!(block_on(host.open(Path::new("0"), READ)).is_err());
}
