//! Rate limiting of log messages that a guest can cause at will.

use std::time::{Duration, Instant};

/// The minimum time between two messages.
const PAUSE: Duration = Duration::from_secs(1);

/// Limits the rate of messages.
#[derive(Default)]
pub(crate) struct Throttle {
    last: Option<Instant>,
    hidden: u64,
}

impl Throttle {
    /// If a message is due, the number of messages suppressed since the last one.
    pub(crate) fn pass(&mut self) -> Option<u64> {
        let now = Instant::now();
        if self.last.is_some_and(|last| now.duration_since(last) < PAUSE) {
            self.hidden = self.hidden.saturating_add(1);
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.hidden))
    }
}
