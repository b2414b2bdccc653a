//! Writing a sparse extent: header, descriptor, two copies of the grain directory and of the grain tables, and then the
//! grains in the order in which they are written. The locations of all grain tables are fixed from the start.

use super::grains::{Grains, Table};
use super::{DESCRIPTOR, ENTRIES, GRAIN, encode};
use crate::error::Result;
use crate::vmdk::SECTOR;
use crate::write::piece::{PIECE, Piece};
use isobath_storage::{IoBuf, Storage};
use std::path::Path;

/// The size of a grain table in sectors.
const TABLE: u64 = ENTRIES * 4 / SECTOR;

/// Entries of a grain directory that are written at a time.
const WINDOW: u64 = 1 << 18;

pub(crate) struct WriteSparse {
    /// The size of the disk in sectors.
    capacity: u64,
    /// Padded to whole sectors.
    descriptor: Option<Vec<u8>>,
    /// Whether an entry of 1 stands for zeroes.
    zeroed: bool,
    /// The number of grain tables.
    tables: u64,
    grains: Grains,
}

impl WriteSparse {
    /// An extent of `capacity` sectors. It contains the image's descriptor, unless that is in a file of its own.
    pub(super) fn new(
        name: &Path,
        capacity: u64,
        descriptor: Option<Vec<u8>>,
        zeroed: bool,
    ) -> Self {
        let tables = capacity.div_ceil(GRAIN * ENTRIES);
        let grains = Grains::new(name, 0);
        let mut new = Self { capacity, descriptor, zeroed, tables, grains };
        new.grains.next = new.overhead();
        new
    }

    /// The size of a grain directory in sectors.
    const fn directory(&self) -> u64 {
        (self.tables * 4).div_ceil(SECTOR)
    }

    /// The sectors of the two copies of the grain directory, the redundant one first. Each is followed by its tables.
    const fn directories(&self) -> [u64; 2] {
        let first = 1 + DESCRIPTOR;
        [first, first + self.directory() + self.tables * TABLE]
    }

    /// The number of sectors before the first grain.
    const fn overhead(&self) -> u64 {
        let [_, second] = self.directories();
        (second + self.directory() + self.tables * TABLE).next_multiple_of(GRAIN)
    }

    /// Writes both copies of a table.
    async fn write_table<S: Storage>(&self, storage: &S, table: &Table) -> Result<()> {
        for directory in self.directories() {
            let at = directory + self.directory() + table.number * TABLE;
            storage.write_at(at * SECTOR, IoBuf::copy_of(&table.bytes)).await?;
        }
        Ok(())
    }

    pub(super) async fn write<S: Storage>(
        &mut self,
        storage: &S,
        pieces: Vec<Piece>,
    ) -> Result<()> {
        let start = self.grains.next * SECTOR;
        let mut out = Vec::new();
        for Piece { at, mut bytes } in pieces {
            if let Some(table) = self.grains.go_to(at) {
                self.write_table(storage, &table).await?;
            }
            // The disk may end within its last grain, but the file contains whole grains.
            bytes.resize(PIECE, 0);
            self.grains.add(at, &bytes)?;
            out.extend(bytes);
        }
        if !out.is_empty() {
            storage.write_at(start, IoBuf::copy_of(&out)).await?;
        }
        Ok(())
    }

    fn header(&self) -> Vec<u8> {
        let mut header = vec![0; SECTOR as usize];
        let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
        // Flags: newlines can be checked, there is a redundant directory, entries of 1 stand for zeroes.
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
        if let Some(table) = self.grains.end_table() {
            self.write_table(storage, &table).await?;
        }
        storage.set_len(self.grains.next * SECTOR).await?;
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
