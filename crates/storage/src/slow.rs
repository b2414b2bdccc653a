//! A host whose files all lie on one slow disk, as far as time goes.
//!
//! Over a fast file system this gives jobs and guests a disk to contend for, which behaves alike
//! wherever it runs. A request is carried out at once by the host below, and its future ends when the
//! simulated disk would have been done:
//!
//! - At most [`depth`](SlowDisk::depth) requests are in the disk; the others wait in the order in which
//!   they came.
//! - The bytes of one request after another go through the disk at its
//!   [`bandwidth`](SlowDisk::bandwidth).
//! - A request ends [`latency`](SlowDisk::latency) after its bytes have gone through; meanwhile those of
//!   others do.
//! - A flush keeps all others from going through for the time that it [costs](SlowDisk::flush).
//!
//! Zeroes, discards, clones and changes of length are requests without bytes. What only asks is free, and
//! nothing is cached.
//!
//! A disk that is slower than the simulated one shows through. Waiting needs the timers of an
//! [`Executor`](crate::ring::Executor); elsewhere it holds up the thread.

use crate::ring;
use crate::{Access, Allocation, FileId, Host, IoBuf, OpenMode, Result, Stamp, Storage, ZeroMode};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::num::{NonZeroU64, NonZeroUsize};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What a disk can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlowDisk {
    /// Bytes per second, reads and writes together.
    pub bandwidth: NonZeroU64,
    /// What every request takes besides its bytes.
    pub latency: Duration,
    /// Requests in the disk at a time.
    pub depth: NonZeroUsize,
    /// How long a flush keeps the disk busy, besides its latency.
    pub flush: Duration,
}

impl SlowDisk {
    /// How long the bytes of a request take.
    fn transfer(&self, bytes: u64) -> Duration {
        let nanoseconds = u128::from(bytes) * 1_000_000_000 / u128::from(self.bandwidth.get());
        Duration::from_nanos(nanoseconds.try_into().unwrap_or(u64::MAX))
    }
}

/// When requests end. Times are counted from any fixed one, and never go back.
struct Schedule {
    disk: SlowDisk,
    /// When the bytes of every request so far have gone through.
    free: Duration,
    /// When the requests in the disk end, the last `depth` of them.
    ends: VecDeque<Duration>,
}

impl Schedule {
    fn new(disk: SlowDisk) -> Self {
        Self { disk, free: Duration::ZERO, ends: VecDeque::new() }
    }

    /// Takes a request that keeps the disk busy for some time; tells when it ends.
    fn submit(&mut self, now: Duration, busy: Duration) -> Duration {
        let mut start = now.max(self.free);
        // All take the same latency, so they end in the order in which they begin.
        if self.ends.len() >= self.disk.depth.get()
            && let Some(first) = self.ends.pop_front()
        {
            start = start.max(first);
        }
        self.free = start.saturating_add(busy);
        let end = self.free.saturating_add(self.disk.latency);
        self.ends.push_back(end);
        end
    }
}

/// A host whose files share one simulated disk. Clones share it too.
#[derive(Clone)]
pub struct SlowHost<H> {
    inner: H,
    disk: Device,
}

#[derive(Clone)]
struct Device {
    began: Instant,
    schedule: Arc<Mutex<Schedule>>,
}

impl Device {
    /// Queues a request and says when it ends.
    fn submit(&self, busy: impl FnOnce(&SlowDisk) -> Duration) -> Instant {
        let mut schedule = self.schedule.lock();
        let busy = busy(&schedule.disk);
        let end = schedule.submit(self.began.elapsed(), busy);
        let never = Duration::from_hours(24 * 365);
        self.began.checked_add(end).unwrap_or(self.began + never)
    }

    fn transfer(&self, bytes: u64) -> Instant {
        self.submit(|disk| disk.transfer(bytes))
    }

    fn flush(&self) -> Instant {
        self.submit(|disk| disk.flush)
    }
}

async fn wait_until(end: Instant) {
    if ring::is_running() {
        ring::sleep_until(end).await;
    } else {
        std::thread::sleep(end.saturating_duration_since(Instant::now()));
    }
}

impl<H: Host> SlowHost<H> {
    /// Puts the files of a host on a slow disk.
    pub fn new(inner: H, disk: SlowDisk) -> Self {
        let schedule = Arc::new(Mutex::new(Schedule::new(disk)));
        Self { inner, disk: Device { began: Instant::now(), schedule } }
    }

    fn wrap(&self, inner: H::File) -> SlowFile<H::File> {
        SlowFile { inner, disk: self.disk.clone() }
    }
}

impl<H: Host> Host for SlowHost<H> {
    type File = SlowFile<H::File>;

    async fn open(&self, name: &Path, mode: OpenMode) -> Result<Self::File> {
        Ok(self.wrap(self.inner.open(name, mode).await?))
    }

    async fn create(&self, name: &Path, mode: OpenMode) -> Result<Self::File> {
        Ok(self.wrap(self.inner.create(name, mode).await?))
    }

    async fn remove(&self, name: &Path) -> Result<()> {
        self.inner.remove(name).await
    }

    fn canonical(&self, name: &Path) -> Result<PathBuf> {
        self.inner.canonical(name)
    }

    fn resolve(&self, referrer: &Path, name: &str) -> PathBuf {
        self.inner.resolve(referrer, name)
    }
}

/// A file on a simulated disk.
pub struct SlowFile<S> {
    inner: S,
    disk: Device,
}

impl<S: Storage> Storage for SlowFile<S> {
    fn name(&self) -> &Path {
        self.inner.name()
    }

    fn id(&self) -> FileId {
        self.inner.id()
    }

    async fn read_at(&self, offset: u64, buf: IoBuf) -> Result<IoBuf> {
        let end = self.disk.transfer(buf.len() as u64);
        let result = self.inner.read_at(offset, buf).await;
        wait_until(end).await;
        result
    }

    async fn write_at(&self, offset: u64, buf: IoBuf) -> Result<IoBuf> {
        let end = self.disk.transfer(buf.len() as u64);
        let result = self.inner.write_at(offset, buf).await;
        wait_until(end).await;
        result
    }

    async fn write_vectored_at(&self, offset: u64, bufs: Vec<IoBuf>) -> Result<Vec<IoBuf>> {
        let end = self.disk.transfer(bufs.iter().map(|buf| buf.len() as u64).sum());
        let result = self.inner.write_vectored_at(offset, bufs).await;
        wait_until(end).await;
        result
    }

    async fn write_zeroes(&self, offset: u64, length: u64, mode: ZeroMode) -> Result<()> {
        let end = self.disk.transfer(0);
        let result = self.inner.write_zeroes(offset, length, mode).await;
        wait_until(end).await;
        result
    }

    async fn discard(&self, offset: u64, length: u64) -> Result<()> {
        let end = self.disk.transfer(0);
        let result = self.inner.discard(offset, length).await;
        wait_until(end).await;
        result
    }

    async fn flush(&self) -> Result<()> {
        let end = self.disk.flush();
        let result = self.inner.flush().await;
        wait_until(end).await;
        result
    }

    async fn len(&self) -> Result<u64> {
        self.inner.len().await
    }

    async fn set_len(&self, length: u64) -> Result<()> {
        let end = self.disk.transfer(0);
        let result = self.inner.set_len(length).await;
        wait_until(end).await;
        result
    }

    async fn allocation(&self, offset: u64) -> Result<Allocation> {
        self.inner.allocation(offset).await
    }

    async fn allocated(&self) -> Result<u64> {
        self.inner.allocated().await
    }

    async fn stamp(&self) -> Result<Option<Stamp>> {
        self.inner.stamp().await
    }

    async fn settled_stamp(&self) -> Result<Option<Stamp>> {
        self.inner.settled_stamp().await
    }

    async fn advise(&self, access: Access) {
        self.inner.advise(access).await;
    }

    fn is_read_only(&self) -> bool {
        self.inner.is_read_only()
    }

    async fn retire(&self) -> Result<()> {
        let end = self.disk.flush();
        let result = self.inner.retire().await;
        wait_until(end).await;
        result
    }

    async fn admit_writer(&self, admit: bool) -> Result<()> {
        self.inner.admit_writer(admit).await
    }

    async fn clone_range(
        &self,
        from: &Self,
        from_offset: u64,
        to_offset: u64,
        length: u64,
    ) -> Result<bool> {
        let end = self.disk.transfer(0);
        let result = self.inner.clone_range(&from.inner, from_offset, to_offset, length).await;
        wait_until(end).await;
        result
    }

    fn clone_alignment(&self) -> Option<u64> {
        self.inner.clone_alignment()
    }

    fn extends_with_zeroes(&self) -> bool {
        self.inner.extends_with_zeroes()
    }

    fn free_space(&self) -> Option<u64> {
        self.inner.free_space()
    }

    fn gains_from_written_space(&self) -> bool {
        self.inner.gains_from_written_space()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// A mebibyte takes 10 ms, a request 2 ms more.
    fn disk(depth: usize) -> Schedule {
        Schedule::new(SlowDisk {
            bandwidth: NonZeroU64::new(100 << 20).unwrap(),
            latency: 2 * MS,
            depth: NonZeroUsize::new(depth).unwrap(),
            flush: 5 * MS,
        })
    }

    impl Schedule {
        /// The end of a request, in whole milliseconds.
        fn transfer(&mut self, now: u32, bytes: u64) -> u128 {
            let busy = self.disk.transfer(bytes);
            self.submit(now * MS, busy).as_millis()
        }
    }

    #[test]
    fn many_requests_are_bound_by_bandwidth() {
        let mut disk = disk(32);
        for end in [12, 22, 32, 42] {
            assert_eq!(disk.transfer(0, 1 << 20), end);
        }
        // Who comes later waits for all of them, however little it wants.
        assert_eq!(disk.transfer(30, 0), 42);
        assert_eq!(disk.transfer(41, 0), 43);
        // Time that nobody used is lost.
        assert_eq!(disk.transfer(1000, 1 << 20), 1012);
    }

    #[test]
    fn small_requests_are_bound_by_latency_and_depth() {
        let mut one = disk(1);
        let ends: Vec<_> = (0..4).map(|_| one.transfer(0, 0)).collect();
        assert_eq!(ends, [2, 4, 6, 8]);
        let mut three = disk(3);
        let ends: Vec<_> = (0..8).map(|_| three.transfer(0, 0)).collect();
        assert_eq!(ends, [2, 2, 2, 4, 4, 4, 6, 6]);
        assert_eq!(three.transfer(5, 0), 7, "two are in the disk, until 6");
        assert_eq!(three.transfer(5, 0), 8);
        assert_eq!(three.transfer(20, 0), 22);
        assert!(three.ends.len() <= 3);
    }

    #[test]
    fn a_flush_holds_up_what_comes_after_it() {
        let mut disk = disk(32);
        assert_eq!(disk.transfer(0, 1 << 20), 12);
        let flush = disk.disk.flush;
        assert_eq!(disk.submit(MS, flush), 17 * MS);
        assert_eq!(disk.transfer(1, 0), 17);
    }

    #[test]
    fn nothing_overflows() {
        let mut disk = Schedule::new(SlowDisk {
            bandwidth: NonZeroU64::MIN,
            latency: Duration::MAX,
            depth: NonZeroUsize::MIN,
            flush: Duration::MAX,
        });
        disk.transfer(0, u64::MAX);
        assert_eq!(disk.submit(Duration::ZERO, Duration::MAX), Duration::MAX);
    }
}
