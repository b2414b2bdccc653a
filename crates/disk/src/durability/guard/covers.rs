//! Ranges of newly written data, and what is in them.

use event_listener::Event;
use isobath_qcow2::journal::Crc32c;
use isobath_storage::IoBuf;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Data that one record may vouch for, in bytes: a recovery reads it all.
const MAX_COVERED: u64 = 32 << 20;

/// A range of the data file that holds newly written guest data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cover {
    pub(crate) range: Range<u64>,
    /// CRC32C of what was written there; `None` if it must be read back.
    pub(crate) crc: Option<u32>,
}

/// What one record vouches for.
#[derive(Default)]
pub(super) struct Covers {
    /// By start: end, and CRC32C unless it must be read back.
    pub(super) ranges: BTreeMap<u64, (u64, Option<u32>)>,
    bytes: u64,
    /// There is too much: the data is made durable before the record instead.
    pub(super) too_much: bool,
    pub(super) writes: Arc<InFlight>,
}

/// Writes to ranges that the next record will vouch for.
#[derive(Default)]
pub(super) struct InFlight {
    count: AtomicU64,
    ended: Event,
}

impl InFlight {
    /// Waits for all of them.
    pub(super) async fn ended(&self) {
        loop {
            let ended = self.ended.listen();
            if self.count.load(Ordering::SeqCst) == 0 {
                return;
            }
            ended.await;
        }
    }
}

/// A write to such a range; ends when dropped.
pub(crate) struct Busy(Option<Arc<InFlight>>);

impl Busy {
    /// A write to no such range.
    pub(super) fn none() -> Self {
        Self(None)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        if let Some(writes) = &self.0
            && writes.count.fetch_sub(1, Ordering::SeqCst) == 1
        {
            writes.ended.notify(usize::MAX);
        }
    }
}

impl Covers {
    pub(super) fn add(&mut self, cover: &Cover) {
        if self.too_much || cover.range.is_empty() {
            return;
        }
        let Range { mut start, mut end } = cover.range.clone();
        let mut crc = cover.crc;
        for (at, (until, _)) in self.overlapping(&(start..end)) {
            self.ranges.remove(&at);
            self.bytes -= until - at;
            // Written twice: only what is there now counts.
            crc = if (at, until) == (start, end) { crc } else { None };
            (start, end) = (start.min(at), end.max(until));
        }
        self.bytes += end - start;
        self.ranges.insert(start, (end, crc));
        if self.bytes > MAX_COVERED {
            self.too_much = true;
            self.ranges.clear();
        }
    }

    /// Says that a write to a range begins: what it overlaps must be read back.
    pub(super) fn touch(&mut self, range: &Range<u64>) -> Busy {
        let found = self.overlapping(range);
        if found.is_empty() {
            return Busy(None);
        }
        for (at, (end, _)) in found {
            self.ranges.insert(at, (end, None));
        }
        self.writes.count.fetch_add(1, Ordering::SeqCst);
        Busy(Some(Arc::clone(&self.writes)))
    }

    /// Vouches no more for a range; what lies beside it in the same covers is read back.
    pub(super) fn cut_out(&mut self, range: &Range<u64>) {
        for (at, (end, _)) in self.overlapping(range) {
            self.ranges.remove(&at);
            self.bytes -= end - at;
            for rest in [at..range.start.max(at), range.end.min(end)..end] {
                self.add(&Cover { range: rest, crc: None });
            }
        }
    }

    pub(super) fn forget(&mut self, range: &Range<u64>) {
        for (at, (end, _)) in self.overlapping(range) {
            self.ranges.remove(&at);
            self.bytes -= end - at;
        }
    }

    pub(super) fn overlapping(&self, range: &Range<u64>) -> Vec<(u64, (u64, Option<u32>))> {
        let before = self.ranges.range(..range.start).next_back();
        let before = before.filter(|(_, (end, _))| *end > range.start);
        let inside = self.ranges.range(range.clone());
        before.into_iter().chain(inside).map(|(at, cover)| (*at, *cover)).collect()
    }
}

/// Covers of `bufs`, written at `at`, one for each cluster of `size` bytes. Checksums are only made
/// when `checked`.
pub(crate) fn covers(at: u64, bufs: &[IoBuf], size: u64, checked: bool) -> Vec<Cover> {
    let mut covers = Vec::new();
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
                covers.push(Cover { range: start..place, crc: checked.then(|| crc.finish()) });
                start = place;
            }
        }
    }
    if start < place {
        covers.push(Cover { range: start..place, crc: checked.then(|| crc.finish()) });
    }
    covers
}
