//! What a run counts, and the line that tells it.

use crate::options::Load;
use serde_json::{Value, json};
use std::time::Duration;

/// Buckets for each power of two: a latency is told to within 1 %.
const STEPS_LOG2: u32 = 7;
const STEPS: usize = 1 << STEPS_LOG2;

/// Requests that have ended, and how long they took.
pub(crate) struct Tally {
    pub(crate) requests: u64,
    pub(crate) errors: u64,
    pub(crate) elapsed: Duration,
    total_ns: u64,
    /// Counts by latency: exact below `STEPS` ns, then `STEPS` buckets a power of two.
    latencies: Vec<u64>,
}

impl Default for Tally {
    fn default() -> Self {
        let buckets = STEPS * (u64::BITS - STEPS_LOG2 + 1) as usize;
        Self {
            requests: 0,
            errors: 0,
            elapsed: Duration::ZERO,
            total_ns: 0,
            latencies: vec![0; buckets],
        }
    }
}

impl Tally {
    pub(crate) fn add(&mut self, took: Duration, ok: bool) {
        let ns = took.as_nanos() as u64;
        self.requests += 1;
        self.errors += u64::from(!ok);
        self.total_ns += ns;
        self.latencies[bucket(ns)] += 1;
    }

    /// Adds what another queue has done at the same time.
    pub(crate) fn join(&mut self, other: &Self) {
        self.requests += other.requests;
        self.errors += other.errors;
        self.total_ns += other.total_ns;
        self.elapsed = self.elapsed.max(other.elapsed);
        for (count, more) in self.latencies.iter_mut().zip(&other.latencies) {
            *count += more;
        }
    }

    /// The latency in ns that `part` of the requests kept within.
    fn percentile(&self, part: f64) -> u64 {
        let wanted = (self.requests as f64 * part).ceil() as u64;
        let mut seen = 0;
        for (bucket, count) in self.latencies.iter().enumerate() {
            seen += count;
            if seen >= wanted.max(1) {
                return middle(bucket);
            }
        }
        0
    }

    /// The run as a line of JSON; `cpu` is what this process has used for it.
    pub(crate) fn line(&self, command: &str, load: &Load, cpu: Duration) -> Value {
        let seconds = self.elapsed.as_secs_f64();
        let requests = self.requests.max(1) as f64;
        json!({
            "command": command,
            "rw": load.rw.name(),
            "block": load.bs,
            "depth": load.qd,
            "queues": load.queues,
            "seconds": seconds,
            "requests": self.requests,
            "errors": self.errors,
            "iops": self.requests as f64 / seconds,
            "bytes_per_second": self.requests as f64 * load.bs as f64 / seconds,
            "cpu_seconds": cpu.as_secs_f64(),
            "cpu_us_per_request": cpu.as_secs_f64() * 1e6 / requests,
            "mean_ns": self.total_ns as f64 / requests,
            "p50_ns": self.percentile(0.5),
            "p99_ns": self.percentile(0.99),
        })
    }
}

fn bucket(ns: u64) -> usize {
    let shift = (u64::BITS - ns.leading_zeros()).saturating_sub(STEPS_LOG2 + 1);
    ((shift as usize) << STEPS_LOG2) + (ns >> shift) as usize
}

/// The latency in the middle of a bucket.
fn middle(bucket: usize) -> u64 {
    let shift = (bucket >> STEPS_LOG2).saturating_sub(1);
    let low = ((bucket - (shift << STEPS_LOG2)) as u64) << shift;
    low + (1 << shift) / 2
}

#[cfg(test)]
mod tests {
    use super::{Tally, bucket, middle};
    use std::time::Duration;

    #[test]
    fn buckets_are_narrow() {
        for ns in (0..100_000).chain([1 << 40, u64::MAX >> 1, u64::MAX]) {
            let told = middle(bucket(ns));
            assert!(told.abs_diff(ns) as f64 <= ns as f64 * 0.01, "{ns} is told as {told}");
        }
        assert!(bucket(u64::MAX) < Tally::default().latencies.len());
    }

    #[test]
    fn percentiles_are_of_all_queues() {
        let (mut one, mut two) = (Tally::default(), Tally::default());
        for _ in 0..99 {
            one.add(Duration::from_nanos(100), true);
        }
        two.add(Duration::from_micros(5), false);
        one.join(&two);
        assert_eq!((one.requests, one.errors), (100, 1));
        assert_eq!(one.percentile(0.5), 100);
        assert_eq!(one.percentile(0.99), 100);
        assert!(one.percentile(1.0).abs_diff(5000) <= 50);
    }
}
