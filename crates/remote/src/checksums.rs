//! A layer's table, read in parts, as the layer is.

use crate::digest::{BLOCK, CHECKSUM, Digest, Hasher, Table};
use crate::error::{Error, Result};
use crate::keys;
use crate::manifest::Layer;
use crate::store::Store;
use std::ops::Range;

/// Bytes of the table that are read at once.
const AT_ONCE: u64 = 16 << 10;

/// Bytes of a layer whose checksums these are.
const SPAN: u64 = AT_ONCE / CHECKSUM as u64 * BLOCK;

/// What is read of a layer's table: never more of it than is needed for what is read of the layer, however long the
/// manifest says that this is. All of a table matches its digest only when its last part has been read.
pub(crate) struct Checksums<'s> {
    store: &'s dyn Store,
    key: String,
    digest: Digest,
    /// Bytes of the layer.
    length: u64,
    /// Bytes of the layer whose checksums were read.
    read: u64,
    /// Of what was read of the table.
    hasher: Hasher,
}

/// The checksums of a part of a layer.
pub(crate) struct Part {
    /// The bytes of the layer: whole blocks, but for its end.
    pub(crate) range: Range<u64>,
    table: Table,
}

impl<'s> Checksums<'s> {
    pub(crate) fn of(store: &'s dyn Store, layer: &Layer) -> Self {
        let (key, digest, length) = (keys::table(&layer.table), layer.table, layer.length);
        Self { store, key, digest, length, read: 0, hasher: Hasher::default() }
    }

    /// The next part; `None` at the end of the layer.
    ///
    /// # Errors
    /// It is missing; it is the last one, and the table does not match its digest; those of the store.
    pub(crate) fn next(&mut self) -> Result<Option<Part>> {
        if self.read == self.length {
            // A layer without bytes has a table without.
            return if self.length > 0 || self.digest == Digest::of(&[]) {
                Ok(None)
            } else {
                Err(Error::mismatch(&self.key))
            };
        }
        let range = self.read..self.length.min(self.read.saturating_add(SPAN));
        let from = Table::length(range.start);
        let bytes = Table::length(range.end) - from;
        let part = self.store.read(&self.key, from, bytes as usize)?;
        self.hasher.update(&part);
        self.read = range.end;
        if self.read == self.length && std::mem::take(&mut self.hasher).finish() != self.digest {
            return Err(Error::mismatch(&self.key));
        }
        Ok(Some(Part { range, table: Table::of(part) }))
    }
}

impl Part {
    /// Bytes of the table that it has.
    pub(crate) fn bytes(&self) -> u64 {
        self.table.bytes().len() as u64
    }

    /// Where in the layer the first block begins of `bytes` that does not match; they are those from `at` on.
    pub(crate) fn mismatch(&self, at: u64, bytes: &[u8]) -> Option<u64> {
        let first = (at - self.range.start) / BLOCK;
        let block = self.table.mismatch(first, bytes)?;
        Some(self.range.start + block * BLOCK)
    }
}
