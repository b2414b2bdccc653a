//! New images: the contents of an empty disk.

use crate::compress::CompressionType;
use crate::error::FormatError;
use crate::extension::{Extension, MAX_BACKING_FORMAT_BYTES};
use crate::features::{
    AutoclearFeatures, CompatibleFeatures, FeatureNameTable, IncompatibleFeatures,
};
use crate::geometry::{Geometry, HOST_OFFSET_LIMIT, MAX_REFCOUNT_TABLE_BYTES};
use crate::header::{FEATURE_NAMES_CLUSTER_BITS, Header, ParseMode, V2_LENGTH, V3_LENGTH};
use crate::index::IndexExtension;
use crate::l1::L1Entry;
use crate::l2::L2Entry;
use crate::offset::{HostCluster, HostOffset};
use crate::refcount::RefcountTableEntry;

/// The options of a new image, with QEMU's names and defaults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewImage {
    /// The disk's size in bytes; rounded up to a multiple of 512.
    pub size: u64,
    /// 2 (`compat=0.10`) or 3 (`compat=1.1`).
    pub version: u32,
    /// Base-2 logarithm of the cluster size, 9 to 21; 14 to 21 with extended L2 entries.
    pub cluster_bits: u32,
    /// Base-2 logarithm of the refcounts' width in bits, 0 to 6; 4 in version 2.
    pub refcount_order: u32,
    /// 16-byte L2 entries with subclusters; version 3.
    pub extended_l2: bool,
    /// The compression of compressed clusters; zstd needs version 3.
    pub compression_type: CompressionType,
    /// Refcounts may be updated late; version 3.
    pub lazy_refcounts: bool,
    /// The backing file's name, as stored; at most 1023 bytes.
    pub backing_file: Option<String>,
    /// The backing file's format; at most 15 bytes.
    pub backing_format: Option<String>,
    /// The external data file's name; version 3.
    pub data_file: Option<String>,
    /// The external data file alone holds the disk's contents; needs a data file, preallocated metadata, and no backing
    /// file.
    pub data_file_raw: bool,
    /// Allocate every guest cluster and the tables for them. The clusters' contents are not written:
    /// in a new file they read as zeroes. Together with a backing file it needs extended L2 entries,
    /// which leave the subclusters unallocated.
    pub preallocate: bool,
    /// Bytes of the encryption header that the image will hold, if it is to be encrypted with LUKS; the caller writes
    /// its contents. 1 to
    /// [`MAX_ENCRYPTION_HEADER_BYTES`](crate::header::MAX_ENCRYPTION_HEADER_BYTES).
    pub encryption: Option<u64>,
    /// The direct-access index that the image will hold. Its area starts at the second cluster, with refcount 0; the
    /// caller writes its contents. Everything else comes after it, so that QEMU, which assumes that everything after
    /// the last cluster in use is zero, does not expose it.
    pub index: Option<IndexExtension>,
}

impl NewImage {
    /// QEMU's defaults for a disk of `size` bytes: version 3, 64 KiB clusters, 16-bit refcounts.
    pub fn new(size: u64) -> Self {
        Self {
            size,
            version: 3,
            cluster_bits: 16,
            refcount_order: 4,
            extended_l2: false,
            compression_type: CompressionType::Zlib,
            lazy_refcounts: false,
            backing_file: None,
            backing_format: None,
            data_file: None,
            data_file_raw: false,
            preallocate: false,
            encryption: None,
            index: None,
        }
    }

    /// Lays the image out: header, the index's area, refcount table, refcount blocks, L1 table, encryption header, and
    /// with preallocation L2 tables and guest clusters, each after the other.
    ///
    /// # Errors
    /// If options exclude each other or need version 3, or the disk is too large for the cluster
    /// size.
    pub fn plan(&self) -> Result<Plan, FormatError> {
        self.check()?;
        let too_large = || {
            FormatError::too_large(
                "size",
                self.size,
                "is too large for this cluster size; use larger clusters",
            )
        };
        let geometry = Geometry::new(
            self.version,
            self.cluster_bits,
            self.refcount_order,
            self.extended_l2,
            self.data_file.is_some(),
        )?;
        let size = self.size.checked_next_multiple_of(512).ok_or_else(too_large)?;
        if size > geometry.max_disk_size() {
            return Err(too_large());
        }
        let l1_size = geometry.l1_size_for(size);
        let l1 = geometry.clusters_for(l1_size * 8);
        let (l2, data) = match (self.preallocate, self.data_file.is_some()) {
            (false, _) => (0, 0),
            (true, true) => (l1_size, 0),
            (true, false) => (l1_size, geometry.clusters_for(size)),
        };
        let encryption = geometry.clusters_for(self.encryption.unwrap_or(0));
        let index = self.index_clusters(&geometry)?;
        // The refcounts count themselves too, so grow them until they suffice.
        let (mut table, mut blocks) = (1, 1);
        let (table, blocks, total) = loop {
            let total = 1 + index + table + blocks + l1 + encryption + l2 + data;
            let needed_blocks = total.div_ceil(geometry.refcount_block_entries());
            let needed_table = geometry.clusters_for(needed_blocks * 8);
            if (needed_table, needed_blocks) == (table, blocks) {
                break (table, blocks, total);
            }
            (table, blocks) = (needed_table.max(table), needed_blocks.max(blocks));
        };
        if total > HOST_OFFSET_LIMIT >> self.cluster_bits
            || table > MAX_REFCOUNT_TABLE_BYTES >> self.cluster_bits
        {
            return Err(too_large());
        }
        let at = |cluster: u64| HostOffset::new(cluster << self.cluster_bits);
        let table_cluster = 1 + index;
        let l1_cluster = table_cluster + table + blocks;
        let encryption_cluster = l1_cluster + l1;
        let l2_cluster = encryption_cluster + encryption;
        let mut header = self.header(
            size,
            l1_size as u32,
            if l1_size == 0 { HostOffset::new(0) } else { at(l1_cluster) },
            at(table_cluster),
            table as u32,
        );
        if let Some(length) = self.encryption {
            header.crypt_method = Header::LUKS;
            let offset = at(encryption_cluster);
            header.extensions.push(Extension::EncryptionHeader { offset, length });
        }
        header.validate(ParseMode::Open)?;
        Ok(Plan {
            first_cluster: header.encode()?,
            header,
            geometry,
            table_cluster,
            table_clusters: table,
            blocks,
            l1_cluster,
            l2_cluster,
            l2_tables: l2,
            data_cluster: l2_cluster + l2,
            data_clusters: data,
        })
    }

    /// Clusters of the index's area.
    fn index_clusters(&self, geometry: &Geometry) -> Result<u64, FormatError> {
        let Some(index) = &self.index else { return Ok(0) };
        let size = geometry.cluster_size();
        if index.area_offset.get() != size || !index.area_length.is_multiple_of(size) {
            return Err(FormatError::invalid(
                "the index's area",
                format_args!("{} bytes at {}", index.area_length, index.area_offset),
                format!("must be whole clusters of {size} bytes after the first"),
            ));
        }
        Ok(index.area_length / size)
    }

    fn check(&self) -> Result<(), FormatError> {
        let conflict = |option: &'static str, value: &str, why: &'static str| {
            Err(FormatError::invalid(option, value, why))
        };
        let v3 = "needs version 3 (compat=1.1)";
        if self.version == 2 {
            if self.refcount_order != 4 {
                return conflict("refcount_order", &self.refcount_order.to_string(), v3);
            }
            if self.extended_l2 {
                return conflict("extended_l2", "on", v3);
            }
            if self.lazy_refcounts {
                return conflict("lazy_refcounts", "on", v3);
            }
            if self.compression_type != CompressionType::Zlib {
                return conflict("compression_type", self.compression_type.name(), v3);
            }
            if self.data_file.is_some() {
                return conflict("data_file", "set", v3);
            }
        }
        if let Some(format) = &self.backing_format {
            if self.backing_file.is_none() {
                return conflict("backing_fmt", format, "needs a backing file");
            }
            if format.len() > MAX_BACKING_FORMAT_BYTES {
                return conflict("backing_fmt", format, "must not exceed 15 bytes");
            }
        }
        for (option, name) in [("backing_file", &self.backing_file), ("data_file", &self.data_file)]
        {
            if let Some(name) = name
                && (name.is_empty() || name.contains('\0'))
            {
                return conflict(option, &name.escape_debug().to_string(), "is not a file name");
            }
        }
        if self.data_file_raw {
            if self.data_file.is_none() {
                return conflict("data_file_raw", "on", "needs a data_file");
            }
            if self.backing_file.is_some() {
                return conflict("data_file_raw", "on", "cannot be used with a backing file");
            }
            if !self.preallocate {
                return conflict("data_file_raw", "on", "needs preallocation=metadata");
            }
        }
        if self.encryption.is_some() {
            if self.data_file_raw {
                return conflict("data_file_raw", "on", "cannot be used with encryption");
            }
            if self.preallocate && self.version == 2 {
                return conflict(
                    "preallocation",
                    "metadata",
                    "with encryption it needs compat=1.1",
                );
            }
        }
        if self.preallocate && self.backing_file.is_some() && !self.extended_l2 {
            return conflict(
                "preallocation",
                "metadata",
                "would hide the backing file; with one it needs extended_l2=on",
            );
        }
        Ok(())
    }

    fn header(
        &self,
        size: u64,
        l1_size: u32,
        l1_table_offset: HostOffset,
        refcount_table_offset: HostOffset,
        refcount_table_clusters: u32,
    ) -> Header {
        let mut incompatible = IncompatibleFeatures::default();
        for (on, feature) in [
            (self.data_file.is_some(), IncompatibleFeatures::DATA_FILE),
            (
                self.compression_type != CompressionType::Zlib,
                IncompatibleFeatures::COMPRESSION_TYPE,
            ),
            (self.extended_l2, IncompatibleFeatures::EXTENDED_L2),
        ] {
            if on {
                incompatible = incompatible.with(feature);
            }
        }
        let mut extensions = Vec::new();
        extensions.extend(self.backing_format.clone().map(Extension::BackingFormat));
        extensions.extend(self.data_file.clone().map(Extension::DataFile));
        if self.version >= 3 && self.cluster_bits >= FEATURE_NAMES_CLUSTER_BITS {
            extensions.push(Extension::FeatureNames(FeatureNameTable::known()));
        }
        extensions.extend(self.index.map(Extension::Index));
        Header {
            version: self.version,
            backing_file: self.backing_file.clone(),
            cluster_bits: self.cluster_bits,
            size,
            crypt_method: 0,
            l1_size,
            l1_table_offset,
            refcount_table_offset,
            refcount_table_clusters,
            nb_snapshots: 0,
            snapshots_offset: HostOffset::new(0),
            incompatible,
            compatible: if self.lazy_refcounts {
                CompatibleFeatures::LAZY_REFCOUNTS
            } else {
                CompatibleFeatures::default()
            },
            autoclear: if self.data_file_raw {
                AutoclearFeatures::DATA_FILE_RAW
            } else {
                AutoclearFeatures::default()
            },
            refcount_order: self.refcount_order,
            header_length: if self.version == 2 { V2_LENGTH } else { V3_LENGTH },
            compression_type: self.compression_type,
            unknown_fields: if self.version == 2 { Vec::new() } else { vec![0; 7] },
            extensions,
        }
    }
}

/// The layout of a new image.
#[derive(Clone, Debug)]
pub struct Plan {
    header: Header,
    geometry: Geometry,
    first_cluster: Vec<u8>,
    table_cluster: u64,
    table_clusters: u64,
    blocks: u64,
    l1_cluster: u64,
    l2_cluster: u64,
    l2_tables: u64,
    data_cluster: u64,
    data_clusters: u64,
}

impl Plan {
    /// The header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The image file's length in bytes. Every cluster up to it is in use, except the index's.
    pub fn file_length(&self) -> u64 {
        (self.data_cluster + self.data_clusters) << self.geometry.cluster_bits()
    }

    /// The length in bytes that an external data file must have, if the image has one.
    pub fn data_file_length(&self) -> Option<u64> {
        self.geometry.has_data_file().then(|| self.header.disk_size())
    }

    /// The preallocated guest clusters in the image file: where they start, and their length in
    /// bytes, 0 without preallocation.
    pub fn data(&self) -> (HostOffset, u64) {
        (self.at(self.data_cluster), self.data_clusters << self.geometry.cluster_bits())
    }

    /// The writes, generated piece by piece, each at a cluster's start and a multiple of 4096 bytes or of the cluster
    /// size long, none larger than the refcount table (8 MiB) or the L1 table (32 MiB). Everything else up to
    /// [`file_length`](Self::file_length) must read as zeroes, as a new file does. The header comes last, so that the
    /// file is not an image before it is complete.
    pub fn writes(&self) -> impl Iterator<Item = (HostOffset, Vec<u8>)> + '_ {
        let blocks = (0..self.blocks).map(|block| self.refcount_block(block));
        let l1 = (self.l2_tables > 0).then(|| self.l1_table());
        let l2 = (0..self.l2_tables).map(|table| self.l2_table(table));
        std::iter::once(self.refcount_table())
            .chain(blocks)
            .chain(l1)
            .chain(l2)
            .chain(std::iter::once((HostOffset::new(0), self.first_cluster.clone())))
            .map(|(offset, bytes)| (offset, self.without_zero_tail(bytes)))
    }

    /// The bytes of whole clusters without zeroes at their end, to a multiple of 4096 or of the
    /// cluster size.
    fn without_zero_tail(&self, mut bytes: Vec<u8>) -> Vec<u8> {
        let used = bytes.iter().rposition(|&b| b != 0).map_or(0, |last| last + 1);
        let unit = self.geometry.cluster_size().min(4096) as usize;
        bytes.resize(used.next_multiple_of(unit), 0);
        bytes
    }

    fn at(&self, cluster: u64) -> HostOffset {
        HostOffset::new(cluster << self.geometry.cluster_bits())
    }

    fn refcount_table(&self) -> (HostOffset, Vec<u8>) {
        let first = self.table_cluster + self.table_clusters;
        let table = (first..first + self.blocks)
            .flat_map(|block| {
                RefcountTableEntry::from_raw(self.at(block).get()).raw().to_be_bytes()
            })
            .collect();
        (self.at(self.table_cluster), table)
    }

    /// Refcount block `block`: 1 for every cluster of the file, except the index's.
    fn refcount_block(&self, block: u64) -> (HostOffset, Vec<u8>) {
        let total = self.data_cluster + self.data_clusters;
        let entries = self.geometry.refcount_block_entries();
        let first = block * entries;
        let used = total.saturating_sub(first).min(entries);
        let order = self.geometry.refcount_order();
        // Ones repeat every eight entries, each of which is `bits` bits: a whole number of bytes.
        let mut eight = vec![0; order.bits() as usize];
        for index in 0..8 {
            // Eight entries fit by construction, and 1 fits any width.
            let _ = order.write(&mut eight, index, 1);
        }
        let mut bytes = eight.repeat((used / 8) as usize);
        let mut rest = vec![0; eight.len()];
        for index in 0..(used % 8) as usize {
            let _ = order.write(&mut rest, index, 1);
        }
        bytes.extend(rest);
        bytes.truncate(self.geometry.cluster_size() as usize);
        for cluster in first.max(1)..self.table_cluster.min(first + used) {
            // In range, as above.
            let _ = order.write(&mut bytes, (cluster - first) as usize, 0);
        }
        (self.at(self.table_cluster + self.table_clusters + block), bytes)
    }

    fn l1_table(&self) -> (HostOffset, Vec<u8>) {
        let table = (0..self.l2_tables)
            .flat_map(|table| {
                let offset = self.at(self.l2_cluster + table).get();
                L1Entry::from_raw(offset).with_copied(true).raw().to_be_bytes()
            })
            .collect();
        (self.at(self.l1_cluster), table)
    }

    fn l2_table(&self, table: u64) -> (HostOffset, Vec<u8>) {
        let geometry = &self.geometry;
        let all = geometry.clusters_for(self.header.size);
        let first = table * geometry.l2_entries();
        let mut bytes = vec![0; geometry.cluster_size() as usize];
        for (index, guest) in (first..all.min(first + geometry.l2_entries())).enumerate() {
            let host = if geometry.has_data_file() { guest } else { self.data_cluster + guest };
            let host = HostCluster::new(host);
            let offset = geometry.host_cluster_start(host).unwrap_or_default();
            // With extended L2 entries the subclusters stay unallocated, as in QEMU; an external raw file holds the
            // contents itself.
            let raw = self.header.autoclear.contains(AutoclearFeatures::DATA_FILE_RAW);
            let entry = if geometry.extended_l2() {
                L2Entry::subclustered(Some(offset), true, if raw { u32::MAX } else { 0 }, 0)
            } else if self.header.encryption().is_some() {
                // Zeroes in the file are not zeroes for the guest.
                L2Entry::zero_allocated(offset, true)
            } else {
                L2Entry::data(offset, true)
            };
            // In range: at most `l2_entries` entries are visited.
            let _ = entry.write(&mut bytes, index, geometry);
        }
        (self.at(self.l2_cluster + table), bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::BlockHash;

    fn error(image: &NewImage) -> String {
        image.plan().unwrap_err().to_string()
    }

    #[test]
    fn default_layout_is_qemus() {
        let plan = NewImage::new(1 << 30).plan().unwrap();
        let header = plan.header();
        assert_eq!(header.refcount_table_offset, HostOffset::new(0x10000));
        assert_eq!(header.l1_table_offset, HostOffset::new(0x30000));
        assert_eq!((header.l1_size, header.refcount_table_clusters), (2, 1));
        assert_eq!(plan.file_length(), 0x40000);
        assert_eq!(plan.data_file_length(), None);
        let writes: Vec<_> = plan.writes().collect();
        let places: Vec<_> = writes.iter().map(|(at, bytes)| (at.get(), bytes.len())).collect();
        assert_eq!(places, [(0x10000, 4096), (0x20000, 4096), (0, 4096)]);
        assert_eq!(Header::parse(&writes[2].1).as_ref(), Ok(header));
    }

    #[test]
    fn refcounts_cover_themselves() {
        // 128 GiB on 512-byte clusters: an L1 table of 65536 clusters, 64 refcounts a block.
        let mut image = NewImage { cluster_bits: 9, refcount_order: 6, ..NewImage::new(128 << 30) };
        let plan = image.plan().unwrap();
        let clusters = plan.file_length() >> 9;
        let geometry = plan.header().geometry().unwrap();
        let covered = plan.blocks * geometry.refcount_block_entries();
        assert!(clusters <= covered && covered < clusters + geometry.refcount_block_entries());
        image.size += 512;
        assert!(error(&image).contains("larger clusters"));
    }

    #[test]
    fn options_that_exclude_each_other() {
        let new = || NewImage::new(1 << 20);
        let v2 = || NewImage { version: 2, ..new() };
        let name = || Some("x".to_owned());
        for image in [
            NewImage { refcount_order: 3, ..v2() },
            NewImage { lazy_refcounts: true, ..v2() },
            NewImage { extended_l2: true, ..v2() },
            NewImage { data_file: name(), ..v2() },
            NewImage { compression_type: CompressionType::Zstd, ..v2() },
        ] {
            assert!(error(&image).contains("version 3"));
        }
        for image in [
            NewImage { version: 4, ..new() },
            NewImage { cluster_bits: 22, ..new() },
            NewImage { cluster_bits: 13, extended_l2: true, ..new() },
            NewImage { refcount_order: 7, ..new() },
            NewImage { backing_format: name(), ..new() },
            NewImage { backing_file: Some(String::new()), ..new() },
            NewImage { backing_file: Some("a\0b".into()), ..new() },
            NewImage { backing_file: Some("x".repeat(1024)), ..new() },
            NewImage { data_file_raw: true, preallocate: true, ..new() },
            NewImage { data_file_raw: true, data_file: name(), ..new() },
            NewImage {
                data_file_raw: true,
                preallocate: true,
                data_file: name(),
                backing_file: name(),
                ..new()
            },
            NewImage { preallocate: true, backing_file: name(), ..new() },
            NewImage { size: u64::MAX, ..new() },
            NewImage { backing_file: Some("x".repeat(500)), cluster_bits: 9, ..new() },
        ] {
            assert!(image.plan().is_err(), "{image:?}");
        }
    }

    #[test]
    fn everything_comes_behind_an_index() {
        let size = 1u64 << 16;
        let index = |clusters: u64| IndexExtension {
            area_offset: HostOffset::new(size),
            area_length: clusters * size,
            root_offset: HostOffset::new(size),
            root_length: 100,
            root_hash: BlockHash::default(),
        };
        // More than a refcount block counts.
        for clusters in [0, 1, 3, 40_000] {
            let image = NewImage { index: Some(index(clusters)), ..NewImage::new(1 << 30) };
            let plan = image.plan().unwrap();
            let header = plan.header();
            assert_eq!(header.index(), Some(&index(clusters)));
            assert_eq!(header.refcount_table_offset.get(), (1 + clusters) * size);
            let order = plan.geometry.refcount_order();
            let entries = plan.geometry.refcount_block_entries();
            let total = plan.file_length() / size;
            for number in 0..plan.blocks {
                let (_, block) = plan.refcount_block(number);
                for cluster in number * entries..total.min((number + 1) * entries) {
                    let count = order.read(&block, (cluster % entries) as usize).unwrap();
                    assert_eq!(count, u64::from(cluster == 0 || cluster > clusters), "{cluster}");
                }
            }
        }
        let mut odd = index(1);
        odd.area_length = 5;
        assert!(error(&NewImage { index: Some(odd), ..NewImage::new(1 << 30) }).contains("whole"));
    }

    #[test]
    fn size_is_rounded_up_to_a_sector() {
        assert_eq!(NewImage::new(1000).plan().unwrap().header().size, 1024);
        let plan = NewImage::new(0).plan().unwrap();
        assert_eq!((plan.header().l1_size, plan.file_length()), (0, 0x30000));
    }
}
