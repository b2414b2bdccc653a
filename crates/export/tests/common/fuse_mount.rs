//! A disk mounted as a file beside a test.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::expect_used)]

use isobath_disk::{BlockDevice, LiveDisk, OpenOptions};
use isobath_export::fuse::{Mount, Options};
use isobath_ring::block_on;
use isobath_ring::{Config, Executor, Io, Worker};
use isobath_storage_file::FileHost;
use std::ffi::CString;
use std::fs::{self, File, OpenOptions as Open};
use std::io::{self, Read};
use std::ops::Deref;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use tempfile::TempDir;

/// Everything that a test may do with a file.
pub const FULL: Options = Options {
    writable: true,
    growable: true,
    allow_other: isobath_export::fuse::AllowOther::Auto,
    requests: 256,
};

/// A file that can be written, and keeps its size.
pub const FIXED: Options = Options { growable: false, ..FULL };

/// A disk that is served. It is unmounted when dropped.
pub struct Mounted<D: BlockDevice> {
    pub mount: Arc<Mount<D>>,
    pub device: Arc<D>,
    pub path: PathBuf,
    pub directory: TempDir,
    thread: Option<JoinHandle<io::Result<()>>>,
    workers: Vec<Worker>,
}

impl<D: BlockDevice> Mounted<D> {
    pub fn new(device: D, options: Options) -> Self {
        Self::with(Arc::new(device), options, 0)
    }

    /// Serves on `workers` threads of their own, or on that of the server if there are none.
    pub fn with(device: Arc<D>, options: Options, workers: usize) -> Self {
        Self::with_io(device, options, workers, Io::Any)
    }

    /// As [`with`](Self::with), and says what does the threads' I/O.
    pub fn with_io(device: Arc<D>, options: Options, workers: usize, io: Io) -> Self {
        let config = Config { io, ..Config::default() };
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk");
        File::create(&path).unwrap();
        let mount = Mount::new(device.clone(), &path, options).unwrap();
        let start = |_| Worker::start("fuse", &config).unwrap();
        let workers: Vec<Worker> = (0..workers).map(start).collect();
        let handles: Vec<_> = workers.iter().map(|worker| worker.handle().clone()).collect();
        let serving = mount.clone();
        let thread = Some(std::thread::spawn(move || {
            let executor = Executor::new(&config).unwrap();
            executor.block_on(serving.serve(&handles))
        }));
        Self { mount, device, path, directory, thread, workers }
    }

    /// Opens the file for reading and writing, with further flags.
    pub fn open(&self, flags: i32) -> FileEnd {
        let file = Open::new().read(true).write(true).custom_flags(flags).open(&self.path);
        FileEnd(file.unwrap())
    }

    /// Waits for the server's end, which something else brings about.
    pub fn join(&mut self) -> io::Result<()> {
        self.thread.take().unwrap().join().unwrap()
    }

    /// Stops the server and sees that it has unmounted.
    pub fn stop(&mut self) {
        self.mount.stop();
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap().unwrap();
        }
        self.workers.clear();
        assert_eq!(fs::metadata(&self.path).unwrap().len(), 0, "the mount point is itself again");
    }
}

impl<D: BlockDevice> Drop for Mounted<D> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.mount.stop();
            // Whoever waits for a reply waits no longer; otherwise this process could not end.
            let _ = unmount(&self.path, libc::MNT_FORCE);
        } else {
            self.stop();
        }
    }
}

/// A qcow2 image that is served; closed and judged by QEMU at the end.
pub struct Image {
    pub mounted: Mounted<LiveDisk<FileHost>>,
    name: PathBuf,
    _directory: TempDir,
}

impl Deref for Image {
    type Target = Mounted<LiveDisk<FileHost>>;

    fn deref(&self) -> &Self::Target {
        &self.mounted
    }
}

impl Image {
    pub fn new(size: u64, open: &OpenOptions, options: Options, workers: usize) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let name = directory.path().join("disk.qcow2");
        isobath_testkit::qemu::create(&name, "qcow2", size, "");
        let open = open.clone().writable(true);
        let disk = block_on(LiveDisk::open(FileHost, &name, &open)).unwrap();
        let mounted = Mounted::with(disk, options, workers);
        Self { mounted, name, _directory: directory }
    }

    /// Stops, closes the image, and gives what QEMU reads from it.
    pub fn finish(self) -> Vec<u8> {
        let Self { mut mounted, name, _directory } = self;
        mounted.stop();
        block_on(mounted.device.close()).unwrap();
        // With it the image's locks go.
        drop(mounted);
        isobath_testkit::qemu::assert_clean(&name);
        isobath_testkit::qemu::read_disk(&name, "qcow2")
    }
}

/// The file, opened; system calls with their error numbers.
pub struct FileEnd(pub File);

fn outcome(result: i64) -> Result<u64, i32> {
    u64::try_from(result).map_err(|_| io::Error::last_os_error().raw_os_error().unwrap())
}

impl FileEnd {
    fn number(&self) -> i32 {
        self.0.as_raw_fd()
    }

    pub fn read(&self, offset: u64, length: usize) -> Result<Vec<u8>, i32> {
        let mut bytes = vec![0xcc; length];
        // SAFETY: the buffer has room for `length` bytes.
        let count =
            unsafe { libc::pread(self.number(), bytes.as_mut_ptr().cast(), length, offset as i64) };
        bytes.truncate(outcome(count as i64)? as usize);
        Ok(bytes)
    }

    /// How many bytes an asynchronous read gives; past the page cache if the file is open so.
    pub fn read_later(&self, offset: u64, length: usize) -> Result<u64, i32> {
        let mut bytes = vec![0_u8; length];
        let mut context = 0_u64;
        // SAFETY: control blocks and events of zeroes are valid; the read has ended, or was never begun,
        // when the context and the buffer go.
        unsafe {
            let mut block: libc::iocb = std::mem::zeroed();
            block.aio_lio_opcode = 0; // IOCB_CMD_PREAD
            block.aio_fildes = self.number() as u32;
            block.aio_buf = bytes.as_mut_ptr() as u64;
            block.aio_nbytes = length as u64;
            block.aio_offset = offset as i64;
            let mut event = [0_i64; 4];
            outcome(libc::syscall(libc::SYS_io_setup, 1, &raw mut context)).unwrap();
            let blocks = [&raw mut block];
            let begun = outcome(libc::syscall(libc::SYS_io_submit, context, 1, blocks.as_ptr()));
            let null = std::ptr::null_mut::<libc::timespec>();
            let ended = begun.map(|_| {
                libc::syscall(libc::SYS_io_getevents, context, 1, 1, event.as_mut_ptr(), null)
            });
            libc::syscall(libc::SYS_io_destroy, context);
            assert_eq!(ended, Ok(1));
            // data, obj, res, res2
            u64::try_from(event[2]).map_err(|_| -event[2] as i32)
        }
    }

    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<u64, i32> {
        // SAFETY: the buffer has its length.
        let count = unsafe {
            libc::pwrite(self.number(), bytes.as_ptr().cast(), bytes.len(), offset as i64)
        };
        outcome(count as i64)
    }

    pub fn fallocate(&self, mode: i32, offset: u64, length: u64) -> Result<u64, i32> {
        // SAFETY: a plain system call.
        let result = unsafe { libc::fallocate(self.number(), mode, offset as i64, length as i64) };
        outcome(result.into())
    }

    pub fn truncate(&self, size: u64) -> Result<u64, i32> {
        // SAFETY: a plain system call.
        outcome(unsafe { libc::ftruncate(self.number(), size as i64) }.into())
    }

    pub fn seek(&self, offset: u64, whence: i32) -> Result<u64, i32> {
        // SAFETY: a plain system call.
        outcome(unsafe { libc::lseek(self.number(), offset as i64, whence) })
    }

    pub fn sync(&self) -> Result<u64, i32> {
        // SAFETY: a plain system call.
        outcome(unsafe { libc::fsync(self.number()) }.into())
    }

    pub fn size(&self) -> u64 {
        self.0.metadata().unwrap().len()
    }

    /// What a private mapping of a part shows; `offset` is a multiple of the page size.
    ///
    /// Another process maps it: the kernel may hold this one's memory map while it waits for the server,
    /// which is here.
    pub fn mapped(&self, offset: u64, length: usize) -> Vec<u8> {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let (number, to) = (self.number(), theirs.as_raw_fd());
        // SAFETY: the child only makes system calls, of which all that can fail end it early.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: a new mapping, read within its length and within the file.
            unsafe {
                let (access, flags) = (libc::PROT_READ, libc::MAP_PRIVATE);
                let null = std::ptr::null_mut();
                let start = libc::mmap(null, length, access, flags, number, offset as i64);
                let mut done = 0;
                while start != libc::MAP_FAILED && done < length {
                    match libc::write(to, start.add(done), length - done) {
                        count @ 1.. => done += count as usize,
                        _ => break,
                    }
                }
                libc::_exit(0);
            }
        }
        assert!(child > 0, "{}", io::Error::last_os_error());
        drop(theirs);
        let mut bytes = Vec::new();
        ours.read_to_end(&mut bytes).unwrap();
        // SAFETY: the child is this call's own.
        unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
        assert_eq!(bytes.len(), length, "the file could not be mapped");
        bytes
    }
}

/// `umount2(2)`.
pub fn unmount(path: &Path, flags: i32) -> io::Result<()> {
    let name = CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: the name ends in a zero.
    match unsafe { libc::umount2(name.as_ptr(), flags) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
