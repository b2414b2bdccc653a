//! Verifying the checksums of a journal's last record.

use super::AT_ONCE;
use crate::replayed::PIECE;
use crate::{DiskError, Result};
use futures_util::stream::{self, StreamExt, TryStreamExt};
use isobath_qcow2::{Crc32c, HostOffset};
use isobath_storage::{IoBuf, Storage};
use std::ops::Range;
use std::path::Path;

/// The most bytes that a record's checksums may cover. Writers stop at half of that.
const MOST_BYTES: u64 = 64 << 20;
/// The most checksums in a record. A writer's record takes at most an eighth of the area: 8 MiB in the largest, with
/// room for 349,525.
const MOST_CHECKSUMS: usize = 1 << 19;
/// Ranges with less between them are read together.
const NEAR: u64 = 512;

/// A range of data, and its sum.
struct ChecksummedRange {
    range: Range<u64>,
    crc: u32,
}

/// Whether the data matches the last record's [checksums](isobath_qcow2::journal::Journal::checksums).
///
/// # Errors
/// If the checksums cover more than any writer's do; if the storage fails.
pub(super) async fn all_hold<S: Storage>(
    storage: &S,
    name: &Path,
    checksums: impl Iterator<Item = (HostOffset, u32, u32)>,
) -> Result<bool> {
    let checksums = bounded(name, checksums)?;
    // Written zeroes are within the file's length; past its end they only seem to be there.
    let end = storage.len().await?;
    if checksums.iter().any(|checksum| checksum.range.end > end) {
        return Ok(false);
    }
    let checks = groups(&checksums).into_iter().map(|checksums| holds(storage, checksums));
    stream::iter(checks).buffer_unordered(AT_ONCE).try_all(|holds| async move { holds }).await
}

/// The checksums by offset, if they are within a writer's limits.
fn bounded(
    name: &Path,
    checksums: impl Iterator<Item = (HostOffset, u32, u32)>,
) -> Result<Vec<ChecksummedRange>> {
    let mut bytes = 0;
    let mut bounded = Vec::new();
    for (offset, length, crc) in checksums {
        bytes += u64::from(length);
        if bytes > MOST_BYTES || bounded.len() == MOST_CHECKSUMS {
            return Err(DiskError::Refused {
                image: name.to_owned(),
                reason: format!(
                    "the last record of its journal has checksums of more than {MOST_BYTES} bytes in \
                     {MOST_CHECKSUMS} ranges, more than any writer leaves; restore the image from a backup, \
                     or have it checked by hand"
                ),
            });
        }
        let end = offset.get() + u64::from(length);
        bounded.push(ChecksummedRange { range: offset.get()..end, crc });
    }
    bounded.sort_unstable_by_key(|checksum| (checksum.range.start, checksum.range.end));
    Ok(bounded)
}

/// Groups of ranges to read at once: ranges near each other, together no longer than a piece, or a single longer one.
fn groups(checksums: &[ChecksummedRange]) -> Vec<&[ChecksummedRange]> {
    let mut groups = Vec::new();
    let mut rest = checksums;
    while let Some(first) = rest.first() {
        let mut end = first.range.end;
        let joined = |checksum: &&ChecksummedRange| {
            let joins = checksum.range.start <= end.saturating_add(NEAR)
                && checksum.range.end.max(end) - first.range.start <= PIECE;
            end = end.max(checksum.range.end);
            joins
        };
        let count = 1 + rest.iter().skip(1).take_while(joined).count();
        let (group, later) = rest.split_at(count);
        groups.push(group);
        rest = later;
    }
    groups
}

async fn holds<S: Storage>(storage: &S, checksums: &[ChecksummedRange]) -> Result<bool> {
    let [first, others @ ..] = checksums else { return Ok(true) };
    if others.is_empty() {
        let mut sum = Crc32c::default();
        let mut at = first.range.start;
        while at < first.range.end {
            let piece = PIECE.min(first.range.end - at);
            sum.update(&storage.read_at(at, IoBuf::zeroed(piece as usize)).await?);
            at += piece;
        }
        return Ok(sum.finish() == first.crc);
    }
    let start = first.range.start;
    let end = checksums.iter().map(|checksum| checksum.range.end).max().unwrap_or(start);
    let bytes = storage.read_at(start, IoBuf::zeroed((end - start) as usize)).await?;
    Ok(checksums.iter().all(|checksum| {
        let part = bytes
            .get((checksum.range.start - start) as usize..(checksum.range.end - start) as usize);
        part.map(Crc32c::of) == Some(checksum.crc)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(checksums: &[(u64, u32)]) -> Result<Vec<ChecksummedRange>> {
        let checksums = checksums.iter().map(|&(at, length)| (HostOffset::new(at), length, 0));
        bounded(Path::new("image"), checksums)
    }

    #[test]
    fn what_is_near_is_read_together_and_nothing_twice() {
        let checksums =
            list(&[(4096, 512), (0, 512), (5000, 100), (4096, 512), (1 << 30, 32 << 20)]);
        let checksums = checksums.unwrap();
        let groups: Vec<usize> = groups(&checksums).iter().map(|group| group.len()).collect();
        assert_eq!(groups, [1, 3, 1]);
        // No group is longer than a piece.
        let many: Vec<(u64, u32)> = (0..10_000).map(|n| (n * 600, 512)).collect();
        let checksums = list(&many).unwrap();
        for group in super::groups(&checksums) {
            assert!(group.last().unwrap().range.end - group[0].range.start <= PIECE);
        }
        assert!(super::groups(&checksums).len() <= 8);
    }

    #[test]
    fn more_than_a_writer_has_checksums_of_is_refused() {
        assert!(list(&[(0, 32 << 20); 2]).is_ok());
        let error = list(&[(0, 32 << 20), (0, 32 << 20), (7, 1)]).err().unwrap().to_string();
        assert!(error.contains("'image'") && error.contains("67108864 bytes"), "{error}");
        assert!(list(&vec![(0, 0); MOST_CHECKSUMS]).is_ok());
        assert!(list(&vec![(0, 0); MOST_CHECKSUMS + 1]).is_err());
    }
}
