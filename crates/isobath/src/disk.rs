//! A disk in use.

use crate::LayerInfo;
use isobath_disk::{
    BlockStatus, DiskError, IoFailure, IoStats, LiveDisk, MapEntry, MapStats, OpenOptions, Overlay,
    Preallocation, Result, ZeroFlags,
};
use isobath_jobs::{CommitOptions, Job, JobOptions, MirrorOptions, StreamOptions};
use isobath_storage::{Host, IoBuf};
use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// A virtual disk: an image and its backing chain.
///
/// Requests may run concurrently, from several threads, and while snapshots and [jobs](crate::jobs) change the chain.
/// Offsets and lengths are in bytes, without alignment requirements. Concurrent overlapping writes take effect in some
/// order, each as a whole per cluster; a request issued after another's completion sees its effect. A write is durable
/// after a [`flush`](Self::flush) that began after it had completed.
///
/// The futures are not `Send`: each stays on the thread that first polled it, whose io_uring holds its operations. A
/// future may be dropped at any time; what it had begun may or may not take effect.
///
/// A clone is the same disk. [Close](Self::close) it once no request is running: a disk that is only dropped keeps what
/// was flushed, and the next one to open it recovers that.
///
/// ```
/// use isobath::storage::{IoBuf, memory::MemoryHost};
/// use isobath::{Disk, NewDisk, OpenOptions, create};
///
/// # futures_executor::block_on(async {
/// let host = MemoryHost::default();
/// create(&host, "disk.qcow2", &NewDisk::new(1 << 30)).await?;
/// let disk = Disk::open(host, "disk.qcow2", &OpenOptions::new().writable(true)).await?;
/// disk.write(4096, IoBuf::copy_of(b"isobath")).await?;
/// disk.flush().await?;
/// assert_eq!(&*disk.read(4096, IoBuf::zeroed(7)).await?, b"isobath");
/// disk.close().await?;
/// # Ok::<(), isobath::DiskError>(())
/// # }).unwrap();
/// ```
pub struct Disk<H: Host>(Arc<LiveDisk<H>>);

impl<H: Host> Clone for Disk<H> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<H: Host> fmt::Debug for Disk<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Disk")
            .field("size", &self.size())
            .field("layers", &self.depth())
            .field("read_only", &self.is_read_only())
            .finish_non_exhaustive()
    }
}

impl<H: Host> Disk<H> {
    /// Opens the image `name` and its backing chain.
    ///
    /// # Errors
    /// If a file of the chain cannot be opened, locked or read, its image is damaged or asks for what Isobath does not
    /// support, or `options` do not allow it. The error names the image, the field and its value.
    pub async fn open(host: H, name: impl AsRef<Path>, options: &OpenOptions) -> Result<Self> {
        Ok(Self(LiveDisk::open(host, name.as_ref(), options).await?))
    }

    /// The disk's size in bytes.
    pub fn size(&self) -> u64 {
        self.0.size()
    }

    /// Whether writes are refused.
    pub fn is_read_only(&self) -> bool {
        self.0.is_read_only()
    }

    /// The size in bytes that requests are best aligned to: the active image's clusters or subclusters.
    pub fn preferred_block(&self) -> u32 {
        self.0.preferred_block()
    }

    /// Reads `buf.len()` bytes at `offset` into `buf`, and returns it.
    ///
    /// # Errors
    /// If the range is not within the disk, the storage fails, or a table of an image is damaged.
    ///
    /// ```
    /// # use isobath::storage::{IoBuf, memory::MemoryHost};
    /// # use isobath::{Disk, NewDisk, OpenOptions, create};
    /// # futures_executor::block_on(async {
    /// # let host = MemoryHost::default();
    /// # create(&host, "disk.qcow2", &NewDisk::new(1 << 20)).await?;
    /// # let disk = Disk::open(host, "disk.qcow2", &OpenOptions::new()).await?;
    /// let mut buf = IoBuf::zeroed(4096);
    /// for block in 0..16 {
    ///     // The buffer is used again.
    ///     buf = disk.read(block * 4096, buf).await?;
    ///     assert!(buf.iter().all(|&byte| byte == 0));
    /// }
    /// # Ok::<(), isobath::DiskError>(())
    /// # }).unwrap();
    /// ```
    pub fn read(
        &self,
        offset: u64,
        buf: IoBuf,
    ) -> impl Future<Output = Result<IoBuf>> + use<'_, H> {
        self.0.read(offset, buf)
    }

    /// Writes `buf` at `offset`, and returns it.
    ///
    /// # Errors
    /// If the disk is read-only, the range is not within it, the storage fails or has no space left, or a table of the
    /// active image is damaged.
    pub fn write(
        &self,
        offset: u64,
        buf: IoBuf,
    ) -> impl Future<Output = Result<IoBuf>> + use<'_, H> {
        self.0.write(offset, buf)
    }

    /// Reads into several buffers, one after another from `offset` on, and returns them. The parts are read side by
    /// side.
    ///
    /// # Errors
    /// As [`read`](Self::read), for all of the range.
    ///
    /// ```
    /// # use isobath::storage::{IoBuf, memory::MemoryHost};
    /// # use isobath::{Disk, NewDisk, OpenOptions, create};
    /// # futures_executor::block_on(async {
    /// # let host = MemoryHost::default();
    /// # create(&host, "disk.qcow2", &NewDisk::new(1 << 20)).await?;
    /// # let disk = Disk::open(host, "disk.qcow2", &OpenOptions::new().writable(true)).await?;
    /// let parts = vec![IoBuf::copy_of(b"iso"), IoBuf::copy_of(b"bath")];
    /// disk.write_vectored(510, parts).await?;
    /// let parts = disk.read_vectored(509, vec![IoBuf::zeroed(1), IoBuf::zeroed(7)]).await?;
    /// assert_eq!(parts.iter().map(|part| &**part).collect::<Vec<_>>(), [&b"\0"[..], b"isobath"]);
    /// # disk.close().await?;
    /// # Ok::<(), isobath::DiskError>(())
    /// # }).unwrap();
    /// ```
    pub async fn read_vectored(&self, offset: u64, bufs: Vec<IoBuf>) -> Result<Vec<IoBuf>> {
        let places = self.places(offset, &bufs)?;
        let reads = bufs.into_iter().zip(places).map(|(buf, at)| self.0.read(at, buf));
        all(reads).await
    }

    /// Writes several buffers, one after another from `offset` on, and returns them. The parts are written side by
    /// side, each as if by [`write`](Self::write): after a crash before the next flush any of them may be there.
    ///
    /// # Errors
    /// As [`write`](Self::write); nothing is written if the range is not within the disk. After another error any of
    /// the parts may have been written.
    pub async fn write_vectored(&self, offset: u64, bufs: Vec<IoBuf>) -> Result<Vec<IoBuf>> {
        let places = self.places(offset, &bufs)?;
        let writes = bufs.into_iter().zip(places).map(|(buf, at)| self.0.write(at, buf));
        all(writes).await
    }

    /// Makes a range read as zeroes.
    ///
    /// # Errors
    /// As [`write`](Self::write). `ENOTSUP` ([`DiskError::errno`]) if it must be [fast](ZeroFlags::only_fast) and is
    /// not.
    pub fn write_zeroes(
        &self,
        offset: u64,
        length: u64,
        flags: ZeroFlags,
    ) -> impl Future<Output = Result<()>> + use<'_, H> {
        self.0.write_zeroes(offset, length, flags)
    }

    /// Releases a range's space where possible; it then reads as zeroes or as before, never as something older.
    ///
    /// # Errors
    /// As [`write`](Self::write).
    pub fn discard(
        &self,
        offset: u64,
        length: u64,
    ) -> impl Future<Output = Result<()>> + use<'_, H> {
        self.0.discard(offset, length)
    }

    /// Makes every request durable that completed before this call.
    ///
    /// # Errors
    /// If the storage fails. What was written since the last flush may then be lost, and the disk accepts no more
    /// writes.
    pub fn flush(&self) -> impl Future<Output = Result<()>> + use<'_, H> {
        self.0.flush()
    }

    /// Describes a range in runs, in order and without gaps, at most `max_runs` of them: which are allocated, which
    /// read as zeroes, and in which layer. The runs may end before the range does.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn block_status(
        &self,
        offset: u64,
        length: u64,
        max_runs: usize,
    ) -> impl Future<Output = Result<Vec<BlockStatus>>> + use<'_, H> {
        self.0.block_status(offset, length, max_runs)
    }

    /// Calls `each` with the runs of a range, in order and without gaps, and the file and offset that hold each.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub async fn map(&self, range: Range<u64>, each: &mut dyn FnMut(&MapEntry)) -> Result<()> {
        self.0.inside(async |disk| disk.chain_map(range, each).await).await
    }

    /// Changes the size in bytes. New space reads as zeroes; less space needs `shrink`.
    ///
    /// # Errors
    /// If the disk is read-only, a job is running, or the image does not allow it, with an internal snapshot for
    /// instance.
    pub async fn resize(
        &self,
        size: u64,
        preallocation: Preallocation,
        shrink: bool,
    ) -> Result<()> {
        self.0.resize(size, preallocation, shrink).await
    }

    /// Makes the active image a backing file, and `overlay` the active image. Requests go on meanwhile. What was
    /// written before the call is in the backing file, which is then complete, durable, and open to others for reading.
    ///
    /// # Errors
    /// If the disk is read-only, or the overlay cannot be created or does not fit; the chain is then unchanged. If the
    /// remaining changes of the former active image cannot be written; the overlay is then in use, and flushes fail.
    ///
    /// ```
    /// # use isobath::storage::memory::MemoryHost;
    /// # use isobath::{Disk, NewDisk, OpenOptions, create};
    /// use isobath::Overlay;
    /// use std::path::PathBuf;
    ///
    /// # futures_executor::block_on(async {
    /// # let host = MemoryHost::default();
    /// # create(&host, "disk.qcow2", &NewDisk::new(1 << 20)).await?;
    /// # let disk = Disk::open(host, "disk.qcow2", &OpenOptions::new().writable(true)).await?;
    /// disk.snapshot(&Overlay::Create("monday.qcow2".into())).await?;
    /// let names: Vec<_> = disk.layers().into_iter().map(|layer| layer.name).collect();
    /// assert_eq!(names, ["monday.qcow2", "disk.qcow2"].map(PathBuf::from));
    /// # disk.close().await?;
    /// # Ok::<(), isobath::DiskError>(())
    /// # }).unwrap();
    /// ```
    pub async fn snapshot(&self, overlay: &Overlay) -> Result<()> {
        self.0.snapshot(overlay).await
    }

    /// Starts a job that copies the data of layers between a base and an overlay into the overlay, and takes them out
    /// of the chain. The future runs it, on the thread that polls it.
    ///
    /// # Errors
    /// If another job runs, the layers are not of this chain or not in this order, or the overlay has internal
    /// snapshots, which must not change.
    ///
    /// ```
    /// # use isobath::storage::memory::MemoryHost;
    /// # use isobath::{Disk, NewDisk, OpenOptions, Overlay, create};
    /// use isobath::jobs::{JobOptions, StreamOptions};
    ///
    /// # futures_executor::block_on(async {
    /// # let host = MemoryHost::default();
    /// # create(&host, "disk.qcow2", &NewDisk::new(1 << 20)).await?;
    /// # let disk = Disk::open(host, "disk.qcow2", &OpenOptions::new().writable(true)).await?;
    /// # disk.snapshot(&Overlay::Create("monday.qcow2".into())).await?;
    /// let (job, running) = disk.stream(StreamOptions::default(), JobOptions::new("flatten"))?;
    /// running.await;
    /// job.result()?;
    /// assert_eq!(disk.depth(), 1);
    /// # disk.close().await?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # }).unwrap();
    /// ```
    pub fn stream(
        &self,
        options: StreamOptions,
        job: JobOptions,
    ) -> Result<(Arc<Job>, impl Future<Output = ()> + use<H>)> {
        isobath_jobs::stream(&self.0, options, job)
    }

    /// Starts a job that copies the data of layers above a base into the base, and takes them out of the chain. The
    /// future runs it, on the thread that polls it. If the active layer is one of them, the job becomes
    /// [ready](crate::jobs::JobStatus::Ready), and follows new writes until it is [completed](Job::complete).
    ///
    /// # Errors
    /// If another job runs, the layers are not of this chain or not in this order, or the disk is read-only.
    pub fn commit(
        &self,
        options: CommitOptions,
        job: JobOptions,
    ) -> Result<(Arc<Job>, impl Future<Output = ()> + use<H>)> {
        isobath_jobs::commit(&self.0, options, job)
    }

    /// Starts a job that mirrors the disk to `target`, which must not be used otherwise. The future runs it, on the
    /// thread that polls it. Once [completed](Job::complete), this disk uses the target's image.
    ///
    /// # Errors
    /// If another job runs, or the target is read-only, of another size, or part of this disk.
    pub fn mirror(
        &self,
        target: &Self,
        options: MirrorOptions,
        job: JobOptions,
    ) -> Result<(Arc<Job>, impl Future<Output = ()> + use<H>)> {
        isobath_jobs::mirror(&self.0, &target.0, options, job)
    }

    /// The layers, from the active one down to the base.
    pub fn layers(&self) -> Vec<LayerInfo> {
        self.0.layers().iter().map(|layer| LayerInfo::of(layer)).collect()
    }

    /// The number of layers.
    pub fn depth(&self) -> usize {
        self.0.depth()
    }

    /// What the requests since the disk was opened came to.
    pub fn io_stats(&self) -> IoStats {
        self.0.io_stats()
    }

    /// The counters of the map from guest offsets to layers.
    pub fn map_stats(&self) -> MapStats {
        self.0.map_stats()
    }

    /// Calls `listener` when requests fail because of the storage, at most once per second. The first listener stays.
    /// It must not block.
    pub fn on_failure(&self, listener: impl Fn(IoFailure) + Send + Sync + 'static) {
        self.0.on_failure(Box::new(listener));
    }

    /// Prepares in the background for what flushes and closing need, so that they wait less. Poll it on one thread for
    /// as long as the disk is used; it ends when the disk is closed.
    ///
    /// # Errors
    /// As [`flush`](Self::flush).
    pub async fn upkeep(&self) -> Result<()> {
        self.0.upkeep().await
    }

    /// Cancels a running job, makes everything durable, and leaves a stock qcow2 image, unlocked. Requests that are
    /// made later fail.
    ///
    /// # Errors
    /// As [`flush`](Self::flush); the image is then recovered when it is opened next.
    pub async fn close(&self) -> Result<()> {
        self.0.close().await
    }

    /// Where each buffer's part begins.
    fn places(&self, offset: u64, bufs: &[IoBuf]) -> Result<Vec<u64>> {
        let mut places = Vec::with_capacity(bufs.len());
        let mut length = 0_u64;
        for buf in bufs {
            places.push(offset.saturating_add(length));
            length = length.saturating_add(buf.len() as u64);
        }
        let size = self.size();
        if offset.checked_add(length).is_none_or(|end| end > size) {
            return Err(DiskError::OutOfRange { offset, length, size });
        }
        Ok(places)
    }
}

/// Runs requests side by side until all have ended. Returns their buffers, or the first error.
async fn all(requests: impl Iterator<Item: Future<Output = Result<IoBuf>>>) -> Result<Vec<IoBuf>> {
    futures_util::future::join_all(requests).await.into_iter().collect()
}
