//! The adaptive mode: without a threshold to set, and with no time in which it only looks on.
//!
//! - **Pauses of the guest are filled.** A few milliseconds after its last request the job starts
//!   with one small piece. What it has under way beyond that never takes longer to drain than a
//!   thirty-second part of the time that the guest has been quiet, nor than about 15 ms; so a guest
//!   that comes back at any time loses a few percent of its pause, and a long pause sees the disk's
//!   full speed. When the guest comes back nothing more is started.
//! - **Beside a busy guest** the job takes a few percent of the guest's bandwidth, as measured all the
//!   time (see [`impact`](super::impact)), with small pieces, evenly spaced. While the guest has
//!   pauses, so few of its requests meet a piece that their 99th percentile hardly changes. Where
//!   it has none, the job takes more after a minute or two, so that it ends; and where a deadline
//!   needs that, as much as it needs.

use super::capacity::{Capacity, SMALL};
use super::impact::{Impact, follow};
use super::{Forecast, GuestCounts, Wish, Work};
use std::time::Duration;

/// The guest is quiet after this many times what a small piece takes, within these bounds.
const QUIET_PIECES: f64 = 4.0;
const QUIET: (f64, f64) = (0.0025, 0.02);
/// The part of the time that the guest has been quiet in which what is under way must drain.
const QUIET_PART: f64 = 1.0 / 32.0;

/// The part of a busy guest's bandwidth that the job may take, and what it grows to without pauses.
const IMPACT: f64 = 0.02;
const GROWN: f64 = 0.08;
/// The part of a guest's requests that may take notably longer, so that their 99th percentile does
/// not; not held where the impact has grown, nor for a guest of fewer requests under way than this.
const SLOWED: f64 = 0.007;
const LIGHT: f64 = 0.25;
/// Where pauses make up this part of the time the share does not grow.
const ENOUGH_PAUSES: f64 = 0.1;
/// How long the job looks before it has no regard to the guest.
const LOOK: Duration = Duration::from_secs(1);
/// With a share above this the job has no regard to the guest.
const ALL: f64 = 0.75;
/// The largest share where none is asked for, and where the guest notices nothing of it: a disk may
/// be far from what a single piece shows of it.
const MOST: f64 = 0.4;
const UNNOTICED: f64 = 8.0;
/// How long the guest's pauses are remembered, in seconds.
const MEMORY: f64 = 60.0;
/// A share saves up for this many pieces, and owes for no longer than this, in seconds.
const SAVED: f64 = 2.0;
const OWED: f64 = 1.0;
/// A deadline is aimed at with this part of the time that is left.
const AIM: f64 = 0.9;
/// The guest's bandwidth is measured over this, in seconds.
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
    /// The guest's last activity that was seen.
    activity: Duration,
    /// The part of the time in which the guest was quiet: remembered from a start of a half, and as
    /// it was.
    pauses: f64,
    seen_pauses: f64,
    /// The bytes that the job may copy beside the guest; what it owes if below 0.
    credit: f64,
    /// The most that the guest moved in a second, and the measure under way.
    guest_peak: f64,
    guest_from: Option<(Duration, u64)>,
    /// How long a piece takes beside the guest, in seconds; 0: not known.
    took: f64,
    /// The piece beside the guest that `next` wished for.
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
        // As few pieces at once as make the rate, and small ones.
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

    /// The step that was wished for is taken.
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

    /// Takes in what happened since the last call.
    fn observe(&mut self, now: Duration, guest: &GuestCounts, work: &Work) {
        let passed = now.saturating_sub(self.at).as_secs_f64();
        let back = guest.in_flight > 0 || guest.last_activity > self.activity;
        let quiet = if guest.in_flight > 0 {
            0.0
        } else {
            // Without the time to be sure of it, which is not used.
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
            // The guest waits for what is under way, but for the piece that its share has anyway.
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

    /// What the disk can copy, in bytes per second: as learned, or half of what the guest moved,
    /// since a copy is a read and a write.
    fn speed(&self) -> f64 {
        self.capacity.speed().unwrap_or(1.0).max(self.guest_peak / 2.0)
    }

    /// The disk's time that a byte costs beside the guest, in seconds: small pieces cost what each
    /// piece costs, too.
    fn cost(&self) -> f64 {
        // A piece that was never alone waited behind the guest, when it read and when it wrote.
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

    /// Whether such a rate is so high that the guest is not regarded, once the disk is known a
    /// little.
    fn has_no_regard(&self, now: Duration, rate: f64) -> bool {
        let asked = match self.max_impact {
            Some(impact) => impact >= ALL,
            None => self.deadline.is_some(),
        };
        asked && rate >= ALL * self.speed() && now.saturating_sub(self.started) >= LOOK
    }

    /// The piece to copy beside the guest at a rate: larger at a high one only, which someone asked
    /// for.
    fn beside_piece(&self, rate: f64) -> u64 {
        if self.deadline.is_none() && self.max_impact.is_none() {
            return SMALL;
        }
        SMALL * ((rate / self.speed() * 4.0) as u64).clamp(1, 4)
    }
}

/// Seconds since the guest's last request ended; 0 where one is under way.
fn quiet_for(now: Duration, guest: &GuestCounts) -> f64 {
    if guest.in_flight > 0 {
        return 0.0;
    }
    now.saturating_sub(guest.last_activity).as_secs_f64()
}
