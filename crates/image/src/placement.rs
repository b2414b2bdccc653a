//! Guest data in new places.
//!
//! Clusters are taken for it, it is written there, the log learns of it, and then entries refer to it. The types say
//! how far a change has come: a [`Placement`] has clusters, which the next commit releases if it is dropped; once
//! [`Placed`], the data is there, and nothing may return early before its entries are recorded.

use crate::Result;
use crate::alloc::Run;
use crate::checksummed::Checksummed;
use crate::durability::Metadata;
use crate::durability::data_journal::Written;
use crate::durability::zones::{Embedded, Taken};
use crate::tables::Claim;
use isobath_qcow2::embedded::embed;
use isobath_qcow2::{ClusterIndex, HostCluster, HostOffset};
use isobath_storage::Storage;
use std::ops::Range;

pub use crate::alloc::write_zeroes;
pub use crate::tables::References;

/// Clusters taken for new data.
pub struct Placement<'a, S: Storage> {
    metadata: &'a Metadata<S>,
    claim: Claim<'a, S>,
    embedded: Vec<EmbeddedWrite<'a, S>>,
}

impl<S: Storage> Metadata<S> {
    /// A placement with no clusters so far.
    pub fn placement(&self) -> Placement<'_, S> {
        Placement { metadata: self, claim: self.tables.claim(), embedded: Vec::new() }
    }
}

impl<'a, S: Storage> Placement<'a, S> {
    /// Takes between 1 and `want` adjacent free clusters.
    pub async fn allocate(&mut self, want: u64) -> Result<Run> {
        self.metadata.alloc.lengthen().await?;
        let run = self.metadata.alloc.allocate(want).await?;
        self.add_run(&run)?;
        Ok(run)
    }

    /// Takes `count` adjacent clusters past everything ever used.
    pub async fn allocate_adjacent(&mut self, count: u64) -> Result<Run> {
        self.metadata.alloc.lengthen().await?;
        let run = self.metadata.alloc.allocate_adjacent(count).await?;
        self.add_run(&run)?;
        Ok(run)
    }

    fn add_run(&mut self, run: &Run) -> Result<()> {
        self.claim.add_run(run);
        let Metadata { data_journal, layer, .. } = self.metadata;
        if cfg!(debug_assertions) {
            let size = self.metadata.cluster_size();
            data_journal.check_forgotten(run.clusters(), size, layer.name())?;
        }
        Ok(())
    }

    /// Takes `length` bytes for compressed data, which may share clusters with other compressed data.
    pub async fn allocate_packed(&mut self, length: u64) -> Result<HostOffset> {
        self.metadata.alloc.lengthen().await?;
        let host = self.metadata.alloc.allocate_packed(length).await?;
        let geometry = self.metadata.tables.geometry();
        let first = geometry.host_cluster_of(host).get();
        let last = geometry.host_cluster_of(HostOffset::new(host.get() + length - 1)).get();
        (first..=last).for_each(|cluster| self.claim.add(HostCluster::new(cluster)));
        Ok(host)
    }

    /// A cluster of a zone, whose mapping is to be embedded in its data; `None` if there is no zone, or embedding is
    /// not worth it.
    pub fn first_write(&self) -> Option<FirstWrite<'a, S>> {
        let Metadata { zones, sequence, .. } = self.metadata;
        let taken = zones.take(sequence)?;
        Some(FirstWrite { metadata: self.metadata, taken, stays: false })
    }

    /// Takes the cluster of a first write.
    pub async fn take_embedded(&mut self, mut write: EmbeddedWrite<'a, S>) -> Result<()> {
        self.metadata.alloc.take_kept(write.host()).await?;
        write.first.stays = true;
        self.claim.add(write.host());
        self.embedded.push(write);
        Ok(())
    }

    /// The clusters taken, one for each reference.
    pub fn clusters(&self) -> &[HostCluster] {
        self.claim.clusters()
    }

    /// The data has been written.
    pub fn placed(self, written: impl IntoIterator<Item = Written>) -> Placed<'a, S> {
        let data = self.metadata.data_journal.add_checksums(written);
        self.keep(data)
    }

    /// The data has been written to these bytes of the file in a way that the log has no checksums of: its next record
    /// waits until it is durable.
    pub fn placed_unchecked(self, places: Vec<Range<u64>>) -> Placed<'a, S> {
        let data = self.metadata.data_journal.add_unchecked(places);
        self.keep(data)
    }

    fn keep(self, data: Checksummed) -> Placed<'a, S> {
        self.claim.keep();
        for EmbeddedWrite { first, embedded } in &self.embedded {
            self.metadata.zones.written(&first.taken, *embedded);
        }
        Placed { data, _embedded: self.embedded }
    }

    /// For [`Sabotage::EarlyUnclaim`](crate::sabotage::Sabotage::EarlyUnclaim): releases the clusters at once.
    #[doc(hidden)]
    pub async fn release_early(self) -> Result<()> {
        self.metadata.alloc.publish(self.claim.clusters()).await?;
        self.metadata.alloc.release(self.claim.clusters()).await?;
        self.claim.keep();
        Ok(())
    }
}

/// A cluster of a zone that nothing was written to. It goes back to the zone when dropped.
pub struct FirstWrite<'a, S: Storage> {
    metadata: &'a Metadata<S>,
    taken: Taken,
    /// A placement has it.
    stays: bool,
}

impl<'a, S: Storage> FirstWrite<'a, S> {
    /// The cluster.
    pub fn host(&self) -> HostCluster {
        self.taken.host
    }

    /// Whether the file holds zeroes there.
    pub fn is_zeroed(&self) -> bool {
        self.taken.zeroed
    }

    /// Embeds the mapping of a guest cluster in its lead block. `rest` is the CRC-32C of the data behind it, if the
    /// record needs it. `None` if the block has no room for it.
    pub fn embed(
        self,
        cluster: ClusterIndex,
        rest: Option<u32>,
        lead: &mut [u8],
    ) -> Option<EmbeddedWrite<'a, S>> {
        let mapping = self.taken.mapping(cluster, rest);
        let span = embed(lead, &mapping, self.taken.id)?;
        let embedded = Embedded { cluster: cluster.get(), lsn: mapping.lsn, span, rest };
        Some(EmbeddedWrite { first: self, embedded })
    }
}

impl<S: Storage> Drop for FirstWrite<'_, S> {
    fn drop(&mut self) {
        if !self.stays {
            self.metadata.zones.put_back(&self.taken);
        }
    }
}

/// A cluster of a zone, with the mapping that was embedded in its lead block.
pub struct EmbeddedWrite<'a, S: Storage> {
    first: FirstWrite<'a, S>,
    embedded: Embedded,
}

impl<S: Storage> EmbeddedWrite<'_, S> {
    /// The cluster.
    pub fn host(&self) -> HostCluster {
        self.first.host()
    }
}

/// New data in its place, of which the log knows.
#[must_use = "entries are to refer to it"]
pub struct Placed<'a, S: Storage> {
    data: Checksummed,
    /// First writes last until their mappings are recorded.
    _embedded: Vec<EmbeddedWrite<'a, S>>,
}

impl<S: Storage> Placed<'_, S> {
    /// What an entry that refers to the data changes; see [`References::to_data`].
    pub fn references<'r>(
        &'r self,
        taken: &'r [HostCluster],
        released: &'r [HostCluster],
        embedded: bool,
    ) -> References<'r> {
        References::to_data(taken, released, &self.data, embedded)
    }
}
