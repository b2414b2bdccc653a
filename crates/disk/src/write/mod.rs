//! Writes: in place where the active layer owns the cluster alone, else to newly allocated clusters.

mod allocate;
mod bitmaps;
mod compressed;
mod corrupt;
mod discard;
mod embed;
mod open;
mod plan;
mod pull;
mod zero;

use crate::chain::Layer;
use crate::disk::Disk;
use crate::durability::survive::{Log, Suspended};
use crate::durability::{GroupCommit, Metadata, MetadataMode, Mode};
use crate::map::resolve::ActiveEntries;
use crate::map::{Extent, Source};
use crate::range_lock::RangeLocks;
use crate::read::Readers;
use crate::sabotage::{self, Sabotage};
use crate::{DiskError, Result};
use futures_util::future::join_all;
use isobath_qcow2::{ClusterIndex, HostOffset, L2Entry};
use isobath_storage::{Host, IoBuf, Storage};
use std::future::Future;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub(crate) use plan::referenced;
pub(crate) use pull::{Need, Pulled, Surplus};

/// Changes that gather without a flush from the guest before a commit is made all the same: they
/// take memory until then.
const PENDING_LIMIT: usize = 64 << 10;

/// Bytes of one write that may be kept for the next record.
const MOST_KEPT: u64 = 256 << 10;
/// Records after which nothing of before is guarded any more, unless it was written to meanwhile.
const SEALS: u32 = 3;

/// The write side of a disk.
pub(crate) struct Writer<S> {
    /// Held by requests that change the disk; see [`RangeLocks`].
    pub(crate) ranges: RangeLocks,
    group: GroupCommit,
    mode: Mode,
    /// Held by a change of the disk's size.
    pub(crate) resizing: async_lock::Mutex<()>,
    /// [`keep_readable`](Self::keep_readable) is in force.
    readable: AtomicBool,
    /// What a qcow2 image needs and a raw one does not.
    qcow2: Option<Qcow2Writer<S>>,
    layer: Arc<Layer<S>>,
}

/// The write side of a qcow2 image.
pub(crate) struct Qcow2Writer<S> {
    pub(crate) metadata: Metadata<S>,
    /// There is no layer below: what is unallocated reads as zeroes.
    alone: AtomicBool,
    bitmaps: bitmaps::Bitmaps,
}

impl<S: Storage> Writer<S> {
    pub(crate) fn raw(layer: &Arc<Layer<S>>) -> Self {
        Self::new(layer, Mode::new(MetadataMode::Ordered, None, 0, false), None)
    }

    fn new(layer: &Arc<Layer<S>>, mode: Mode, qcow2: Option<Qcow2Writer<S>>) -> Self {
        Self {
            ranges: RangeLocks::default(),
            group: GroupCommit::default(),
            mode,
            resizing: async_lock::Mutex::default(),
            readable: AtomicBool::new(false),
            qcow2,
            layer: Arc::clone(layer),
        }
    }

    /// Fails if an earlier failure forbids writes.
    pub(crate) fn check(&self) -> Result<()> {
        self.group.check()
    }

    pub(crate) fn qcow2(&self) -> Option<&Qcow2Writer<S>> {
        self.qcow2.as_ref()
    }

    /// Whether mappings may be embedded in data.
    pub(crate) fn embeds(&self) -> bool {
        self.qcow2.as_ref().is_some_and(|qcow2| qcow2.metadata.zones.are_used())
    }

    /// Makes everything done so far durable.
    pub(crate) async fn commit(&self, readers: &Readers) -> Result<()> {
        self.group.run(|| self.commit_alone(readers)).await
    }

    /// As [`commit`](Self::commit), for a caller that has seen to it that no other runs.
    pub(crate) async fn commit_alone(&self, readers: &Readers) -> Result<()> {
        match &self.qcow2 {
            Some(qcow2) => self.mode.commit(&qcow2.metadata, readers).await,
            None => Ok(self.layer.storage().flush().await?),
        }
    }

    /// Runs `change` while no commit runs; its failure forbids writes.
    pub(crate) async fn exclusively<F: Future<Output = Result<()>>>(
        &self,
        change: impl FnOnce() -> F,
    ) -> Result<()> {
        self.group.exclusively(change).await
    }

    /// Commits if much has gathered. The caller is not inside the gate and holds no range.
    pub(crate) async fn commit_if_much(&self, readers: &Readers) -> Result<()> {
        let Some(qcow2) = &self.qcow2 else { return Ok(()) };
        let pending = qcow2.metadata.tables.pending();
        let kept = qcow2.metadata.guard.pending();
        let due = self.mode.journal().is_some_and(|journal| journal.is_due(pending, kept))
            || self.log().is_some_and(|log| log.has_much());
        if due || pending >= PENDING_LIMIT {
            self.commit(readers).await?;
        }
        Ok(())
    }

    /// Where what was answered is noted.
    fn log(&self) -> Option<&Arc<Log>> {
        self.qcow2.as_ref().and_then(|qcow2| qcow2.metadata.log.as_ref())
    }

    /// Returns once what was done so far outlives this process, if that was asked for. The caller is
    /// not inside the gate and holds no range.
    pub(crate) async fn outlive(&self, readers: &Readers) -> Result<()> {
        if self.log().is_some_and(|log| log.owes()) {
            self.commit(readers).await?;
        }
        Ok(())
    }

    /// From now on every request is durable before it is answered, as long as the caller has what is
    /// returned; so is what was done before.
    pub(crate) async fn without_log(&self, readers: &Readers) -> Result<Option<Suspended>> {
        let Some(log) = self.log() else { return Ok(None) };
        let suspended = log.suspend();
        self.commit(readers).await?;
        Ok(Some(suspended))
    }

    /// Commits with a record also if there is nothing to tell, so that what the last one vouches for
    /// is free to change.
    async fn seal(&self, readers: &Readers) -> Result<()> {
        if let Some(journal) = self.mode.journal() {
            journal.ask_for_record();
        }
        self.commit(readers).await
    }

    /// From now on what was answered outlives this process, flushed or not: what was answered before the call,
    /// too. Nothing is embedded any more.
    pub(crate) async fn survive(&self, readers: &Readers) -> Result<()> {
        let (Some(journal), Some(qcow2)) = (self.mode.journal(), &self.qcow2) else {
            return Ok(());
        };
        let Some(log) = self.log().filter(|log| !log.is_awake()) else { return Ok(()) };
        journal.want_at_once();
        std::mem::forget(qcow2.metadata.zones.suspend());
        let wake = async {
            log.wake();
            self.commit(readers).await
        };
        if sabotage::is(Sabotage::LateSurvival) {
            log.wake();
            return Ok(());
        }
        // The journal that is set up next has a log.
        self.without_journal(readers, wake).await
    }

    /// Sees to it that who opens the image after this process was killed finds what outlives it.
    pub(crate) async fn check_log(&self) {
        if let Some(log) = self.log() {
            log.check_memory(&**self.layer.storage()).await;
        }
    }

    /// Sees to it that others who read the image's file through its tables meanwhile always find what
    /// was there when they opened it, or what was written since: no journal, and no cluster used
    /// again. Until the writer is closed, or told [otherwise](Self::own_readers).
    pub(crate) async fn keep_readable(&self) {
        self.readable.store(true, Ordering::SeqCst);
        if let Some(journal) = self.mode.journal() {
            journal.begin_hold();
        }
        if let Some(log) = self.log() {
            log.promise_nothing();
        }
        if let Some(qcow2) = &self.qcow2 {
            qcow2.metadata.alloc.keep_freed(true).await;
        }
    }

    /// Everybody who reads the image does so through its own disk.
    pub(crate) async fn own_readers(&self) {
        if !self.readable.swap(false, Ordering::SeqCst) {
            return;
        }
        if let Some(journal) = self.mode.journal() {
            journal.end_hold();
        }
        if let Some(log) = self.log() {
            log.promise();
        }
        if let Some(qcow2) = &self.qcow2 {
            qcow2.metadata.alloc.keep_freed(false).await;
        }
    }

    /// Runs `change`, which commits and writes metadata itself, with the journal out of use. Other
    /// requests may change the disk meanwhile.
    pub(crate) async fn without_journal<T>(
        &self,
        readers: &Readers,
        change: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let (Some(journal), Some(qcow2)) = (self.mode.journal(), &self.qcow2) else {
            return change.await;
        };
        let _held = journal.hold();
        let _suspended = qcow2.metadata.zones.suspend();
        self.seal_all(readers).await?;
        let _unlogged = self.without_log(readers).await?;
        self.exclusively(|| journal.settle(&qcow2.metadata)).await?;
        change.await
    }

    /// Makes some of what is embedded plain, durably: of zones that take no more clusters, or of `all`.
    /// `false` if there was nothing.
    pub(crate) async fn seal_some(&self, all: bool, readers: &Readers) -> Result<bool> {
        let (Some(journal), Some(qcow2)) = (self.mode.journal(), &self.qcow2) else {
            return Ok(false);
        };
        let found = qcow2.metadata.seal(all, journal.room(), readers).await?;
        if found {
            self.seal(readers).await?;
        }
        Ok(found)
    }

    /// Makes everything plain that is embedded. Nothing more is embedded meanwhile.
    async fn seal_all(&self, readers: &Readers) -> Result<()> {
        let Some(qcow2) = &self.qcow2 else { return Ok(()) };
        while qcow2.metadata.zones.any() {
            if !self.seal_some(true, readers).await? {
                // A record says that zones are no more.
                self.seal(readers).await?;
            }
        }
        Ok(())
    }

    /// Does what nobody waits for, until the writer is closed.
    pub(crate) async fn attend(&self, readers: &Readers) -> Result<()> {
        let Some(qcow2) = &self.qcow2 else { return Ok(()) };
        qcow2.metadata.attend(async || self.seal_some(false, readers).await.map(drop)).await
    }

    /// Commits, and writes what a commit leaves to the next one.
    pub(crate) async fn close(&self, readers: &Readers) -> Result<()> {
        if let Some(qcow2) = &self.qcow2 {
            qcow2.metadata.end_upkeep().await;
        }
        let unlogged = self.without_log(readers).await?;
        if unlogged.is_none() {
            self.commit(readers).await?;
        }
        if let Some(qcow2) = &self.qcow2 {
            let _suspended = qcow2.metadata.zones.suspend();
            self.seal_all(readers).await?;
            if let Some(journal) = self.mode.journal() {
                self.exclusively(|| journal.close(&qcow2.metadata)).await?;
            }
            if qcow2.metadata.alloc.is_dirty().await {
                self.commit(readers).await?;
            }
            qcow2.pad_file().await?;
        }
        self.group.close();
        if let Some(log) = self.log() {
            log.remove();
        }
        Ok(())
    }
}

/// What the writer of an image knows of its entries.
pub(crate) struct Entries<S>(Arc<Writer<S>>);

impl<S: Storage> Entries<S> {
    /// Of a qcow2 image's writer.
    pub(crate) fn of(writer: Arc<Writer<S>>) -> Option<Self> {
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
    /// Whether there is no layer below: what is unallocated reads as zeroes.
    pub(crate) fn alone(&self) -> bool {
        self.alone.load(Ordering::Relaxed)
    }

    /// From now on there is no layer below, or there is. No request is under way.
    pub(crate) fn set_alone(&self, alone: bool) {
        self.alone.store(alone, Ordering::Relaxed);
    }

    /// Bytes of a write in place that would be kept.
    fn guarded(&self, extents: &[Extent]) -> u64 {
        let places = extents.iter().filter_map(|e| Some((in_place(e)?, e.length)));
        places.map(|(host, length)| self.metadata.guard.guarded(&(host..host + length))).sum()
    }

    /// Lengthens the file to whole sectors: compressed data may end anywhere.
    async fn pad_file(&self) -> Result<()> {
        let storage = self.metadata.layer.storage();
        let length = storage.len().await?;
        if length % 512 != 0 {
            storage.set_len(length.next_multiple_of(512)).await?;
        }
        Ok(())
    }
}

/// Whether writes may go to where the extent is.
fn in_place(extent: &Extent) -> Option<u64> {
    match extent.source {
        Source::Data { host, in_place: true, .. } => Some(host),
        _ => None,
    }
}

/// Waits for every write to end, also after one has failed: a write given up could still land when
/// its range or its cluster is somebody else's.
async fn finish_writes<T, F: Future<Output = Result<T>>>(
    writes: impl IntoIterator<Item = F>,
) -> Result<Vec<T>> {
    join_all(writes).await.into_iter().collect()
}

impl<H: Host> Disk<H> {
    pub(crate) async fn write_range(&self, offset: u64, buf: IoBuf) -> Result<IoBuf> {
        let writer = self.writer()?;
        if buf.is_empty() {
            return Ok(buf);
        }
        let end = offset + buf.len() as u64;
        let Some(qcow2) = writer.qcow2() else {
            let _pass = self.readers.gate.enter();
            self.check_visible(offset..end)?;
            return Ok(writer.layer.storage().write_at(offset, buf).await?);
        };
        qcow2.note_write(offset..end).await?;
        let mut sealed = 0;
        loop {
            {
                let _range = writer.ranges.lock(offset..end).await;
                let _pass = self.readers.gate.enter();
                self.check_visible(offset..end)?;
                let extents = self.extents(offset..end).await?;
                if extents.iter().any(|extent| in_place(extent).is_none()) {
                    break;
                }
                if sealed == SEALS || qcow2.guarded(&extents) <= MOST_KEPT {
                    return self.write_in_place(qcow2, &extents, buf).await;
                }
            }
            // Much would be kept in memory: a record more, and its place may change.
            sealed += 1;
            Box::pin(writer.seal(&self.readers)).await?;
        }
        Box::pin(async {
            writer.commit_if_much(&self.readers).await?;
            self.write_allocating(writer, offset, buf).await
        })
        .await
    }

    /// Fails if the disk was shrunk since the request was let in. The caller is inside the gate,
    /// for which a shrink waits.
    fn check_visible(&self, range: Range<u64>) -> Result<()> {
        let size = self.chain.active().visible();
        if range.end > size {
            let length = range.end - range.start;
            return Err(DiskError::OutOfRange { offset: range.start, length, size });
        }
        Ok(())
    }

    async fn write_in_place(
        &self,
        qcow2: &Qcow2Writer<H::File>,
        extents: &[Extent],
        buf: IoBuf,
    ) -> Result<IoBuf> {
        let data = &qcow2.metadata;
        if let [Extent { source: Source::Data { host, .. }, .. }] = extents {
            return data.write(*host, buf).await;
        }
        Box::pin(self.write_several(data, extents, buf)).await
    }

    async fn write_several(
        &self,
        data: &Metadata<H::File>,
        extents: &[Extent],
        mut buf: IoBuf,
    ) -> Result<IoBuf> {
        let writes: Vec<_> = extents
            .iter()
            .filter_map(|extent| in_place(extent).map(|host| (host, extent.length)))
            .map(|(host, length)| data.write(host, buf.split_to(length as usize)))
            .collect();
        let mut whole = IoBuf::empty();
        for part in finish_writes(writes).await? {
            whole.unsplit(part);
        }
        Ok(whole)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_executor::block_on;
    use futures_util::future::LocalBoxFuture;
    use isobath_storage::{Operation, StorageError};
    use std::cell::Cell;
    use std::future::poll_fn;
    use std::io;
    use std::path::Path;
    use std::task::Poll;

    #[test]
    fn a_write_that_fails_waits_for_those_under_way() {
        let ended = Cell::new(false);
        let failing = async {
            let error = io::Error::from_raw_os_error(libc::EIO);
            Err(StorageError::new(Operation::Write, Path::new("disk"), error).into())
        };
        let slow = async {
            let mut turns = 5;
            poll_fn(|context| {
                turns -= 1;
                context.waker().wake_by_ref();
                if turns == 0 { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
            ended.set(true);
            Ok(())
        };
        let writes: [LocalBoxFuture<'_, Result<()>>; 2] = [Box::pin(failing), Box::pin(slow)];
        let error = block_on(finish_writes(writes)).unwrap_err();
        assert_eq!(error.errno(), libc::EIO);
        assert!(ended.get());
    }
}
