//! Operations that continue after their futures were dropped.
//!
//! The kernel executes every submitted operation. A write whose future was dropped may still reach the file, and must
//! not overwrite a later write, nor happen after a flush that should cover it: so every later operation on the file
//! waits for it.

use isobath_ring::{Leased, unblock};
use isobath_sync::WaitGroup;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

/// The operations of one file whose futures were dropped.
#[derive(Debug, Default)]
pub(super) struct Landing {
    orphans: WaitGroup,
}

impl Landing {
    /// Whether there are any.
    pub(super) fn any(&self) -> bool {
        !self.orphans.is_empty()
    }

    /// Waits for all of them.
    pub(super) async fn ended(&self) {
        self.orphans.ended().await;
    }
}

/// Runs a call that changes a file on a thread where it may block. If its future is dropped, the file's later
/// operations wait for it.
pub(super) async fn unblocked<T: Send + 'static>(
    landing: &Arc<Landing>,
    call: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    let state = Arc::new(AtomicU8::new(RUNNING));
    let waiting = Waiting { landing, state: state.clone() };
    let landing = landing.clone();
    let result = unblock(move || {
        let _ending = Ending { landing, state };
        call()
    });
    let result = result.await;
    drop(waiting);
    result
}

/// The call has not ended, and its future still exists.
const RUNNING: u8 = 0;
/// It has ended.
const ENDED: u8 = 1;
/// Its future was dropped.
const ALONE: u8 = 2;

struct Waiting<'a> {
    landing: &'a Landing,
    state: Arc<AtomicU8>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.state.load(Ordering::SeqCst) == ENDED {
            return;
        }
        self.landing.orphaned();
        if self.state.swap(ALONE, Ordering::SeqCst) == ENDED {
            self.landing.landed();
        }
    }
}

struct Ending {
    landing: Arc<Landing>,
    state: Arc<AtomicU8>,
}

impl Drop for Ending {
    fn drop(&mut self) {
        if self.state.swap(ENDED, Ordering::SeqCst) == ALONE {
            self.landing.landed();
        }
    }
}

impl Leased for Landing {
    fn orphaned(&self) {
        self.orphans.begin();
    }

    fn landed(&self) {
        self.orphans.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Waker};

    #[test]
    fn others_wait_for_what_was_given_up_and_for_nothing_else() {
        let landing = Arc::<Landing>::default();
        let mut context = Context::from_waker(Waker::noop());
        assert!(pin!(landing.ended()).poll(&mut context).is_ready());
        landing.orphaned();
        let mut waiting = pin!(landing.ended());
        assert!(waiting.as_mut().poll(&mut context).is_pending());
        landing.landed();
        assert!(waiting.as_mut().poll(&mut context).is_ready());
    }

    #[test]
    fn a_call_is_waited_for_from_when_it_is_given_up_to_its_end() {
        let landing = Arc::<Landing>::default();
        for given_up_first in [true, false] {
            let state = Arc::new(AtomicU8::new(RUNNING));
            let waiting = Waiting { landing: &landing, state: state.clone() };
            let ending = Ending { landing: landing.clone(), state };
            if given_up_first {
                drop(waiting);
                assert!(landing.any());
                drop(ending);
            } else {
                drop(ending);
                drop(waiting);
            }
            assert!(!landing.any());
        }
    }
}
