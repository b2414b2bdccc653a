//! What commits work on.

use super::data_journal::DataJournal;
use super::upkeep::Upkeep;
use super::zones::Zones;
use crate::Result;
use crate::alloc::Allocator;
use crate::entries::ActiveEntries;
use crate::layer::Qcow2Layer;
use crate::lsn::LogSequence;
use crate::pieces::JournaledWrite;
use crate::readers::Readers;
use crate::restart_log::{ClosedLog, LogDropped, RestartLog, drop_closed};
use crate::tables::Tables;
use futures_util::future::try_join_all;
use isobath_qcow2::{ClusterIndex, HostCluster, HostOffset, L2Entry};
use isobath_storage::{IoBuf, Storage};
use std::ops::Range;
use std::sync::Arc;

/// What a commit works on.
pub struct Metadata<S> {
    /// The image.
    pub layer: Qcow2Layer<S>,
    /// Its L1 and L2 tables.
    pub(crate) tables: Tables<S>,
    /// Its refcounts.
    pub(crate) alloc: Allocator<S>,
    /// Guest data that records have checksums of.
    pub(crate) data_journal: DataJournal,
    /// Work done ahead of need.
    pub(crate) upkeep: Upkeep,
    /// The zones, in which mappings are embedded in data.
    pub(crate) zones: Zones,
    /// The log sequence numbers.
    pub(crate) sequence: LogSequence,
    /// Where completed writes are logged until they are durable.
    pub(crate) log: Option<Arc<RestartLog>>,
}

impl<S: Storage> Metadata<S> {
    /// What commits of this image work on.
    pub fn new(
        tables: Tables<S>,
        alloc: Allocator<S>,
        zones: Zones,
        log: Option<Arc<RestartLog>>,
        layer: Qcow2Layer<S>,
    ) -> Self {
        Self {
            layer,
            tables,
            alloc,
            data_journal: DataJournal::new(log.clone()),
            upkeep: Upkeep::default(),
            zones,
            sequence: LogSequence::default(),
            log,
        }
    }

    /// Makes everything written so far durable: the image's file, and the data file if there is one.
    pub(crate) async fn sync(&self) -> Result<()> {
        if self.has_data_apart() {
            self.layer.data().flush().await?;
        }
        self.layer.storage().flush().await?;
        Ok(())
    }

    pub(crate) fn has_data_apart(&self) -> bool {
        !Arc::ptr_eq(self.layer.storage(), self.layer.data())
    }

    /// What the commit in progress closed is durable.
    pub(super) fn log_durable(&self, closed: Option<ClosedLog>) -> LogDropped {
        drop_closed(self.log.as_deref(), closed)
    }

    pub(crate) fn cluster_size(&self) -> u64 {
        self.tables.geometry().cluster_size()
    }

    /// Waits until nobody reads clusters that a commit has freed, and forgets what was known of their contents: then
    /// these may change.
    pub(super) async fn forget_unreferenced(
        &self,
        freed: &[HostCluster],
        readers: &Readers,
        _dropped: LogDropped,
    ) {
        readers.drain().await;
        self.data_journal.forget(freed, self.cluster_size());
        self.zones.forget(freed);
    }

    /// Refuses a place for guest data that has become one of a table or of the journal. Writes ask before, so that they
    /// destroy nothing, and again after, so that one beside which it became such is found out.
    pub fn check_place(&self, place: &Range<u64>) -> Result<()> {
        if self.has_data_apart() || place.is_empty() {
            return Ok(());
        }
        let cluster = |at| self.tables.geometry().host_cluster_of(HostOffset::new(at));
        let end = HostCluster::new(cluster(place.end - 1).get() + 1);
        self.alloc.check_not_marked(cluster(place.start)..end)
    }

    /// Writes pieces of data in place.
    pub(crate) async fn place(&self, pieces: &[JournaledWrite]) -> Result<()> {
        let data = self.layer.data();
        for piece in pieces {
            self.check_place(&(piece.at..piece.at + piece.bytes.len() as u64))?;
        }
        let writes =
            pieces.iter().map(|piece| data.write_at(piece.at, IoBuf::copy_of(&piece.bytes)));
        try_join_all(writes).await?;
        Ok(())
    }

    /// Reads bytes as they are stored; journaled data is newer than the data in place.
    pub(crate) async fn read_stored(&self, at: u64, buf: IoBuf) -> Result<IoBuf> {
        let writes = self.data_journal.journaled_in(&(at..at + buf.len() as u64));
        let mut buf = self.layer.data().read_at(at, buf).await?;
        for piece in writes {
            let from = (piece.at - at) as usize;
            buf[from..from + piece.bytes.len()].copy_from_slice(&piece.bytes);
        }
        Ok(buf)
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
