//! How changes of metadata reach the file.

mod group;
mod ordered;

pub(crate) use group::GroupCommit;
pub(crate) use ordered::Ordered;

use crate::Result;
use crate::alloc::Allocator;
use crate::chain::Layer;
use crate::map::resolve::ActiveEntries;
use crate::read::Readers;
use crate::tables::Tables;
use isobath_qcow2::{ClusterIndex, HostOffset, L2Entry};
use isobath_storage::Storage;
use std::future::Future;
use std::sync::Arc;

/// A way to make recorded changes durable (`--metadata`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MetadataMode {
    /// Writes in an order that leaves a consistent image after a crash at any point; lost space at
    /// worst.
    #[default]
    Ordered,
}

impl MetadataMode {
    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ordered => "ordered",
        }
    }

    /// The mode of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        (name == "ordered").then_some(Self::Ordered)
    }
}

/// What a commit works on.
pub(crate) struct Metadata<S> {
    pub(crate) layer: Arc<Layer<S>>,
    pub(crate) tables: Tables<S>,
    pub(crate) alloc: Allocator<S>,
}

impl<S: Storage> Metadata<S> {
    /// Makes what was written so far durable: the image's file, and the data file where there is
    /// one.
    async fn sync(&self) -> Result<()> {
        let (storage, data) = (self.layer.storage(), self.layer.data());
        if !Arc::ptr_eq(storage, data) {
            data.flush().await?;
        }
        storage.flush().await?;
        Ok(())
    }
}

impl<S: Storage> ActiveEntries for Metadata<S> {
    async fn entries(&self, first: ClusterIndex, count: u64) -> Result<Vec<L2Entry>> {
        self.tables.entries(first, count).await
    }

    fn is_metadata(&self, offset: HostOffset) -> bool {
        let geometry = self.tables.geometry();
        !geometry.has_data_file() && self.alloc.is_metadata(geometry.host_cluster_of(offset))
    }
}

/// One way to commit; at most one commit runs at a time.
pub(crate) trait Durability {
    /// Makes every change recorded, and all data written, before the call durable. An error leaves
    /// it unknown what is.
    fn commit<S: Storage>(
        &self,
        metadata: &Metadata<S>,
        readers: &Readers,
    ) -> impl Future<Output = Result<()>>;
}
