//! The crash simulator: the engine's own code on simulated storage, on one thread, from a seed.
//!
//! A history of guest requests runs on a disk whose files record every change, with the times when it was submitted,
//! took effect and completed ([`host`], [`record`]). From that record the states are derived that a crash at any moment
//! can leave ([`state`]). Each is recovered and checked: against the guarantees to the guest ([`guest`]), by the
//! engine's check, and sometimes by QEMU's ([`recover`]).

#![allow(clippy::large_futures, reason = "they are polled where they are made")]
#![allow(clippy::missing_errors_doc, reason = "an error is what the simulator has found")]

// Compiled there, the engine is not compiled here again.
use isobath_disk_test as _;

pub mod campaign;
pub mod clock;
pub mod content;
pub mod executor;
pub mod exhaustive;
pub mod files;
pub mod guest;
pub mod history;
pub mod host;
pub mod hostile;
pub mod image;
mod look;
pub mod mode;
pub mod offline;
pub mod outcome;
pub mod plan;
pub mod progress;
pub mod record;
pub mod recover;
pub mod server;
pub mod state;
mod trace;
pub mod value;
