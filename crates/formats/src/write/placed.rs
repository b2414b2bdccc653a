//! Writing bytes at given offsets of a file.

use crate::error::Result;
use isobath_storage::{IoBuf, Storage};

/// Bytes of a table that are written at a time.
const WINDOW: usize = 1 << 20;

/// Writes bytes at their offsets; adjacent ones are written together.
pub(crate) async fn write_placed<S: Storage>(
    storage: &S,
    placed: impl IntoIterator<Item = (u64, Vec<u8>)>,
) -> Result<()> {
    let mut run: Option<(u64, Vec<u8>)> = None;
    for (place, bytes) in placed {
        match &mut run {
            Some((start, run)) if *start + run.len() as u64 == place => run.extend(bytes),
            _ => {
                if let Some((start, run)) = run.replace((place, bytes)) {
                    storage.write_at(start, IoBuf::copy_of(&run)).await?;
                }
            }
        }
    }
    if let Some((start, run)) = run {
        storage.write_at(start, IoBuf::copy_of(&run)).await?;
    }
    Ok(())
}

/// Writes a table whose entries are set in ascending order. Memory use does not depend on the table's size.
pub(crate) struct TableWriter<const N: usize> {
    /// The offset of `pending` in the file.
    at: u64,
    /// The number of the first entry that has not been set.
    next: u64,
    pending: Vec<u8>,
    /// The value of absent entries.
    absent: [u8; N],
}

impl<const N: usize> TableWriter<N> {
    /// A table at offset `at` of the file.
    pub(crate) fn new(at: u64, absent: [u8; N]) -> Self {
        Self { at, next: 0, pending: Vec::new(), absent }
    }

    /// Sets entry `number`; earlier ones that were not set become absent.
    pub(crate) async fn set<S: Storage>(
        &mut self,
        storage: &S,
        number: u64,
        entry: [u8; N],
    ) -> Result<()> {
        self.fill(storage, number).await?;
        self.pending.extend(entry);
        self.next += 1;
        if self.pending.len() >= WINDOW { self.write(storage).await } else { Ok(()) }
    }

    async fn fill<S: Storage>(&mut self, storage: &S, end: u64) -> Result<()> {
        while self.next < end {
            self.pending.extend(self.absent);
            self.next += 1;
            if self.pending.len() >= WINDOW {
                self.write(storage).await?;
            }
        }
        Ok(())
    }

    async fn write<S: Storage>(&mut self, storage: &S) -> Result<()> {
        let bytes = std::mem::take(&mut self.pending);
        if !bytes.is_empty() {
            storage.write_at(self.at, IoBuf::copy_of(&bytes)).await?;
            self.at += bytes.len() as u64;
        }
        Ok(())
    }

    /// Writes the rest of a table of `entries` entries, padded with absent ones to whole sectors.
    pub(crate) async fn finish<S: Storage>(mut self, storage: &S, entries: u64) -> Result<()> {
        let per_sector = 512 / N as u64;
        self.fill(storage, entries.next_multiple_of(per_sector)).await?;
        self.write(storage).await
    }
}
