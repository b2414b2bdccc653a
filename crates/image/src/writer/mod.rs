//! The write side of one image: commits, and what must hold before and after them.

mod bitmaps;
mod corrupt;
mod index;
mod open;
mod resize;

pub use corrupt::StopOnPanic;

use crate::durability::{CommitPolicy, GroupCommit, Metadata, MetadataMode};
use crate::entries::ActiveEntries;
use crate::layer::Layer;
use crate::range_lock::RangeLocks;
use crate::readers::Readers;
use crate::restart_log::{RestartLog, Suspended};
use crate::sabotage::{self, Sabotage};
use crate::tables::References;
use crate::{DiskError, Result, alloc, durability, lock_order, tables};
use isobath_qcow2::{AutoclearFeatures, ClusterIndex, Geometry, HostCluster, HostOffset, L2Entry};
use isobath_storage::Storage;
use std::future::Future;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Why there can be no restart log.
const WITHOUT_MEMORY: &str = "writes that were not flushed would be lost if the server is killed: there is no restart \
                              memory in /dev/shm";

/// The number of pending changes at which a commit is made without a flush from the guest, since they take memory until
/// then.
const PENDING_LIMIT: usize = 64 << 10;

/// Bytes that the writer of a qcow2 image may take, besides what grows with its disk: cached pages of tables (8 MiB)
/// and refcounts (16 MiB), and changes that its journal has and that are not in their places (12 MiB).
pub const QCOW2_MEMORY: u64 =
    tables::CACHE_BYTES as u64 + alloc::CACHE_BYTES + durability::JOURNAL_MEMORY;

/// The write side of a disk.
pub struct Writer<S> {
    /// Held by requests that change the disk; see [`RangeLocks`].
    pub ranges: RangeLocks,
    group: GroupCommit,
    policy: CommitPolicy,
    /// Held by a change of the disk's size.
    pub resizing: isobath_sync::AsyncMutex<()>,
    /// [`keep_readable`](Self::keep_readable) is in force.
    readable: AtomicBool,
    /// What a qcow2 image needs and a raw one does not.
    qcow2: Option<Qcow2Writer<S>>,
    layer: Arc<Layer<S>>,
}

/// The write side of a qcow2 image.
pub struct Qcow2Writer<S> {
    /// What a commit works on.
    pub metadata: Metadata<S>,
    /// There is no layer below: unallocated clusters read as zeroes.
    alone: AtomicBool,
    bitmaps: bitmaps::Bitmaps,
    /// Bytes of the file when it was opened for this.
    length: u64,
}

impl<S: Storage> Writer<S> {
    /// The write side of a raw image.
    pub fn raw(layer: &Arc<Layer<S>>) -> Self {
        Self::new(layer, CommitPolicy::new(MetadataMode::Ordered, None, 0, false), None)
    }

    fn new(layer: &Arc<Layer<S>>, policy: CommitPolicy, qcow2: Option<Qcow2Writer<S>>) -> Self {
        Self {
            ranges: RangeLocks::ranked(lock_order::RANGE),
            group: GroupCommit::default(),
            policy,
            resizing: isobath_sync::AsyncMutex::ranked((), lock_order::RESIZING),
            readable: AtomicBool::new(false),
            qcow2,
            layer: Arc::clone(layer),
        }
    }

    /// Fails if an earlier failure forbids writes.
    pub fn check(&self) -> Result<()> {
        self.group.check()
    }

    /// Whether a journal may be in use, which has checksums of written data.
    pub fn may_have_journal(&self) -> bool {
        self.policy.journal().is_some()
    }

    /// The image that it writes.
    pub fn layer(&self) -> &Layer<S> {
        &self.layer
    }

    /// What a qcow2 image needs and a raw one does not.
    pub fn qcow2(&self) -> Option<&Qcow2Writer<S>> {
        self.qcow2.as_ref()
    }

    /// Whether mappings may be embedded in data.
    pub fn embeds(&self) -> bool {
        self.qcow2.as_ref().is_some_and(|qcow2| qcow2.metadata.zones.are_used())
    }

    /// Makes everything done so far durable.
    pub async fn commit(&self, readers: &Readers) -> Result<()> {
        self.group.run(|| self.commit_alone(readers)).await
    }

    /// Like [`commit`](Self::commit), for a caller that has ensured that no other commit runs.
    pub async fn commit_alone(&self, readers: &Readers) -> Result<()> {
        match &self.qcow2 {
            Some(qcow2) => self.policy.commit(&qcow2.metadata, readers).await,
            None => Ok(self.layer.storage().flush().await?),
        }
    }

    /// Takes adjacent clusters past everything ever used, durably. Nothing refers to them: they are leaked until
    /// something does.
    pub async fn take_clusters(&self, readers: &Readers, count: u64) -> Result<HostOffset> {
        let qcow2 = self.qcow2.as_ref().ok_or(DiskError::ReadOnly)?;
        let Metadata { alloc, tables, .. } = &qcow2.metadata;
        let run = alloc.allocate_adjacent(count).await?;
        let mut claim = tables.claim();
        claim.add_run(&run);
        let offset = alloc.offset_of(run.start)?;
        self.exclusively(|| async {
            alloc.publish(claim.clusters()).await?;
            claim.keep();
            self.commit_alone(readers).await
        })
        .await?;
        Ok(offset)
    }

    /// Runs `change` while no commit runs; its failure forbids writes.
    pub async fn exclusively<F: Future<Output = Result<()>>>(
        &self,
        change: impl FnOnce() -> F,
    ) -> Result<()> {
        self.group.exclusively(change).await
    }

    /// Commits if there are many pending changes. The caller is not inside the epoch and holds no range.
    pub async fn commit_if_much(&self, readers: &Readers) -> Result<()> {
        let Some(qcow2) = &self.qcow2 else { return Ok(()) };
        let pending = qcow2.metadata.tables.pending();
        let kept = qcow2.metadata.data_journal.pending();
        let due = self.policy.journal().is_some_and(|journal| journal.is_due(pending, kept))
            || self.log().is_some_and(|log| log.has_much());
        if due || pending >= PENDING_LIMIT {
            // Boxed, since few requests commit, and its future would be most of theirs.
            Box::pin(self.commit(readers)).await?;
        }
        Ok(())
    }

    /// The restart log.
    fn log(&self) -> Option<&Arc<RestartLog>> {
        self.qcow2.as_ref().and_then(|qcow2| qcow2.metadata.log.as_ref())
    }

    /// Returns once completed changes survive a kill of this process, if that was requested. The caller is not inside
    /// the epoch and holds no range.
    pub async fn outlive(&self, readers: &Readers) -> Result<()> {
        if self.log().is_some_and(|log| log.must_sync()) {
            // Boxed as above.
            Box::pin(self.commit(readers)).await?;
        }
        Ok(())
    }

    /// Makes everything durable, and then every request before it completes, until the returned guard is dropped.
    pub async fn without_log(&self, readers: &Readers) -> Result<Option<Suspended>> {
        let Some(log) = self.log() else { return Ok(None) };
        let suspended = log.suspend();
        self.commit(readers).await?;
        Ok(Some(suspended))
    }

    /// Commits with a record even if there are no changes, so that data covered by the last record's checksums may
    /// change.
    pub async fn commit_with_record(&self, readers: &Readers) -> Result<()> {
        if let Some(journal) = self.policy.journal() {
            journal.ask_for_record();
        }
        self.commit(readers).await
    }

    /// From now on completed writes survive a kill of this process, flushed or not, including those completed before
    /// the call. Nothing more is embedded.
    pub async fn begin_restart_log(&self, readers: &Readers) -> Result<()> {
        let (Some(journal), Some(qcow2)) = (self.policy.journal(), &self.qcow2) else {
            return Ok(());
        };
        let Some(log) = self.log().filter(|log| !log.is_awake()) else { return Ok(()) };
        journal.want_at_once();
        std::mem::forget(qcow2.metadata.zones.suspend());
        let wake = async {
            log.wake();
            self.commit(readers).await
        };
        if sabotage::is(Sabotage::LateRestartLog) {
            log.wake();
            return Ok(());
        }
        // The journal that is set up next has a log.
        self.without_journal(readers, wake).await
    }

    /// From now on completed writes survive a kill of this process in any case: what cannot be logged is made durable
    /// before its request completes. The log was [begun](Self::begin_restart_log), and nothing written so far. The
    /// journal is put into use, if it can be, which shows that nobody else has changed the image since.
    ///
    /// # Errors
    /// The image cannot have a log, or the storage fails.
    pub async fn require_restart_log(&self, readers: &Readers) -> Result<()> {
        // Others are written in place.
        let Some(qcow2) = &self.qcow2 else { return Ok(()) };
        let refused = |reason: String| {
            Err(DiskError::Refused { image: self.layer.name().to_owned(), reason })
        };
        let Some(log) = self.log() else {
            let reason = "in metadata mode 'ordered' writes that were not flushed are lost if the server is killed; \
                          use another one, such as auto";
            return refused(reason.into());
        };
        self.policy.refuse_without_journal(&qcow2.metadata.layer).await?;
        match log.require(&**self.layer.storage()).await {
            Ok(true) => {
                if let Some(journal) = self.policy.journal() {
                    journal.want_now();
                }
                self.commit(readers).await
            }
            Ok(false) => refused(format!("{WITHOUT_MEMORY}, and its file has none")),
            Err(error) => refused(format!("{WITHOUT_MEMORY}: {error}")),
        }
    }

    /// Ensures that a program that opens the image after this process was killed finds the restart log, or no journal in
    /// use if the log is [required](Self::require_restart_log).
    ///
    /// # Errors
    /// The journal cannot be taken out of use.
    pub async fn check_log(&self, readers: &Readers) -> Result<()> {
        let Some(log) = self.log() else { return Ok(()) };
        if log.check_memory(&**self.layer.storage()).await {
            return Ok(());
        }
        // It is set up again with the next change if there is memory then.
        Box::pin(self.without_journal(readers, async { Ok(()) })).await
    }

    /// Ensures that other programs that read the image's file through its tables always find the data from when they
    /// opened it, or newer data: there is no journal, and no cluster is reused. This lasts until the writer is closed,
    /// or until [`own_readers`](Self::own_readers) is called.
    pub async fn keep_readable(&self) {
        self.readable.store(true, Ordering::SeqCst);
        if let Some(journal) = self.policy.journal() {
            journal.begin_hold();
        }
        if let Some(log) = self.log() {
            log.promise_nothing();
        }
        if let Some(qcow2) = &self.qcow2 {
            qcow2.metadata.alloc.keep_freed(true).await;
        }
    }

    /// From now on all readers of the image use its own disk.
    pub async fn own_readers(&self) {
        if !self.readable.swap(false, Ordering::SeqCst) {
            return;
        }
        if let Some(journal) = self.policy.journal() {
            journal.end_hold();
        }
        if let Some(log) = self.log() {
            log.promise();
        }
        if let Some(qcow2) = &self.qcow2 {
            qcow2.metadata.alloc.keep_freed(false).await;
        }
    }

    /// Runs `change`, which commits and writes metadata itself, with the journal out of use. Other requests may change
    /// the disk meanwhile.
    pub async fn without_journal<T>(
        &self,
        readers: &Readers,
        change: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let (Some(journal), Some(qcow2)) = (self.policy.journal(), &self.qcow2) else {
            return change.await;
        };
        let _held = journal.hold();
        let _suspended = qcow2.metadata.zones.suspend();
        self.extract_all(readers).await?;
        let _unlogged = self.without_log(readers).await?;
        self.exclusively(|| journal.deactivate(&qcow2.metadata)).await?;
        change.await
    }

    /// Makes some embedded lead blocks plain, durably: of zones that take no more clusters, or of `all` zones. Returns
    /// `false` if there were none.
    pub async fn extract_some(&self, all: bool, readers: &Readers) -> Result<bool> {
        let (Some(journal), Some(qcow2)) = (self.policy.journal(), &self.qcow2) else {
            return Ok(false);
        };
        let found = qcow2.metadata.extract_leads(all, journal.room(), readers).await?;
        if found {
            self.commit_with_record(readers).await?;
        }
        Ok(found)
    }

    /// Makes all embedded lead blocks plain. Nothing more is embedded meanwhile.
    async fn extract_all(&self, readers: &Readers) -> Result<()> {
        let Some(qcow2) = &self.qcow2 else { return Ok(()) };
        while qcow2.metadata.zones.any() {
            if !self.extract_some(true, readers).await? {
                if !sabotage::is(Sabotage::ZonePreparedLate) {
                    qcow2.metadata.zones.none_in_preparation().await;
                }
                // This record lists no zones.
                self.commit_with_record(readers).await?;
            }
        }
        Ok(())
    }

    /// Does background work, whenever it `may`, until the writer is closed.
    pub async fn attend(&self, readers: &Readers, may: impl Fn() -> bool) -> Result<()> {
        let Some(qcow2) = &self.qcow2 else { return Ok(()) };
        qcow2.metadata.attend(may, async || self.extract_some(false, readers).await).await
    }

    /// Waits for the piece of background work in progress.
    pub async fn finish_upkeep(&self) {
        if let Some(qcow2) = &self.qcow2 {
            qcow2.metadata.finish_upkeep().await;
        }
    }

    /// Commits, and writes what a commit leaves to the next one.
    pub async fn close(&self, readers: &Readers) -> Result<()> {
        if let Some(qcow2) = &self.qcow2 {
            qcow2.metadata.end_upkeep().await;
        }
        self.group.check()?;
        let unlogged = self.without_log(readers).await?;
        if unlogged.is_none() {
            self.commit(readers).await?;
        }
        if let Some(qcow2) = &self.qcow2 {
            let _suspended = qcow2.metadata.zones.suspend();
            self.extract_all(readers).await?;
            if let Some(journal) = self.policy.journal() {
                self.exclusively(|| journal.close(&qcow2.metadata)).await?;
            }
            let stored = self.store_bitmaps(readers).await?;
            if stored || qcow2.metadata.alloc.is_dirty().await {
                self.commit(readers).await?;
            }
            qcow2.metadata.alloc.cut_what_was_added().await?;
            qcow2.pad_file().await?;
        }
        self.group.close();
        if let Some(log) = self.log() {
            log.remove();
        }
        Ok(())
    }
}

/// The entries of an image as its writer knows them.
pub struct Entries<S>(Arc<Writer<S>>);

impl<S: Storage> Entries<S> {
    /// The entries of a qcow2 image's writer.
    pub fn of(writer: Arc<Writer<S>>) -> Option<Self> {
        writer.qcow2.is_some().then_some(Self(writer))
    }
}

impl<S: Storage> ActiveEntries for Entries<S> {
    async fn entries(&self, first: ClusterIndex, count: u64) -> Result<Vec<L2Entry>> {
        match self.0.qcow2() {
            Some(qcow2) => qcow2.metadata.entries(first, count).await,
            None => Ok(Vec::new()),
        }
    }

    fn is_metadata(&self, offset: HostOffset) -> bool {
        self.0.qcow2().is_some_and(|qcow2| qcow2.metadata.is_metadata(offset))
    }
}

impl<S: Storage> Qcow2Writer<S> {
    /// Whether there is no layer below: unallocated clusters read as zeroes.
    pub fn alone(&self) -> bool {
        self.alone.load(Ordering::Relaxed)
    }

    /// Sets whether there is no layer below. No request may be in progress.
    pub fn set_alone(&self, alone: bool) {
        self.alone.store(alone, Ordering::Relaxed);
    }

    /// The entries of adjacent clusters, from as many tables as necessary.
    pub async fn entries(&self, clusters: Range<u64>) -> Result<Vec<L2Entry>> {
        let geometry = self.geometry();
        let mut entries = Vec::with_capacity((clusters.end - clusters.start) as usize);
        let mut first = clusters.start;
        while first < clusters.end {
            let (_, l2_index) = geometry.table_position(ClusterIndex::new(first));
            let count = (geometry.l2_entries() - l2_index as u64).min(clusters.end - first);
            entries.extend(self.metadata.tables.entries(ClusterIndex::new(first), count).await?);
            first += count;
        }
        if sabotage::is(Sabotage::LostEntry) && entries.len() > 1 {
            entries.pop();
        }
        Ok(entries)
    }

    /// The entry of a cluster.
    pub async fn entry(&self, cluster: ClusterIndex) -> Result<L2Entry> {
        self.metadata.tables.entry(cluster).await
    }

    /// Records a cluster's new entry, for a caller that has [ensured](Self::ensure_tables) that it has a table.
    pub fn record(
        &self,
        cluster: ClusterIndex,
        entry: L2Entry,
        references: References<'_>,
    ) -> Result<()> {
        self.check_releases(references.released())?;
        self.metadata.tables.record(cluster, entry, references)
    }

    /// Notes that guest clusters were discarded: the file may become shorter.
    pub fn note_discard(&self) {
        self.metadata.tables.mark_discarded();
    }

    /// For [`Sabotage::EarlyReuse`]: releases clusters at once.
    #[doc(hidden)]
    pub async fn release_early(&self, clusters: &[HostCluster]) -> Result<()> {
        self.metadata.alloc.release(clusters).await
    }

    /// The error for an image that contradicts itself.
    pub fn corrupt(&self, reason: String) -> DiskError {
        self.metadata.alloc.corrupt(reason)
    }

    /// Checks that the cluster at `host`, to which an entry maps guest offset `start`, may be written to.
    ///
    /// # Errors
    /// [`DiskError::Corrupt`] if it holds one of the image's own tables, is past the end of the file, or is another
    /// part of an external data file.
    pub fn check_place(&self, start: u64, host: HostOffset) -> Result<()> {
        let layer = &self.metadata.layer;
        if self.metadata.is_metadata(host) {
            return Err(self.corrupt(format!(
                "guest offset {start} is mapped to host offset {host}, which holds one of the image's own tables"
            )));
        }
        if host.get() >= layer.data_end() {
            return Err(DiskError::Corrupt {
                image: layer.name().to_owned(),
                reason: format!(
                    "guest offset {start} is mapped to host offset {host}, past the end of the file ({} bytes), which \
                     may be truncated",
                    layer.file_length()
                ),
            });
        }
        if self.geometry().has_data_file() && host.get() != start {
            return Err(self.corrupt(format!(
                "guest offset {start} is mapped to {host} of its external data file, which holds another part of the \
                 disk"
            )));
        }
        Ok(())
    }

    /// Ensures that adjacent clusters have tables that may be changed.
    pub async fn ensure_tables(&self, clusters: Range<u64>) -> Result<()> {
        let geometry = self.geometry();
        let (first, _) = geometry.table_position(ClusterIndex::new(clusters.start));
        let (last, _) = geometry.table_position(ClusterIndex::new(clusters.end - 1));
        for l1_index in first..=last {
            self.metadata.tables.ensure_table(l1_index, &self.metadata.alloc).await?;
        }
        Ok(())
    }

    /// Refuses references of guest data to the image's own tables: releasing them would free the tables.
    pub fn check_releases(&self, releases: &[HostCluster]) -> Result<()> {
        let alloc = &self.metadata.alloc;
        match releases.iter().find(|cluster| alloc.is_metadata(**cluster)) {
            None => Ok(()),
            Some(cluster) => Err(alloc.corrupt(format!(
                "guest data lies in host cluster {cluster}, which holds one of its own tables"
            ))),
        }
    }

    /// Sizes that follow from the header.
    pub fn geometry(&self) -> Geometry {
        self.metadata.tables.geometry()
    }

    /// Whether the data file alone must hold the disk's contents.
    pub fn data_file_raw(&self) -> bool {
        let qcow2 = self.metadata.layer.qcow2();
        qcow2.geometry.has_data_file()
            && qcow2.header.read().autoclear.contains(AutoclearFeatures::DATA_FILE_RAW)
    }

    /// Extends the file to whole sectors: compressed data may end anywhere. A file that ends where it did stays as it
    /// is.
    async fn pad_file(&self) -> Result<()> {
        let storage = self.metadata.layer.storage();
        let length = storage.len().await?;
        if length != self.length && length % 512 != 0 {
            storage.set_len(length.next_multiple_of(512)).await?;
        }
        Ok(())
    }
}
