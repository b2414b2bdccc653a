//! After a crash: what the journal says the file must hold.

use super::build::OPERATION;
use super::verify::all_hold;
use crate::durability::zones::recover as embedded;
use crate::replayed::Replayed;
use crate::sabotage::{self, Sabotage};
use crate::{DiskError, Result};
use futures_util::stream::{self, StreamExt, TryStreamExt};
use isobath_qcow2::header::field;
use isobath_qcow2::journal::{BLOCK, HEAD_BYTES, Journal, Operation, Record, Zones};
use isobath_qcow2::{FormatError, Header, HostOffset, IncompatibleFeatures};
use isobath_storage::{IoBuf, Storage, ZeroMode};
use std::ops::Range;
use std::path::Path;

/// Ranges of data read at once to verify the last record.
pub(super) const READS: usize = 32;
/// Ranges to be written apart from each other at most. A writer brings its records to their places when
/// 8 MiB of tables changed, which are pages of at least 512 bytes, or half of the area is used; one record
/// changes 52,429 clusters at most, by three ranges each.
const MOST_SPANS: usize = 1 << 19;
/// What a crash has left in a journal.
struct Examined {
    replayed: Replayed,
    /// Zones that the journal lists.
    zones: Option<Zones>,
    /// The highest sequence of a record.
    sequence: u64,
    /// The same, of those that are durable.
    durable: u64,
    /// Where the records lie that a recovery needs, in bytes from the area's start.
    needed: Vec<Range<usize>>,
}

/// What must be put over what is read from an image whose journal is in use.
///
/// # Errors
/// If the journal is damaged, or the storage fails.
pub async fn examine<S: Storage>(storage: &S, name: &Path, header: &Header) -> Result<Replayed> {
    Ok(examine_area(storage, name, header).await?.replayed)
}

async fn examine_area<S: Storage>(storage: &S, name: &Path, header: &Header) -> Result<Examined> {
    let damaged = |source: FormatError| DiskError::Format { image: name.to_owned(), source };
    let geometry = header.geometry().map_err(damaged)?;
    let Some(extension) = header.journal() else {
        let (replayed, needed) = (Replayed::default(), Vec::new());
        return Ok(Examined { replayed, zones: None, sequence: 0, durable: 0, needed });
    };
    let length = extension.area_length as usize;
    let area = storage.read_at(extension.area_offset.get(), IoBuf::zeroed(length)).await?;
    let mut journal = Journal::scan(&area, extension).map_err(damaged)?;
    let before = extension.first_sequence.saturating_sub(1);
    let last = |journal: &Journal<'_>| journal.last().map_or(before, |last| last.sequence);
    let sequence = last(&journal);
    let mut replayed = replay(&journal).map_err(damaged)?;
    let mut zones = journal.zones();
    let mut found = embedded::find(storage, name, &geometry, &replayed, zones.as_ref()).await?;
    // A record embedded later may show that the last one was durable; its data may have changed since.
    let proven = zones.as_ref().is_some_and(|zones| found.proof() >= Some(zones.floor));
    let holds = proven
        || sabotage::is(Sabotage::UncheckedCovers)
        || all_hold(storage, name, journal.checksums()).await?;
    if !holds || (sabotage::is(Sabotage::LostRecord) && journal.last().is_some()) {
        journal.drop_last().map_err(damaged)?;
        replayed = replay(&journal).map_err(damaged)?;
        zones = journal.zones();
        found = embedded::find(storage, name, &geometry, &replayed, zones.as_ref()).await?;
    }
    if let Some(zones) = &zones {
        found.apply(storage, name, header, zones, &mut replayed).await?;
    }
    let durable = last(&journal);
    Ok(Examined { replayed, zones, sequence, durable, needed: journal.needed().collect() })
}

fn replay(journal: &Journal<'_>) -> std::result::Result<Replayed, FormatError> {
    let replay = journal.replay()?;
    let ranges = replay.ranges().map(|range| (range.offset.get(), range.content)).collect();
    Ok(Replayed::of(ranges))
}

/// Brings what the journal of an image holds to its place and takes the journal out of use, or leaves it in
/// use and empty, where that is possible and `keep` says so, given the numbers of its last durable record and
/// of its last record: `true` then. A crash meanwhile leaves the journal as it was.
///
/// # Errors
/// If the journal is damaged, or the storage fails; the image can then be recovered once more.
pub async fn recover<S: Storage>(
    storage: &S,
    name: &Path,
    header: &Header,
    keep: impl FnOnce(u64, u64) -> bool,
) -> Result<bool> {
    let examined = examine_area(storage, name, header).await?;
    let keep = keep(examined.durable, examined.sequence);
    let replayed = &examined.replayed;
    let (ranges, leads) = replayed.counts();
    tracing::info!(image = %isobath_storage::shown(name), ranges, leads, "replaying the journal");
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
        .try_for_each_concurrent(READS, |span| replayed.write(storage, span))
        .await?;
    storage.flush().await?;
    if keep {
        let zoned = examined.zones.as_ref().is_some_and(|zones| !zones.zones.is_empty());
        if zoned || !empty(storage, name, header, &examined).await? {
            return Err(DiskError::Corrupt {
                image: name.to_owned(),
                reason: format!(
                    "its journal (area_length {}) cannot be emptied, as replaying the writes \
                     acknowledged by its killed server requires",
                    header.journal().map_or(0, |journal| journal.area_length)
                ),
            });
        }
        return Ok(true);
    }
    if leads > 0 {
        unembed(storage, name, header, examined).await?;
    }
    take_out(storage, header).await?;
    Ok(false)
}

/// Takes a journal of which everything is in its place out of use.
///
/// # Errors
/// If the storage fails.
pub async fn take_out<S: Storage>(storage: &S, header: &Header) -> Result<()> {
    let kept = header.incompatible.without(IncompatibleFeatures::JOURNAL);
    let bytes = IoBuf::copy_of(&kept.bits().to_be_bytes());
    storage.write_at(field::INCOMPATIBLE_FEATURES as u64, bytes).await?;
    storage.flush().await?;
    if let Some(extension) = header.journal() {
        // Free space from here on, which a program that grows the disk may show.
        let (at, length) = (extension.area_offset.get(), extension.area_length);
        storage.write_zeroes(at, length, ZeroMode { may_unmap: true, only_fast: false }).await?;
    }
    Ok(())
}

/// Has a record say that a journal, of which everything is durable in its place, has nothing to be
/// replayed; `false` if there is no room for it.
async fn empty<S: Storage>(
    storage: &S,
    name: &Path,
    header: &Header,
    examined: &Examined,
) -> Result<bool> {
    let Some(extension) = header.journal() else { return Ok(false) };
    if examined.needed.is_empty() {
        return Ok(true);
    }
    let sequence = examined.sequence + 1;
    let record = Record { sequence, tail: sequence, data_from: sequence, operations: Vec::new() };
    let bytes = record
        .encode(extension.id)
        .map_err(|source| DiskError::Format { image: name.to_owned(), source })?;
    let gap = largest_gap(&examined.needed, extension.area_length as usize);
    if gap.len() < bytes.len() {
        return Ok(false);
    }
    let at = extension.area_offset.get() + gap.start as u64;
    storage.write_at(at, IoBuf::copy_of(&bytes)).await?;
    storage.flush().await?;
    Ok(true)
}

/// Makes lead blocks plain, of an image of which all else is in its place. A lead block is written over
/// when a record has what it will be, and says that it is plain: one that is half written, or looks like
/// what it was, is then told from one that is not.
async fn unembed<S: Storage>(
    storage: &S,
    name: &Path,
    header: &Header,
    examined: Examined,
) -> Result<()> {
    let damaged = |source: FormatError| DiskError::Format { image: name.to_owned(), source };
    let Examined { replayed, zones, mut sequence, mut needed, .. } = examined;
    let (Some(extension), Some(mut zones)) = (header.journal(), zones) else { return Ok(()) };
    let size = header.geometry().map_err(damaged)?.cluster_size();
    // The tables have every mapping.
    zones.floor = u64::MAX;
    let leads: Vec<(u64, Box<[u8]>)> = replayed.into_leads();
    let mut rest = leads.as_slice();
    while !rest.is_empty() {
        let gap = largest_gap(&needed, extension.area_length as usize);
        let mut room = gap
            .len()
            .saturating_sub(RECORD_HEAD + Operation::Zones(zones.clone()).encoded_length());
        let fits = |(_, plain): &&(u64, Box<[u8]>)| {
            let taken = OPERATION as usize + plain.len();
            let fits = taken <= room;
            room = room.saturating_sub(taken);
            fits
        };
        let count = rest.iter().take_while(fits).count();
        if count == 0 {
            return Err(DiskError::Corrupt {
                image: name.to_owned(),
                reason: format!(
                    "its journal (area_length {}) has no room to recover {} embedded blocks; \
                     copy the disk with 'isobath convert', which only reads it",
                    extension.area_length,
                    rest.len()
                ),
            });
        }
        let (now, later) = rest.split_at(count);
        rest = later;
        sequence += 1;
        let mut operations = Vec::with_capacity(count + 1);
        for (at, plain) in now {
            mark_plain(&mut zones, *at, size);
            let (offset, bytes) = (HostOffset::new(*at), plain.to_vec());
            operations.push(Operation::Data { offset, bytes });
        }
        operations.push(Operation::Zones(zones.clone()));
        let record = Record { sequence, tail: sequence, data_from: sequence, operations };
        let bytes = record.encode(extension.id).map_err(damaged)?;
        needed.clear();
        needed.push(gap.start..gap.start + bytes.len());
        let at = extension.area_offset.get() + gap.start as u64;
        storage.write_at(at, IoBuf::copy_of(&bytes)).await?;
        storage.flush().await?;
        let writes = now.iter().map(|(at, plain)| storage.write_at(*at, IoBuf::copy_of(plain)));
        stream::iter(writes).buffer_unordered(READS).try_for_each(|_| async { Ok(()) }).await?;
        storage.flush().await?;
    }
    Ok(())
}

/// Bytes of a record without its operations, and of a block that it may not fill.
const RECORD_HEAD: usize = HEAD_BYTES + BLOCK;
/// The longest run of whole blocks of an area in which nothing is needed.
fn largest_gap(needed: &[Range<usize>], area: usize) -> Range<usize> {
    let mut needed: Vec<_> = needed.to_vec();
    needed.sort_unstable_by_key(|range| range.start);
    let starts = std::iter::once(0).chain(needed.iter().map(|range| range.end));
    let ends = needed.iter().map(|range| range.start).chain([area]);
    let gaps = starts.zip(ends).map(|(start, end)| start..end.max(start));
    gaps.max_by_key(|gap| gap.end - gap.start).unwrap_or(0..0)
}

/// Says that the lead block at `at` is plain.
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
