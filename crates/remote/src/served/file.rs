//! A layer in a store, as a file.

use crate::cache::{CachedLayer, Look};
use crate::digest::BLOCK;
use crate::error::Error;
use crate::fetch::{Awaited, RemoteLayer, may_pass};
use isobath_storage::{
    Capabilities, FileId, Identity, IoBuf, Operation, Result, Storage, StorageError, ZeroMode,
};
use isobath_storage_file::{FileHost, FileStorage};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// The device of all layers in stores: the numbers of others are smaller.
const DEVICE: u64 = u64::MAX >> 8;

/// A layer in a store, which is read through the cache and never changed.
///
/// What the cache has is read as from a local file: the file's own storage does it, and before and after the cache is
/// asked whether the block is there. What it has not is fetched, in blocks, and given to whoever waits for it from
/// memory, so that no read depends on what becomes of the block in the cache.
pub struct RemoteFile {
    name: PathBuf,
    layer: Arc<RemoteLayer>,
    local: OnceLock<Local>,
    /// Whether a failure of the cache's disk was told of.
    has_warned: AtomicBool,
}

/// The layer's file in the cache.
struct Local {
    cached: Arc<CachedLayer>,
    file: FileStorage,
}

impl std::fmt::Debug for RemoteFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RemoteFile").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Drop for RemoteFile {
    fn drop(&mut self) {
        self.layer.leave();
    }
}

/// The failure to change anything.
pub(super) fn read_only(operation: Operation, name: &Path) -> StorageError {
    let text = "chains in stores are only read; 'isobath pull' makes files of a chain, which can be written to";
    let cause = io::Error::new(io::ErrorKind::ReadOnlyFilesystem, text);
    StorageError::new(operation, name, cause)
}

/// The blocks of a range that is not empty.
fn blocks(offset: u64, length: usize) -> std::ops::Range<u64> {
    offset / BLOCK..(offset + length as u64).div_ceil(BLOCK)
}

impl RemoteFile {
    pub(super) fn new(name: PathBuf, layer: &Arc<RemoteLayer>) -> Self {
        let (layer, has_warned) = (Arc::clone(layer), AtomicBool::new(false));
        Self { name, layer, local: OnceLock::new(), has_warned }
    }

    /// What identifies a layer.
    pub(super) fn id_of(layer: &RemoteLayer) -> FileId {
        FileId { device: DEVICE, inode: layer.id() }
    }

    fn failed(&self, offset: u64, length: usize, error: &Error) -> StorageError {
        let cause = io::Error::other(error.to_string());
        StorageError::at(Operation::Read, &self.name, offset, length as u64, cause)
    }

    /// The layer's file in the cache.
    async fn local(&self, cached: &Arc<CachedLayer>) -> Result<&Local> {
        if let Some(local) = self.local.get() {
            return Ok(local);
        }
        let file = cached.file().try_clone();
        let file =
            file.map_err(|error| StorageError::new(Operation::Open, cached.path(), error))?;
        let file = FileHost.adopt(cached.path(), file).await?;
        Ok(self.local.get_or_init(|| Local { cached: Arc::clone(cached), file }))
    }

    /// Any read.
    async fn read(&self, offset: u64, mut buf: IoBuf) -> Result<IoBuf> {
        let length = buf.len();
        let end = offset.checked_add(length as u64).filter(|end| i64::try_from(*end).is_ok());
        if end.is_none() {
            let cause = io::Error::from_raw_os_error(libc::EINVAL);
            let length = length as u64;
            return Err(StorageError::at(Operation::Read, &self.name, offset, length, cause));
        }
        let inside = self.layer.length().saturating_sub(offset).min(length as u64) as usize;
        if inside < length {
            buf.get_mut(inside..).unwrap_or_default().fill(0);
        }
        if inside == 0 {
            return Ok(buf);
        }
        if self.layer.head().read(offset, buf.get_mut(..inside).unwrap_or_default()) {
            return Ok(buf);
        }
        self.layer.note(offset, inside as u64);
        let failed = |error: &Arc<Error>| self.failed(offset, length, error);
        let mut patience = self.layer.patience();
        let cached = self.layer.cached(&mut patience).await.map_err(|error| failed(&error))?;
        let Local { cached, file } = self.local(cached).await?;
        let mut done = buf.split_to(inside);
        let rest = buf;
        let range = blocks(offset, inside);
        let missing = |block: &u64| matches!(cached.look(*block), Look::Absent);
        let absent: Vec<u64> = range.clone().filter(missing).collect();
        // All at once, so that neighbours are fetched together.
        let mut flights = self.layer.want(&absent).into_iter().peekable();
        if !absent.is_empty() || self.layer.is_marked(&range) {
            self.layer.reads(&range);
        }
        let mut todo = std::mem::replace(&mut done, IoBuf::empty());
        for block in range {
            let at = offset.max(block * BLOCK);
            let size = ((block + 1) * BLOCK - at).min(todo.len() as u64) as usize;
            let mut part = todo.split_to(size);
            let mut awaited = flights.next_if(|awaited| awaited.block == block);
            let (mut verified, mut has_joined) = (false, false);
            part = loop {
                if let Some(Awaited { flight, is_fresh, .. }) = awaited.take() {
                    let outcome = patience.wait(self.layer.key(), flight.outcome()).await;
                    let found = match outcome.map_err(|error| failed(&error))? {
                        Ok(found) => found,
                        // Others had begun it, whose time was over: this one has time left.
                        Err(error) if !is_fresh && !has_joined && may_pass(&error) => {
                            has_joined = true;
                            continue;
                        }
                        Err(error) => return Err(failed(&error)),
                    };
                    if !found.copy((at - block * BLOCK) as usize, &mut part) {
                        unreachable!("a block that was accepted has its length")
                    }
                    break part;
                }
                match cached.look(block) {
                    Look::Verified(stamp) => {
                        let read = self.read_cached(file, cached, at, part).await;
                        let is_read = read.is_some();
                        part = read.unwrap_or_else(|| IoBuf::zeroed(size));
                        if is_read && cached.still(block, stamp) {
                            break part;
                        }
                    }
                    Look::Unverified if !verified => {
                        verified = true;
                        self.layer.verify(block).await;
                    }
                    Look::Unverified | Look::Absent => awaited = self.layer.want(&[block]).pop(),
                }
            };
            done.unsplit(part);
        }
        done.unsplit(rest);
        Ok(done)
    }

    /// Reads a part of a block from the layer's file in the cache; `None` if the cache's disk fails. The block is then
    /// checked again, or fetched, by whoever reads it next.
    async fn read_cached(
        &self,
        file: &FileStorage,
        cached: &CachedLayer,
        offset: u64,
        buf: IoBuf,
    ) -> Option<IoBuf> {
        match file.read_at(offset, buf).await {
            Ok(buf) => Some(buf),
            Err(error) => {
                if !self.has_warned.swap(true, Ordering::Relaxed) {
                    tracing::warn!("{error}: what the cache's disk cannot read is fetched again");
                }
                cached.doubt(offset / BLOCK);
                None
            }
        }
    }

    fn refused<T>(&self, operation: Operation) -> Result<T> {
        Err(read_only(operation, &self.name))
    }
}

impl Storage for RemoteFile {
    fn identity(&self) -> Identity<'_> {
        Identity { name: &self.name, id: Self::id_of(&self.layer) }
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { read_only: true, ..Capabilities::default() }
    }

    /// A read within a block that the cache has looks at the block's word, reads the file, and looks at the word again.
    async fn read_at(&self, offset: u64, buf: IoBuf) -> Result<IoBuf> {
        let (block, length) = (offset / BLOCK, buf.len() as u64);
        let ready = match self.local.get() {
            Some(local)
                if offset % BLOCK + length <= BLOCK
                    && !self.layer.is_marked(&(block..block + 1)) =>
            {
                self.layer.has(offset, length).then_some(local)
            }
            _ => None,
        };
        let look = ready.map(|local| (local, local.cached.look(block)));
        let Some((Local { cached, file }, Look::Verified(stamp))) = look else {
            return Box::pin(self.read(offset, buf)).await;
        };
        self.layer.note(offset, length);
        let size = buf.len();
        match self.read_cached(file, cached, offset, buf).await {
            Some(buf) if cached.still(block, stamp) => Ok(buf),
            Some(buf) => Box::pin(self.read(offset, buf)).await,
            None => Box::pin(self.read(offset, IoBuf::zeroed(size))).await,
        }
    }

    async fn write_vectored_at(&self, _: u64, _: Vec<IoBuf>) -> Result<Vec<IoBuf>> {
        self.refused(Operation::Write)
    }

    async fn write_zeroes(&self, _: u64, _: u64, _: ZeroMode) -> Result<()> {
        self.refused(Operation::WriteZeroes)
    }

    async fn discard(&self, _: u64, _: u64) -> Result<()> {
        self.refused(Operation::Discard)
    }

    /// Nothing is ever written.
    async fn flush(&self) -> Result<()> {
        Ok(())
    }

    async fn len(&self) -> Result<u64> {
        Ok(self.layer.length())
    }

    async fn set_len(&self, _: u64) -> Result<()> {
        self.refused(Operation::SetLength)
    }
}
