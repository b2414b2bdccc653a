//! The adaptive mode: without a threshold to set, and with no time in which it only looks on.
//!
//! - **Pauses of the guest are filled.** A few milliseconds after its last request the job starts
//!   with one small piece. What it has under way never takes longer to drain than a sixteenth of the
//!   time that the guest has been quiet, and 15 ms at most; so a guest that comes back at any time
//!   loses a few percent of its pause, and a long pause sees the disk's full speed. When the guest
//!   comes back nothing more is started.
//! - **Beside a busy guest** the job has a share of the disk's time, a few percent, that it spends on
//!   small pieces, evenly spaced. The share grows where the guest leaves no pauses, so that the job
//!   ends, and where a deadline needs it.

use super::capacity::{Capacity, SMALL};
use super::{Forecast, GuestCounts, Wish, Work};
use std::time::Duration;

/// The guest is quiet after this many times what a small piece takes, within these bounds.
const QUIET_PIECES: f64 = 4.0;
const QUIET: (f64, f64) = (0.0025, 0.05);
/// The part of the time that the guest has been quiet in which what is under way must drain.
const QUIET_PART: f64 = 1.0 / 16.0;

/// The share of the disk's time beside a busy guest, and the one it grows to without pauses.
const SHARE: f64 = 0.025;
const GROWN: f64 = 0.08;
/// Where pauses make up this part of the time the share does not grow.
const ENOUGH_PAUSES: f64 = 0.1;
/// With a share above this the job fills the disk.
const ALL: f64 = 0.5;
/// How long the guest's pauses are remembered, in seconds.
const MEMORY: f64 = 60.0;
/// A share saves up for this long, in seconds, and owes for no longer than that.
const SAVED: f64 = 0.1;
const OWED: f64 = 1.0;
/// A deadline is aimed at with this part of the time that is left.
const AIM: f64 = 0.95;
/// The guest's bandwidth is measured over this, in seconds.
const BANDWIDTH: f64 = 0.1;

#[derive(Debug)]
pub(super) struct Adaptive {
    capacity: Capacity,
    started: Duration,
    deadline: Option<Duration>,
    max_share: Option<f64>,
    /// The last call, and whether the guest was quiet then.
    at: Duration,
    filling: bool,
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
    /// What `next` answered last: the disk's time that the piece costs if it is started.
    cost: f64,
}

impl Adaptive {
    pub(super) fn new(deadline: Option<Duration>, max_impact: Option<f64>, now: Duration) -> Self {
        Self {
            capacity: Capacity::default(),
            started: now,
            deadline: deadline.map(|within| now.saturating_add(within)),
            max_share: max_impact.map(|percent| (percent / 100.0).clamp(0.001, 1.0)),
            at: now,
            filling: false,
            activity: Duration::ZERO,
            pauses: 0.5,
            seen_pauses: 0.0,
            credit: 0.0,
            guest_peak: 0.0,
            guest_from: None,
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
        if speed > 0 {
            self.capacity.interrupt();
        }
        let share = self.share(now, work);
        if quiet >= self.grace() || share >= ALL {
            let drain = if share >= ALL { f64::INFINITY } else { quiet * QUIET_PART };
            self.filling = true;
            return match self.capacity.piece(drain, work.in_flight, work.pieces) {
                Some(bytes) => Wish::Copy(bytes),
                None => Wish::Drain(now + Duration::from_millis(5)),
            };
        }
        self.filling = false;
        // A larger share needs larger pieces, and more of them at once.
        let piece = SMALL * ((share * 16.0) as u64).clamp(1, 8);
        let most = 1 + (share * 20.0) as u32;
        // The first piece shows what a piece costs.
        let known = self.capacity.speed().is_some() || work.pieces > 0;
        let cost = if known { piece as f64 / self.speed() } else { 0.0 };
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
        self.cost = 0.0;
    }

    pub(super) fn copied(&mut self, now: Duration, bytes: u64, took: Duration) {
        let alone = self.filling && now.saturating_sub(self.activity) >= took;
        self.capacity.copied(now, bytes, took, alone);
    }

    pub(super) fn forecast(&self, now: Duration, work: &Work, speed: u64) -> Option<Forecast> {
        self.capacity.speed()?;
        let share = self.share(now, work);
        let beside = if share >= ALL { 1.0 } else { share };
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
        let share = self.share(now, work).min(ALL);
        // At least what a piece costs can be saved up.
        let most = (share * SAVED).max(8.0 * SMALL as f64 / self.speed());
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
        let grown = (1.0 - self.pauses / ENOUGH_PAUSES).clamp(0.0, 1.0);
        let usual = self.max_share.unwrap_or(SHARE + (GROWN - SHARE) * grown);
        let Some(deadline) = self.deadline else { return usual };
        let left = deadline.saturating_sub(now).as_secs_f64() * AIM;
        let needed = if left > 0.0 { work.remaining as f64 / left / self.speed() } else { 1.0 };
        let busy = (1.0 - self.seen_pauses).max(0.01);
        let share = ((needed - self.seen_pauses) / busy).clamp(usual, 1.0);
        share.min(self.max_share.unwrap_or(1.0))
    }
}

/// Seconds since the guest's last request ended; 0 where one is under way.
fn quiet_for(now: Duration, guest: &GuestCounts) -> f64 {
    if guest.in_flight > 0 {
        return 0.0;
    }
    now.saturating_sub(guest.last_activity).as_secs_f64()
}
