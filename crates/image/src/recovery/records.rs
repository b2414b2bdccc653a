//! The file contents that the journal's records and the embedded mappings demand.

use super::leads;
use super::verify::all_hold;
use crate::replayed::Replayed;
use crate::sabotage::{self, Sabotage};
use crate::{DiskError, Result, always};
use isobath_qcow2::journal::{Journal, Zones};
use isobath_qcow2::{FormatError, Header, Lsn};
use isobath_storage::{IoBuf, Storage};
use std::ops::Range;
use std::path::Path;

/// The last record of a journal that was durable.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DurableRecord {
    /// Its LSN; the one before the journal's first if there is none.
    pub(super) lsn: Lsn,
    /// The LSN of the previous record, if there is one.
    pub(super) previous: Option<Lsn>,
}

/// What a crash has left in a journal.
pub(super) struct Examined {
    /// The overlay for the file.
    pub(super) replayed: Replayed,
    /// Zones that the journal lists.
    pub(super) zones: Option<Zones>,
    /// The highest LSN of a record.
    pub(super) last: Lsn,
    /// The last durable record.
    pub(super) durable: DurableRecord,
    /// The ranges of the records that a recovery needs, in bytes from the area's start.
    pub(super) needed: Vec<Range<usize>>,
}

/// Examines an image after a crash, without changing anything.
///
/// # Errors
/// If the journal is damaged, or the storage fails.
pub(super) async fn examine<S: Storage>(
    storage: &S,
    name: &Path,
    header: &Header,
) -> Result<Examined> {
    let damaged = |source: FormatError| DiskError::Format { image: name.to_owned(), source };
    let geometry = header.geometry().map_err(damaged)?;
    let extension =
        always(header.journal(), name, "a valid header whose journal bit is set has a journal")?;
    let length = extension.area_length as usize;
    let area = storage.read_at(extension.area_offset.get(), IoBuf::zeroed(length)).await?;
    let mut journal = Journal::scan(&area, extension).map_err(damaged)?;
    let before = extension.first_lsn.before();
    let last = journal.last().map_or(before, |last| last.lsn);
    let mut replayed = replay(&journal).map_err(damaged)?;
    let mut zones = journal.zones();
    let mut found = leads::find(storage, name, &geometry, &replayed, zones.as_ref()).await?;
    // A record embedded later may show that the last one was durable; its data may have changed since.
    let durable =
        zones.as_ref().is_some_and(|zones| found.durable_lsn() >= Some(zones.checkpoint_lsn));
    let holds = durable
        || sabotage::is(Sabotage::UncheckedCovers)
        || all_hold(storage, name, journal.checksums()).await?;
    if !holds || (sabotage::is(Sabotage::LostRecord) && journal.last().is_some()) {
        journal.drop_last().map_err(damaged)?;
        replayed = replay(&journal).map_err(damaged)?;
        zones = journal.zones();
        found = leads::find(storage, name, &geometry, &replayed, zones.as_ref()).await?;
    }
    if let Some(zones) = &zones {
        found.apply(storage, name, header, zones, &mut replayed).await?;
    }
    let durable = journal.last().map_or(DurableRecord { lsn: before, previous: None }, |last| {
        DurableRecord { lsn: last.lsn, previous: Some(last.previous) }
    });
    Ok(Examined { replayed, zones, last, durable, needed: journal.needed().collect() })
}

fn replay(journal: &Journal<'_>) -> std::result::Result<Replayed, FormatError> {
    let replay = journal.replay()?;
    let ranges = replay.ranges().map(|range| (range.offset.get(), range.content)).collect();
    Ok(Replayed::of(ranges))
}
