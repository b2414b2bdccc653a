//! Reports of requests that failed because of the storage.

use super::counts::Kind;
use crate::pausing::{is_no_space, is_of_storage};
use isobath_image::DiskError;
use parking_lot::Mutex;
use std::sync::OnceLock;
use std::time::Duration;

/// A request that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IoFailure {
    /// Whether it was a read, as opposed to a write or flush.
    pub read: bool,
    /// Whether the host has no space left.
    pub no_space: bool,
    /// The error message.
    pub reason: String,
}

/// Called on failures, on the thread of the request. It must not block.
pub type FailureListener = Box<dyn Fn(IoFailure) + Send + Sync>;

/// At most one failure is reported in this time.
const EVERY: Duration = Duration::from_secs(1);

/// The listener, and the time of its last report.
#[derive(Default)]
pub(super) struct Failures {
    listener: OnceLock<FailureListener>,
    last: Mutex<Option<Duration>>,
}

impl Failures {
    pub(super) fn listen(&self, listener: FailureListener) {
        let _ = self.listener.set(listener);
    }

    pub(super) fn tell(&self, kind: Kind, error: &DiskError, now: Duration) {
        let Some(listener) = self.listener.get() else { return };
        if !is_of_storage(error) {
            return;
        }
        {
            let mut last = self.last.lock();
            if last.is_some_and(|last| now < last + EVERY) {
                return;
            }
            *last = Some(now);
        }
        listener(IoFailure {
            read: kind == Kind::Read,
            no_space: is_no_space(error),
            reason: error.to_string(),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn what_the_storage_failed_is_told_once_a_second() {
        let heard = Arc::new(Mutex::new(Vec::new()));
        let failures = Failures::default();
        let at = Duration::from_secs(5);
        let error = DiskError::Poisoned { reason: "x".into(), flush_failed: false };
        failures.tell(Kind::Read, &error, at);
        let to = Arc::clone(&heard);
        failures.listen(Box::new(move |failure| to.lock().push(failure)));
        failures.tell(Kind::Write, &DiskError::ReadOnly, at);
        for n in 0..3 {
            failures.tell(Kind::Write, &error, at + EVERY / 2 * n);
        }
        let heard = heard.lock();
        assert_eq!(heard.len(), 2);
        assert!(!heard[0].read && heard[0].reason.contains('x'));
    }
}
