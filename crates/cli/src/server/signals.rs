//! Signals that end the server.

use crate::failure::Failure;
use crate::messages;
use isobath_ring::{Signals, spawn};
use std::future;
use std::pin::pin;
use std::process;
use std::task::Poll;
use std::time::{Duration, Instant};

/// How long a repeated signal counts as the same one.
const REPEATED: Duration = Duration::from_secs(1);
/// The signals that end the server.
const SIGNALS: [i32; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];

/// Receives the signals that end the server.
pub(crate) fn receive() -> Result<Signals, Failure> {
    Signals::new(&SIGNALS)
        .map_err(|error| Failure::new(error).context("cannot set up signal handlers"))
}

/// Ends the process at once when a signal other than `first`, which was just received, arrives.
pub(crate) fn end_at_the_second(mut signals: Signals, first: Option<i32>) {
    let stopped = Instant::now();
    spawn(async move {
        loop {
            let another = wait(&mut signals).await;
            if !is_repeat(first, another, stopped.elapsed()) {
                break;
            }
            tracing::info!("ignoring a repeated signal");
        }
        tracing::warn!("second signal received, exiting immediately");
        messages::settle();
        process::exit(1);
    });
}

/// Waits for a signal; forever if none can be received.
pub(crate) async fn wait(signals: &mut Signals) -> i32 {
    match signals.recv().await {
        Ok(signal) => signal,
        Err(error) => {
            tracing::error!(%error, "cannot receive signals");
            future::pending().await
        }
    }
}

/// Whether a signal this long after the one that stops the server counts as the same one: `timeout` and similar
/// programs signal both the process and its group.
fn is_repeat(first: Option<i32>, another: i32, after: Duration) -> bool {
    first == Some(another) && after < REPEATED
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

/// The output of `work`, unless a signal arrives first.
pub(crate) async fn unless_signalled<F: Future>(
    signals: &mut Signals,
    work: F,
) -> Option<F::Output> {
    let work = pin!(work);
    either(work, async {
        let _ = wait(signals).await;
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_signal_in_a_moment_is_no_second_one() {
        let term = Some(libc::SIGTERM);
        assert!(is_repeat(term, libc::SIGTERM, Duration::ZERO));
        assert!(is_repeat(term, libc::SIGTERM, Duration::from_millis(999)));
        assert!(!is_repeat(term, libc::SIGTERM, Duration::from_secs(1)));
        assert!(!is_repeat(term, libc::SIGINT, Duration::ZERO));
        assert!(!is_repeat(None, libc::SIGTERM, Duration::ZERO));
    }
}
