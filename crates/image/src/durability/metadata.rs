//! What commits work on, and how guest data is read and written beside them.

use super::data_journal::{
    ChecksumHolder, ChecksummedRange, DataJournal, WriteRoute, Written, checksummed, cut,
};
use super::upkeep::Upkeep;
use super::zones::Zones;
use crate::Result;
use crate::alloc::Allocator;
use crate::encryption::encrypted;
use crate::entries::ActiveEntries;
use crate::layer::Qcow2Layer;
use crate::lsn::LogSequence;
use crate::pieces::JournaledWrite;
use crate::readers::Readers;
use crate::restart_log::RestartLog;
use crate::tables::Tables;
use futures_util::future::try_join_all;
use isobath_qcow2::{ClusterIndex, HostCluster, HostOffset, L2Entry};
use isobath_storage::{IoBuf, Storage};
use std::ops::Range;
use std::sync::Arc;

/// What a write overwrites.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Destination {
    /// Data of its own, which it replaces.
    InUse,
    /// Nothing that anything durable refers to.
    New,
    /// Like `New`, in space that was prepared for growth.
    Prepared,
    /// Like `New`, past the end of the file.
    Beyond,
    /// Nothing that anything refers to except the record embedded in the data, which has a checksum of the rest or
    /// needs none.
    Embedded {
        /// Whether it has a checksum.
        checked: bool,
    },
}

/// A write of at most this many bytes that would make the file grow goes into the next record instead of in place, if
/// that makes the flush cheaper.
const SMALL: usize = 16 << 10;

/// What a commit works on.
pub struct Metadata<S> {
    /// The image.
    pub layer: Qcow2Layer<S>,
    /// Its L1 and L2 tables.
    pub tables: Tables<S>,
    /// Its refcounts.
    pub alloc: Allocator<S>,
    /// Guest data that records have checksums of.
    pub data_journal: DataJournal,
    /// Work done ahead of need.
    pub upkeep: Upkeep,
    /// The zones, in which mappings are embedded in data.
    pub zones: Zones,
    /// The log sequence numbers.
    pub sequence: LogSequence,
    /// Where completed writes are logged until they are durable.
    pub log: Option<Arc<RestartLog>>,
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

    pub(super) fn has_data_apart(&self) -> bool {
        !Arc::ptr_eq(self.layer.storage(), self.layer.data())
    }

    /// The batches that the commit in progress closed are durable.
    pub(super) fn log_durable(&self) {
        if let Some(log) = &self.log {
            log.durable();
        }
    }

    pub(crate) fn cluster_size(&self) -> u64 {
        self.tables.geometry().cluster_size()
    }

    /// Waits until nobody reads clusters that a commit has freed, and forgets what was known of their contents: then
    /// these may change.
    pub(super) async fn forget_unreferenced(&self, freed: &[HostCluster], readers: &Readers) {
        readers.drain().await;
        self.data_journal.forget(freed, self.cluster_size());
        self.zones.forget(freed);
    }

    /// Writes guest data in place, or keeps it for the next record if the place must not change yet. Where the data is
    /// encrypted, it is whole sectors.
    pub async fn write(&self, at: u64, buf: IoBuf) -> Result<IoBuf> {
        let place = at..at + buf.len() as u64;
        let buf = match self.layer.cipher()? {
            Some(cipher) => {
                let stored = encrypted(cipher, self.layer.name(), at, std::slice::from_ref(&buf))?;
                Box::pin(self.write_over(at, stored)).await?;
                buf
            }
            None => self.write_over(at, buf).await?,
        };
        self.check_place(&place)?;
        Ok(buf)
    }

    /// As [`write`](Self::write), for bytes as they are to be stored, except for lead blocks.
    pub(super) async fn write_over(&self, at: u64, buf: IoBuf) -> Result<IoBuf> {
        let range = at..at + buf.len() as u64;
        self.check_place(&range)?;
        if !self.zones.leads_in(&range).is_empty() {
            return Box::pin(self.write_over_leads(at, buf)).await;
        }
        if buf.len() <= SMALL && self.keep(Destination::InUse, at, std::slice::from_ref(&buf)) {
            return Ok(buf);
        }
        match self.data_journal.write(at, std::slice::from_ref(&buf)) {
            WriteRoute::InPlace(_busy) => Ok(self.layer.data().write_at(at, buf).await?),
            WriteRoute::Parts(parts, _busy) => {
                Box::pin(self.write_parts(at, parts, std::slice::from_ref(&buf))).await?;
                Ok(buf)
            }
        }
    }

    /// Like [`write`](Self::write), for bytes as they are to be stored.
    pub(super) async fn write_stored(&self, at: u64, bufs: Vec<IoBuf>) -> Result<Vec<IoBuf>> {
        match self.data_journal.write(at, &bufs) {
            WriteRoute::InPlace(_busy) => Ok(self.layer.data().write_vectored_at(at, bufs).await?),
            WriteRoute::Parts(parts, _busy) => {
                self.write_parts(at, parts, &bufs).await?;
                Ok(bufs)
            }
        }
    }

    /// Writes consecutive buffers, and returns them. The caller passes the other result to
    /// [`DataJournal::add_checksums`]. Where the data is encrypted, they are whole sectors together.
    pub async fn write_to(
        &self,
        destination: Destination,
        at: u64,
        bufs: Vec<IoBuf>,
    ) -> Result<(Vec<IoBuf>, Written)> {
        let (bufs, written) = match self.layer.cipher()? {
            Some(cipher) => {
                let stored = encrypted(cipher, self.layer.name(), at, &bufs)?;
                let (_, written) =
                    Box::pin(self.write_stored_to(destination, at, vec![stored])).await?;
                (bufs, written)
            }
            None => self.write_stored_to(destination, at, bufs).await?,
        };
        self.check_place(&written.place)?;
        Ok((bufs, written))
    }

    /// As [`write_to`](Self::write_to), for bytes as they are to be stored.
    pub(super) async fn write_stored_to(
        &self,
        destination: Destination,
        at: u64,
        bufs: Vec<IoBuf>,
    ) -> Result<(Vec<IoBuf>, Written)> {
        let data = self.layer.data();
        let length: usize = bufs.iter().map(IoBuf::len).sum();
        let place = at..at + length as u64;
        let unchecked = Written { place: place.clone(), checksums: Vec::new() };
        if self.has_data_apart() {
            return Ok((data.write_vectored_at(at, bufs).await?, unchecked));
        }
        self.check_place(&place)?;
        if let Destination::Embedded { checked } = destination {
            let holder = if checked { ChecksumHolder::Lead } else { ChecksumHolder::Nobody };
            let checksums = vec![ChecksummedRange { range: place.clone(), crc: None, holder }];
            return Ok((self.write_stored(at, bufs).await?, Written { place, checksums }));
        }
        if destination == Destination::InUse && !self.zones.leads_in(&place).is_empty() {
            let mut written = Vec::with_capacity(bufs.len());
            let mut next = at;
            for buf in bufs {
                let start = next;
                next += buf.len() as u64;
                written.push(self.write(start, buf).await?);
            }
            return Ok((written, unchecked));
        }
        if length <= SMALL {
            if self.keep(destination, at, &bufs) {
                return Ok((bufs, unchecked));
            }
        } else if matches!(destination, Destination::Beyond | Destination::Prepared) {
            self.alloc.note_growth(length as u64);
        }
        let checked = destination != Destination::InUse;
        match self.data_journal.write(at, &bufs) {
            WriteRoute::InPlace(_busy) => {
                let size = self.cluster_size();
                let checksums = if checked {
                    checksummed(at, &bufs, size, self.data_journal.is_active())
                } else {
                    Vec::new()
                };
                Ok((data.write_vectored_at(at, bufs).await?, Written { place, checksums }))
            }
            WriteRoute::Parts(parts, _busy) => {
                let unread = |part: &Range<u64>| ChecksummedRange {
                    range: part.clone(),
                    crc: None,
                    holder: ChecksumHolder::Record,
                };
                let checksums = parts.iter().filter(|_| checked).map(unread).collect();
                self.write_parts(at, parts, &bufs).await?;
                Ok((bufs, Written { place, checksums }))
            }
        }
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

    /// Keeps a small write for the next record if that avoids growing the file.
    fn keep(&self, destination: Destination, at: u64, bufs: &[IoBuf]) -> bool {
        let may = matches!(destination, Destination::Beyond | Destination::InUse)
            && self.data_journal.is_active();
        may && !self.has_data_apart()
            && self.upkeep.has_room()
            && self.layer.storage().gains_from_written_space()
            && self.data_journal.keep(
                at,
                bufs,
                destination == Destination::Beyond,
                self.cluster_size(),
            )
    }

    /// Writes pieces of data in place.
    pub(crate) async fn place(&self, pieces: &[JournaledWrite]) -> Result<()> {
        let data = self.layer.data();
        for kept in pieces {
            self.check_place(&(kept.at..kept.at + kept.bytes.len() as u64))?;
        }
        let writes = pieces.iter().map(|kept| data.write_at(kept.at, IoBuf::copy_of(&kept.bytes)));
        try_join_all(writes).await?;
        Ok(())
    }

    async fn write_parts(&self, at: u64, parts: Vec<Range<u64>>, bufs: &[IoBuf]) -> Result<()> {
        for part in parts {
            let bytes = cut(bufs, (part.start - at) as usize..(part.end - at) as usize);
            self.layer.data().write_at(part.start, IoBuf::copy_of(&bytes)).await?;
        }
        Ok(())
    }

    /// Reads bytes as they are stored; kept data is newer than the data in place.
    pub(super) async fn read_stored(&self, at: u64, buf: IoBuf) -> Result<IoBuf> {
        let kept = self.data_journal.kept_in(&(at..at + buf.len() as u64));
        let mut buf = self.layer.data().read_at(at, buf).await?;
        for piece in kept {
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
