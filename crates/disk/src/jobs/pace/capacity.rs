//! What the disk can copy, learned from the pieces: how fast, and how much may be under way so that
//! it drains in a given time.

use super::{KIB, MIB};
use std::time::Duration;

/// The smallest piece: the default cluster.
pub(super) const SMALL: u64 = 64 * KIB;
const LARGE: u64 = MIB;
/// The most that is ever under way.
const MOST_BYTES: f64 = (32 * MIB) as f64;
const MOST_PIECES: u32 = 32;
/// How long what is under way takes to drain at most, beyond a piece's own time on an idle disk.
const DRAIN: f64 = 0.015;
/// A piece's own time counts up to this.
const MOST_BASE: f64 = 0.1;
/// How long a speed is measured.
const MEASURE: f64 = 0.02;
/// Speeds are taken for at least this, so that no time to drain is endless.
const SLOWEST: f64 = 64.0 * 1024.0;

#[derive(Debug, Default)]
pub(super) struct Capacity {
    /// Bytes copied per second while the guest was quiet. 0: not known.
    speed: f64,
    /// The least time that a piece took, in seconds. 0: not known.
    base: f64,
    /// The measure under way: since when, and the bytes since then.
    measure: Option<(Duration, u64)>,
    /// Whether all that the disk bears was under way during the measure.
    full: bool,
}

impl Capacity {
    /// Bytes copied per second with the disk to itself; `None` before anything was copied.
    pub(super) fn speed(&self) -> Option<f64> {
        (self.speed > 0.0).then_some(self.speed)
    }

    /// The least time that a piece took, in seconds; 0 before one was copied.
    pub(super) fn base(&self) -> f64 {
        self.base
    }

    /// How many bytes may be under way so that they drain within `seconds`, and the piece to start
    /// where `in_flight` bytes in `pieces` are; `None` where that is enough.
    pub(super) fn piece(&mut self, seconds: f64, in_flight: u64, pieces: u32) -> Option<u64> {
        let full = DRAIN + self.base.min(MOST_BASE);
        self.full = seconds >= full;
        let most = (self.speed * seconds.min(full)).clamp(SMALL as f64, MOST_BYTES) as u64;
        let piece = (most / 4 / SMALL * SMALL).clamp(SMALL, LARGE);
        (pieces == 0 || (pieces < MOST_PIECES && in_flight + piece <= most)).then_some(piece)
    }

    /// A piece of a job that was alone with the disk, or not.
    pub(super) fn copied(&mut self, now: Duration, bytes: u64, took: Duration, alone: bool) {
        let took = took.as_secs_f64().max(1e-6);
        if self.base == 0.0 || took < self.base {
            self.base = took;
        }
        // A piece's own speed is one that the disk has, if not the most that it has.
        let own = (bytes as f64 / took).max(SLOWEST);
        if own > self.speed {
            self.speed = if self.speed > 0.0 { own.min(self.speed * 2.0) } else { own };
        }
        if !alone {
            self.measure = None;
            return;
        }
        let Some((since, sum)) = &mut self.measure else {
            self.measure = Some((now, 0));
            return;
        };
        *sum = sum.saturating_add(bytes);
        let passed = now.saturating_sub(*since).as_secs_f64();
        if passed >= MEASURE {
            let measured = (*sum as f64 / passed).max(SLOWEST);
            // Less is believed slowly, and only where the disk had all that it bears.
            if measured > self.speed {
                self.speed += (measured - self.speed) * 0.5;
            } else if self.full {
                self.speed += (measured - self.speed) * 0.1;
            }
            self.measure = Some((now, 0));
        }
    }

    /// The guest is back, or the job's speed is limited: what is copied tells little of the disk.
    pub(super) fn interrupt(&mut self) {
        self.measure = None;
    }
}
