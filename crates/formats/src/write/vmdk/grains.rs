//! The grains of an extent, which are written in order: their locations in the file, and the grain tables that they
//! fill.

use super::{ENTRIES, GRAIN, encode};
use crate::error::{Blame, Result};
use crate::vmdk::SECTOR;
use std::path::{Path, PathBuf};

pub(super) struct Grains {
    name: PathBuf,
    /// The next sector of the file.
    pub(super) next: u64,
    /// The current table, and its number.
    table: Vec<u32>,
    number: u64,
}

/// A complete grain table, padded to whole sectors.
pub(super) struct Table {
    pub(super) number: u64,
    pub(super) bytes: Vec<u8>,
}

impl Grains {
    /// No grains yet; the first is placed at sector `next` of the file `name`.
    pub(super) fn new(name: &Path, next: u64) -> Self {
        Self { name: name.to_owned(), next, table: vec![0; ENTRIES as usize], number: 0 }
    }

    /// Allocates sectors for `bytes`, which are whole sectors, at the end of the file.
    pub(super) fn place(&mut self, bytes: &[u8]) -> Result<u32> {
        let at = self.next;
        self.next += bytes.len() as u64 / SECTOR;
        if u32::try_from(self.next).is_err() {
            let reason = "a VMDK's file has at most 2 TiB";
            return Err(Blame(&self.name).unsupported("file size", self.next * SECTOR, reason));
        }
        Ok(at as u32)
    }

    /// Makes the table of the grain at guest offset `at` the current one. Returns the previous one if it is complete,
    /// unless it is empty.
    pub(super) fn go_to(&mut self, at: u64) -> Option<Table> {
        let number = at / (GRAIN * SECTOR) / ENTRIES;
        if number == self.number {
            return None;
        }
        let ended = self.end_table();
        self.number = number;
        ended
    }

    /// Allocates sectors for `bytes`, the grain at guest offset `at`, which must belong to the current table.
    pub(super) fn add(&mut self, at: u64, bytes: &[u8]) -> Result<()> {
        let place = self.place(bytes)?;
        if let Some(slot) = self.table.get_mut((at / (GRAIN * SECTOR) % ENTRIES) as usize) {
            *slot = place;
        }
        Ok(())
    }

    /// Ends the current table. Returns it unless it is empty.
    pub(super) fn end_table(&mut self) -> Option<Table> {
        if self.table.iter().all(|entry| *entry == 0) {
            return None;
        }
        let bytes = encode(&self.table);
        self.table.fill(0);
        Some(Table { number: self.number, bytes })
    }
}
