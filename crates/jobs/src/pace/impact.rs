//! What the job costs the guest, learned while both run.
//!
//! The job's use of the disk rises and falls from one tenth of a second to the next, by a pattern
//! that a guest's own ups and downs do not follow. How far the guest's throughput falls where the job's
//! use rises is the guest's loss for each part of the disk's time that the job has: 1 on a disk that
//! one of them has at a time, less where the guest leaves time unused, more where they hinder each
//! other. A Kalman filter holds it, so that noise is weighed by how noisy the guest is.

use super::GuestCounts;
use std::time::Duration;

/// How long an epoch is, in seconds: this, or where pieces take long, some times that.
const EPOCH: f64 = 0.1;
const EPOCH_PIECES: f64 = 4.0;
const LONGEST_EPOCH: f64 = 5.0;
/// The job's part of its usual use in high and in low epochs.
const HIGH: f64 = 1.6;
const LOW: f64 = 0.4;
/// What the loss is taken to be before anything was measured, and its variance.
const USUAL: f64 = 1.0;
const VARIANCE: f64 = 0.25;
/// How many pairs of epochs it takes until a measure is forgotten.
const FORGOTTEN: f64 = 300.0;
/// The least and the most that the loss is believed to be.
const BOUNDS: (f64, f64) = (0.01, 8.0);
/// How many times longer a request that meets the job takes, if that is felt, and if it is not.
const FELT: f64 = 1.2;
const UNFELT: f64 = 1.05;
/// A loss that is next to none.
const UNNOTICED_LOSS: f64 = 0.1;
/// How fast the guest's latencies and its noise are followed: a part of each new measure.
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
    /// The epoch under way: since when, the guest's counts then, and the disk's time used.
    current: Option<(Duration, GuestCounts)>,
    used: f64,
    /// The first epoch of a pair.
    first: Option<Epoch>,
    /// The mean latencies of requests alone and beside the job, in seconds; 0: none seen.
    alone: f64,
    beside: f64,
    /// Guest requests under way on average, if the job did nothing.
    depth: f64,
    /// The part of the guest's requests that were beside the job, for each part of the disk's time.
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

    /// The part of the guest's throughput that is lost for each part of the disk's time.
    pub(super) fn loss(&self) -> f64 {
        self.loss
    }

    /// Whether a request that meets the job takes notably longer than others.
    pub(super) fn is_felt(&self) -> bool {
        self.alone > 0.0 && self.beside > self.alone * FELT
    }

    /// Whether the guest notices nothing of the job: requests that meet it take as long as others,
    /// and its throughput is the same.
    pub(super) fn is_unnoticed(&self) -> bool {
        self.alone > 0.0 && self.beside < self.alone * UNFELT && self.loss < UNNOTICED_LOSS
    }

    /// How long a guest's request takes that does not meet the job, in seconds; 0: not known.
    pub(super) fn latency(&self) -> f64 {
        self.alone
    }

    /// Guest requests under way on average.
    pub(super) fn depth(&self) -> f64 {
        self.depth
    }

    /// The part of the disk's time with which the job meets `part` of the guest's requests.
    pub(super) fn meeting(&self, part: f64) -> f64 {
        if self.met > 0.0 { part / self.met } else { 1.0 }
    }

    /// How much of its usual use the job has in this epoch.
    pub(super) fn factor(&self) -> f64 {
        // The Thue-Morse sequence: each pair has both, and no rhythm lasts.
        if self.number.count_ones().is_multiple_of(2) { HIGH } else { LOW }
    }

    /// The job had so much of the disk's time, in seconds.
    pub(super) fn used(&mut self, seconds: f64) {
        self.used += seconds;
    }

    /// The guest was quiet, or the job filled the disk: this pair of epochs tells nothing.
    pub(super) fn interrupt(&mut self) {
        self.current = None;
        self.first = None;
    }

    /// Beside a busy guest: ends an epoch if it is time.
    /// `took`: how long pieces take, in seconds.
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
        // What was learned fades towards the usual.
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
