//! Disks whose calls block, for programs without an executor: from any thread, with borrowed memory.
//!
//! ```
//! use isobath::{CheckOptions, NewDisk, OpenOptions, Overlay, blocking};
//!
//! # let directory = tempfile::tempdir().unwrap();
//! # let base = directory.path().join("base.qcow2");
//! # let overlay = directory.path().join("overlay.qcow2");
//! blocking::create(&base, &NewDisk::new(1 << 30))?;
//! let disk = blocking::Disk::open(&base, &OpenOptions::new().writable(true))?;
//! disk.write_at(4096, b"isobath")?;
//! disk.flush()?;
//! // What was written so far is in `base` from now on, and what is written next in `overlay`.
//! disk.snapshot(&Overlay::Create(overlay.clone()))?;
//! let mut read = [0; 7];
//! disk.read_at(4096, &mut read)?;
//! assert_eq!(&read, b"isobath");
//! disk.close()?;
//! assert!(blocking::check(&overlay, &CheckOptions::default())?.is_clean());
//! # Ok::<(), isobath::DiskError>(())
//! ```

use crate::{
    CheckOptions, CheckReport, DiskError, ImageInfo, InfoOptions, IoStats, LayerInfo, NewDisk,
    OpenOptions, Overlay, Preallocation, Result, ZeroFlags,
};
use isobath_buf::loan;
use isobath_jobs::pace::Pacing;
use isobath_jobs::{JobError, JobOptions, StreamOptions};
use isobath_ring::{Config, Worker, spawn};
use isobath_storage::window::WindowHost;
use isobath_storage::{FileId, Operation, StorageError};
use isobath_storage_file::FileHost;
use std::fmt;
use std::io::{IoSlice, IoSliceMut};
use std::path::Path;

/// A disk with a thread of its own, which reaches the files through io_uring where it can.
///
/// Its methods block the calling thread until they are done. They may be called from several threads at once.
///
/// [Close](Self::close) it: a disk that is only dropped keeps what was flushed, and the next one to open it recovers
/// that.
///
/// # Panics
/// Each method that waits panics on a thread that runs an [`Executor`](crate::ring::Executor), which would wait for
/// itself; and if the request did, as in the engine's own calls.
pub struct Disk {
    disk: crate::Disk<WindowHost<FileHost>>,
    worker: Worker,
}

impl fmt::Debug for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.disk.fmt(f)
    }
}

impl Disk {
    /// Opens the image `name` and its backing chain.
    ///
    /// # Errors
    /// As [`Disk::open`](crate::Disk::open), or if the thread or its executor cannot be made.
    pub fn open(name: impl AsRef<Path>, options: &OpenOptions) -> Result<Self> {
        let (name, options) = (name.as_ref().to_owned(), options.clone());
        let worker = start(&name)?;
        let disk = on(&worker, move || async move {
            let disk = crate::Disk::open(WindowHost::new(FileHost), &name, &options).await?;
            let upkeep = disk.clone();
            // Its errors are those of the requests that follow.
            drop(spawn(async move { upkeep.upkeep().await }));
            Ok(disk)
        })?;
        Ok(Self { disk, worker })
    }

    /// The disk's size in bytes.
    pub fn size(&self) -> u64 {
        self.disk.size()
    }

    /// Whether writes are refused.
    pub fn is_read_only(&self) -> bool {
        self.disk.is_read_only()
    }

    /// The size in bytes that requests are best aligned to.
    pub fn preferred_block(&self) -> u32 {
        self.disk.preferred_block()
    }

    /// The layers, from the active one down to the base.
    pub fn layers(&self) -> Vec<LayerInfo> {
        self.disk.layers()
    }

    /// What the requests since the disk was opened came to.
    pub fn io_stats(&self) -> IoStats {
        self.disk.io_stats()
    }

    /// Fills `buf` with what is at `offset`.
    ///
    /// # Errors
    /// As [`Disk::read`](crate::Disk::read). `buf` may then hold anything.
    pub fn read_at(&self, offset: u64, buf: &mut [u8]) -> Result<()> {
        self.read_vectored_at(offset, &mut [IoSliceMut::new(buf)])
    }

    /// Fills several buffers, one after another from `offset` on. Where the image allows it, the kernel reads straight
    /// into them.
    ///
    /// # Errors
    /// As [`read_at`](Self::read_at).
    ///
    /// ```
    /// # use isobath::{NewDisk, OpenOptions, blocking};
    /// # let directory = tempfile::tempdir().unwrap();
    /// # let image = directory.path().join("disk.qcow2");
    /// # blocking::create(&image, &NewDisk::new(1 << 20))?;
    /// # let disk = blocking::Disk::open(&image, &OpenOptions::new().writable(true))?;
    /// use std::io::{IoSlice, IoSliceMut};
    ///
    /// disk.write_vectored_at(512, &[IoSlice::new(b"iso"), IoSlice::new(b"bath")])?;
    /// let (mut head, mut tail) = ([0; 1], [0; 6]);
    /// disk.read_vectored_at(512, &mut [IoSliceMut::new(&mut head), IoSliceMut::new(&mut tail)])?;
    /// assert_eq!((&head, &tail), (b"i", b"sobath"));
    /// # disk.close()?;
    /// # Ok::<(), isobath::DiskError>(())
    /// ```
    pub fn read_vectored_at(&self, offset: u64, bufs: &mut [IoSliceMut<'_>]) -> Result<()> {
        loan::to_fill(bufs, |bufs| {
            self.run(move |disk| async move { disk.read_vectored(offset, bufs).await.map(drop) })
        })
    }

    /// Writes `buf` at `offset`. It is durable after the next [`flush`](Self::flush).
    ///
    /// # Errors
    /// As [`Disk::write`](crate::Disk::write).
    pub fn write_at(&self, offset: u64, buf: &[u8]) -> Result<()> {
        self.write_vectored_at(offset, &[IoSlice::new(buf)])
    }

    /// Writes several buffers, one after another from `offset` on.
    ///
    /// # Errors
    /// As [`Disk::write_vectored`](crate::Disk::write_vectored).
    pub fn write_vectored_at(&self, offset: u64, bufs: &[IoSlice<'_>]) -> Result<()> {
        loan::to_read(bufs, |bufs| {
            self.run(move |disk| async move { disk.write_vectored(offset, bufs).await.map(drop) })
        })
    }

    /// Makes a range read as zeroes.
    ///
    /// # Errors
    /// As [`Disk::write_zeroes`](crate::Disk::write_zeroes).
    pub fn write_zeroes_at(&self, offset: u64, length: u64, flags: ZeroFlags) -> Result<()> {
        self.run(move |disk| async move { disk.write_zeroes(offset, length, flags).await })
    }

    /// Releases a range's space where possible; it then reads as zeroes or as before.
    ///
    /// # Errors
    /// As [`Disk::discard`](crate::Disk::discard).
    pub fn discard_at(&self, offset: u64, length: u64) -> Result<()> {
        self.run(move |disk| async move { disk.discard(offset, length).await })
    }

    /// Makes every request durable that returned before this call.
    ///
    /// # Errors
    /// As [`Disk::flush`](crate::Disk::flush).
    pub fn flush(&self) -> Result<()> {
        self.run(|disk| async move { disk.flush().await })
    }

    /// Changes the size in bytes; less needs `shrink`.
    ///
    /// # Errors
    /// As [`Disk::resize`](crate::Disk::resize).
    pub fn resize(&self, size: u64, preallocation: Preallocation, shrink: bool) -> Result<()> {
        self.run(move |disk| async move { disk.resize(size, preallocation, shrink).await })
    }

    /// Makes the active image a backing file, and `overlay` the active image. Others' requests go on meanwhile.
    ///
    /// # Errors
    /// As [`Disk::snapshot`](crate::Disk::snapshot).
    pub fn snapshot(&self, overlay: &Overlay) -> Result<()> {
        let overlay = overlay.clone();
        self.run(move |disk| async move { disk.snapshot(&overlay).await })
    }

    /// Copies the data of all layers below `layer` into it, and takes them out of the chain: with the active layer the
    /// whole chain becomes one image, with a lower one its oldest part does. Others' requests go on meanwhile, and the
    /// job gives way to them. `layer` is one of [`layers`](Self::layers), by its file. The files stay where they are.
    ///
    /// # Errors
    /// As [`Disk::stream`](crate::Disk::stream), and those that the job ends with; the disk then reads as before.
    ///
    /// ```
    /// # use isobath::{NewDisk, OpenOptions, Overlay, blocking};
    /// # let directory = tempfile::tempdir().unwrap();
    /// # let path = |name: &str| directory.path().join(name);
    /// # blocking::create(path("base"), &NewDisk::new(1 << 20))?;
    /// # let disk = blocking::Disk::open(path("base"), &OpenOptions::new().writable(true))?;
    /// for snapshot in ["monday", "tuesday", "wednesday"] {
    ///     disk.snapshot(&Overlay::Create(path(snapshot)))?;
    /// }
    /// // wednesday, tuesday, monday, base
    /// let oldest = disk.layers()[2].file;
    /// disk.compact(oldest)?;
    /// assert_eq!(disk.layers().len(), 3);
    /// # disk.close()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn compact(&self, layer: FileId) -> std::result::Result<(), JobError> {
        let options = StreamOptions { top: Some(layer), ..StreamOptions::default() };
        let job = JobOptions { pacing: Pacing::default(), ..JobOptions::new("compact") };
        let disk = self.disk.clone();
        on(&self.worker, move || async move {
            let (job, running) = disk.stream(options, job)?;
            running.await;
            Ok(job.result())
        })?
    }

    /// Makes everything durable, and leaves a stock qcow2 image, unlocked.
    ///
    /// # Errors
    /// As [`Disk::close`](crate::Disk::close).
    pub fn close(self) -> Result<()> {
        self.run(|disk| async move { disk.close().await })
    }

    /// Runs a request on the disk's thread, and waits for it.
    fn run<T: Send + 'static, F: Future<Output = Result<T>> + 'static>(
        &self,
        request: impl FnOnce(crate::Disk<WindowHost<FileHost>>) -> F + Send + 'static,
    ) -> Result<T> {
        let disk = self.disk.clone();
        on(&self.worker, move || request(disk))
    }
}

/// Starts a thread for the disk `name`.
fn start(name: &Path) -> Result<Worker> {
    Worker::start("isobath-disk", &Config::default())
        .map_err(|error| StorageError::new(Operation::Open, name, error).into())
}

/// Runs `make`'s future on a worker, and waits for its result. A panic there goes on here.
fn on<T: Send + 'static, F: Future<Output = Result<T>> + 'static>(
    worker: &Worker,
    make: impl FnOnce() -> F + Send + 'static,
) -> Result<T> {
    match worker.handle().spawn_with(make).wait() {
        Ok(result) => result,
        Err(error) if error.is_panic() => error.resume(),
        Err(_) => Err(DiskError::Closed),
    }
}

/// Runs `make`'s future on a thread of its own.
fn once<T: Send + 'static, F: Future<Output = Result<T>> + 'static>(
    name: &Path,
    make: impl FnOnce() -> F + Send + 'static,
) -> Result<T> {
    on(&start(name)?, make)
}

/// [Creates](crate::create()) an image. Returns the size of its disk in bytes.
///
/// # Errors
/// As there, or if no thread or executor can be made.
pub fn create(name: impl AsRef<Path>, new: &NewDisk) -> Result<u64> {
    let (name, new) = (name.as_ref().to_owned(), new.clone());
    once(&name.clone(), move || async move {
        crate::create(&WindowHost::new(FileHost), &name, &new).await
    })
}

/// [Reads](crate::info()) what an image's header says.
///
/// # Errors
/// As there, or if no thread or executor can be made.
pub fn info(name: impl AsRef<Path>, options: &InfoOptions) -> Result<ImageInfo> {
    let (name, options) = (name.as_ref().to_owned(), options.clone());
    once(&name.clone(), move || async move {
        crate::info(&WindowHost::new(FileHost), &name, &options).await
    })
}

/// [Checks](crate::check()) an image, and repairs it as far as `options` allow.
///
/// # Errors
/// As there, or if no thread or executor can be made.
pub fn check(name: impl AsRef<Path>, options: &CheckOptions) -> Result<CheckReport> {
    let (name, options) = (name.as_ref().to_owned(), *options);
    once(&name.clone(), move || async move {
        crate::check(&WindowHost::new(FileHost), &name, &options, &mut |_| ()).await
    })
}

/// [Brings](crate::seal) an image into its final form.
///
/// # Errors
/// As there, or if no thread or executor can be made.
pub fn seal(name: impl AsRef<Path>) -> Result<()> {
    let name = name.as_ref().to_owned();
    once(&name.clone(), move || async move { crate::seal(WindowHost::new(FileHost), &name).await })
}
