//! Chains that are read from their stores, as storage for disks.

mod chain;
mod file;
mod host;
mod pinned;

pub use chain::Chain;
pub use file::RemoteFile;
pub use host::{RemoteHost, is_name};
pub use pinned::Pinned;
