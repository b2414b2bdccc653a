//! The tests of these hosts, in one program.

#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

mod faults;
mod slow;
