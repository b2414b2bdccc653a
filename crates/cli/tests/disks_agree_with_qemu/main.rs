//! `isobath map`, `compare`, `convert`, `resize` and `measure` beside `qemu-img`'s, on random chains
//! that QEMU made.

#![allow(clippy::unwrap_used, reason = "a test fails by a panic")]
#![allow(clippy::useless_vec, reason = "`args!` makes vectors")]

mod chains;
mod compare;
mod convert;
mod map;
mod measure;
#[path = "../programs/mod.rs"]
mod programs;
mod resize;
