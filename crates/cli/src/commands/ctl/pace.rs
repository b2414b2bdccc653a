//! How fast a job gets on.

use std::collections::VecDeque;
use std::time::Duration;

/// How far back the pace is measured.
const SPAN: Duration = Duration::from_secs(10);

/// What was seen of a job: when, how far it was, and how much it had copied.
#[derive(Clone, Copy, Debug)]
struct Seen {
    at: Duration,
    done: u64,
    copied: u64,
}

/// The pace of a job over the last looks at it. Times are since any moment.
#[derive(Clone, Debug, Default)]
pub(super) struct Pace {
    looks: VecDeque<Seen>,
}

impl Pace {
    /// Adds a look: `done` counts what was skipped, too, `copied` only what was copied.
    pub(super) fn look(&mut self, at: Duration, done: u64, copied: u64) {
        // A job that started over.
        if self.looks.back().is_some_and(|last| last.done > done || last.copied > copied) {
            self.looks.clear();
        }
        self.looks.push_back(Seen { at, done, copied });
        // One look from before the span stays, so that the span is covered.
        while self.looks.get(1).is_some_and(|second| second.at + SPAN <= at) {
            self.looks.pop_front();
        }
    }

    fn ends(&self) -> Option<(Seen, Seen, f64)> {
        let (first, last) = (*self.looks.front()?, *self.looks.back()?);
        let seconds = last.at.saturating_sub(first.at).as_secs_f64();
        (seconds > 0.0).then_some((first, last, seconds))
    }

    /// Bytes copied per second; `None` before the second look.
    pub(super) fn rate(&self) -> Option<u64> {
        let (first, last, seconds) = self.ends()?;
        Some(((last.copied - first.copied) as f64 / seconds) as u64)
    }

    /// The time until `total` is done at this pace; `None` if it does not get on, or is not known yet.
    pub(super) fn left(&self, total: u64) -> Option<Duration> {
        let (first, last, seconds) = self.ends()?;
        let done = last.done - first.done;
        if done == 0 {
            return None;
        }
        let left = total.saturating_sub(last.done) as f64 * seconds / done as f64;
        Duration::try_from_secs_f64(left).ok()
    }
}

/// A time left, as `40s`, `3m`, `5h` or `2d`.
pub(super) fn short(left: Option<Duration>) -> String {
    let Some(left) = left else { return "-".into() };
    let seconds = left.as_secs();
    match seconds {
        0..120 => format!("{seconds}s"),
        120..7200 => format!("{}m", seconds / 60),
        7200..172_800 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

/// A bar of ten characters, filled as far as the share says.
pub(super) fn bar(share: f64) -> String {
    let filled = (share.clamp(0.0, 1.0) * 10.0) as usize;
    format!("{}{}", "█".repeat(filled), "░".repeat(10 - filled))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn seconds(count: u64) -> Duration {
        Duration::from_secs(count)
    }

    #[test]
    fn a_pace_is_of_the_last_seconds() {
        let mut pace = Pace::default();
        assert_eq!((pace.rate(), pace.left(MIB)), (None, None));
        pace.look(seconds(0), 0, 0);
        assert_eq!((pace.rate(), pace.left(MIB)), (None, None));
        // Half of what is done was skipped.
        for second in 1..=20 {
            pace.look(seconds(second), second * 2 * MIB, second * MIB);
        }
        assert_eq!(pace.rate(), Some(MIB));
        assert_eq!(pace.left(100 * MIB), Some(seconds(30)));
        // What was faster before does not count any more.
        for second in 21..=40 {
            pace.look(seconds(second), 40 * MIB + second - 20, 20 * MIB + second - 20);
        }
        assert_eq!(pace.rate(), Some(1));
        assert!(pace.looks.len() < 13);
    }

    #[test]
    fn a_job_that_stands_still_or_starts_over_has_no_time_left() {
        let mut pace = Pace::default();
        pace.look(seconds(0), 10, 10);
        pace.look(seconds(1), 10, 10);
        assert_eq!((pace.rate(), pace.left(20)), (Some(0), None));
        pace.look(seconds(2), 5, 0);
        assert_eq!((pace.rate(), pace.left(20)), (None, None));
        pace.look(seconds(3), 30, 0);
        assert_eq!(pace.left(20), Some(seconds(0)));
    }

    #[test]
    fn times_and_bars_are_short() {
        let shown = |count| short(Some(seconds(count)));
        assert_eq!([0, 119, 120, 7200, 172_800].map(shown), ["0s", "119s", "2m", "2h", "2d"]);
        assert_eq!(short(None), "-");
        assert_eq!((bar(0.0), bar(0.55)), ("░░░░░░░░░░".into(), "█████░░░░░".into()));
        assert_eq!((bar(1.0), bar(f64::NAN)), ("██████████".into(), "░░░░░░░░░░".into()));
    }
}
