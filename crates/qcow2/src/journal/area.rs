//! Finding the valid records of an area.

use super::extension::JournalExtension;
use super::operation::Kind;
use super::record::{SUMMED, View};
use super::replay::Replay;
use super::sums::Sums;
use super::{BLOCK, Zones, irrecoverable};
use crate::error::FormatError;
use crate::lsn::Lsn;
use crate::offset::HostOffset;

/// A record found in an area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its LSN.
    pub lsn: Lsn,
    /// The LSN of the previous record.
    pub previous: Lsn,
    /// The LSN from which records' metadata must be replayed, as of this one.
    pub tail: Lsn,
    /// The LSN from which records' data must be replayed, as of this one.
    pub data_from: Lsn,
    /// Bytes from the area's start to the record's.
    pub at: usize,
    /// Bytes that it takes in the area: whole [blocks](BLOCK).
    pub length: usize,
}

/// The records of an area that can be used after a crash.
#[derive(Debug)]
pub struct Journal<'a> {
    first_lsn: Lsn,
    /// By LSN.
    records: Vec<(usize, View<'a>)>,
    /// How many of `records` are needed: the last ones.
    needed: usize,
    dropped: bool,
}

impl<'a> Journal<'a> {
    /// The records in `area`, all its bytes. Blocks are skipped if no complete record of this journal with its first
    /// LSN or a later one begins there: they are free, or hold remains of a record after a crash.
    ///
    /// # Errors
    /// If the area is truncated, two records have the same LSN, a record that the last one needs is missing, or one is
    /// complete but not understood.
    pub fn scan(area: &'a [u8], extension: &JournalExtension) -> Result<Self, FormatError> {
        if area.len() as u64 != extension.area_length {
            return Err(irrecoverable(
                "journal area",
                format_args!("{} bytes long", area.len()),
                format_args!("the header says {}", extension.area_length),
            ));
        }
        let sums = Sums::new(area);
        let mut records: Vec<(usize, View<'a>)> = Vec::new();
        let mut at = 0;
        while let Some(rest) = area.get(at..).filter(|rest| !rest.is_empty()) {
            let record = View::may_start(rest, extension.id)
                .then(|| View::at(rest, extension.id).ok())
                .flatten()
                .filter(|view| view.lsn >= extension.first_lsn)
                .filter(|view| sums.of(at + SUMMED, at + view.length) == Some(view.crc));
            let Some(view) = record else {
                at += BLOCK;
                continue;
            };
            // It was written like this: leaving it out would lose its changes.
            view.check()?;
            records.push((at, view));
            at += view.length.next_multiple_of(BLOCK);
        }
        records.sort_unstable_by_key(|(_, view)| view.lsn);
        let twice = records.array_windows().find(|[(_, a), (_, b)]| a.lsn == b.lsn);
        if let Some([(at, view), (other, _)]) = twice {
            return Err(irrecoverable(
                "journal record's LSN",
                view.lsn,
                format_args!("two records have this LSN, at {at:#x} and {other:#x} in the journal"),
            ));
        }
        let mut journal =
            Self { first_lsn: extension.first_lsn, records, needed: 0, dropped: false };
        journal.needed = journal.find_needed()?;
        Ok(journal)
    }

    /// The start of the records that the last one needs, all of which must be present.
    fn find_needed(&self) -> Result<usize, FormatError> {
        let Some((_, last)) = self.records.last() else { return Ok(0) };
        let from = last.tail.max(self.first_lsn);
        let mut expected = last.lsn;
        for (index, (_, view)) in self.records.iter().enumerate().rev() {
            if view.lsn != expected {
                break;
            }
            if view.previous() < from {
                return Ok(index);
            }
            expected = view.previous();
        }
        Err(self.missing(expected))
    }

    fn missing(&self, lsn: Lsn) -> FormatError {
        let last = self.last().map_or(Lsn::default(), |last| last.lsn);
        irrecoverable(
            "journal record",
            format_args!("{lsn} is missing"),
            format_args!("the journal is damaged: record {last}, the last one, needs it"),
        )
    }

    /// The ranges of the records that are still needed, in bytes from the area's start. The rest of the area may be
    /// written to.
    pub fn needed(&self) -> impl Iterator<Item = std::ops::Range<usize>> {
        let needed = self.records.get(self.needed..).unwrap_or_default();
        needed.iter().map(|(at, view)| *at..at + view.length.next_multiple_of(BLOCK))
    }

    /// The last record, which is the authoritative one. `None` if there are none, and nothing must be done.
    pub fn last(&self) -> Option<Found> {
        self.records.last().map(|&(at, view)| Found {
            lsn: view.lsn,
            previous: view.previous(),
            tail: view.tail,
            data_from: view.data_from,
            at,
            length: view.length.next_multiple_of(BLOCK),
        })
    }

    /// The file contents that the last record requires: its [checksums](super::Operation::Checksum) as offset, length
    /// in bytes, and [CRC-32C](crate::Crc32c). There are none after a record was dropped: the previous one was durable
    /// before that was written.
    pub fn checksums(&self) -> impl Iterator<Item = (HostOffset, u32, u32)> {
        let last = self.records.last().filter(|_| !self.dropped);
        let items = last.into_iter().flat_map(|(_, view)| view.items().flatten());
        items.filter_map(|item| match item.kind {
            Kind::Checksum(crc) => Some((item.offset, item.length, crc)),
            _ => None,
        })
    }

    /// The [zones](super::Operation::Zones) that the last record lists; `None` if it lists none.
    pub fn zones(&self) -> Option<Zones> {
        let (_, last) = self.records.last()?;
        let payload = last.items().flatten().find_map(|item| match item.kind {
            Kind::Zones(payload) => Some(payload),
            _ => None,
        })?;
        // Checked when the record was found.
        Zones::parse(payload).ok()
    }

    /// Drops the last record, because not all of its data reached the disk. The previous one is then the last.
    ///
    /// # Errors
    /// If the previous record or one that it needs is missing; if one was dropped before; if there is none.
    pub fn drop_last(&mut self) -> Result<(), FormatError> {
        let Some(last) = self.last() else {
            return Err(irrecoverable("journal", "empty", "there is no record to drop"));
        };
        if self.dropped {
            return Err(irrecoverable(
                "journal record",
                format_args!("{}, the last one", last.lsn),
                "it was durable before a later record was written, and cannot be dropped",
            ));
        }
        if last.previous >= self.first_lsn {
            let before = self.records.iter().rev().nth(1);
            if before.is_none_or(|(_, view)| view.lsn != last.previous) {
                return Err(irrecoverable(
                    "journal record",
                    format_args!("{} is missing", last.previous),
                    format_args!(
                        "the journal is damaged: record {}, the last one, is not complete",
                        last.lsn
                    ),
                ));
            }
        }
        self.records.pop();
        self.dropped = true;
        self.needed = self.find_needed()?;
        Ok(())
    }

    /// The file contents that the last record and those it needs demand.
    ///
    /// # Errors
    /// If that is more than [`MAX_PIECES`](super::MAX_PIECES) ranges.
    pub fn replay(&self) -> Result<Replay<'a>, FormatError> {
        let needed = self.records.get(self.needed..).unwrap_or_default();
        let data_from = self.records.last().map_or(Lsn::default(), |(_, last)| last.data_from);
        let mut replay = Replay::default();
        for (_, view) in needed {
            replay.add(view, view.lsn >= data_from)?;
        }
        Ok(replay)
    }
}
