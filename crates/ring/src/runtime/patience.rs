//! How much of its time a thread spends in calls that may have to wait.

use std::cell::Cell;
use std::time::{Duration, Instant};

/// What a call of some pages may take that had nothing to wait for.
const BRIEF: Duration = Duration::from_millis(1);
/// A thread spends about one part in so many of its time in calls that took longer.
const RATIO: u32 = 100;

/// When an executor's thread may make such calls again.
#[derive(Debug, Default)]
pub(super) struct Patience {
    until: Cell<Option<Instant>>,
}

impl Patience {
    pub(super) fn has_any(&self, now: impl FnOnce() -> Instant) -> bool {
        let Some(until) = self.until.get() else { return true };
        if now() < until {
            return false;
        }
        self.until.set(None);
        true
    }

    /// A call has taken this long, until now.
    pub(super) fn spend(&self, took: Duration, now: impl FnOnce() -> Instant) {
        if took > BRIEF {
            self.until.set(now().checked_add(took.saturating_mul(RATIO)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_a_long_call_none_is_made_for_a_hundred_times_as_long() {
        let (patience, now) = (Patience::default(), Instant::now());
        patience.spend(BRIEF, || now);
        assert!(patience.has_any(|| now));
        let long = Duration::from_millis(200);
        patience.spend(long, || now);
        assert!(!patience.has_any(|| now));
        assert!(!patience.has_any(|| now + long * (RATIO - 1)));
        assert!(patience.has_any(|| now + long * RATIO));
        assert!(patience.has_any(|| now), "it is asked for the time no more");
    }
}
