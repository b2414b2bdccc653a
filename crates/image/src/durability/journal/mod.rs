//! `--metadata journal`: one sync for one flush.
//!
//! A commit writes one record into an area of the image's file: every change of metadata since the last one (L1 and L2
//! entries, refcounts, new tables), and the CRC32C of newly written data, which shows after a crash whether the data is
//! there. The data was written before the record, so one sync makes data, record and change durable, all or nothing.
//! This is the internal journal of the FAST '16 paper (section 3.1); `docs/decisions/0007` explains the differences.
//!
//! - **Checkpoints**: changes in records stay in memory until the area is half full, and are then written in place,
//!   once however often a byte changed. The sync of the next commit makes that durable, and the record after it says so
//!   (`tail`).
//! - **Durability of earlier records**: a record is written only when the one before it is durable. So only the last
//!   record's data is verified after a crash, and it must not change until the next record is durable: see
//!   [`data_journal`](super::data_journal).
//! - **Revocation**: if records that a recovery would replay contain anything of a released cluster, the record that
//!   releases it revokes that.
//! - While the area is in use, an incompatible feature bit keeps other programs out. Closing, and every change that
//!   does not use the journal (a resize, an index), [deactivates](Journal::deactivate) it: its contents are written in
//!   place, and the bit is cleared.

mod build;
mod embedded;
mod in_place;
mod record;
mod ring;
mod setup;

use super::data_journal::DataCommit;
use super::metadata::Metadata;
use super::ordered::{self, Ordered};
use crate::readers::Readers;
use crate::sabotage::{self, Sabotage};
use crate::{Result, always, invariant, lock_order, violated};
use build::Builder;
use isobath_qcow2::Lsn;
use isobath_qcow2::journal::{BLOCK, JournalExtension, Record};
use isobath_storage::{IoBuf, Storage};
use isobath_sync::AsyncMutex;
use record::{MAX_DIRTY, TooLarge};
use ring::Ring;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Bytes that changes take until they are in their places: pages of tables, and a record of the largest journal.
pub(super) const MEMORY: u64 = MAX_DIRTY as u64 + super::MAX_JOURNAL;

/// Commits with changes before a journal is set up if it was not requested: a guest that flushes less often does not
/// gain from one.
const COMMITS_BEFORE: u32 = 3;

/// The mode's state.
pub struct Journal {
    ordered: Ordered,
    /// The journal is set up without waiting for commits that show that it pays.
    at_once: AtomicBool,
    /// The next commit sets it up even if it has no changes.
    without_changes: AtomicBool,
    /// The size of the area, in bytes.
    size: u64,
    /// Changes in progress that must not go through the journal.
    held: AtomicUsize,
    /// The number of pending changes at which a commit is due.
    due: AtomicUsize,
    /// The next commit must write a record even if it has no changes.
    asked: AtomicBool,
    state: AsyncMutex<JournalState>,
}

#[derive(Default)]
struct JournalState {
    /// Commits that changed something.
    commits: u32,
    /// The image cannot have a journal.
    impossible: bool,
    /// Clusters of the area, which are kept even while it is not in use.
    area: Option<Range<u64>>,
    active: Option<Active>,
}

/// A journal in use.
struct Active {
    extension: JournalExtension,
    ring: Ring,
    /// The last record.
    last: Lsn,
    /// The last record whose contents are all written in place.
    written: Lsn,
    /// The last record whose contents are all durable in place.
    durable: Lsn,
    /// Clusters that records have operations on, and the last such record.
    last_operations: BTreeMap<u64, Lsn>,
    /// Mappings embedded with a lower LSN are in the last record, or in earlier ones.
    checkpoint_lsn: Lsn,
}

impl Active {
    /// A sync has ended: everything written in place before it, up to record `written`, is durable.
    fn synced(&mut self, written: Lsn) {
        self.durable = self.durable.max(written);
    }

    /// The record after the last one; see [`Builder::new`].
    fn next(&self, cluster_size: u64, lsn: Lsn, tail: Lsn) -> Builder {
        Builder::new(cluster_size, lsn, self.last, tail)
    }

    /// The next record fits what is known of the earlier ones.
    fn check_invariants(&self, record: &Record, image: &Path) -> Result<()> {
        invariant(
            self.durable <= self.written && self.written <= self.last,
            image,
            "what is durable in place was written, and what was written was recorded",
        )?;
        invariant(
            record.tail <= self.durable.next() || record.tail == record.lsn,
            image,
            "a recovery replays each record that is not durable in place",
        )?;
        invariant(
            self.checkpoint_lsn <= record.lsn,
            image,
            "a record contains no mapping that is embedded after it",
        )?;
        let recorded = self.last_operations.values().all(|last| *last <= self.last);
        invariant(recorded, image, "what records have operations on is in records")
    }

    /// Writes a record, for which there must be room, and makes it durable together with all data written before.
    async fn write<S: Storage>(&mut self, metadata: &Metadata<S>, record: Builder) -> Result<()> {
        let layer = &metadata.layer;
        let (clusters, record) = record.finish();
        invariant(
            record.lsn > self.last,
            layer.name(),
            "a record's number is above the last one's",
        )?;
        let error = |error| layer.format_error(error);
        let bytes = record.encode(self.extension.id).map_err(error)?;
        let count = (bytes.len() / BLOCK) as u64;
        let start =
            always(self.ring.room(count), layer.name(), "a record is written where there is room")?;
        self.check_invariants(&record, layer.name())?;
        self.ring.check(record.lsn, start, count);
        let at = self.extension.area_offset.get() + start * BLOCK as u64;
        layer.storage().write_at(at, IoBuf::copy_of(&bytes)).await?;
        if !sabotage::is(Sabotage::UnflushedRecord) {
            layer.storage().flush().await?;
        }
        if let Some(log) = &metadata.log {
            log.recorded(record.lsn);
        }
        self.ring.take(record.lsn, start, count);
        self.ring.release(record.tail);
        self.last_operations.retain(|_, last| *last >= record.tail);
        self.last_operations.extend(clusters.into_iter().map(|cluster| (cluster, record.lsn)));
        self.last = record.lsn;
        Ok(())
    }
}

/// The most blocks that a record may take, so that there is room for one after a checkpoint that is not durable yet.
fn most_blocks(ring: &Ring) -> u64 {
    ring.blocks() / 8
}

impl Journal {
    /// Makes every change recorded, and all data written, before the call durable. After an error it is unknown what is
    /// durable.
    pub async fn commit<S: Storage>(
        &self,
        metadata: &Metadata<S>,
        readers: &Readers,
    ) -> Result<()> {
        let mut state = self.state.lock().await;
        let state = &mut *state;
        if state.active.is_some() {
            return self.commit_active(state, metadata, readers).await;
        }
        let asked = self.without_changes.swap(false, Ordering::SeqCst);
        let changes = asked || metadata.tables.pending() > 0;
        state.commits = state.commits.saturating_add(u32::from(changes));
        let wanted = self.at_once.load(Ordering::SeqCst) || state.commits > COMMITS_BEFORE;
        let held = self.held.load(Ordering::SeqCst) > 0;
        if !changes || !wanted || held || state.impossible {
            return self.ordered.commit(metadata, readers).await;
        }
        metadata.data_journal.activate();
        self.ordered.commit(metadata, readers).await?;
        Box::pin(self.set_up(state, metadata)).await?;
        if state.active.is_some() && metadata.open_zone().await? {
            self.ask_for_record();
        }
        Ok(())
    }

    /// Commits with the journal in use.
    async fn commit_active<S: Storage>(
        &self,
        state: &mut JournalState,
        metadata: &Metadata<S>,
        readers: &Readers,
    ) -> Result<()> {
        let zones = &metadata.zones;
        let name = metadata.layer.name();
        let active = always(state.active.as_mut(), name, "a journal in use has an area")?;
        let point = zones.begin_commit(&metadata.sequence);
        if self.commit_embedded(active, metadata, point.lsn).await? {
            zones.finish_embedded_commit(point);
        } else {
            point.landed().await;
            let too_much = self.commit_record(active, metadata, readers, &point).await?;
            if let Some(TooLarge { batch, log, data }) = too_much {
                Box::pin(self.deactivate_locked(state, metadata, Some(data))).await?;
                Box::pin(ordered::finish(metadata, readers, batch, log, &[])).await?;
            }
            zones.finish_commit(point);
        }
        if metadata.open_zone().await? {
            self.ask_for_record();
        }
        metadata.grow_ahead().await
    }

    /// `at_once` sets up the journal at the first commit. `size` is the wanted size of the area in bytes, which is
    /// rounded to clusters and blocks.
    pub fn new(at_once: bool, size: u64) -> Self {
        Self {
            ordered: Ordered,
            at_once: AtomicBool::new(at_once),
            without_changes: AtomicBool::new(false),
            size,
            held: AtomicUsize::new(0),
            due: AtomicUsize::new(usize::MAX),
            asked: AtomicBool::new(false),
            state: AsyncMutex::ranked(JournalState::default(), lock_order::JOURNAL),
        }
    }

    /// Whether there are so many pending changes that a commit is due.
    pub fn is_due(&self, changes: usize, journaled: u64) -> bool {
        let due = self.due.load(Ordering::Relaxed);
        changes >= due || journaled >= self.room() as u64
    }

    /// Bytes of data that fit into a record besides its other operations.
    pub fn room(&self) -> usize {
        self.due.load(Ordering::Relaxed).saturating_mul(build::BYTES_PER_CHANGE)
    }

    /// Makes the next commit write a record even if it has no changes.
    pub fn ask_for_record(&self) {
        self.asked.store(true, Ordering::SeqCst);
    }

    /// Sets up the journal at the next commit with changes.
    pub fn want_at_once(&self) {
        self.at_once.store(true, Ordering::SeqCst);
    }

    /// Sets up the journal at the next commit.
    pub fn want_now(&self) {
        self.want_at_once();
        self.without_changes.store(true, Ordering::SeqCst);
    }

    /// Keeps the journal from being set up until the returned guard is dropped. The caller deactivates it.
    pub fn hold(&self) -> SetupHold<'_> {
        self.begin_hold();
        SetupHold(self)
    }

    /// Like [`hold`](Self::hold), until [`end_hold`](Self::end_hold).
    pub fn begin_hold(&self) {
        self.held.fetch_add(1, Ordering::SeqCst);
    }

    /// Ends what [`begin_hold`](Self::begin_hold) began.
    pub fn end_hold(&self) {
        if self.held.fetch_sub(1, Ordering::SeqCst) == 0 {
            violated("the end of a hold has a beginning");
        }
    }

    /// Writes everything in the journal in place and takes the journal out of use. No other commit may run meanwhile,
    /// and nothing may be embedded.
    async fn deactivate_locked<S: Storage>(
        &self,
        state: &mut JournalState,
        metadata: &Metadata<S>,
        commit: Option<DataCommit>,
    ) -> Result<()> {
        if state.active.is_none() {
            return Ok(());
        }
        let name = metadata.layer.name();
        invariant(!metadata.zones.any(), name, "a journal that lists zones stays in use")?;
        checkpoint(metadata).await?;
        metadata.sync().await?;
        setup::clear_bit(&metadata.layer).await?;
        if let Some(log) = &metadata.log {
            log.end();
        }
        state.active = None;
        self.due.store(usize::MAX, Ordering::Relaxed);
        metadata.alloc.end_journal().await;
        metadata.data_journal.deactivate(commit);
        loop {
            let writes = metadata.data_journal.unrecorded();
            if writes.is_empty() {
                return Ok(());
            }
            metadata.place(&writes).await?;
            metadata.data_journal.placed(&writes);
        }
    }

    /// Takes the journal out of use, until the next commit unless it is [held](Self::hold). The image is then as after
    /// a commit without a journal.
    pub async fn deactivate<S: Storage>(&self, metadata: &Metadata<S>) -> Result<()> {
        self.deactivate_locked(&mut *self.state.lock().await, metadata, None).await
    }
}

/// See [`Journal::hold`].
pub struct SetupHold<'a>(&'a Journal);

impl Drop for SetupHold<'_> {
    fn drop(&mut self) {
        self.0.end_hold();
    }
}

/// Writes the contents of durable records in place.
async fn checkpoint<S: Storage>(metadata: &Metadata<S>) -> Result<()> {
    metadata.place(&metadata.data_journal.recorded()).await?;
    metadata.tables.checkpoint().await?;
    metadata.alloc.checkpoint().await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broken::{must_panic, must_violate, qcow2, writer};
    use crate::durability::MetadataMode;
    use crate::options::OpenOptions;
    use futures_executor::block_on;
    use isobath_qcow2::HostOffset;

    /// A journal whose fifth record was the last one.
    fn active() -> Active {
        let extension = JournalExtension {
            area_offset: HostOffset::new(64 << 20),
            area_length: 1 << 20,
            id: 7,
            first_lsn: Lsn::new(1),
        };
        Active {
            extension,
            ring: Ring::new(8),
            last: Lsn::new(5),
            written: Lsn::new(4),
            durable: Lsn::new(3),
            last_operations: BTreeMap::from([(9, Lsn::new(5))]),
            checkpoint_lsn: Lsn::new(6),
        }
    }

    #[test]
    fn a_record_fits_what_is_known_of_the_earlier_ones() {
        type Change = fn(&mut Active, &mut Record);
        let written = "what is durable in place was written, and what was written was recorded";
        let cases: [(&str, Change); 5] = [
            (written, |active, _| active.durable = Lsn::new(5)),
            (written, |active, _| active.written = Lsn::new(6)),
            ("a recovery replays each record that is not durable in place", |_, record| {
                record.tail = Lsn::new(5);
            }),
            ("a record contains no mapping that is embedded after it", |active, _| {
                active.checkpoint_lsn = Lsn::new(7);
            }),
            ("what records have operations on is in records", |active, _| {
                active.last_operations.insert(9, Lsn::new(6));
            }),
        ];
        for (what, change) in cases {
            let mut active = active();
            let (_, mut record) = active.next(65536, Lsn::new(6), Lsn::new(4)).finish();
            active.check_invariants(&record, Path::new("image")).unwrap();
            change(&mut active, &mut record);
            must_violate(active.check_invariants(&record, Path::new("image")), what);
        }
    }

    #[test]
    fn a_record_has_a_number_and_a_place_of_its_own() {
        let writer = writer(&OpenOptions::new().metadata(MetadataMode::Journal));
        let metadata = &qcow2(&writer).metadata;
        let write = |active: &mut Active, lsn| {
            let record = active.next(65536, Lsn::new(lsn), Lsn::new(4));
            block_on(active.write(metadata, record))
        };
        must_violate(write(&mut active(), 5), "a record's number is above the last one's");
        let mut full = Active { ring: Ring::new(0), ..active() };
        must_violate(write(&mut full, 6), "a record is written where there is room");
        write(&mut active(), 6).unwrap();
    }

    #[test]
    fn a_journal_in_use_has_an_area_and_stays_while_it_lists_zones() {
        let writer = writer(&OpenOptions::new().metadata(MetadataMode::Embedded));
        let metadata = &qcow2(&writer).metadata;
        let journal = Journal::new(true, 1 << 20);
        let mut state = JournalState::default();
        let readers = Readers::default();
        let committed = block_on(Box::pin(journal.commit_active(&mut state, metadata, &readers)));
        must_violate(committed, "a journal in use has an area");
        state.active = Some(active());
        metadata.zones.open(&(100..104), true, true);
        let ended = block_on(Box::pin(journal.deactivate_locked(&mut state, metadata, None)));
        must_violate(ended, "a journal that lists zones stays in use");
    }

    #[test]
    fn only_a_hold_that_began_ends() {
        let journal = Journal::new(true, 1 << 20);
        drop(journal.hold());
        must_panic(|| journal.end_hold(), "the end of a hold has a beginning");
    }
}
