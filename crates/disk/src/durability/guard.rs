//! Guest data that records of a journal vouch for.
//!
//! A record says what the data is that it newly refers to (a *cover*: a range of the file and its
//! CRC32C), so that data and record can be made durable by one sync: after a crash the last record
//! counts only if all of its covers hold. They must hold until the next record is durable, which
//! proves that this one was. Until then a write to a covered range does not go to its place but is
//! *kept*, in memory and as data in the next record, and goes to its place with a checkpoint (full
//! journaling, section 3.1 of the FAST '16 paper). What is kept stays so until no record that a
//! recovery would replay has it. Small writes that would make the file grow are kept too: the record's
//! space is there already.
//!
//! The order of all this is the commits'; see [`journal`](super::journal).

use event_listener::Event;
use isobath_qcow2::HostCluster;
use isobath_qcow2::journal::Crc32c;
use isobath_storage::IoBuf;
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashSet};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// Data that one record may vouch for, in bytes: a recovery reads it all.
const MAX_COVERED: u64 = 32 << 20;

/// Small writes are kept as long as there is no more than this, in bytes.
const MAX_PENDING: u64 = 128 << 10;

/// Clusters remembered as not written.
const MAX_UNWRITTEN: usize = 16 << 10;

/// In place of a record's number: the piece is of a cluster that is about to be free.
const NO_RECORD: u64 = u64::MAX;

/// A range of the data file that holds newly written guest data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cover {
    pub(crate) range: Range<u64>,
    /// CRC32C of what was written there; `None` if it must be read back.
    pub(crate) crc: Option<u32>,
}

/// What must not change in its place, and what is kept instead.
#[derive(Default)]
pub(crate) struct Guard {
    /// Whether a journal is in use.
    active: AtomicBool,
    /// Pieces kept; readers look no further while there are none.
    kept: AtomicUsize,
    /// Bytes kept for the next record.
    pending: AtomicU64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Clusters of which the file has at most parts: all that was written to them was kept at first.
    unwritten: HashSet<u64>,
    /// What the next record will vouch for.
    open: Covers,
    /// What the record under way vouches for.
    closing: Covers,
    /// What the last durable record vouches for.
    last: Covers,
    kept: BTreeMap<u64, Piece>,
}

#[derive(Default)]
struct Covers {
    ranges: BTreeMap<u64, (u64, Option<u32>)>,
    bytes: u64,
    /// There is too much: the data is made durable before the record instead.
    too_much: bool,
    writes: Arc<InFlight>,
}

/// A piece of data that is not in its place.
#[derive(Clone)]
struct Piece {
    bytes: Arc<[u8]>,
    part: Range<usize>,
    /// The record that has it, or [`NO_RECORD`]; `None` before one does.
    record: Option<u64>,
}

impl Piece {
    fn bytes(&self) -> &[u8] {
        &self.bytes[self.part.clone()]
    }
}

/// Bytes that are newer than those in their place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Kept {
    pub(crate) at: u64,
    pub(crate) bytes: Vec<u8>,
}

/// Writes to ranges that the next record will vouch for.
#[derive(Default)]
struct InFlight {
    count: AtomicU64,
    ended: Event,
}

/// A write to such a range; ends when dropped.
pub(crate) struct Busy(Option<Arc<InFlight>>);

impl Drop for Busy {
    fn drop(&mut self) {
        if let Some(writes) = &self.0
            && writes.count.fetch_sub(1, Ordering::SeqCst) == 1
        {
            writes.ended.notify(usize::MAX);
        }
    }
}

/// Where a write goes.
pub(crate) enum Way {
    /// To its place, as it is.
    Straight(Busy),
    /// Some of it was kept; these parts go to their places.
    Parts(Vec<Range<u64>>, Busy),
}

/// What a record must say of data.
pub(crate) struct Closed {
    /// What it vouches for.
    pub(crate) covers: Vec<Cover>,
    /// Data that goes into it.
    pub(crate) kept: Vec<Kept>,
    /// There is too much to vouch for: data must be durable before the record is written.
    pub(crate) too_much: bool,
    writes: Arc<InFlight>,
}

impl Closed {
    /// Waits for the writes to covered ranges that were under way at the close.
    pub(crate) async fn settled(&self) {
        loop {
            let ended = self.writes.ended.listen();
            if self.writes.count.load(Ordering::SeqCst) == 0 {
                return;
            }
            ended.await;
        }
    }
}

impl Guard {
    /// Whether written data is to be covered.
    pub(crate) fn is_active(&self) -> bool {
        self.active.load(Ordering::SeqCst)
    }

    /// From now on records vouch for data. A commit that closes every batch of before follows.
    pub(crate) fn activate(&self) {
        self.active.store(true, Ordering::SeqCst);
    }

    /// No record vouches for anything any more, and no recovery replays one.
    pub(crate) fn deactivate(&self) {
        let mut state = self.state.lock();
        self.active.store(false, Ordering::SeqCst);
        state.open = Covers::default();
        state.closing = Covers::default();
        state.last = Covers::default();
        state.unwritten.clear();
    }

    /// Bytes kept that no record has yet.
    pub(crate) fn pending(&self) -> u64 {
        self.pending.load(Ordering::Relaxed)
    }

    /// Whether anything is kept.
    pub(crate) fn keeps(&self) -> bool {
        self.kept.load(Ordering::Acquire) > 0
    }

    /// Bytes of a range that would be kept if they were written now.
    pub(crate) fn guarded(&self, range: &Range<u64>) -> u64 {
        if !self.is_active() && !self.keeps() {
            return 0;
        }
        self.state.lock().guarded(range).iter().map(|part| part.end - part.start).sum()
    }

    /// Decides where a write of `bufs` at `at` goes, and keeps what must be kept. The caller writes
    /// the rest and then drops what it was given.
    pub(crate) fn write(&self, at: u64, bufs: &[IoBuf]) -> Way {
        if !self.is_active() && !self.keeps() {
            return Way::Straight(Busy(None));
        }
        let length: usize = bufs.iter().map(IoBuf::len).sum();
        let range = at..at + length as u64;
        let mut state = self.state.lock();
        let busy = state.open.touch(&range);
        let guarded = state.guarded(&range);
        if guarded.is_empty() {
            return Way::Straight(busy);
        }
        let mut straight = Vec::new();
        let mut next = range.start;
        for part in guarded {
            if next < part.start {
                straight.push(next..part.start);
            }
            next = part.end;
            let bytes = cut(bufs, (part.start - at) as usize..(part.end - at) as usize);
            state.keep(part.start, bytes.into());
        }
        if next < range.end {
            straight.push(next..range.end);
        }
        self.count(&state);
        Way::Parts(straight, busy)
    }

    /// Keeps a small write to space that the file does not have yet for the next record, unless that has
    /// much already. `beyond` says that the write is the first to its clusters, of `size` bytes, and
    /// that nothing refers to them yet; it is kept then, and what refers to it is recorded after this.
    /// Otherwise it is kept if such a write was the first to all of them.
    pub(crate) fn keep(&self, at: u64, bufs: &[IoBuf], beyond: bool, size: u64) -> bool {
        if !self.is_active() || self.pending() > MAX_PENDING {
            return false;
        }
        let length = bufs.iter().map(IoBuf::len).sum();
        let mut clusters = at / size..(at + length as u64).div_ceil(size);
        let mut state = self.state.lock();
        if beyond {
            if state.unwritten.len() > MAX_UNWRITTEN {
                state.unwritten.clear();
            }
            state.unwritten.extend(clusters);
        } else if !clusters.all(|cluster| state.unwritten.contains(&cluster)) {
            return false;
        }
        state.keep(at, cut(bufs, 0..length).into());
        self.count(&state);
        true
    }

    /// Has the next record vouch for newly written data. What refers to it is recorded after this.
    pub(crate) fn cover(&self, covers: Vec<Cover>) {
        if self.is_active() {
            let mut state = self.state.lock();
            for cover in covers {
                state.open.add(&cover);
            }
        }
    }

    /// Begins record `sequence`. Nothing is said of clusters in `released`, of `size` bytes each.
    pub(crate) fn close(&self, sequence: u64, released: &[HostCluster], size: u64) -> Closed {
        let mut state = self.state.lock();
        state.closing = std::mem::take(&mut state.open);
        for cluster in released {
            let range = cluster.get() * size..(cluster.get() + 1) * size;
            state.closing.forget(&range);
            state.forget_pending(&range);
        }
        let mut kept = Vec::new();
        for (&at, piece) in &mut state.kept {
            if piece.record.is_none() {
                piece.record = Some(sequence);
                kept.push(Kept { at, bytes: piece.bytes().to_vec() });
            }
        }
        self.count(&state);
        let closing = &state.closing;
        let covers = closing.ranges.iter();
        let covers = covers.map(|(&at, &(end, crc))| Cover { range: at..end, crc }).collect();
        let writes = Arc::clone(&closing.writes);
        Closed { covers, kept, too_much: closing.too_much, writes }
    }

    /// The record under way is durable, and a recovery replays no record before `tail`.
    pub(crate) fn sealed(&self, tail: u64) {
        let mut state = self.state.lock();
        state.last = std::mem::take(&mut state.closing);
        state.kept.retain(|_, piece| piece.record.is_none_or(|record| record >= tail));
        self.count(&state);
    }

    /// The commit under way needed no record: all data is durable.
    pub(crate) fn unneeded(&self) {
        self.state.lock().closing = Covers::default();
    }

    /// What records up to `sequence` have of data, to be written to its place.
    pub(crate) fn recorded(&self, sequence: u64) -> Vec<Kept> {
        self.list(|piece| piece.record.is_some_and(|record| record <= sequence))
    }

    /// Everything kept.
    pub(crate) fn all_kept(&self) -> Vec<Kept> {
        self.list(|_| true)
    }

    fn list(&self, wanted: impl Fn(&Piece) -> bool) -> Vec<Kept> {
        let state = self.state.lock();
        let pieces = state.kept.iter().filter(|(_, piece)| wanted(piece));
        pieces.map(|(&at, piece)| Kept { at, bytes: piece.bytes().to_vec() }).collect()
    }

    /// Forgets pieces that are in their places, unless something newer is kept there.
    pub(crate) fn placed(&self, pieces: &[Kept]) {
        let mut state = self.state.lock();
        for done in pieces {
            let same = state.kept.get(&done.at).is_some_and(|piece| piece.bytes() == done.bytes);
            if same {
                state.kept.remove(&done.at);
            }
        }
        self.count(&state);
    }

    /// Forgets what is kept of clusters that nothing refers to any more, of `size` bytes each.
    pub(crate) fn forget(&self, released: &[HostCluster], size: u64) {
        let mut state = self.state.lock();
        for cluster in released {
            state.unwritten.remove(&cluster.get());
            state.cut_out(&(cluster.get() * size..(cluster.get() + 1) * size));
        }
        self.count(&state);
    }

    /// What is kept of a range. Asked for before the range is read, and put over what was read:
    /// what is no longer kept by then was in its place before.
    pub(crate) fn kept_in(&self, range: &Range<u64>) -> Vec<Kept> {
        if !self.keeps() {
            return Vec::new();
        }
        let state = self.state.lock();
        let mut found = Vec::new();
        for at in state.overlapping(range) {
            if let Some(piece) = state.kept.get(&at) {
                let (start, end) =
                    (at.max(range.start), range.end.min(at + piece.part.len() as u64));
                let bytes = &piece.bytes()[(start - at) as usize..(end - at) as usize];
                found.push(Kept { at: start, bytes: bytes.to_vec() });
            }
        }
        found
    }

    fn count(&self, state: &State) {
        let pending = state.kept.values().filter(|piece| piece.record.is_none());
        self.pending.store(pending.map(|p| p.part.len() as u64).sum(), Ordering::Relaxed);
        self.kept.store(state.kept.len(), Ordering::Release);
    }
}

impl Covers {
    fn add(&mut self, cover: &Cover) {
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
    fn touch(&mut self, range: &Range<u64>) -> Busy {
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
    fn cut_out(&mut self, range: &Range<u64>) {
        for (at, (end, _)) in self.overlapping(range) {
            self.ranges.remove(&at);
            self.bytes -= end - at;
            for rest in [at..range.start.max(at), range.end.min(end)..end] {
                self.add(&Cover { range: rest, crc: None });
            }
        }
    }

    fn forget(&mut self, range: &Range<u64>) {
        for (at, (end, _)) in self.overlapping(range) {
            self.ranges.remove(&at);
            self.bytes -= end - at;
        }
    }

    fn overlapping(&self, range: &Range<u64>) -> Vec<(u64, (u64, Option<u32>))> {
        let before = self.ranges.range(..range.start).next_back();
        let before = before.filter(|(_, (end, _))| *end > range.start);
        let inside = self.ranges.range(range.clone());
        before.into_iter().chain(inside).map(|(at, cover)| (*at, *cover)).collect()
    }
}

impl State {
    /// The parts of a range that must not be written to, in order and apart from each other.
    fn guarded(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let covers =
            self.last.overlapping(range).into_iter().chain(self.closing.overlapping(range));
        let kept = self.overlapping(range).into_iter();
        let kept = kept.map(|at| (at, at + self.kept.get(&at).map_or(0, |p| p.part.len() as u64)));
        let mut parts: Vec<Range<u64>> = covers
            .map(|(at, (end, _))| (at, end))
            .chain(kept)
            .map(|(at, end)| at.max(range.start)..end.min(range.end))
            .collect();
        parts.sort_unstable_by_key(|part| part.start);
        let mut joined: Vec<Range<u64>> = Vec::with_capacity(parts.len());
        for part in parts {
            match joined.last_mut() {
                Some(last) if part.start <= last.end => last.end = last.end.max(part.end),
                _ => joined.push(part),
            }
        }
        joined
    }

    /// Where the pieces start that overlap a range.
    fn overlapping(&self, range: &Range<u64>) -> Vec<u64> {
        let before = self.kept.range(..range.start).next_back();
        let before = before.filter(|(at, piece)| **at + piece.part.len() as u64 > range.start);
        let inside = self.kept.range(range.clone());
        before.into_iter().chain(inside).map(|(at, _)| *at).collect()
    }

    fn keep(&mut self, at: u64, bytes: Arc<[u8]>) {
        let part = 0..bytes.len();
        let range = at..at + bytes.len() as u64;
        // One record does not vouch for what it has itself.
        self.open.cut_out(&range);
        self.cut_out(&range);
        self.kept.insert(at, Piece { bytes, part, record: None });
    }

    /// Forgets what is kept of a range; what lies beside it in the same pieces stays.
    fn cut_out(&mut self, range: &Range<u64>) {
        self.split(range.start);
        self.split(range.end);
        for at in self.overlapping(range) {
            self.kept.remove(&at);
        }
    }

    /// Has no record take what is kept of a range and is in none. It stays for those who still look
    /// at the range.
    fn forget_pending(&mut self, range: &Range<u64>) {
        self.split(range.start);
        self.split(range.end);
        for (_, piece) in self.kept.range_mut(range.clone()) {
            piece.record.get_or_insert(NO_RECORD);
        }
    }

    /// Makes two pieces of one that reaches over `place`.
    fn split(&mut self, place: u64) {
        let Some(at) = self.overlapping(&(place..place + 1)).first().copied() else { return };
        if at < place
            && let Some(piece) = self.kept.get_mut(&at)
        {
            let middle = piece.part.start + (place - at) as usize;
            let second = Piece { part: middle..piece.part.end, ..piece.clone() };
            piece.part.end = middle;
            self.kept.insert(place, second);
        }
    }
}

/// A copy of some of the bytes of buffers that follow one another.
pub(crate) fn cut(bufs: &[IoBuf], part: Range<usize>) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(part.len());
    let mut start = 0;
    for buf in bufs {
        let from = part.start.clamp(start, start + buf.len()) - start;
        let to = part.end.clamp(start, start + buf.len()) - start;
        bytes.extend_from_slice(&buf[from..to]);
        start += buf.len();
    }
    bytes
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

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = 65536;

    fn buf(tag: u8, length: usize) -> IoBuf {
        IoBuf::copy_of(&vec![tag; length])
    }

    /// A write to its place is told by the parts that go there.
    fn straight(guard: &Guard, at: u64, tag: u8, length: usize) -> Vec<Range<u64>> {
        match guard.write(at, &[buf(tag, length)]) {
            Way::Straight(_) => vec![at..at + length as u64],
            Way::Parts(parts, _) => parts,
        }
    }

    fn active() -> Guard {
        let guard = Guard::default();
        guard.activate();
        guard
    }

    fn all(at: u64, length: u64) -> Vec<Range<u64>> {
        let whole = at..at + length;
        vec![whole]
    }

    #[test]
    fn what_the_last_record_vouches_for_is_kept_until_the_next_is_durable() {
        let guard = active();
        guard.cover(covers(0, &[buf(1, 8192)], SIZE, true));
        // Not in a record yet: it goes there, and is read back.
        assert_eq!(straight(&guard, 4096, 2, 4096), all(4096, 4096));
        let closed = guard.close(1, &[], SIZE);
        assert_eq!(closed.covers, [Cover { range: 0..8192, crc: None }]);
        // While the record is written, and after.
        assert_eq!(straight(&guard, 4096, 3, 8192), all(8192, 4096));
        guard.sealed(1);
        assert_eq!(straight(&guard, 0, 4, 512), []);
        assert_eq!(guard.pending(), 4096 + 512);
        let kept = guard.kept_in(&(0..16384));
        assert_eq!(kept.len(), 2);
        assert_eq!(kept[0], Kept { at: 0, bytes: vec![4; 512] });
        // The next record has them, and then nothing is vouched for any more.
        assert_eq!(guard.close(2, &[], SIZE).kept, kept);
        guard.sealed(1);
        assert_eq!(straight(&guard, 1024, 5, 512), all(1024, 512));
        // What is kept stays as long as it may be replayed.
        assert_eq!(straight(&guard, 0, 6, 512), []);
        guard.close(3, &[], SIZE);
        guard.sealed(3);
        assert_eq!(guard.kept_in(&(0..16384)), [Kept { at: 0, bytes: vec![6; 512] }]);
        guard.close(4, &[], SIZE);
        guard.sealed(4);
        assert!(!guard.keeps());
    }

    #[test]
    fn a_record_does_not_vouch_for_what_it_has() {
        let guard = active();
        guard.cover(covers(0, &[buf(1, 12288)], SIZE, true));
        assert!(guard.keep(4096, &[buf(2, 4096)], true, SIZE));
        let closed = guard.close(1, &[], SIZE);
        let unread = |range| Cover { range, crc: None };
        assert_eq!(closed.covers, [unread(0..4096), unread(8192..12288)]);
        assert_eq!(closed.kept.len(), 1);
    }

    #[test]
    fn nothing_is_said_of_released_clusters_and_kept_pieces_stay_readable_until_forgotten() {
        let guard = active();
        guard.cover(covers(SIZE - 4096, &[buf(1, 8192)], SIZE, true));
        assert!(guard.keep(2 * SIZE - 512, &[buf(2, 1024)], true, SIZE));
        let closed = guard.close(1, &[HostCluster::new(1)], SIZE);
        assert_eq!(closed.covers.len(), 1);
        assert_eq!(closed.covers[0].range, SIZE - 4096..SIZE);
        assert_eq!(closed.kept, [Kept { at: 2 * SIZE, bytes: vec![2; 512] }]);
        assert_eq!(guard.kept_in(&(0..4 * SIZE)).len(), 2);
        guard.sealed(1);
        guard.forget(&[HostCluster::new(1)], SIZE);
        assert_eq!(guard.recorded(1).len(), 1);
        assert_eq!(guard.kept_in(&(0..2 * SIZE)), []);
    }

    #[test]
    fn small_writes_to_clusters_that_the_file_does_not_have_are_kept_up_to_a_limit() {
        let guard = active();
        assert!(!guard.keep(0, &[buf(1, 4096)], false, SIZE));
        let mut at = 0;
        while guard.keep(at, &[buf(1, 4096)], at.is_multiple_of(SIZE), SIZE) {
            at += 4096;
        }
        assert_eq!(guard.pending(), MAX_PENDING + 4096);
        guard.deactivate();
        assert!(!guard.keep(0, &[buf(1, 4096)], true, SIZE));
        let kept = guard.all_kept();
        guard.placed(&kept);
        assert!(!guard.keeps());
    }

    #[test]
    fn covers_are_made_for_each_cluster_whatever_the_buffers() {
        let bytes: Vec<u8> = (0..100_000_u32).map(|n| (n * 7 / 3) as u8).collect();
        let bufs = [&bytes[..10], &bytes[10..70_000], &bytes[70_000..]].map(IoBuf::copy_of);
        let made = covers(SIZE / 2, &bufs, SIZE, true);
        let ends = [SIZE / 2, SIZE, 2 * SIZE, SIZE / 2 + 100_000];
        assert_eq!(made.len(), 3);
        for (cover, ends) in made.iter().zip(ends.windows(2)) {
            assert_eq!(cover.range, ends[0]..ends[1]);
            let skip = (cover.range.start - SIZE / 2) as usize;
            let length = (cover.range.end - cover.range.start) as usize;
            assert_eq!(cover.crc, Some(Crc32c::of(&bytes[skip..skip + length])));
        }
        assert_eq!(covers(0, &[buf(1, 512)], SIZE, false)[0].crc, None);
    }
}
