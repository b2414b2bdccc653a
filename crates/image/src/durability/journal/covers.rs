//! Whether data is what the last record of a journal says it is.

use super::recover::READS;
use crate::replayed::PIECE;
use crate::{DiskError, Result};
use futures_util::stream::{self, StreamExt, TryStreamExt};
use isobath_qcow2::HostOffset;
use isobath_qcow2::journal::Crc32c;
use isobath_storage::{IoBuf, Storage};
use std::ops::Range;
use std::path::Path;

/// Most bytes that a record may vouch for. Writers stop at half of that.
const MOST_BYTES: u64 = 64 << 20;
/// Most covers of a record. A writer's record takes an eighth of the area at most: in the largest 8 MiB,
/// room for 349,525.
const MOST_COVERS: usize = 1 << 19;
/// Covers with less between them are read together.
const NEAR: u64 = 512;

/// A range of data, and its sum.
struct Cover {
    range: Range<u64>,
    crc: u32,
}

/// Whether data is what the last record says, by its [covers](isobath_qcow2::journal::Journal::covers).
///
/// # Errors
/// If there is more of it than any writer vouches for; if the storage fails.
pub(super) async fn all_hold<S: Storage>(
    storage: &S,
    name: &Path,
    covers: impl Iterator<Item = (HostOffset, u32, u32)>,
) -> Result<bool> {
    let covers = bounded(name, covers)?;
    // Zeroes that were written show where the file ends; behind that they only seem to be there.
    let end = storage.len().await?;
    if covers.iter().any(|cover| cover.range.end > end) {
        return Ok(false);
    }
    let checks = groups(&covers).into_iter().map(|covers| holds(storage, covers));
    stream::iter(checks).buffer_unordered(READS).try_all(|holds| async move { holds }).await
}

/// The covers by offset, if they are as many as a writer leaves.
fn bounded(
    name: &Path,
    covers: impl Iterator<Item = (HostOffset, u32, u32)>,
) -> Result<Vec<Cover>> {
    let mut bytes = 0;
    let mut bounded = Vec::new();
    for (offset, length, crc) in covers {
        bytes += u64::from(length);
        if bytes > MOST_BYTES || bounded.len() == MOST_COVERS {
            return Err(DiskError::Refused {
                image: name.to_owned(),
                reason: format!(
                    "the last record of its journal vouches for more than {MOST_BYTES} bytes in \
                     {MOST_COVERS} ranges, which no writer does; restore the image from a backup, \
                     or have it checked by hand"
                ),
            });
        }
        let end = offset.get() + u64::from(length);
        bounded.push(Cover { range: offset.get()..end, crc });
    }
    bounded.sort_unstable_by_key(|cover| (cover.range.start, cover.range.end));
    Ok(bounded)
}

/// Covers that are read at once: those near each other, together no longer than a piece; a longer one
/// alone.
fn groups(covers: &[Cover]) -> Vec<&[Cover]> {
    let mut groups = Vec::new();
    let mut rest = covers;
    while let Some(first) = rest.first() {
        let mut end = first.range.end;
        let joined = |cover: &&Cover| {
            let joins = cover.range.start <= end.saturating_add(NEAR)
                && cover.range.end.max(end) - first.range.start <= PIECE;
            end = end.max(cover.range.end);
            joins
        };
        let count = 1 + rest.iter().skip(1).take_while(joined).count();
        let (group, later) = rest.split_at(count);
        groups.push(group);
        rest = later;
    }
    groups
}

async fn holds<S: Storage>(storage: &S, covers: &[Cover]) -> Result<bool> {
    let [first, others @ ..] = covers else { return Ok(true) };
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
    let end = covers.iter().map(|cover| cover.range.end).max().unwrap_or(start);
    let bytes = storage.read_at(start, IoBuf::zeroed((end - start) as usize)).await?;
    Ok(covers.iter().all(|cover| {
        let part =
            bytes.get((cover.range.start - start) as usize..(cover.range.end - start) as usize);
        part.map(Crc32c::of) == Some(cover.crc)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(covers: &[(u64, u32)]) -> Result<Vec<Cover>> {
        let covers = covers.iter().map(|&(at, length)| (HostOffset::new(at), length, 0));
        bounded(Path::new("image"), covers)
    }

    #[test]
    fn what_is_near_is_read_together_and_nothing_twice() {
        let covers = list(&[(4096, 512), (0, 512), (5000, 100), (4096, 512), (1 << 30, 32 << 20)]);
        let covers = covers.unwrap();
        let groups: Vec<usize> = groups(&covers).iter().map(|group| group.len()).collect();
        assert_eq!(groups, [1, 3, 1]);
        // No group is longer than a piece.
        let many: Vec<(u64, u32)> = (0..10_000).map(|n| (n * 600, 512)).collect();
        let covers = list(&many).unwrap();
        for group in super::groups(&covers) {
            assert!(group.last().unwrap().range.end - group[0].range.start <= PIECE);
        }
        assert!(super::groups(&covers).len() <= 8);
    }

    #[test]
    fn more_than_a_writer_vouches_for_is_refused() {
        assert!(list(&[(0, 32 << 20); 2]).is_ok());
        let error = list(&[(0, 32 << 20), (0, 32 << 20), (7, 1)]).err().unwrap().to_string();
        assert!(error.contains("'image'") && error.contains("67108864 bytes"), "{error}");
        assert!(list(&vec![(0, 0); MOST_COVERS]).is_ok());
        assert!(list(&vec![(0, 0); MOST_COVERS + 1]).is_err());
    }
}
