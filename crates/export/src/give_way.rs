//! A turn for others.

use std::future::poll_fn;
use std::task::Poll;

/// Lets the thread's other tasks, and what the kernel has completed, have a turn.
pub(crate) async fn give_way() {
    let mut first = true;
    poll_fn(|cx| {
        if std::mem::take(&mut first) {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        Poll::Ready(())
    })
    .await;
}
