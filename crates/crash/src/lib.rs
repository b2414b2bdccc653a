//! The crash simulator: the engine's own code on simulated storage, on one thread, from a seed.
//!
//! A history of guest requests runs on a disk whose files remember every change, when it was asked
//! for, when it took effect and when it was answered ([`host`], [`record`]). From that record come
//! the states that a crash at any moment can leave ([`state`]), each of which is recovered and
//! judged: by what the guest was promised ([`guest`]), by the engine's check, and now and then by
//! QEMU's ([`recover`]).

#![allow(clippy::large_futures, reason = "they are polled where they are made")]
#![allow(clippy::missing_errors_doc, reason = "an error is what the simulator has found")]

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
pub mod value;
