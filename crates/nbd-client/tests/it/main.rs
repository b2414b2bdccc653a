//! The client against real servers, and against one that lies.

#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

mod hostile;
mod servers;
mod shared;
