//! A record of every change to files, for replaying crashes.
//!
//! A [`RecorderHost`] wraps another host and records each completed change to its files, in order of completion. A
//! crash keeps flushed changes and any subset of later ones, whole or torn; [`Record::replay`] builds the files that it
//! leaves.

use crate::pass_through::{Call, Hooks, HostCall, HostHooks, PassThrough};
use isobath_storage::memory::MemoryHost;
use isobath_storage::{Capabilities, Host, IoBuf, OpenMode, Result, Storage, ZeroMode};
use parking_lot::Mutex;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// The maximum number of bytes of a cloned range in one entry.
const CLONED: u64 = 1 << 20;

/// One change, completed by the wrapped storage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// The file was created, or truncated to 0 bytes.
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
    /// The file was made this long, if it was shorter.
    Lengthen(u64),
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
    /// The change.
    pub change: Change,
    /// The length of the record when the change was submitted: from then on the file may contain it, in full or in
    /// part.
    pub asked: usize,
}

/// The fate of an entry in a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It reached the disk.
    Kept,
    /// It did not.
    Lost,
    /// Only this many bytes of a write reached the disk; changes of other kinds are kept.
    Torn(usize),
}

/// The changes to a host's files so far. Clones share them.
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

    /// Which of the first `end` entries are durable: creations, removals, and those covered by a later flush of their
    /// file that is itself among the first `end`.
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

    /// The files after a crash once `end` entries are complete: `base` with all durable entries applied, and the others
    /// as `fate` decides for each (given its index and the entry).
    ///
    /// # Errors
    /// The changes cannot be applied: `base` is not what the record started from.
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
        Change::Lengthen(length) => {
            let there = file.len().await?;
            file.set_len(there.max(*length)).await
        }
        Change::Create | Change::Remove | Change::Flush { .. } => Ok(()),
    }
}

/// A host whose changes are recorded.
pub type RecorderHost<H> = PassThrough<H, Recorder>;

/// Records changes to files.
#[derive(Clone, Default)]
pub struct Recorder {
    record: Record,
    atomic_write: Option<u64>,
}

impl<H: Host> RecorderHost<H> {
    /// Wraps a host.
    pub fn new(inner: H) -> Self {
        Self::around(inner, Recorder::default())
    }

    /// Makes its files report this [`Capabilities::atomic_write`], whatever the wrapped host's files report, for
    /// callers that tear recorded changes into pieces of this size.
    #[must_use]
    pub fn promising(mut self, atomic_write: u64) -> Self {
        self.hooks_mut().atomic_write = Some(atomic_write);
        self
    }

    /// The record, which continues to grow.
    pub fn record(&self) -> Record {
        self.hooks().record.clone()
    }
}

impl HostHooks for Recorder {
    type File = FileRecorder;
    /// The length of the record.
    type Begun = usize;

    async fn begin(&self, _request: HostCall, _name: &Path) -> Result<usize> {
        Ok(self.record.len())
    }

    fn end(&self, request: HostCall, name: &Path, asked: usize) {
        match request {
            HostCall::Open => {}
            HostCall::Create => self.record.add(&name.into(), asked, Change::Create),
            HostCall::Remove => self.record.add(&name.into(), asked, Change::Remove),
        }
    }

    fn file(&self, file: &impl Storage) -> FileRecorder {
        FileRecorder { name: file.name().into(), recorder: self.clone() }
    }
}

/// Records changes to a file.
pub struct FileRecorder {
    name: Arc<Path>,
    recorder: Recorder,
}

impl Hooks for FileRecorder {
    /// The length of the record.
    type Begun = usize;

    async fn begin(&self, _file: &impl Storage, _request: Call<'_>) -> Result<usize> {
        Ok(self.recorder.record.len())
    }

    async fn end(&self, file: &impl Storage, asked: usize, done: Option<Call<'_>>) -> Result<()> {
        let change = match done {
            Some(Call::Write { offset, bufs }) => {
                let parts: Vec<&[u8]> = bufs.iter().map(|buf| &buf[..]).collect();
                Change::Write(offset, parts.concat().into())
            }
            Some(Call::WriteZeroes { offset, length, .. }) => Change::Zero(offset..offset + length),
            Some(Call::Discard { offset, length }) => Change::Discard(offset..offset + length),
            Some(Call::Flush | Call::Retire) => Change::Flush { started: asked },
            Some(Call::SetLength(length)) => Change::SetLength(length),
            Some(Call::ExpectLength(length)) => Change::Lengthen(length),
            // Recorded as the writes that it replaces.
            Some(Call::Clone { offset, length }) => {
                let mut done = 0;
                while done < length {
                    let part = (length - done).min(CLONED);
                    let buf = file.read_at(offset + done, IoBuf::zeroed(part as usize)).await?;
                    let change = Change::Write(offset + done, Arc::from(&*buf));
                    self.recorder.record.add(&self.name, asked, change);
                    done += part;
                }
                return Ok(());
            }
            Some(Call::Read { .. } | Call::Query | Call::AdmitWriter) | None => {
                return Ok(());
            }
        };
        self.recorder.record.add(&self.name, asked, change);
        Ok(())
    }

    fn capabilities(&self, own: Capabilities) -> Capabilities {
        let atomic_write = self.recorder.atomic_write.unwrap_or(own.atomic_write);
        Capabilities { atomic_write, ..own }
    }
}
