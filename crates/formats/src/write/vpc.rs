//! Writing VHD, as specified in Microsoft's "Virtual Hard Disk Image Format Specification", fixed and dynamic.

use super::piece::Piece;
use super::placed::{TableWriter, write_placed};
use crate::error::{Blame, Result};
use crate::vpc::{MAX_GEOMETRY, MAX_SECTORS, checksum};
use isobath_storage::{IoBuf, Storage};
use std::path::Path;

const SECTOR: u64 = 512;

/// The size of a block of a dynamic image in bytes, and of its sector bitmap.
const BLOCK: u64 = 2 << 20;
const BITMAP: u64 = BLOCK / SECTOR / 8;

/// The offsets of a dynamic image's header and of its table.
const HEADER_AT: u64 = SECTOR;
const TABLE_AT: u64 = HEADER_AT + 1024;

/// Options of a VHD.
#[derive(Clone, Copy, Debug)]
pub struct VpcOptions {
    /// Whether the file contains the whole disk; otherwise only the blocks that are written.
    pub fixed: bool,
    /// Whether the disk has exactly the requested size; otherwise it has that of the next larger geometry.
    pub force_size: bool,
    /// The image's UUID.
    pub id: u128,
    /// When it was created, in seconds since the year 2000.
    pub created: u32,
}

/// Cylinders, heads, and sectors per track.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Geometry {
    cylinders: u64,
    heads: u64,
    track: u64,
}

impl Geometry {
    const LARGEST: Self = Self { cylinders: 65535, heads: 16, track: 255 };

    /// The geometry of a disk of this many sectors, calculated as in the specification's appendix. It may cover fewer.
    fn of(sectors: u64) -> Self {
        let sectors = sectors.min(MAX_GEOMETRY);
        if sectors >= 65535 * 16 * 63 {
            return Self { cylinders: sectors / 255 / 16, heads: 16, track: 255 };
        }
        // Small disks have short tracks and at least 4 heads; disks that need more than 1024 cylinders have longer
        // tracks.
        let tracks = sectors / 17;
        let heads = tracks.div_ceil(1024).max(4);
        if heads <= 16 && tracks < heads * 1024 {
            return Self { cylinders: tracks / heads, heads, track: 17 };
        }
        let tracks = sectors / 31;
        if tracks < 16 * 1024 {
            return Self { cylinders: tracks / 16, heads: 16, track: 31 };
        }
        Self { cylinders: sectors / 63 / 16, heads: 16, track: 63 }
    }

    const fn sectors(self) -> u64 {
        self.cylinders * self.heads * self.track
    }

    /// The first geometry that covers this many sectors, or else the largest one.
    fn holding(sectors: u64) -> Self {
        let wanted = sectors.min(MAX_GEOMETRY);
        let mut of = sectors;
        loop {
            let geometry = Self::of(of);
            if geometry.sectors() >= wanted {
                return geometry;
            }
            of += 1;
        }
    }
}

/// The geometry and the number of sectors of a disk of `size` bytes.
fn fit(name: &Path, size: u64, force_size: bool) -> Result<(Geometry, u64)> {
    let wanted = size.div_ceil(SECTOR);
    // Programs that derive the size from the geometry do so except for the largest geometry.
    let geometry = match (force_size, wanted) {
        (true, _) => Geometry::LARGEST,
        (false, 0) => Geometry { cylinders: 0, heads: 0, track: 0 },
        (false, _) => Geometry::holding(wanted),
    };
    let sectors = if geometry.sectors() == MAX_GEOMETRY { wanted } else { geometry.sectors() };
    if sectors > MAX_SECTORS {
        let reason = "the image size is too large: a VHD has a disk of at most 2040 GiB";
        return Err(Blame(name).unsupported("disk size", size, reason));
    }
    Ok((geometry, sectors))
}

pub(crate) struct WriteVpc {
    options: VpcOptions,
    geometry: Geometry,
    /// The disk's size in bytes.
    size: u64,
    /// For a dynamic image.
    blocks: Option<Blocks>,
}

struct Blocks {
    table: TableWriter<4>,
    /// The offset of the next block's bitmap.
    next: u64,
    /// The block written last.
    last: Option<u64>,
}

impl WriteVpc {
    pub(crate) fn new(name: &Path, size: u64, options: VpcOptions) -> Result<Self> {
        let (geometry, sectors) = fit(name, size, options.force_size)?;
        let size = sectors * SECTOR;
        let table = size.div_ceil(BLOCK) * 4;
        let blocks = (!options.fixed).then(|| Blocks {
            table: TableWriter::new(TABLE_AT, [0xff; 4]),
            next: TABLE_AT + table.next_multiple_of(SECTOR),
            last: None,
        });
        Ok(Self { options, geometry, size, blocks })
    }

    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    pub(crate) async fn write<S: Storage>(
        &mut self,
        storage: &S,
        pieces: Vec<Piece>,
    ) -> Result<()> {
        let Some(blocks) = &mut self.blocks else {
            return write_placed(storage, pieces.into_iter().map(|p| (p.at, p.bytes))).await;
        };
        let mut placed = Vec::new();
        for Piece { at, bytes } in pieces {
            let block = at / BLOCK;
            if blocks.last != Some(block) {
                // All its sectors count as present: those that are not written read as zeroes.
                placed.push((blocks.next, vec![0xff; BITMAP as usize]));
                let sector = (blocks.next / SECTOR) as u32;
                blocks.table.set(storage, block, sector.to_be_bytes()).await?;
                blocks.next += BITMAP + BLOCK;
                blocks.last = Some(block);
            }
            placed.push((blocks.next - BLOCK + at % BLOCK, bytes));
        }
        write_placed(storage, placed).await
    }

    fn footer(&self) -> Vec<u8> {
        let mut footer = vec![0; SECTOR as usize];
        let mut put = |at: usize, bytes: &[u8]| footer[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, b"conectix");
        // A reserved bit that is always set.
        put(8, &2_u32.to_be_bytes());
        put(12, &0x0001_0000_u32.to_be_bytes());
        let header = if self.options.fixed { u64::MAX } else { HEADER_AT };
        put(16, &header.to_be_bytes());
        put(24, &self.options.created.to_be_bytes());
        // Hyper-V uses the current size. QEMU uses the geometry, except for creators that it knows to mean the size,
        // such as its own "qem2"; "qemu" means the geometry. Readers interpret other names differently.
        put(28, if self.options.force_size { b"qem2" } else { b"qemu" });
        put(32, &0x0005_0003_u32.to_be_bytes());
        put(36, b"Wi2k");
        put(40, &self.size.to_be_bytes());
        put(48, &self.size.to_be_bytes());
        let Geometry { cylinders, heads, track } = self.geometry;
        put(56, &(cylinders as u16).to_be_bytes());
        put(58, &[heads as u8, track as u8]);
        let kind: u32 = if self.options.fixed { 2 } else { 3 };
        put(60, &kind.to_be_bytes());
        put(68, &self.options.id.to_be_bytes());
        let sum = checksum(&footer, 64);
        footer[64..68].copy_from_slice(&sum.to_be_bytes());
        footer
    }

    fn header(&self) -> Vec<u8> {
        let mut header = vec![0; (TABLE_AT - HEADER_AT) as usize];
        let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, b"cxsparse");
        put(8, &u64::MAX.to_be_bytes());
        put(16, &TABLE_AT.to_be_bytes());
        put(24, &0x0001_0000_u32.to_be_bytes());
        put(28, &(self.size.div_ceil(BLOCK) as u32).to_be_bytes());
        put(32, &(BLOCK as u32).to_be_bytes());
        let sum = checksum(&header, 36);
        header[36..40].copy_from_slice(&sum.to_be_bytes());
        header
    }

    pub(crate) async fn finish<S: Storage>(mut self, storage: &S) -> Result<()> {
        let footer = self.footer();
        let Some(blocks) = self.blocks.take() else {
            // The disk is durable before the footer makes it an image.
            storage.set_len(self.size).await?;
            storage.flush().await?;
            storage.write_at(self.size, IoBuf::copy_of(&footer)).await?;
            return Ok(storage.flush().await?);
        };
        blocks.table.finish(storage, self.size.div_ceil(BLOCK)).await?;
        storage.write_at(blocks.next, IoBuf::copy_of(&footer)).await?;
        storage.flush().await?;
        let front = [footer, self.header()].concat();
        storage.write_at(0, IoBuf::copy_of(&front)).await?;
        Ok(storage.flush().await?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn geometries_are_those_of_the_specification() {
        for (sectors, cylinders, heads, track) in [
            (131_072, 963, 8, 17),
            (20_971_520, 20805, 16, 63),
            (66_059_280, 16191, 16, 255),
            (u64::MAX, 65535, 16, 255),
        ] {
            assert_eq!(Geometry::of(sectors), Geometry { cylinders, heads, track }, "{sectors}");
        }
    }

    #[test]
    fn a_geometry_holds_what_it_must() {
        for sectors in (1..70_000_000).step_by(9973) {
            let geometry = Geometry::holding(sectors);
            assert!(geometry.sectors() >= sectors && geometry.sectors() < sectors + 5000);
        }
    }
}
