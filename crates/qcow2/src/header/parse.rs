//! Reading a header.

use super::{Header, MAGIC, MAX_BACKING_FILE_BYTES, ParseMode, V2_LENGTH, V3_MIN_LENGTH, field};
use crate::bytes;
use crate::compress::CompressionType;
use crate::error::{FormatError, FormatErrorKind};
use crate::extension::{self, Extension, Extents};
use crate::features::{
    AutoclearFeatures, CompatibleFeatures, FeatureNameTable, IncompatibleFeatures,
};
use crate::geometry::Geometry;
use crate::offset::HostOffset;

impl Header {
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

    /// Whether `start`, the first bytes of an image, are enough for [`parse`](Self::parse): everything that it reads
    /// ends there, though the header cluster may be longer.
    pub fn ends_in(start: &[u8]) -> bool {
        let ends = || {
            let (version, _) = Self::parse_start(start).ok()?;
            let name = bytes::be64(start, 8)?.checked_add(u64::from(bytes::be32(start, 16)?))?;
            start.get(..usize::try_from(name).ok()?)?;
            let first = if version == 2 { V2_LENGTH } else { bytes::be32(start, 100)? };
            // The parser handles a mark with a length.
            Extents::new(start, first as usize).find(|extent| extent.is_end() && extent.length == 0)
        };
        ends().is_some()
    }

    /// The version and `cluster_bits`, unchecked.
    fn parse_start(start: &[u8]) -> Result<(u32, u32), FormatError> {
        if !start.starts_with(&MAGIC) {
            return Err(FormatError::new(
                FormatErrorKind::NotQcow2,
                "magic",
                format_args!("{:02x?}", start.get(..4).unwrap_or(start)),
                "this is not a qcow2 image",
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
    /// Everything that QEMU refuses, and some things that it does not: a backing file name before the header's end or
    /// not in UTF-8, a table at offset 0, tables that overlap. Encrypted images have the kind
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
        // The features follow later; this checks the version and the cluster size.
        let plain = Geometry::new(version, cluster_bits, 0, false, false)?;
        let cluster = bytes.get(..plain.cluster_size() as usize).unwrap_or(bytes);
        let mut header = Self::parse_fields(cluster, version, cluster_bits)?;
        let backing_offset = bytes::be64(cluster, 8).unwrap_or(0);
        let extensions_end = header.check_backing_offset(backing_offset, cluster)?;

        let area = cluster.get(header.header_length as usize..extensions_end).unwrap_or_default();
        // If the file ends before the area does, zeroes follow: the mark that ends the extensions.
        let cut_by_file =
            extensions_end == cluster.len() && backing_offset != extensions_end as u64;
        let extensions = Extension::parse_area(area, cut_by_file);
        // The names are used in the message even if an extension is broken, as far as they are known.
        header.check_features(extensions.as_deref().unwrap_or_default())?;
        header.extensions = extensions?;
        header.backing_file = Self::parse_backing_file(backing_offset, cluster)?;
        header.validate(mode)?;
        Ok(header)
    }

    /// The fixed fields, with no check except that they are present.
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
                    "only 0 (zlib) and 1 (zstd) are supported",
                )
            })?;
            header.unknown_fields = unknown.to_vec();
        }
        Ok(header)
    }

    /// Checks the offset of the backing file name; returns the end of the extensions.
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
        Err(unsupported(names(extensions).unwrap_or(&empty), unknown))
    }
}

/// The last feature name table of a header's extensions.
pub(super) fn names(extensions: &[Extension]) -> Option<&FeatureNameTable> {
    extensions.iter().rev().find_map(|extension| match extension {
        Extension::FeatureNames(names) => Some(names),
        _ => None,
    })
}

/// The error of an image that needs these features.
pub(super) fn unsupported(names: &FeatureNameTable, unknown: IncompatibleFeatures) -> FormatError {
    FormatError::unsupported(
        FormatError::FEATURES,
        names.describe_incompatible(unknown.bits()),
        "open the image with a program that supports this",
    )
}

fn truncated(length: usize, needed: usize) -> FormatError {
    FormatError::truncated(
        "header",
        format_args!("{length} bytes long"),
        format!("needs at least {needed}; the file is truncated"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::features::{FeatureKind, FeatureName, IncompatibleFeatures};
    use crate::header::tests::sample;
    use proptest::prelude::*;

    /// An encoded header with these bytes at `at`.
    fn patched(header: &Header, at: usize, with: &[u8]) -> Result<Header, FormatError> {
        let mut encoded = header.encode().unwrap();
        encoded[at..at + with.len()].copy_from_slice(with);
        Header::parse(&encoded)
    }

    #[test]
    fn what_is_no_qcow2_image_has_its_own_kind() {
        let error = Header::parse(b"#!/bin/sh").unwrap_err();
        assert_eq!(error.kind(), FormatErrorKind::NotQcow2);
        assert!(error.to_string().contains("[23, 21, 2f, 62]"), "{error}");
        assert_eq!(Header::parse(b"").unwrap_err().kind(), FormatErrorKind::NotQcow2);
        let error = Header::parse(b"QFI\xfb\0\0\0\x01").unwrap_err();
        assert_eq!(error.kind(), FormatErrorKind::NotQcow2);
        let error = patched(&sample(), 4, &4u32.to_be_bytes()).unwrap_err();
        assert_eq!(error.kind(), FormatErrorKind::Unsupported);
    }

    #[test]
    fn a_file_cut_short_says_so_or_is_still_whole() {
        let encoded = sample().encode().unwrap();
        let used = encoded.iter().rposition(|&b| b != 0).unwrap() + 1;
        for length in 4..used {
            let error = Header::parse(&encoded[..length]).unwrap_err();
            if length < 112 {
                assert_eq!(error.kind(), FormatErrorKind::Truncated, "{length}: {error}");
            }
        }
        // The missing part of the cluster reads as zeroes.
        assert_eq!(Header::parse(&encoded[..used]), Ok(sample()));
    }

    #[test]
    fn unknown_features_are_refused_by_the_images_own_names() {
        let mut header = sample();
        header.extensions = vec![Extension::FeatureNames(FeatureNameTable {
            entries: vec![FeatureName::new(FeatureKind::Incompatible, 7, "time\ntravel")],
        })];
        header.incompatible = IncompatibleFeatures::from_bits(1 << 7 | 1 << 50);
        let error = Header::parse(&header.encode().unwrap()).unwrap_err();
        assert_eq!(error.kind(), FormatErrorKind::Unsupported);
        assert_eq!(
            error.to_string(),
            "Unsupported qcow2 feature(s): time?travel, Unknown incompatible feature: 4000000000000 \
             (incompatible_features); open the image with a program that supports this"
        );
        // Even where the extensions are broken.
        let error = patched(&header, 116, &[0xff; 4]).unwrap_err();
        assert_eq!(error.value(), "Unknown incompatible feature: 4000000000080");
    }

    #[test]
    fn unknown_compression_is_refused() {
        let error = patched(&sample(), 104, &[2]).unwrap_err();
        assert_eq!((error.kind(), error.value()), (FormatErrorKind::Unsupported, "2"));
    }

    #[test]
    fn header_length_is_bounded() {
        for length in [0u32, 103, 105, 72, 65544, u32::MAX] {
            let error = patched(&sample(), 100, &length.to_be_bytes()).unwrap_err();
            assert_eq!(error.field(), "header_length");
        }
    }

    #[test]
    fn backing_name_is_bounded_and_read_to_its_first_nul() {
        let header = sample();
        let at = u64::from_be_bytes(header.encode().unwrap()[8..16].try_into().unwrap()) as usize;
        let name = |bytes: &[u8]| patched(&header, at, bytes).unwrap().backing_file;
        assert_eq!(name(b"bas\0").as_deref(), Some("bas"));
        assert_eq!(name(b"\0"), None);
        assert!(patched(&header, at, b"\xff").is_err());
        assert!(patched(&header, 16, &1024u32.to_be_bytes()).is_err());
        for offset in [1, 111, 65537, u64::MAX] {
            assert!(patched(&header, 8, &u64::to_be_bytes(offset)).is_err(), "{offset}");
        }
        let last = patched(&header, 8, &65530u64.to_be_bytes()).unwrap_err();
        assert_eq!(last.field(), "backing_file_size");
        // Extensions end where the name starts.
        let error = patched(&header, 8, &120u64.to_be_bytes()).unwrap_err();
        assert!(error.field().starts_with("header extension"), "{error}");
    }

    #[test]
    fn the_header_cluster_is_found_from_its_first_bytes() {
        let encoded = sample().encode().unwrap();
        assert_eq!(Header::probe_length(&encoded[..24]), Ok(65536));
        assert!(Header::probe_length(&encoded[..23]).is_err());
        assert!(
            Header::probe_length(b"QFI\xfb\0\0\0\x03\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x16").is_err()
        );
    }

    proptest! {
        #[test]
        fn any_bytes_parse_or_fail(mut bytes in prop::collection::vec(any::<u8>(), 0..600)) {
            let _ = Header::parse(&bytes);
            for (at, start) in b"QFI\xfb\0\0\0\x03".iter().enumerate() {
                if let Some(byte) = bytes.get_mut(at) { *byte = *start; }
            }
            if let Some(bits) = bytes.get_mut(20..24) { bits.copy_from_slice(&[0, 0, 0, 9]); }
            let _ = Header::parse(&bytes);
        }

        #[test]
        fn a_changed_header_parses_to_what_encodes_back_or_fails(
            changes in prop::collection::vec((0usize..700, any::<u8>()), 1..4),
        ) {
            let mut encoded = sample().encode().unwrap();
            for (at, byte) in changes {
                encoded[at] = byte;
            }
            if let Ok(header) = Header::parse(&encoded)
                && let Ok(again) = header.encode()
            {
                let mut back = Header::parse(&again).unwrap();
                // The names are completed.
                back.extensions.retain(|e| !matches!(e, Extension::FeatureNames(_)));
                let mut header = header;
                header.extensions.retain(|e| !matches!(e, Extension::FeatureNames(_)));
                prop_assert_eq!(back, header);
            }
        }
    }
}
