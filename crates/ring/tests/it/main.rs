//! The tests of the executor, in one program.

#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

mod ring;
mod threads;
