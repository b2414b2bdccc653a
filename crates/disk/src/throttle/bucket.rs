//! A leaky bucket: what has passed lately, in units of a limit.
//!
//! Levels are whole billionths of a unit, and times whole nanoseconds, so nothing is rounded: one unit per second leaks
//! one billionth in a nanosecond.

use super::limits::Limit;
use std::time::Duration;

/// Billionths in a unit.
pub(super) const UNIT: u128 = 1_000_000_000;

/// A bucket of one limit.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Bucket {
    limit: Limit,
    /// What has passed, less what has leaked at the average rate.
    level: u128,
    /// What has passed, less what has leaked at the burst's rate: keeps a long burst to its rate.
    burst: u128,
}

impl Bucket {
    /// An empty bucket.
    pub(super) fn new(limit: Limit) -> Self {
        Self { limit, level: 0, burst: 0 }
    }

    fn is_limited(&self) -> bool {
        self.limit.average > 0
    }

    /// Whether bursts are long enough to have a rate of their own; shorter ones may pass at once.
    fn has_burst_rate(&self) -> bool {
        self.limit.burst_length > 1
    }

    /// What the bucket holds before it is full.
    fn size(&self) -> u128 {
        let Limit { average, burst, burst_length } = self.limit;
        match burst {
            0 => tenth(average),
            _ => u128::from(burst) * u128::from(burst_length) * UNIT,
        }
    }

    /// Lets leak what leaks in `time`.
    pub(super) fn leak(&mut self, time: Duration) {
        let leaked = |rate: u64| u128::from(rate).saturating_mul(time.as_nanos());
        self.level = self.level.saturating_sub(leaked(self.limit.average));
        self.burst = self.burst.saturating_sub(leaked(self.limit.burst));
    }

    /// Adds what passes, in billionths of a unit.
    pub(super) fn add(&mut self, amount: u128) {
        if self.is_limited() {
            self.level = self.level.saturating_add(amount);
            if self.has_burst_rate() {
                self.burst = self.burst.saturating_add(amount);
            }
        }
    }

    /// The nanoseconds until the bucket is not overfull, so that the next request may pass; 0 if it may now. A request
    /// passes whatever its size, and the next one waits accordingly.
    pub(super) fn wait(&self) -> u128 {
        if !self.is_limited() {
            return 0;
        }
        let wait = time_to_leak(self.level, self.size(), self.limit.average);
        if !self.has_burst_rate() {
            return wait;
        }
        wait.max(time_to_leak(self.burst, tenth(self.limit.burst), self.limit.burst))
    }
}

/// What passes in a tenth of a second.
fn tenth(rate: u64) -> u128 {
    u128::from(rate) * (UNIT / 10)
}

/// The nanoseconds after which a level is at most `size`.
fn time_to_leak(level: u128, size: u128, rate: u64) -> u128 {
    level.saturating_sub(size).div_ceil(u128::from(rate.max(1)))
}
