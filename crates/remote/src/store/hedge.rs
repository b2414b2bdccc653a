//! Reads whose answer begins far later than is usual are asked for a second time, and the first answer counts.
//!
//! A store of many machines answers some requests late: the machine that has them is busy, or a packet was lost. The
//! same request, sent once more, is mostly answered as fast as any other. (Dean and Barroso, "The Tail at Scale",
//! Communications of the ACM 56, 2013, call it a hedged request.)

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Answers of which is remembered how long they took to begin.
const REMEMBERED: usize = 64;

/// Without so many it is not known what is usual.
const LEAST_KNOWN: usize = 16;

/// The percentile of them that is still usual.
const USUAL: usize = 95;

/// Least time after which a request is sent once more.
const SOONEST: Duration = Duration::from_millis(50);

/// For each second request there were so many answers before: a store that is slow as a whole has little more to do.
const ANSWERS: u32 = 20;

/// Second requests that may be sent one after the other.
const MOST: u32 = 8;

/// When a request is sent once more.
#[derive(Default)]
pub(super) struct Hedge {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    took: VecDeque<Duration>,
    /// Answers for which there was no second request yet.
    answers: u32,
}

impl Hedge {
    fn with<T>(&self, work: impl FnOnce(&mut State) -> T) -> T {
        work(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The time after which the answer is late: twice that in which nearly all have begun. `None` if too few are known.
    pub(super) fn late(&self) -> Option<Duration> {
        let mut took: Vec<Duration> = self.with(|state| state.took.iter().copied().collect());
        if took.len() < LEAST_KNOWN {
            return None;
        }
        took.sort_unstable();
        let usual = took.get(took.len() * USUAL / 100)?;
        Some(usual.saturating_mul(2).max(SOONEST))
    }

    /// Whether a second request may be sent; it is counted.
    pub(super) fn may_ask_again(&self) -> bool {
        self.with(|state| {
            let left = state.answers.checked_sub(ANSWERS);
            state.answers = left.unwrap_or(state.answers);
            left.is_some()
        })
    }

    /// Notes that an answer began so long after it was first asked for.
    pub(super) fn began(&self, after: Duration) {
        self.with(|state| {
            if state.took.len() == REMEMBERED {
                state.took.pop_front();
            }
            state.took.push_back(after);
            state.answers = (state.answers + 1).min(ANSWERS * MOST);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(count: u64) -> Duration {
        Duration::from_millis(count)
    }

    fn answered(hedge: &Hedge, took: impl IntoIterator<Item = u64>) {
        took.into_iter().for_each(|took| hedge.began(ms(took)));
    }

    #[test]
    fn late_is_what_takes_twice_as_long_as_nearly_all() {
        let hedge = Hedge::default();
        answered(&hedge, [30; 15]);
        assert_eq!(hedge.late(), None);
        answered(&hedge, [30]);
        assert_eq!(hedge.late(), Some(ms(60)));
        // A few that were late are not what is usual, and many are.
        answered(&hedge, [30; 48]);
        answered(&hedge, [900; 3]);
        assert_eq!(hedge.late(), Some(ms(60)));
        answered(&hedge, [900]);
        assert_eq!(hedge.late(), Some(ms(1800)));
        // What was long ago is forgotten.
        answered(&hedge, [1; 64]);
        assert_eq!(hedge.late(), Some(SOONEST));
    }

    #[test]
    fn of_many_answers_one_was_asked_for_twice() {
        let hedge = Hedge::default();
        assert!(!hedge.may_ask_again());
        answered(&hedge, [1; 19]);
        assert!(!hedge.may_ask_again());
        answered(&hedge, [1]);
        assert!(hedge.may_ask_again());
        assert!(!hedge.may_ask_again());
        answered(&hedge, std::iter::repeat_n(1, 10_000));
        let in_a_row = (0..100).take_while(|_| hedge.may_ask_again()).count();
        assert_eq!(in_a_row, 8);
    }
}
