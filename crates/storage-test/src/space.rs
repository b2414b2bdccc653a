//! A file system with limited space, which files take in blocks when they are first written.
//!
//! What was written once may be overwritten for ever. Space is free again when it is discarded, or cut off.

use crate::pass_through::{Call, Hooks, HostCall, HostHooks, PassThrough};
use isobath_storage::{Host, IoBuf, Operation, Result, Storage, StorageError};
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes of a block.
const BLOCK: u64 = 512;

#[derive(Default)]
struct State {
    /// The blocks that files have, by name and number.
    taken: BTreeSet<(PathBuf, u64)>,
    /// How many there may be.
    most: Option<usize>,
    refused: u64,
}

/// The space, shared by a host and its files.
#[derive(Clone, Default)]
pub struct Space(Arc<Mutex<State>>);

impl Space {
    /// As much as is asked for.
    pub fn unlimited() -> Self {
        Self::default()
    }

    /// A file has the space of its first `length` bytes.
    pub fn has(&self, name: impl AsRef<Path>, length: u64) {
        let blocks = (0..length.div_ceil(BLOCK)).map(|block| (name.as_ref().to_owned(), block));
        self.0.lock().taken.extend(blocks);
    }

    /// Leaves only `bytes` free bytes.
    pub fn leave(&self, bytes: u64) {
        let mut state = self.0.lock();
        state.most = Some(state.taken.len() + (bytes / BLOCK) as usize);
    }

    /// Gives as much as is asked for from now on.
    pub fn make_room(&self) {
        self.0.lock().most = None;
    }

    /// How many writes found no space so far.
    pub fn refused(&self) -> u64 {
        self.0.lock().refused
    }

    fn write(&self, name: &Path, offset: u64, bufs: &[IoBuf]) -> Result<()> {
        let length = bufs.iter().map(|buf| buf.len() as u64).sum::<u64>();
        let blocks = offset / BLOCK..(offset + length).div_ceil(BLOCK);
        let mut state = self.0.lock();
        let missing: Vec<_> = blocks
            .map(|block| (name.to_owned(), block))
            .filter(|block| !state.taken.contains(block))
            .collect();
        if state.most.is_some_and(|most| state.taken.len() + missing.len() > most) {
            state.refused += 1;
            let full = io::Error::from_raw_os_error(libc::ENOSPC);
            return Err(StorageError::at(Operation::Write, name, offset, length, full));
        }
        state.taken.extend(missing);
        Ok(())
    }

    /// Frees the blocks that lie within a range of bytes.
    fn free(&self, name: &Path, bytes: Range<u64>) {
        let blocks = bytes.start.div_ceil(BLOCK)..bytes.end / BLOCK;
        let is_free = |(file, block): &(PathBuf, u64)| file == name && blocks.contains(block);
        self.0.lock().taken.retain(|block| !is_free(block));
    }
}

/// A host with limited space.
pub type SpaceHost<H> = PassThrough<H, Space>;

impl<H: Host> SpaceHost<H> {
    /// Wraps a host, whose files [have](Space::has) no space so far.
    pub fn with(inner: H, space: Space) -> Self {
        Self::around(inner, space)
    }
}

impl HostHooks for Space {
    type File = Self;
    type Begun = ();

    async fn begin(&self, _request: HostCall, _name: &Path) -> Result<()> {
        Ok(())
    }

    fn end(&self, request: HostCall, name: &Path, (): ()) {
        if matches!(request, HostCall::Create | HostCall::Remove) {
            self.free(name, 0..u64::MAX);
        }
    }

    fn file(&self, _file: &impl Storage) -> Self {
        self.clone()
    }
}

impl Hooks for Space {
    type Begun = ();

    async fn begin(&self, file: &impl Storage, request: Call<'_>) -> Result<()> {
        match request {
            Call::Write { offset, bufs } => self.write(file.name(), offset, bufs),
            _ => Ok(()),
        }
    }

    async fn end(&self, file: &impl Storage, (): (), done: Option<Call<'_>>) -> Result<()> {
        match done {
            Some(Call::Discard { offset, length }) => {
                self.free(file.name(), offset..offset + length);
            }
            Some(Call::SetLength(length)) => self.free(file.name(), length..u64::MAX),
            _ => {}
        }
        Ok(())
    }
}
