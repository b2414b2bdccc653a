//! The disk's tests, in one program: each of its own would compile the engine again.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by a panic")]

// Compiled there, the engine is not compiled here again.
use isobath_disk_test as _;

mod bitmaps;
mod blocking;
mod check;
mod common;
mod contradictions;
mod damaged;
mod devices;
mod direct_access;
mod discard_hides_the_base;
mod embedded;
mod emptied;
mod encrypted;
mod examples;
mod failed_writes;
mod first_overlay;
mod first_reads;
mod heads;
mod hostile;
mod journal;
mod lengthen;
mod library;
mod live;
mod manifest;
mod merged_layers;
mod mirrors;
mod mixed_hosts;
mod no_space;
mod opposite_qemu;
mod random_requests;
mod resize;
mod resize_crash;
mod restart_log;
mod small_map;
mod snapshots_stay;
mod stop_and_go;
mod stopped;
mod write_back;
mod zeroes_stay;
