//! The header: the first cluster of an image (section "Header").

use crate::bytes;
use crate::compress::CompressionType;
use crate::error::{FormatError, FormatErrorKind};
use crate::extension::{self, BitmapsExtension, Extension};
use crate::features::{
    AutoclearFeatures, CompatibleFeatures, FeatureKind, FeatureNameTable, IncompatibleFeatures,
};
use crate::geometry::{
    Geometry, HOST_OFFSET_LIMIT, MAX_CLUSTER_BITS, MAX_L1_BYTES, MAX_REFCOUNT_TABLE_BYTES,
};
use crate::offset::HostOffset;

/// "QFI\xfb"
pub const MAGIC: [u8; 4] = *b"QFI\xfb";
/// Longest backing file name, in bytes.
pub const MAX_BACKING_FILE_BYTES: u32 = 1023;
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
/// Bytes of the smallest snapshot table entry.
const SNAPSHOT_ENTRY_MIN: u64 = 40;

/// Where fields are in the header, in bytes, for those who change one in place. Each of these is
/// read whole by a program that opens the image while it changes only if it is written in one
/// sector, which the first 512 bytes are.
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
}

/// How strict to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParseMode {
    /// For reading and writing the disk.
    Open,
    /// For a check or repair: a missing refcount table, an impossible snapshot table, and tables
    /// that overlap are left for the check to report.
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
    /// Encryption: always 0 (none) after [`parse`](Self::parse).
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

    /// The length of the header cluster, from the first 24 bytes or more: how much to read for
    /// [`parse`](Self::parse).
    ///
    /// # Errors
    /// As [`parse`](Self::parse), for the fields up to `cluster_bits`.
    pub fn probe_length(start: &[u8]) -> Result<usize, FormatError> {
        let (version, cluster_bits) = Self::parse_start(start)?;
        let geometry = Geometry::new(version, cluster_bits, 0, false, false)?;
        Ok(geometry.cluster_size() as usize)
    }

    /// The version and `cluster_bits`, unchecked.
    fn parse_start(start: &[u8]) -> Result<(u32, u32), FormatError> {
        if !start.starts_with(&MAGIC) {
            return Err(FormatError::new(
                FormatErrorKind::NotQcow2,
                "magic",
                format_args!("{:02x?}", start.get(..4).unwrap_or(start)),
                "this is no qcow2 image",
            ));
        }
        match (bytes::be32(start, 4), bytes::be32(start, 20)) {
            (Some(version), _) if version < 2 => Err(FormatError::new(
                FormatErrorKind::NotQcow2,
                "version",
                version,
                "this is a qcow image, not qcow2; convert it with qemu-img convert",
            )),
            (Some(version), Some(cluster_bits)) => Ok((version, cluster_bits)),
            _ => Err(truncated(start.len(), V2_LENGTH as usize)),
        }
    }

    /// The header in `bytes`: the first cluster, or all of a file that is shorter.
    ///
    /// # Errors
    /// Whatever QEMU refuses, and some that it does not: a backing file name before the header's end
    /// or not in UTF-8, a table at offset 0, tables that overlap. Encrypted images have the kind
    /// [`Encrypted`](FormatErrorKind::Encrypted).
    pub fn parse(bytes: &[u8]) -> Result<Self, FormatError> {
        Self::parse_for(bytes, ParseMode::Open)
    }

    /// As [`parse`](Self::parse), as strict as `mode` says.
    ///
    /// # Errors
    /// As [`parse`](Self::parse).
    pub fn parse_for(bytes: &[u8], mode: ParseMode) -> Result<Self, FormatError> {
        let (version, cluster_bits) = Self::parse_start(bytes)?;
        // The features say more; this checks the version and the cluster size.
        let plain = Geometry::new(version, cluster_bits, 0, false, false)?;
        let cluster = bytes.get(..plain.cluster_size() as usize).unwrap_or(bytes);
        let mut header = Self::parse_fields(cluster, version, cluster_bits)?;
        let backing_offset = bytes::be64(cluster, 8).unwrap_or(0);
        let extensions_end = header.check_backing_offset(backing_offset, cluster)?;

        let area = cluster.get(header.header_length as usize..extensions_end).unwrap_or_default();
        let extensions = Extension::parse_all(area);
        // The names serve the message even where an extension is broken, as far as they go.
        header.check_features(extensions.as_deref().unwrap_or_default())?;
        header.extensions = extensions?;
        header.backing_file = Self::parse_backing_file(backing_offset, cluster)?;
        header.validate(mode)?;
        Ok(header)
    }

    /// The fixed fields, with nothing checked but that they are there.
    fn parse_fields(cluster: &[u8], version: u32, cluster_bits: u32) -> Result<Self, FormatError> {
        let u32_at = |at| bytes::be32(cluster, at).ok_or_else(|| truncated(cluster.len(), at + 4));
        let u64_at = |at| bytes::be64(cluster, at).ok_or_else(|| truncated(cluster.len(), at + 8));
        let mut header = Self {
            version,
            backing_file: None,
            cluster_bits,
            size: u64_at(field::SIZE)?,
            crypt_method: u32_at(32)?,
            l1_size: u32_at(field::L1_SIZE)?,
            l1_table_offset: HostOffset::new(u64_at(field::L1_TABLE_OFFSET)?),
            refcount_table_offset: HostOffset::new(u64_at(field::REFCOUNT_TABLE_OFFSET)?),
            refcount_table_clusters: u32_at(field::REFCOUNT_TABLE_CLUSTERS)?,
            nb_snapshots: u32_at(field::NB_SNAPSHOTS)?,
            snapshots_offset: HostOffset::new(u64_at(field::SNAPSHOTS_OFFSET)?),
            incompatible: IncompatibleFeatures::default(),
            compatible: CompatibleFeatures::default(),
            autoclear: AutoclearFeatures::default(),
            refcount_order: 4,
            header_length: V2_LENGTH,
            compression_type: CompressionType::Zlib,
            unknown_fields: Vec::new(),
            extensions: Vec::new(),
        };
        if version == 2 {
            return Ok(header);
        }
        header.incompatible =
            IncompatibleFeatures::from_bits(u64_at(field::INCOMPATIBLE_FEATURES)?);
        header.compatible = CompatibleFeatures::from_bits(u64_at(field::COMPATIBLE_FEATURES)?);
        header.autoclear = AutoclearFeatures::from_bits(u64_at(field::AUTOCLEAR_FEATURES)?);
        header.refcount_order = u32_at(96)?;
        header.header_length = u32_at(100)?;
        let length = header.header_length;
        let cluster_size = 1 << cluster_bits;
        if length < V3_MIN_LENGTH || length > cluster_size || !length.is_multiple_of(8) {
            return Err(FormatError::invalid(
                "header_length",
                length,
                format!("must be a multiple of 8 from {V3_MIN_LENGTH} to {cluster_size}"),
            ));
        }
        if length as usize > cluster.len() {
            return Err(truncated(cluster.len(), length as usize));
        }
        if let Some((&compression, unknown)) =
            cluster.get(104..length as usize).and_then(|rest| rest.split_first())
        {
            header.compression_type = CompressionType::from_byte(compression).ok_or_else(|| {
                FormatError::unsupported(
                    "compression_type",
                    compression,
                    "only 0 (zlib) and 1 (zstd) are known",
                )
            })?;
            header.unknown_fields = unknown.to_vec();
        }
        Ok(header)
    }

    /// Checks where the backing file name is; returns where the extensions end.
    fn check_backing_offset(&self, offset: u64, cluster: &[u8]) -> Result<usize, FormatError> {
        if offset == 0 {
            return Ok(cluster.len());
        }
        let cluster_size = 1 << self.cluster_bits;
        if offset < u64::from(self.header_length) || offset > cluster_size {
            return Err(FormatError::invalid(
                "backing_file_offset",
                offset,
                format!(
                    "must be in the header cluster after the header: {} to {cluster_size}",
                    self.header_length
                ),
            ));
        }
        Ok((offset as usize).min(cluster.len()))
    }

    fn parse_backing_file(offset: u64, cluster: &[u8]) -> Result<Option<String>, FormatError> {
        if offset == 0 {
            return Ok(None);
        }
        let length = bytes::be32(cluster, 16).unwrap_or(0);
        if length > MAX_BACKING_FILE_BYTES {
            return Err(FormatError::too_large(
                "backing_file_size",
                length,
                format!("must not exceed {MAX_BACKING_FILE_BYTES}"),
            ));
        }
        let end = (offset as usize).saturating_add(length as usize);
        let name = cluster.get(offset as usize..end).ok_or_else(|| {
            FormatError::invalid(
                "backing_file_size",
                length,
                format!(
                    "the name at {offset} does not end within the header cluster or file ({} bytes)",
                    cluster.len()
                ),
            )
        })?;
        let name = extension::text("backing file name", name)?;
        Ok((!name.is_empty()).then_some(name))
    }

    fn check_features(&self, extensions: &[Extension]) -> Result<(), FormatError> {
        let unknown = self.incompatible.unknown();
        if unknown.is_empty() {
            return Ok(());
        }
        let empty = FeatureNameTable::default();
        let names = extensions.iter().find_map(|extension| match extension {
            Extension::FeatureNames(names) => Some(names),
            _ => None,
        });
        Err(FormatError::unsupported(
            "incompatible_features",
            names.unwrap_or(&empty).describe(FeatureKind::Incompatible, unknown.bits()),
            "the image needs features that are not known here; open it with a program that has them",
        ))
    }

    /// Checks everything that can be checked without the tables.
    ///
    /// # Errors
    /// As [`parse`](Self::parse).
    pub fn validate(&self, mode: ParseMode) -> Result<(), FormatError> {
        let geometry = self.geometry()?;
        match self.crypt_method {
            0 => {}
            1 | 2 => {
                return Err(FormatError::new(
                    FormatErrorKind::Encrypted,
                    "crypt_method",
                    if self.crypt_method == 1 { "1 (AES)" } else { "2 (LUKS)" },
                    "encrypted images are not supported; decrypt it with qemu-img convert",
                ));
            }
            other => {
                return Err(FormatError::unsupported(
                    "crypt_method",
                    other,
                    "this encryption method is not known",
                ));
            }
        }
        self.validate_features()?;
        self.validate_tables(&geometry, mode)
    }

    fn validate_features(&self) -> Result<(), FormatError> {
        let has = |feature| self.incompatible.contains(feature);
        if has(IncompatibleFeatures::COMPRESSION_TYPE)
            != (self.compression_type != CompressionType::Zlib)
        {
            return Err(FormatError::invalid(
                "compression_type",
                self.compression_type,
                "the incompatible feature bit \"compression type\" must be set for any but zlib, \
                 and only then",
            ));
        }
        if self.version == 2
            && !(self.incompatible.is_empty()
                && self.compatible.is_empty()
                && self.autoclear.is_empty()
                && self.refcount_order == 4
                && self.unknown_fields.is_empty())
        {
            return Err(FormatError::invalid(
                "version",
                2,
                "features and refcount widths other than 16 bits need version 3 (compat 1.1)",
            ));
        }
        if let Some(name) = &self.backing_file
            && name.len() > MAX_BACKING_FILE_BYTES as usize
        {
            return Err(FormatError::too_large(
                "backing file name's length",
                name.len(),
                format!("must not exceed {MAX_BACKING_FILE_BYTES} bytes"),
            ));
        }
        Ok(())
    }

    fn validate_tables(&self, geometry: &Geometry, mode: ParseMode) -> Result<(), FormatError> {
        let l1_bytes = u64::from(self.l1_size) * 8;
        if l1_bytes > MAX_L1_BYTES {
            return Err(FormatError::too_large(
                "l1_size",
                self.l1_size,
                format!("must not exceed {} entries (32 MiB)", MAX_L1_BYTES / 8),
            ));
        }
        if self.size > i64::MAX as u64 {
            return Err(FormatError::too_large("size", self.size, "must be below 2^63"));
        }
        let needed = geometry.l1_size_for(self.size);
        if needed > u64::from(self.l1_size) {
            return Err(FormatError::invalid(
                "l1_size",
                self.l1_size,
                format!("is too small for a disk of {} bytes: needs {needed}", self.size),
            ));
        }
        let l1 = table("l1_table_offset", self.l1_table_offset, l1_bytes, geometry)?;

        let clusters = u64::from(self.refcount_table_clusters);
        if clusters > MAX_REFCOUNT_TABLE_BYTES >> self.cluster_bits {
            return Err(FormatError::too_large(
                "refcount_table_clusters",
                clusters,
                format!(
                    "must not exceed {} (8 MiB)",
                    MAX_REFCOUNT_TABLE_BYTES >> self.cluster_bits
                ),
            ));
        }
        let bytes = clusters << self.cluster_bits;
        let refcounts =
            table("refcount_table_offset", self.refcount_table_offset, bytes, geometry)?;
        if mode == ParseMode::Check {
            return Ok(());
        }
        if clusters == 0 {
            return Err(FormatError::invalid(
                "refcount_table_clusters",
                0,
                "the image has no refcount table; repair it with check -r all",
            ));
        }
        if self.nb_snapshots > MAX_SNAPSHOTS {
            return Err(FormatError::too_large(
                "nb_snapshots",
                self.nb_snapshots,
                format!("must not exceed {MAX_SNAPSHOTS}"),
            ));
        }
        let bytes = u64::from(self.nb_snapshots) * SNAPSHOT_ENTRY_MIN;
        let snapshots = table("snapshots_offset", self.snapshots_offset, bytes, geometry)?;
        let tables = [
            ("l1_table_offset", l1),
            ("refcount_table_offset", refcounts),
            ("snapshots_offset", snapshots),
        ];
        for (i, (field, a)) in tables.iter().enumerate() {
            for (other, b) in tables.iter().skip(i + 1) {
                if a.start < b.end && b.start < a.end {
                    return Err(FormatError::invalid(
                        *field,
                        HostOffset::new(a.start),
                        format!(
                            "the table overlaps the one of {other}, {}; run a check on the image",
                            HostOffset::new(b.start)
                        ),
                    ));
                }
            }
        }
        Ok(())
    }

    /// The layout that the header fixes.
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

    /// The disk's size in bytes as the guest sees it: `size` without a last part of a 512-byte
    /// sector, as QEMU has it.
    pub fn disk_size(&self) -> u64 {
        self.size & !511
    }

    /// The backing file's format, if the image names one.
    pub fn backing_format(&self) -> Option<&str> {
        self.extensions.iter().find_map(|extension| match extension {
            Extension::BackingFormat(format) => Some(format.as_str()),
            _ => None,
        })
    }

    /// The external data file's name, if the image names one. It counts only with the feature
    /// [`DATA_FILE`](IncompatibleFeatures::DATA_FILE).
    pub fn data_file(&self) -> Option<&str> {
        self.extensions.iter().find_map(|extension| match extension {
            Extension::DataFile(name) => Some(name.as_str()),
            _ => None,
        })
    }

    /// The bitmaps extension. It counts only with the feature
    /// [`BITMAPS`](AutoclearFeatures::BITMAPS).
    pub fn bitmaps(&self) -> Option<&BitmapsExtension> {
        self.extensions.iter().find_map(|extension| match extension {
            Extension::Bitmaps(bitmaps) => Some(bitmaps),
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

    /// The header cluster: fixed fields, extensions, backing file name, and zeroes. The extensions
    /// keep their order. A version 3 image with clusters of 8 KiB or more gets the feature name table
    /// that QEMU writes, with the image's names for other bits kept; others keep the table they
    /// have. A table for which there is no room is left out.
    ///
    /// # Errors
    /// If the header is not valid, or exceeds a cluster.
    pub fn encode(&self) -> Result<Vec<u8>, FormatError> {
        self.validate(ParseMode::Check)?;
        let complete = (self.version >= 3 && self.cluster_bits >= FEATURE_NAMES_CLUSTER_BITS)
            .then(|| self.encode_with(&self.named_extensions()))
            .flatten();
        // Without room for every name, as it is; then without any.
        let encoded = complete.or_else(|| self.encode_with(&self.extensions)).or_else(|| {
            let mut extensions = self.extensions.clone();
            extensions.retain(|e| !matches!(e, Extension::FeatureNames(_)));
            self.encode_with(&extensions)
        });
        encoded.ok_or_else(|| {
            FormatError::too_large(
                "header cluster",
                format_args!("{} bytes", 1u64 << self.cluster_bits),
                "has no room for the header, its extensions and the backing file name; use a \
                 shorter backing file name or larger clusters",
            )
        })
    }

    /// The extensions, with a complete feature name table.
    fn named_extensions(&self) -> Vec<Extension> {
        let mut extensions = self.extensions.clone();
        let table = extensions.iter_mut().find_map(|extension| match extension {
            Extension::FeatureNames(table) => Some(table),
            _ => None,
        });
        if let Some(table) = table {
            *table = table.completed();
        } else {
            // Where QEMU puts it: after the strings, before the bitmaps.
            let at = extensions.iter().take_while(|extension| {
                matches!(
                    extension,
                    Extension::BackingFormat(_)
                        | Extension::DataFile(_)
                        | Extension::EncryptionHeader { .. }
                )
            });
            extensions.insert(at.count(), Extension::FeatureNames(FeatureNameTable::known()));
        }
        extensions
    }

    /// The header cluster with these extensions; `None` if it exceeds a cluster.
    fn encode_with(&self, extensions: &[Extension]) -> Option<Vec<u8>> {
        let cluster_size = 1usize << self.cluster_bits;
        let mut out = Vec::with_capacity(cluster_size);
        out.extend(MAGIC);
        out.extend(self.version.to_be_bytes());
        out.extend([0; 12]); // The backing file name's offset and length follow below.
        out.extend(self.cluster_bits.to_be_bytes());
        out.extend(self.size.to_be_bytes());
        out.extend(self.crypt_method.to_be_bytes());
        out.extend(self.l1_size.to_be_bytes());
        out.extend(self.l1_table_offset.get().to_be_bytes());
        out.extend(self.refcount_table_offset.get().to_be_bytes());
        out.extend(self.refcount_table_clusters.to_be_bytes());
        out.extend(self.nb_snapshots.to_be_bytes());
        out.extend(self.snapshots_offset.get().to_be_bytes());
        if self.version >= 3 {
            let mut tail = Vec::new();
            let typed = self.compression_type != CompressionType::Zlib;
            if typed || !self.unknown_fields.is_empty() || self.header_length > V3_MIN_LENGTH {
                tail.push(self.compression_type.byte());
                tail.extend(&self.unknown_fields);
                let length = self.header_length.saturating_sub(V3_MIN_LENGTH) as usize;
                let length = length.max(tail.len()).next_multiple_of(8);
                if length > cluster_size {
                    return None;
                }
                tail.resize(length, 0);
            }
            out.extend(self.incompatible.bits().to_be_bytes());
            out.extend(self.compatible.bits().to_be_bytes());
            out.extend(self.autoclear.bits().to_be_bytes());
            out.extend(self.refcount_order.to_be_bytes());
            out.extend((V3_MIN_LENGTH + tail.len() as u32).to_be_bytes());
            out.extend(tail);
        }
        for extension in extensions {
            extension.encode(&mut out);
        }
        Extension::encode_end(&mut out);
        if let Some(name) = self.backing_file.as_deref().filter(|name| !name.is_empty()) {
            let offset = out.len() as u64;
            out.extend(name.as_bytes());
            let place = [&offset.to_be_bytes()[..], &(name.len() as u32).to_be_bytes()].concat();
            bytes::put(&mut out, 8, &place)?;
        }
        if out.len() > cluster_size {
            return None;
        }
        out.resize(cluster_size, 0);
        Some(out)
    }
}

/// Checks a table's place; returns the bytes that it covers.
fn table(
    field: &'static str,
    offset: HostOffset,
    bytes: u64,
    geometry: &Geometry,
) -> Result<std::ops::Range<u64>, FormatError> {
    geometry.check_offset(field, offset)?;
    if bytes == 0 {
        return Ok(0..0);
    }
    if offset.get() == 0 {
        return Err(FormatError::invalid(field, offset, "the table overlaps the header"));
    }
    match offset.get().checked_add(bytes) {
        Some(end) if end <= HOST_OFFSET_LIMIT => Ok(offset.get()..end),
        _ => Err(FormatError::invalid(field, offset, "the table ends beyond 2^56")),
    }
}

fn truncated(length: usize, needed: usize) -> FormatError {
    FormatError::truncated(
        "header",
        format_args!("{length} bytes long"),
        format!("needs at least {needed}; the file is cut short"),
    )
}
