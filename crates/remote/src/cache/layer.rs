//! A layer in a cache.

use super::common::NotKept;
use super::pair::{LayerKey, Pair};
use super::protocol::{self, Look, Shared, Stamp};
use super::upkeep::Upkeep;
use crate::digest::{BLOCK, Table};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What became of a block that was to be kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filled {
    /// These are not the layer's bytes.
    Wrong,
    /// The file holds them.
    Kept(Stamp),
    /// They are right, but not in the file.
    NotKept(NotKept),
}

#[derive(Debug)]
enum Files {
    Pair(Arc<Pair>),
    /// There are none; an empty file is in their place.
    Detached {
        file: Arc<File>,
        path: PathBuf,
    },
}

/// A layer in a cache, in use until it is dropped. Nothing here waits for another process; what blocks says so.
#[derive(Debug)]
pub struct CachedLayer {
    key: LayerKey,
    table: Arc<[u8]>,
    files: Files,
    upkeep: Arc<Upkeep>,
}

impl CachedLayer {
    pub(super) fn new(
        key: &LayerKey,
        table: Arc<[u8]>,
        pair: Arc<Pair>,
        upkeep: &Arc<Upkeep>,
    ) -> Self {
        Self { key: *key, table, files: Files::Pair(pair), upkeep: Arc::clone(upkeep) }
    }

    /// A layer that has no files, and keeps nothing.
    ///
    /// # Errors
    /// It is longer than any file can be.
    pub(super) fn detached(
        key: &LayerKey,
        table: Arc<[u8]>,
        path: PathBuf,
        upkeep: &Arc<Upkeep>,
    ) -> io::Result<Self> {
        let files = Files::Detached { file: upkeep.nothing(key.length)?, path };
        Ok(Self { key: *key, table, files, upkeep: Arc::clone(upkeep) })
    }

    /// Which layer it is.
    pub fn key(&self) -> &LayerKey {
        &self.key
    }

    /// The file with the layer's bytes at their own offsets, where they are [verified](Self::look); it has the layer's
    /// length, or a greater one if it is in place of files that there are not. It is not to be written to.
    pub fn file(&self) -> &Arc<File> {
        match &self.files {
            Files::Pair(pair) => pair.data(),
            Files::Detached { file, .. } => file,
        }
    }

    /// The file's path, which may name nothing if others have removed it.
    pub fn path(&self) -> &Path {
        match &self.files {
            Files::Pair(pair) => pair.path(),
            Files::Detached { path, .. } => path,
        }
    }

    /// How many blocks of [`BLOCK`] bytes the layer has; the last one may be shorter.
    pub fn blocks(&self) -> u64 {
        self.key.blocks()
    }

    /// Whether blocks can be kept, in principle. If not, all of them are absent.
    pub fn is_attached(&self) -> bool {
        self.pair().is_some()
    }

    fn pair(&self) -> Option<&Pair> {
        match &self.files {
            Files::Pair(pair) if !pair.is_lost() => Some(pair),
            _ => None,
        }
    }

    /// What the file holds of a block. Makes no system call, and takes no lock. Notes that the block is used.
    ///
    /// # Panics
    /// If the layer has no such block.
    pub fn look(&self, block: u64) -> Look {
        let Files::Pair(pair) = &self.files else { return Look::Absent };
        let word = pair.load(block);
        let look = Look::at(word);
        if pair.is_lost() {
            return Look::Absent;
        }
        if let Look::Verified(_) = look {
            pair.note(block, word, self.upkeep.common.usage.now());
        }
        look
    }

    /// Whether a block has been verified ever since a [`look`](Self::look) that returned this stamp. Asked after the
    /// file was read: if it is not so, what was read may be anything.
    ///
    /// # Panics
    /// If the layer has no such block.
    pub fn still(&self, block: u64, stamp: Stamp) -> bool {
        let Files::Pair(pair) = &self.files else { return false };
        protocol::still(&**pair, block, stamp) && !pair.is_lost()
    }

    /// Checks a block that is [unverified](Look::Unverified). Blocks: reads all of it. If it does not match, it is
    /// absent from then on.
    ///
    /// # Panics
    /// If the layer has no such block.
    pub fn verify(&self, block: u64) -> Look {
        let Some(pair) = self.pair() else { return Look::Absent };
        pair.look_for_losses(&self.upkeep.rooms.layers);
        let look = protocol::verify(pair, block, |bytes| self.matches(block, bytes));
        if pair.is_lost() { Look::Absent } else { look }
    }

    /// Makes a verified block one that is checked again: for who could not read it from the file.
    ///
    /// # Panics
    /// If the layer has no such block.
    pub fn doubt(&self, block: u64) {
        if let Some(pair) = self.pair() {
            protocol::doubt(pair, block);
        }
    }

    /// Puts a block that was fetched into the file, if its bytes are right. Blocks.
    ///
    /// # Panics
    /// If the layer has no such block.
    pub fn fill(&self, block: u64, bytes: &[u8]) -> Filled {
        assert!(block < self.blocks(), "the layer has no block {block}");
        if !self.matches(block, bytes) {
            return Filled::Wrong;
        }
        let Some(pair) = self.pair() else { return Filled::NotKept(NotKept::Detached) };
        pair.look_for_losses(&self.upkeep.rooms.layers);
        if pair.is_lost() {
            return Filled::NotKept(NotKept::Detached);
        }
        if let Look::Verified(stamp) = Look::at(pair.load(block)) {
            return Filled::Kept(stamp);
        }
        if let Err(reason) = self.upkeep.common.admit(BLOCK) {
            return Filled::NotKept(reason);
        }
        let filled = protocol::fill(pair, block, bytes, self.upkeep.common.usage.now());
        if let Err(error) = &filled {
            self.upkeep.common.failed(error);
            return Filled::NotKept(NotKept::Failing);
        }
        match filled {
            Ok(Some(stamp)) if !pair.is_lost() => {
                self.upkeep.common.filled(bytes.len() as u64);
                Filled::Kept(stamp)
            }
            _ => {
                // An evictor may have been killed there; who tidies up ends what it began.
                self.upkeep.common.wake();
                Filled::NotKept(NotKept::Busy)
            }
        }
    }

    fn matches(&self, block: u64, bytes: &[u8]) -> bool {
        bytes.len() == super::pair::block_length(&self.key, block)
            && Table::matches(&self.table, block, bytes)
    }
}
