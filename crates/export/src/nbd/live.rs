//! Counts connections, and clients of an export.
//!
//! A [`WaitGroup`](isobath_sync::WaitGroup) is not enough: admission depends on the count and on whether the counter is
//! closed, so it must be one step under a lock.

use parking_lot::Mutex;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

/// A counter that any thread may use.
#[derive(Default)]
pub(crate) struct Live {
    state: Mutex<Connections>,
}

#[derive(Default)]
struct Connections {
    count: usize,
    /// Whether any connection or client was ever admitted.
    used: bool,
    /// Whether no more are admitted.
    closed: bool,
    waiting: Vec<Waker>,
}

impl Connections {
    fn wait(&mut self, cx: &Context<'_>) {
        if !self.waiting.iter().any(|waker| waker.will_wake(cx.waker())) {
            self.waiting.push(cx.waker().clone());
        }
    }
}

/// One connection or client, counted until this is dropped.
pub(crate) struct Guard(Arc<Live>);

/// Waits until an export has been removed and its last client has left; then the server no longer holds the disk. May
/// be polled on any thread.
pub struct Gone(Arc<Live>);

impl Future for Gone {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let mut state = self.0.state.lock();
        if state.closed && state.count == 0 {
            return Poll::Ready(());
        }
        state.wait(cx);
        Poll::Pending
    }
}

impl Live {
    /// Counts one more, unless `limit` is reached or the counter is closed.
    pub(crate) fn enter(self: &Arc<Self>, limit: usize) -> Option<Guard> {
        let mut state = self.state.lock();
        if state.closed || state.count >= limit {
            return None;
        }
        state.count += 1;
        state.used = true;
        Some(Guard(self.clone()))
    }

    pub(crate) fn count(&self) -> usize {
        self.state.lock().count
    }

    /// Closes the counter and returns one last guard, counted as well, for the caller to hold while it ends the others.
    /// Fails with the count if it is more than `allowed`.
    pub(crate) fn close(self: &Arc<Self>, allowed: usize) -> Result<Guard, usize> {
        let mut state = self.state.lock();
        if state.count > allowed {
            return Err(state.count);
        }
        state.closed = true;
        state.count += 1;
        Ok(Guard(self.clone()))
    }

    /// Waits until the counter is closed and the count is 0.
    pub(crate) fn gone(self: Arc<Self>) -> Gone {
        Gone(self)
    }

    /// Waits until the count is 0.
    pub(crate) fn empty(&self) -> impl Future<Output = ()> {
        self.until(|state| state.count == 0)
    }

    /// Waits until the count is below `limit`.
    pub(crate) fn below(&self, limit: usize) -> impl Future<Output = ()> {
        self.until(move |state| state.count < limit)
    }

    /// Waits until at least one was admitted and the count is 0.
    pub(crate) fn left(&self) -> impl Future<Output = ()> {
        self.until(|state| state.used && state.count == 0)
    }

    fn until(&self, holds: impl Fn(&Connections) -> bool) -> impl Future<Output = ()> {
        poll_fn(move |cx| {
            let mut state = self.state.lock();
            if holds(&state) {
                return Poll::Ready(());
            }
            state.wait(cx);
            Poll::Pending
        })
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let waiting = {
            let mut state = self.0.state.lock();
            state.count -= 1;
            std::mem::take(&mut state.waiting)
        };
        waiting.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;

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

    #[test]
    fn room_and_the_last_one_out_are_waited_for() {
        let live = Arc::new(Live::default());
        let mut cx = Context::from_waker(Waker::noop());
        let (mut left, mut room) = (pin!(live.left()), pin!(live.below(2)));
        assert!(left.as_mut().poll(&mut cx).is_pending(), "there was none yet");
        let (first, second) = (live.enter(9), live.enter(9));
        assert!(room.as_mut().poll(&mut cx).is_pending());
        drop(first);
        assert!(room.as_mut().poll(&mut cx).is_ready());
        assert!(left.as_mut().poll(&mut cx).is_pending());
        drop(second);
        assert!(left.as_mut().poll(&mut cx).is_ready());
    }

    #[test]
    fn what_is_closed_is_gone_with_its_last() {
        let live = Arc::new(Live::default());
        let mut gone = pin!(live.clone().gone());
        let mut cx = Context::from_waker(Waker::noop());
        let client = live.enter(9);
        assert_eq!(live.close(0).err(), Some(1));
        drop(client);
        assert!(gone.as_mut().poll(&mut cx).is_pending(), "it is open");
        let client = live.enter(9);
        let closing = live.close(usize::MAX);
        assert!(closing.is_ok() && live.enter(9).is_none());
        drop(closing);
        assert!(gone.as_mut().poll(&mut cx).is_pending());
        drop(client);
        assert!(gone.as_mut().poll(&mut cx).is_ready());
    }
}
