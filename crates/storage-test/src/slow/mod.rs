//! A host whose files share the timing of one slow disk.
//!
//! On a fast file system, this gives jobs and guests a disk to contend for that behaves the same on every machine. The
//! wrapped host executes a request at once, and its future completes when the simulated disk would have completed it:
//!
//! - At most [`depth`](SlowDisk::depth) requests are in the disk at a time; the others wait in order of arrival.
//! - The bytes of requests are transferred one request after another, at the disk's [`bandwidth`](SlowDisk::bandwidth).
//! - A request ends [`latency`](SlowDisk::latency) after its transfer, while others are transferred.
//! - A flush blocks all other transfers for the time that it [costs](SlowDisk::flush).
//! - A [rotating](SlowDisk::mechanics) disk must be positioned first, and has a write cache: data written since the
//!   last flush is transferred by the next one.
//!
//! Files are placed one after another. Zero-writes, discards, clones and changes of length are requests without bytes,
//! so a file gains nothing from space that was written before. Queries are free, and reads are not cached. At each
//! flush, a trace event reports the requests sent to the disk so far.
//!
//! If the real disk is slower than the simulated one, its own timing shows. Waiting uses the timers of an
//! [`Executor`](isobath_ring::Executor); outside of one it blocks the thread.

mod mechanics;

use crate::pass_through::{Call, Hooks, HostCall, HostHooks, PassThrough};
use isobath_storage::{Capabilities, FileId, Host, Result, Storage};
use mechanics::{Arm, transfer};
use parking_lot::Mutex;
use std::collections::{HashMap, VecDeque};
use std::num::{NonZeroU64, NonZeroUsize};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use mechanics::Mechanics;

/// The distance between the starts of two files.
const APART: u64 = 64 << 30;

/// The properties of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlowDisk {
    /// Bytes per second, reads and writes together.
    pub bandwidth: NonZeroU64,
    /// The fixed time of each request.
    pub latency: Duration,
    /// The maximum number of requests in the disk at a time.
    pub depth: NonZeroUsize,
    /// How long a flush keeps the disk busy, besides its latency.
    pub flush: Duration,
    /// Its mechanics, if it is a rotating disk.
    pub mechanics: Option<Mechanics>,
}

/// A request to a disk, by positions on it.
#[derive(Clone, Debug)]
enum Job {
    Read(Range<u64>),
    Write(Range<u64>),
    Flush,
    /// A request without bytes.
    Other,
}

/// Counts of the requests sent to a disk so far.
#[derive(Default)]
struct Counts {
    reads: u64,
    writes: u64,
    bytes_written: u64,
    flushes: u64,
    others: u64,
}

impl Counts {
    fn add(&mut self, request: &Job) {
        match request {
            Job::Read(_) => self.reads += 1,
            Job::Write(places) => {
                self.writes += 1;
                self.bytes_written += places.end - places.start;
            }
            Job::Flush => {
                self.flushes += 1;
                tracing::trace!(
                    reads = self.reads,
                    writes = self.writes,
                    bytes_written = self.bytes_written,
                    flushes = self.flushes,
                    others = self.others,
                    "the simulated disk's requests"
                );
            }
            Job::Other => self.others += 1,
        }
    }
}

/// Computes when requests end. Times are relative to a fixed moment, and never decrease.
struct Schedule {
    disk: SlowDisk,
    arm: Option<Arm>,
    counts: Counts,
    /// Where each file begins.
    begins: HashMap<FileId, u64>,
    /// When the bytes of every request so far have been transferred.
    free: Duration,
    /// When the requests in the disk end; at most the last `depth` of them.
    ends: VecDeque<Duration>,
}

impl Schedule {
    fn new(disk: SlowDisk) -> Self {
        Self {
            disk,
            arm: disk.mechanics.map(|mechanics| Arm::new(mechanics, disk.bandwidth.get())),
            counts: Counts::default(),
            begins: HashMap::new(),
            free: Duration::ZERO,
            ends: VecDeque::new(),
        }
    }

    /// Where a file begins: after the files opened before it.
    fn begin(&mut self, file: FileId) -> u64 {
        let next = (self.begins.len() as u64).saturating_mul(APART);
        *self.begins.entry(file).or_insert(next)
    }

    /// Accepts a request; returns the time at which it ends.
    fn submit(&mut self, now: Duration, request: Job) -> Duration {
        self.counts.add(&request);
        let mut start = now.max(self.free);
        // All take the same latency, so they end in the order in which they begin.
        if self.ends.len() >= self.disk.depth.get()
            && let Some(first) = self.ends.pop_front()
        {
            start = start.max(first);
        }
        self.free = self.carry_out(start, request);
        let end = self.free.saturating_add(self.disk.latency);
        self.ends.push_back(end);
        end
    }

    /// The time at which the disk is free again after a request.
    fn carry_out(&mut self, start: Duration, request: Job) -> Duration {
        match (request, &mut self.arm) {
            (Job::Read(places), Some(arm)) => arm.read(start, places),
            (Job::Write(places), Some(arm)) => arm.write(start, places),
            (Job::Read(places) | Job::Write(places), None) => {
                start.saturating_add(transfer(places.end - places.start, self.disk.bandwidth.get()))
            }
            (Job::Flush, arm) => {
                let written = arm.as_mut().map_or(start, |arm| arm.write_out(start));
                written.saturating_add(self.disk.flush)
            }
            (Job::Other, _) => start,
        }
    }
}

/// A host whose files share one simulated disk. Clones share it too.
pub type SlowHost<H> = PassThrough<H, Device>;

/// A simulated disk.
#[derive(Clone)]
pub struct Device {
    began: Instant,
    schedule: Arc<Mutex<Schedule>>,
}

impl Device {
    /// Queues a request; returns the time at which it ends.
    fn submit(&self, job: Job) -> Instant {
        let end = self.schedule.lock().submit(self.began.elapsed(), job);
        let never = Duration::from_hours(24 * 365);
        self.began.checked_add(end).unwrap_or(self.began + never)
    }
}

async fn wait_until(end: Instant) {
    if isobath_ring::is_running() {
        isobath_ring::sleep_until(end).await;
    } else {
        std::thread::sleep(end.saturating_duration_since(Instant::now()));
    }
}

impl<H: Host> SlowHost<H> {
    /// Puts the files of a host on a slow disk.
    pub fn new(inner: H, disk: SlowDisk) -> Self {
        let schedule = Arc::new(Mutex::new(Schedule::new(disk)));
        Self::around(inner, Device { began: Instant::now(), schedule })
    }
}

impl HostHooks for Device {
    type File = Place;
    type Begun = ();

    async fn begin(&self, _request: HostCall, _name: &Path) -> Result<()> {
        Ok(())
    }

    fn end(&self, _request: HostCall, _name: &Path, (): ()) {}

    fn file(&self, file: &impl Storage) -> Place {
        let begin = self.schedule.lock().begin(file.id());
        Place { begin, disk: self.clone() }
    }
}

/// The position of a file on a simulated disk.
pub struct Place {
    /// The position of its first byte on the disk.
    begin: u64,
    disk: Device,
}

impl Place {
    /// The positions of the file's bytes on the disk.
    fn places(&self, offset: u64, length: u64) -> Range<u64> {
        let start = self.begin.saturating_add(offset);
        start..start.saturating_add(length)
    }
}

impl Hooks for Place {
    /// When the request ends; `None` if it does not reach the disk.
    type Begun = Option<Instant>;

    async fn begin(&self, _file: &impl Storage, request: Call<'_>) -> Result<Option<Instant>> {
        let job = match request {
            Call::Read { offset, length } => Job::Read(self.places(offset, length)),
            Call::Write { offset, bufs } => {
                let length = bufs.iter().map(|buf| buf.len() as u64).sum();
                Job::Write(self.places(offset, length))
            }
            Call::Flush | Call::Retire => Job::Flush,
            Call::WriteZeroes { .. }
            | Call::Discard { .. }
            | Call::SetLength(_)
            | Call::ExpectLength(_)
            | Call::Clone { .. } => Job::Other,
            Call::Query | Call::AdmitWriter => return Ok(None),
        };
        Ok(Some(self.disk.submit(job)))
    }

    async fn end(
        &self,
        _file: &impl Storage,
        end: Option<Instant>,
        _done: Option<Call<'_>>,
    ) -> Result<()> {
        if let Some(end) = end {
            wait_until(end).await;
        }
        Ok(())
    }

    fn capabilities(&self, own: Capabilities) -> Capabilities {
        Capabilities { gains_from_written_space: false, ..own }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// A mebibyte takes 10 ms, each request 2 ms more.
    fn disk(depth: usize) -> Schedule {
        Schedule::new(SlowDisk {
            bandwidth: NonZeroU64::new(100 << 20).unwrap(),
            latency: 2 * MS,
            depth: NonZeroUsize::new(depth).unwrap(),
            flush: 5 * MS,
            mechanics: None,
        })
    }

    impl Schedule {
        /// The end of a request, in whole milliseconds.
        fn transfer(&mut self, now: u32, bytes: u64) -> u128 {
            self.submit(now * MS, Job::Write(0..bytes)).as_millis()
        }
    }

    #[test]
    fn many_requests_are_bound_by_bandwidth() {
        let mut disk = disk(32);
        for end in [12, 22, 32, 42] {
            assert_eq!(disk.transfer(0, 1 << 20), end);
        }
        // A later request waits for all of them, however small it is.
        assert_eq!(disk.transfer(30, 0), 42);
        assert_eq!(disk.transfer(41, 0), 43);
        // Unused time is lost.
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
        assert_eq!(disk.submit(MS, Job::Flush), 17 * MS);
        assert_eq!(disk.transfer(1, 0), 17);
    }

    #[test]
    fn nothing_overflows() {
        let mut disk = Schedule::new(SlowDisk {
            bandwidth: NonZeroU64::MIN,
            latency: Duration::MAX,
            depth: NonZeroUsize::MIN,
            flush: Duration::MAX,
            mechanics: None,
        });
        disk.transfer(0, u64::MAX);
        assert_eq!(disk.submit(Duration::ZERO, Job::Flush), Duration::MAX);
    }

    #[test]
    fn writes_to_a_turning_disk_are_paid_for_by_the_flush() {
        let turn = 10 * MS;
        let mechanics = Mechanics { turn, ..Mechanics::DESKTOP };
        let mut disk = Schedule::new(SlowDisk { mechanics: Some(mechanics), ..disk(32).disk });
        assert_eq!(disk.transfer(0, 1 << 20), 2, "the latency");
        assert_eq!(disk.submit(MS, Job::Flush), 27 * MS, "late for the first turn; flush, latency");
        assert_eq!(
            (disk.counts.writes, disk.counts.bytes_written, disk.counts.flushes),
            (1, 1 << 20, 1)
        );
    }

    #[test]
    fn files_lie_one_behind_the_other() {
        let mut disk = disk(1);
        let [one, other] = [1, 2].map(|inode| FileId { device: 1, inode });
        assert_eq!([one, other, one].map(|file| disk.begin(file)), [0, APART, 0]);
    }
}
