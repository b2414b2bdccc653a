//! Backing chains of qcow2 images for tests and measurements.
//!
//! A [`Chain`] describes the disk: its size, the number of layers, and what their clusters contain. [`Ownership`]
//! determines which layer has which guest clusters: drawn from a [`Distribution`], or taken from a [`trace`].
//! [`generate`] writes one qcow2 file per layer, several at a time, each encoded in one pass. Nothing is flushed to the
//! disk.
//!
//! The same chain and ownership give identical files, byte for byte.

mod chain;
mod data;
mod error;
mod image;
mod output;
mod ownership;
mod shape;
pub mod trace;

pub use chain::{Generated, generate, generate_held};
pub use data::{Data, PATTERN_BYTES, pattern};
pub use error::GenerateError;
pub use ownership::{Distribution, Fill, Ownership};
pub use shape::{Chain, Progress};
