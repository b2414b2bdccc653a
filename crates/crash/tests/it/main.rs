//! The simulator's tests, in one program: each of its own would compile the engine again.

#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

mod clock;
mod crashes;
mod it_can_fail;
mod offline;
mod real_files;
mod sabotage;
mod same_seed_same_history;
mod servers;
