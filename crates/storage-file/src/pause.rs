//! Waiting, inside an executor and elsewhere.

use std::time::Duration;

/// Waits: with the ring's timer inside an executor, by blocking the thread elsewhere.
pub(super) async fn pause(duration: Duration) {
    if isobath_ring::is_running() {
        isobath_ring::sleep(duration).await;
    } else {
        std::thread::sleep(duration);
    }
}
