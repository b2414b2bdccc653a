//! The direct-access index of a chain: one lookup instead of a walk over its layers.
//!
//! An overlay may contain an index of the layers below it ([`isobath_qcow2::index`]). It is used only after checking
//! that every layer that it describes is unchanged since the index was written (`load.rs`); each of its blocks is
//! checked against its hash when it is read. A mismatch is logged once, and the chain is then read through its layers'
//! own tables.
//!
//! `build.rs` builds an index, for a new overlay from the one below it, or for a whole chain from scratch. `whole.rs`
//! is about an index of all layers in a file of its own, which a host keeps beside layers that nobody changes.

mod build;
mod load;
mod scan;
mod status;
mod whole;

pub use build::{Built, Folding, IndexLimits, NoIndex, Place, build, page};
pub use load::{Ahead, Examined, examine, examine_heads, find, find_again};
pub use status::{IndexInfo, IndexState};
pub use whole::{WholeIndex, build_whole, find_whole, kept_beside};
