//! What several wait for, and one fetches.

use crate::error::Error;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// Locks a mutex, whatever happened to another that held it.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Something that is on its way. Everybody who waits for it gets the same outcome; who stops waiting takes nothing with
/// it.
pub(crate) struct Flight<T> {
    state: Mutex<State<T>>,
}

struct State<T> {
    outcome: Option<T>,
    /// Those who wait, each in a place of its own.
    waiting: Vec<Option<Waker>>,
}

impl<T> Default for Flight<T> {
    fn default() -> Self {
        Self { state: Mutex::new(State { outcome: None, waiting: Vec::new() }) }
    }
}

impl<T: Clone> Flight<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends it, unless it has ended: the first outcome counts. Returns whether this is that.
    pub(crate) fn end(&self, outcome: T) -> bool {
        let waiting = {
            let mut state = self.lock();
            if state.outcome.is_some() {
                return false;
            }
            state.outcome = Some(outcome);
            std::mem::take(&mut state.waiting)
        };
        waiting.into_iter().flatten().for_each(Waker::wake);
        true
    }

    /// The outcome, once there is one.
    pub(crate) fn ended(&self) -> Option<T> {
        self.lock().outcome.clone()
    }

    /// Whether it has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.lock().outcome.is_some()
    }

    /// Waits for the outcome.
    pub(crate) fn outcome(self: &Arc<Self>) -> Outcome<T> {
        Outcome { flight: Arc::clone(self), place: None }
    }
}

/// Ends a flight if the thread that flies it panics; any other end comes before.
pub(super) struct Pilot<'a, T: Clone>(pub(super) &'a Flight<Result<T, Arc<Error>>>);

impl<T: Clone> Drop for Pilot<'_, T> {
    fn drop(&mut self) {
        let crashed = Error::Store("a thread that read from the store has ended early".to_owned());
        self.0.end(Err(Arc::new(crashed)));
    }
}

/// The future of a flight's outcome.
pub(crate) struct Outcome<T: Clone> {
    flight: Arc<Flight<T>>,
    /// Where its waker is.
    place: Option<usize>,
}

impl<T: Clone> Future for Outcome<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let flight = Arc::clone(&self.flight);
        let mut state = flight.lock();
        if let Some(outcome) = &state.outcome {
            return Poll::Ready(outcome.clone());
        }
        let place = self.place.or_else(|| state.waiting.iter().position(Option::is_none));
        if let Some(waker) = place.and_then(|place| state.waiting.get_mut(place)) {
            match waker {
                Some(waker) if waker.will_wake(context.waker()) => {}
                waker => *waker = Some(context.waker().clone()),
            }
            self.place = place;
        } else {
            self.place = Some(state.waiting.len());
            state.waiting.push(Some(context.waker().clone()));
        }
        Poll::Pending
    }
}

impl<T: Clone> Drop for Outcome<T> {
    fn drop(&mut self) {
        let Some(place) = self.place else { return };
        if let Some(waker) = self.flight.lock().waiting.get_mut(place) {
            *waker = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    #[derive(Default)]
    struct Count(AtomicUsize);

    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    fn poll<T: Clone>(outcome: &mut Outcome<T>, count: &Arc<Count>) -> Poll<T> {
        let waker = Waker::from(Arc::clone(count));
        Pin::new(outcome).poll(&mut Context::from_waker(&waker))
    }

    #[test]
    fn all_who_wait_get_the_first_outcome() {
        let flight = Arc::new(Flight::default());
        let counts: [Arc<Count>; 3] = Default::default();
        let mut waiting: Vec<_> = counts.iter().map(|_| flight.outcome()).collect();
        for (outcome, count) in waiting.iter_mut().zip(&counts) {
            assert_eq!(poll(outcome, count), Poll::Pending);
            assert_eq!(poll(outcome, count), Poll::Pending);
        }
        drop(waiting.remove(1));
        assert!(flight.end(7) && !flight.end(8) && flight.has_ended());
        let woken = counts.each_ref().map(|count| count.0.load(Ordering::SeqCst));
        assert_eq!(woken, [1, 0, 1]);
        for outcome in &mut waiting {
            assert_eq!(poll(outcome, &counts[0]), Poll::Ready(7));
        }
        assert_eq!(poll(&mut flight.outcome(), &counts[0]), Poll::Ready(7));
    }

    #[test]
    fn who_stops_waiting_leaves_the_place_to_the_next() {
        let flight = Arc::new(Flight::<()>::default());
        for _ in 0..100 {
            let mut outcome = flight.outcome();
            assert_eq!(poll(&mut outcome, &Arc::default()), Poll::Pending);
        }
        assert_eq!(flight.lock().waiting.len(), 1);
    }
}
