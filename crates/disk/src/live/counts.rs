//! Counters of a disk's requests and their latencies.

use isobath_image::per_thread::PerThread;
use isobath_image::violated;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Kinds of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Read,
    Write,
    Flush,
    /// Zero-writes and discards.
    Unmap,
}

impl Kind {
    const fn index(self) -> usize {
        match self {
            Self::Read => 0,
            Self::Write => 1,
            Self::Flush => 2,
            Self::Unmap => 3,
        }
    }
}

/// Buckets of a histogram of latencies: bucket `n` counts the requests of less than `2^n` microseconds that no earlier
/// bucket counts; the last one counts all others.
pub const LATENCY_BUCKETS: usize = 26;

/// Requests of one kind since the disk was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestStats {
    /// Requests that succeeded.
    pub requests: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Bytes of those that succeeded.
    pub bytes: u64,
    /// The sum of their times from arrival to reply.
    pub latency: Duration,
    /// Histogram of latencies; see [`LATENCY_BUCKETS`].
    pub histogram: [u64; LATENCY_BUCKETS],
}

/// Requests since the disk was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoStats {
    /// Reads.
    pub reads: RequestStats,
    /// Writes.
    pub writes: RequestStats,
    /// Flushes, which have no bytes.
    pub flushes: RequestStats,
    /// Zero-writes and discards.
    pub unmaps: RequestStats,
    /// Requests in flight.
    pub in_flight: u32,
}

/// The guest's activity so far. The numbers never decrease, except for `in_flight`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GuestCounts {
    /// Requests in flight now.
    pub in_flight: u32,
    /// When a request last arrived or completed, by the job clock.
    pub last_activity: Duration,
    /// Completed requests during which no job I/O was in flight.
    pub alone: Sample,
    /// Completed requests during which job I/O was in flight at any time.
    pub beside: Sample,
}

impl GuestCounts {
    /// The bytes of all of them.
    pub fn bytes(&self) -> u64 {
        self.alone.bytes.saturating_add(self.beside.bytes)
    }
}

/// Completed requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// How many.
    pub requests: u64,
    /// Their bytes.
    pub bytes: u64,
    /// The sum of their latencies.
    pub latency: Duration,
}

/// Requests of one kind that one thread served.
#[derive(Default)]
struct OfKind {
    failed: AtomicU64,
    bytes: AtomicU64,
    latency: AtomicU64,
    /// All that succeeded.
    histogram: [AtomicU64; LATENCY_BUCKETS],
}

impl OfKind {
    fn add_to(&self, stats: &mut RequestStats) {
        stats.failed += self.failed.load(Ordering::Relaxed);
        stats.bytes += self.bytes.load(Ordering::Relaxed);
        stats.latency += Duration::from_nanos(self.latency.load(Ordering::Relaxed));
        for (sum, count) in stats.histogram.iter_mut().zip(&self.histogram) {
            let count = count.load(Ordering::Relaxed);
            *sum += count;
            stats.requests += count;
        }
    }
}

/// Reads and writes that one thread served during job copies.
#[derive(Default)]
struct Beside {
    requests: AtomicU64,
    bytes: AtomicU64,
    latency: AtomicU64,
}

/// The requests that one thread served.
#[derive(Default)]
struct OfThread {
    kinds: [OfKind; 4],
    in_flight: AtomicU32,
    /// Nanoseconds of the clock.
    last_activity: AtomicU64,
    beside: Beside,
}

/// The counters.
#[derive(Default)]
pub(super) struct Counts {
    threads: PerThread<OfThread>,
    /// Job copies in flight, and the number started.
    copies: AtomicU32,
    begun: AtomicU64,
}

/// A request in flight.
pub(super) struct InFlight<'a> {
    counts: &'a Counts,
    /// The thread's counters for it.
    here: &'a OfThread,
    kind: Kind,
    bytes: u64,
    start: Duration,
    /// Copies started when it arrived; `None` if one was in flight.
    begun: Option<u64>,
}

/// A job's copy in flight.
pub struct Copying<'a>(&'a Counts);

impl Drop for Copying<'_> {
    fn drop(&mut self) {
        if self.0.copies.fetch_sub(1, Ordering::Relaxed) == 0 {
            violated("a copy that ends is in flight");
        }
    }
}

impl Counts {
    pub(super) fn begin(&self, kind: Kind, bytes: u64, now: Duration) -> InFlight<'_> {
        let (_, here) = self.threads.mine();
        here.in_flight.fetch_add(1, Ordering::Relaxed);
        here.last_activity.store(now.as_nanos() as u64, Ordering::Relaxed);
        let alone = self.copies.load(Ordering::Relaxed) == 0;
        let begun = alone.then(|| self.begun.load(Ordering::Relaxed));
        InFlight { counts: self, here, kind, bytes, start: now, begun }
    }

    fn in_flight(&self) -> u32 {
        self.threads.all().map(|thread| thread.in_flight.load(Ordering::Relaxed)).sum()
    }

    fn last_activity(&self) -> Duration {
        let last = self.threads.all().map(|thread| thread.last_activity.load(Ordering::Relaxed));
        Duration::from_nanos(last.max().unwrap_or(0))
    }

    fn of_kind(&self, kind: Kind) -> RequestStats {
        let mut stats = RequestStats::default();
        for thread in self.threads.all() {
            thread.kinds[kind.index()].add_to(&mut stats);
        }
        stats
    }

    /// Whether there was no request since `time`, by the clock, and none is in flight.
    pub(super) fn quiet_since(&self, time: Duration) -> bool {
        self.in_flight() == 0 && self.last_activity() < time
    }

    pub(super) fn copying(&self) -> Copying<'_> {
        self.begun.fetch_add(1, Ordering::Relaxed);
        self.copies.fetch_add(1, Ordering::Relaxed);
        Copying(self)
    }

    pub(super) fn stats(&self) -> IoStats {
        IoStats {
            reads: self.of_kind(Kind::Read),
            writes: self.of_kind(Kind::Write),
            flushes: self.of_kind(Kind::Flush),
            unmaps: self.of_kind(Kind::Unmap),
            in_flight: self.in_flight(),
        }
    }

    /// Flushes that succeeded.
    pub(super) fn flushes(&self) -> u64 {
        self.of_kind(Kind::Flush).requests
    }

    pub(super) fn guest(&self) -> GuestCounts {
        let mut beside = Sample::default();
        // Before the totals, of which these are a part.
        for thread in self.threads.all() {
            beside.requests += thread.beside.requests.load(Ordering::Relaxed);
            beside.bytes += thread.beside.bytes.load(Ordering::Relaxed);
            beside.latency += Duration::from_nanos(thread.beside.latency.load(Ordering::Relaxed));
        }
        let (reads, writes) = (self.of_kind(Kind::Read), self.of_kind(Kind::Write));
        let less = |all: u64, some: u64| all.saturating_sub(some);
        let alone = Sample {
            requests: less(reads.requests + writes.requests, beside.requests),
            bytes: less(reads.bytes + writes.bytes, beside.bytes),
            latency: (reads.latency + writes.latency).saturating_sub(beside.latency),
        };
        let (in_flight, last_activity) = (self.in_flight(), self.last_activity());
        GuestCounts { in_flight, last_activity, alone, beside }
    }
}

impl InFlight<'_> {
    /// The request has ended.
    pub(super) fn end(self, succeeded: bool, now: Duration) {
        let here = self.here;
        let kind = &here.kinds[self.kind.index()];
        let latency = now.saturating_sub(self.start).as_nanos() as u64;
        here.last_activity.store(now.as_nanos() as u64, Ordering::Relaxed);
        if !succeeded {
            kind.failed.fetch_add(1, Ordering::Relaxed);
            return;
        }
        kind.bytes.fetch_add(self.bytes, Ordering::Relaxed);
        kind.latency.fetch_add(latency, Ordering::Relaxed);
        let bucket = (u64::BITS - (latency / 1000).leading_zeros()) as usize;
        if let Some(bucket) = kind.histogram.get(bucket.min(LATENCY_BUCKETS - 1)) {
            bucket.fetch_add(1, Ordering::Relaxed);
        }
        let alone = self.begun == Some(self.counts.begun.load(Ordering::Relaxed));
        if !alone && matches!(self.kind, Kind::Read | Kind::Write) {
            here.beside.requests.fetch_add(1, Ordering::Relaxed);
            here.beside.bytes.fetch_add(self.bytes, Ordering::Relaxed);
            here.beside.latency.fetch_add(latency, Ordering::Relaxed);
        }
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        if self.here.in_flight.fetch_sub(1, Ordering::Relaxed) == 0 {
            violated("a request that ends is in flight");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn requests_are_told_apart_by_the_jobs_beside_them() {
        let counts = Counts::default();
        let alone = counts.begin(Kind::Read, 10, MS);
        assert_eq!(counts.guest().in_flight, 1);
        alone.end(true, 2 * MS);
        let beside = counts.begin(Kind::Write, 20, 2 * MS);
        drop(counts.copying());
        beside.end(true, 5 * MS);
        let guest = counts.guest();
        assert_eq!((guest.alone.bytes, guest.beside.bytes), (10, 20));
        assert_eq!((guest.alone.latency, guest.beside.latency), (MS, 3 * MS));
        assert_eq!((guest.in_flight, guest.last_activity), (0, 5 * MS));
        let stats = counts.stats();
        assert_eq!((stats.reads.requests, stats.writes.bytes), (1, 20));
        // 1000 and 3000 microseconds are less than 2^10 and 2^12.
        assert_eq!((stats.reads.histogram[10], stats.writes.histogram[12]), (1, 1));
    }

    #[test]
    #[should_panic(expected = "a copy that ends is in flight")]
    fn a_copy_ends_once() {
        drop(Copying(&Counts::default()));
    }

    #[test]
    #[should_panic(expected = "a request that ends is in flight")]
    fn a_request_ends_once() {
        let (counts, here) = (Counts::default(), OfThread::default());
        let (kind, bytes, start, begun) = (Kind::Read, 1, MS, None);
        drop(InFlight { counts: &counts, here: &here, kind, bytes, start, begun });
    }

    #[test]
    fn a_failed_or_dropped_request_counts_as_neither() {
        let counts = Counts::default();
        counts.begin(Kind::Flush, 0, MS).end(false, MS);
        drop(counts.begin(Kind::Read, 1, MS));
        let stats = counts.stats();
        assert_eq!((stats.flushes.failed, stats.flushes.requests, stats.in_flight), (1, 0, 0));
        assert_eq!(stats.reads, RequestStats::default());
    }
}
