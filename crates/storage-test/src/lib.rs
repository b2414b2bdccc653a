//! Hosts for tests and measurements.
//!
//! [`any`] is one type for all hosts. The others wrap another [`Host`](isobath_storage::Host): they make operations
//! fail ([`fault`], [`space`]), record changes to files ([`recorder`]), or simulate the speed of a slower disk
//! ([`slow`]). All of these are hooks in one [wrapping host](pass_through). The files of a [`careless`] one break what
//! storage promises. [`conformance`] checks what every host must do.

pub mod any;
pub mod careless;
pub mod conformance;
pub mod fault;
pub mod pass_through;
pub mod recorder;
pub mod slow;
pub mod space;

use std::future::poll_fn;
use std::task::Poll;

/// Yields to other tasks this many times.
pub async fn give_way(mut turns: u64) {
    poll_fn(|context| {
        if turns == 0 {
            return Poll::Ready(());
        }
        turns -= 1;
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
