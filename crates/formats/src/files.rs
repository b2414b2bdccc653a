//! The files of an image, with a cache of their tables.

use crate::error::{Blame, Error, Result};
use isobath_storage::{IoBuf, Storage};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes of a table that are read at a time.
const PAGE: u64 = 64 << 10;

/// Number of table pages kept in memory.
const CACHED_PAGES: usize = 32;

/// Number of decompressed blocks kept in memory.
const CACHED_BLOCKS: usize = 4;

/// One file of an image.
pub(crate) struct File<S> {
    pub(crate) name: PathBuf,
    pub(crate) storage: Arc<S>,
    /// Length of the file in bytes when the image was opened.
    pub(crate) length: u64,
}

/// A position in a file: the file's number, and an offset in bytes.
type Place = (usize, u64);

/// The most recently used values.
struct Recent<T> {
    kept: Mutex<VecDeque<(Place, Arc<T>)>>,
    limit: usize,
}

impl<T> Recent<T> {
    fn new(limit: usize) -> Self {
        Self { kept: Mutex::default(), limit }
    }

    fn get(&self, place: Place) -> Option<Arc<T>> {
        let mut kept = self.kept.lock();
        let index = kept.iter().position(|(known, _)| *known == place)?;
        if index > 0
            && let Some(found) = kept.remove(index)
        {
            kept.push_front(found);
        }
        kept.front().map(|(_, value)| Arc::clone(value))
    }

    fn put(&self, place: Place, value: &Arc<T>) {
        let mut kept = self.kept.lock();
        kept.truncate(self.limit - 1);
        kept.push_front((place, Arc::clone(value)));
    }
}

/// The files of an image. The first one is the image itself.
pub(crate) struct Files<S> {
    list: Vec<File<S>>,
    pages: Recent<IoBuf>,
    blocks: Recent<Vec<u8>>,
}

impl<S: Storage> Files<S> {
    pub(crate) fn new(list: Vec<File<S>>) -> Self {
        Self { list, pages: Recent::new(CACHED_PAGES), blocks: Recent::new(CACHED_BLOCKS) }
    }

    /// A file of the image.
    pub(crate) fn file(&self, number: usize) -> Result<&File<S>> {
        self.list.get(number).ok_or_else(|| {
            let image = self.list.first().map_or(Path::new(""), |file| &file.name);
            Blame(image).invalid("extent", number, "the image has no such extent")
        })
    }

    /// The part of a table at `offset`: a page of the file, and the position of the offset in the page. Bytes past the
    /// end of the file are zero.
    pub(crate) async fn page(&self, file: usize, offset: u64) -> Result<(Arc<IoBuf>, usize)> {
        let (page, within) = (offset / PAGE, (offset % PAGE) as usize);
        if let Some(bytes) = self.pages.get((file, page)) {
            return Ok((bytes, within));
        }
        let storage = &self.file(file)?.storage;
        let bytes = storage.read_at(page * PAGE, IoBuf::zeroed(PAGE as usize)).await?;
        let bytes = Arc::new(bytes);
        self.pages.put((file, page), &bytes);
        Ok((bytes, within))
    }

    /// The decompressed block at `offset`, if it was used recently.
    pub(crate) fn known_block(&self, file: usize, offset: u64) -> Option<Arc<Vec<u8>>> {
        self.blocks.get((file, offset))
    }

    /// Adds a decompressed block to the cache.
    pub(crate) fn keep_block(&self, file: usize, offset: u64, bytes: &Arc<Vec<u8>>) {
        self.blocks.put((file, offset), bytes);
    }

    pub(crate) fn all(&self) -> &[File<S>] {
        &self.list
    }
}

impl<S: Storage> File<S> {
    pub(crate) async fn new(name: &Path, storage: Arc<S>) -> Result<Self> {
        let length = storage.len().await?;
        Ok(Self { name: name.to_owned(), storage, length })
    }

    pub(crate) fn blame(&self) -> Blame<'_> {
        Blame(&self.name)
    }

    /// Reads a header, which must lie within the file. The caller bounds `length`.
    pub(crate) async fn header(&self, field: &str, offset: u64, length: usize) -> Result<IoBuf> {
        self.must_hold(field, offset, length as u64)?;
        Ok(self.storage.read_at(offset, IoBuf::zeroed(length)).await?)
    }

    /// Fails unless the range that a field describes lies within the file.
    pub(crate) fn must_hold(&self, field: &str, offset: u64, length: u64) -> Result<()> {
        let end = offset.checked_add(length);
        if end.is_none_or(|end| end > self.length) {
            return Err(self.past_end(field, offset));
        }
        Ok(())
    }

    pub(crate) fn past_end(&self, field: &str, offset: u64) -> Error {
        self.blame().truncated(field, offset, self.length)
    }
}
