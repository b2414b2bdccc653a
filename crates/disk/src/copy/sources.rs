//! Concatenated disks.

use crate::device::BlockStatus;
use crate::disk::Disk;
use isobath_image::{DiskError, Result, always};
use isobath_storage::{Host, IoBuf};
use isobath_sync::AsyncMutex;
use std::collections::VecDeque;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// Guest bytes whose status is queried at once.
const WINDOW: u64 = 1 << 30;
const RUNS: usize = 4096;
/// The least that is salvaged.
const SECTOR: usize = 512;
/// What is read at once where it cannot be told whether it is data.
const UNKNOWN: u64 = 64 << 10;

/// How a copy treats a run of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Must be read.
    Data,
    /// Zeroes.
    Zero,
    /// The target's backing file has it.
    Backing,
}

/// The disks that a copy concatenates.
pub struct Sources<H: Host> {
    /// Each with the offset at which it starts.
    disks: Vec<(u64, Arc<Disk<H>>)>,
    size: u64,
    /// The size of the target's backing file.
    backing: Option<u64>,
    /// What cannot be read is zero, sector by sector.
    salvages: bool,
    known: AsyncMutex<Known>,
}

/// Runs from `start` on.
#[derive(Default)]
struct Known {
    start: u64,
    runs: VecDeque<(Content, u64)>,
}

impl Known {
    fn first(&self, name: &Path) -> Result<(Content, u64)> {
        always(self.runs.front().copied(), name, "the status of a byte is known")
    }
}

/// A disk that is too large to follow those before it in one disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooLarge {
    /// Its place among the disks.
    pub index: usize,
    /// Its bytes.
    pub size: u64,
    /// The bytes of those before it.
    pub before: u64,
}

impl fmt::Display for TooLarge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { size, before, .. } = self;
        if *before == 0 {
            return write!(f, "it has {size} bytes, and a disk may have no more than {}", i64::MAX);
        }
        write!(
            f,
            "its {size} bytes after {before} of the images before it are more than a disk may have ({}); convert \
             fewer images into one",
            i64::MAX
        )
    }
}

/// The size of the disk that concatenates disks of these sizes, in bytes.
///
/// # Errors
/// If it is more than a disk may have.
pub fn total_size(sizes: &[u64]) -> std::result::Result<u64, TooLarge> {
    let mut before = 0;
    for (index, &size) in sizes.iter().enumerate() {
        let sum = u64::checked_add(before, size).filter(|sum| i64::try_from(*sum).is_ok());
        before = sum.ok_or(TooLarge { index, size, before })?;
    }
    Ok(before)
}

impl<H: Host> Sources<H> {
    /// Concatenates disks, for a target whose backing file has `backing` bytes. With `salvages`, what cannot be read
    /// is zero.
    ///
    /// # Errors
    /// If they are larger together than a disk may be.
    pub fn new(disks: Vec<Arc<Disk<H>>>, backing: Option<u64>, salvages: bool) -> Result<Self> {
        let sizes: Vec<u64> = disks.iter().map(|disk| disk.size()).collect();
        let size = total_size(&sizes).map_err(|too_large| {
            let layer = disks.get(too_large.index).and_then(|disk| disk.layers().next());
            let image = layer.map(|layer| layer.name().to_owned()).unwrap_or_default();
            DiskError::Refused { image, reason: too_large.to_string() }
        })?;
        let mut start = 0;
        let placed = disks.into_iter().zip(sizes).map(|(disk, length)| {
            let at = start;
            start += length;
            (at, disk)
        });
        let disks = placed.collect();
        Ok(Self { disks, size, backing, salvages, known: AsyncMutex::default() })
    }

    /// The bytes of all disks.
    pub fn size(&self) -> u64 {
        self.size
    }

    pub(super) fn count(&self) -> usize {
        self.disks.len()
    }

    /// The disk that contains `offset`, and where it starts.
    fn at(&self, offset: u64) -> Option<(u64, &Arc<Disk<H>>)> {
        let (start, disk) = self.disks.iter().rfind(|(start, _)| *start <= offset)?;
        (offset - start < disk.size()).then_some((*start, disk))
    }

    /// The content at `offset`, which must be below the size, and its length. Fast for ascending offsets. What cannot
    /// be told is to be read if it is salvaged.
    ///
    /// # Errors
    /// If the tables of a disk cannot be read, and are not salvaged.
    pub async fn content(&self, offset: u64) -> Result<(Content, u64)> {
        match self.known_content(offset).await {
            Err(error) if self.may_salvage(&error) => {
                let end = (offset - offset % UNKNOWN + UNKNOWN).min(self.size);
                Ok((Content::Data, end - offset))
            }
            result => result,
        }
    }

    async fn known_content(&self, offset: u64) -> Result<(Content, u64)> {
        let mut known = self.known.lock().await;
        if offset < known.start {
            known.runs.clear();
        }
        while let Some((content, length)) = known.runs.front().copied() {
            let end = known.start + length;
            if offset < end {
                return Ok((content, end - offset));
            }
            known.start = end;
            known.runs.pop_front();
        }
        let Some((start, disk)) = self.at(offset) else { return Ok((Content::Zero, 1)) };
        let within = offset - start;
        let mut at = within;
        known.start = offset;
        for run in disk.block_status(within, WINDOW.min(disk.size() - within), RUNS).await? {
            let end = at + run.length;
            while at < end {
                let (content, until) = self.judge(disk, at, &run);
                let next = end.min(until);
                known.runs.push_back((content, next - at));
                at = next;
            }
        }
        known.first(disk.name())
    }

    /// The content of a run at `at`, and the limit up to which this applies.
    fn judge(&self, disk: &Disk<H>, at: u64, run: &BlockStatus) -> (Content, u64) {
        let plain = if run.zero { Content::Zero } else { Content::Data };
        let Some(backing) = self.backing else { return (plain, u64::MAX) };
        if run.allocated {
            return if run.depth == 0 { (plain, u64::MAX) } else { (Content::Backing, u64::MAX) };
        }
        let (depth, until) = disk.search_ends(at);
        if depth > 0 {
            (Content::Backing, until)
        } else if at >= backing {
            // Past the end of the target's backing file there is nothing to hide.
            (Content::Backing, u64::MAX)
        } else {
            (Content::Zero, until.min(backing))
        }
    }

    /// Fills a buffer, or another one of its length, if that is all that can be done: returns whether it did so.
    ///
    /// # Errors
    /// If a disk cannot be read, and is not salvaged.
    pub async fn read(&self, start: u64, buf: IoBuf) -> Result<(IoBuf, bool)> {
        let length = buf.len();
        match self.read_all(start, buf).await {
            Ok(buf) => Ok((buf, false)),
            Err(error) if self.may_salvage(&error) => {
                Ok((self.salvage(start, length).await?, true))
            }
            Err(error) => Err(error),
        }
    }

    /// Whether an error only means that something cannot be read.
    fn may_salvage(&self, error: &DiskError) -> bool {
        self.salvages && !matches!(error, DiskError::Internal { .. })
    }

    /// Reads what can be read of a range that cannot be read as a whole, by halves.
    async fn salvage(&self, start: u64, length: usize) -> Result<IoBuf> {
        let mut whole = IoBuf::zeroed(length);
        let mut parts = vec![(0, length)];
        while let Some((at, length)) = parts.pop() {
            let offset = start + at as u64;
            match self.read_all(offset, IoBuf::zeroed(length)).await {
                Ok(part) => put(&mut whole, at, &part, self.name())?,
                Err(error) if !self.may_salvage(&error) => return Err(error),
                Err(error) if length <= SECTOR => {
                    tracing::warn!(offset, %error, "cannot be read, and is copied as zeroes");
                }
                Err(_) => {
                    let half = (length / 2).next_multiple_of(SECTOR);
                    parts.extend([(at + half, length - half), (at, half)]);
                }
            }
        }
        Ok(whole)
    }

    /// The last disk's name, for what cannot happen.
    fn name(&self) -> &Path {
        self.disks.last().map_or(Path::new(""), |(_, disk)| disk.name())
    }

    async fn read_all(&self, offset: u64, mut rest: IoBuf) -> Result<IoBuf> {
        let mut whole = IoBuf::empty();
        let mut at = offset;
        while !rest.is_empty() {
            let found = self.at(at);
            let (start, disk) =
                always(found, self.name(), "the sources have every byte that is copied")?;
            let within = at - start;
            let length = rest.len().min((disk.size() - within) as usize);
            let part = disk.read(within, rest.split_to(length)).await?;
            at += length as u64;
            whole.unsplit(part);
        }
        Ok(whole)
    }
}

/// Puts what was salvaged at `at` into its piece.
fn put(piece: &mut [u8], at: usize, part: &[u8], name: &Path) -> Result<()> {
    let place = piece.get_mut(at..).and_then(|rest| rest.get_mut(..part.len()));
    always(place, name, "what is salvaged of a piece lies in it")?.copy_from_slice(part);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::must_violate;

    #[test]
    fn what_was_examined_is_known() {
        let mut known = Known::default();
        must_violate(known.first(Path::new("disk")), "the status of a byte is known");
        known.runs.push_back((Content::Data, 512));
        assert_eq!(known.first(Path::new("disk")).unwrap(), (Content::Data, 512));
    }

    #[test]
    fn disks_together_have_no_more_bytes_than_one_may_have() {
        let most = i64::MAX as u64;
        assert_eq!(total_size(&[]), Ok(0));
        assert_eq!(total_size(&[most - 5, 0, 5]), Ok(most));
        let too_large = total_size(&[most - 5, 0, 6, 1]).unwrap_err();
        assert_eq!(too_large, TooLarge { index: 2, size: 6, before: most - 5 });
        assert!(too_large.to_string().contains("fewer images"), "{too_large}");
        let alone = total_size(&[u64::MAX, 1]).unwrap_err();
        assert!(!alone.to_string().contains("before it"), "{alone}");
    }

    #[test]
    fn what_is_salvaged_lies_in_its_piece() {
        let name = Path::new("image");
        let mut piece = [0; 4];
        put(&mut piece, 2, &[1, 2], name).unwrap();
        assert_eq!(piece, [0, 0, 1, 2]);
        let within = "what is salvaged of a piece lies in it";
        must_violate(put(&mut piece, 3, &[1, 2], name), within);
        must_violate(put(&mut piece, 5, &[], name), within);
    }
}
