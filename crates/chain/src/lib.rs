//! Many layers as one disk, to be read: a backing chain.
//!
//! [`open_chain`](open::open_chain) opens an image and everything below it, by the names in the headers. The
//! [map] tells which layer has what of the disk, at the same cost whatever the depth; the direct-access [index]
//! spares it the walk over the lower layers. [`create`](create::create) makes images, alone or on top of others.
//!
//! It is a part of `isobath`, with no interface of its own that stays as it is.

// A `Geometry` goes by reference everywhere, as in the format's own functions.
#![allow(clippy::trivially_copy_pass_by_ref)]
#![allow(clippy::missing_errors_doc, reason = "errors are those of the storage and of the format")]

pub mod chain;
pub mod chain_index;
pub mod create;
pub mod index;
pub mod info;
pub mod map;
pub mod open;
