//! Concatenated disks.

use crate::device::BlockStatus;
use crate::disk::Disk;
use isobath_image::{Result, always};
use isobath_storage::{Host, IoBuf};
use isobath_sync::AsyncMutex;
use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;

/// Guest bytes whose status is queried at once.
const WINDOW: u64 = 1 << 30;
const RUNS: usize = 4096;

/// How a copy treats a run of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// Must be read.
    Data,
    /// Zeroes.
    Zero,
    /// The target's backing file has it.
    Backing,
}

pub(super) struct Sources<H: Host> {
    /// Each with the offset at which it starts.
    disks: Vec<(u64, Arc<Disk<H>>)>,
    size: u64,
    /// The size of the target's backing file.
    backing: Option<u64>,
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

impl<H: Host> Sources<H> {
    pub(super) fn new(disks: Vec<Arc<Disk<H>>>, backing: Option<u64>) -> Self {
        let mut size = 0;
        let mut placed = Vec::with_capacity(disks.len());
        for disk in disks {
            let length = disk.size();
            placed.push((size, disk));
            size += length;
        }
        Self { disks: placed, size, backing, known: AsyncMutex::default() }
    }

    pub(super) fn size(&self) -> u64 {
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

    /// The content at `offset`, which must be below the size, and its length. Fast for ascending offsets.
    pub(super) async fn content(&self, offset: u64) -> Result<(Content, u64)> {
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

    pub(super) async fn read(&self, offset: u64, mut rest: IoBuf) -> Result<IoBuf> {
        let mut whole = IoBuf::empty();
        let mut at = offset;
        while !rest.is_empty() {
            let name = self.disks.last().map_or(Path::new(""), |(_, disk)| disk.name());
            let found = self.at(at);
            let (start, disk) = always(found, name, "the sources have every byte that is copied")?;
            let within = at - start;
            let length = rest.len().min((disk.size() - within) as usize);
            let part = disk.read(within, rest.split_to(length)).await?;
            at += length as u64;
            whole.unsplit(part);
        }
        Ok(whole)
    }
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
}
