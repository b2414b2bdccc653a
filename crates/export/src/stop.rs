//! A request to stop, made once and seen by every session on every thread.

use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};

/// A stop request.
#[derive(Default)]
pub(crate) struct Stop {
    requested: AtomicBool,
    state: Mutex<Waiters>,
}

#[derive(Default)]
struct Waiters {
    next: u64,
    waiting: BTreeMap<u64, Waker>,
}

/// A future that waits for the request; see [`Stop::requested`].
pub(crate) struct Requested<'a> {
    stop: &'a Stop,
    key: Option<u64>,
}

impl Stop {
    /// Makes the request.
    pub(crate) fn request(&self) {
        let waiting = {
            let mut state = self.state.lock();
            self.requested.store(true, Ordering::Release);
            std::mem::take(&mut state.waiting)
        };
        waiting.into_values().for_each(Waker::wake);
    }

    /// Whether the request was made.
    pub(crate) fn is_requested(&self) -> bool {
        self.requested.load(Ordering::Acquire)
    }

    /// Waits for the request.
    pub(crate) fn requested(&self) -> Requested<'_> {
        Requested { stop: self, key: None }
    }
}

impl Future for Requested<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let mut state = self.stop.state.lock();
        if self.stop.is_requested() {
            return Poll::Ready(());
        }
        if let Some(waker) = self.key.and_then(|key| state.waiting.get_mut(&key)) {
            waker.clone_from(cx.waker());
        } else {
            let key = state.next;
            state.next += 1;
            state.waiting.insert(key, cx.waker().clone());
            self.key = Some(key);
        }
        Poll::Pending
    }
}

impl Drop for Requested<'_> {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            self.stop.state.lock().waiting.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::pin;

    #[test]
    fn everybody_hears_and_nobody_is_remembered() {
        let stop = Stop::default();
        let mut cx = Context::from_waker(Waker::noop());
        let mut waiting = pin!(stop.requested());
        {
            let mut leaving = pin!(stop.requested());
            assert!(leaving.as_mut().poll(&mut cx).is_pending());
            assert!(waiting.as_mut().poll(&mut cx).is_pending());
            assert_eq!(stop.state.lock().waiting.len(), 2);
        }
        assert_eq!(stop.state.lock().waiting.len(), 1);
        stop.request();
        assert!(waiting.as_mut().poll(&mut cx).is_ready() && stop.is_requested());
        assert!(stop.state.lock().waiting.is_empty());
    }
}
