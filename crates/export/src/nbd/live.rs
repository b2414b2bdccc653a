//! How many there are of something that comes and goes: connections, clients of an export.
//!
//! A [`WaitGroup`](isobath_sync::WaitGroup) would not do: to come in depends on the count, and on whether it
//! is closed, so all of it is one step under a lock.

use parking_lot::Mutex;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

/// Counts them, on whatever threads they are.
#[derive(Default)]
pub(crate) struct Live {
    state: Mutex<Connections>,
}

#[derive(Default)]
struct Connections {
    count: usize,
    /// Nobody comes any more.
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

/// One of them. It is counted until this is dropped.
pub(crate) struct Guard(Arc<Live>);

/// Waits until an export has been removed and its last client has left; the server then holds the
/// disk no more. May be polled on any thread.
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
    /// Counts one more, unless `limit` is reached or nobody may come any more.
    pub(crate) fn enter(self: &Arc<Self>, limit: usize) -> Option<Guard> {
        let mut state = self.state.lock();
        if state.closed || state.count >= limit {
            return None;
        }
        state.count += 1;
        Some(Guard(self.clone()))
    }

    pub(crate) fn count(&self) -> usize {
        self.state.lock().count
    }

    /// Lets nobody in any more and counts one last, who stands for the others' end; or says how many
    /// there are if they are more than `allowed`.
    pub(crate) fn close(self: &Arc<Self>, allowed: usize) -> Result<Guard, usize> {
        let mut state = self.state.lock();
        if state.count > allowed {
            return Err(state.count);
        }
        state.closed = true;
        state.count += 1;
        Ok(Guard(self.clone()))
    }

    /// Waits until nobody may come any more and the last one has left.
    pub(crate) fn gone(self: Arc<Self>) -> Gone {
        Gone(self)
    }

    /// Waits until there is none.
    pub(crate) fn empty(&self) -> impl Future<Output = ()> {
        poll_fn(|cx| {
            let mut state = self.state.lock();
            if state.count == 0 {
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
