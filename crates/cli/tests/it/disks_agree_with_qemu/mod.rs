//! `isobath map`, `compare`, `convert`, `resize` and `measure` beside `qemu-img`'s, on random chains
//! that QEMU made.

#![allow(clippy::useless_vec, reason = "`args!` makes vectors")]

mod chains;
mod compare;
mod convert;
mod map;
mod measure;
mod resize;
