//! The dissertation's adaptive streaming, sections 3.3 and 3.4.
//!
//! The guest's throughput is the mean of three windows of 5 s before anything is copied, and the threshold a share of
//! it. After each piece of 512 KiB, the throughput since the last measurement is compared with the threshold, and the
//! job pauses if it is above. After ten minutes of pauses the job streams normally.
//!
//! One choice is our own. The published prototype measures the time since its last measurement, which is a single piece
//! while the job runs: a few milliseconds, in which a burst's queue may complete nothing, or everything. Here a
//! measurement covers at least the last 100 ms. After a pause both cover the pause, and the piece that follows it.

use super::step::{FAR, KIB, Wish, Work};
use isobath_disk::live::GuestCounts;
use std::collections::VecDeque;
use std::time::Duration;

const WINDOW: Duration = Duration::from_secs(5);
const WINDOWS: usize = 3;
const PIECE: u64 = 512 * KIB;
const MOST_PAUSING: Duration = Duration::from_mins(10);
/// The minimum time that a measurement covers, and the interval at which the counts are noted for it.
const LOOK: Duration = Duration::from_millis(100);
const NOTE_EACH: Duration = Duration::from_millis(5);

#[derive(Debug)]
enum Phase {
    /// Before anything is copied: the windows' throughputs so far, and where this one started.
    Sampling { done: [f64; WINDOWS], count: usize, from: Option<(Duration, u64)> },
    /// A piece may start. `look`: whether the throughput is measured first.
    Running { look: bool },
    /// Paused since, until.
    Paused(Duration, Duration),
    /// Copies regardless of the guest.
    Normal,
}

#[derive(Debug)]
pub(super) struct Threshold {
    state: Phase,
    ratio: f64,
    /// Bytes per second, above which the job pauses.
    most: f64,
    pause_time: Duration,
    /// The sum of all pauses.
    paused: Duration,
    /// Times and the guest's bytes up to then: the last measurement, and those within the last [`LOOK`].
    notes: VecDeque<(Duration, u64)>,
    /// The last measurement: nothing before it is measured again, except within the last [`LOOK`].
    last_look: (Duration, u64),
    started: Duration,
}

impl Threshold {
    pub(super) fn new(threshold: f64, pause_time: Duration, now: Duration) -> Self {
        let explicit = threshold > 1.0;
        let state = if explicit {
            Phase::Running { look: false }
        } else {
            Phase::Sampling { done: [0.0; WINDOWS], count: 0, from: None }
        };
        Self {
            state,
            ratio: threshold,
            most: if explicit { threshold } else { 0.0 },
            pause_time,
            paused: Duration::ZERO,
            notes: VecDeque::new(),
            last_look: (now, 0),
            started: now,
        }
    }

    pub(super) fn next(&mut self, now: Duration, guest: &GuestCounts, work: &Work) -> Wish {
        self.note(now, guest.bytes());
        if let Phase::Sampling { done, count, from } = &mut self.state {
            let (start, bytes) = *from.get_or_insert((self.started, guest.bytes()));
            let due = start + WINDOW;
            if now < due {
                return Wish::Pause(due);
            }
            if let Some(window) = done.get_mut(*count) {
                *window = throughput(start, bytes, now, guest.bytes());
            }
            *count += 1;
            *from = Some((now, guest.bytes()));
            if *count < WINDOWS {
                return Wish::Pause(now + WINDOW);
            }
            self.most = self.ratio * done.iter().sum::<f64>() / WINDOWS as f64;
            self.last_look = (now, guest.bytes());
            self.state = Phase::Running { look: false };
        }
        if let Phase::Paused(since, until) = self.state {
            if now < until {
                return Wish::Pause(until);
            }
            self.paused += now.saturating_sub(since);
            self.state = if self.paused > MOST_PAUSING {
                Phase::Normal
            } else {
                Phase::Running { look: false }
            };
        }
        if work.pieces > 0 {
            return Wish::Drain(now + FAR);
        }
        if let Phase::Running { look: true } = self.state {
            let exceeds = self.look(now, guest.bytes()) > self.most;
            self.state = Phase::Running { look: false };
            if exceeds && !self.pause_time.is_zero() {
                let until = now.saturating_add(self.pause_time);
                self.state = Phase::Paused(now, until);
                return Wish::Pause(until);
            }
        }
        Wish::Copy(PIECE)
    }

    /// A piece was copied.
    pub(super) fn copied(&mut self) {
        if let Phase::Running { look } = &mut self.state {
            *look = true;
        }
    }

    fn note(&mut self, now: Duration, bytes: u64) {
        if self.notes.is_empty() {
            self.last_look = (self.last_look.0, bytes);
        }
        if self.notes.back().is_none_or(|&(at, _)| now >= at + NOTE_EACH) {
            self.notes.push_back((now, bytes));
        }
        // The first note is the latest that is at least [`LOOK`] old.
        while self.notes.get(1).is_some_and(|&(at, _)| now >= at + LOOK) {
            self.notes.pop_front();
        }
    }

    /// The guest's throughput since the last measurement, or over the last [`LOOK`] if that is longer.
    fn look(&mut self, now: Duration, bytes: u64) -> f64 {
        let (mut at, mut before) = self.last_look;
        if let Some(&(first, then)) = self.notes.front()
            && first < at
        {
            (at, before) = (first, then);
        }
        self.last_look = (now, bytes);
        throughput(at, before, now, bytes)
    }
}

/// Bytes per second.
fn throughput(from: Duration, before: u64, to: Duration, after: u64) -> f64 {
    let seconds = to.saturating_sub(from).as_secs_f64();
    if seconds > 0.0 { after.saturating_sub(before) as f64 / seconds } else { 0.0 }
}
