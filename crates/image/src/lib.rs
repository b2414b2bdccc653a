//! One qcow2 image in use.
//!
//! A [`Layer`](layer::Layer) is an open image; a [`Writer`](writer::Writer) changes one. Below them are the image's
//! [tables], the [allocation](alloc) of its clusters, and [what makes changes durable](durability): the log and its
//! commit. [`recover`](recovery::recover) repairs an image after a crash, and [`check`](offline::check) finds and
//! repairs inconsistencies.
//!
//! This crate knows nothing of chains. It is a part of `isobath`, and its interface is not stable.

// A `Geometry` is passed by reference everywhere, as in the format's own functions.
#![allow(clippy::trivially_copy_pass_by_ref)]
#![allow(clippy::missing_errors_doc, reason = "errors are those of the storage and of the format")]

pub mod alloc;
pub mod amend;
mod bitmap_bits;
pub mod bitmaps;
#[cfg(test)]
mod broken;
mod change;
pub mod check;
pub mod checksummed;
pub mod durability;
pub mod encryption;
pub mod entries;
pub mod error;
pub mod ids;
pub mod index_area;
pub mod keys;
pub mod layer;
pub mod lsn;
pub mod name;
pub mod offline;
pub mod open;
pub mod options;
pub mod per_thread;
pub mod pieces;
pub mod probe;
pub mod range_lock;
pub mod reader_epoch;
pub mod readers;
pub mod recovery;
pub mod references;
pub mod replayed;
pub mod restart_log;
pub mod sabotage;
pub mod snapshot_table;
pub mod snapshots;
pub mod tables;
pub mod writer;

pub(crate) use error::MOST_CHECKED;
pub use error::{DiskError, Result, always, invariant, violated};
