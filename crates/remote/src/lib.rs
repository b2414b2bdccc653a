//! Backing chains in directories and object stores: `push`, `pull`, what keeps such a store in order, and layers that
//! are read from there.
//!
//! A chain is a *manifest*, which lists its layers, and objects named by the SHA-256 of what they hold: each layer's
//! file as it is, a table of checksums of each layer's blocks, and the heads of all layers in one piece. Overwriting an
//! object is harmless, chains share the layers that they have in common, and a manifest appears when everything that it
//! names is there. `docs/format.md` specifies all of it to the byte.
//!
//! Layers are read as [files of a host](served), whose futures block nobody, through a [cache]. Everything else here
//! blocks, and uses threads of its own where several requests are to be in flight. A [`Store`] is where
//! the objects are: a [directory](store::Directory) or, with the feature `buckets`, an object store, whose client runs
//! in a runtime of its own. What is read from a store is hostile until it matches its digest, and what it says is
//! bounded even then.

mod address;
pub mod cache;
mod check;
mod checksums;
mod collect;
mod digest;
mod error;
mod fetch;
mod head;
mod heads;
mod keys;
mod list;
mod local;
mod manifest;
mod progress;
mod pull;
mod push;
mod recorded;
pub mod served;
pub mod store;
mod trace;
mod traces;
mod work;

pub use address::{Address, Place};
pub use check::{Checked, Depth, check};
pub use collect::{Collected, Collection, collect, remove};
pub use digest::{BLOCK, Digest};
pub use error::{Error, Result};
pub use heads::{Head, Heads, IndexHead, MAX_LAYERS};
pub use list::{Listed, list};
pub use manifest::{Format, HeadsObject, IndexObject, Layer, MAX_MANIFEST, Manifest, TraceObject};
pub use progress::Progress;
pub use pull::{Names, Pulled, Target, pull};
pub use push::{Index, LocalLayer, Pushed, Replace, TopIs, check_layers, may_push, push};
pub use store::{Limits, Store, open};
pub use trace::{MAX_TRACE, Recording, Trace};
pub use traces::set_trace;
