//! What a disk was asked for, and how long that took.

use crate::jobs::pace::{GuestCounts, Sample};
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

/// Buckets of a histogram of latencies: the one at `n` counts requests of less than `2^n`
/// microseconds that no earlier one counts, the last one all others.
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
    /// Their time from arrival to reply, summed up.
    pub latency: Duration,
    /// How many took how long; see [`LATENCY_BUCKETS`].
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
    /// Requests under way.
    pub in_flight: u32,
}

#[derive(Default)]
struct OfKind {
    requests: AtomicU64,
    failed: AtomicU64,
    bytes: AtomicU64,
    latency: AtomicU64,
    histogram: [AtomicU64; LATENCY_BUCKETS],
}

impl OfKind {
    fn stats(&self) -> RequestStats {
        RequestStats {
            requests: self.requests.load(Ordering::Relaxed),
            failed: self.failed.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            latency: Duration::from_nanos(self.latency.load(Ordering::Relaxed)),
            histogram: std::array::from_fn(|n| {
                self.histogram.get(n).map_or(0, |count| count.load(Ordering::Relaxed))
            }),
        }
    }
}

/// Counters of completed requests.
#[derive(Default)]
struct Completed {
    requests: AtomicU64,
    bytes: AtomicU64,
    latency: AtomicU64,
}

impl Completed {
    fn sample(&self) -> Sample {
        Sample {
            requests: self.requests.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
            latency: Duration::from_nanos(self.latency.load(Ordering::Relaxed)),
        }
    }
}

/// The counters.
#[derive(Default)]
pub(super) struct Counts {
    kinds: [OfKind; 4],
    in_flight: AtomicU32,
    /// Nanoseconds of the clock.
    last_activity: AtomicU64,
    alone: Completed,
    beside: Completed,
    /// Copies of jobs under way, and how many were begun.
    copies: AtomicU32,
    begun: AtomicU64,
}

/// A request under way.
pub(super) struct Request<'a> {
    counts: &'a Counts,
    kind: Kind,
    bytes: u64,
    start: Duration,
    /// Copies begun when it arrived; `None` if one was under way.
    begun: Option<u64>,
}

/// A copy of a job under way.
pub(crate) struct Copying<'a>(&'a Counts);

impl Drop for Copying<'_> {
    fn drop(&mut self) {
        self.0.copies.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Counts {
    pub(super) fn begin(&self, kind: Kind, bytes: u64, now: Duration) -> Request<'_> {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        self.last_activity.store(now.as_nanos() as u64, Ordering::Relaxed);
        let alone = self.copies.load(Ordering::Relaxed) == 0;
        let begun = alone.then(|| self.begun.load(Ordering::Relaxed));
        Request { counts: self, kind, bytes, start: now, begun }
    }

    /// Whether there was no request since `time`, in the clock's terms, and none is under way.
    pub(super) fn quiet_since(&self, time: Duration) -> bool {
        let last = Duration::from_nanos(self.last_activity.load(Ordering::Relaxed));
        self.in_flight.load(Ordering::Relaxed) == 0 && last < time
    }

    pub(super) fn copying(&self) -> Copying<'_> {
        self.begun.fetch_add(1, Ordering::Relaxed);
        self.copies.fetch_add(1, Ordering::Relaxed);
        Copying(self)
    }

    pub(super) fn stats(&self) -> IoStats {
        let [reads, writes, flushes, unmaps] = &self.kinds;
        IoStats {
            reads: reads.stats(),
            writes: writes.stats(),
            flushes: flushes.stats(),
            unmaps: unmaps.stats(),
            in_flight: self.in_flight.load(Ordering::Relaxed),
        }
    }

    /// Flushes that succeeded.
    pub(super) fn flushes(&self) -> u64 {
        self.kinds[2].requests.load(Ordering::Relaxed)
    }

    pub(super) fn guest(&self) -> GuestCounts {
        GuestCounts {
            in_flight: self.in_flight.load(Ordering::Relaxed),
            last_activity: Duration::from_nanos(self.last_activity.load(Ordering::Relaxed)),
            alone: self.alone.sample(),
            beside: self.beside.sample(),
        }
    }
}

impl Request<'_> {
    /// The request has ended.
    pub(super) fn end(self, succeeded: bool, now: Duration) {
        let counts = self.counts;
        let kind = match self.kind {
            Kind::Read => &counts.kinds[0],
            Kind::Write => &counts.kinds[1],
            Kind::Flush => &counts.kinds[2],
            Kind::Unmap => &counts.kinds[3],
        };
        let latency = now.saturating_sub(self.start).as_nanos() as u64;
        counts.last_activity.store(now.as_nanos() as u64, Ordering::Relaxed);
        if !succeeded {
            kind.failed.fetch_add(1, Ordering::Relaxed);
            return;
        }
        kind.requests.fetch_add(1, Ordering::Relaxed);
        kind.bytes.fetch_add(self.bytes, Ordering::Relaxed);
        kind.latency.fetch_add(latency, Ordering::Relaxed);
        let bucket = (u64::BITS - (latency / 1000).leading_zeros()) as usize;
        if let Some(bucket) = kind.histogram.get(bucket.min(LATENCY_BUCKETS - 1)) {
            bucket.fetch_add(1, Ordering::Relaxed);
        }
        if matches!(self.kind, Kind::Read | Kind::Write) {
            let alone = self.begun == Some(counts.begun.load(Ordering::Relaxed));
            let completed = if alone { &counts.alone } else { &counts.beside };
            completed.requests.fetch_add(1, Ordering::Relaxed);
            completed.bytes.fetch_add(self.bytes, Ordering::Relaxed);
            completed.latency.fetch_add(latency, Ordering::Relaxed);
        }
    }
}

impl Drop for Request<'_> {
    fn drop(&mut self) {
        self.counts.in_flight.fetch_sub(1, Ordering::Relaxed);
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
    fn a_failed_or_dropped_request_counts_as_neither() {
        let counts = Counts::default();
        counts.begin(Kind::Flush, 0, MS).end(false, MS);
        drop(counts.begin(Kind::Read, 1, MS));
        let stats = counts.stats();
        assert_eq!((stats.flushes.failed, stats.flushes.requests, stats.in_flight), (1, 0, 0));
        assert_eq!(stats.reads, RequestStats::default());
    }
}
