//! The direct-access index of a chain: one look-up in place of a walk over its layers.
//!
//! An overlay may carry an index of the layers below it ([`isobath_qcow2::index`]). It is used only
//! once every layer that it describes was seen to be as it was when the index was written
//! (`load.rs`); each of its blocks is checked against its hash when it is read. Whatever does not hold
//! is said once in the log, and the chain is then served from its layers' own tables.
//!
//! `build.rs` makes an index, for a new overlay from the one below it or for a whole chain afresh.

mod build;
mod load;
mod scan;
mod status;

pub use build::{Built, Folding, Place, build, page};
pub use load::{Ahead, examine, find, find_again};
pub use status::{IndexInfo, IndexState};
