//! Writing a sparse extent: header, descriptor, two copies of the grain directory with the grain tables, and the grains
//! in the order in which they are written. All grain tables have their places from the start.

use super::{DESCRIPTOR, ENTRIES, GRAIN, encode};
use crate::error::{Blame, Result};
use crate::vmdk::SECTOR;
use crate::write::piece::{PIECE, Piece};
use isobath_storage::{IoBuf, Storage};
use std::path::{Path, PathBuf};

/// Sectors of a grain table.
const TABLE: u64 = ENTRIES * 4 / SECTOR;

/// Entries of a grain directory that are written at once.
const WINDOW: u64 = 1 << 18;

pub(crate) struct WriteSparse {
    name: PathBuf,
    /// Sectors of the disk.
    capacity: u64,
    /// In whole sectors.
    descriptor: Option<Vec<u8>>,
    /// Entries of 1 stand for zeroes.
    zeroed: bool,
    /// Grain tables.
    tables: u64,
    /// The next sector of the file.
    next: u64,
    /// The table of the grains being written, and its number.
    table: Vec<u32>,
    number: u64,
}

impl WriteSparse {
    /// An extent of so many sectors. The image's descriptor is in the first one, or in a file of its own.
    pub(super) fn new(
        name: &Path,
        capacity: u64,
        descriptor: Option<Vec<u8>>,
        zeroed: bool,
    ) -> Result<Self> {
        let table = vec![0; ENTRIES as usize];
        let tables = capacity.div_ceil(GRAIN * ENTRIES);
        let (name, number) = (name.to_owned(), 0);
        let mut new = Self { name, capacity, descriptor, zeroed, tables, next: 0, table, number };
        new.next = new.overhead();
        new.check()?;
        Ok(new)
    }

    /// Sectors of a grain directory.
    const fn directory(&self) -> u64 {
        (self.tables * 4).div_ceil(SECTOR)
    }

    /// The sectors of the grain directory's copies: the redundant one comes first. Each is followed by its tables.
    const fn directories(&self) -> [u64; 2] {
        let first = 1 + DESCRIPTOR;
        [first, first + self.directory() + self.tables * TABLE]
    }

    /// Sectors before the first grain.
    const fn overhead(&self) -> u64 {
        let [_, second] = self.directories();
        (second + self.directory() + self.tables * TABLE).next_multiple_of(GRAIN)
    }

    fn check(&self) -> Result<()> {
        if u32::try_from(self.next).is_err() {
            let reason = "a VMDK's file has at most 2 TiB";
            return Err(Blame(&self.name).unsupported("file size", self.next * SECTOR, reason));
        }
        Ok(())
    }

    /// Writes the table of the current grains, if it has any.
    async fn end_table<S: Storage>(&mut self, storage: &S) -> Result<()> {
        if self.table.iter().all(|entry| *entry == 0) {
            return Ok(());
        }
        let table = encode(&self.table);
        self.table.fill(0);
        for directory in self.directories() {
            let at = directory + self.directory() + self.number * TABLE;
            storage.write_at(at * SECTOR, IoBuf::copy_of(&table)).await?;
        }
        Ok(())
    }

    pub(super) async fn write<S: Storage>(
        &mut self,
        storage: &S,
        pieces: Vec<Piece>,
    ) -> Result<()> {
        let start = self.next * SECTOR;
        let mut out = Vec::new();
        for Piece { at, bytes } in pieces {
            let grain = at / (GRAIN * SECTOR);
            if grain / ENTRIES != self.number {
                self.end_table(storage).await?;
                self.number = grain / ENTRIES;
            }
            if let Some(slot) = self.table.get_mut((grain % ENTRIES) as usize) {
                *slot = self.next as u32;
            }
            self.next += GRAIN;
            self.check()?;
            out.extend(bytes);
            // The last grain is whole, too.
            out.resize(out.len().next_multiple_of(PIECE), 0);
        }
        if !out.is_empty() {
            storage.write_at(start, IoBuf::copy_of(&out)).await?;
        }
        Ok(())
    }

    fn header(&self) -> Vec<u8> {
        let mut header = vec![0; SECTOR as usize];
        let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
        // Newlines can be checked; there is a redundant directory; and grains that are zero.
        let (version, flags): (u32, u32) = if self.zeroed { (2, 7) } else { (1, 3) };
        put(0, b"KDMV");
        put(4, &version.to_le_bytes());
        put(8, &flags.to_le_bytes());
        put(12, &self.capacity.to_le_bytes());
        put(20, &GRAIN.to_le_bytes());
        if self.descriptor.is_some() {
            put(28, &1_u64.to_le_bytes());
            put(36, &DESCRIPTOR.to_le_bytes());
        }
        put(44, &(ENTRIES as u32).to_le_bytes());
        let [redundant, directory] = self.directories();
        put(48, &redundant.to_le_bytes());
        put(56, &directory.to_le_bytes());
        put(64, &self.overhead().to_le_bytes());
        put(73, b"\n \r\n");
        header
    }

    pub(super) async fn finish<S: Storage>(mut self, storage: &S) -> Result<()> {
        self.end_table(storage).await?;
        storage.set_len(self.next * SECTOR).await?;
        for directory in self.directories() {
            let first = directory + self.directory();
            for start in (0..self.tables).step_by(WINDOW as usize) {
                let end = self.tables.min(start + WINDOW);
                let entries: Vec<u32> =
                    (start..end).map(|number| (first + number * TABLE) as u32).collect();
                let at = directory * SECTOR + start * 4;
                storage.write_at(at, IoBuf::copy_of(&encode(&entries))).await?;
            }
        }
        storage.flush().await?;
        let mut front = self.header();
        front.extend(self.descriptor.unwrap_or_default());
        storage.write_at(0, IoBuf::copy_of(&front)).await?;
        Ok(storage.flush().await?)
    }
}
