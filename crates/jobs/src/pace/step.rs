//! What a job asks its pacer, and what the answer is.

use std::time::Duration;

pub(super) const KIB: u64 = 1 << 10;
pub(super) const MIB: u64 = 1 << 20;

/// A wait that some earlier event ends.
pub(super) const FAR: Duration = Duration::from_secs(1);

/// The current state of the job's own work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Bytes not yet copied, including those in flight.
    pub remaining: u64,
    /// Bytes being copied now.
    pub in_flight: u64,
    /// Pieces being copied now.
    pub pieces: u32,
}

/// What the job does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Start a piece, and ask again at once.
    Copy {
        /// The piece's size at most, never 0. The job rounds it to clusters, and copies at least one.
        bytes: u64,
    },
    /// Start nothing, and ask again when a piece completes, or at this time at the latest.
    Wait {
        /// By the job clock.
        until: Duration,
    },
}

/// When a job is expected to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forecast {
    /// By the job clock, if everything continues as now.
    pub end: Duration,
    /// Whether that is later than the deadline.
    pub misses_deadline: bool,
}

/// What a mode wants next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wish {
    /// Start a piece of this many bytes.
    Copy(u64),
    /// Leave the disk to the guest until then.
    Pause(Duration),
    /// Let pieces in flight complete first; ask again then, or at this time.
    Drain(Duration),
}
