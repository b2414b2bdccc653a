//! What texts of this repository must hold.

#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]

mod campaigns;
mod decisions;
mod gate;
mod invariants;
mod lines;
mod links;
mod papers;
mod rooms;
