//! Calls that never wait, and may find nothing.

use std::sync::atomic::{AtomicU32, Ordering};

/// The number of consecutive failures after which attempts become no rarer: one in 64.
const RAREST: u32 = 6;
/// None is ever worth it.
const NEVER: u32 = u32::MAX;

/// Whether it is worth trying a call at once that finds nothing if it would have to wait. After each attempt in vain,
/// the next ones are rarer. Threads may see each other's changes late, since this is only a heuristic.
#[derive(Debug, Default)]
pub struct Attempts {
    /// Consecutive attempts that found nothing.
    failures: AtomicU32,
    /// Calls until the next attempt.
    skip: AtomicU32,
}

impl Attempts {
    /// Whether to try this time.
    pub fn is_due(&self) -> bool {
        let failures = self.failures.load(Ordering::Relaxed);
        if failures == 0 {
            return true;
        }
        let skip = self.skip.load(Ordering::Relaxed);
        if failures == NEVER {
            return false;
        }
        if skip > 0 {
            self.skip.store(skip - 1, Ordering::Relaxed);
        }
        skip == 0
    }

    /// An attempt has found something.
    pub fn succeeded(&self) {
        if self.failures.load(Ordering::Relaxed) > 0 {
            self.failures.store(0, Ordering::Relaxed);
        }
    }

    /// An attempt has found nothing.
    pub fn failed(&self) {
        let failures = self.failures.load(Ordering::Relaxed).saturating_add(1).min(RAREST);
        self.skip.store((1 << failures) - 1, Ordering::Relaxed);
        self.failures.store(failures, Ordering::Relaxed);
    }

    /// No attempt will ever find anything.
    pub fn give_up(&self) {
        self.failures.store(NEVER, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_finds_nothing_tries_ever_less_often() {
        let attempts = Attempts::default();
        let tried = |attempts: &Attempts| {
            (0..1000).filter(|_| attempts.is_due().then(|| attempts.failed()).is_some()).count()
        };
        assert!((15..30).contains(&tried(&attempts)));
        while !attempts.is_due() {}
        attempts.succeeded();
        assert!((0..1000).all(|_| attempts.is_due()));
        attempts.give_up();
        assert_eq!(tried(&attempts), 0);
    }
}
