//! L2 entries that are newer than those in the file.

use crate::Result;
use isobath_qcow2::{ClusterIndex, HostOffset, L2Entry};
use std::future::Future;

/// The L2 entries of the active layer as its writer knows them, newer than those in the file.
pub trait ActiveEntries {
    /// The entries of `count` clusters from `first` on, all in one L2 table.
    fn entries(
        &self,
        first: ClusterIndex,
        count: u64,
    ) -> impl Future<Output = Result<Vec<L2Entry>>>;

    /// Whether a host cluster holds one of the image's own tables, which no guest data may share.
    fn is_metadata(&self, offset: HostOffset) -> bool;
}
