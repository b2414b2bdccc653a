//! What the repair of an image that was not closed may take.
//!
//! Whoever opens an image for writing repairs it if it is dirty, and may not know who made it. A sparse file of a few
//! KiB can have tables without end: thousands of snapshots whose L1 tables are one hole, or entries that lead to all
//! corners of a file of many TiB. So what is read of an untrusted image, and what is kept of it in memory, is bounded:
//! by an amount that is harmless, and beyond that by the space that the file takes, which its author has had to fill.
//! The memory for any image is reserved of the process's limit, if it has one. A check that an operator asks for has
//! neither.

use crate::memory::{self, MemoryLimit, Reserved};
use crate::{DiskError, Result};
use isobath_storage::Storage;
use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes of tables that may be read of any untrusted file. Beyond these, it must take as much space itself.
const TABLES: u64 = 1 << 30;
/// Bytes of memory for any untrusted file.
const MEMORY: u64 = 512 << 20;
/// Bytes of a file that bring one more byte of memory: a cluster of the smallest size has two bytes in each of three
/// lists of counts.
const BYTES_PER_BYTE: u64 = 64;
/// How much is reserved of a limit at once.
const STEP: u64 = 1 << 20;

/// A bound on the tables that are read, and on the memory that what is known of them takes.
#[derive(Default)]
pub(crate) struct Budget(Option<Bounds>);

struct Bounds {
    image: PathBuf,
    /// Bytes of space that the file takes, as far as that has been asked.
    filled: u64,
    tables: u64,
    memory: u64,
    /// What the process's disks and frontends share.
    limit: Option<Arc<MemoryLimit>>,
    read: Cell<u64>,
    reserved: RefCell<Vec<Reserved>>,
    /// What is to be done is within the bounds.
    settled: bool,
}

impl Budget {
    /// No bounds, for an image that is trusted, but its memory is part of the limit.
    pub(crate) fn of_trusted(image: &Path, limit: &Arc<MemoryLimit>) -> Self {
        Self::new(image, 0, (u64::MAX, u64::MAX), Some(limit))
    }

    /// The bounds for a file that nobody has vouched for.
    ///
    /// # Errors
    /// If the storage does not say how much space the file takes.
    pub(crate) async fn of_file<S: Storage>(
        storage: &S,
        image: &Path,
        limit: Option<&Arc<MemoryLimit>>,
    ) -> Result<Self> {
        let length = storage.len().await?;
        let filled = match storage.extensions().usage {
            // A device's length is space that its author was given.
            Some(_) if !storage.capabilities().extends_with_zeroes => length,
            Some(usage) => usage.allocated().await?.unwrap_or(0).min(length),
            // What a server of exports says of its files is not measured.
            None => 0,
        };
        let most = (TABLES.saturating_add(filled), MEMORY + filled / BYTES_PER_BYTE);
        Ok(Self::new(image, filled, most, limit))
    }

    fn new(
        image: &Path,
        filled: u64,
        (tables, memory): (u64, u64),
        limit: Option<&Arc<MemoryLimit>>,
    ) -> Self {
        Self(Some(Bounds {
            image: image.to_owned(),
            filled,
            tables,
            memory,
            limit: limit.cloned(),
            read: Cell::new(0),
            reserved: RefCell::default(),
            settled: false,
        }))
    }

    /// Allows for so many more bytes of tables.
    ///
    /// # Errors
    /// They are too many.
    pub(crate) fn read(&self, bytes: u64) -> Result<()> {
        let Some(bounds) = &self.0 else { return Ok(()) };
        let read = bounds.read.get().saturating_add(bytes);
        bounds.read.set(read);
        if read > bounds.tables {
            return Err(bounds.refuse("bytes of tables to read", read, bounds.tables));
        }
        Ok(())
    }

    /// Whether there are any bounds.
    pub(crate) fn is_bounded(&self) -> bool {
        self.0.is_some()
    }

    /// Allows for as many bytes of tables again as until now.
    ///
    /// # Errors
    /// They are too many.
    pub(crate) fn read_again(&self) -> Result<()> {
        self.read(self.0.as_ref().map_or(0, |bounds| bounds.read.get()))
    }

    /// Allows for so many bytes of memory in total.
    ///
    /// # Errors
    /// They are too many, or of the limit less is left.
    pub(crate) fn hold(&self, bytes: u64) -> Result<()> {
        let Some(bounds) = &self.0 else { return Ok(()) };
        if bytes > bounds.memory {
            return Err(bounds.refuse("bytes of memory", bytes, bounds.memory));
        }
        let Some(limit) = &bounds.limit else { return Ok(()) };
        let mut reserved = bounds.reserved.borrow_mut();
        let held: u64 = reserved.iter().map(Reserved::bytes).sum();
        let Some(more) = bytes.checked_sub(held).filter(|more| *more > 0) else { return Ok(()) };
        let more = more.next_multiple_of(STEP);
        let taken = limit.reserve("the repair of its refcounts", more);
        reserved.push(taken.map_err(|source| memory::refused(&bounds.image, source))?);
        Ok(())
    }

    /// Whether what is to be done is known to be within the bounds.
    pub(crate) fn is_settled(&self) -> bool {
        self.0.as_ref().is_none_or(|bounds| bounds.settled)
    }

    /// What is to be done is within the bounds.
    pub(crate) fn settle(&mut self) {
        if let Some(bounds) = &mut self.0 {
            bounds.settled = true;
            bounds.tables = u64::MAX;
            bounds.memory = u64::MAX;
            bounds.limit = None;
        }
    }
}

impl Bounds {
    fn refuse(&self, what: &str, needed: u64, most: u64) -> DiskError {
        DiskError::Refused {
            image: self.image.clone(),
            reason: format!(
                "it was not closed (dirty bit), and its repair takes {needed} {what} or more; with --untrusted it may \
                 take {most}, since {} bytes of space are known to be filled; if you trust it, repair it with 'isobath \
                 check -r all', or open it without --untrusted",
                self.filled
            ),
        }
    }
}
