//! The header: the first cluster of an image (section "Header").

mod backing;
mod edit;
mod encode;
mod parse;
mod validate;

pub use edit::HeaderWrite;

use crate::bytes;
use crate::compress::CompressionType;
use crate::error::FormatError;
use crate::extension::{BitmapsExtension, Extension};
use crate::features::{AutoclearFeatures, CompatibleFeatures, IncompatibleFeatures};
use crate::geometry::{Geometry, MAX_CLUSTER_BITS};
use crate::index::IndexExtension;
use crate::journal::JournalExtension;
use crate::offset::HostOffset;

/// "QFI\xfb"
pub const MAGIC: [u8; 4] = *b"QFI\xfb";
/// Longest backing file name, in bytes.
pub const MAX_BACKING_FILE_BYTES: u32 = 1023;
/// Longest encryption header, in bytes. QEMU's take at most 2,068,480: eight key slots for a key of 64 bytes.
pub const MAX_ENCRYPTION_HEADER_BYTES: u64 = 16 << 20;
/// Most internal snapshots (QEMU's limit).
pub const MAX_SNAPSHOTS: u32 = 65536;
/// Bytes of a version 2 header.
pub const V2_LENGTH: u32 = 72;
/// Bytes of the shortest version 3 header.
pub const V3_MIN_LENGTH: u32 = 104;
/// Bytes of the version 3 header that QEMU writes, with the compression type.
pub const V3_LENGTH: u32 = 112;
/// With smaller clusters QEMU writes no feature name table, to leave room for the backing file name.
pub(crate) const FEATURE_NAMES_CLUSTER_BITS: u32 = 13;

/// The offsets of fields in the header, in bytes, for changing one in place. Each of these is read whole by a program
/// that opens the image while it changes only if it is written in one sector, which the first 512 bytes are.
pub mod field {
    /// `size`, 8 bytes.
    pub const SIZE: usize = 24;
    /// `l1_size`, 4 bytes, followed by `l1_table_offset`.
    pub const L1_SIZE: usize = 36;
    /// `l1_table_offset`, 8 bytes.
    pub const L1_TABLE_OFFSET: usize = 40;
    /// `refcount_table_offset`, 8 bytes, followed by `refcount_table_clusters`.
    pub const REFCOUNT_TABLE_OFFSET: usize = 48;
    /// `refcount_table_clusters`, 4 bytes.
    pub const REFCOUNT_TABLE_CLUSTERS: usize = 56;
    /// `nb_snapshots`, 4 bytes, followed by `snapshots_offset`.
    pub const NB_SNAPSHOTS: usize = 60;
    /// `snapshots_offset`, 8 bytes.
    pub const SNAPSHOTS_OFFSET: usize = 64;
    /// `incompatible_features`, 8 bytes; version 3.
    pub const INCOMPATIBLE_FEATURES: usize = 72;
    /// `compatible_features`, 8 bytes; version 3.
    pub const COMPATIBLE_FEATURES: usize = 80;
    /// `autoclear_features`, 8 bytes; version 3.
    pub const AUTOCLEAR_FEATURES: usize = 88;
    /// `refcount_order`, 4 bytes; version 3.
    pub const REFCOUNT_ORDER: usize = 96;
}

/// How strict to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParseMode {
    /// For reading and writing the disk.
    Open,
    /// For reading the disk: a refcount table or a snapshot table that cannot be used is not needed, unless there is a
    /// journal to replay.
    Read,
    /// For a check or repair: a missing refcount table, an impossible snapshot table or bitmap
    /// directory, and tables that overlap are left for the check to report.
    Check,
}

/// An image's header, with its extensions and the backing file name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// 2 or 3.
    pub version: u32,
    /// The backing file's name as stored; at most 1023 bytes. Hostile text.
    pub backing_file: Option<String>,
    /// Base-2 logarithm of the cluster size, 9 to 21.
    pub cluster_bits: u32,
    /// The disk's size in bytes as stored; see [`disk_size`](Self::disk_size).
    pub size: u64,
    /// Encryption: 0 (none) or [`LUKS`](Self::LUKS) after [`parse`](Self::parse).
    pub crypt_method: u32,
    /// Entries of the active L1 table.
    pub l1_size: u32,
    /// Where the active L1 table starts.
    pub l1_table_offset: HostOffset,
    /// Where the refcount table starts.
    pub refcount_table_offset: HostOffset,
    /// Clusters of the refcount table.
    pub refcount_table_clusters: u32,
    /// Internal snapshots.
    pub nb_snapshots: u32,
    /// Where the snapshot table starts.
    pub snapshots_offset: HostOffset,
    /// Features that must be known. Empty in version 2.
    pub incompatible: IncompatibleFeatures,
    /// Features that may be ignored. Empty in version 2.
    pub compatible: CompatibleFeatures,
    /// Features to be cleared by writers that do not know them. Empty in version 2.
    pub autoclear: AutoclearFeatures,
    /// Base-2 logarithm of the refcounts' width in bits, 0 to 6; 4 in version 2.
    pub refcount_order: u32,
    /// Bytes of the header without extensions: 72 in version 2, else at least 104 and a multiple of
    /// 8. [`encode`](Self::encode) raises it where the other fields need more.
    pub header_length: u32,
    /// The compression of compressed clusters.
    pub compression_type: CompressionType,
    /// Bytes 105 to `header_length`: padding, and fields of later versions, kept as they are.
    pub unknown_fields: Vec<u8>,
    /// The extensions, in order.
    pub extensions: Vec<Extension>,
}

/// Whether an image starts with the qcow2 magic and a version of 2 or later.
pub fn is_qcow2(start: &[u8]) -> bool {
    start.starts_with(&MAGIC) && bytes::be32(start, 4).is_some_and(|version| version >= 2)
}

impl Header {
    /// Bytes from the start of an image that hold the header cluster at any cluster size: 2 MiB.
    pub const MAX_LENGTH: usize = 1 << MAX_CLUSTER_BITS;

    /// The encryption method LUKS.
    pub const LUKS: u32 = 2;

    /// Where the encryption header is and its length in bytes, if the image is encrypted.
    pub fn encryption(&self) -> Option<(HostOffset, u64)> {
        let area = self.extensions.iter().find_map(|extension| match extension {
            Extension::EncryptionHeader { offset, length } => Some((*offset, *length)),
            _ => None,
        });
        area.filter(|_| self.crypt_method == Self::LUKS)
    }

    /// The layout that follows from the header.
    ///
    /// # Errors
    /// If version, `cluster_bits` or `refcount_order` are out of range.
    pub fn geometry(&self) -> Result<Geometry, FormatError> {
        Geometry::new(
            self.version,
            self.cluster_bits,
            self.refcount_order,
            self.incompatible.contains(IncompatibleFeatures::EXTENDED_L2),
            self.incompatible.contains(IncompatibleFeatures::DATA_FILE),
        )
    }

    /// The disk's size in bytes as the guest sees it: `size` rounded down to 512-byte sectors, as in QEMU.
    pub fn disk_size(&self) -> u64 {
        self.size & !511
    }

    /// The backing file's format, if the image names one. Of several extensions of a type the last counts,
    /// as in QEMU.
    pub fn backing_format(&self) -> Option<&str> {
        self.extensions.iter().rev().find_map(|extension| match extension {
            Extension::BackingFormat(format) => Some(format.as_str()),
            _ => None,
        })
    }

    /// The external data file's name, if the image names one. It counts only with the feature
    /// [`DATA_FILE`](IncompatibleFeatures::DATA_FILE).
    pub fn data_file(&self) -> Option<&str> {
        self.extensions.iter().rev().find_map(|extension| match extension {
            Extension::DataFile(name) => Some(name.as_str()),
            _ => None,
        })
    }

    /// The bitmaps extension. It counts only with the feature
    /// [`BITMAPS`](AutoclearFeatures::BITMAPS).
    pub fn bitmaps(&self) -> Option<&BitmapsExtension> {
        self.extensions.iter().rev().find_map(|extension| match extension {
            Extension::Bitmaps(bitmaps) => Some(bitmaps),
            _ => None,
        })
    }

    /// Sets or removes the bitmaps extension, and its feature bit.
    pub fn set_bitmaps(&mut self, bitmaps: Option<BitmapsExtension>) {
        self.extensions.retain(|extension| !matches!(extension, Extension::Bitmaps(_)));
        self.extensions.extend(bitmaps.map(Extension::Bitmaps));
        self.autoclear = match bitmaps {
            Some(_) => self.autoclear.with(AutoclearFeatures::BITMAPS),
            None => self.autoclear.without(AutoclearFeatures::BITMAPS),
        };
    }

    /// Where the image's direct-access index is, if it has one of a known version.
    pub fn index(&self) -> Option<&IndexExtension> {
        self.extensions.iter().find_map(|extension| match extension {
            Extension::Index(index) => Some(index),
            _ => None,
        })
    }

    /// Where the image's journal is, if it has one that must be replayed: without the feature
    /// [`JOURNAL`](IncompatibleFeatures::JOURNAL) the extension has no meaning.
    pub fn journal(&self) -> Option<&JournalExtension> {
        self.journals().find(|_| self.incompatible.contains(IncompatibleFeatures::JOURNAL))
    }

    fn journals(&self) -> impl Iterator<Item = &JournalExtension> {
        self.extensions.iter().filter_map(|extension| match extension {
            Extension::Journal(journal) => Some(journal),
            _ => None,
        })
    }

    /// Names the backing file and its format, or removes both.
    pub fn set_backing(&mut self, backing: Option<(String, Option<String>)>) {
        self.extensions.retain(|e| !matches!(e, Extension::BackingFormat(_)));
        let (name, format) = match backing {
            Some((name, format)) => (Some(name), format),
            None => (None, None),
        };
        self.backing_file = name;
        if let Some(format) = format {
            self.extensions.insert(0, Extension::BackingFormat(format));
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::features::FeatureNameTable;

    /// The header of a 1 GiB disk, with a bit of everything.
    pub(crate) fn sample() -> Header {
        Header {
            version: 3,
            backing_file: Some("base.qcow2".into()),
            cluster_bits: 16,
            size: 1 << 30,
            crypt_method: 0,
            l1_size: 2,
            l1_table_offset: HostOffset::new(0x30000),
            refcount_table_offset: HostOffset::new(0x10000),
            refcount_table_clusters: 1,
            nb_snapshots: 0,
            snapshots_offset: HostOffset::new(0),
            incompatible: IncompatibleFeatures::DIRTY,
            compatible: CompatibleFeatures::LAZY_REFCOUNTS,
            autoclear: AutoclearFeatures::from_bits(1 << 33),
            refcount_order: 3,
            header_length: 112,
            compression_type: CompressionType::Zlib,
            unknown_fields: vec![0; 7],
            extensions: vec![
                Extension::BackingFormat("qcow2".into()),
                Extension::FeatureNames(FeatureNameTable::known()),
                Extension::Unknown { magic: 5, data: vec![1, 2, 3] },
            ],
        }
    }

    #[test]
    fn probing() {
        assert!(is_qcow2(b"QFI\xfb\0\0\0\x03"));
        assert!(is_qcow2(b"QFI\xfb\0\0\0\x09more"));
        assert!(!is_qcow2(b"QFI\xfb\0\0\0\x01"));
        assert!(!is_qcow2(b"QFI\xfb\0\0\0"));
        assert!(!is_qcow2(b""));
    }

    #[test]
    fn the_disk_ends_with_a_whole_sector() {
        assert_eq!(Header { size: 1023, ..sample() }.disk_size(), 512);
    }

    #[test]
    fn backing_and_its_format_change_together() {
        let mut header = sample();
        assert_eq!(header.backing_format(), Some("qcow2"));
        header.set_backing(Some(("other".into(), Some("raw".into()))));
        assert_eq!(header.backing_format(), Some("raw"));
        header.set_backing(Some(("other".into(), None)));
        assert_eq!((header.backing_format(), header.extensions.len()), (None, 2));
        header.set_backing(None);
        assert_eq!(header.backing_file, None);
    }
}
