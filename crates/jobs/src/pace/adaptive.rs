//! The adaptive mode, which needs no threshold and no observation period.
//!
//! - **Pauses of the guest are filled.** A few milliseconds after the guest's last request the job starts with one
//!   small piece. The amount in flight beyond that never takes longer to drain than 1/32 of the time that the guest has
//!   been quiet, nor longer than about 15 ms. So a guest that becomes active again at any time loses a few percent of
//!   its pause, and a long pause is used at the disk's full speed. When the guest becomes active, nothing more is
//!   started.
//! - **Beside a busy guest** the job takes a few percent of the guest's bandwidth, which is measured continuously (see
//!   [`impact`](super::impact)), with small, evenly spaced pieces. While the guest has pauses, so few of its requests
//!   coincide with a piece that their 99th percentile hardly changes. If it has none, the job takes more after a minute
//!   or two, so that it finishes; with a deadline it takes as much as it needs.

use super::capacity::{Capacity, SMALL};
use super::impact::{Impact, follow};
use super::step::{Forecast, Wish, Work};
use isobath_disk::live::GuestCounts;
use std::time::Duration;

/// The guest counts as quiet after this many times the duration of a small piece, within these bounds.
const QUIET_PIECES: f64 = 4.0;
const QUIET: (f64, f64) = (0.0025, 0.02);
/// The part of the guest's quiet time within which the pieces in flight must drain.
const QUIET_PART: f64 = 1.0 / 32.0;

/// The part of a busy guest's bandwidth that the job may take, and the maximum that it grows to without pauses.
const IMPACT: f64 = 0.02;
const GROWN: f64 = 0.08;
/// The part of a guest's requests that may take notably longer without affecting their 99th percentile. It does not
/// apply when the impact has grown, nor to a guest with fewer requests in flight than this.
const SLOWED: f64 = 0.007;
const LIGHT: f64 = 0.25;
/// If pauses make up this part of the time, the share does not grow.
const ENOUGH_PAUSES: f64 = 0.1;
/// How long the job observes before it may disregard the guest.
const LOOK: Duration = Duration::from_secs(1);
/// With a share above this the job disregards the guest.
const ALL: f64 = 0.75;
/// The largest share if none is requested and the guest is not affected: a single piece may say little about a disk.
const MOST: f64 = 0.4;
const UNNOTICED: f64 = 8.0;
/// How long the guest's pauses are remembered, in seconds.
const MEMORY: f64 = 60.0;
/// A share accumulates credit for at most this many pieces, and debt for at most this long, in seconds.
const SAVED: f64 = 2.0;
const OWED: f64 = 1.0;
/// The job aims to use this part of the time left until a deadline.
const AIM: f64 = 0.9;
/// The interval over which the guest's bandwidth is measured, in seconds.
const BANDWIDTH: f64 = 0.1;

#[derive(Debug)]
pub(super) struct Adaptive {
    capacity: Capacity,
    impact: Impact,
    started: Duration,
    deadline: Option<Duration>,
    /// From 0 to 1.
    max_impact: Option<f64>,
    /// The last call, and whether the guest was quiet then.
    at: Duration,
    filling: bool,
    /// Whether the job's speed is limited.
    limited: bool,
    /// The guest's last known activity.
    activity: Duration,
    /// The part of the time in which the guest was quiet: a running estimate that starts at one half, and the measured
    /// value.
    pauses: f64,
    seen_pauses: f64,
    /// The bytes that the job may copy beside the guest; its debt if below 0.
    credit: f64,
    /// The guest's highest bandwidth in bytes per second, and the measurement in progress.
    guest_peak: f64,
    guest_from: Option<(Duration, u64)>,
    /// How long a piece takes beside the guest, in seconds; 0: unknown.
    took: f64,
    /// The piece beside the guest that `next` requested.
    starting: u64,
}

impl Adaptive {
    pub(super) fn new(deadline: Option<Duration>, max_impact: Option<f64>, now: Duration) -> Self {
        Self {
            capacity: Capacity::new(),
            impact: Impact::new(),
            started: now,
            deadline: deadline.map(|within| now.saturating_add(within)),
            max_impact: max_impact
                .filter(|percent| !percent.is_nan())
                .map(|percent| (percent / 100.0).clamp(0.001, 1.0)),
            at: now,
            filling: false,
            limited: false,
            activity: Duration::ZERO,
            pauses: 0.5,
            seen_pauses: 0.0,
            credit: 0.0,
            guest_peak: 0.0,
            guest_from: None,
            took: 0.0,
            starting: 0,
        }
    }

    pub(super) fn next(
        &mut self,
        now: Duration,
        guest: &GuestCounts,
        work: &Work,
        speed: u64,
    ) -> Wish {
        self.observe(now, guest, work);
        self.starting = 0;
        let quiet = quiet_for(now, guest);
        self.limited = speed > 0;
        let rate = self.rate(now, work);
        let regardless = self.has_no_regard(now, rate);
        if quiet >= self.grace() || regardless {
            self.filling = true;
            self.impact.interrupt();
            let piece = if regardless && quiet < 1.0 {
                Capacity::piece_regardless(work.in_flight, work.pieces)
            } else {
                self.capacity.piece(quiet * QUIET_PART, work.in_flight, work.pieces)
            };
            return piece.map_or(Wish::Drain(now + Duration::from_millis(5)), Wish::Copy);
        }
        self.filling = false;
        self.impact.observe(now, guest, self.took);
        let rate = rate * self.impact.factor();
        // As few pieces at once as the rate needs, and small ones.
        let piece = self.beside_piece(rate);
        let most = (rate * self.took / piece as f64).ceil().clamp(1.0, 16.0) as u32;
        // The first piece shows what a piece costs.
        let first = self.capacity.speed().is_none() && work.pieces == 0;
        if first || (self.credit >= piece as f64 && work.pieces < most) {
            self.starting = piece;
            return Wish::Copy(piece);
        }
        let slot = if work.pieces < most { (piece as f64 - self.credit) / rate } else { OWED };
        let pause = (self.grace() - quiet).max(0.0);
        Wish::Pause(now + Duration::from_secs_f64(slot.min(pause)))
    }

    /// The requested step was taken.
    pub(super) fn started(&mut self) {
        self.credit -= self.starting as f64;
        self.impact.used(self.starting as f64 * self.cost());
        self.starting = 0;
    }

    pub(super) fn copied(&mut self, now: Duration, bytes: u64, took: Duration) {
        if self.filling && !self.limited && now.saturating_sub(self.activity) >= took {
            self.capacity.copied(now, bytes, took);
        } else {
            self.capacity.copied_beside(now, bytes, took);
            follow(&mut self.took, Some(took.as_secs_f64()));
        }
    }

    pub(super) fn forecast(&self, now: Duration, work: &Work, speed: u64) -> Option<Forecast> {
        self.capacity.speed()?;
        let rate = self.rate(now, work);
        let full = self.speed();
        let beside = if self.has_no_regard(now, rate) { full } else { rate.min(full) };
        let mut rate = full * self.seen_pauses + beside * (1.0 - self.seen_pauses);
        if speed > 0 {
            rate = rate.min(speed as f64);
        }
        let left = (work.remaining as f64 / rate.max(1.0)).min(1e9);
        let end = now + Duration::from_secs_f64(left);
        Some(Forecast {
            end,
            misses_deadline: self.deadline.is_some_and(|deadline| end > deadline),
        })
    }

    /// Processes what happened since the last call.
    fn observe(&mut self, now: Duration, guest: &GuestCounts, work: &Work) {
        let passed = now.saturating_sub(self.at).as_secs_f64();
        let back = guest.in_flight > 0 || guest.last_activity > self.activity;
        let quiet = if guest.in_flight > 0 {
            0.0
        } else {
            // The grace period does not count, because it is not used.
            let usable = guest.last_activity + Duration::from_secs_f64(self.grace());
            now.saturating_sub(usable.max(self.at)).as_secs_f64()
        };
        let age = now.saturating_sub(self.started).as_secs_f64();
        let part = if passed > 0.0 { quiet / passed } else { 0.0 };
        self.pauses += (part - self.pauses) * (passed / MEMORY).min(1.0);
        self.seen_pauses += (part - self.seen_pauses) * (passed / age.clamp(1e-9, MEMORY)).min(1.0);
        let rate = self.rate(now, work) * self.impact.factor();
        let most = SAVED * self.beside_piece(rate) as f64;
        self.credit = (self.credit + rate * (passed - quiet)).min(most);
        if back && self.filling {
            // The guest waits for the pieces in flight, except the one that the job's share allows anyway.
            self.capacity.interrupt();
            let waits = work.in_flight.saturating_sub(SMALL) as f64;
            self.credit = (self.credit - waits).max(-rate * OWED);
            self.filling = false;
        }
        self.activity = guest.last_activity;
        self.at = self.at.max(now);
        let bytes = guest.bytes();
        let &mut (from, before) = self.guest_from.get_or_insert((now, bytes));
        let measured = now.saturating_sub(from).as_secs_f64();
        if measured >= BANDWIDTH {
            let bandwidth = bytes.saturating_sub(before) as f64 / measured;
            self.guest_peak = bandwidth.max(self.guest_peak * 0.999);
            self.guest_from = Some((now, bytes));
        }
    }

    /// How long the guest must be quiet before its pause is filled, in seconds.
    fn grace(&self) -> f64 {
        (self.capacity.base() * QUIET_PIECES).clamp(QUIET.0, QUIET.1)
    }

    /// The disk's copying speed, in bytes per second: as learned, or half of the guest's bandwidth, since a copy is a
    /// read and a write.
    fn speed(&self) -> f64 {
        self.capacity.speed().unwrap_or(1.0).max(self.guest_peak / 2.0)
    }

    /// The disk time per byte beside the guest, in seconds, which includes each piece's fixed cost.
    fn cost(&self) -> f64 {
        // A piece that was never alone waited for the guest, both for its read and for its write.
        let waited = if self.capacity.was_alone() { 0.0 } else { self.impact.latency() * 2.0 };
        (1.0 / self.speed()).max((self.capacity.base() - waited) / SMALL as f64)
    }

    /// How many bytes per second the job copies beside a busy guest.
    fn rate(&self, now: Duration, work: &Work) -> f64 {
        let impact = &self.impact;
        let grown = (1.0 - self.pauses / ENOUGH_PAUSES).clamp(0.0, 1.0);
        let allowed = self.max_impact.unwrap_or(IMPACT + (GROWN - IMPACT) * grown);
        // As a share of the disk's time.
        let mut share = allowed / impact.loss();
        if let Some(allowed) = self.max_impact {
            let most = if allowed >= ALL { 1.0 } else { ALL };
            return (share / self.cost()).min(most * self.speed());
        }
        if impact.is_unnoticed() {
            share = share.min(UNNOTICED);
        } else {
            share = share.min(MOST);
        }
        if impact.is_felt() && impact.depth() > LIGHT {
            let unfelt = impact.meeting(SLOWED).min(share);
            share = unfelt + (share - unfelt) * grown;
        }
        let rate = share / self.cost();
        let Some(deadline) = self.deadline else { return rate };
        let left = deadline.saturating_sub(now).as_secs_f64() * AIM;
        if left <= 0.0 {
            return rate.max(self.speed());
        }
        let in_pauses = self.seen_pauses * self.speed();
        let needed =
            (work.remaining as f64 / left - in_pauses) / (1.0 - self.seen_pauses).max(0.01);
        rate.max(needed.min(self.speed()))
    }

    /// Whether the rate is so high that the guest is disregarded, once something is known about the disk.
    fn has_no_regard(&self, now: Duration, rate: f64) -> bool {
        let asked = match self.max_impact {
            Some(impact) => impact >= ALL,
            None => self.deadline.is_some(),
        };
        asked && rate >= ALL * self.speed() && now.saturating_sub(self.started) >= LOOK
    }

    /// The piece to copy beside the guest at a rate: larger only at a high rate, which was requested.
    fn beside_piece(&self, rate: f64) -> u64 {
        if self.deadline.is_none() && self.max_impact.is_none() {
            return SMALL;
        }
        SMALL * ((rate / self.speed() * 4.0) as u64).clamp(1, 4)
    }
}

/// Seconds since the guest's last request ended; 0 if one is in flight.
fn quiet_for(now: Duration, guest: &GuestCounts) -> f64 {
    if guest.in_flight > 0 {
        return 0.0;
    }
    now.saturating_sub(guest.last_activity).as_secs_f64()
}
