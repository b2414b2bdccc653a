//! Writing stream-optimized VMDK: each grain is compressed and follows a marker with its place; a grain table follows
//! its grains, and the grain directory and the footer come last.

use super::grains::{Grains, Table};
use super::{DESCRIPTOR, ENTRIES, GRAIN, encode};
use crate::error::Result;
use crate::vmdk::{AT_END, SECTOR};
use crate::write::piece::{PIECE, Piece};
use flate2::{Compress, Compression, FlushCompress};
use isobath_storage::{IoBuf, Storage};
use std::path::Path;

/// The number of sectors before the first grain.
const OVERHEAD: u64 = 128;

/// The types of markers other than those of grains.
const TABLE_MARKER: u32 = 1;
const DIRECTORY_MARKER: u32 = 2;
const FOOTER_MARKER: u32 = 3;

pub(crate) struct WriteStream {
    /// The size of the disk in sectors.
    capacity: u64,
    descriptor: Vec<u8>,
    /// Whether an entry of 1 stands for zeroes.
    zeroed: bool,
    grains: Grains,
    directory: Vec<u32>,
}

/// A grain's marker and the compressed grain, padded to whole sectors.
pub(crate) fn deflate(at: u64, bytes: &[u8]) -> Vec<u8> {
    let mut grain = vec![0; PIECE];
    let (there, _) = grain.split_at_mut(bytes.len());
    there.copy_from_slice(bytes);
    // Enough for data that cannot be compressed, which takes a few bytes more for each stored block.
    let mut out = vec![0; 12 + PIECE + PIECE / 64 + 64];
    let mut compress = Compress::new(Compression::default(), true);
    let (marker, room) = out.split_at_mut(12);
    // The output fits, so there is no error.
    let _ = compress.compress(&grain, room, FlushCompress::Finish);
    let length = compress.total_out() as usize;
    marker[..8].copy_from_slice(&(at / SECTOR).to_le_bytes());
    marker[8..].copy_from_slice(&(length as u32).to_le_bytes());
    out.truncate(12 + length);
    out.resize(out.len().next_multiple_of(SECTOR as usize), 0);
    out
}

/// A marker of metadata.
fn marker(sectors: u64, kind: u32) -> Vec<u8> {
    let mut marker = vec![0; SECTOR as usize];
    marker[..8].copy_from_slice(&sectors.to_le_bytes());
    marker[12..16].copy_from_slice(&kind.to_le_bytes());
    marker
}

impl WriteStream {
    pub(super) fn new(name: &Path, capacity: u64, descriptor: Vec<u8>, zeroed: bool) -> Self {
        let grains = Grains::new(name, OVERHEAD);
        let tables = capacity.div_ceil(GRAIN * ENTRIES);
        Self { capacity, descriptor, zeroed, grains, directory: vec![0; tables as usize] }
    }

    /// Appends a table to `out`.
    fn append(&mut self, Table { number, bytes }: Table, out: &mut Vec<u8>) -> Result<()> {
        let marker = marker(bytes.len() as u64 / SECTOR, TABLE_MARKER);
        self.grains.place(&marker)?;
        let at = self.grains.place(&bytes)?;
        if let Some(slot) = self.directory.get_mut(number as usize) {
            *slot = at;
        }
        out.extend(marker);
        out.extend(bytes);
        Ok(())
    }

    pub(super) async fn write<S: Storage>(
        &mut self,
        storage: &S,
        pieces: Vec<Piece>,
    ) -> Result<()> {
        let start = self.grains.next * SECTOR;
        let mut out = Vec::new();
        for Piece { at, bytes } in pieces {
            if let Some(table) = self.grains.go_to(at) {
                self.append(table, &mut out)?;
            }
            self.grains.add(at, &bytes)?;
            out.extend(bytes);
        }
        if !out.is_empty() {
            storage.write_at(start, IoBuf::copy_of(&out)).await?;
        }
        Ok(())
    }

    fn header(&self, directory: u64) -> Vec<u8> {
        let mut header = vec![0; SECTOR as usize];
        let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, b"KDMV");
        put(4, &3_u32.to_le_bytes());
        // Flags: newlines can be checked, grains are compressed, there are markers, entries of 1 stand for zeroes.
        let flags: u32 = if self.zeroed { 0x3_0005 } else { 0x3_0001 };
        put(8, &flags.to_le_bytes());
        put(12, &self.capacity.to_le_bytes());
        put(20, &GRAIN.to_le_bytes());
        put(28, &1_u64.to_le_bytes());
        put(36, &DESCRIPTOR.to_le_bytes());
        put(44, &(ENTRIES as u32).to_le_bytes());
        put(56, &directory.to_le_bytes());
        put(64, &OVERHEAD.to_le_bytes());
        put(73, b"\n \r\n");
        put(77, &1_u16.to_le_bytes());
        header
    }

    pub(super) async fn finish<S: Storage>(mut self, storage: &S) -> Result<()> {
        let start = self.grains.next * SECTOR;
        let mut out = Vec::new();
        if let Some(table) = self.grains.end_table() {
            self.append(table, &mut out)?;
        }
        let directory = encode(&self.directory);
        let marked = marker(directory.len() as u64 / SECTOR, DIRECTORY_MARKER);
        self.grains.place(&marked)?;
        let at = self.grains.place(&directory)?;
        out.extend(marked);
        out.extend(directory);
        out.extend(marker(1, FOOTER_MARKER));
        out.extend(self.header(at.into()));
        // The end of the stream.
        out.extend(marker(0, 0));
        storage.write_at(start, IoBuf::copy_of(&out)).await?;
        storage.flush().await?;
        let mut front = self.header(AT_END);
        front.extend(self.descriptor);
        storage.write_at(0, IoBuf::copy_of(&front)).await?;
        storage.flush().await?;
        Ok(())
    }
}
