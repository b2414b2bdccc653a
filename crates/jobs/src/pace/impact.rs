//! The job's cost to the guest, learned while both run.
//!
//! The job's use of the disk varies between intervals of a tenth of a second, in a pattern that a guest's own
//! variations do not follow. How far the guest's throughput falls when the job's use rises is the guest's loss per unit
//! of the disk's time that the job takes: 1 on a disk that serves one of them at a time, less if the guest leaves time
//! unused, more if they hinder each other. A Kalman filter tracks it, so that measurements are weighted by the guest's
//! noise.

use isobath_disk::live::GuestCounts;
use std::time::Duration;

/// The length of an epoch, in seconds: this, or a multiple of the pieces' duration if they take long.
const EPOCH: f64 = 0.1;
const EPOCH_PIECES: f64 = 4.0;
const LONGEST_EPOCH: f64 = 5.0;
/// The job's use in high and in low epochs, relative to its usual use.
const HIGH: f64 = 1.6;
const LOW: f64 = 0.4;
/// The loss assumed before anything was measured, and its variance.
const USUAL: f64 = 1.0;
const VARIANCE: f64 = 0.25;
/// The number of pairs of epochs after which a measurement is forgotten.
const FORGOTTEN: f64 = 300.0;
/// The bounds of the estimated loss.
const BOUNDS: (f64, f64) = (0.01, 8.0);
/// How many times longer a request takes that coincides with the job, for that to be noticeable, and not to be.
const FELT: f64 = 1.2;
const UNFELT: f64 = 1.05;
/// A negligible loss.
const UNNOTICED_LOSS: f64 = 0.1;
/// The weight of a new measurement in the averages of the guest's latencies and noise.
const FOLLOW: f64 = 0.1;

/// An epoch's guest throughput in bytes per second, and the part of the disk's time that the job had.
#[derive(Clone, Copy, Debug)]
struct Epoch {
    throughput: f64,
    used: f64,
}

#[derive(Debug)]
pub(super) struct Impact {
    loss: f64,
    variance: f64,
    noise: f64,
    /// Counts the epochs; its bits make the pattern.
    number: u64,
    /// The epoch in progress: its start, the guest's counts then, and the disk time used.
    current: Option<(Duration, GuestCounts)>,
    used: f64,
    /// The first epoch of a pair.
    first: Option<Epoch>,
    /// The mean latencies of requests alone and beside the job, in seconds; 0: none seen.
    alone: f64,
    beside: f64,
    /// The average number of guest requests in flight, if the job did nothing.
    depth: f64,
    /// The part of the guest's requests that coincided with the job, per unit of the disk's time.
    met: f64,
}

impl Impact {
    pub(super) fn new() -> Self {
        Self {
            loss: USUAL,
            variance: VARIANCE,
            noise: 0.01,
            number: 0,
            current: None,
            used: 0.0,
            first: None,
            alone: 0.0,
            beside: 0.0,
            depth: 0.0,
            met: 0.0,
        }
    }

    /// The part of the guest's throughput that is lost per unit of the disk's time.
    pub(super) fn loss(&self) -> f64 {
        self.loss
    }

    /// Whether a request that coincides with the job takes notably longer than others.
    pub(super) fn is_felt(&self) -> bool {
        self.alone > 0.0 && self.beside > self.alone * FELT
    }

    /// Whether the job does not affect the guest: requests that coincide with it take as long as others, and the
    /// throughput is the same.
    pub(super) fn is_unnoticed(&self) -> bool {
        self.alone > 0.0 && self.beside < self.alone * UNFELT && self.loss < UNNOTICED_LOSS
    }

    /// The latency of guest requests that do not coincide with the job, in seconds; 0: unknown.
    pub(super) fn latency(&self) -> f64 {
        self.alone
    }

    /// The average number of guest requests in flight.
    pub(super) fn depth(&self) -> f64 {
        self.depth
    }

    /// The part of the disk's time at which the job coincides with `part` of the guest's requests.
    pub(super) fn meeting(&self, part: f64) -> f64 {
        if self.met > 0.0 { part / self.met } else { 1.0 }
    }

    /// The job's use in this epoch, relative to its usual use.
    pub(super) fn factor(&self) -> f64 {
        // The Thue-Morse sequence: each pair has both values, and there is no period.
        if self.number.count_ones().is_multiple_of(2) { HIGH } else { LOW }
    }

    /// The job used this much of the disk's time, in seconds.
    pub(super) fn used(&mut self, seconds: f64) {
        self.used += seconds;
    }

    /// The guest was quiet, or the job saturated the disk: this pair of epochs says nothing.
    pub(super) fn interrupt(&mut self) {
        self.current = None;
        self.first = None;
    }

    /// Called beside a busy guest: ends an epoch if it is time. `took`: how long pieces take, in seconds.
    pub(super) fn observe(&mut self, now: Duration, guest: &GuestCounts, took: f64) {
        let Some((since, before)) = self.current else {
            // A pair starts with an even number.
            self.number = self.number.next_multiple_of(2);
            self.start(now, guest);
            return;
        };
        let passed = now.saturating_sub(since).as_secs_f64();
        if passed < (took * EPOCH_PIECES).clamp(EPOCH, LONGEST_EPOCH) {
            return;
        }
        let bytes = guest.bytes().saturating_sub(before.bytes()) as f64;
        let epoch = Epoch { throughput: bytes / passed, used: self.used / passed };
        self.latencies(guest, &before, passed, epoch.used);
        self.number += 1;
        match self.first.take() {
            None => self.first = Some(epoch),
            Some(first) => self.pair(first, epoch),
        }
        self.start(now, guest);
    }

    fn start(&mut self, now: Duration, guest: &GuestCounts) {
        self.current = Some((now, *guest));
        self.used = 0.0;
    }

    /// Learns from two epochs, one of each kind.
    fn pair(&mut self, one: Epoch, other: Epoch) {
        let (high, low) = if one.used > other.used { (one, other) } else { (other, one) };
        let mean = f64::midpoint(high.throughput, low.throughput);
        let more = high.used - low.used;
        // The estimate decays towards the default.
        let keep = 1.0 - 1.0 / FORGOTTEN;
        self.loss = USUAL + (self.loss - USUAL) * keep;
        self.variance = self.variance * keep * keep + VARIANCE * (1.0 - keep * keep);
        if mean <= 0.0 || more < 0.001 {
            return;
        }
        let fell = (low.throughput - high.throughput) / mean;
        let surprise = (fell - self.loss * more).clamp(-2.0, 2.0);
        self.noise += (surprise * surprise - self.noise) * FOLLOW;
        let gain = self.variance * more / (self.variance * more * more + self.noise.max(1e-6));
        self.loss = (self.loss + gain * surprise).clamp(BOUNDS.0, BOUNDS.1);
        self.variance *= 1.0 - gain * more;
    }

    fn latencies(&mut self, guest: &GuestCounts, before: &GuestCounts, passed: f64, used: f64) {
        let mean = |requests: u64, latency: Duration| {
            (requests > 0).then(|| latency.as_secs_f64() / requests as f64)
        };
        let alone = guest.alone.requests.saturating_sub(before.alone.requests);
        let beside = guest.beside.requests.saturating_sub(before.beside.requests);
        let took = guest.alone.latency.saturating_sub(before.alone.latency);
        follow(&mut self.alone, mean(alone, took));
        let took = guest.beside.latency.saturating_sub(before.beside.latency);
        follow(&mut self.beside, mean(beside, took));
        let requests = (alone + beside) as f64;
        let own = if self.alone > 0.0 { self.alone } else { self.beside };
        follow(&mut self.depth, Some(requests / passed * own));
        if requests > 0.0 && used > 0.0005 {
            follow(&mut self.met, Some(beside as f64 / requests / used));
        }
    }
}

pub(super) fn follow(mean: &mut f64, measured: Option<f64>) {
    if let Some(measured) = measured {
        *mean = if *mean > 0.0 { *mean + (measured - *mean) * FOLLOW } else { measured };
    }
}
