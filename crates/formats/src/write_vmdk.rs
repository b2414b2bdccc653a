//! Writing stream-optimized VMDK: each grain is compressed and follows a marker with its place; a grain table follows
//! its grains, and the grain directory and the footer come last.

use crate::error::{Blame, Result};
use crate::piece::{PIECE, Piece};
use crate::vmdk::{AT_END, SECTOR};
use flate2::{Compress, Compression, FlushCompress};
use isobath_storage::{IoBuf, Storage};
use std::path::{Path, PathBuf};

/// Sectors in a grain.
const GRAIN: u64 = PIECE as u64 / SECTOR;

/// Entries in a grain table.
const ENTRIES: u64 = 512;

/// Sectors before the first grain.
const OVERHEAD: u64 = 128;

/// Sectors of the descriptor, which follows the header.
const DESCRIPTOR: usize = 20;

/// Markers that are not grains.
const TABLE_MARKER: u32 = 1;
const DIRECTORY_MARKER: u32 = 2;
const FOOTER_MARKER: u32 = 3;

/// Options of a VMDK.
#[derive(Clone, Debug)]
pub struct VmdkOptions {
    /// The content's identity. It must not be the one that stands for no parent, all ones.
    pub content_id: u32,
    /// The disk's controller: `ide`, `buslogic`, `lsilogic` or `legacyESX`.
    pub adapter: &'static str,
    /// The version of `VMware`'s virtual hardware.
    pub hardware_version: u32,
}

pub(crate) struct WriteVmdk {
    name: PathBuf,
    options: VmdkOptions,
    /// Sectors of the disk.
    capacity: u64,
    /// The next sector of the file.
    next: u64,
    /// The table of the grains being written, and its number.
    table: Vec<u32>,
    number: u64,
    directory: Vec<u32>,
}

/// A grain's marker and the compressed grain, in whole sectors.
pub(crate) fn deflate(at: u64, bytes: &[u8]) -> Vec<u8> {
    let mut grain = vec![0; PIECE];
    let (there, _) = grain.split_at_mut(bytes.len());
    there.copy_from_slice(bytes);
    // Room for what cannot be compressed: a few bytes for each stored block.
    let mut out = vec![0; 12 + PIECE + PIECE / 64 + 64];
    let mut compress = Compress::new(Compression::default(), true);
    let (marker, room) = out.split_at_mut(12);
    // It ends within the room, so there is no error.
    let _ = compress.compress(&grain, room, FlushCompress::Finish);
    let length = compress.total_out() as usize;
    marker[..8].copy_from_slice(&(at / SECTOR).to_le_bytes());
    marker[8..].copy_from_slice(&(length as u32).to_le_bytes());
    out.truncate(12 + length);
    out.resize(out.len().next_multiple_of(SECTOR as usize), 0);
    out
}

/// A marker of metadata that is not a grain.
fn marker(sectors: u64, kind: u32) -> Vec<u8> {
    let mut marker = vec![0; SECTOR as usize];
    marker[..8].copy_from_slice(&sectors.to_le_bytes());
    marker[12..16].copy_from_slice(&kind.to_le_bytes());
    marker
}

/// Entries in whole sectors.
fn encode(entries: &[u32]) -> Vec<u8> {
    let mut bytes: Vec<u8> = entries.iter().flat_map(|entry| entry.to_le_bytes()).collect();
    bytes.resize(bytes.len().next_multiple_of(SECTOR as usize), 0);
    bytes
}

impl WriteVmdk {
    pub(crate) fn new(name: &Path, size: u64, options: VmdkOptions) -> Result<Self> {
        let capacity = size / SECTOR;
        let tables = capacity.div_ceil(GRAIN * ENTRIES);
        // What fits in a file whose sectors have 32-bit numbers, if all of it is data.
        if capacity == 0 || capacity > u64::from(u32::MAX) * 64 {
            let reason = "a stream-optimized VMDK has a disk from 512 bytes to 128 TiB";
            return Err(Blame(name).unsupported("disk size", size, reason));
        }
        Ok(Self {
            name: name.to_owned(),
            options,
            capacity,
            next: OVERHEAD,
            table: vec![0; ENTRIES as usize],
            number: 0,
            directory: vec![0; tables as usize],
        })
    }

    /// The place of `bytes`, which are whole sectors, after everything else.
    fn place(&mut self, bytes: &[u8]) -> Result<u32> {
        let at = self.next;
        self.next += bytes.len() as u64 / SECTOR;
        if u32::try_from(self.next).is_err() {
            let reason = "a VMDK's file has at most 2 TiB";
            return Err(Blame(&self.name).unsupported("file size", self.next * SECTOR, reason));
        }
        Ok(at as u32)
    }

    /// Puts the table of the current grains into `out`, if it has any.
    fn end_table(&mut self, out: &mut Vec<u8>) -> Result<()> {
        if self.table.iter().all(|entry| *entry == 0) {
            return Ok(());
        }
        let table = encode(&self.table);
        self.table.fill(0);
        let marker = marker(table.len() as u64 / SECTOR, TABLE_MARKER);
        self.place(&marker)?;
        let at = self.place(&table)?;
        if let Some(slot) = self.directory.get_mut(self.number as usize) {
            *slot = at;
        }
        out.extend(marker);
        out.extend(table);
        Ok(())
    }

    pub(crate) async fn write<S: Storage>(
        &mut self,
        storage: &S,
        pieces: Vec<Piece>,
    ) -> Result<()> {
        let start = self.next * SECTOR;
        let mut out = Vec::new();
        for Piece { at, bytes } in pieces {
            let grain = at / (GRAIN * SECTOR);
            if grain / ENTRIES != self.number {
                self.end_table(&mut out)?;
                self.number = grain / ENTRIES;
            }
            let place = self.place(&bytes)?;
            if let Some(slot) = self.table.get_mut((grain % ENTRIES) as usize) {
                *slot = place;
            }
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
        // Newlines can be checked; compressed grains; markers.
        put(8, &0x3_0001_u32.to_le_bytes());
        put(12, &self.capacity.to_le_bytes());
        put(20, &GRAIN.to_le_bytes());
        put(28, &1_u64.to_le_bytes());
        put(36, &(DESCRIPTOR as u64).to_le_bytes());
        put(44, &(ENTRIES as u32).to_le_bytes());
        put(56, &directory.to_le_bytes());
        put(64, &OVERHEAD.to_le_bytes());
        put(73, b"\n \r\n");
        put(77, &1_u16.to_le_bytes());
        header
    }

    fn descriptor(&self) -> Vec<u8> {
        let VmdkOptions { content_id, adapter, hardware_version } = self.options;
        let name = self.name.file_name().unwrap_or_default().to_string_lossy();
        // The name is for people: a quotation mark or a line's end would change the descriptor's meaning.
        let name: String = name
            .chars()
            .take(200)
            .map(|c| if c == '"' || c.is_control() { '_' } else { c })
            .collect();
        let (heads, sectors) = if adapter == "ide" { (16, 63) } else { (255, 63) };
        let cylinders = self.capacity / (heads * sectors);
        let text = format!(
            "# Disk DescriptorFile\nversion=1\nCID={content_id:08x}\nparentCID=ffffffff\n\
             createType=\"streamOptimized\"\n\n# Extent description\nRW {} SPARSE \"{name}\"\n\n\
             # The Disk Data Base\n#DDB\n\nddb.virtualHWVersion = \"{hardware_version}\"\n\
             ddb.geometry.cylinders = \"{cylinders}\"\nddb.geometry.heads = \"{heads}\"\n\
             ddb.geometry.sectors = \"{sectors}\"\nddb.adapterType = \"{adapter}\"\n",
            self.capacity
        );
        let mut bytes = text.into_bytes();
        bytes.resize(DESCRIPTOR * SECTOR as usize, 0);
        bytes
    }

    pub(crate) async fn finish<S: Storage>(mut self, storage: &S) -> Result<()> {
        let start = self.next * SECTOR;
        let mut out = Vec::new();
        self.end_table(&mut out)?;
        let directory = encode(&self.directory);
        let marked = marker(directory.len() as u64 / SECTOR, DIRECTORY_MARKER);
        self.place(&marked)?;
        let at = self.place(&directory)?;
        out.extend(marked);
        out.extend(directory);
        out.extend(marker(1, FOOTER_MARKER));
        out.extend(self.header(at.into()));
        // The end of the stream.
        out.extend(marker(0, 0));
        storage.write_at(start, IoBuf::copy_of(&out)).await?;
        storage.flush().await?;
        let mut front = self.header(AT_END);
        front.extend(self.descriptor());
        storage.write_at(0, IoBuf::copy_of(&front)).await?;
        storage.flush().await?;
        Ok(())
    }
}
