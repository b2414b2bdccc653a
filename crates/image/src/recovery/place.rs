//! Writing recovered changes in place, and taking the journal out of use.

use super::AT_ONCE;
use super::records::Examined;
use crate::replayed::Replayed;
use crate::{DiskError, Result, always};
use futures_util::stream::{self, StreamExt, TryStreamExt};
use isobath_qcow2::header::field;
use isobath_qcow2::journal::{BLOCK, HEAD_BYTES, JournalExtension, Operation, Record, Zones};
use isobath_qcow2::{FormatError, Geometry, Header, HostOffset, IncompatibleFeatures, Lsn};
use isobath_storage::{IoBuf, Storage, ZeroMode};
use std::ops::Range;
use std::path::Path;

/// The most separate ranges to be written. A writer makes a checkpoint when 8 MiB of tables have changed, in pages of
/// at least 512 bytes, or half of the area is used; one record changes at most 52,429 clusters, with three ranges each.
const MOST_SPANS: usize = 1 << 19;
/// Bytes of the refcount tables that replace one another as an image grows, the last of which has at most 8 MiB.
const GROWN_TABLES: u64 = 32 << 20;
/// Bytes of a record's header, and of a block that it may not fill.
const RECORD_HEAD: usize = HEAD_BYTES + BLOCK;

/// The most zeroes that tables of a disk need that are new in one journal, in bytes: twice what all of its tables do,
/// since some may have been freed and made elsewhere, and refcount tables that grow.
fn most_zeroes(geometry: &Geometry, size: u64) -> u64 {
    let cluster = geometry.cluster_size();
    let tables = geometry.l1_size_for(size).saturating_mul(cluster);
    let clusters = size.saturating_add(tables).div_ceil(cluster).saturating_mul(2);
    let refcounts = clusters.div_ceil(geometry.refcount_block_entries()).saturating_mul(cluster);
    tables.saturating_add(refcounts).saturating_mul(2).saturating_add(GROWN_TABLES)
}

/// Writes everything except lead blocks in place, durably.
///
/// # Errors
/// If it is more than a writer leaves: a small journal must not fill the storage.
pub(super) async fn write<S: Storage>(
    storage: &S,
    name: &Path,
    header: &Header,
    replayed: &Replayed,
) -> Result<()> {
    let (ranges, leads) = replayed.counts();
    tracing::info!(image = %isobath_storage::shown(name), ranges, leads, "replaying the journal");
    let damaged = |source| DiskError::Format { image: name.to_owned(), source };
    let most = most_zeroes(&header.geometry().map_err(damaged)?, header.size);
    if replayed.zeroes() > most {
        return Err(DiskError::Refused {
            image: name.to_owned(),
            reason: format!(
                "its journal zeroes {} bytes, more than a disk of {} bytes has tables for (at most {most}); copy the \
                 disk with 'isobath convert', which only reads it",
                replayed.zeroes(),
                header.size
            ),
        });
    }
    let spans = replayed.spans();
    if spans.len() > MOST_SPANS {
        return Err(DiskError::Refused {
            image: name.to_owned(),
            reason: format!(
                "its journal has {} separate ranges to replay, more than any writer leaves (at \
                 most {MOST_SPANS}); copy the disk with 'isobath convert', which only reads \
                 it",
                spans.len()
            ),
        });
    }
    stream::iter(spans.into_iter().map(Ok))
        .try_for_each_concurrent(AT_ONCE, |span| replayed.write(storage, span))
        .await?;
    storage.flush().await?;
    Ok(())
}

/// Refuses an image to which a restart log belongs, and whose journal lists zones.
pub(super) fn refuse_zones(name: &Path, examined: &Examined) -> Result<()> {
    if examined.zones.as_ref().is_none_or(|zones| zones.zones.is_empty()) {
        return Ok(());
    }
    Err(DiskError::Refused {
        image: name.to_owned(),
        reason: "its journal lists zones, and a restart log belongs to it: no writer has both; remove the restart log \
                 to open the image as after a power failure"
            .into(),
    })
}

/// Writes a record that says that nothing must be replayed, to a journal whose contents are all durable in place. The
/// journal stays in use.
pub(super) async fn empty<S: Storage>(
    storage: &S,
    name: &Path,
    header: &Header,
    examined: &Examined,
) -> Result<()> {
    let extension =
        always(header.journal(), name, "a valid header whose journal bit is set has a journal")?;
    if examined.needed.is_empty() {
        return Ok(());
    }
    let mut log = Log::of(storage, name, extension, examined);
    let record = log.record(Vec::new());
    log.write(&record).await
}

/// Makes lead blocks plain and takes the journal out of use, in an image in which everything else is in place.
pub(super) async fn close<S: Storage>(
    storage: &S,
    name: &Path,
    header: &Header,
    examined: Examined,
) -> Result<()> {
    if let Some(extension) = header.journal()
        && let Some(zones) = &examined.zones
    {
        let damaged = |source: FormatError| DiskError::Format { image: name.to_owned(), source };
        let size = header.geometry().map_err(damaged)?.cluster_size();
        let log = Log::of(storage, name, extension, &examined);
        // The tables have every mapping.
        let zones = Zones { checkpoint_lsn: Lsn::MAX, ..zones.clone() };
        unembed(log, zones, examined.replayed.into_leads(), size).await?;
    }
    take_out(storage, header).await
}

/// Takes a journal whose contents are all in place out of use.
pub(super) async fn take_out<S: Storage>(storage: &S, header: &Header) -> Result<()> {
    let kept = header.incompatible.without(IncompatibleFeatures::JOURNAL);
    let bytes = IoBuf::copy_of(&kept.bits().to_be_bytes());
    storage.write_at(field::INCOMPATIBLE_FEATURES as u64, bytes).await?;
    storage.flush().await?;
    if let Some(extension) = header.journal() {
        // This is free space from here on, which a program that grows the disk may expose.
        let (at, length) = (extension.area_offset.get(), extension.area_length);
        storage.write_zeroes(at, length, ZeroMode { may_unmap: true, only_fast: false }).await?;
    }
    Ok(())
}

/// The area, as records are added to it.
struct Log<'a, S> {
    storage: &'a S,
    name: &'a Path,
    extension: &'a JournalExtension,
    /// The last record that counts.
    previous: Lsn,
    /// The last LSN of any record, including one that does not count.
    last: Lsn,
    /// The ranges of the records that are needed, in bytes from the area's start.
    needed: Vec<Range<usize>>,
}

impl<'a, S: Storage> Log<'a, S> {
    fn of(
        storage: &'a S,
        name: &'a Path,
        extension: &'a JournalExtension,
        examined: &Examined,
    ) -> Self {
        let (previous, last) = (examined.durable.lsn, examined.last);
        Self { storage, name, extension, previous, last, needed: examined.needed.clone() }
    }

    /// The longest run of whole blocks of the area in which nothing is needed.
    fn gap(&self) -> Range<usize> {
        let mut needed = self.needed.clone();
        needed.sort_unstable_by_key(|range| range.start);
        let starts = std::iter::once(0).chain(needed.iter().map(|range| range.end));
        let area = self.extension.area_length as usize;
        let ends = needed.iter().map(|range| range.start).chain([area]);
        let gaps = starts.zip(ends).map(|(start, end)| start..end.max(start));
        gaps.max_by_key(|gap| gap.end - gap.start).unwrap_or(0..0)
    }

    /// The next record, which is then the only one that must be replayed.
    fn record(&mut self, operations: Vec<Operation>) -> Record {
        let (lsn, previous) = (self.last.next(), self.previous);
        (self.last, self.previous) = (lsn, lsn);
        Record { lsn, previous, tail: lsn, data_from: lsn, operations }
    }

    /// Writes the record durably, not over one that is needed. From then on only this one is needed.
    async fn write(&mut self, record: &Record) -> Result<()> {
        let damaged = |source| DiskError::Format { image: self.name.to_owned(), source };
        let bytes = record.encode(self.extension.id).map_err(damaged)?;
        let gap = self.gap();
        if gap.len() < bytes.len() {
            return Err(self.full("a record"));
        }
        let at = self.extension.area_offset.get() + gap.start as u64;
        self.storage.write_at(at, IoBuf::copy_of(&bytes)).await?;
        self.storage.flush().await?;
        self.needed.clear();
        self.needed.push(gap.start..gap.start + bytes.len());
        Ok(())
    }

    fn full(&self, what: &str) -> DiskError {
        DiskError::Refused {
            image: self.name.to_owned(),
            reason: format!(
                "its journal (area_length {}) has no room for {what} that its recovery must write; copy the disk \
                 with 'isobath convert', which only reads it",
                self.extension.area_length
            ),
        }
    }
}

/// Makes lead blocks plain. A lead block is overwritten only when a durable record contains its plain bytes and lists
/// it as plain, so that a torn block, or one that looks like a record, is never mistaken for an embedded one.
async fn unembed<S: Storage>(
    mut log: Log<'_, S>,
    mut zones: Zones,
    leads: Vec<(u64, Box<[u8]>)>,
    cluster_size: u64,
) -> Result<()> {
    let mut rest = leads.as_slice();
    while !rest.is_empty() {
        let listed = Operation::Zones(zones.clone()).encoded_length();
        let mut room = log.gap().len().saturating_sub(RECORD_HEAD + listed);
        let mut operations = Vec::new();
        for (at, plain) in rest {
            let (offset, bytes) = (HostOffset::new(*at), plain.to_vec());
            let operation = Operation::Data { offset, bytes };
            let Some(left) = room.checked_sub(operation.encoded_length()) else { break };
            room = left;
            operations.push(operation);
        }
        let (now, later) = rest.split_at(operations.len());
        if now.is_empty() {
            return Err(log.full(&format!("{} embedded blocks", rest.len())));
        }
        rest = later;
        for (at, _) in now {
            mark_plain(&mut zones, *at, cluster_size);
        }
        operations.push(Operation::Zones(zones.clone()));
        let record = log.record(operations);
        log.write(&record).await?;
        let storage = log.storage;
        let writes = now.iter().map(|(at, plain)| storage.write_at(*at, IoBuf::copy_of(plain)));
        stream::iter(writes).buffer_unordered(AT_ONCE).try_for_each(|_| async { Ok(()) }).await?;
        storage.flush().await?;
    }
    Ok(())
}

/// Lists the lead block at `at` as plain.
fn mark_plain(zones: &mut Zones, at: u64, cluster_size: u64) {
    for zone in &mut zones.zones {
        let place = at.checked_sub(zone.start.get()).map(|from| (from / cluster_size) as usize);
        if let Some(place) = place.filter(|place| *place < zone.clusters as usize)
            && let Some(byte) = zone.plain.get_mut(place / 8)
        {
            *byte |= 1 << (place % 8);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broken::{NAME, layer, must_violate};
    use crate::recovery::records::examine;
    use futures_executor::block_on;

    #[test]
    fn only_an_image_with_a_journal_is_recovered() {
        let (layer, name) = (layer(), Path::new(NAME));
        let header = layer.header().unwrap();
        let has = "a valid header whose journal bit is set has a journal";
        let examined = block_on(Box::pin(examine(&**layer.storage(), name, &header)));
        must_violate(examined.map(drop), has);
    }
}
