//! The tour.

#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

use isobath_disk_test::tour;
use isobath_ring::{Config, Executor};
use isobath_storage::memory::MemoryHost;
use isobath_storage_test::any::ToAny;

#[test]
fn the_engine_does_everything_once() {
    let executor = Executor::new(&Config::default()).unwrap();
    executor.block_on(tour(MemoryHost::new().any())).unwrap();
}
