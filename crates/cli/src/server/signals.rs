//! Signals that end the server.

use crate::failure::Failure;
use isobath_ring::{Signals, spawn};
use std::cell::Cell;
use std::future;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Poll, Waker};

/// The signals that end the server.
const SIGNALS: [i32; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];

/// The order to end, which comes by a signal. Signals are received until the process ends: no second one ends it before
/// what clients were told is written has reached the images.
#[derive(Clone)]
pub(crate) struct Order(Rc<State>);

struct State {
    /// A signal has come.
    given: Cell<bool>,
    /// Who waits for one.
    waiting: Cell<Option<Waker>>,
    /// What the end of the server waits for.
    waits_for: Cell<&'static str>,
}

impl Order {
    /// Receives signals from now on.
    ///
    /// # Errors
    /// The signals cannot be caught.
    pub(crate) fn receive() -> Result<Self, Failure> {
        let mut signals = Signals::new(&SIGNALS)
            .map_err(|error| Failure::new(error).context("cannot set up signal handlers"))?;
        let state = Rc::new(State {
            given: Cell::new(false),
            waiting: Cell::new(None),
            waits_for: Cell::new("requests in flight"),
        });
        let order = Self(Rc::clone(&state));
        spawn(async move {
            loop {
                if let Err(error) = signals.recv().await {
                    tracing::error!(%error, "cannot receive signals");
                    // Those that come are not the default ones, either: they would end the process at once.
                    return future::pending().await;
                }
                if state.given.replace(true) {
                    tracing::warn!(
                        "still ending: waiting for {}; another signal makes no difference, except SIGKILL, which \
                         loses writes that were not flushed",
                        state.waits_for.get()
                    );
                } else if let Some(waiting) = state.waiting.take() {
                    waiting.wake();
                }
            }
        });
        Ok(order)
    }

    /// Waits for it. Only one task may.
    pub(crate) async fn given(&self) {
        future::poll_fn(|context| {
            if self.0.given.get() {
                return Poll::Ready(());
            }
            self.0.waiting.set(Some(context.waker().clone()));
            Poll::Pending
        })
        .await;
    }

    /// The server ends, for whatever reason, and waits for this from now on.
    pub(crate) fn ends(&self, waits_for: &'static str) {
        self.0.given.set(true);
        self.0.waits_for.set(waits_for);
    }

    /// The server ends: it only has to close its images.
    pub(crate) fn closes(&self) {
        self.ends("the images to be flushed and closed");
    }

    /// The output of `work`, unless the order comes first.
    pub(crate) async fn unless_given<F: Future>(&self, work: F) -> Option<F::Output> {
        either(work, self.given()).await
    }
}

/// Waits for whichever completes first; returns the output if that is `one`.
pub(crate) async fn either<T>(
    one: impl Future<Output = T>,
    other: impl Future<Output = ()>,
) -> Option<T> {
    let (mut one, mut other) = (pin!(one), pin!(other));
    future::poll_fn(|context| match one.as_mut().poll(context) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => other.as_mut().poll(context).map(|()| None),
    })
    .await
}
