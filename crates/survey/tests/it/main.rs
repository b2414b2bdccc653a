//! The survey's tests, in one program.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by a panic")]

mod as_qemu_sees_it;
mod chains_are_found;
mod fleet;
mod page_in_a_browser;
mod printed_forms;
