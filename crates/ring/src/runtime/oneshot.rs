//! A channel for one value from one thread to another.

use isobath_sync::Mutex;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

struct Slot<T> {
    value: Option<T>,
    sender_gone: bool,
    waker: Option<Waker>,
}

pub(super) struct Sender<T>(Arc<Mutex<Slot<T>>>);

pub(super) struct Receiver<T>(Arc<Mutex<Slot<T>>>);

pub(super) fn channel<T>() -> (Sender<T>, Receiver<T>) {
    let state = Slot { value: None, sender_gone: false, waker: None };
    let state = Arc::new(Mutex::new(state));
    (Sender(state.clone()), Receiver(state))
}

impl<T> Sender<T> {
    pub(super) fn send(self, value: T) {
        self.0.lock().value = Some(value);
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.sender_gone = true;
        let waker = state.waker.take();
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<T> Receiver<T> {
    /// The value; `None` if the sender was dropped without one.
    pub(super) fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<T>> {
        let mut state = self.0.lock();
        if state.sender_gone {
            return Poll::Ready(state.value.take());
        }
        state.waker = Some(context.waker().clone());
        Poll::Pending
    }
}
