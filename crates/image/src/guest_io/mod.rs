//! Guest data of one image: reads and writes of host ranges, whatever stores them.
//!
//! Some data is not stored in place as the guest wrote it: the data journal keeps it
//! for the next record, a zone has a mapping embedded in it, or it is encrypted.

mod leads;

pub use crate::durability::data_journal::Written;

use crate::Result;
use crate::durability::Metadata;
use crate::durability::data_journal::{
    ChecksumHolder, ChecksummedRange, Growth, WriteRoute, checksummed, cut,
};
use crate::encryption::{encrypted, read_through};
use isobath_qcow2::HostCluster;
use isobath_storage::{IoBuf, Storage};
use std::io;
use std::ops::Range;

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

/// Reads and writes the guest data that an image stores.
pub struct GuestIo<'a, S> {
    metadata: &'a Metadata<S>,
}

impl<S> Metadata<S> {
    /// Access to guest data.
    pub const fn guest_io(&self) -> GuestIo<'_, S> {
        GuestIo { metadata: self }
    }
}

impl<S: Storage> GuestIo<'_, S> {
    /// Reads guest data, with journaled data applied, and with lead blocks as the guest wrote them.
    pub async fn read(&self, at: u64, buf: IoBuf) -> Result<IoBuf> {
        if let Some(cipher) = self.metadata.layer.cipher()? {
            // There are no lead blocks in an encrypted image.
            let stored = async |at, buf| self.metadata.read_stored(at, buf).await;
            return Box::pin(read_through(cipher, at, buf, stored)).await;
        }
        let leads = self.metadata.zones.leads_in(&(at..at + buf.len() as u64));
        if leads.is_empty() {
            return self.metadata.read_stored(at, buf).await;
        }
        Box::pin(self.read_leads(leads, at, buf)).await
    }

    /// Whether the file holds these bytes of it as the guest wrote them: none is journaled, and none is in a block with
    /// an embedded mapping.
    pub fn is_stored_plain(&self, range: &Range<u64>) -> bool {
        self.metadata.data_journal.journaled_in(range).is_empty()
            && self.metadata.zones.leads_in(range).is_empty()
    }

    /// Whether a cluster belongs to a zone: it may then hold data only with a lead block that allows it.
    pub fn is_in_zone(&self, cluster: HostCluster) -> bool {
        self.metadata.zones.contain(cluster)
    }

    /// Whether records may have checksums of data in place.
    pub fn has_checksums(&self) -> bool {
        self.metadata.data_journal.is_active()
    }

    /// Bytes of a range that would be journaled if they were written now.
    pub fn to_journal(&self, range: &Range<u64>) -> u64 {
        self.metadata.data_journal.to_journal(range)
    }

    /// Makes `length` bytes at `to` share the space of another file's bytes from `from` on; `false` if the host cannot.
    pub async fn clone_range(&self, source: &S, from: u64, to: u64, length: u64) -> Result<bool> {
        let place = to..to + length;
        self.metadata.check_place(&place)?;
        let cloned = match self.metadata.layer.data().clone_range(source, from, to, length).await {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => return Ok(false),
            cloned => cloned?,
        };
        if cloned {
            self.metadata.check_place(&place)?;
        }
        Ok(cloned)
    }

    /// Writes guest data in place, or journals it for the next record if the place must not change yet. Where the data
    /// is encrypted, it is whole sectors.
    pub async fn write(&self, at: u64, buf: IoBuf) -> Result<IoBuf> {
        let place = at..at + buf.len() as u64;
        let buf = match self.metadata.layer.cipher()? {
            Some(cipher) => {
                let stored =
                    encrypted(cipher, self.metadata.layer.name(), at, std::slice::from_ref(&buf))?;
                Box::pin(self.write_over(at, stored)).await?;
                buf
            }
            None => self.write_over(at, buf).await?,
        };
        self.metadata.check_place(&place)?;
        Ok(buf)
    }

    /// As [`write`](Self::write), for bytes as they are to be stored, except for lead blocks.
    async fn write_over(&self, at: u64, buf: IoBuf) -> Result<IoBuf> {
        let range = at..at + buf.len() as u64;
        self.metadata.check_place(&range)?;
        if !self.metadata.zones.leads_in(&range).is_empty() {
            return Box::pin(self.write_over_leads(at, buf)).await;
        }
        let growth = self.growth(Destination::InUse, buf.len());
        match self.route(at, std::slice::from_ref(&buf), growth) {
            WriteRoute::InPlace(_busy) => Ok(self.metadata.layer.data().write_at(at, buf).await?),
            WriteRoute::Journaled => Ok(buf),
            WriteRoute::Parts(parts, _busy) => {
                Box::pin(self.write_parts(at, parts, std::slice::from_ref(&buf))).await?;
                Ok(buf)
            }
        }
    }

    /// Like [`write`](Self::write), for bytes as they are to be stored.
    async fn write_stored(&self, at: u64, bufs: Vec<IoBuf>) -> Result<Vec<IoBuf>> {
        match self.route(at, &bufs, None) {
            WriteRoute::InPlace(_busy) => {
                Ok(self.metadata.layer.data().write_vectored_at(at, bufs).await?)
            }
            WriteRoute::Journaled => Ok(bufs),
            WriteRoute::Parts(parts, _busy) => {
                self.write_parts(at, parts, &bufs).await?;
                Ok(bufs)
            }
        }
    }

    /// Writes consecutive buffers, and returns them. The caller passes the other result to
    /// [`Placement::placed`](crate::placement::Placement::placed). Where the data is encrypted, they are whole sectors
    /// together.
    pub async fn write_to(
        &self,
        destination: Destination,
        at: u64,
        bufs: Vec<IoBuf>,
    ) -> Result<(Vec<IoBuf>, Written)> {
        let (bufs, written) = match self.metadata.layer.cipher()? {
            Some(cipher) => {
                let stored = encrypted(cipher, self.metadata.layer.name(), at, &bufs)?;
                let (_, written) =
                    Box::pin(self.write_stored_to(destination, at, vec![stored])).await?;
                (bufs, written)
            }
            None => self.write_stored_to(destination, at, bufs).await?,
        };
        self.metadata.check_place(&written.place)?;
        Ok((bufs, written))
    }

    /// As [`write_to`](Self::write_to), for bytes as they are to be stored.
    async fn write_stored_to(
        &self,
        destination: Destination,
        at: u64,
        bufs: Vec<IoBuf>,
    ) -> Result<(Vec<IoBuf>, Written)> {
        let data = self.metadata.layer.data();
        let length: usize = bufs.iter().map(IoBuf::len).sum();
        let place = at..at + length as u64;
        let unchecked = Written { place: place.clone(), checksums: Vec::new() };
        if self.metadata.has_data_apart() {
            return Ok((data.write_vectored_at(at, bufs).await?, unchecked));
        }
        self.metadata.check_place(&place)?;
        if let Destination::Embedded { checked } = destination {
            let holder = if checked { ChecksumHolder::Lead } else { ChecksumHolder::Nobody };
            let checksums = vec![ChecksummedRange { range: place.clone(), crc: None, holder }];
            return Ok((self.write_stored(at, bufs).await?, Written { place, checksums }));
        }
        if destination == Destination::InUse && !self.metadata.zones.leads_in(&place).is_empty() {
            let mut written = Vec::with_capacity(bufs.len());
            let mut next = at;
            for buf in bufs {
                let start = next;
                next += buf.len() as u64;
                written.push(self.write(start, buf).await?);
            }
            return Ok((written, unchecked));
        }
        let grows = matches!(destination, Destination::Beyond | Destination::Prepared);
        if length > SMALL && grows {
            self.metadata.alloc.note_growth(length as u64);
        }
        let checked = destination != Destination::InUse;
        match self.route(at, &bufs, self.growth(destination, length)) {
            WriteRoute::Journaled => Ok((bufs, unchecked)),
            WriteRoute::InPlace(_busy) => {
                let size = self.metadata.cluster_size();
                let checksums = if checked {
                    checksummed(at, &bufs, size, self.metadata.data_journal.is_active())
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

    fn route(&self, at: u64, bufs: &[IoBuf], growth: Option<Growth>) -> WriteRoute {
        self.metadata.data_journal.route(at, bufs, self.metadata.cluster_size(), growth)
    }

    /// Whether a write may be journaled to save the file from growing.
    fn growth(&self, destination: Destination, length: usize) -> Option<Growth> {
        let growth = match destination {
            Destination::Beyond => Growth::First,
            Destination::InUse => Growth::Later,
            _ => return None,
        };
        let may = length <= SMALL
            && self.metadata.data_journal.is_active()
            && !self.metadata.has_data_apart()
            && self.metadata.upkeep.has_room()
            && self.metadata.layer.storage().gains_from_written_space();
        may.then_some(growth)
    }

    async fn write_parts(&self, at: u64, parts: Vec<Range<u64>>, bufs: &[IoBuf]) -> Result<()> {
        for part in parts {
            let bytes = cut(bufs, (part.start - at) as usize..(part.end - at) as usize);
            self.metadata.layer.data().write_at(part.start, IoBuf::copy_of(&bytes)).await?;
        }
        Ok(())
    }
}
