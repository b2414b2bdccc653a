//! Guest data that is covered by checksums in a journal's records.
//!
//! A record contains checksums of the data that it newly refers to (a *checksummed range*: a range of the file and its
//! CRC32C), so that one sync can make data and record durable: after a crash the last record counts only if all of its
//! checksums match. They must match until the next record is durable, which proves that this one was. Until then a
//! write to a checksummed range is not written in place but journaled, in memory and as data in the next record, and a
//! checkpoint writes it in place (full journaling, section 3.1 of the FAST '16 paper). It is journaled as long as a
//! record that a recovery would replay contains it. Small writes that would make the file grow are journaled too: the
//! record's space already exists.
//!
//! Commits determine the order of these steps; see [`journal`](super::journal).

mod checksums;

pub use checksums::Written;
pub(crate) use checksums::{Busy, ChecksumHolder, ChecksummedRange, checksummed};

use crate::checksummed::Checksummed;
use crate::pieces::{JournaledWrite, Pieces};
use crate::restart_log::{ClosedEntries, ClosedLog, RestartLog, close_all};
use crate::sabotage::{self, Sabotage};
use crate::{MOST_CHECKED, Result, invariant, lock_order, violated};
use checksums::{Checksum, ChecksummedRanges};
use isobath_qcow2::embedded::LEAD;
use isobath_qcow2::{HostCluster, Lsn};
use isobath_storage::IoBuf;
use isobath_sync::order::Rank;
use isobath_sync::{CheckedMutex, Invariants, WaitGroup};
use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// Small writes are journaled as long as no more than this is journaled, in bytes.
pub(crate) const MAX_PENDING: u64 = 128 << 10;

/// Clusters remembered as not written.
const MAX_UNWRITTEN: usize = 16 << 10;

const ONE_COMMIT: &str = "one commit of data ends before the next begins";

/// Used in place of a record's number: the piece belongs to a cluster that is about to be freed.
const NO_RECORD: Lsn = Lsn::MAX;

/// The ranges that must not change in place, and the data that is journaled instead.
#[derive(Default)]
pub(crate) struct DataJournal {
    /// Whether a journal is in use.
    active: AtomicBool,
    /// The number of pieces journaled; while it is 0, readers look no further.
    writes: AtomicUsize,
    /// Bytes journaled for the next record.
    pending: AtomicU64,
    /// Journaled data is also stored here.
    log: Option<Arc<RestartLog>>,
    state: CheckedMutex<DataState>,
}

#[derive(Default)]
struct DataState {
    /// Clusters that the file contains at most in part: everything written to them was journaled at first.
    unwritten: HashSet<u64>,
    /// The ranges that the next record's checksums will cover.
    open: ChecksummedRanges,
    /// The ranges that the checksums of the record in progress cover.
    closing: ChecksummedRanges,
    /// Ranges whose checksums are durable, but which no later durable record has shown to be durable: with the LSN of
    /// their commit.
    last: Vec<(Lsn, ChecksummedRanges)>,
    /// Clusters whose plain lead block is in the next record.
    plain: Vec<HostCluster>,
    /// Data in durable records, marked with their LSNs, and data of clusters about to be freed.
    recorded: Pieces,
    /// Data in the record in progress.
    under_way: Pieces,
    /// Data for the next record.
    pending: Pieces,
}

/// A small write that makes the file grow if it is not journaled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Growth {
    /// It is the first to its clusters, and nothing refers to them yet. The entry that refers to it is recorded later.
    First,
    /// It makes the file grow if the first write to each of its clusters was journaled.
    Later,
}

/// Where a write goes.
pub(crate) enum WriteRoute {
    /// In place, unchanged.
    InPlace(Busy),
    /// All of it was journaled.
    Journaled,
    /// Some of it was journaled; these parts are written in place.
    Parts(Vec<Range<u64>>, Busy),
}

/// The data operations of a record.
pub(crate) struct ClosedData {
    /// The ranges for which it has checksums.
    pub checksums: Vec<ChecksummedRange>,
    /// The data that it contains.
    pub writes: Vec<JournaledWrite>,
    /// Clusters whose plain lead blocks are among that data.
    pub plain: Vec<HostCluster>,
    /// There is too much data for checksums: it must be durable before the record is written.
    pub too_much: bool,
    /// What the commit drops from the restart log once it is durable.
    pub log: Option<ClosedLog>,
    /// To finish the commit with.
    pub commit: DataCommit,
}

/// A commit of guest data in progress. The holder must finish it; if it is dropped, the commit has failed, and no other
/// begins.
#[must_use = "the commit is to be finished with it"]
pub(crate) struct DataCommit {
    writes: Arc<WaitGroup>,
}

impl DataCommit {
    /// Waits for the writes to checksummed ranges that were in progress at the close.
    pub(crate) async fn landed(&self) {
        self.writes.ended().await;
    }
}

impl DataJournal {
    /// Journaled data is also stored in `log`.
    pub(crate) fn new(log: Option<Arc<RestartLog>>) -> Self {
        Self { log, ..Self::default() }
    }

    /// Whether written data must be checksummed.
    pub(crate) fn is_active(&self) -> bool {
        self.active.load(Ordering::SeqCst)
    }

    /// From now on records contain checksums of data. A commit that closes all earlier batches follows.
    pub(crate) fn activate(&self) {
        self.active.store(true, Ordering::SeqCst);
    }

    /// No record's checksums matter any more, and no recovery replays a record. Data in durable records is durable in
    /// place. What the `commit` in progress has closed is for the next one.
    pub(crate) fn deactivate(&self, commit: Option<DataCommit>) {
        let mut state = self.state.lock();
        let state = &mut *state;
        if commit.is_none() && !state.is_between_commits() {
            violated(ONE_COMMIT);
        }
        self.active.store(false, Ordering::SeqCst);
        let newer = std::mem::take(&mut state.pending);
        state.pending = std::mem::take(&mut state.under_way);
        state.pending.put_all(newer);
        state.recorded = Pieces::default();
        state.open = ChecksummedRanges::default();
        state.closing = ChecksummedRanges::default();
        state.last.clear();
        state.plain.clear();
        state.unwritten.clear();
        self.count(state);
        drop(commit);
    }

    /// Journaled bytes that are not in a record yet.
    pub(crate) fn pending(&self) -> u64 {
        self.pending.load(Ordering::Relaxed)
    }

    /// Whether anything is journaled.
    pub(crate) fn has_writes(&self) -> bool {
        self.writes.load(Ordering::Acquire) > 0
    }

    /// Bytes of a range that would be journaled if they were written now.
    pub(crate) fn to_journal(&self, range: &Range<u64>) -> u64 {
        if !self.is_active() && !self.has_writes() {
            return 0;
        }
        self.state.lock().checksummed_parts(range).iter().map(|part| part.end - part.start).sum()
    }

    /// Decides where a write of `bufs` at `at` goes, to clusters of `size` bytes, and journals what must not change in
    /// place. The caller writes the rest and then drops the returned route. `growth` says that the write is small, and
    /// may be journaled to save the file from growing; it is not if much is journaled already.
    pub(crate) fn route(
        &self,
        at: u64,
        bufs: &[IoBuf],
        size: u64,
        growth: Option<Growth>,
    ) -> WriteRoute {
        if !self.is_active() && !self.has_writes() {
            return WriteRoute::InPlace(Busy::none());
        }
        let length: usize = bufs.iter().map(IoBuf::len).sum();
        let range = at..at + length as u64;
        let mut state = self.state.lock();
        let growth = growth.filter(|_| self.is_active() && self.pending() <= MAX_PENDING);
        if growth.is_some_and(|growth| state.grows(&range, size, growth)) {
            self.journal_piece(&mut state, at, cut(bufs, 0..length).into());
            self.count(&state);
            return WriteRoute::Journaled;
        }
        let busy = state.open.touch(&range);
        let parts = state.checksummed_parts(&range);
        if parts.is_empty() {
            return WriteRoute::InPlace(busy);
        }
        let mut straight = Vec::new();
        let mut next = range.start;
        for part in parts {
            if next < part.start {
                straight.push(next..part.start);
            }
            next = part.end;
            let bytes = cut(bufs, (part.start - at) as usize..(part.end - at) as usize);
            self.journal_piece(&mut state, part.start, bytes.into());
        }
        if next < range.end {
            straight.push(next..range.end);
        }
        self.count(&state);
        WriteRoute::Parts(straight, busy)
    }

    fn journal_piece(&self, state: &mut DataState, at: u64, bytes: Arc<[u8]>) {
        if let Some(log) = &self.log {
            log.journaled(at, &bytes);
        }
        state.add(at, bytes);
    }

    /// Journals the plain bytes of an embedded lead block for the next record, which says that the lead block of
    /// `cluster` is plain. The caller ensures that it is not treated as embedded from then on.
    pub(crate) fn journal_plain(&self, at: u64, bytes: &[u8], cluster: HostCluster) {
        let mut state = self.state.lock();
        self.journal_piece(&mut state, at, bytes.into());
        state.plain.push(cluster);
        self.count(&state);
    }

    /// Adds checksums of newly written data to the next record. Returns the proof that
    /// [`record`](crate::tables::Tables::record) requires for an entry that refers to the data.
    pub(crate) fn add_checksums(&self, written: impl IntoIterator<Item = Written>) -> Checksummed {
        let mut state = self.is_active().then(|| self.state.lock());
        let place = |Written { place, checksums }| {
            if let Some(state) = &mut state {
                for range in &checksums {
                    state.open.add(range);
                }
            }
            place
        };
        Checksummed::new(written.into_iter().map(place).collect())
    }

    /// Like [`add_checksums`](Self::add_checksums), for data at these places that gets no checksums: it is durable
    /// before the next record is written.
    pub(crate) fn add_unchecked(&self, places: Vec<Range<u64>>) -> Checksummed {
        if self.is_active() {
            self.state.lock().open.give_up();
        }
        Checksummed::new(places)
    }

    /// Begins record `lsn`. It leaves out the clusters in `freed`, of `size` bytes each, to which nothing will refer
    /// any more. `entries` are the mappings that the commit has closed in the restart log.
    pub(crate) fn begin_commit(
        &self,
        lsn: Lsn,
        freed: &[HostCluster],
        size: u64,
        entries: Option<ClosedEntries>,
    ) -> ClosedData {
        let mut state = self.state.lock();
        let state = &mut *state;
        let log = close_all(self.log.as_deref(), entries);
        if !state.is_between_commits() {
            violated(ONE_COMMIT);
        }
        state.closing = std::mem::take(&mut state.open);
        state.under_way = std::mem::take(&mut state.pending);
        state.under_way.mark(None, lsn);
        // A lead block is apart from the rest of its cluster.
        for cluster in &state.plain {
            let at = cluster.get() * size;
            state.under_way.mark(Some(&(at..at + LEAD as u64)), lsn);
        }
        for cluster in freed {
            let range = cluster.get() * size..(cluster.get() + 1) * size;
            state.closing.forget(&range);
            // It stays for readers that still use the old mapping.
            state.under_way.mark(Some(&range), NO_RECORD);
        }
        self.count(state);
        let closing = &state.closing;
        let checksum = |(&at, &Checksum { end, crc, holder }): (&u64, &Checksum)| {
            ChecksummedRange { range: at..end, crc, holder }
        };
        ClosedData {
            checksums: closing.ranges.iter().map(checksum).collect(),
            writes: state.under_way.list(|mark| mark != NO_RECORD),
            plain: std::mem::take(&mut state.plain),
            too_much: closing.too_much,
            log,
            commit: DataCommit { writes: Arc::clone(&closing.writes) },
        }
    }

    /// Begins a commit without a record; `None` if something must go into one.
    pub(crate) fn begin_embedded_commit(&self) -> Option<DataCommit> {
        let mut state = self.state.lock();
        let state = &mut *state;
        let needs_record = state.open.too_much || state.open.broken || !state.plain.is_empty();
        if needs_record || self.pending() > 0 {
            return None;
        }
        if !state.is_between_commits() {
            violated(ONE_COMMIT);
        }
        state.closing = std::mem::take(&mut state.open);
        state.closing.leave_leads();
        Some(DataCommit { writes: Arc::clone(&state.closing.writes) })
    }

    /// The commit `lsn` in progress is durable without a record. Durable LSNs in data that is now durable show that
    /// commits up to `noted` were durable.
    pub(crate) fn finish_embedded_commit(&self, commit: DataCommit, lsn: Lsn, noted: Lsn) {
        drop(commit);
        let mut state = self.state.lock();
        if state.last.iter().any(|(earlier, _)| *earlier >= lsn) {
            violated("commits have growing LSNs");
        }
        let closing = std::mem::take(&mut state.closing);
        state.last.retain(|(commit, _)| *commit > noted);
        if !closing.ranges.is_empty() {
            state.last.push((lsn, closing));
        }
    }

    /// The record of the commit `lsn` in progress is durable, and a recovery replays no record before `tail`.
    pub(crate) fn finish_commit(&self, commit: DataCommit, lsn: Lsn, tail: Lsn) {
        drop(commit);
        let mut state = self.state.lock();
        let state = &mut *state;
        if state.last.iter().any(|(earlier, _)| *earlier >= lsn) {
            violated("commits have growing LSNs");
        }
        state.last = vec![(lsn, std::mem::take(&mut state.closing))];
        let newer = std::mem::take(&mut state.under_way);
        state.recorded.put_all(newer);
        state.recorded.retain(|record| record >= tail);
        self.count(state);
    }

    /// The data in durable records is in place, and nothing is checksummed any more.
    pub(crate) fn checkpointed(&self) {
        let mut state = self.state.lock();
        let state = &mut *state;
        state.recorded = Pieces::default();
        state.closing = ChecksummedRanges::default();
        state.last.clear();
        self.count(state);
    }

    /// Of the data that the commit in progress took, `placed` is in place, and record `lsn` contains the rest.
    pub(crate) fn moved(&self, placed: &[JournaledWrite], lsn: Lsn) {
        let mut state = self.state.lock();
        let state = &mut *state;
        for done in placed {
            state.under_way.remove(done);
        }
        state.under_way.mark(None, lsn);
        self.count(state);
    }

    /// The commit in progress wrote no record, and all data is durable in place.
    pub(crate) fn finish_plain_commit(&self, commit: DataCommit) {
        drop(commit);
        let mut state = self.state.lock();
        state.closing = ChecksummedRanges::default();
        state.under_way = Pieces::default();
        self.count(&state);
    }

    /// The data in durable records, to be written in place.
    pub(crate) fn recorded(&self) -> Vec<JournaledWrite> {
        self.state.lock().recorded.list(|record| record != NO_RECORD)
    }

    /// Journaled data that is in no durable record. If the journal is taken out of use, it is written in place.
    pub(crate) fn unrecorded(&self) -> Vec<JournaledWrite> {
        self.state.lock().pending.list(|_| true)
    }

    /// Forgets pieces that are now in place, unless something newer is journaled there.
    pub(crate) fn placed(&self, pieces: &[JournaledWrite]) {
        let mut state = self.state.lock();
        for done in pieces {
            state.pending.remove(done);
        }
        self.count(&state);
    }

    /// Forgets the journaled data of clusters, of `size` bytes each, that nothing refers to any more.
    pub(crate) fn forget(&self, freed: &[HostCluster], size: u64) {
        let mut state = self.state.lock();
        let state = &mut *state;
        for cluster in freed {
            state.unwritten.remove(&cluster.get());
            let range = cluster.get() * size..(cluster.get() + 1) * size;
            state.recorded.cut_out(&range);
            state.under_way.cut_out(&range);
            state.pending.cut_out(&range);
        }
        self.count(state);
    }

    /// Checks that clusters that are given out again were forgotten: nothing would be written to them later.
    pub(crate) fn check_forgotten(
        &self,
        clusters: impl Iterator<Item = HostCluster>,
        size: u64,
        image: &Path,
    ) -> Result<()> {
        let state = self.state.lock();
        for cluster in clusters {
            let range = cluster.get() * size..(cluster.get() + 1) * size;
            let mut layers = [&state.recorded, &state.under_way, &state.pending].into_iter();
            let forgotten = layers.all(|pieces| pieces.parts_of(&range).next().is_none());
            invariant(forgotten, image, "nothing is journaled for a cluster that is free")?;
        }
        Ok(())
    }

    /// The journaled data of a range. The caller asks for it before it reads the range, and applies it to what it read:
    /// data that is no longer journaled by then was already in place.
    pub(crate) fn journaled_in(&self, range: &Range<u64>) -> Vec<JournaledWrite> {
        if !self.has_writes() {
            return Vec::new();
        }
        let state = self.state.lock();
        let layers = [&state.recorded, &state.under_way, &state.pending];
        layers.into_iter().flat_map(|pieces| pieces.copies_of(range)).collect()
    }

    fn count(&self, state: &DataState) {
        self.pending.store(state.pending.bytes(), Ordering::Relaxed);
        let writes = state.recorded.count() + state.under_way.count() + state.pending.count();
        self.writes.store(writes, Ordering::Release);
    }
}

impl Invariants for DataState {
    const RANK: Option<Rank> = Some(lock_order::DATA_JOURNAL);

    fn check_invariants(&self) {
        for pieces in [&self.recorded, &self.under_way, &self.pending] {
            pieces.check_invariants();
        }
        self.open.check_invariants();
        self.closing.check_invariants();
        let mut before = None;
        for (lsn, ranges) in &self.last {
            if before.is_some_and(|before| before >= *lsn) {
                violated("later commits have higher LSNs");
            }
            before = Some(*lsn);
            ranges.check_invariants();
        }
        for (&at, range) in self.open.ranges.iter().take(MOST_CHECKED) {
            if self.pending.parts_of(&(at..range.end)).next().is_some() {
                violated("a record has no checksums of data that it contains itself");
            }
        }
        if self.recorded.any(|record| record == Lsn::default()) {
            violated("data is recorded by a record");
        }
    }
}

impl DataState {
    /// Whether no commit has closed anything that it has not finished.
    fn is_between_commits(&self) -> bool {
        self.closing.ranges.is_empty() && self.under_way.count() == 0
    }

    /// Whether a small write makes the file grow.
    fn grows(&mut self, range: &Range<u64>, size: u64, growth: Growth) -> bool {
        let mut clusters = range.start / size..range.end.div_ceil(size);
        match growth {
            Growth::First => {
                if self.unwritten.len() > MAX_UNWRITTEN {
                    self.unwritten.clear();
                }
                self.unwritten.extend(clusters);
                true
            }
            Growth::Later => clusters.all(|cluster| self.unwritten.contains(&cluster)),
        }
    }

    /// The parts of a range that must not be written to, in order and apart from each other.
    fn checksummed_parts(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let last = self.last.iter().map(|(_, checksums)| checksums);
        let checksums = last.chain([&self.closing]).filter(|_| !sabotage::is(Sabotage::Unguarded));
        let checksums = checksums.flat_map(|checksums| checksums.overlapping(range));
        let checksums =
            checksums.map(|(at, checksummed)| at.max(range.start)..checksummed.end.min(range.end));
        let journaled = [&self.recorded, &self.under_way, &self.pending];
        let journaled = journaled.into_iter().flat_map(|pieces| pieces.parts_of(range));
        let mut parts: Vec<Range<u64>> = checksums.chain(journaled).collect();
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

    fn add(&mut self, at: u64, bytes: Arc<[u8]>) {
        // A record has no checksums of data that it contains itself.
        self.open.cut_out(&(at..at + bytes.len() as u64));
        self.pending.put(at, bytes, Lsn::default());
    }
}

/// A copy of some of the bytes of consecutive buffers.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broken::{assert_violated, must_panic, must_violate};
    use isobath_qcow2::Crc32c;

    const SIZE: u64 = 65536;

    fn buf(tag: u8, length: usize) -> IoBuf {
        IoBuf::copy_of(&vec![tag; length])
    }

    /// Writes, and returns the parts that are written in place.
    fn straight(journal: &DataJournal, at: u64, tag: u8, length: usize) -> Vec<Range<u64>> {
        match journal.route(at, &[buf(tag, length)], SIZE, None) {
            WriteRoute::InPlace(_) => all(at, length as u64),
            WriteRoute::Parts(parts, _) => parts,
            WriteRoute::Journaled => Vec::new(),
        }
    }

    /// Whether a small write is journaled as a whole.
    fn is_journaled(journal: &DataJournal, at: u64, buf: IoBuf, growth: Growth) -> bool {
        matches!(journal.route(at, &[buf], SIZE, Some(growth)), WriteRoute::Journaled)
    }

    fn active() -> DataJournal {
        let journal = DataJournal::default();
        journal.activate();
        journal
    }

    fn written(checksums: Vec<ChecksummedRange>) -> Written {
        let place = checksums[0].range.start..checksums.last().unwrap().range.end;
        Written { place, checksums }
    }

    fn all(at: u64, length: u64) -> Vec<Range<u64>> {
        let whole = at..at + length;
        vec![whole]
    }

    #[test]
    fn beside_data_without_checksums_no_other_data_has_any() {
        let journal = active();
        let _ = journal.add_checksums([written(checksummed(0, &[buf(1, 8192)], SIZE, true))]);
        let _ = journal.add_unchecked(all(SIZE, SIZE));
        let _ = journal.add_checksums([written(checksummed(9 * SIZE, &[buf(1, 512)], SIZE, true))]);
        let closed = journal.begin_commit(Lsn::new(1), &[], SIZE, None);
        assert!(closed.too_much && closed.checksums.is_empty());
    }

    #[test]
    fn what_the_last_record_vouches_for_is_kept_until_the_next_is_durable() {
        let journal = active();
        let _ = journal.add_checksums([written(checksummed(0, &[buf(1, 8192)], SIZE, true))]);
        // Not in a record yet: it is written in place, and read back.
        assert_eq!(straight(&journal, 4096, 2, 4096), all(4096, 4096));
        let closed = journal.begin_commit(Lsn::new(1), &[], SIZE, None);
        assert_eq!(
            closed.checksums,
            [ChecksummedRange { range: 0..8192, crc: None, holder: ChecksumHolder::Record }]
        );
        // While the record is being written, and after.
        assert_eq!(straight(&journal, 4096, 3, 8192), all(8192, 4096));
        journal.finish_commit(closed.commit, Lsn::new(1), Lsn::new(1));
        assert_eq!(straight(&journal, 0, 4, 512), []);
        assert_eq!(journal.pending(), 4096 + 512);
        let writes = journal.journaled_in(&(0..16384));
        assert_eq!(writes.len(), 2);
        assert_eq!(writes[0], JournaledWrite { at: 0, bytes: vec![4; 512] });
        // The next record contains them, and then nothing is checksummed any more.
        let closed = journal.begin_commit(Lsn::new(2), &[], SIZE, None);
        assert_eq!(closed.writes, writes);
        journal.finish_commit(closed.commit, Lsn::new(2), Lsn::new(1));
        assert_eq!(straight(&journal, 1024, 5, 512), all(1024, 512));
        // Data is journaled as long as it may be replayed.
        assert_eq!(straight(&journal, 0, 6, 512), []);
        let closed = journal.begin_commit(Lsn::new(3), &[], SIZE, None);
        journal.finish_commit(closed.commit, Lsn::new(3), Lsn::new(3));
        assert_eq!(
            journal.journaled_in(&(0..16384)),
            [JournaledWrite { at: 0, bytes: vec![6; 512] }]
        );
        let closed = journal.begin_commit(Lsn::new(4), &[], SIZE, None);
        journal.finish_commit(closed.commit, Lsn::new(4), Lsn::new(4));
        assert!(!journal.has_writes());
    }

    #[test]
    fn a_record_does_not_vouch_for_what_it_has() {
        let journal = active();
        let _ = journal.add_checksums([written(checksummed(0, &[buf(1, 12288)], SIZE, true))]);
        assert!(is_journaled(&journal, 4096, buf(2, 4096), Growth::First));
        let closed = journal.begin_commit(Lsn::new(1), &[], SIZE, None);
        let unread = |range| ChecksummedRange { range, crc: None, holder: ChecksumHolder::Record };
        assert_eq!(closed.checksums, [unread(0..4096), unread(8192..12288)]);
        assert_eq!(closed.writes.len(), 1);
    }

    #[test]
    fn nothing_is_said_of_released_clusters_and_kept_pieces_stay_readable_until_forgotten() {
        let journal = active();
        let _ =
            journal.add_checksums([written(checksummed(SIZE - 4096, &[buf(1, 8192)], SIZE, true))]);
        assert!(is_journaled(&journal, 2 * SIZE - 512, buf(2, 1024), Growth::First));
        let closed = journal.begin_commit(Lsn::new(1), &[HostCluster::new(1)], SIZE, None);
        assert_eq!(closed.checksums.len(), 1);
        assert_eq!(closed.checksums[0].range, SIZE - 4096..SIZE);
        assert_eq!(closed.writes, [JournaledWrite { at: 2 * SIZE, bytes: vec![2; 512] }]);
        assert_eq!(journal.journaled_in(&(0..4 * SIZE)).len(), 2);
        journal.finish_commit(closed.commit, Lsn::new(1), Lsn::new(1));
        journal.forget(&[HostCluster::new(1)], SIZE);
        assert_eq!(journal.recorded().len(), 1);
        assert_eq!(journal.journaled_in(&(0..2 * SIZE)), []);
    }

    #[test]
    fn a_cluster_is_given_out_again_once_it_was_forgotten() {
        let journal = active();
        assert!(is_journaled(&journal, SIZE, buf(2, 1024), Growth::First));
        let check = |cluster| {
            let clusters = [HostCluster::new(cluster)].into_iter();
            journal.check_forgotten(clusters, SIZE, Path::new("image"))
        };
        check(0).unwrap();
        must_violate(check(1), "nothing is journaled for a cluster that is free");
        journal.forget(&[HostCluster::new(1)], SIZE);
        check(1).unwrap();
    }

    #[test]
    fn a_cluster_beside_a_released_one_is_still_vouched_for() {
        for holder in [ChecksumHolder::Record, ChecksumHolder::Lead] {
            let journal = active();
            let _ = journal.add_checksums([written(checksummed_by(0..3 * SIZE, holder))]);
            let closed = journal.begin_commit(Lsn::new(1), &[HostCluster::new(1)], SIZE, None);
            let beside =
                [checksummed_by(0..SIZE, holder), checksummed_by(2 * SIZE..3 * SIZE, holder)];
            assert_eq!(closed.checksums, beside.concat());
        }
    }

    #[test]
    fn small_writes_to_clusters_that_the_file_does_not_have_are_kept_up_to_a_limit() {
        let journal = active();
        assert!(!is_journaled(&journal, 0, buf(1, 4096), Growth::Later));
        let mut at = 0;
        let growth = |at: u64| if at.is_multiple_of(SIZE) { Growth::First } else { Growth::Later };
        while is_journaled(&journal, at, buf(1, 4096), growth(at)) {
            at += 4096;
        }
        assert_eq!(journal.pending(), MAX_PENDING + 4096);
        journal.deactivate(None);
        assert!(!is_journaled(&journal, 0, buf(1, 4096), Growth::First));
        let writes = journal.unrecorded();
        journal.placed(&writes);
        assert!(!journal.has_writes());
    }

    #[test]
    fn checksums_are_made_for_each_cluster_whatever_the_buffers() {
        let bytes: Vec<u8> = (0..100_000_u32).map(|n| (n * 7 / 3) as u8).collect();
        let bufs = [&bytes[..10], &bytes[10..70_000], &bytes[70_000..]].map(IoBuf::copy_of);
        let made = checksummed(SIZE / 2, &bufs, SIZE, true);
        let ends = [SIZE / 2, SIZE, 2 * SIZE, SIZE / 2 + 100_000];
        assert_eq!(made.len(), 3);
        for (checksum, ends) in made.iter().zip(ends.windows(2)) {
            assert_eq!(checksum.range, ends[0]..ends[1]);
            let skip = (checksum.range.start - SIZE / 2) as usize;
            let length = (checksum.range.end - checksum.range.start) as usize;
            assert_eq!(checksum.crc, Some(Crc32c::of(&bytes[skip..skip + length])));
        }
        assert_eq!(checksummed(0, &[buf(1, 512)], SIZE, false)[0].crc, None);
    }

    fn checksummed_by(range: Range<u64>, holder: ChecksumHolder) -> Vec<ChecksummedRange> {
        vec![ChecksummedRange { range, crc: None, holder }]
    }

    #[test]
    fn what_a_lead_block_vouches_for_is_kept_until_it_is_known_to_be_durable() {
        let journal = active();
        let _ = journal.add_checksums([written(checksummed_by(0..SIZE, ChecksumHolder::Lead))]);
        let _ = journal
            .add_checksums([written(checksummed_by(SIZE..2 * SIZE, ChecksumHolder::Nobody))]);
        let commit = journal.begin_embedded_commit().unwrap();
        journal.finish_embedded_commit(commit, Lsn::new(5), Lsn::new(0));
        // The first needs no checksum; nothing shows yet that the second was durable.
        assert_eq!(straight(&journal, SIZE, 1, 4096), all(SIZE, 4096));
        assert_eq!(straight(&journal, SIZE - 4096, 1, 8192), all(SIZE, 4096));
        assert!(journal.begin_embedded_commit().is_none(), "what is journaled needs a record");
        let closed = journal.begin_commit(Lsn::new(8), &[], SIZE, None);
        assert_eq!(closed.writes.len(), 1);
        journal.finish_commit(closed.commit, Lsn::new(8), Lsn::new(6));
        let _ = journal
            .add_checksums([written(checksummed_by(2 * SIZE..3 * SIZE, ChecksumHolder::Lead))]);
        let commit = journal.begin_embedded_commit().unwrap();
        journal.finish_embedded_commit(commit, Lsn::new(9), Lsn::new(8));
        assert!(journal.begin_embedded_commit().is_some());
        // A later record shows that the commit which ended at 9 was durable.
        assert_eq!(straight(&journal, 2 * SIZE, 2, 512), []);
        let closed = journal.begin_commit(Lsn::new(10), &[], SIZE, None);
        journal.finish_commit(closed.commit, Lsn::new(10), Lsn::new(11));
        assert_eq!(straight(&journal, 2 * SIZE + 512, 2, 512), all(2 * SIZE + 512, 512));
    }

    #[test]
    fn a_broken_sum_and_a_plain_lead_block_need_a_record() {
        let journal = active();
        let _ = journal.add_checksums([written(checksummed_by(0..SIZE, ChecksumHolder::Lead))]);
        assert_eq!(straight(&journal, 4096, 1, 512), all(4096, 512));
        assert!(journal.begin_embedded_commit().is_none());
        let closed = journal.begin_commit(Lsn::new(1), &[], SIZE, None);
        assert_eq!(closed.checksums, checksummed_by(0..SIZE, ChecksumHolder::Lead));
        journal.finish_commit(closed.commit, Lsn::new(1), Lsn::new(1));
        assert!(journal.begin_embedded_commit().is_some());
        journal.journal_plain(SIZE, &[7; 512], HostCluster::new(1));
        assert!(journal.begin_embedded_commit().is_none());
        let closed = journal.begin_commit(Lsn::new(2), &[], SIZE, None);
        assert_eq!((closed.plain, closed.writes.len()), (vec![HostCluster::new(1)], 1));
    }

    #[test]
    fn a_broken_state_is_noticed() {
        let bytes = || -> Arc<[u8]> { vec![1; 8].into() };
        assert_violated("later commits have higher LSNs", DataState::default(), |state| {
            for lsn in [7, 7] {
                state.last.push((Lsn::new(lsn), ChecksummedRanges::default()));
            }
        });
        assert_violated("that it contains itself", DataState::default(), |state| {
            let holder = ChecksumHolder::Record;
            state.pending.put(4, bytes(), Lsn::default());
            state.open.add(&ChecksummedRange { range: 0..8, crc: None, holder });
        });
        assert_violated("data is recorded by a record", DataState::default(), |state| {
            state.recorded.put(0, bytes(), Lsn::default());
        });
    }

    #[test]
    fn one_commit_of_data_ends_before_the_next() {
        let journal = active();
        let _ = journal.add_checksums([written(checksummed(0, &[buf(1, 8192)], SIZE, true))]);
        let closed = journal.begin_commit(Lsn::new(1), &[], SIZE, None);
        let one = "one commit of data ends before the next begins";
        must_panic(|| journal.begin_commit(Lsn::new(2), &[], SIZE, None), one);
        must_panic(|| journal.begin_embedded_commit(), one);
        must_panic(|| journal.deactivate(None), one);
        journal.finish_commit(closed.commit, Lsn::new(1), Lsn::new(1));
        let growing = "commits have growing LSNs";
        let commit = journal.begin_embedded_commit().unwrap();
        must_panic(|| journal.finish_embedded_commit(commit, Lsn::new(1), Lsn::default()), growing);
        let closed = journal.begin_commit(Lsn::new(1), &[], SIZE, None);
        must_panic(|| journal.finish_commit(closed.commit, Lsn::new(1), Lsn::new(1)), growing);
    }
}
