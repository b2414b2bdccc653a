//! The adaptive mode: without a threshold to set, and with no time in which it only looks on.
//!
//! - **Pauses of the guest are filled.** A few milliseconds after its last request the job starts
//!   with one small piece. What it has under way never takes longer to drain than a thirty-second part of the
//!   time that the guest has been quiet, and 15 ms at most; so a guest that comes back at any time
//!   loses a few percent of its pause, and a long pause sees the disk's full speed. When the guest
//!   comes back nothing more is started.
//! - **Beside a busy guest** the job has a share of the disk's time, a few percent, that it spends on
//!   small pieces, evenly spaced. The share grows where the guest leaves no pauses, so that the job
//!   ends, and where a deadline needs it.

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
const MOST: f64 = 0.25;
const UNNOTICED: f64 = 2.0;
const UNNOTICED_LOSS: f64 = 0.1;
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
    /// The disk's time that the job may use beside the guest, in seconds; what it owes if below 0.
    credit: f64,
    /// The most that the guest moved in a second, and the measure under way.
    guest_peak: f64,
    guest_from: Option<(Duration, u64)>,
    /// How long a piece takes beside the guest, in seconds; 0: not known.
    took: f64,
    /// What `next` answered last: the disk's time that the piece costs if it is started.
    cost: f64,
}

impl Adaptive {
    pub(super) fn new(deadline: Option<Duration>, max_impact: Option<f64>, now: Duration) -> Self {
        Self {
            capacity: Capacity::new(),
            impact: Impact::new(),
            started: now,
            deadline: deadline.map(|within| now.saturating_add(within)),
            max_impact: max_impact.map(|percent| (percent / 100.0).clamp(0.001, 1.0)),
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
            cost: 0.0,
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
        self.cost = 0.0;
        let quiet = quiet_for(now, guest);
        self.limited = speed > 0;
        let mut share = self.share(now, work);
        let regardless = self.has_no_regard(now, share);
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
        share *= self.impact.factor();
        // As few pieces at once as use the share, and small ones.
        let piece = piece(share);
        let each = (piece as f64 / self.speed()).max(1e-6);
        let most = (share * self.took / each).ceil().clamp(1.0, 16.0) as u32;
        // The first piece shows what a piece costs.
        let known = self.capacity.speed().is_some() || work.pieces > 0;
        let cost = if known { each } else { 0.0 };
        if (self.credit >= cost || !known) && work.pieces < most {
            self.cost = cost;
            return Wish::Copy(piece);
        }
        let slot = if work.pieces < most { (cost - self.credit) / share } else { OWED };
        let pause = (self.grace() - quiet).max(0.0);
        Wish::Pause(now + Duration::from_secs_f64(slot.min(pause)))
    }

    /// The step that was wished for is taken.
    pub(super) fn started(&mut self) {
        self.credit -= self.cost;
        self.impact.used(self.cost);
        self.cost = 0.0;
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
        let share = self.share(now, work);
        let beside = if self.has_no_regard(now, share) { 1.0 } else { share.min(1.0) };
        let mut rate = self.speed() * (self.seen_pauses + (1.0 - self.seen_pauses) * beside);
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
        let share = self.share(now, work).min(UNNOTICED) * self.impact.factor();
        let most = SAVED * piece(share) as f64 / self.speed();
        self.credit = (self.credit + share * (passed - quiet)).min(most);
        if back && self.filling {
            // The guest waits for what is under way, but for the piece that its share has anyway.
            self.capacity.interrupt();
            let waits = work.in_flight.saturating_sub(SMALL) as f64 / self.speed();
            self.credit = (self.credit - waits).max(-share * OWED);
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

    /// The job's share of the disk's time beside a busy guest, from 0 to 1.
    fn share(&self, now: Duration, work: &Work) -> f64 {
        let impact = &self.impact;
        let grown = (1.0 - self.pauses / ENOUGH_PAUSES).clamp(0.0, 1.0);
        let allowed = self.max_impact.unwrap_or(IMPACT + (GROWN - IMPACT) * grown);
        let most = allowed / impact.loss();
        let mut share = if self.max_impact.is_some() {
            most.min(if self.max_impact >= Some(ALL) { 1.0 } else { ALL })
        } else if impact.loss() < UNNOTICED_LOSS && !impact.is_felt() {
            most.min(UNNOTICED)
        } else {
            most.min(MOST)
        };
        if self.max_impact.is_none() && impact.is_felt() && impact.depth() > LIGHT {
            let unfelt = impact.meeting(SLOWED).min(share);
            share = unfelt + (share - unfelt) * grown;
        }
        let Some(deadline) = self.deadline else { return share };
        let left = deadline.saturating_sub(now).as_secs_f64() * AIM;
        let needed = if left > 0.0 { work.remaining as f64 / left / self.speed() } else { 1.0 };
        let busy = (1.0 - self.seen_pauses).max(0.01);
        let needed = ((needed - self.seen_pauses) / busy).min(1.0).max(share);
        if self.max_impact.is_some() { share } else { needed }
    }

    /// Whether such a share is so large that the guest is not regarded, once the disk is known a
    /// little.
    fn has_no_regard(&self, now: Duration, share: f64) -> bool {
        let asked = match self.max_impact {
            Some(impact) => impact >= ALL,
            None => self.deadline.is_some(),
        };
        asked && share >= ALL && now.saturating_sub(self.started) >= LOOK
    }
}

/// The piece to copy beside a guest with a share of the disk: larger for a deadline only.
fn piece(share: f64) -> u64 {
    SMALL * ((share * 4.0) as u64).clamp(1, 4)
}

/// Seconds since the guest's last request ended; 0 where one is under way.
fn quiet_for(now: Duration, guest: &GuestCounts) -> f64 {
    if guest.in_flight > 0 {
        return 0.0;
    }
    now.saturating_sub(guest.last_activity).as_secs_f64()
}
