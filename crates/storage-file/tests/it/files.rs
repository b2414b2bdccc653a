//! Files of the operating system: what may be opened, many operations at once, dropped futures.

use crate::mounted::Mounted;
use isobath_ring::block_on;
use isobath_ring::{Config, Executor, Worker, spawn, yield_now};
use isobath_storage::{
    Host, IoBuf, Locking, OpenMode, Storage, StorageError, StorageExt, ZeroMode,
};
use isobath_storage_file::FileHost;
use std::cell::RefCell;
use std::fs;
use std::future::poll_fn;
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use tempfile::TempDir;

const WRITABLE: OpenMode = OpenMode { writable: true, direct: false, locking: Locking::Exclusive };
const DIRECT: OpenMode = OpenMode { direct: true, ..WRITABLE };
const READ: OpenMode = OpenMode { writable: false, ..WRITABLE };

fn directory() -> TempDir {
    TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn executor() -> Executor {
    Executor::new(&Config::default()).unwrap()
}

fn refused(path: &Path, mode: OpenMode) -> StorageError {
    block_on(FileHost.open(path, mode)).unwrap_err()
}

#[test]
fn what_takes_the_place_of_a_target_once_it_was_looked_at_is_judged_too() {
    let directory = directory();
    let at = |name: &str| directory.path().join(name);
    for name in ["source", "target"] {
        fs::write(at(name), name).unwrap();
    }
    let source = block_on(FileHost.open(&at("source"), READ)).unwrap().id();
    let judged = RefCell::new(Vec::new());
    let spared = |id| {
        if judged.borrow().is_empty() {
            fs::remove_file(at("target")).unwrap();
            fs::hard_link(at("source"), at("target")).unwrap();
        }
        judged.borrow_mut().push(id == source);
        id == source
    };
    let made = block_on(FileHost.create_unlike(&at("target"), WRITABLE, &spared)).unwrap();
    assert!(made.is_none());
    assert_eq!(judged.into_inner(), [false, true]);
    assert_eq!(fs::read(at("source")).unwrap(), b"source");
}

#[test]
fn only_regular_files_and_block_devices_are_opened() {
    let directory = directory();
    let fifo = directory.path().join("fifo");
    let name = std::ffi::CString::new(fifo.as_os_str().as_bytes()).unwrap();
    // SAFETY: the name is terminated.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    let socket = directory.path().join("socket");
    let _listener = UnixListener::bind(&socket).unwrap();
    for mode in [READ, WRITABLE] {
        assert_eq!(refused(directory.path(), mode).errno(), libc::EISDIR);
        for (path, what) in [
            (fifo.as_path(), "a named pipe"),
            (&socket, "a socket"),
            (Path::new("/dev/zero"), "a character device"),
        ] {
            let error = refused(path, mode).to_string();
            assert!(error.contains(what) && error.contains(path.to_str().unwrap()), "{error}");
            assert!(block_on(FileHost.create(path, mode)).is_err());
        }
    }
    assert!(block_on(FileHost.create(Path::new("/dev/null"), WRITABLE)).is_err());
    let missing = directory.path().join("no/such/image");
    assert_eq!(refused(&missing, READ).kind(), ErrorKind::NotFound);
    assert!(block_on(FileHost.create(&missing, WRITABLE)).is_err());
}

#[test]
fn the_null_device_is_an_empty_image_that_is_only_read() {
    block_on(async {
        let null = Path::new("/dev/null");
        let file = FileHost.open(null, READ).await.unwrap();
        assert_eq!(file.len().await.unwrap(), 0);
        let read = file.read_at(512, IoBuf::copy_of(&[7; 512])).await.unwrap();
        assert!(read.iter().all(|byte| *byte == 0));
        assert_eq!(file.allocation(0).await.unwrap().length, 0);
    });
    assert!(refused(Path::new("/dev/null"), WRITABLE).to_string().contains("character device"));
}

#[test]
fn names_are_resolved_beside_the_referrer() {
    let directory = directory();
    let image = directory.path().join("image");
    std::fs::write(&image, "x").unwrap();
    let link = directory.path().join("link");
    std::os::unix::fs::symlink(&image, &link).unwrap();
    assert_eq!(FileHost.resolve(&link, "base"), directory.path().join("base"));
    assert_eq!(FileHost.resolve(&link, "/base"), Path::new("/base"));
    assert_eq!(FileHost.canonical(&link).unwrap(), image.canonicalize().unwrap());
    assert!(FileHost.canonical(&directory.path().join("none")).is_err());
    let (a, b) = block_on(async {
        (FileHost.open(&image, READ).await.unwrap(), FileHost.open(&link, READ).await.unwrap())
    });
    assert_eq!(a.id(), b.id());
}

/// Partial blocks written from several threads and many tasks at once: no byte is lost.
#[test]
fn partial_blocks_from_several_threads_keep_their_bytes() {
    const PIECES: u64 = 1500;
    const PIECE: u64 = 37;
    for mode in [DIRECT, WRITABLE] {
        let directory = directory();
        let file = block_on(FileHost.create(&directory.path().join("image"), mode)).unwrap();
        let file = Arc::new(file);
        let threads: Vec<_> =
            (0..3).map(|_| Worker::start("writer", &Config::default()).unwrap()).collect();
        let work: Vec<_> = threads
            .iter()
            .zip(0..)
            .map(|(thread, index)| {
                let file = file.clone();
                thread.handle().spawn_with(move || async move {
                    let tasks: Vec<_> = (index..PIECES)
                        .step_by(3)
                        .map(|piece| {
                            let file = file.clone();
                            spawn(async move {
                                let bytes = IoBuf::copy_of(&[piece as u8 | 1; PIECE as usize]);
                                file.write_at(piece * PIECE, bytes).await.unwrap();
                            })
                        })
                        .collect();
                    for task in tasks {
                        task.await.unwrap();
                    }
                })
            })
            .collect();
        for work in work {
            work.wait().unwrap();
        }
        block_on(async {
            let length = PIECES * PIECE;
            assert_eq!(file.len().await.unwrap(), length);
            let bytes = file.read_at(0, IoBuf::zeroed(length as usize)).await.unwrap();
            for (piece, part) in bytes.chunks(PIECE as usize).enumerate() {
                assert!(part.iter().all(|byte| *byte == piece as u8 | 1), "piece {piece}");
            }
        });
    }
}

/// Partial blocks beside whole-block writes, zeroes and extensions, all in flight at once.
#[test]
fn partial_and_whole_blocks_mix() {
    const BLOCK: u64 = 4096;
    let directory = directory();
    executor().block_on(async {
        let file = FileHost.create(&directory.path().join("image"), DIRECT).await.unwrap();
        let file = Arc::new(file);
        for round in 1..=20_u8 {
            file.set_len(0).await.unwrap();
            let mut tasks = Vec::new();
            for block in 0..30 {
                let (start, file) = (block * 3 * BLOCK, file.clone());
                tasks.push(spawn(async move {
                    let whole = file.write_at(start, IoBuf::copy_of(&[round; BLOCK as usize]));
                    let next = start + BLOCK;
                    let head = file.write_at(next, IoBuf::copy_of(&[round; 1000]));
                    let zero = file.write_zeroes(next + 1000, 500, ZeroMode::default());
                    let tail = file.write_at(next + 1500, IoBuf::copy_of(&[round; 5000]));
                    let ((a, b), (c, d)) = both(both(whole, head), both(zero, tail)).await;
                    for written in [a, b, d] {
                        written.unwrap();
                    }
                    c.unwrap();
                }));
            }
            for task in tasks {
                task.await.unwrap();
            }
            let length = 29 * 3 * BLOCK + BLOCK + 6500;
            assert_eq!(file.len().await.unwrap(), length);
            let bytes = file.read_at(0, IoBuf::zeroed(length as usize)).await.unwrap();
            for block in 0..30 {
                let part = &bytes[block * 3 * BLOCK as usize..][..BLOCK as usize + 6500];
                for (at, byte) in part.iter().enumerate() {
                    let zero = (BLOCK as usize + 1000..BLOCK as usize + 1500).contains(&at);
                    assert_eq!(*byte, if zero { 0 } else { round }, "block {block} byte {at}");
                }
            }
        }
    });
}

async fn both<A, B>(a: impl Future<Output = A>, b: impl Future<Output = B>) -> (A, B) {
    let (mut a, mut b) = (pin!(a), pin!(b));
    let (mut first, mut second) = (None, None);
    poll_fn(move |context| {
        if first.is_none()
            && let Poll::Ready(value) = a.as_mut().poll(context)
        {
            first = Some(value);
        }
        if second.is_none()
            && let Poll::Ready(value) = b.as_mut().poll(context)
        {
            second = Some(value);
        }
        if first.is_none() || second.is_none() {
            return Poll::Pending;
        }
        Poll::Ready((first.take().unwrap(), second.take().unwrap()))
    })
    .await
}

fn poll_once<F: Future + ?Sized>(future: Pin<&mut F>) -> bool {
    future.poll(&mut Context::from_waker(Waker::noop())).is_ready()
}

/// Reads and writes dropped in flight: no memory is written to or freed early, and the rest is correct.
#[test]
fn dropped_operations_end_by_themselves() {
    const LENGTH: usize = 64 << 10;
    for mode in [WRITABLE, DIRECT] {
        let directory = directory();
        let path = directory.path().join("image");
        let alive = Arc::new(());
        let buffer = |fill: u8| {
            let mut bytes = vec![fill; 2 * LENGTH].into_boxed_slice();
            let start = bytes.as_mut_ptr();
            let offset = start.align_offset(4096);
            let owner = Arc::new((std::sync::Mutex::new(bytes), alive.clone()));
            let start = std::ptr::NonNull::new(start.wrapping_add(offset)).unwrap();
            // SAFETY: the range is inside the box, which lives in the owner untouched.
            unsafe { IoBuf::from_owner(start, LENGTH, owner) }
        };
        executor().block_on(async {
            let file = FileHost.create(&path, mode).await.unwrap();
            file.write_at(0, IoBuf::copy_of(&vec![1; 1 << 20])).await.unwrap();
            for round in 0..100_u64 {
                let (offset, other) =
                    (round % 16 * LENGTH as u64, (round + 8) % 16 * LENGTH as u64);
                let mut write = Box::pin(file.write_at(offset, buffer(1)));
                let mut read = Box::pin(file.read_at(other, buffer(9)));
                poll_once(write.as_mut());
                poll_once(read.as_mut());
                if round % 3 == 0 {
                    yield_now().await;
                }
                drop((write, read));
                let bytes = file.read_at(other, IoBuf::zeroed(LENGTH)).await.unwrap();
                assert!(bytes.iter().all(|byte| *byte == 1));
            }
        });
        assert_eq!(Arc::strong_count(&alive), 1, "block_on waits for what was dropped");
        assert!(std::fs::read(&path).unwrap() == vec![1; 1 << 20]);

        // An executor that ends with operations in flight waits for them as well, and the file and its
        // lock are then free.
        let executor = executor();
        let file = block_on(FileHost.open(&path, mode)).unwrap();
        let bufs = [buffer(2), buffer(2)];
        let task = executor.spawn(async move {
            let [first, second] = bufs;
            let first = file.write_at(0, first);
            let second = file.write_at(LENGTH as u64, second);
            both(first, second).await.0.unwrap();
        });
        executor.block_on(async {});
        drop(executor);
        drop(task);
        assert_eq!(Arc::strong_count(&alive), 1);
        block_on(FileHost.open(&path, mode)).unwrap();
    }
}

#[test]
fn a_read_only_file_can_be_flushed_and_not_changed() {
    let directory = directory();
    let path = directory.path().join("image");
    std::fs::write(&path, "bytes").unwrap();
    executor().block_on(async {
        let file = FileHost.open(&path, READ).await.unwrap();
        file.flush().await.unwrap();
        let error = file.write_at(0, IoBuf::copy_of(b"x")).await.unwrap_err();
        assert_eq!(error.errno(), libc::EBADF);
    });
}

#[test]
fn futures_stay_small() {
    let directory = directory();
    let file = block_on(FileHost.create(&directory.path().join("image"), WRITABLE)).unwrap();
    let sizes = [
        size_of_val(&file.read_at(0, IoBuf::empty())),
        size_of_val(&file.write_at(0, IoBuf::empty())),
        size_of_val(&file.write_vectored_at(0, Vec::new())),
        size_of_val(&file.write_zeroes(0, 0, ZeroMode::default())),
        size_of_val(&file.flush()),
    ];
    assert!(sizes.iter().all(|size| *size <= 1024), "{sizes:?}");
}

#[test]
fn more_operations_than_the_ring_holds() {
    let directory = directory();
    let executor = Executor::new(&Config { entries: 4, batch: 1, ..Config::default() }).unwrap();
    executor.block_on(async {
        let file = FileHost.create(&directory.path().join("image"), WRITABLE).await.unwrap();
        let file = Arc::new(file);
        let writes: Vec<_> = (0..12_000_u64)
            .map(|n| {
                let file = file.clone();
                spawn(async move { file.write_at(n * 8, IoBuf::copy_of(&n.to_be_bytes())).await })
            })
            .collect();
        for write in writes {
            write.await.unwrap().unwrap();
        }
        let bytes = file.read_at(0, IoBuf::zeroed(96_000)).await.unwrap();
        assert!(bytes.chunks(8).zip(0..).all(|(chunk, n): (_, u64)| chunk == n.to_be_bytes()));
    });
}

#[test]
fn flushes_are_cheaper_in_written_space_on_ext4_and_xfs_only() {
    let kind = |directory: &Path| {
        let mut command = std::process::Command::new("stat");
        let found = command.args(["--file-system", "--format=%T"]).arg(directory).output().unwrap();
        String::from_utf8(found.stdout).unwrap().trim().to_owned()
    };
    block_on(async {
        for directory in [TempDir::new_in("/dev/shm").unwrap(), directory()] {
            let kind = kind(directory.path());
            let name = directory.path().join("image");
            let file = FileHost.create(&name, WRITABLE).await.unwrap();
            let gains = ["ext2/ext3", "xfs"].contains(&&*kind);
            assert_eq!(file.gains_from_written_space(), gains, "{kind}");
            if !gains {
                assert_eq!(file.atomic_write(), 512, "{kind}");
            }
            assert!([512, 4096].contains(&file.atomic_write()));
        }
    });
}

/// A longer file takes hardly any space; one that is written through the page cache is left alone.
#[test]
fn direct_files_are_made_longer_on_ext4_and_xfs() {
    for (program, package) in [("mkfs.ext4", "e2fsprogs"), ("mkfs.xfs", "xfsprogs")] {
        let mounted = Mounted::new(program, package, &["-q"]);
        executor().block_on(async {
            for mode in [WRITABLE, DIRECT] {
                let file = FileHost.create(&mounted.path().join("file"), mode).await.unwrap();
                assert_eq!(file.extends_one_at_a_time(), mode.direct, "{program}");
                file.write_at(0, IoBuf::copy_of(&[7; 4096])).await.unwrap();
                file.expect_length(64 << 20).await;
                let length = if mode.direct { 64 << 20 } else { 4096 };
                assert_eq!(file.len().await.unwrap(), length, "{program}");
                let taken = file.extensions().usage.unwrap().allocated().await.unwrap().unwrap();
                assert!(taken <= 256 << 10, "{program}: {taken}");
            }
        });
    }
}

/// Writes whose futures are dropped while the kernel has them, and later ones to the same places.
#[test]
fn a_write_that_was_given_up_does_not_land_over_a_later_one() {
    const LENGTH: usize = 1 << 20;
    let directory = directory();
    for mode in [WRITABLE, DIRECT] {
        executor().block_on(async {
            let path = directory.path().join("file");
            let file = FileHost.create(&path, mode).await.unwrap();
            for round in 0..50_u8 {
                let early = IoBuf::copy_of(&vec![0xee; LENGTH]);
                {
                    let mut write = pin!(file.write_at(0, early));
                    let mut context = Context::from_waker(Waker::noop());
                    let _ = write.as_mut().poll(&mut context);
                    if round % 2 == 1 {
                        // The kernel may have begun.
                        yield_now().await;
                    }
                }
                let late = IoBuf::copy_of(&vec![round; LENGTH]);
                file.write_at(0, late).await.unwrap();
                file.flush().await.unwrap();
                let found = file.read_at(0, IoBuf::zeroed(LENGTH)).await.unwrap();
                let differs = found.iter().position(|byte| *byte != round);
                assert_eq!(differs, None, "round {round}");
            }
        });
    }
}
