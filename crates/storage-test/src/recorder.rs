//! A record of every change to files, for replaying crashes.
//!
//! A [`RecorderHost`] wraps another host and writes down, in order of completion, each change that
//! its files complete. A crash keeps what was flushed and any selection of what came later, whole or torn;
//! [`Record::replay`] makes the files that it leaves.

use isobath_storage::memory::MemoryHost;
use isobath_storage::{
    Allocation, FileId, Host, IoBuf, OpenMode, RestartMemory, Result, Stamp, Storage, ZeroMode,
};
use parking_lot::Mutex;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The most bytes that an entry has of a range that was cloned.
const CLONED: u64 = 1 << 20;

/// One change, completed by the wrapped storage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// The file was created, or emptied.
    Create,
    /// The file was removed.
    Remove,
    /// Bytes were written at an offset.
    Write(u64, Arc<[u8]>),
    /// A range was made to read as zeroes.
    Zero(Range<u64>),
    /// A range was discarded.
    Discard(Range<u64>),
    /// The length was set.
    SetLength(u64),
    /// Every change to the file that completed before entry `started` of the record is durable.
    Flush {
        /// The length of the record when the flush began.
        started: usize,
    },
}

/// One entry of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The file's name.
    pub file: Arc<Path>,
    /// What happened to it.
    pub change: Change,
    /// The length of the record when it was asked for: from there on the file may hold it, whole or in
    /// part.
    pub asked: usize,
}

/// What happens to an entry in a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It reached the disk.
    Kept,
    /// It did not.
    Lost,
    /// Of a write, only the first so many bytes did; any other change is kept.
    Torn(usize),
}

/// The changes of a host's files so far. Clones share them.
#[derive(Clone, Default)]
pub struct Record(Arc<Mutex<Vec<Entry>>>);

impl Record {
    /// A copy of all entries.
    pub fn entries(&self) -> Vec<Entry> {
        self.0.lock().clone()
    }

    /// The number of entries.
    pub fn len(&self) -> usize {
        self.0.lock().len()
    }

    /// Whether nothing has changed.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn add(&self, file: &Arc<Path>, asked: usize, change: Change) {
        self.0.lock().push(Entry { file: file.clone(), change, asked });
    }

    /// Which of the first `end` entries are durable: those that a later flush of their file, itself
    /// among the first `end`, covers; and creations and removals.
    pub fn durable(&self, end: usize) -> Vec<bool> {
        let entries = self.0.lock();
        let entries = &entries[..end.min(entries.len())];
        let mut durable: Vec<bool> = entries
            .iter()
            .map(|entry| matches!(entry.change, Change::Create | Change::Remove))
            .collect();
        for flush in entries {
            if let Change::Flush { started } = flush.change {
                for (earlier, entry) in entries[..started.min(entries.len())].iter().enumerate() {
                    durable[earlier] |= entry.file == flush.file;
                }
            }
        }
        durable
    }

    /// The files after a crash that comes when `end` entries are complete: `base` with all durable
    /// entries applied, and the others as `fate` says of each (index and entry).
    ///
    /// # Errors
    /// The files cannot be changed that way: `base` is not what the record started from.
    pub async fn replay(
        &self,
        base: &MemoryHost,
        end: usize,
        mut fate: impl FnMut(usize, &Entry) -> Fate,
    ) -> Result<MemoryHost> {
        let host = base.deep_copy();
        let mode = OpenMode { writable: true, ..OpenMode::default() };
        let durable = self.durable(end);
        let entries = self.entries();
        for (index, entry) in entries.iter().enumerate().take(durable.len()) {
            let fate = if durable[index] { Fate::Kept } else { fate(index, entry) };
            if fate == Fate::Lost {
                continue;
            }
            match &entry.change {
                Change::Create => drop(host.create(&entry.file, mode).await?),
                Change::Remove => host.remove(&entry.file).await?,
                Change::Flush { .. } => {}
                change => apply(&host.open(&entry.file, mode).await?, change, fate).await?,
            }
        }
        Ok(host)
    }
}

async fn apply(file: &impl Storage, change: &Change, fate: Fate) -> Result<()> {
    match change {
        Change::Write(offset, bytes) => {
            let count = if let Fate::Torn(count) = fate { count } else { bytes.len() };
            let part = &bytes[..count.min(bytes.len())];
            file.write_at(*offset, IoBuf::copy_of(part)).await.map(drop)
        }
        Change::Zero(range) => {
            let mode = ZeroMode { may_unmap: true, only_fast: false };
            file.write_zeroes(range.start, range.end - range.start, mode).await
        }
        Change::Discard(range) => file.discard(range.start, range.end - range.start).await,
        Change::SetLength(length) => file.set_len(*length).await,
        Change::Create | Change::Remove | Change::Flush { .. } => Ok(()),
    }
}

/// A host whose changes are written down.
#[derive(Clone)]
pub struct RecorderHost<H> {
    inner: H,
    record: Record,
    atomic_write: Option<u64>,
}

impl<H: Host> RecorderHost<H> {
    /// Wraps a host.
    pub fn new(inner: H) -> Self {
        Self { inner, record: Record::default(), atomic_write: None }
    }

    /// Has its files promise so many bytes as their [`Storage::atomic_write`], whatever the host's do:
    /// for who tears what was recorded into such pieces.
    #[must_use]
    pub fn promising(mut self, atomic_write: u64) -> Self {
        self.atomic_write = Some(atomic_write);
        self
    }

    /// The record; it goes on growing.
    pub fn record(&self) -> Record {
        self.record.clone()
    }

    fn wrap(&self, inner: H::File) -> RecorderFile<H::File> {
        RecorderFile {
            name: inner.name().into(),
            inner,
            record: self.record.clone(),
            atomic_write: self.atomic_write,
        }
    }
}

impl<H: Host> Host for RecorderHost<H> {
    type File = RecorderFile<H::File>;

    async fn open(&self, name: &Path, mode: OpenMode) -> Result<Self::File> {
        Ok(self.wrap(self.inner.open(name, mode).await?))
    }

    async fn create(&self, name: &Path, mode: OpenMode) -> Result<Self::File> {
        let asked = self.record.len();
        let file = self.wrap(self.inner.create(name, mode).await?);
        self.record.add(&file.name, asked, Change::Create);
        Ok(file)
    }

    async fn remove(&self, name: &Path) -> Result<()> {
        let asked = self.record.len();
        self.inner.remove(name).await?;
        self.record.add(&name.into(), asked, Change::Remove);
        Ok(())
    }

    fn canonical(&self, name: &Path) -> Result<PathBuf> {
        self.inner.canonical(name)
    }

    fn resolve(&self, referrer: &Path, name: &str) -> PathBuf {
        self.inner.resolve(referrer, name)
    }
}

/// A file whose changes are written down.
pub struct RecorderFile<S> {
    name: Arc<Path>,
    inner: S,
    record: Record,
    atomic_write: Option<u64>,
}

impl<S: Storage> Storage for RecorderFile<S> {
    fn name(&self) -> &Path {
        self.inner.name()
    }

    fn id(&self) -> FileId {
        self.inner.id()
    }

    async fn read_at(&self, offset: u64, buf: IoBuf) -> Result<IoBuf> {
        self.inner.read_at(offset, buf).await
    }

    async fn write_at(&self, offset: u64, buf: IoBuf) -> Result<IoBuf> {
        let asked = self.record.len();
        let buf = self.inner.write_at(offset, buf).await?;
        self.record.add(&self.name, asked, Change::Write(offset, Arc::from(&*buf)));
        Ok(buf)
    }

    async fn write_vectored_at(&self, offset: u64, bufs: Vec<IoBuf>) -> Result<Vec<IoBuf>> {
        let asked = self.record.len();
        let bufs = self.inner.write_vectored_at(offset, bufs).await?;
        let bytes = bufs.iter().flat_map(|buf| buf.iter().copied()).collect();
        self.record.add(&self.name, asked, Change::Write(offset, bytes));
        Ok(bufs)
    }

    async fn write_zeroes(&self, offset: u64, length: u64, mode: ZeroMode) -> Result<()> {
        let asked = self.record.len();
        self.inner.write_zeroes(offset, length, mode).await?;
        self.record.add(&self.name, asked, Change::Zero(offset..offset + length));
        Ok(())
    }

    async fn discard(&self, offset: u64, length: u64) -> Result<()> {
        let asked = self.record.len();
        self.inner.discard(offset, length).await?;
        self.record.add(&self.name, asked, Change::Discard(offset..offset + length));
        Ok(())
    }

    async fn flush(&self) -> Result<()> {
        let started = self.record.len();
        self.inner.flush().await?;
        self.record.add(&self.name, started, Change::Flush { started });
        Ok(())
    }

    async fn len(&self) -> Result<u64> {
        self.inner.len().await
    }

    async fn set_len(&self, length: u64) -> Result<()> {
        let asked = self.record.len();
        self.inner.set_len(length).await?;
        self.record.add(&self.name, asked, Change::SetLength(length));
        Ok(())
    }

    async fn allocation(&self, offset: u64) -> Result<Allocation> {
        self.inner.allocation(offset).await
    }

    async fn stamp(&self) -> Result<Option<Stamp>> {
        self.inner.stamp().await
    }

    async fn settled_stamp(&self) -> Result<Option<Stamp>> {
        self.inner.settled_stamp().await
    }

    fn is_read_only(&self) -> bool {
        self.inner.is_read_only()
    }

    async fn retire(&self) -> Result<()> {
        let started = self.record.len();
        self.inner.retire().await?;
        self.record.add(&self.name, started, Change::Flush { started });
        Ok(())
    }

    async fn admit_writer(&self, admit: bool) -> Result<()> {
        self.inner.admit_writer(admit).await
    }

    /// Recorded as the write that it saves.
    async fn clone_range(
        &self,
        from: &Self,
        from_offset: u64,
        to_offset: u64,
        length: u64,
    ) -> Result<bool> {
        let asked = self.record.len();
        if !self.inner.clone_range(&from.inner, from_offset, to_offset, length).await? {
            return Ok(false);
        }
        let mut done = 0;
        while done < length {
            let part = (length - done).min(CLONED);
            let buf = self.inner.read_at(to_offset + done, IoBuf::zeroed(part as usize)).await?;
            let change = Change::Write(to_offset + done, Arc::from(&*buf));
            self.record.add(&self.name, asked, change);
            done += part;
        }
        Ok(true)
    }

    fn clone_alignment(&self) -> Option<u64> {
        self.inner.clone_alignment()
    }

    fn extends_with_zeroes(&self) -> bool {
        self.inner.extends_with_zeroes()
    }

    fn free_space(&self) -> Option<u64> {
        self.inner.free_space()
    }

    fn gains_from_written_space(&self) -> bool {
        self.inner.gains_from_written_space()
    }

    fn atomic_write(&self) -> u64 {
        self.atomic_write.unwrap_or_else(|| self.inner.atomic_write())
    }

    async fn restart_memory(&self, create: bool) -> Result<Option<Arc<dyn RestartMemory>>> {
        self.inner.restart_memory(create).await
    }
}
