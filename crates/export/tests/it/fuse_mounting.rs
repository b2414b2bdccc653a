//! Mounting, unmounting, and who does it: nothing may be left behind.

use crate::fuse_mount::{FIXED, FULL, FileEnd, Mounted, unmount};
use crate::memory_disk::MemoryDisk;
use isobath_disk::throttle::Direction;
use isobath_disk::{BlockDevice, BlockStatus, Result, ZeroFlags};
use isobath_export::fuse::{Mount, MountError, Options};
use isobath_ring::{Config, Executor, yield_now};
use isobath_storage::IoBuf;
use isobath_testkit::fuse::tells_end;
use isobath_testkit::until;
use std::ffi::CString;
use std::fs::{self, File, OpenOptions as Open};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::thread;

const SIZE: usize = 1 << 20;

fn try_mount(path: &Path) -> std::result::Result<Arc<Mount<MemoryDisk>>, MountError> {
    Mount::new(Arc::new(MemoryDisk::new(SIZE)), path, FULL)
}

/// A FUSE mount whose server is gone.
fn mount_dead(path: &Path) {
    let device = Open::new().read(true).write(true).open("/dev/fuse").unwrap();
    let number = device.as_raw_fd();
    let options = format!("fd={number},rootmode=100000,user_id=0,group_id=0");
    let [options, path] =
        [options.as_bytes(), path.as_os_str().as_bytes()].map(|text| CString::new(text).unwrap());
    // SAFETY: the strings end in zeroes.
    let result = unsafe {
        libc::mount(c"dead".as_ptr(), path.as_ptr(), c"fuse".as_ptr(), 0, options.as_ptr().cast())
    };
    assert_eq!(result, 0, "{}", io::Error::last_os_error());
}

#[test]
fn what_cannot_be_mounted_on_is_named_with_the_way_out() {
    let directory = tempfile::tempdir().unwrap();
    let missing = directory.path().join("missing");
    let error = try_mount(&missing).err().unwrap();
    assert!(matches!(&error, MountError::NotFound(path) if *path == missing));
    assert!(error.to_string().contains("create an empty file"), "{error}");
    let error = try_mount(directory.path()).err().unwrap();
    assert!(matches!(error, MountError::NotAFile(_)), "{error}");
    assert!(matches!(try_mount(Path::new("/dev/null")), Err(MountError::NotAFile(_))));
    let mut mounted = Mounted::new(MemoryDisk::new(SIZE), FIXED);
    let error = try_mount(&mounted.path).err().unwrap();
    assert!(matches!(error, MountError::Busy(_)) && error.to_string().contains("umount"));
    mounted.stop();
    drop(try_mount(&mounted.path).unwrap());
    assert_eq!(fs::metadata(&mounted.path).unwrap().len(), 0);
}

#[test]
fn the_mount_of_another_program_is_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    let (file, other) = (directory.path().join("file"), directory.path().join("other"));
    fs::write(&file, b"").unwrap();
    fs::write(&other, b"other").unwrap();
    let [from, to] = [&other, &file].map(|path| CString::new(path.as_os_str().as_bytes()).unwrap());
    // SAFETY: the strings end in zeroes.
    let result = unsafe {
        let none = std::ptr::null();
        libc::mount(from.as_ptr(), to.as_ptr(), none, libc::MS_BIND, none.cast())
    };
    assert_eq!(result, 0, "{}", io::Error::last_os_error());
    let refused = matches!(try_mount(&file), Err(MountError::Busy(_)));
    let content = fs::read(&file);
    unmount(&file, libc::MNT_DETACH).unwrap();
    assert!(refused && content.unwrap() == b"other");
}

#[test]
fn dead_mounts_are_cleared_away() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    File::create(&path).unwrap();
    for _ in 0..3 {
        mount_dead(&path);
    }
    assert_eq!(File::open(&path).unwrap_err().raw_os_error(), Some(libc::ENOTCONN));
    let link = directory.path().join("link");
    std::os::unix::fs::symlink(&path, &link).unwrap();
    drop(try_mount(&link).unwrap());
    assert_eq!(fs::metadata(&path).unwrap().len(), 0);
}

#[test]
fn who_has_it_open_at_the_end_is_told() {
    let mut mounted = Mounted::with(Arc::new(MemoryDisk::new(SIZE)), FIXED, 2);
    let file = mounted.open(0);
    file.write(0, b"before").unwrap();
    mounted.stop();
    assert_eq!(mounted.device.bytes(0, 6), b"before");
    assert!(file.read(0, 1).is_err_and(tells_end));
    mounted.mount.stop();
}

#[test]
fn what_was_begun_is_finished() {
    let mut mounted = Mounted::with(Arc::new(MemoryDisk::new(SIZE)), FIXED, 2);
    let file = mounted.open(0);
    *mounted.device.held.lock() = Some(Vec::new());
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| file.write(0, b"last words"));
        until("a write", || mounted.device.held.lock().as_ref().is_some_and(|it| !it.is_empty()));
        mounted.mount.stop();
        mounted.device.release();
        assert_eq!(writer.join().unwrap(), Ok(10));
    });
    assert_eq!(mounted.device.bytes(0, 10), b"last words");
    mounted.stop();
}

#[test]
fn a_server_that_ends_waits_for_no_limit() {
    let mut mounted = Mounted::with(Arc::new(MemoryDisk::new(SIZE)), FIXED, 1);
    let file = Arc::new(mounted.open(0));
    mounted.device.limit();
    // It is paid for by what follows, more than an hour at a byte a second.
    file.write(0, &[b'f'; 4096]).unwrap();
    // Not in a scope, which would wait for them when the test fails.
    let (of_writer, of_reader) = (Arc::clone(&file), Arc::clone(&file));
    let writer = thread::spawn(move || of_writer.write(0, b"last words"));
    let reader = thread::spawn(move || of_reader.read(0, 5));
    until("two requests to wait", || mounted.device.throttle.waiting() == 2);
    mounted.mount.stop();
    until("the replies", || writer.is_finished() && reader.is_finished());
    assert_eq!(writer.join().unwrap(), Ok(10));
    assert_eq!(reader.join().unwrap().map(|bytes| bytes.len()), Ok(5));
    assert_eq!(mounted.device.bytes(0, 10), b"last words");
    let (read, write) = (Direction::Read, Direction::Write);
    let mut admitted = mounted.device.admitted.lock().clone();
    admitted.sort_by_key(|(direction, bytes)| (*direction == read, *bytes));
    assert_eq!(admitted, [(write, 10), (write, 4096), (read, 5)]);
    mounted.stop();
}

#[test]
fn whoever_unmounts_ends_the_server() {
    let ways = [(0, 0), (2, 0), (2, libc::MNT_DETACH)];
    // Often: the kernel's last requests may or may not be on their way when the connection ends.
    for (workers, flags) in ways.into_iter().cycle().take(150) {
        let mut mounted = Mounted::with(Arc::new(MemoryDisk::new(SIZE)), FIXED, workers);
        mounted.open(0).write(0, b"x").unwrap();
        unmount(&mounted.path, flags).unwrap();
        mounted.join().unwrap();
        // What is mounted there now is somebody else's.
        let next = try_mount(&mounted.path).unwrap();
        mounted.mount.stop();
        assert!(matches!(try_mount(&mounted.path), Err(MountError::Busy(_))));
        next.stop();
    }
}

#[test]
fn it_is_served_once() {
    let mut mounted = Mounted::new(MemoryDisk::new(SIZE), FIXED);
    assert_eq!(mounted.open(0).size(), SIZE as u64);
    let executor = Executor::new(&Config::default()).unwrap();
    let again = executor.block_on(mounted.mount.serve(&[]));
    assert_eq!(again.unwrap_err().raw_os_error(), Some(libc::EBUSY));
    mounted.stop();
    assert!(executor.block_on(mounted.mount.serve(&[])).is_err());
}

#[test]
fn whoever_is_dropped_unmounts() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    File::create(&path).unwrap();
    drop(try_mount(&path).unwrap());
    assert_eq!(fs::metadata(&path).unwrap().len(), 0);

    let mount = try_mount(&path).unwrap();
    Executor::new(&Config::default()).unwrap().block_on(async {
        let mut serving = pin!(mount.serve(&[]));
        let _ = futures_poll(serving.as_mut()).await;
        yield_now().await;
    });
    assert_eq!(fs::metadata(&path).unwrap().len(), 0, "the future was dropped");

    let mount = try_mount(&path).unwrap();
    mount.stop();
    let executor = Executor::new(&Config::default()).unwrap();
    executor.block_on(mount.serve(&[])).unwrap();
}

/// Polls a future once.
async fn futures_poll<F: Future>(mut future: std::pin::Pin<&mut F>) -> bool {
    std::future::poll_fn(|cx| std::task::Poll::Ready(future.as_mut().poll(cx).is_ready())).await
}

/// A disk that panics when it is read.
struct Panicking;

impl BlockDevice for Panicking {
    fn size(&self) -> u64 {
        SIZE as u64
    }

    fn is_read_only(&self) -> bool {
        false
    }

    fn preferred_block(&self) -> u32 {
        4096
    }

    async fn read(&self, _: u64, _: IoBuf) -> Result<IoBuf> {
        panic!("as the test wants it")
    }

    async fn write(&self, _: u64, buf: IoBuf) -> Result<IoBuf> {
        Ok(buf)
    }

    async fn write_zeroes(&self, _: u64, _: u64, _: ZeroFlags) -> Result<()> {
        Ok(())
    }

    async fn discard(&self, _: u64, _: u64) -> Result<()> {
        Ok(())
    }

    async fn flush(&self) -> Result<()> {
        Ok(())
    }

    async fn block_status(&self, _: u64, _: u64, _: usize) -> Result<Vec<BlockStatus>> {
        Ok(Vec::new())
    }
}

#[test]
fn a_panic_leaves_no_mount() {
    for workers in [0, 2] {
        let mut mounted = Mounted::with(Arc::new(Panicking), FIXED, workers);
        let file = mounted.open(0);
        assert_eq!(file.seek(0, libc::SEEK_DATA), Err(libc::EIO), "a disk without extents");
        assert!(file.read(0, 1).is_err_and(tells_end));
        assert!(mounted.join().unwrap_err().to_string().contains("as the test wants it"));
        assert_eq!(fs::metadata(&mounted.path).unwrap().len(), 0);
    }
}

#[test]
fn only_the_owner_may_use_what_is_not_for_others() {
    let options = Options { allow_other: isobath_export::fuse::AllowOther::Off, ..FIXED };
    for (options, others) in [(options, false), (FIXED, true)] {
        let mounted = Mounted::new(MemoryDisk::new(SIZE), options);
        fs::set_permissions(&mounted.path, std::os::unix::fs::PermissionsExt::from_mode(0o644))
            .unwrap();
        let open = fs::set_permissions(
            mounted.directory.path(),
            std::os::unix::fs::PermissionsExt::from_mode(0o755),
        );
        open.unwrap();
        let mut cat = std::process::Command::new("head");
        std::os::unix::process::CommandExt::uid(&mut cat, 65_534);
        let cat = isobath_testkit::process::run(cat.arg("-c1").arg(&mounted.path));
        assert_eq!(cat.code() == 0, others, "{}", cat.report());
        assert_eq!(FileEnd(File::open(&mounted.path).unwrap()).read(0, 1), Ok(vec![0]));
    }
}
