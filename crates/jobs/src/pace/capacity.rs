//! The disk's copying capacity, learned from the pieces: its speed, and how much may be in flight so that it drains in
//! a given time.
//!
//! If more is in flight than the disk serves at once, pieces take longer. The amount in flight therefore grows while
//! pieces take hardly longer than one alone, and shrinks when they wait, as in TCP Vegas. So slow, fast and remote
//! disks are all used well, without a queue that would delay the guest.

use super::step::{KIB, MIB};
use std::time::Duration;

/// The smallest piece: the default cluster.
pub(super) const SMALL: u64 = 64 * KIB;
const LARGE: u64 = MIB;
/// The most bytes in flight, and the amount if the guest is disregarded.
const MOST: f64 = (32 * MIB) as f64;
const REGARDLESS: u64 = 8 * MIB;
const MOST_PIECES: u32 = 32;
/// How long pieces may wait for each other, in seconds: this, or a multiple of a single piece's duration on a slow
/// disk.
const WAIT: f64 = 0.015;
const WAIT_PIECES: f64 = 4.0;
const MOST_WAIT: f64 = 0.06;
/// A disk counts as remote by as much as a single piece takes longer than this, in seconds.
const DISTANT: f64 = 0.001;
/// A disk counts as slow if a single piece takes longer than this, in seconds.
const SLOW: f64 = 0.003;
/// How long a speed is measured, in seconds and pieces.
const MEASURE: f64 = 0.02;
const MEASURED_PIECES: u32 = 16;
/// Speeds are assumed to be at least this, so that no time is infinite.
const SLOWEST: f64 = 64.0 * 1024.0;

#[derive(Debug)]
pub(super) struct Capacity {
    /// Bytes copied per second while the guest was quiet. 0: unknown.
    speed: f64,
    /// The shortest time that a piece took, in seconds. 0: unknown.
    base: f64,
    /// Whether a piece was ever alone on the disk.
    was_alone: bool,
    /// The most bytes to have in flight.
    window: f64,
    /// The part of the window in use, from 0 to 1.
    part: f64,
    /// Whether the window held a piece back since it last changed.
    held: bool,
    /// The measurement in progress: its start, and the bytes and pieces since then.
    measure: Option<(Duration, u64, u32)>,
}

impl Capacity {
    pub(super) fn new() -> Self {
        let window = 2.0 * SMALL as f64;
        Self {
            speed: 0.0,
            base: 0.0,
            was_alone: false,
            window,
            part: 0.0,
            held: false,
            measure: None,
        }
    }

    /// Bytes copied per second with the disk to itself; `None` before anything was copied.
    pub(super) fn speed(&self) -> Option<f64> {
        (self.speed > 0.0).then_some(self.speed)
    }

    /// The shortest time that a piece took, in seconds; 0 before one was copied.
    pub(super) fn base(&self) -> f64 {
        self.base
    }

    /// Whether a piece was ever alone on the disk.
    pub(super) fn was_alone(&self) -> bool {
        self.was_alone
    }

    /// The longest time that pieces may wait for each other, in seconds.
    fn wait(&self) -> f64 {
        (self.base * WAIT_PIECES).clamp(WAIT, MOST_WAIT)
    }

    /// The piece to start when `in_flight` bytes in `pieces` are in flight, so that they wait for each other for at
    /// most `seconds`; `None` if enough is in flight.
    pub(super) fn piece(&mut self, seconds: f64, in_flight: u64, pieces: u32) -> Option<u64> {
        self.part = (seconds / self.wait()).clamp(0.0, 1.0);
        // Not more than is known to drain in that time; but on a remote disk twice what a piece's own time needs, or
        // its speed would never become apparent.
        let own = (self.base * self.part).max(self.base - DISTANT);
        let drains = self.speed * (seconds + 2.0 * own);
        let most = (self.window * self.part).min(drains) as u64;
        // If each piece takes long by itself, prefer large pieces to many.
        let pieces_at_once = if self.base > SLOW { 1 } else { 3 };
        let piece = (most / pieces_at_once / SMALL * SMALL).clamp(SMALL, LARGE);
        let starts = pieces == 0 || (pieces < MOST_PIECES && in_flight + piece <= most);
        self.held |= !starts;
        starts.then_some(piece)
    }

    /// The same, disregarding the guest.
    pub(super) fn piece_regardless(in_flight: u64, pieces: u32) -> Option<u64> {
        (pieces < MOST_PIECES && in_flight + LARGE <= REGARDLESS).then_some(LARGE)
    }

    /// A piece was copied by a job that was alone on the disk.
    pub(super) fn copied(&mut self, now: Duration, bytes: u64, took: Duration) {
        self.was_alone = true;
        let took = self.own_speed(bytes, took);
        let (waited, may) = (took - self.base, self.wait() * self.part);
        if waited > may {
            let over = ((waited - may) / may.max(1e-6)).min(1.0);
            self.window -= bytes as f64 * 0.5 * over;
        } else if waited < may / 2.0 && self.held {
            self.window += bytes as f64;
        }
        self.window = self.window.clamp(2.0 * SMALL as f64, MOST);
        self.held = false;
        self.measure(now, bytes, self.part >= 1.0, true);
    }

    /// A piece was copied beside the guest, or under a speed limit: the disk can copy at least as fast.
    pub(super) fn copied_beside(&mut self, now: Duration, bytes: u64, took: Duration) {
        self.own_speed(bytes, took);
        self.measure(now, bytes, false, false);
    }

    /// Measures the total copied; `full`: whether the disk is saturated; `alone`: whether the job has the disk to
    /// itself.
    fn measure(&mut self, now: Duration, bytes: u64, full: bool, alone: bool) {
        let Some((since, sum, pieces)) = &mut self.measure else {
            self.measure = Some((now, 0, 0));
            return;
        };
        *sum = sum.saturating_add(bytes);
        *pieces += 1;
        let passed = now.saturating_sub(*since).as_secs_f64();
        if passed >= MEASURE && *pieces >= MEASURED_PIECES {
            let measured = (*sum as f64 / passed).max(SLOWEST);
            // A lower speed is adopted slowly, and more slowly if it may result from too few pieces in flight.
            let follow = match (measured > self.speed, full, alone) {
                (true, _, _) => 0.5,
                (false, true, _) => 0.1,
                (false, false, true) => 0.02,
                (false, false, false) => 0.0,
            };
            self.speed += (measured - self.speed) * follow;
            self.measure = Some((now, 0, 0));
        }
    }

    /// Learns from a piece's own speed, which the disk can reach at least. Returns how long the piece took, in seconds.
    fn own_speed(&mut self, bytes: u64, took: Duration) -> f64 {
        let took = took.as_secs_f64().max(1e-6);
        if self.base == 0.0 || took < self.base {
            self.base = took;
        }
        let own = (bytes as f64 / took).max(SLOWEST);
        if own > self.speed {
            self.speed = if self.speed > 0.0 { own.min(self.speed * 2.0) } else { own };
        }
        took
    }

    /// The guest is active again: a measurement in progress would say little about the disk.
    pub(super) fn interrupt(&mut self) {
        self.measure = None;
    }
}
