//! Messages that a guest can cause at will, at a bearable rate.

use std::time::{Duration, Instant};

/// The least time between two messages.
const PAUSE: Duration = Duration::from_secs(1);

/// Lets a message through now and then.
#[derive(Default)]
pub(crate) struct Throttle {
    last: Option<Instant>,
    hidden: u64,
}

impl Throttle {
    /// Whether a message is due: if so, the number of those held back since the last one.
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
