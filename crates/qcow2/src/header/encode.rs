//! Writing a header.

use super::{FEATURE_NAMES_CLUSTER_BITS, Header, MAGIC, ParseMode, V3_MIN_LENGTH};
use crate::bytes;
use crate::compress::CompressionType;
use crate::error::FormatError;
use crate::extension::Extension;
use crate::features::FeatureNameTable;

impl Header {
    /// The header cluster: fixed fields, extensions, backing file name, and zeroes. The extensions keep their order. A
    /// version 3 image with clusters of 8 KiB or more gets the feature name table that QEMU writes, with the image's
    /// names for other bits kept; others keep the table they have. A table that does not fit is left out.
    ///
    /// # Errors
    /// If the header is not valid, or exceeds a cluster.
    pub fn encode(&self) -> Result<Vec<u8>, FormatError> {
        self.validate(ParseMode::Check)?;
        let complete = (self.version >= 3 && self.cluster_bits >= FEATURE_NAMES_CLUSTER_BITS)
            .then(|| self.encode_with(&self.named_extensions()))
            .flatten();
        // If there is no room for every name, the table as it is; if that does not fit either, none.
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
        let table = extensions.iter_mut().rev().find_map(|extension| match extension {
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
        Extension::encode_all(extensions, &mut out);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::features::{FeatureKind, FeatureName, IncompatibleFeatures};
    use crate::header::tests::sample;

    #[test]
    fn round_trip() {
        let header = sample();
        let encoded = header.encode().unwrap();
        assert_eq!(encoded.len(), 65536);
        assert_eq!(Header::parse(&encoded), Ok(header.clone()));
        let zstd = Header {
            compression_type: CompressionType::Zstd,
            incompatible: IncompatibleFeatures::COMPRESSION_TYPE,
            ..header
        };
        assert_eq!(Header::parse(&zstd.encode().unwrap()), Ok(zstd));
    }

    #[test]
    fn the_beginning_is_enough_where_everything_is_in_it() {
        let header = sample();
        let encoded = header.encode().unwrap();
        let enough = (0..encoded.len()).find(|n| Header::ends_in(&encoded[..*n])).unwrap();
        assert!(enough < 4096);
        assert_eq!(Header::parse(&encoded[..enough]).as_ref(), Ok(&header));
        let big = Extension::Unknown { magic: 9, data: vec![1; 5000] };
        let header = Header { extensions: vec![big], ..sample() };
        let encoded = header.encode().unwrap();
        assert!(!Header::ends_in(&encoded[..4096]));
        assert!(Header::ends_in(&encoded));
        let header = Header { backing_file: None, extensions: Vec::new(), ..sample() };
        assert!(Header::ends_in(&header.encode().unwrap()[..4096]));
    }

    #[test]
    fn an_overlong_header_keeps_its_unknown_fields() {
        let unknown_fields: Vec<u8> = (0..23).collect();
        let header = Header { header_length: 128, unknown_fields, ..sample() };
        assert_eq!(Header::parse(&header.encode().unwrap()), Ok(header));
    }

    #[test]
    fn a_short_header_stays_short_until_it_needs_the_compression_type() {
        let short = Header { header_length: 104, unknown_fields: Vec::new(), ..sample() };
        assert_eq!(Header::parse(&short.encode().unwrap()), Ok(short.clone()));
        let zstd = Header {
            compression_type: CompressionType::Zstd,
            incompatible: IncompatibleFeatures::COMPRESSION_TYPE,
            ..short
        };
        assert_eq!(Header::parse(&zstd.encode().unwrap()).unwrap().header_length, 112);
    }

    #[test]
    fn names_are_completed_where_there_is_room() {
        let other = FeatureName::new(FeatureKind::Autoclear, 33, "ours");
        let own = vec![Extension::FeatureNames(FeatureNameTable { entries: vec![other.clone()] })];
        let header = Header { extensions: own.clone(), ..sample() };
        let back = Header::parse(&header.encode().unwrap()).unwrap();
        let [Extension::FeatureNames(table)] = &back.extensions[..] else { panic!("{back:?}") };
        assert_eq!(table.entries.last(), Some(&other));
        assert_eq!(table.entries.len(), 9);

        let header = Header { cluster_bits: 12, l1_size: 512, ..header };
        let back = Header::parse(&header.encode().unwrap()).unwrap();
        assert_eq!(back.extensions, own);

        let known = vec![Extension::FeatureNames(FeatureNameTable::known())];
        let header = Header { cluster_bits: 9, l1_size: 32768, extensions: known, ..header };
        let back = Header::parse(&header.encode().unwrap()).unwrap();
        assert_eq!(back.extensions, []);
        assert_eq!(back.backing_file, header.backing_file);

        let header = Header { backing_file: Some("x".repeat(400)), ..header };
        let error = header.encode().unwrap_err();
        assert!(error.to_string().contains("shorter backing file name"), "{error}");
    }
}
