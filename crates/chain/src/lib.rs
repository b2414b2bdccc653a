//! Backing chains: many layers read as one disk.
//!
//! [`open_chain`](open::open_chain) opens an image and everything below it, by the names in the headers. The [map]
//! gives the layer of each part of the disk, at the same cost whatever the depth; with the direct-access [index] it
//! need not walk the lower layers. [`create`](create::create) creates images, with or without a backing file.
//!
//! It is a part of `isobath`; its own interface is not stable.

// A `Geometry` is passed by reference everywhere, as in the format's own functions.
#![allow(clippy::trivially_copy_pass_by_ref)]
#![allow(clippy::missing_errors_doc, reason = "errors are those of the storage and of the format")]

pub mod chain;
pub mod chain_index;
pub mod create;
pub mod fork;
pub mod index;
pub mod info;
pub mod map;
#[cfg(test)]
mod must_panic;
pub mod open;
