//! Backing chains of qcow2 images for tests and measurements.
//!
//! A [`Chain`] says what the disk is like: its size, how many layers, and what their clusters hold.
//! [`Ownership`] says which layer has which guest clusters: drawn by a [`Distribution`], or taken
//! from a [`trace`]. [`generate`] writes one qcow2 file a layer, each laid out at once by an encoder,
//! several at a time. Nothing is flushed to the disk.
//!
//! The same chain and ownership give the same files, to the byte.

mod chain;
mod data;
mod error;
mod image;
mod output;
mod ownership;
mod shape;
pub mod trace;

pub use chain::generate;
pub use data::{Data, PATTERN_BYTES, pattern};
pub use error::GenerateError;
pub use ownership::{Distribution, Fill, Ownership};
pub use shape::{Chain, Progress};
