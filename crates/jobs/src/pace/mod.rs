//! Pacing: when a block job copies while a guest uses the same disk.
//!
//! A [`Pacer`] is a state machine: it does no I/O and has no clock. The job's loop passes it the time and the guest's
//! activity, and asks for the next [`Step`]. Times are [`Duration`]s since the job clock's epoch, and never go back.

mod adaptive;
mod capacity;
mod impact;
mod limit;
#[cfg(test)]
mod sim;
mod step;
#[cfg(test)]
mod tests;
mod threshold;

use adaptive::Adaptive;
use isobath_disk::live::GuestCounts;
use limit::SpeedLimit;
use std::time::Duration;
use step::{FAR, MIB, Wish};
pub use step::{Forecast, Step, Work};
use threshold::Threshold;

/// The size of pieces of an unpaced job, and how many of them are in flight at once.
const UNPACED: (u64, u32) = (MIB, 4);

/// How a job is throttled for guest I/O.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pacing {
    /// Copies within milliseconds when the guest is idle, and little while it is busy.
    Adaptive {
        /// The job should end within this time of its start. `None`: no deadline.
        deadline: Option<Duration>,
        /// The share of the guest's bandwidth, in percent, that the job may take beside a busy guest; kept even if that
        /// misses a deadline. `None`: up to 2.5, and up to 8 if the guest has no pauses.
        max_impact: Option<f64>,
    },
    /// As in the dissertation on adaptively streaming qcow2 disk images: observes for 15 s, then copies while the
    /// guest's throughput is not above a threshold.
    Threshold {
        /// Up to 1: a share of the mean throughput of the first 15 s. More than 1: bytes per second,
        /// and the job starts at once.
        threshold: f64,
        /// How long the job pauses if the guest's throughput is above the threshold.
        pause_time: Duration,
    },
    /// Copies without throttling.
    None,
}

impl Default for Pacing {
    fn default() -> Self {
        Self::Adaptive { deadline: None, max_impact: None }
    }
}

impl Pacing {
    /// The dissertation's mode with its defaults: a threshold of 0.3, and pauses of 1 s.
    pub const fn threshold() -> Self {
        Self::Threshold { threshold: 0.3, pause_time: Duration::from_secs(1) }
    }
}

/// Decides when a job copies its next piece.
#[derive(Debug)]
pub struct Pacer {
    limit: SpeedLimit,
    mode: Mode,
    paused: bool,
}

#[derive(Debug)]
enum Mode {
    Adaptive(Box<Adaptive>),
    Threshold(Threshold),
    None,
}

impl Pacer {
    /// Starts pacing a job now. `speed` is a limit in bytes per second; 0: none.
    pub fn new(pacing: &Pacing, speed: u64, now: Duration) -> Self {
        let mode = match *pacing {
            Pacing::Adaptive { deadline, max_impact } => {
                Mode::Adaptive(Box::new(Adaptive::new(deadline, max_impact, now)))
            }
            Pacing::Threshold { threshold, pause_time } => {
                Mode::Threshold(Threshold::new(threshold, pause_time, now))
            }
            Pacing::None => Mode::None,
        };
        Self { limit: SpeedLimit::new(speed, now), mode, paused: false }
    }

    /// What to do next. Call this at the start, after starting a piece, when one completes, and at the time given by
    /// [`Step::Wait`]; calling it more often does no harm.
    pub fn next(&mut self, now: Duration, guest: &GuestCounts, work: &Work) -> Step {
        let wish = match &mut self.mode {
            Mode::Adaptive(mode) => mode.next(now, guest, work, self.limit.speed()),
            Mode::Threshold(mode) => mode.next(now, guest, work),
            Mode::None if work.pieces < UNPACED.1 => Wish::Copy(UNPACED.0),
            Mode::None => Wish::Drain(now + FAR),
        };
        self.paused = matches!(wish, Wish::Pause(_)) && work.pieces == 0;
        match wish {
            Wish::Copy(bytes) => match self.limit.room(now, work.in_flight) {
                Ok(room) => {
                    if let Mode::Adaptive(mode) = &mut self.mode {
                        mode.started();
                    }
                    Step::Copy { bytes: bytes.min(room) }
                }
                Err(until) => Step::Wait { until },
            },
            Wish::Pause(until) | Wish::Drain(until) => Step::Wait { until: until.max(now + SOON) },
        }
    }

    /// Reports a copied piece: the bytes that were actually read and written, and how long that took in total. A piece
    /// with zero bytes, because it was cloned instead, neither measures the disk's speed nor counts towards the limit.
    pub fn copied(&mut self, now: Duration, bytes: u64, took: Duration) {
        if bytes == 0 {
            return;
        }
        self.limit.copied(now, bytes);
        match &mut self.mode {
            Mode::Adaptive(mode) => mode.copied(now, bytes, took),
            Mode::Threshold(mode) => mode.copied(),
            Mode::None => {}
        }
    }

    /// Sets the limit in bytes per second; 0: none. The next step follows it.
    pub fn set_speed(&mut self, now: Duration, bytes_per_second: u64) {
        self.limit = SpeedLimit::new(bytes_per_second, now);
    }

    /// Whether the job is being throttled for guest I/O: it waits because of the guest, and has nothing in flight. A
    /// job that waits for its speed limit, or for its own pieces, is running.
    pub fn is_paused(&self) -> bool {
        self.paused
    }

    /// When the job will end at the current rate, and whether that misses its deadline; `None` if that is unknown yet,
    /// and in modes without a deadline.
    pub fn forecast(&self, now: Duration, work: &Work) -> Option<Forecast> {
        match &self.mode {
            Mode::Adaptive(mode) => mode.forecast(now, work, self.limit.speed()),
            Mode::Threshold(_) | Mode::None => None,
        }
    }
}

/// The shortest wait, so that a job never spins.
const SOON: Duration = Duration::from_micros(100);
