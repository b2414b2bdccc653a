//! A directory with parts of layers that were read from stores, shared by all servers of a machine.
//!
//! A layer has a sparse file with its bytes at their own offsets, so that it is read like a local layer, and a map of
//! which blocks are there. Each block is checked against the layer's table before it is shown, and again if the files
//! were out of use: nothing is flushed, and whatever a power failure, a full disk or another program does to the files
//! costs time, not correctness. `docs/decisions/0050-a-cache-that-servers-share.md` shows why.

mod census;
mod common;
mod directory;
mod layer;
mod objects;
mod pair;
mod protocol;
mod sys;
mod tidy;
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
use common::Common;
use directory::Directory;
use pair::Pair;
use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::Duration;
use tidy::Rooms;
use usage::Usage;

/// The smallest limit in bytes.
pub const LEAST_LIMIT: u64 = 64 * BLOCK;

/// How often it is looked whether anything is to be done.
const LOOK: Duration = Duration::from_secs(5);

/// How long it is not looked whether something can be evicted after nothing could.
const PAUSE: Duration = Duration::from_secs(1);

/// A cache in use.
#[derive(Debug)]
pub struct Cache {
    rooms: Rooms,
    common: Arc<Common>,
    pairs: Mutex<HashMap<LayerKey, Weak<Pair>>>,
}

impl Cache {
    /// Opens the cache in a directory, which is created if it does not exist, and starts the thread that keeps it
    /// within `limit` bytes. Programs that share a cache may have limits of their own; the smallest one counts.
    ///
    /// # Errors
    /// The limit is below [`LEAST_LIMIT`], the directory cannot be used, belongs to another user or can be written to
    /// by others, or its file system may be shared with other machines.
    pub fn open(directory: &Path, limit: u64) -> Result<Arc<Self>> {
        if limit < LEAST_LIMIT {
            return Err(Error::refused(format_args!(
                "a cache of {limit} bytes is too small: it needs at least {LEAST_LIMIT}"
            )));
        }
        let rooms = Rooms::open(directory)?;
        let failed = |error: io::Error| Error::local("use the cache directory", directory, error);
        let usage = Usage::open(&rooms.root, limit).map_err(failed)?;
        let (wake, woken) = sync_channel(1);
        let common = Arc::new(Common::new(usage, limit, wake));
        common.wake();
        let cache = Arc::new(Self { rooms, common, pairs: Mutex::default() });
        let weak = Arc::downgrade(&cache);
        let thread = thread::Builder::new().name("cache".to_owned());
        thread.spawn(move || attend(&weak, &woken)).map_err(failed)?;
        Ok(cache)
    }

    /// A layer, whose table of checksums is given. Blocks. If it can have no files, because the disk is full or fails,
    /// it [keeps nothing](CachedLayer::is_attached).
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
        let (layers, common) = (&self.rooms.layers, &self.common);
        let layer = match self.pair(key, |layers| Pair::open(layers, key).map(Some)) {
            Ok(Some(pair)) => CachedLayer::new(key, table, pair, common),
            Ok(None) => unreachable!("a layer that is created is there"),
            Err(error) => {
                common.warn(&error);
                let detached = CachedLayer::detached(key, table, layers, common);
                detached.map_err(|error| Error::local("cache", &layers.path(&key.map()), error))?
            }
        };
        Ok(Arc::new(layer))
    }

    /// The files of a layer, which are opened if this process does not use them.
    fn pair(
        &self,
        key: &LayerKey,
        open: impl FnOnce(&Directory) -> io::Result<Option<Pair>>,
    ) -> io::Result<Option<Arc<Pair>>> {
        let mut pairs = self.pairs.lock().unwrap_or_else(PoisonError::into_inner);
        let used = pairs.get(key).and_then(Weak::upgrade);
        if let Some(pair) = used.filter(|pair| !pair.is_lost()) {
            return Ok(Some(pair));
        }
        let Some(pair) = open(&self.rooms.layers)? else { return Ok(None) };
        let pair = Arc::new(pair);
        pairs.retain(|_, pair| pair.strong_count() > 0);
        pairs.insert(*key, Arc::downgrade(&pair));
        Ok(Some(pair))
    }

    /// An object that was kept, verified; `None` if it is to be fetched. Blocks.
    pub fn object(&self, kind: ObjectKind, digest: &Digest) -> Option<Held> {
        let found = objects::object(&self.rooms.objects, kind, digest, self.common.limit());
        found.unwrap_or_else(|error| {
            self.common.warn(&error);
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
        Ok(self.write(&self.rooms.objects, &name, bytes).unwrap_or_else(|| Held::loose(bytes)))
    }

    /// Writes a file, unless there is no room.
    fn write(&self, directory: &Directory, name: &str, bytes: &[u8]) -> Option<Held> {
        let length = bytes.len() as u64;
        self.common.admit(length).ok()?;
        match objects::keep(directory, name, bytes.to_vec()) {
            Ok(held) => {
                self.common.usage.add(length);
                Some(held)
            }
            Err(error) => {
                self.common.failed(&error);
                None
            }
        }
    }

    /// The manifest of the chain with this address as it was last [kept](Self::keep_manifest), for when the store is
    /// away. Blocks.
    pub fn manifest(&self, address: &str) -> Option<Remembered> {
        let found = objects::manifest(&self.rooms.manifests, address, self.common.limit());
        found.unwrap_or_else(|error| {
            self.common.warn(&error);
            None
        })
    }

    /// Remembers the manifest of a chain, if that is possible. Blocks.
    pub fn keep_manifest(&self, address: &str, bytes: &[u8], version: &Version) {
        let whole = objects::remembered(address, bytes, version);
        self.write(&self.rooms.manifests, &objects::manifest_name(address), &whole);
    }

    /// Counts the files, and evicts what is too much, unless another process is doing that; whether it was not. Blocks.
    /// The thread of the cache does this when it is needed.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn tidy(&self) -> Result<bool> {
        self.evict().map(|evicted| evicted.is_some())
    }

    /// As [`tidy`](Self::tidy); how much was evicted.
    fn evict(&self) -> Result<Option<u64>> {
        let find = |key: &LayerKey| self.pair(key, |layers| Pair::find(layers, key));
        let tidied = tidy::run(&self.rooms, &self.common, find);
        tidied
            .map_err(|error| Error::local("tidy up the cache", &self.rooms.layers.path(""), error))
    }

    /// Looks whether data was lost that the kernel was to write to the files in use.
    fn look_for_losses(&self) {
        let pairs = self.pairs.lock().unwrap_or_else(PoisonError::into_inner);
        let used: Vec<Arc<Pair>> = pairs.values().filter_map(Weak::upgrade).collect();
        drop(pairs);
        for pair in used {
            pair.look_for_losses();
        }
    }
}

/// The thread of a cache.
fn attend(cache: &Weak<Cache>, woken: &Receiver<()>) {
    loop {
        let woken = woken.recv_timeout(LOOK);
        let Some(cache) = cache.upgrade() else { return };
        cache.common.usage.advance_with_time();
        cache.look_for_losses();
        match woken {
            Ok(()) => {
                let evicted = cache.evict();
                if let Err(error) = &evicted {
                    cache.common.warn(&io::Error::other(error.to_string()));
                }
                let is_in_vain = !matches!(evicted, Ok(None | Some(1..)));
                let is_full = cache.common.is_high() && is_in_vain;
                drop(cache);
                if is_full {
                    thread::sleep(PAUSE);
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}
