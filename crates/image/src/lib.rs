//! One qcow2 image in use.
//!
//! A [`Layer`](layer::Layer) is an open image; a [`Writer`](writer::Writer) changes one: guest data [in
//! place](guest_io), or in [new places](placement). Below them are the image's tables, the allocation of its clusters,
//! and [what makes changes durable](durability): the log and its commit. Opening an image repairs it after a crash, and
//! [`check`](offline::check) finds and repairs inconsistencies.
//!
//! This crate knows nothing of chains. It is a part of `isobath`, and its interface is not stable.

// A `Geometry` is passed by reference everywhere, as in the format's own functions.
#![allow(clippy::trivially_copy_pass_by_ref)]
#![allow(clippy::missing_errors_doc, reason = "errors are those of the storage and of the format")]

mod alloc;
pub mod amend;
mod bitmap_bits;
pub mod bitmaps;
#[cfg(test)]
mod broken;
mod change;
pub mod check;
mod checksummed;
mod description;
pub mod durability;
pub mod encryption;
pub mod entries;
pub mod error;
pub mod guest_io;
pub mod ids;
pub mod index_area;
pub mod keys;
pub mod l1_table;
pub mod layer;
pub mod lock_order;
mod lsn;
pub mod luks;
pub mod memory;
pub mod name;
pub mod offline;
pub mod open;
pub mod options;
mod out_of_memory;
pub mod per_thread;
mod pieces;
pub mod placement;
pub mod probe;
pub mod range_lock;
pub mod reader_epoch;
pub mod readers;
mod recovery;
pub mod references;
mod replayed;
mod restart_log;
pub mod sabotage;
pub mod snapshot_table;
pub mod snapshots;
mod tables;
pub mod writer;

pub(crate) use error::MOST_CHECKED;
pub use error::{DiskError, Result, always, invariant, violated};
