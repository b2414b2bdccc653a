//! Giving an image another backing file, after which its disk reads as before.

use crate::copy::is_zero;
use crate::disk::Disk;
use crate::write::Surplus;
use isobath_chain::chain::LayerIndex;
use isobath_chain::map::{Extent, Source};
use isobath_image::sabotage::{self, Sabotage};
use isobath_image::{Result, invariant};
use isobath_qcow2::CompressedCluster;
use isobath_storage::{FileId, Host, IoBuf, Storage, StorageExt};
use isobath_sync::AsyncMutex;
use isobath_sync::order::in_order;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Bytes whose extents are looked up at a time.
const WINDOW: u64 = 64 << 20;
/// Bytes compared and copied at once.
const CHUNK: u64 = 1 << 20;

/// A change of a disk's backing file, done by any number of concurrent [`work`](Self::work)ers on any threads, then
/// [finished](Self::finish).
///
/// What differs below the disk's active layer is written to it first. Bytes that both chains take from the same place
/// of the same file are not read. A rebase that is interrupted leaves the old backing file, and a disk that reads as
/// before.
pub struct Rebase<H: Host> {
    disk: Arc<Disk<H>>,
    /// The new backing file, as a disk; without one, what the active layer lacks will read as zeroes.
    below: Option<Arc<Disk<H>>>,
    compressed: bool,
    end: u64,
    next: AsyncMutex<u64>,
    stopped: AtomicBool,
    done: AtomicU64,
    copied: AtomicU64,
}

/// Where bytes come from; equal if they are the same bytes.
#[derive(PartialEq, Eq)]
enum Origin {
    Zero,
    /// Bytes of a file, from this offset in it on; as they are, or decrypted.
    Data(FileId, bool, u64),
    /// A cluster of an image that begins there in the file.
    Compressed(FileId, u64, CompressedCluster),
    /// It must be read.
    Unknown,
}

/// A part of a disk whose two origins have one length.
struct Piece {
    range: Range<u64>,
    /// The old and the new content is known to be zero.
    zero: [bool; 2],
}

impl<H: Host> Rebase<H> {
    /// The disk is open for writing, with its old backing file. With `compressed`, what is copied is compressed.
    pub fn new(disk: Arc<Disk<H>>, below: Option<Arc<Disk<H>>>, compressed: bool) -> Self {
        let end = disk.size();
        Self {
            disk,
            below,
            compressed,
            end,
            next: AsyncMutex::new(0),
            stopped: AtomicBool::new(false),
            done: AtomicU64::new(0),
            copied: AtomicU64::new(0),
        }
    }

    /// Bytes looked at, and of how many.
    pub fn progress(&self) -> (u64, u64) {
        (self.done.load(Ordering::Relaxed), self.end)
    }

    /// Bytes written to the active layer.
    pub fn copied(&self) -> u64 {
        self.copied.load(Ordering::Relaxed)
    }

    /// Ends the work early: the workers complete what they have started.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// Takes part in the work until it is done.
    ///
    /// # Errors
    /// If a file cannot be read, or the active layer cannot be written; the other workers then stop too.
    pub async fn work(&self) -> Result<()> {
        let result = in_order(self.copy_windows()).await;
        if result.is_err() {
            self.stop();
        }
        result
    }

    /// Makes what was copied durable, then changes the header: the backing file's name and format, or none.
    ///
    /// # Errors
    /// If the storage fails, or the names do not fit the header; the old backing file then stays.
    pub async fn finish(&self, backing: Option<(&str, &str)>) -> Result<()> {
        let looked = self.done.load(Ordering::Relaxed) == self.end;
        let all = looked && !self.stopped.load(Ordering::Relaxed);
        invariant(all, self.disk.name(), "a backing file changes once all of the disk was seen")?;
        if !sabotage::is(Sabotage::UnflushedRebase) {
            self.disk.flush().await?;
        }
        self.disk.set_backing(backing).await
    }

    async fn copy_windows(&self) -> Result<()> {
        loop {
            let window = {
                let mut next = self.next.lock().await;
                let start = *next;
                if start >= self.end || self.stopped.load(Ordering::Relaxed) {
                    return Ok(());
                }
                *next = self.end.min(start + WINDOW);
                start..*next
            };
            self.copy_window(window.clone()).await?;
            let length = window.end - window.start;
            let before = self.done.fetch_add(length, Ordering::Relaxed);
            let once = before + length <= self.end;
            invariant(once, self.disk.name(), "each part of a rebased disk is seen once")?;
        }
    }

    async fn copy_window(&self, window: Range<u64>) -> Result<()> {
        let pieces = self.pieces(window.clone()).await?;
        if cfg!(debug_assertions) {
            check_pieces(pieces.iter().map(|piece| &piece.range), &window, self.disk.name())?;
        }
        for piece in pieces {
            let mut at = piece.range.start;
            while at < piece.range.end && !self.stopped.load(Ordering::Relaxed) {
                let end = piece.range.end.min(at / CHUNK * CHUNK + CHUNK);
                for range in self.differences(at..end, piece.zero).await? {
                    self.take(range).await?;
                }
                at = end;
            }
        }
        Ok(())
    }

    /// The parts of a window that the active layer lacks and whose bytes may change.
    async fn pieces(&self, window: Range<u64>) -> Result<Vec<Piece>> {
        let active = self.disk.active_index();
        let old = self.extents(&self.disk, window.clone()).await?;
        let new = match &self.below {
            Some(below) => self.extents(below, window.clone()).await?,
            None => Vec::new(),
        };
        let mut pieces: Vec<Piece> = Vec::new();
        let mut new = new.into_iter().peekable();
        for extent in old {
            if extent.source.layer() == Some(active) {
                continue;
            }
            let mut at = extent.guest;
            let end = extent.guest + extent.length;
            while at < end {
                while new.next_if(|new| new.guest + new.length <= at).is_some() {}
                // Past its end the new backing file reads as zeroes.
                let (after, until) = match (new.peek(), &self.below) {
                    (Some(found), Some(below)) => {
                        (origin(below, found, at), found.guest + found.length)
                    }
                    _ => (Origin::Zero, end),
                };
                let next = until.min(end);
                let before = origin(&self.disk, &extent, at);
                if before != after || before == Origin::Unknown {
                    let zero = [before == Origin::Zero, after == Origin::Zero];
                    match pieces.last_mut() {
                        Some(last) if last.range.end == at && last.zero == zero => {
                            last.range.end = next;
                        }
                        _ => pieces.push(Piece { range: at..next, zero }),
                    }
                }
                at = next;
            }
        }
        Ok(pieces)
    }

    /// The extents of a disk in a range, up to its end.
    async fn extents(&self, disk: &Disk<H>, range: Range<u64>) -> Result<Vec<Extent>> {
        let end = range.end.min(disk.size());
        let mut found = Vec::new();
        if range.start < end {
            let _pass = disk.readers.epoch.enter();
            found.extend(disk.extents(range.start..end).await?);
        }
        Ok(found)
    }

    /// Where the two chains differ in a range.
    async fn differences(&self, range: Range<u64>, zero: [bool; 2]) -> Result<Vec<Range<u64>>> {
        let length = (range.end - range.start) as usize;
        let old = if zero[0] {
            None
        } else {
            Some(self.disk.read(range.start, IoBuf::zeroed(length)).await?)
        };
        let new = match &self.below {
            Some(below) if !zero[1] => Some(padded(below, &range).await?),
            _ => None,
        };
        let whole = [&old, &new].into_iter().flatten().all(|bytes| bytes.len() == length);
        invariant(whole, self.disk.name(), "two disks are compared byte by byte")?;
        let step = u64::from(self.disk.preferred_block());
        let mut found: Vec<Range<u64>> = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let next = range.end.min(at / step * step + step);
            let part = (at - range.start) as usize..(next - range.start) as usize;
            let same = match (&old, &new) {
                (Some(old), Some(new)) => old[part.clone()] == new[part],
                (Some(one), None) | (None, Some(one)) => is_zero(&one[part]),
                (None, None) => true,
            };
            if !same {
                match found.last_mut() {
                    Some(last) if last.end == at => last.end = next,
                    _ => found.push(at..next),
                }
            }
            at = next;
        }
        Ok(found)
    }

    /// Brings whole clusters into the active layer as they read now.
    async fn take(&self, range: Range<u64>) -> Result<()> {
        let cluster = self.disk.active_qcow2().map_or(1, |qcow2| qcow2.geometry.cluster_size());
        let range = range.start / cluster * cluster..range.end.next_multiple_of(cluster);
        let all = Surplus {
            start: LayerIndex::new(0),
            end: self.disk.active_index(),
            // Zeroes are written, too: something else may be below them.
            seen: 0,
            below: if self.below.is_some() { u64::MAX } else { 0 },
        };
        if self.compressed && self.compress(&range).await? {
            return Ok(());
        }
        let pulled = self.disk.or_mark_corrupt(self.disk.pull(all, range).await).await?;
        self.copied.fetch_add(pulled.copied + pulled.cloned, Ordering::Relaxed);
        Ok(())
    }

    /// Writes whole clusters of which the active layer has nothing as compressed ones; `false` if it has something of
    /// them.
    async fn compress(&self, range: &Range<u64>) -> Result<bool> {
        let Some(qcow2) = self.disk.active_qcow2() else { return Ok(false) };
        let cluster = qcow2.geometry.cluster_size();
        let end = range.end.min(self.disk.size());
        let active = self.disk.active_index();
        let extents = self.extents(&self.disk, range.start..end).await?;
        let held = |extent: &Extent| extent.source.layer() == Some(active);
        if range.end > end || extents.iter().any(held) {
            return Ok(false);
        }
        let mut at = range.start;
        while at < range.end {
            let buf = self.disk.read(at, IoBuf::zeroed(cluster as usize)).await?;
            if is_zero(&buf) {
                return Ok(false);
            }
            self.disk.write_compressed(at, buf).await?;
            self.copied.fetch_add(cluster, Ordering::Relaxed);
            at += cluster;
        }
        Ok(true)
    }
}

/// Checks that ranges have bytes, are in order, do not overlap, and lie in a window.
fn check_pieces<'a>(
    ranges: impl Iterator<Item = &'a Range<u64>>,
    window: &Range<u64>,
    name: &Path,
) -> Result<()> {
    let mut end = window.start;
    for range in ranges {
        let follows = end <= range.start && range.start < range.end && range.end <= window.end;
        invariant(follows, name, "the pieces of a window are in order, and in it")?;
        end = range.end;
    }
    Ok(())
}

/// Where the bytes of an extent from `at` on come from.
fn origin<H: Host>(disk: &Disk<H>, extent: &Extent, at: u64) -> Origin {
    match extent.source {
        Source::Absent | Source::Zero(_) => Origin::Zero,
        Source::Data { layer, host, .. } => match disk.chain.get(layer) {
            Some(layer) if layer.as_foreign().is_none() => {
                let data = layer.data();
                let start = data.capabilities().begins_at + host;
                Origin::Data(data.id(), layer.is_encrypted(), start + (at - extent.guest))
            }
            _ => Origin::Unknown,
        },
        Source::Compressed { layer, cluster } => match disk.chain.get(layer) {
            Some(layer) => {
                let storage = layer.storage();
                Origin::Compressed(storage.id(), storage.capabilities().begins_at, cluster)
            }
            None => Origin::Unknown,
        },
        Source::Invalid(_) => Origin::Unknown,
    }
}

/// A disk's bytes; zeroes past its end.
async fn padded<H: Host>(disk: &Disk<H>, range: &Range<u64>) -> Result<IoBuf> {
    let length = (range.end - range.start) as usize;
    let there = disk.size().clamp(range.start, range.end) - range.start;
    let mut buf = IoBuf::zeroed(length);
    if there > 0 {
        let part = buf.split_to(there as usize);
        let mut part = disk.read(range.start, part).await?;
        part.unsplit(buf);
        buf = part;
    }
    Ok(buf)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{SIZE, careless_disk, chain_of, must_violate};
    use futures_executor::block_on;
    use isobath_storage::memory::MemoryHost;
    use isobath_storage_test::careless::Slip;

    fn rebase() -> Rebase<MemoryHost> {
        Rebase::new(Arc::new(chain_of(2)), None, false)
    }

    #[test]
    fn a_backing_file_changes_at_the_end() {
        let all = "a backing file changes once all of the disk was seen";
        let early = rebase();
        must_violate(block_on(Box::pin(early.finish(None))), all);
        let stopped = rebase();
        block_on(Box::pin(stopped.work())).unwrap();
        stopped.stop();
        must_violate(block_on(Box::pin(stopped.finish(None))), all);
        let done = rebase();
        block_on(Box::pin(done.work())).unwrap();
        block_on(Box::pin(done.finish(None))).unwrap();
    }

    #[test]
    fn each_part_is_seen_once() {
        let rebase = rebase();
        rebase.done.store(SIZE, Ordering::Relaxed);
        let once = "each part of a rebased disk is seen once";
        must_violate(block_on(Box::pin(rebase.work())), once);
    }

    #[test]
    fn pieces_are_in_order() {
        let check =
            |ranges: &[Range<u64>]| check_pieces(ranges.iter(), &(10..20), Path::new("disk"));
        check(&[]).unwrap();
        check(&[10..11, 11..15, 18..20]).unwrap();
        let ordered = "the pieces of a window are in order, and in it";
        must_violate(check(&[9..11, 12..13]), ordered);
        must_violate(check(&[10..12, 11..13]), ordered);
        must_violate(check(&[10..10, 11..12]), ordered);
        must_violate(check(&[10..11, 19..21]), ordered);
    }

    #[test]
    fn disks_are_compared_byte_by_byte() {
        let (disk, slips) = careless_disk();
        block_on(Box::pin(disk.write(0, IoBuf::copy_of(&[1; 4096])))).unwrap();
        let rebase = Rebase::new(Arc::new(disk), None, false);
        let compare = || block_on(Box::pin(rebase.differences(0..4096, [false, true])));
        compare().unwrap();
        slips.set(Slip::ShortRead);
        must_violate(compare(), "two disks are compared byte by byte");
    }
}
