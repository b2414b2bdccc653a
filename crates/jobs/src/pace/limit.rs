//! A speed limit in bytes per second.

use super::step::KIB;
use isobath_image::violated;
use std::time::Duration;

/// The time for which a limited job may accumulate credit: QEMU limits its jobs in slices of 100 ms.
const SLICE: f64 = 0.1;

/// The smallest piece worth starting.
const SMALLEST: u64 = 64 * KIB;

/// Credit accrues at the limit's speed, and copied bytes consume it. A piece may overdraw it, because a cluster cannot
/// be split; the next piece then waits.
#[derive(Debug)]
pub(super) struct SpeedLimit {
    speed: u64,
    saved: f64,
    at: Duration,
}

impl SpeedLimit {
    pub(super) fn new(speed: u64, now: Duration) -> Self {
        Self { speed, saved: 0.0, at: now }
    }

    /// Bytes per second; 0: no limit.
    pub(super) fn speed(&self) -> u64 {
        self.speed
    }

    fn accrue(&mut self, now: Duration) {
        let speed = self.speed as f64;
        let most = (speed * SLICE).max(SMALLEST as f64);
        if self.saved > most {
            violated("a limited job saves up for one slice at most");
        }
        let passed = now.saturating_sub(self.at).as_secs_f64();
        self.saved = (self.saved + passed * speed).min(most);
        self.at = self.at.max(now);
    }

    /// The largest piece allowed now, or the time at which to ask again.
    pub(super) fn room(&mut self, now: Duration, in_flight: u64) -> Result<u64, Duration> {
        if self.speed == 0 {
            return Ok(u64::MAX);
        }
        self.accrue(now);
        let room = self.saved - in_flight as f64;
        // A tenth of a slice at least, so that a fast job's pieces do not shrink to nothing.
        let wanted = (self.speed as f64 * SLICE / 10.0).clamp(1.0, SMALLEST as f64);
        if room >= wanted {
            return Ok((room as u64).max(SMALLEST));
        }
        let wait = (wanted - room) / self.speed as f64;
        Err(now + Duration::from_secs_f64(wait.clamp(0.001, 3600.0)))
    }

    pub(super) fn copied(&mut self, now: Duration, bytes: u64) {
        if self.speed > 0 {
            self.accrue(now);
            self.saved -= bytes as f64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Copies pieces of `cluster` for `time`, each of which completes at once, and counts the bytes.
    fn copy(limit: &mut SpeedLimit, from: Duration, time: Duration, cluster: u64) -> u64 {
        let (mut now, mut copied) = (from, 0);
        while now < from + time {
            match limit.room(now, 0) {
                Ok(room) => {
                    let bytes = (room / cluster).max(1) * cluster;
                    limit.copied(now, bytes);
                    copied += bytes;
                }
                Err(until) => {
                    assert!(until > now);
                    now = until;
                }
            }
        }
        copied
    }

    #[test]
    fn speeds_hold_on_average_whatever_the_cluster() {
        for speed in [10_000, 1 << 20, 60_000_000, 5_000_000_000] {
            for cluster in [512, 65536, 2 << 20] {
                let mut limit = SpeedLimit::new(speed, Duration::ZERO);
                let time = Duration::from_secs(1000);
                let copied = copy(&mut limit, Duration::ZERO, time, cluster);
                let wanted = speed * 1000;
                let slack = (speed / 5).max(cluster + SMALLEST);
                assert!(
                    copied.abs_diff(wanted) <= slack,
                    "{speed} {cluster}: {copied} of {wanted}"
                );
            }
        }
    }

    #[test]
    fn an_idle_time_saves_up_one_slice() {
        let mut limit = SpeedLimit::new(10_000_000, Duration::ZERO);
        assert_eq!(limit.room(Duration::from_secs(100), 0), Ok(1_000_000));
        assert_eq!(limit.room(Duration::from_secs(100), 400_000), Ok(600_000));
        assert!(limit.room(Duration::from_secs(100), 1_000_000).is_err());
    }

    #[test]
    fn no_limit_leaves_room_for_all() {
        let mut limit = SpeedLimit::new(0, Duration::ZERO);
        limit.copied(Duration::ZERO, u64::MAX);
        assert_eq!(limit.room(Duration::ZERO, u64::MAX), Ok(u64::MAX));
    }

    #[test]
    #[should_panic(expected = "a limited job saves up for one slice at most")]
    fn no_more_is_saved_up_than_a_slice() {
        let limit = SpeedLimit::new(10_000_000, Duration::ZERO);
        let _ = SpeedLimit { saved: 1_000_001.0, ..limit }.room(Duration::ZERO, 0);
    }
}
