//! A directory with parts of layers that were read from stores, shared by all servers of a machine.
//!
//! A layer has a sparse file with its bytes at their own offsets, so that it is read like a local layer, and a map of
//! which blocks are there. Each block is checked against the layer's table before it is shown, and again if the files
//! were out of use: nothing is flushed, and whatever a power failure or a full disk does to the files, or another
//! program while nobody uses them, costs time, not correctness. Nobody else may write to files in use.
//! `docs/decisions/0051-a-cache-that-servers-share.md` shows why.

mod census;
mod common;
mod directory;
mod layer;
mod objects;
mod pair;
mod protocol;
mod sys;
mod tidy;
mod upkeep;
mod usage;
mod word;

pub use common::NotKept;
pub use layer::{CachedLayer, Filled};
pub use objects::{Held, ObjectKind, Remembered};
pub use pair::LayerKey;
pub use protocol::{Look, Stamp};

use crate::digest::{BLOCK, Digest, Table};
use crate::error::{Error, Result};
use crate::store::Version;
use directory::Directory;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tidy::Rooms;
use upkeep::{PART, Upkeep};

/// The smallest limit in bytes.
pub const LEAST_LIMIT: u64 = 64 * BLOCK;

/// A cache in use. Its layers use it as well: it is looked after until the last of them is dropped, too.
#[derive(Debug)]
pub struct Cache {
    upkeep: Arc<Upkeep>,
    /// Bytes that were fetched before anybody read them, or are just fetched so.
    ahead: AtomicU64,
}

impl Cache {
    /// Opens the cache in a directory, which is created if it does not exist, and starts the thread that keeps it
    /// within `limit` bytes. Programs that share a cache may have limits of their own; the smallest one counts.
    ///
    /// A directory that is empty becomes a cache by a file `isobath-cache` in it.
    ///
    /// # Errors
    /// The limit is below [`LEAST_LIMIT`]; the directory cannot be used, is not empty and no cache, is a symbolic link,
    /// belongs to another user or can be written to by others; or its file system may be shared with other machines.
    pub fn open(directory: &Path, limit: u64) -> Result<Arc<Self>> {
        if limit < LEAST_LIMIT {
            return Err(Error::refused(format_args!(
                "a cache of {limit} bytes is too small: it needs at least {LEAST_LIMIT}"
            )));
        }
        let rooms = Rooms::open(directory)?;
        let upkeep = Upkeep::start(rooms, limit);
        let upkeep =
            upkeep.map_err(|error| Error::local("use the cache directory", directory, error))?;
        Ok(Arc::new(Self { upkeep, ahead: AtomicU64::new(0) }))
    }

    /// A layer, whose table of checksums is given. Blocks. If it can have no files, because the disk is full or fails,
    /// another process keeps it locked or too many files are open, it [keeps nothing](CachedLayer::is_attached).
    ///
    /// # Errors
    /// The table is not that of the key, or there is no memory.
    pub fn layer(self: &Arc<Self>, key: &LayerKey, table: Arc<[u8]>) -> Result<Arc<CachedLayer>> {
        if table.len() as u64 != Table::length(key.length) || Digest::of(&table) != key.table {
            return Err(Error::damaged(format_args!(
                "the table of checksums of the layer {} is not the one that its manifest names",
                key.digest
            )));
        }
        let layer = match self.upkeep.open(key) {
            Ok(pair) => CachedLayer::new(key, table, pair, &self.upkeep),
            Err(error) => {
                self.upkeep.common.warn(&error);
                let path = self.upkeep.rooms.layers.path(&key.map());
                let detached = CachedLayer::detached(key, table, path.clone(), &self.upkeep);
                detached.map_err(|error| Error::local("cache", &path, error))?
            }
        };
        Ok(Arc::new(layer))
    }

    /// How often its thread has looked whether something is to be evicted, unless another process was at it. It does so
    /// first soon after the cache was opened: what is filled at the same time may have to be fetched once more.
    pub fn rounds(&self) -> u64 {
        self.upkeep.rounds.load(Ordering::Relaxed)
    }

    /// Takes room for so many bytes that are to be fetched since a trace has them, unless all that is fetched so for
    /// the chains of this process would be more than half of the cache.
    pub(crate) fn take_ahead(&self, bytes: u64) -> bool {
        let most = self.upkeep.common.limit() / 2;
        let more = |taken: u64| taken.checked_add(bytes).filter(|all| *all <= most);
        self.ahead.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    /// Gives back room for so many bytes that were not fetched.
    pub(crate) fn give_ahead(&self, bytes: u64) {
        self.ahead.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Whether more layers can have files, and would leave half of the descriptors for such to those that are read.
    pub(crate) fn has_descriptors(&self) -> bool {
        self.upkeep.has_descriptors(2 * PART)
    }

    /// An object that was kept, verified; `None` if it is to be fetched. Blocks.
    pub fn object(&self, kind: ObjectKind, digest: &Digest) -> Option<Held> {
        let found =
            objects::object(&self.upkeep.rooms.objects, kind, digest, self.upkeep.common.limit());
        found.unwrap_or_else(|error| {
            self.upkeep.common.warn(&error);
            None
        })
    }

    /// Keeps an object. Blocks. If that is impossible, what is returned is in [memory](Held::is_kept) alone.
    ///
    /// # Errors
    /// The bytes are not those of the digest.
    pub fn keep(&self, kind: ObjectKind, digest: &Digest, bytes: &[u8]) -> Result<Held> {
        if Digest::of(bytes) != *digest {
            return Err(Error::damaged(format_args!(
                "the object '{}' has not the bytes that its name stands for",
                kind.file(digest)
            )));
        }
        if let Some(held) = self.object(kind, digest) {
            return Ok(held);
        }
        let name = kind.file(digest);
        Ok(self
            .write(&self.upkeep.rooms.objects, &name, bytes)
            .unwrap_or_else(|| Held::loose(bytes)))
    }

    /// Writes a file, unless there is no room.
    fn write(&self, directory: &Directory, name: &str, bytes: &[u8]) -> Option<Held> {
        let length = bytes.len() as u64;
        self.upkeep.common.admit(length).ok()?;
        match objects::keep(directory, name, bytes.to_vec()) {
            Ok(held) => {
                self.upkeep.common.usage.add(length);
                Some(held)
            }
            Err(error) => {
                self.upkeep.common.failed(&error);
                None
            }
        }
    }

    /// The manifest of the chain with this address as it was last [kept](Self::keep_manifest), for when the store is
    /// away. Blocks.
    pub fn manifest(&self, address: &str) -> Option<Remembered> {
        let found =
            objects::manifest(&self.upkeep.rooms.manifests, address, self.upkeep.common.limit());
        found.unwrap_or_else(|error| {
            self.upkeep.common.warn(&error);
            None
        })
    }

    /// Remembers the manifest of a chain, if that is possible. Blocks.
    pub fn keep_manifest(&self, address: &str, bytes: &[u8], version: &Version) {
        let whole = objects::remembered(address, bytes, version);
        self.write(&self.upkeep.rooms.manifests, &objects::manifest_name(address), &whole);
    }

    /// Counts the files, and evicts what is too much, unless another process is doing that; whether it was not. Blocks.
    /// The thread of the cache does this when it is needed.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn tidy(&self) -> Result<bool> {
        let evicted = self.upkeep.evict().map_err(|error| {
            Error::local("tidy up the cache", &self.upkeep.rooms.layers.path(""), error)
        })?;
        Ok(evicted.is_some())
    }
}
