//! Writing VHDX, dynamic and fixed. The log is empty: the headers are written last.

use super::piece::Piece;
use super::placed::write_placed;
use crate::error::{Blame, Result};
use crate::vhdx::{
    BAT, BITMAP_SECTORS, DISK_ID, DISK_SIZE, FILE_PARAMETERS, Guid, HEADERS, LOGICAL_SECTOR,
    MAX_SIZE, METADATA, MIB, PHYSICAL_SECTOR, REGION_TABLES, check_block, checksum,
};
use isobath_storage::{IoBuf, Storage};
use std::path::Path;

const LOG_AT: u64 = MIB;

/// The maximum length of a log.
const MAX_LOG: u64 = (1 << 32) - MIB;

/// The disk's sector size in bytes.
const SECTOR: u64 = 512;

/// The states of blocks.
const NOT_PRESENT: u64 = 0;
const ZERO: u64 = 2;
const PRESENT: u64 = 6;

/// Options of a VHDX.
#[derive(Clone, Copy, Debug)]
pub struct VhdxOptions {
    /// The block size in bytes, a power of two from 1 MiB to 256 MiB; `None` chooses by the disk's size, as QEMU does.
    pub block_size: Option<u64>,
    /// The size of the log in bytes, a multiple of 1 MiB below 4 GiB.
    pub log_size: u64,
    /// Whether all blocks are allocated; otherwise only those that are written.
    pub fixed: bool,
    /// For a dynamic image: whether unallocated blocks are marked as zero. Without a parent they read as zeroes in any
    /// case.
    pub zero_blocks: bool,
    /// The GUIDs of the file, its data and the disk.
    pub ids: [u128; 3],
}

pub(crate) struct WriteVhdx {
    ids: [Guid; 3],
    size: u64,
    log: u64,
    fixed: bool,
    block: u64,
    chunk: u64,
    bat: Vec<u64>,
    /// The offset of the next block in the file.
    next: u64,
}

impl WriteVhdx {
    pub(crate) fn new(name: &Path, size: u64, options: VhdxOptions) -> Result<Self> {
        // QEMU opens an empty disk only with a table of 64 MiB, for blocks that do not exist.
        if size == 0 || size > MAX_SIZE {
            let reason = "a VHDX has a disk from 512 bytes to 64 TiB";
            return Err(Blame(name).unsupported("disk size", size, reason));
        }
        let log = options.log_size;
        if !log.is_multiple_of(MIB) || !(MIB..=MAX_LOG).contains(&log) {
            let reason = "it must be a multiple of 1 MiB, and below 4 GiB";
            return Err(Blame(name).invalid("log size", log, reason));
        }
        let block = options.block_size.unwrap_or(match size {
            size if size > 32 << 40 => 64 * MIB,
            size if size > 100 << 30 => 32 * MIB,
            size if size > 1 << 30 => 16 * MIB,
            _ => 8 * MIB,
        });
        check_block(Blame(name), block)?;
        let chunk = BITMAP_SECTORS * SECTOR / block;
        let blocks = size.div_ceil(block);
        let entries = blocks + (blocks - 1) / chunk;
        // The metadata is between the log and the table.
        let mut next = LOG_AT + log + MIB + (entries * 8).next_multiple_of(MIB);
        let absent = if options.zero_blocks { ZERO } else { NOT_PRESENT };
        let bat = (0..entries).map(|n| match n % (chunk + 1) == chunk {
            // The entry of a sector bitmap, which only images with a parent have.
            true => 0,
            false if options.fixed => {
                let place = next;
                next += block;
                place | PRESENT
            }
            false => absent,
        });
        let bat = bat.collect();
        let ids = options.ids.map(u128::to_le_bytes);
        Ok(Self { ids, size, log, fixed: options.fixed, block, chunk, bat, next })
    }

    const fn metadata_at(&self) -> u64 {
        LOG_AT + self.log
    }

    const fn bat_at(&self) -> u64 {
        self.metadata_at() + MIB
    }

    /// The offset of the block that contains guest byte `at`, which is allocated if necessary.
    fn place(&mut self, at: u64) -> u64 {
        let block = at / self.block;
        let index = (block + block / self.chunk) as usize;
        let Some(entry) = self.bat.get_mut(index) else { return self.next };
        if *entry & 7 != PRESENT {
            *entry = self.next | PRESENT;
            self.next += self.block;
        }
        *entry & !7
    }

    pub(crate) async fn write<S: Storage>(
        &mut self,
        storage: &S,
        pieces: Vec<Piece>,
    ) -> Result<()> {
        let mut placed = Vec::new();
        for Piece { at, bytes } in pieces {
            placed.push((self.place(at) + at % self.block, bytes));
        }
        write_placed(storage, placed).await
    }

    fn metadata(&self) -> Vec<u8> {
        let leave_allocated = u32::from(self.fixed);
        let parameters = [(self.block as u32).to_le_bytes(), leave_allocated.to_le_bytes()];
        let parameters = parameters.concat();
        let (user, disk, required) = (0, 2, 4);
        let items: [(Guid, u32, Vec<u8>); 5] = [
            (FILE_PARAMETERS, user | required, parameters),
            (DISK_SIZE, disk | required, self.size.to_le_bytes().to_vec()),
            (DISK_ID, disk | required, self.ids[2].to_vec()),
            (LOGICAL_SECTOR, disk | required, (SECTOR as u32).to_le_bytes().to_vec()),
            (PHYSICAL_SECTOR, disk | required, 4096_u32.to_le_bytes().to_vec()),
        ];
        let mut table = vec![0; 32];
        table[..8].copy_from_slice(b"metadata");
        table[10..12].copy_from_slice(&(items.len() as u16).to_le_bytes());
        let mut values: Vec<u8> = Vec::new();
        for (id, flags, value) in items {
            let at = (64 << 10) + values.len() as u32;
            table.extend(id);
            table.extend(at.to_le_bytes());
            table.extend((value.len() as u32).to_le_bytes());
            table.extend(flags.to_le_bytes());
            table.extend([0; 4]);
            values.extend(value);
        }
        table.resize(64 << 10, 0);
        table.extend(values);
        table.resize(MIB as usize, 0);
        table
    }

    fn region_table(&self) -> Vec<u8> {
        let mut table = vec![0; 16];
        table[..4].copy_from_slice(b"regi");
        table[8..12].copy_from_slice(&2_u32.to_le_bytes());
        let bat = (self.bat.len() as u64 * 8).next_multiple_of(MIB);
        for (id, at, length) in [(BAT, self.bat_at(), bat), (METADATA, self.metadata_at(), MIB)] {
            table.extend(id);
            table.extend(at.to_le_bytes());
            table.extend((length as u32).to_le_bytes());
            table.extend(1_u32.to_le_bytes());
        }
        table.resize(64 << 10, 0);
        sealed(table)
    }

    fn header(&self, sequence: u64) -> Vec<u8> {
        let mut header = vec![0; 4096];
        let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, b"head");
        put(8, &sequence.to_le_bytes());
        put(16, &self.ids[0]);
        put(32, &self.ids[1]);
        put(66, &1_u16.to_le_bytes());
        put(68, &(self.log as u32).to_le_bytes());
        put(72, &LOG_AT.to_le_bytes());
        sealed(header)
    }

    pub(crate) async fn finish<S: Storage>(self, storage: &S) -> Result<()> {
        // The file consists of whole blocks.
        storage.set_len(self.next).await?;
        let bat: Vec<u8> = self.bat.iter().flat_map(|entry| entry.to_le_bytes()).collect();
        storage.write_at(self.bat_at(), IoBuf::copy_of(&bat)).await?;
        storage.write_at(self.metadata_at(), IoBuf::copy_of(&self.metadata())).await?;
        let regions = self.region_table();
        for at in REGION_TABLES {
            storage.write_at(at, IoBuf::copy_of(&regions)).await?;
        }
        storage.flush().await?;
        for (sequence, at) in (1..).zip(HEADERS) {
            storage.write_at(at, IoBuf::copy_of(&self.header(sequence))).await?;
        }
        let mut identifier = b"vhdxfile".to_vec();
        identifier.extend("isobath".encode_utf16().flat_map(u16::to_le_bytes));
        storage.write_at(0, IoBuf::copy_of(&identifier)).await?;
        storage.flush().await?;
        Ok(())
    }
}

/// A structure with its checksum.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    let sum = checksum(&bytes);
    bytes[4..8].copy_from_slice(&sum.to_le_bytes());
    bytes
}
