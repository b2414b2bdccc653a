//! Persistent bitmaps (section "Bitmaps").

use crate::bit_set::bit_set;
use crate::bytes;
use crate::error::{FormatError, printable};
use crate::extension::BitmapsExtension;
use crate::geometry::Geometry;
use crate::offset::HostOffset;
use crate::table_entry::OFFSET_MASK;
use std::collections::HashSet;

/// The most bitmaps in an image (QEMU's limit).
pub const MAX_BITMAPS: u32 = 65535;
/// Largest bitmap directory, in bytes (QEMU's limit).
pub const MAX_DIRECTORY_BYTES: u64 = 1024 * MAX_BITMAPS as u64;
/// Largest bitmap, in bytes (QEMU's limit).
pub const MAX_BITMAP_BYTES: u64 = 512 << 20;
/// Longest bitmap name, in bytes (QEMU's limit).
pub const MAX_NAME_BYTES: usize = 1023;
/// The `type` of a dirty tracking bitmap, the only one there is.
pub const DIRTY_TRACKING: u8 = 1;

/// Bytes of a directory entry before its extra data and name.
const ENTRY_HEAD_BYTES: usize = 24;

bit_set! {
    /// The flags of a bitmap.
    BitmapFlags(u32) {
        /// The bitmap was not saved and may be inconsistent.
        IN_USE = 0;
        /// The bitmap is enabled: every writer must record its writes in it, or mark it inconsistent.
        AUTO = 1;
        /// Programs that do not know its extra data may use the bitmap.
        EXTRA_DATA_COMPATIBLE = 2;
    }
}

impl BitmapsExtension {
    /// Checks the extension's fields.
    ///
    /// # Errors
    /// If there are no bitmaps or more than 65535, the reserved field is not 0, or the directory is
    /// misplaced, too large, or too small for its entries.
    pub fn validate(&self, geometry: &Geometry) -> Result<(), FormatError> {
        if !(1..=MAX_BITMAPS).contains(&self.count) {
            return Err(FormatError::invalid(
                "nb_bitmaps",
                self.count,
                format!("must be 1 to {MAX_BITMAPS}"),
            ));
        }
        if self.reserved != 0 {
            return Err(FormatError::invalid(
                "bitmaps extension's reserved field",
                self.reserved,
                "must be 0",
            ));
        }
        let offset = geometry.check_offset("bitmap_directory_offset", self.directory_offset)?;
        if offset.get() == 0 {
            return Err(FormatError::invalid(
                "bitmap_directory_offset",
                offset,
                "the directory overlaps the header",
            ));
        }
        let least = u64::from(self.count) * (ENTRY_HEAD_BYTES as u64 + 8);
        if !(least..=MAX_DIRECTORY_BYTES).contains(&self.directory_size) {
            return Err(FormatError::invalid(
                "bitmap_directory_size",
                self.directory_size,
                format!(
                    "must be {least} to {MAX_DIRECTORY_BYTES} bytes for {} bitmaps",
                    self.count
                ),
            ));
        }
        Ok(())
    }
}

/// A bitmap: an entry of the bitmap directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bitmap {
    /// Where the bitmap table starts.
    pub table_offset: HostOffset,
    /// Entries of the bitmap table.
    pub table_size: u32,
    /// The flags.
    pub flags: BitmapFlags,
    /// The type of bitmap: [`DIRTY_TRACKING`].
    pub kind: u8,
    /// Base-2 logarithm of the guest bytes that a bit stands for.
    pub granularity_bits: u8,
    /// Extra data, kept as it is.
    pub extra_data: Vec<u8>,
    /// The name as stored. Hostile text: print [`name_text`](Self::name_text).
    pub name: Vec<u8>,
}

impl Bitmap {
    /// The bitmaps in a directory's bytes.
    ///
    /// # Errors
    /// If the directory does not hold exactly `count` entries, or two have the same name.
    pub fn parse_directory(directory: &[u8], count: u32) -> Result<Vec<Self>, FormatError> {
        let mut bitmaps = Vec::new();
        let mut rest = directory;
        while !rest.is_empty() {
            let (bitmap, length) = Self::parse(rest)?;
            bitmaps.push(bitmap);
            rest = rest.get(length..).unwrap_or_default();
        }
        if bitmaps.len() != count as usize {
            return Err(FormatError::invalid(
                "nb_bitmaps",
                count,
                format!("the bitmap directory has {}", bitmaps.len()),
            ));
        }
        let mut names = HashSet::new();
        if let Some(twice) = bitmaps.iter().find(|bitmap| !names.insert(&bitmap.name)) {
            return Err(FormatError::invalid(
                "bitmap's name",
                format!("\"{}\"", twice.name_text()),
                "two bitmaps have this name",
            ));
        }
        Ok(bitmaps)
    }

    /// The entry at the start of `entry`, and its length with padding.
    fn parse(entry: &[u8]) -> Result<(Self, usize), FormatError> {
        let cut = || {
            FormatError::truncated(
                "bitmap directory",
                format_args!("{} bytes long where an entry starts", entry.len()),
                "the entry is longer; bitmap_directory_size is wrong",
            )
        };
        let u32_at = |at| bytes::be32(entry, at).ok_or_else(cut);
        let (name_size, extra_size) =
            (bytes::be16(entry, 18).ok_or_else(cut)? as usize, u32_at(20)? as usize);
        let length = (ENTRY_HEAD_BYTES + extra_size + name_size).next_multiple_of(8);
        let body = entry.get(ENTRY_HEAD_BYTES..length).ok_or_else(cut)?;
        let (extra_data, rest) = body.split_at_checked(extra_size).ok_or_else(cut)?;
        let name = rest.get(..name_size).ok_or_else(cut)?;
        let &[kind, granularity_bits] = &bytes::array::<2>(entry, 16).ok_or_else(cut)?;
        let bitmap = Self {
            table_offset: HostOffset::new(bytes::be64(entry, 0).ok_or_else(cut)?),
            table_size: u32_at(8)?,
            flags: BitmapFlags::from_bits(u32_at(12)?),
            kind,
            granularity_bits,
            extra_data: extra_data.to_vec(),
            name: name.to_vec(),
        };
        Ok((bitmap, length))
    }

    /// The bytes of a bitmap directory; their length is `bitmap_directory_size`.
    ///
    /// # Errors
    /// If there are more than 65535 bitmaps, a name exceeds 1023 bytes, or the directory is larger
    /// than QEMU allows.
    pub fn encode_directory(bitmaps: &[Self]) -> Result<Vec<u8>, FormatError> {
        if bitmaps.len() > MAX_BITMAPS as usize {
            return Err(FormatError::too_large(
                "nb_bitmaps",
                bitmaps.len(),
                format!("must not exceed {MAX_BITMAPS}"),
            ));
        }
        let mut out = Vec::new();
        for bitmap in bitmaps {
            if bitmap.name.len() > MAX_NAME_BYTES {
                return Err(FormatError::too_large(
                    "bitmap name's length",
                    bitmap.name.len(),
                    format!("must not exceed {MAX_NAME_BYTES} bytes"),
                ));
            }
            let size = (out.len() + bitmap.extra_data.len()) as u64;
            if size + (ENTRY_HEAD_BYTES + MAX_NAME_BYTES + 8) as u64 > MAX_DIRECTORY_BYTES {
                return Err(FormatError::too_large(
                    "bitmap_directory_size",
                    size,
                    format!("must not exceed {MAX_DIRECTORY_BYTES} bytes"),
                ));
            }
            out.extend(bitmap.table_offset.get().to_be_bytes());
            out.extend(bitmap.table_size.to_be_bytes());
            out.extend(bitmap.flags.bits().to_be_bytes());
            out.extend([bitmap.kind, bitmap.granularity_bits]);
            out.extend((bitmap.name.len() as u16).to_be_bytes());
            out.extend((bitmap.extra_data.len() as u32).to_be_bytes());
            out.extend(&bitmap.extra_data);
            out.extend(&bitmap.name);
            out.resize(out.len().next_multiple_of(8), 0);
        }
        Ok(out)
    }

    /// Checks that the bitmap is one that QEMU would use for a disk of `disk_size` bytes.
    ///
    /// # Errors
    /// If its table is misplaced or too large, its granularity not 512 bytes to 2 GiB, its name
    /// empty or longer than 1023 bytes, its type or a flag unknown, it has extra data, or, unless it
    /// is marked in use, its table does not fit the disk.
    pub fn validate(&self, geometry: &Geometry, disk_size: u64) -> Result<(), FormatError> {
        let wrong = |field: &'static str, value: &dyn std::fmt::Display, why: String| {
            let field = format!("bitmap \"{}\": {field}", self.name_text());
            Err(FormatError::invalid(field, value, why))
        };
        if !geometry.is_aligned(self.table_offset) || self.table_offset.get() == 0 {
            return wrong(
                "bitmap_table_offset",
                &self.table_offset,
                format!("must be a multiple of the cluster size, {}", geometry.cluster_size()),
            );
        }
        let bytes = u64::from(self.table_size) * geometry.cluster_size();
        if self.table_size == 0 || bytes > MAX_BITMAP_BYTES {
            let most = MAX_BITMAP_BYTES / geometry.cluster_size();
            return wrong("bitmap_table_size", &self.table_size, format!("must be 1 to {most}"));
        }
        if !(9..=31).contains(&self.granularity_bits) {
            return wrong("granularity_bits", &self.granularity_bits, "must be 9 to 31".into());
        }
        if self.name.is_empty() || self.name.len() > MAX_NAME_BYTES {
            return wrong("name_size", &self.name.len(), format!("must be 1 to {MAX_NAME_BYTES}"));
        }
        if self.kind != DIRTY_TRACKING {
            return wrong("type", &self.kind, "only 1 (dirty tracking) is supported".into());
        }
        if !BitmapFlags::IN_USE.with(BitmapFlags::AUTO).contains(self.flags) {
            return wrong("flags", &self.flags.bits(), "has unknown flags".into());
        }
        if !self.extra_data.is_empty() {
            return wrong("extra_data_size", &self.extra_data.len(), "unknown extra data".into());
        }
        let needed = self.table_size_for(geometry, disk_size);
        if !self.flags.contains(BitmapFlags::IN_USE) && u64::from(self.table_size) != needed {
            return wrong(
                "bitmap_table_size",
                &self.table_size,
                format!("must be {needed} for a disk of {disk_size} bytes"),
            );
        }
        Ok(())
    }

    /// The table entries that a bitmap of this granularity needs for a disk of `disk_size` bytes.
    pub fn table_size_for(&self, geometry: &Geometry, disk_size: u64) -> u64 {
        let granularity = 1u64.checked_shl(self.granularity_bits.into()).unwrap_or(u64::MAX);
        geometry.clusters_for(disk_size.div_ceil(granularity).div_ceil(8))
    }

    /// The name made safe to print.
    pub fn name_text(&self) -> String {
        printable(&self.name)
    }
}

/// The meaning of a bitmap table entry for a cluster of the bitmap's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BitmapCluster {
    /// No cluster: all bits are 0.
    Zeroes,
    /// No cluster: all bits are 1.
    Ones,
    /// Stored in the host cluster at this offset.
    Data(HostOffset),
}

impl BitmapCluster {
    /// The meaning of a bitmap table entry's value.
    ///
    /// # Errors
    /// If a reserved bit is set, bit 0 is set besides an offset, or the offset is not aligned to a
    /// cluster. QEMU refuses these too.
    pub fn from_raw(raw: u64, geometry: &Geometry) -> Result<Self, FormatError> {
        let offset = raw & OFFSET_MASK;
        match raw & !OFFSET_MASK {
            0 if offset == 0 => Ok(Self::Zeroes),
            1 if offset == 0 => Ok(Self::Ones),
            0 => {
                geometry.check_offset("bitmap table entry", HostOffset::new(offset)).map(Self::Data)
            }
            _ => Err(FormatError::invalid(
                "bitmap table entry",
                format_args!("{raw:#018x}"),
                "reserved bits are set; remove the bitmap with qemu-img bitmap --remove",
            )),
        }
    }

    /// The value on disk.
    pub const fn raw(self) -> u64 {
        match self {
            Self::Zeroes => 0,
            Self::Ones => 1,
            Self::Data(offset) => offset.get(),
        }
    }

    /// Entry `index` of a bitmap table's bytes; `None` past its end.
    ///
    /// # Errors
    /// As [`from_raw`](Self::from_raw).
    pub fn read(
        table: &[u8],
        index: usize,
        geometry: &Geometry,
    ) -> Option<Result<Self, FormatError>> {
        bytes::entry64(table, index).map(|raw| Self::from_raw(raw, geometry))
    }

    /// Puts the entry at `index` of a bitmap table's bytes; `None`, and nothing written, past its
    /// end.
    #[must_use = "nothing is written past the table's end"]
    pub fn write(self, table: &mut [u8], index: usize) -> Option<()> {
        bytes::put_entry64(table, index, self.raw())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn geometry() -> Geometry {
        Geometry::new(3, 16, 4, false, false).unwrap()
    }

    fn sample(name: &str) -> Bitmap {
        Bitmap {
            table_offset: HostOffset::new(0x60000),
            table_size: 1,
            flags: BitmapFlags::AUTO,
            kind: DIRTY_TRACKING,
            granularity_bits: 16,
            extra_data: Vec::new(),
            name: name.into(),
        }
    }

    #[test]
    fn directory_round_trips() {
        let odd = Bitmap { extra_data: vec![1; 9], name: b"c\xff".to_vec(), ..sample("") };
        let all = vec![sample("a"), sample("longer name"), odd];
        let directory = Bitmap::encode_directory(&all).unwrap();
        assert_eq!(directory.len(), 32 + 40 + 40);
        assert_eq!(Bitmap::parse_directory(&directory, 3), Ok(all.clone()));
        assert!(Bitmap::parse_directory(&directory, 2).is_err());
        assert!(Bitmap::parse_directory(&directory[..directory.len() - 8], 3).is_err());
        let twice = Bitmap::encode_directory(&[sample("a"), sample("a")]).unwrap();
        assert!(Bitmap::parse_directory(&twice, 2).is_err());
        assert!(Bitmap::encode_directory(&[sample(&"x".repeat(1024))]).is_err());
    }

    #[test]
    fn validation_follows_qemu() {
        let g = geometry();
        let size = 1 << 30;
        assert_eq!(sample("a").validate(&g, size), Ok(()));
        let wrong = [
            Bitmap { table_offset: HostOffset::new(512), ..sample("a") },
            Bitmap { table_offset: HostOffset::new(0), ..sample("a") },
            Bitmap { table_size: 0, ..sample("a") },
            Bitmap { table_size: 8193, ..sample("a") },
            Bitmap { table_size: 2, ..sample("a") },
            Bitmap { granularity_bits: 8, ..sample("a") },
            Bitmap { granularity_bits: 255, ..sample("a") },
            Bitmap { kind: 2, ..sample("a") },
            Bitmap { flags: BitmapFlags::from_bits(8), ..sample("a") },
            Bitmap { extra_data: vec![0], ..sample("a") },
            sample(""),
        ];
        for bitmap in wrong {
            assert!(bitmap.validate(&g, size).is_err(), "{bitmap:?}");
        }
        // A bitmap in use may be outdated.
        let stale = Bitmap { table_size: 2, flags: BitmapFlags::IN_USE, ..sample("a") };
        assert_eq!(stale.validate(&g, size), Ok(()));
    }

    #[test]
    fn extension_fields_are_bounded() {
        let g = geometry();
        let good = BitmapsExtension {
            count: 2,
            directory_size: 64,
            directory_offset: HostOffset::new(0x50000),
            reserved: 0,
        };
        assert_eq!(good.validate(&g), Ok(()));
        assert!(BitmapsExtension { count: 0, ..good }.validate(&g).is_err());
        assert!(
            BitmapsExtension { count: 65536, directory_size: 1 << 22, ..good }
                .validate(&g)
                .is_err()
        );
        assert!(BitmapsExtension { directory_size: u64::MAX, ..good }.validate(&g).is_err());
        assert!(BitmapsExtension { directory_size: 63, ..good }.validate(&g).is_err());
        assert!(BitmapsExtension { reserved: 1, ..good }.validate(&g).is_err());
        let misplaced = HostOffset::new(0x50001);
        assert!(BitmapsExtension { directory_offset: misplaced, ..good }.validate(&g).is_err());
    }

    #[test]
    fn table_entries() {
        let g = geometry();
        let at = HostOffset::new(0x70000);
        for cluster in [BitmapCluster::Zeroes, BitmapCluster::Ones, BitmapCluster::Data(at)] {
            let mut table = [0xff; 16];
            cluster.write(&mut table, 1).unwrap();
            assert_eq!(BitmapCluster::read(&table, 1, &g), Some(Ok(cluster)));
            assert_eq!(BitmapCluster::read(&table, 2, &g), None);
            assert_eq!(cluster.write(&mut table, 2), None);
        }
        for raw in [2, 1 << 56, 1 << 63, 0x70001, 0x70200] {
            assert!(BitmapCluster::from_raw(raw, &g).is_err(), "{raw:#x}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_parse_or_fail_and_encode_back(
            mut directory in prop::collection::vec(any::<u8>(), 0..300), small: bool, count in 0u32..4,
        ) {
            if small {
                for (at, byte) in directory.iter_mut().enumerate() {
                    // Lengths small enough to fit.
                    match at % 40 { 18 | 20..=22 => *byte = 0, 19 | 23 => *byte %= 20, _ => {} }
                }
            }
            if let Ok(bitmaps) = Bitmap::parse_directory(&directory, count) {
                for bitmap in &bitmaps {
                    let _ = bitmap.validate(&geometry(), 1 << 30);
                }
                let again = Bitmap::encode_directory(&bitmaps).unwrap();
                prop_assert_eq!(Bitmap::parse_directory(&again, count), Ok(bitmaps));
            }
        }
    }
}
