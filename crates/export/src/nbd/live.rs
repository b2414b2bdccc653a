//! How many connections there are.

use parking_lot::Mutex;
use std::future::{Future, poll_fn};
use std::sync::Arc;
use std::task::{Poll, Waker};

/// Counts the connections of a server, on whatever threads they are.
#[derive(Default)]
pub(crate) struct Live {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    count: usize,
    waiting: Vec<Waker>,
}

/// One connection. It is counted until this is dropped.
pub(crate) struct Guard(Arc<Live>);

impl Live {
    /// Counts one more, unless `limit` is reached.
    pub(crate) fn enter(self: &Arc<Self>, limit: usize) -> Option<Guard> {
        let mut state = self.state.lock();
        if state.count >= limit {
            return None;
        }
        state.count += 1;
        Some(Guard(self.clone()))
    }

    pub(crate) fn count(&self) -> usize {
        self.state.lock().count
    }

    /// Waits until there is none.
    pub(crate) fn empty(&self) -> impl Future<Output = ()> {
        poll_fn(|cx| {
            let mut state = self.state.lock();
            if state.count == 0 {
                return Poll::Ready(());
            }
            if !state.waiting.iter().any(|waker| waker.will_wake(cx.waker())) {
                state.waiting.push(cx.waker().clone());
            }
            Poll::Pending
        })
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let waiting = {
            let mut state = self.0.state.lock();
            state.count -= 1;
            if state.count > 0 {
                return;
            }
            std::mem::take(&mut state.waiting)
        };
        waiting.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;
    use std::task::Context;

    #[test]
    fn the_limit_holds_and_the_last_one_out_is_noticed() {
        let live = Arc::new(Live::default());
        let (first, second) = (live.enter(2), live.enter(2));
        assert!(live.enter(2).is_none());
        let mut empty = pin!(live.empty());
        let mut cx = Context::from_waker(Waker::noop());
        assert!(empty.as_mut().poll(&mut cx).is_pending());
        drop((first, second));
        assert_eq!(live.count(), 0);
        assert!(empty.as_mut().poll(&mut cx).is_ready());
    }
}
