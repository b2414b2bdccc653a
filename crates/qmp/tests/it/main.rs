//! QMP as QEMU speaks it, in one program.

#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

mod as_qemu_does;
mod common;
mod introspection;
mod live;
mod protocol;
mod stop_that_waits;
mod throttle;
