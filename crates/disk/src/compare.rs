//! Comparing two disks.

use crate::copy::is_zero;
use crate::device::BlockStatus;
use crate::disk::Disk;
use isobath_image::{DiskError, Result, violated};
use isobath_storage::{Host, IoBuf};
use isobath_sync::AsyncMutex;
use isobath_sync::order::in_order;
use parking_lot::Mutex as SyncMutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Bytes compared at once.
const CHUNK: u64 = 1 << 20;
/// Guest bytes whose status is queried at a time.
const WINDOW: u64 = 1 << 30;
const RUNS: usize = 4096;
/// Differences are reported by sector.
const SECTOR: usize = 512;
const PAGE: usize = 4096;

/// How two disks differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Difference {
    /// The block status at this byte offset (strict mode).
    Status(u64),
    /// The contents of the sector at this byte offset.
    Content(u64),
}

impl Difference {
    fn offset(self) -> u64 {
        match self {
            Self::Status(offset) | Self::Content(offset) => offset,
        }
    }
}

/// Why a comparison failed.
#[derive(Debug)]
pub enum CompareError {
    /// The block status of one of the disks (0 or 1) cannot be read.
    Status(usize, DiskError),
    /// One of the disks (0 or 1) cannot be read at this offset.
    Read(usize, u64, DiskError),
}

/// A comparison of two disks, done by any number of concurrent [`work`](Self::work)ers. Ranges known to be zero in both
/// are not read. A shorter disk is treated as padded with zeroes.
pub struct Compare<H: Host> {
    sides: [Side<H>; 2],
    strict: bool,
    end: u64,
    next: AsyncMutex<u64>,
    first: SyncMutex<Option<Difference>>,
    stopped: AtomicBool,
    done: AtomicU64,
}

struct Side<H: Host> {
    disk: Arc<Disk<H>>,
    /// The known status of the bytes from the current offset on.
    runs: AsyncMutex<VecDeque<BlockStatus>>,
}

struct Piece {
    offset: u64,
    length: u64,
    /// Which disks must be read; the other is zero.
    read: [bool; 2],
}

impl<H: Host> Side<H> {
    /// The run at `offset`; past the end of the disk, zeroes.
    async fn status(&self, offset: u64, end: u64) -> Result<BlockStatus> {
        let size = self.disk.size();
        if offset >= size {
            let length = end - offset;
            let absent = BlockStatus {
                length,
                allocated: false,
                zero: true,
                compressed: false,
                depth: 0,
                host: None,
            };
            return Ok(absent);
        }
        let mut runs = self.runs.lock().await;
        if runs.is_empty() {
            let window = WINDOW.min(size - offset);
            *runs = self.disk.block_status(offset, window, RUNS).await?.into();
        }
        runs.front().copied().ok_or(DiskError::OutOfRange { offset, length: 1, size })
    }

    async fn pass(&self, offset: u64, length: u64) {
        if offset >= self.disk.size() {
            return;
        }
        let mut runs = self.runs.lock().await;
        let Some(front) = runs.front_mut() else {
            violated("the status of what is compared is known");
        };
        let Some(left) = front.length.checked_sub(length) else {
            violated("what is compared ends within a run of each disk");
        };
        front.length = left;
        front.host = front.host.map(|(layer, host)| (layer, host + length));
        if left == 0 {
            runs.pop_front();
        }
    }
}

/// The first sector that is not zero.
fn first_data(bytes: &[u8]) -> Option<usize> {
    let sector = |part: &[u8]| part.chunks(SECTOR).position(|s| s.iter().any(|byte| *byte != 0));
    let page = bytes.chunks(PAGE).position(|page| !is_zero(page))?;
    sector(bytes.get(page * PAGE..)?).map(|sector| sector + page * PAGE / SECTOR)
}

impl<H: Host> Compare<H> {
    /// Compares `one` and `other`; `strict` also compares their block status.
    pub fn new(one: Arc<Disk<H>>, other: Arc<Disk<H>>, strict: bool) -> Self {
        let end = one.size().max(other.size());
        let sides = [one, other].map(|disk| Side { disk, runs: AsyncMutex::default() });
        Self {
            sides,
            strict,
            end,
            next: AsyncMutex::new(0),
            first: SyncMutex::new(None),
            stopped: AtomicBool::new(false),
            done: AtomicU64::new(0),
        }
    }

    /// Bytes compared so far, and in total.
    pub fn progress(&self) -> (u64, u64) {
        (self.done.load(Ordering::Relaxed), self.end)
    }

    /// The first difference, once all workers have ended without error.
    pub fn difference(&self) -> Option<Difference> {
        *self.first.lock()
    }

    fn found(&self, difference: Difference) {
        let mut first = self.first.lock();
        if first.is_none_or(|known| difference.offset() < known.offset()) {
            *first = Some(difference);
        }
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// Counts bytes that were compared.
    fn add(&self, length: u64) {
        if self.done.fetch_add(length, Ordering::Relaxed) + length > self.end {
            violated("no byte is compared twice");
        }
    }

    /// Takes part in the comparison until it is done or a difference is found.
    ///
    /// # Errors
    /// If a disk cannot be read; the others then stop too.
    pub async fn work(&self) -> std::result::Result<(), CompareError> {
        let result = in_order(self.compare_pieces()).await;
        if result.is_err() {
            self.stopped.store(true, Ordering::Relaxed);
        }
        result
    }

    async fn compare_pieces(&self) -> std::result::Result<(), CompareError> {
        // Reused for every piece: allocating memory costs more than reading into it.
        let mut spare = [IoBuf::empty(), IoBuf::empty()];
        while let Some(piece) = self.next_piece().await? {
            let mut bufs = [IoBuf::empty(), IoBuf::empty()];
            for side in 0..2 {
                if spare[side].is_empty() && piece.read[side] {
                    spare[side] = IoBuf::zeroed(CHUNK as usize);
                }
                if piece.read[side] {
                    let buf = spare[side].split_to(piece.length as usize);
                    bufs[side] = self.read(side, piece.offset, buf).await?;
                }
            }
            let [mut one, mut other] = bufs;
            let sector = match piece.read {
                [true, true] if *one == *other => None,
                [true, true] => {
                    one.chunks(SECTOR).zip(other.chunks(SECTOR)).position(|(a, b)| a != b)
                }
                [true, false] => first_data(&one),
                [false, _] => first_data(&other),
            };
            if let Some(sector) = sector {
                let within = (sector * SECTOR) as u64;
                if within >= piece.length {
                    violated("a difference lies in what was compared");
                }
                self.found(Difference::Content(piece.offset + within));
            }
            self.add(piece.length);
            let [rest, other_rest] = spare;
            one.unsplit(rest);
            other.unsplit(other_rest);
            spare = [one, other];
        }
        Ok(())
    }

    async fn read(
        &self,
        side: usize,
        offset: u64,
        buf: IoBuf,
    ) -> std::result::Result<IoBuf, CompareError> {
        let read = self.sides[side].disk.read(offset, buf).await;
        read.map_err(|error| CompareError::Read(side, offset, error))
    }

    /// The next piece that must be read.
    async fn next_piece(&self) -> std::result::Result<Option<Piece>, CompareError> {
        let mut next = self.next.lock().await;
        loop {
            let offset = *next;
            if offset >= self.end || self.stopped.load(Ordering::Relaxed) {
                return Ok(None);
            }
            let mut runs = [None; 2];
            for (number, side) in self.sides.iter().enumerate() {
                let run = side.status(offset, self.end).await;
                runs[number] = Some(run.map_err(|error| CompareError::Status(number, error))?);
            }
            let [Some(one), Some(other)] = runs else { return Ok(None) };
            let alike = |run: &BlockStatus| (run.allocated, run.zero, run.host.is_some());
            let shared = self.sides.iter().all(|side| offset < side.disk.size());
            if self.strict && shared && alike(&one) != alike(&other) {
                self.found(Difference::Status(offset));
                return Ok(None);
            }
            let known = one.length.min(other.length);
            let read = [!one.zero, !other.zero];
            // If one disk has zeroes and the other data, only the other is read.
            let length = if read == [false; 2] {
                known
            } else {
                known.min(offset - offset % CHUNK + CHUNK - offset)
            };
            if length == 0 || length > self.end - offset {
                violated("what is compared has bytes of the disks, and no others");
            }
            for side in &self.sides {
                side.pass(offset, length).await;
            }
            *next = offset + length;
            if read == [false; 2] {
                self.add(length);
                continue;
            }
            return Ok(Some(Piece { offset, length, read }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{SIZE, careless_disk, disk, must_panic};
    use futures_executor::block_on;
    use isobath_storage::memory::MemoryHost;
    use isobath_storage_test::careless::Slip;

    fn compare() -> Compare<MemoryHost> {
        Compare::new(Arc::new(disk()), Arc::new(disk()), false)
    }

    fn zeroes(length: u64) -> BlockStatus {
        let (allocated, zero, compressed, depth, host) = (false, true, false, 1, None);
        BlockStatus { length, allocated, zero, compressed, depth, host }
    }

    #[test]
    fn what_is_compared_is_known_of_both() {
        let compare = compare();
        let [side, _] = &compare.sides;
        let pass = |length| block_on(side.pass(0, length));
        must_panic(|| pass(512), "the status of what is compared is known");
        block_on(side.runs.lock()).push_back(zeroes(1024));
        pass(512);
        must_panic(|| pass(513), "what is compared ends within a run of each disk");
    }

    #[test]
    fn what_is_compared_is_in_the_disks() {
        let within = "what is compared has bytes of the disks, and no others";
        for length in [0, SIZE + 512] {
            let compare = compare();
            for side in &compare.sides {
                block_on(side.runs.lock()).push_back(zeroes(length));
            }
            must_panic(|| block_on(Box::pin(compare.work())), within);
        }
    }

    #[test]
    fn bytes_are_compared_once() {
        let compare = compare();
        compare.done.store(512, Ordering::Relaxed);
        must_panic(|| block_on(Box::pin(compare.work())), "no byte is compared twice");
    }

    #[test]
    fn a_difference_is_in_what_was_compared() {
        let (one, slips) = careless_disk();
        let ones = vec![0; CHUNK as usize];
        block_on(Box::pin(one.write(0, IoBuf::copy_of(&ones)))).unwrap();
        let (other, _) = careless_disk();
        let compare = Compare::new(Arc::new(one), Arc::new(other), false);
        slips.set(Slip::LongRead);
        let work = || block_on(Box::pin(compare.work()));
        must_panic(work, "a difference lies in what was compared");
    }
}
