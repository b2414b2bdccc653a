//! After a crash: what the journal says the file must hold.

use crate::{DiskError, Result};
use futures_util::stream::{self, StreamExt, TryStreamExt};
use isobath_qcow2::header::field;
use isobath_qcow2::journal::{Content, Crc32c, Journal};
use isobath_qcow2::{FormatError, Header, IncompatibleFeatures};
use isobath_storage::{IoBuf, Storage, ZeroMode};
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

/// Ranges of data read at once to verify the last record.
const READS: usize = 32;
/// Bytes read or written at once.
const PIECE: u64 = 1 << 20;
/// Ranges with less between them are written together.
const NEAR: u64 = 4096;

/// What a journal says a file must hold, put over what is read from it.
#[derive(Debug, Default)]
pub(crate) struct Replayed {
    /// By offset; they do not overlap.
    ranges: BTreeMap<u64, Content>,
}

impl Replayed {
    /// Where the last range ends: the file counts as at least so long.
    pub(crate) fn end(&self) -> u64 {
        self.ranges.last_key_value().map_or(0, |(at, content)| at + length(content))
    }

    /// Whether any of it is in a range of the file.
    pub(crate) fn touches(&self, at: u64, length_of: u64) -> bool {
        let before = self.ranges.range(..at.saturating_add(length_of)).next_back();
        before.is_some_and(|(start, content)| start + length(content) > at)
    }

    /// Puts what there is over `bytes`, read from `at` on.
    pub(crate) fn put_over(&self, at: u64, bytes: &mut [u8]) {
        let end = at + bytes.len() as u64;
        for (&start, content) in self.ranges.range(..end).rev() {
            let until = start + length(content);
            if until <= at {
                return;
            }
            let (from, to) = (start.max(at), until.min(end));
            let place = &mut bytes[(from - at) as usize..(to - at) as usize];
            match content {
                Content::Bytes(new) => {
                    place.copy_from_slice(&new[(from - start) as usize..(to - start) as usize]);
                }
                Content::Zeroes(_) => place.fill(0),
            }
        }
    }
}

impl Replayed {
    /// Ranges of the file that hold everything, each to be written at once: what is near goes
    /// together.
    fn spans(&self) -> Vec<Range<u64>> {
        let mut spans: Vec<Range<u64>> = Vec::new();
        for (&at, content) in &self.ranges {
            let end = at + length(content);
            match spans.last_mut() {
                Some(span) if at - span.end < NEAR && end - span.start <= PIECE => span.end = end,
                _ => spans.push(at..end),
            }
        }
        spans
    }

    async fn write<S: Storage>(&self, storage: &S, span: Range<u64>) -> Result<()> {
        let (at, length) = (span.start, span.end - span.start);
        if length > PIECE {
            // One range: the area holds no more bytes than that, or they are zeroes.
            if let Some(Content::Bytes(bytes)) = self.ranges.get(&at) {
                storage.write_at(at, IoBuf::copy_of(bytes)).await?;
            } else {
                let mode = ZeroMode { may_unmap: false, only_fast: false };
                storage.write_zeroes(at, length, mode).await?;
            }
            return Ok(());
        }
        let mut bytes = storage.read_at(at, IoBuf::zeroed(length as usize)).await?;
        self.put_over(at, &mut bytes);
        storage.write_at(at, bytes).await?;
        Ok(())
    }
}

fn length(content: &Content) -> u64 {
    match content {
        Content::Bytes(bytes) => bytes.len() as u64,
        Content::Zeroes(length) => *length,
    }
}

/// What must be put over what is read from an image whose journal is in use.
///
/// # Errors
/// If the journal is damaged, or the storage fails.
pub(crate) async fn examine<S: Storage>(
    storage: &S,
    name: &Path,
    header: &Header,
) -> Result<Replayed> {
    let damaged = |source: FormatError| DiskError::Format { image: name.to_owned(), source };
    let Some(extension) = header.journal() else { return Ok(Replayed::default()) };
    let length = extension.area_length as usize;
    let area = storage.read_at(extension.area_offset.get(), IoBuf::zeroed(length)).await?;
    let mut journal = Journal::scan(&area, extension).map_err(damaged)?;
    let covers: Vec<_> = journal.covers().collect();
    if !all_hold(storage, &covers).await? {
        journal.drop_last().map_err(damaged)?;
    }
    let replay = journal.replay();
    let ranges = replay.ranges().map(|range| (range.offset.get(), range.content)).collect();
    Ok(Replayed { ranges })
}

/// Whether data is what the last record says.
async fn all_hold<S: Storage>(
    storage: &S,
    covers: &[(isobath_qcow2::HostOffset, u32, u32)],
) -> Result<bool> {
    let checks = covers.iter().map(|&(offset, length, crc)| async move {
        let mut sum = Crc32c::default();
        let (mut at, end) = (offset.get(), offset.get() + u64::from(length));
        while at < end {
            let piece = PIECE.min(end - at);
            sum.update(&storage.read_at(at, IoBuf::zeroed(piece as usize)).await?);
            at += piece;
        }
        Ok::<bool, DiskError>(sum.finish() == crc)
    });
    stream::iter(checks).buffer_unordered(READS).try_all(|holds| async move { holds }).await
}

/// Brings what the journal of an image holds to its place and takes the journal out of use. A crash
/// meanwhile leaves the journal as it was.
///
/// # Errors
/// If the journal is damaged, or the storage fails; the image can then be recovered once more.
pub(crate) async fn recover<S: Storage>(storage: &S, name: &Path, header: &Header) -> Result<()> {
    let replayed = examine(storage, name, header).await?;
    tracing::info!(image = %name.display(), ranges = replayed.ranges.len(), "replaying the journal");
    stream::iter(replayed.spans().into_iter().map(Ok))
        .try_for_each_concurrent(READS, |span| replayed.write(storage, span))
        .await?;
    storage.flush().await?;
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
