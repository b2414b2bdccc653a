//! Fetching blocks of layers from a store, as they are wanted.
//!
//! Threads of their own wait for the store, so that nobody else does: requests await [flights](flight), which all who
//! want the same block share. Other threads look into the cache, which may wait for a disk, and never for the store.
//! Every block is compared with the layer's table before anybody gets it.

mod fetcher;
mod flight;
mod layer;
mod patience;
mod queue;
mod source;
mod streams;
mod traced;
mod wanted;

pub(crate) use fetcher::{Fetcher, object};
pub(crate) use layer::{Common, RemoteLayer};
pub(crate) use source::Source;
pub(crate) use traced::follow;
pub(crate) use wanted::{Awaited, may_pass};
