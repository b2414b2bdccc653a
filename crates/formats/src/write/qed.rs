//! Writing QED without a backing file.

use super::piece::Piece;
use super::placed::write_placed;
use crate::error::{Blame, Result};
use isobath_storage::{IoBuf, Storage};
use std::path::Path;

/// Options of a QED image.
#[derive(Clone, Copy, Debug)]
pub struct QedOptions {
    /// The cluster size in bytes, a power of two from 4 KiB to 64 MiB.
    pub cluster_size: u64,
    /// The size of a table in clusters, a power of two up to 16.
    pub table_size: u64,
}

pub(crate) struct WriteQed {
    options: QedOptions,
    /// The disk's size in bytes.
    size: u64,
    /// Entries in a table.
    entries: u64,
    l1: Vec<u64>,
    /// The L2 table of the clusters being written, and its number.
    l2: Vec<u64>,
    number: u64,
    /// The offset of the next cluster in the file.
    next: u64,
}

impl WriteQed {
    pub(crate) fn new(name: &Path, size: u64, options: QedOptions) -> Result<Self> {
        let QedOptions { cluster_size, table_size } = options;
        let blame = Blame(name);
        if !cluster_size.is_power_of_two() || !(4096..=64 << 20).contains(&cluster_size) {
            let reason = "it must be a power of two from 4 KiB to 64 MiB";
            return Err(blame.invalid("cluster_size", cluster_size, reason));
        }
        if !table_size.is_power_of_two() || table_size > 16 {
            let reason = "it must be a power of two up to 16";
            return Err(blame.invalid("table_size", table_size, reason));
        }
        let entries = table_size * cluster_size / 8;
        let most = u128::from(entries) * u128::from(entries) * u128::from(cluster_size);
        if u128::from(size) > most || i64::try_from(size).is_err() {
            let reason = format!("a QED image with these tables has at most {most} bytes");
            return Err(blame.unsupported("disk size", size, reason));
        }
        let empty = vec![0; entries as usize];
        // The header, then the L1 table.
        let next = cluster_size * (1 + table_size);
        Ok(Self { options, size, entries, l1: empty.clone(), l2: empty, number: 0, next })
    }

    /// Allocates the L2 table of the current clusters, its first ones.
    fn begin_table(&mut self) {
        if let Some(slot) = self.l1.get_mut(self.number as usize)
            && *slot == 0
        {
            *slot = self.next;
            self.next += self.entries * 8;
        }
    }

    /// Writes the current L2 table, unless it is empty.
    async fn end_table<S: Storage>(&mut self, storage: &S) -> Result<()> {
        let place = self.l1.get(self.number as usize).copied().unwrap_or_default();
        if place == 0 {
            return Ok(());
        }
        let table: Vec<u8> = self.l2.iter().flat_map(|entry| entry.to_le_bytes()).collect();
        self.l2.fill(0);
        storage.write_at(place, IoBuf::copy_of(&table)).await?;
        Ok(())
    }

    pub(crate) async fn write<S: Storage>(
        &mut self,
        storage: &S,
        pieces: Vec<Piece>,
    ) -> Result<()> {
        let cluster = self.options.cluster_size;
        let mut placed = Vec::new();
        for Piece { at, bytes } in pieces {
            for (at, part) in (at..).step_by(cluster as usize).zip(bytes.chunks(cluster as usize)) {
                if part.iter().all(|byte| *byte == 0) {
                    continue;
                }
                let index = at / cluster;
                if index / self.entries != self.number {
                    self.end_table(storage).await?;
                    self.number = index / self.entries;
                }
                self.begin_table();
                let Some(slot) = self.l2.get_mut((index % self.entries) as usize) else { continue };
                if *slot == 0 {
                    *slot = self.next;
                    self.next += cluster;
                }
                placed.push((*slot + at % cluster, part.to_vec()));
            }
        }
        write_placed(storage, placed).await
    }

    fn header(&self) -> Vec<u8> {
        let mut header = vec![0; 64];
        let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
        let QedOptions { cluster_size, table_size } = self.options;
        put(0, b"QED\0");
        put(4, &(cluster_size as u32).to_le_bytes());
        put(8, &(table_size as u32).to_le_bytes());
        // The size of the header in clusters.
        put(12, &1_u32.to_le_bytes());
        put(40, &cluster_size.to_le_bytes());
        put(48, &self.size.to_le_bytes());
        header
    }

    pub(crate) async fn finish<S: Storage>(mut self, storage: &S) -> Result<()> {
        self.end_table(storage).await?;
        // The file consists of whole clusters.
        storage.set_len(self.next).await?;
        let l1: Vec<u8> = self.l1.iter().flat_map(|entry| entry.to_le_bytes()).collect();
        storage.write_at(self.options.cluster_size, IoBuf::copy_of(&l1)).await?;
        storage.flush().await?;
        storage.write_at(0, IoBuf::copy_of(&self.header())).await?;
        Ok(storage.flush().await?)
    }
}
