//! Ranges of newly written data, and their checksums.

use crate::{MOST_CHECKED, violated};
use isobath_qcow2::Crc32c;
use isobath_storage::IoBuf;
use isobath_sync::{Invariants, WaitGroup};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// The most bytes of data that one record's checksums may cover: a recovery reads all of it.
const MAX_CHECKSUMMED: u64 = 32 << 20;

/// A range of the data file that holds newly written guest data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ChecksummedRange {
    /// Bytes of the host file.
    pub range: Range<u64>,
    /// CRC32C of what was written there; `None` if it must be read back.
    pub crc: Option<u32>,
    /// Where the checksum is, or could be.
    pub holder: ChecksumHolder,
}

/// Where the checksum of newly written data is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChecksumHolder {
    /// In the journal's next record, which contains the mapping.
    Record,
    /// Nowhere: none is needed, because before the write the place already held what the guest had there.
    Nobody,
    /// In the record embedded in its lead block.
    Lead,
}

/// Data that was written to newly allocated places and that the log does not know of yet.
#[must_use = "no entry may refer to it before the data journal has checksums of it"]
#[derive(Debug)]
pub struct Written {
    /// Where it is in the file.
    pub(crate) place: Range<u64>,
    /// What the next record must have checksums of.
    pub(crate) checksums: Vec<ChecksummedRange>,
}

/// A checksummed range.
#[derive(Clone, Copy, Debug)]
pub(super) struct Checksum {
    pub(super) end: u64,
    /// CRC32C unless it must be read back.
    pub(super) crc: Option<u32>,
    pub(super) holder: ChecksumHolder,
}

/// The ranges that one record's checksums cover.
#[derive(Default)]
pub(super) struct ChecksummedRanges {
    /// By start.
    pub(super) ranges: BTreeMap<u64, Checksum>,
    bytes: u64,
    /// The checksum in an embedded record is no longer valid.
    pub(super) broken: bool,
    /// There is too much data: it is made durable before the record instead.
    pub(super) too_much: bool,
    pub(super) writes: Arc<WaitGroup>,
}

/// A write that a commit waits for; ends when dropped.
pub(crate) struct Busy(Option<Arc<WaitGroup>>);

impl Busy {
    /// Starts one more.
    pub(crate) fn on(writes: &Arc<WaitGroup>) -> Self {
        writes.begin();
        Self(Some(Arc::clone(writes)))
    }

    /// A write that no commit waits for.
    pub(super) fn none() -> Self {
        Self(None)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        if let Some(writes) = &self.0 {
            writes.end();
        }
    }
}

impl Invariants for ChecksummedRanges {
    fn check_invariants(&self) {
        let mut end = 0;
        let mut bytes = 0;
        for (&at, range) in self.ranges.iter().take(MOST_CHECKED) {
            if at < end {
                violated("checksummed ranges do not overlap");
            }
            if range.end <= at {
                violated("a checksummed range has bytes");
            }
            bytes += range.end - at;
            end = range.end;
        }
        if self.ranges.len() <= MOST_CHECKED && bytes != self.bytes {
            violated("the bytes that need checksums are those of the ranges");
        }
        if self.too_much && !self.ranges.is_empty() {
            violated("data without checksums is durable before the record");
        }
    }
}

impl ChecksummedRanges {
    pub(super) fn add(&mut self, checksum: &ChecksummedRange) {
        if self.too_much || checksum.range.is_empty() {
            return;
        }
        self.put(checksum);
        if self.bytes > MAX_CHECKSUMMED {
            self.give_up();
        }
    }

    /// From now on no range has a checksum: all data is made durable before the record.
    pub(super) fn give_up(&mut self) {
        self.too_much = true;
        self.ranges.clear();
        self.bytes = 0;
    }

    fn put(&mut self, checksum: &ChecksummedRange) {
        let Range { mut start, mut end } = checksum.range.clone();
        let mut crc = checksum.crc;
        for (at, before) in self.overlapping(&(start..end)) {
            self.take_out(at, &before);
            // Written twice: only the current contents count.
            crc = if (at, before.end) == (start, end) { crc } else { None };
            (start, end) = (start.min(at), end.max(before.end));
        }
        self.bytes += end - start;
        self.ranges.insert(start, Checksum { end, crc, holder: checksum.holder });
    }

    fn take_out(&mut self, at: u64, checksummed: &Checksum) {
        self.ranges.remove(&at);
        self.bytes -= checksummed.end - at;
    }

    /// Notes that a write to a range begins: checksummed data that it overlaps must be read back.
    pub(super) fn touch(&mut self, range: &Range<u64>) -> Busy {
        let found = self.overlapping(range);
        if found.is_empty() {
            return Busy(None);
        }
        for (at, checksummed) in found {
            self.broken |= checksummed.holder == ChecksumHolder::Lead;
            self.ranges.insert(at, Checksum { crc: None, ..checksummed });
        }
        Busy::on(&self.writes)
    }

    /// Removes a range; the rest of a partly removed checksummed range is read back.
    pub(super) fn cut_out(&mut self, range: &Range<u64>) {
        self.broken |=
            self.overlapping(range).iter().any(|(_, each)| each.holder == ChecksumHolder::Lead);
        self.forget(range);
    }

    /// Forgets a range; the rest of a partly forgotten checksummed range is read back.
    pub(super) fn forget(&mut self, range: &Range<u64>) {
        for (at, checksummed) in self.overlapping(range) {
            let Checksum { end, holder, .. } = checksummed;
            self.take_out(at, &checksummed);
            for rest in [at..range.start.max(at), range.end.min(end)..end] {
                self.add(&ChecksummedRange { range: rest, crc: None, holder });
            }
        }
    }

    /// Leaves only the ranges whose checksums are in lead blocks.
    pub(super) fn leave_leads(&mut self) {
        let bytes = &mut self.bytes;
        self.ranges.retain(|at, checksummed| {
            let stays = checksummed.holder == ChecksumHolder::Lead;
            *bytes -= if stays { 0 } else { checksummed.end - at };
            stays
        });
    }

    pub(super) fn overlapping(&self, range: &Range<u64>) -> Vec<(u64, Checksum)> {
        let before = self.ranges.range(..range.start).next_back();
        let before = before.filter(|(_, checksummed)| checksummed.end > range.start);
        let inside = self.ranges.range(range.clone());
        before.into_iter().chain(inside).map(|(at, checksummed)| (*at, *checksummed)).collect()
    }
}

/// The checksummed ranges of `bufs`, written at `at`, one for each cluster of `size` bytes. Checksums are computed only
/// if `checked`.
pub(crate) fn checksummed(
    at: u64,
    bufs: &[IoBuf],
    size: u64,
    checked: bool,
) -> Vec<ChecksummedRange> {
    let mut checksums = Vec::new();
    let checksum = |range, crc: Crc32c| {
        let crc = checked.then(|| crc.finish());
        ChecksummedRange { range, crc, holder: ChecksumHolder::Record }
    };
    let mut crc = Crc32c::default();
    let (mut start, mut place) = (at, at);
    for buf in bufs {
        let mut rest: &[u8] = buf;
        while !rest.is_empty() {
            let room = size - place % size;
            let (piece, more) = rest.split_at(rest.len().min(room as usize));
            if checked {
                crc.update(piece);
            }
            place += piece.len() as u64;
            rest = more;
            if place.is_multiple_of(size) {
                let crc = std::mem::take(&mut crc);
                checksums.push(checksum(start..place, crc));
                start = place;
            }
        }
    }
    if start < place {
        checksums.push(checksum(start..place, crc));
    }
    checksums
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broken::assert_violated;

    #[test]
    fn broken_ranges_are_noticed() {
        let ranges = || {
            let mut ranges = ChecksummedRanges::default();
            let holder = ChecksumHolder::Record;
            ranges.add(&ChecksummedRange { range: 0..8, crc: None, holder });
            ranges.add(&ChecksummedRange { range: 8..16, crc: None, holder });
            ranges
        };
        let of = |at: u64, end: u64| {
            move |ranges: &mut ChecksummedRanges| {
                let holder = ChecksumHolder::Record;
                ranges.ranges.insert(at, Checksum { end, crc: None, holder });
            }
        };
        assert_violated("checksummed ranges do not overlap", ranges(), of(4, 8));
        assert_violated("a checksummed range has bytes", ranges(), of(16, 16));
        assert_violated("are those of the ranges", ranges(), of(16, 24));
        let too_much = |ranges: &mut ChecksummedRanges| ranges.too_much = true;
        assert_violated("is durable before the record", ranges(), too_much);
    }
}

#[cfg(all(test, loom))]
mod interleavings {
    use super::*;
    use isobath_sync::{Cell, Mutex, explore, wait};

    struct DataJournal {
        writes: Arc<WaitGroup>,
        /// Writes that began before everything else, and the data that they write.
        busy: [(Mutex<Option<Busy>>, Cell<u8>); 2],
    }

    fn guard() -> DataJournal {
        let writes = Arc::<WaitGroup>::default();
        let write = |_| (Mutex::new(Some(Busy::on(&writes))), Cell::new(0));
        DataJournal { busy: [0, 1].map(write), writes }
    }

    fn end(guard: &DataJournal, number: usize) {
        let (busy, data) = &guard.busy[number];
        data.set(1);
        drop(busy.lock().take());
    }

    fn commit(guard: &DataJournal) {
        wait(guard.writes.ended());
        assert!(guard.busy.iter().all(|(_, data)| data.get() == 1));
    }

    #[test]
    fn a_commit_waits_for_all_writes() {
        let tasks: &[fn(&DataJournal)] = &[|g| end(g, 0), |g| end(g, 1), commit];
        explore("Busy, two writes and a commit", 3, guard, tasks, |_| ());
    }

    #[test]
    fn two_commits_wait() {
        let tasks: &[fn(&DataJournal)] = &[|g| (0..2).for_each(|n| end(g, n)), commit, commit];
        explore("Busy, two writes and two commits", 2, guard, tasks, |_| ());
    }
}
