//! Latencies of a sample of lookups, in buckets an eighth of an octave wide.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Eighths of an octave in an octave, as a shift.
const FINE: u32 = 3;
const BUCKETS: usize = 64 << FINE;

pub(super) struct Latencies {
    buckets: Box<[AtomicU64]>,
}

impl Default for Latencies {
    fn default() -> Self {
        Self { buckets: (0..BUCKETS).map(|_| AtomicU64::new(0)).collect() }
    }
}

impl Latencies {
    pub(super) fn record(&self, time: Duration) {
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        if let Some(bucket) = self.buckets.get(bucket_of(nanoseconds)) {
            bucket.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// The nanoseconds below which `share` (0 to 1) of the sample lies; 0 if the sample is empty.
    pub(super) fn quantile(&self, share: f64) -> u64 {
        let counts: Vec<u64> = self.buckets.iter().map(|b| b.load(Ordering::Relaxed)).collect();
        let total: u64 = counts.iter().sum();
        let wanted = (total as f64 * share).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (bucket, count) in counts.iter().enumerate() {
            seen += count;
            if seen >= wanted {
                return end_of(bucket);
            }
        }
        0
    }
}

fn bucket_of(value: u64) -> usize {
    if value < 1 << FINE {
        return value as usize;
    }
    let octave = value.ilog2();
    let within = value >> (octave - FINE) & ((1 << FINE) - 1);
    ((octave - FINE + 1) as usize) << FINE | within as usize
}

/// The greatest value of a bucket.
fn end_of(bucket: usize) -> u64 {
    let (octave, within) = ((bucket >> FINE) as u32, (bucket & ((1 << FINE) - 1)) as u64);
    if octave == 0 {
        return within;
    }
    ((1u64 << FINE | within) << (octave - 1)) + ((1 << (octave - 1)) - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_is_an_eighth_of_an_octave() {
        for value in (0..5000).chain([1 << 40, u64::MAX]) {
            let end = end_of(bucket_of(value));
            assert!(end >= value && end - value <= value / 8, "{value} {end}");
        }
    }

    #[test]
    fn quantiles() {
        let latencies = Latencies::default();
        assert_eq!(latencies.quantile(0.5), 0);
        for value in 1..=100 {
            latencies.record(Duration::from_nanos(value));
        }
        assert!((50..=56).contains(&latencies.quantile(0.5)));
        assert!((99..=112).contains(&latencies.quantile(0.99)));
    }
}
