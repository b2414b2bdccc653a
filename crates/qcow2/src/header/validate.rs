//! Validation of a header.

use super::{
    Header, MAX_BACKING_FILE_BYTES, MAX_ENCRYPTION_HEADER_BYTES, MAX_SNAPSHOTS, ParseMode, parse,
};
use crate::compress::CompressionType;
use crate::error::{FormatError, FormatErrorKind, printable};
use crate::extension::{Extension, MAX_BACKING_FORMAT_BYTES};
use crate::features::{
    AutoclearFeatures, FeatureKind, FeatureName, FeatureNameTable, IncompatibleFeatures,
};
use crate::geometry::{Geometry, HOST_OFFSET_LIMIT, MAX_L1_BYTES, MAX_REFCOUNT_TABLE_BYTES};
use crate::journal::{self, JournalExtension};
use crate::offset::HostOffset;
use std::ops::Range;

/// Bytes of the smallest snapshot table entry.
const SNAPSHOT_ENTRY_MIN: u64 = 40;

impl Header {
    /// Checks everything that can be checked without the tables.
    ///
    /// # Errors
    /// As [`parse`](Self::parse).
    pub fn validate(&self, mode: ParseMode) -> Result<(), FormatError> {
        let geometry = self.geometry()?;
        match self.crypt_method {
            0 | Self::LUKS => {}
            1 => {
                return Err(FormatError::new(
                    FormatErrorKind::Encrypted,
                    "crypt_method",
                    "1 (AES)",
                    "images encrypted with this method, which is broken, are not supported; convert the image \
                     with qemu-img convert",
                ));
            }
            other => {
                return Err(FormatError::unsupported(
                    "crypt_method",
                    other,
                    "unknown encryption method",
                ));
            }
        }
        self.validate_features()?;
        self.validate_data_file()?;
        self.validate_encryption(&geometry)?;
        self.validate_journal(&geometry)?;
        self.validate_strings()?;
        if mode != ParseMode::Check {
            self.validate_pointers(&geometry)?;
        }
        // A journal is replayed in memory, and what is in it may be anywhere.
        let replays = self.incompatible.contains(IncompatibleFeatures::JOURNAL);
        let mode = if mode == ParseMode::Read && replays { ParseMode::Open } else { mode };
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
        Ok(())
    }

    /// Only a data file can be raw: without the bit that says that there is one, entries that refer to it would be read
    /// from the image.
    fn validate_data_file(&self) -> Result<(), FormatError> {
        let has_file = self.incompatible.contains(IncompatibleFeatures::DATA_FILE);
        if self.autoclear.contains(AutoclearFeatures::DATA_FILE_RAW) && !has_file {
            return Err(FormatError::invalid(
                "autoclear_features",
                format_args!("{:#x}", self.autoclear.bits()),
                "says that the external data file is raw, but incompatible_features says that there \
                 is none",
            ));
        }
        Ok(())
    }

    /// An encrypted image says where its encryption header is, and others do not.
    fn validate_encryption(&self, geometry: &Geometry) -> Result<(), FormatError> {
        const FIELD: &str = "full disk encryption header pointer";
        let mut areas = self.extensions.iter().filter_map(|extension| match extension {
            Extension::EncryptionHeader { offset, length } => Some((*offset, *length)),
            _ => None,
        });
        let area = areas.next();
        if areas.next().is_some() {
            return Err(FormatError::invalid(FIELD, "present twice", "must be present once"));
        }
        let Some((offset, length)) = area else {
            if self.crypt_method != Self::LUKS {
                return Ok(());
            }
            return Err(FormatError::invalid(
                FIELD,
                "missing",
                "crypt_method is 2 (LUKS); without the encryption header, the disk cannot be \
                 decrypted",
            ));
        };
        if self.crypt_method != Self::LUKS {
            let why = "must be present only with LUKS encryption";
            return Err(FormatError::invalid(FIELD, offset, why));
        }
        table(FIELD, offset, length, geometry)?;
        if length == 0 || length > MAX_ENCRYPTION_HEADER_BYTES {
            return Err(FormatError::invalid(
                "full disk encryption header's length",
                length,
                format!("must be from 1 to {MAX_ENCRYPTION_HEADER_BYTES} bytes"),
            ));
        }
        if self.autoclear.contains(AutoclearFeatures::DATA_FILE_RAW) {
            return Err(FormatError::invalid(
                "autoclear_features",
                format_args!("{:#x}", self.autoclear.bits()),
                "says that the external data file is raw, but crypt_method says that it is encrypted",
            ));
        }
        Ok(())
    }

    /// The journal must be replayed before anything else is done, so there must be one.
    fn validate_journal(&self, geometry: &Geometry) -> Result<(), FormatError> {
        if !self.incompatible.contains(IncompatibleFeatures::JOURNAL) {
            return Ok(());
        }
        let mut journals = self.journals();
        let there = self.extensions.iter().filter(|e| e.magic() == JournalExtension::MAGIC).count();
        match (journals.next(), journals.next()) {
            (Some(journal), None) => journal.validate(geometry),
            (Some(_), Some(_)) => Err(journal::irrecoverable(
                "journal extension",
                format_args!("present {there} times"),
                "exactly one must give the journal's location",
            )),
            // Whoever sets this bit for a journal here says so in the table of names: it is another program's feature.
            _ if there == 0 && !self.names_journal() => Err(parse::unsupported(
                parse::names(&self.extensions).unwrap_or(&FeatureNameTable::default()),
                IncompatibleFeatures::JOURNAL,
            )),
            _ => Err(journal::irrecoverable(
                "journal extension",
                if there == 0 { "missing" } else { "not valid" },
                "the image needs what is in its journal (incompatible feature bit 61), but its \
                 location is unknown",
            )),
        }
    }

    /// Whether the table of names says that the journal's bit is one.
    fn names_journal(&self) -> bool {
        let bit = IncompatibleFeatures::JOURNAL.bits().trailing_zeros() as u8;
        let kind = FeatureKind::Incompatible;
        let name = parse::names(&self.extensions).and_then(|names| names.find(kind, bit));
        name.is_some_and(|name| name.text() == FeatureName::journal().text())
    }

    /// Checks what extensions point to.
    fn validate_pointers(&self, geometry: &Geometry) -> Result<(), FormatError> {
        for extension in &self.extensions {
            match extension {
                Extension::Bitmaps(bitmaps)
                    if self.autoclear.contains(AutoclearFeatures::BITMAPS) =>
                {
                    bitmaps.validate(geometry)?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Checks for strings that would not be read back as written.
    fn validate_strings(&self) -> Result<(), FormatError> {
        let check = |field: &'static str, text: &str, most: usize| {
            if text.len() > most {
                return Err(FormatError::too_large(
                    format!("{field}'s length"),
                    text.len(),
                    format!("must not exceed {most} bytes"),
                ));
            }
            if text.contains('\0') {
                let text = printable(text.as_bytes());
                return Err(FormatError::invalid(field, text, "must not contain a NUL"));
            }
            Ok(())
        };
        if let Some(name) = &self.backing_file {
            check("backing file name", name, MAX_BACKING_FILE_BYTES as usize)?;
        }
        for extension in &self.extensions {
            match extension {
                Extension::BackingFormat(format) => {
                    check("backing file format name", format, MAX_BACKING_FORMAT_BYTES)?;
                }
                Extension::DataFile(name) => check("external data file name", name, usize::MAX)?,
                Extension::Unknown { magic: 0, .. } => {
                    return Err(FormatError::invalid(
                        "header extension's type",
                        0,
                        "marks the end of the extensions",
                    ));
                }
                _ => {}
            }
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
        if needed > i32::MAX as u64 {
            return Err(FormatError::too_large(
                "size",
                self.size,
                format!("needs an L1 table of {needed} entries, more than any image can have"),
            ));
        }
        if needed > u64::from(self.l1_size) {
            return Err(FormatError::invalid(
                "l1_size",
                self.l1_size,
                format!("is too small for a disk of {} bytes: needs {needed}", self.size),
            ));
        }
        let l1 = table("l1_table_offset", self.l1_table_offset, l1_bytes, geometry)?;

        let (refcounts, snapshots) = match mode {
            ParseMode::Check => {
                self.refcount_area(geometry)?;
                geometry.check_offset("snapshots_offset", self.snapshots_offset)?;
                return Ok(());
            }
            ParseMode::Open => (self.refcount_table(geometry)?, self.snapshot_table(geometry)?),
            ParseMode::Read => (
                self.refcount_table(geometry).unwrap_or_default(),
                self.snapshot_table(geometry).unwrap_or_default(),
            ),
        };
        let encryption =
            self.encryption().map_or(0..0, |(offset, length)| offset.get()..offset.get() + length);
        let tables = [
            ("the full disk encryption header pointer", encryption),
            ("l1_table_offset", l1),
            ("refcount_table_offset", refcounts),
            ("snapshots_offset", snapshots),
        ];
        // What is not needed to read the disk comes last.
        let needed = if mode == ParseMode::Read { 2 } else { tables.len() };
        for (i, (field, a)) in tables.iter().enumerate().take(needed) {
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
}

impl Header {
    /// The bytes of the file that the refcount table takes.
    ///
    /// # Errors
    /// If there is none, or it cannot be where the header says.
    pub fn refcount_table(&self, geometry: &Geometry) -> Result<Range<u64>, FormatError> {
        let area = self.refcount_area(geometry)?;
        if area.is_empty() {
            return Err(FormatError::invalid(
                "refcount_table_clusters",
                0,
                "the image has no refcount table; repair it with check -r all",
            ));
        }
        Ok(area)
    }

    /// As [`refcount_table`](Self::refcount_table), but it may be empty.
    fn refcount_area(&self, geometry: &Geometry) -> Result<Range<u64>, FormatError> {
        let clusters = u64::from(self.refcount_table_clusters);
        let most = MAX_REFCOUNT_TABLE_BYTES >> self.cluster_bits;
        if clusters > most {
            let why = format!("must not exceed {most} (8 MiB)");
            return Err(FormatError::too_large("refcount_table_clusters", clusters, why));
        }
        let bytes = clusters << self.cluster_bits;
        table("refcount_table_offset", self.refcount_table_offset, bytes, geometry)
    }

    /// The bytes of the file that the snapshot table takes at least.
    ///
    /// # Errors
    /// If it cannot be where the header says.
    pub fn snapshot_table(&self, geometry: &Geometry) -> Result<Range<u64>, FormatError> {
        geometry.check_offset("snapshots_offset", self.snapshots_offset)?;
        if self.nb_snapshots > MAX_SNAPSHOTS {
            return Err(FormatError::too_large(
                "nb_snapshots",
                self.nb_snapshots,
                format!("must not exceed {MAX_SNAPSHOTS}"),
            ));
        }
        let bytes = u64::from(self.nb_snapshots) * SNAPSHOT_ENTRY_MIN;
        table("snapshots_offset", self.snapshots_offset, bytes, geometry)
    }
}

/// Checks a table's offset; returns the bytes that it covers.
fn table(
    field: &'static str,
    offset: HostOffset,
    bytes: u64,
    geometry: &Geometry,
) -> Result<Range<u64>, FormatError> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::extension::BitmapsExtension;
    use crate::header::tests::sample;
    use crate::lsn::Lsn;

    fn refusal(change: impl Fn(&mut Header)) -> FormatError {
        let mut header = sample();
        change(&mut header);
        header.validate(ParseMode::Open).unwrap_err()
    }

    #[test]
    fn limits_of_tables() {
        assert_eq!(sample().validate(ParseMode::Open), Ok(()));
        let kind = |change: &dyn Fn(&mut Header)| refusal(change).kind();
        assert_eq!(kind(&|h| h.l1_size = (4 << 20) + 1), FormatErrorKind::TooLarge);
        assert_eq!(kind(&|h| h.l1_size = 1), FormatErrorKind::Invalid);
        assert_eq!(kind(&|h| h.size = 1 << 63), FormatErrorKind::TooLarge);
        assert_eq!(kind(&|h| h.refcount_table_clusters = 129), FormatErrorKind::TooLarge);
        assert_eq!(kind(&|h| h.refcount_table_clusters = 0), FormatErrorKind::Invalid);
        assert_eq!(kind(&|h| h.nb_snapshots = 65537), FormatErrorKind::TooLarge);
        assert_eq!(kind(&|h| h.nb_snapshots = 1), FormatErrorKind::Invalid);
        for offset in [0, 512, 1 << 56, u64::MAX, (1 << 56) - 65536] {
            let offset = HostOffset::new(offset);
            // The last one fits if it has one cluster: a refcount table of two clusters ends too far.
            assert_eq!(
                kind(&|h| {
                    h.refcount_table_offset = offset;
                    h.refcount_table_clusters = 2;
                }),
                FormatErrorKind::Invalid
            );
        }
    }

    #[test]
    fn tables_that_overlap_are_left_to_a_check() {
        let mut header = sample();
        header.l1_table_offset = header.refcount_table_offset;
        let error = header.validate(ParseMode::Open).unwrap_err();
        assert!(error.to_string().contains("overlaps the one of refcount_table_offset"), "{error}");
        assert_eq!(header.validate(ParseMode::Check), Ok(()));
        header.refcount_table_clusters = 0;
        header.nb_snapshots = u32::MAX;
        header.snapshots_offset = HostOffset::new(1 << 40);
        assert_eq!(header.validate(ParseMode::Check), Ok(()));
        // QEMU does not even check an image with such a field.
        header.snapshots_offset = HostOffset::new(7);
        let error = header.validate(ParseMode::Check).unwrap_err();
        assert_eq!(error.field(), "snapshots_offset");
    }

    #[test]
    fn reading_needs_neither_refcounts_nor_snapshots() {
        type Damage = (&'static str, fn(&mut Header));
        let damage: &[Damage] = &[
            ("refcount_table_offset", |h| h.refcount_table_offset = HostOffset::new(0)),
            ("refcount_table_offset", |h| h.refcount_table_offset = HostOffset::new(1 << 60)),
            ("refcount_table_offset", |h| h.refcount_table_offset = HostOffset::new(513)),
            ("refcount_table_clusters", |h| h.refcount_table_clusters = 0),
            ("refcount_table_clusters", |h| h.refcount_table_clusters = u32::MAX),
            ("snapshots_offset", |h| h.snapshots_offset = HostOffset::new(1 << 60)),
            ("snapshots_offset", |h| {
                (h.nb_snapshots, h.snapshots_offset) = (1, HostOffset::new(0));
            }),
            ("nb_snapshots", |h| h.nb_snapshots = u32::MAX),
            ("refcount_table_offset", |h| {
                (h.nb_snapshots, h.snapshots_offset) = (1, h.refcount_table_offset);
            }),
        ];
        for (field, damage) in damage {
            assert_eq!(refusal(damage).field(), *field);
            let mut header = sample();
            damage(&mut header);
            assert_eq!(header.validate(ParseMode::Read), Ok(()), "{field}");
        }
        let mut header = sample();
        header.refcount_table_offset = header.l1_table_offset;
        assert_eq!(header.validate(ParseMode::Read).unwrap_err().field(), "l1_table_offset");
        header = sample();
        header.l1_table_offset = HostOffset::new(0);
        assert_eq!(header.validate(ParseMode::Read).unwrap_err().field(), "l1_table_offset");
    }

    #[test]
    fn features_that_contradict_each_other() {
        let error = refusal(|h| h.compression_type = CompressionType::Zstd);
        assert_eq!(error.field(), "compression_type");
        let error = refusal(|h| {
            h.incompatible = h.incompatible.with(IncompatibleFeatures::COMPRESSION_TYPE);
        });
        assert_eq!(error.field(), "compression_type");
        let error = refusal(|h| {
            h.version = 2;
            h.refcount_order = 5;
        });
        assert_eq!(error.field(), "version");
    }

    #[test]
    fn pointers_to_what_cannot_be() {
        let offset = HostOffset::new(0x50000);
        let crypto = Extension::EncryptionHeader { offset, length: 592 };
        assert_eq!(refusal(|h| h.extensions.push(crypto.clone())).kind(), FormatErrorKind::Invalid);
        let bitmaps = BitmapsExtension {
            count: 0,
            directory_size: 32,
            directory_offset: offset,
            reserved: 0,
        };
        let mut header = sample();
        header.extensions.push(Extension::Bitmaps(bitmaps));
        // Without the autoclear bit they are inconsistent anyway.
        assert_eq!(header.validate(ParseMode::Open), Ok(()));
        header.autoclear = header.autoclear.with(AutoclearFeatures::BITMAPS);
        assert_eq!(header.validate(ParseMode::Open).unwrap_err().field(), "nb_bitmaps");
        assert_eq!(header.validate(ParseMode::Check), Ok(()));
    }

    #[test]
    fn a_journal_that_is_needed_must_be_known() {
        let journal = JournalExtension {
            area_offset: HostOffset::new(0x100_0000),
            area_length: 1 << 20,
            id: 7,
            first_lsn: Lsn::new(1),
        };
        let mut header = sample();
        header.extensions.push(Extension::Journal(journal));
        assert_eq!((header.journal(), header.validate(ParseMode::Open)), (None, Ok(())));
        header.incompatible = header.incompatible.with(IncompatibleFeatures::JOURNAL);
        assert_eq!((header.journal(), header.validate(ParseMode::Open)), (Some(&journal), Ok(())));
        let refusals = |header: &Header| {
            let errors = [ParseMode::Open, ParseMode::Check].map(|mode| header.validate(mode));
            let errors = errors.map(|error| error.unwrap_err().to_string());
            assert_eq!(errors[0], errors[1]);
            assert!(errors[0].contains("cannot be recovered automatically"), "{}", errors[0]);
            errors[0].clone()
        };
        header.extensions.push(Extension::Journal(journal));
        assert!(refusals(&header).starts_with("journal extension is present 2 times: "));
        header.extensions.truncate(3);
        // Whether it is a journal's bit, the table of names says.
        for mode in [ParseMode::Open, ParseMode::Check] {
            let error = header.validate(mode).unwrap_err().to_string();
            let unknown =
                "Unsupported qcow2 feature(s): Unknown incompatible feature: 2000000000000000 ";
            assert!(error.starts_with(unknown), "{error}");
        }
        let named = FeatureNameTable { entries: vec![FeatureName::journal()] };
        header.extensions.push(Extension::FeatureNames(named));
        assert!(refusals(&header).starts_with("journal extension is missing: "));
        let data = vec![0; 32];
        header.extensions.push(Extension::Unknown { magic: JournalExtension::MAGIC, data });
        assert!(refusals(&header).starts_with("journal extension is not valid: "));
        let area_offset = HostOffset::new(0x100_1000);
        header.extensions.push(Extension::Journal(JournalExtension { area_offset, ..journal }));
        assert!(refusals(&header).starts_with("journal area is 1048576 bytes at 0x1001000: "));
    }

    #[test]
    fn encryption_has_its_own_kind() {
        for (method, kind) in [
            (1, FormatErrorKind::Encrypted),
            (2, FormatErrorKind::Invalid),
            (3, FormatErrorKind::Unsupported),
        ] {
            assert_eq!(refusal(|h| h.crypt_method = method).kind(), kind);
        }
    }

    #[test]
    fn the_encryption_header_has_a_place_of_its_own() {
        let encrypted = |offset, length| {
            let mut header = sample();
            header.crypt_method = Header::LUKS;
            let offset = HostOffset::new(offset);
            header.extensions.push(Extension::EncryptionHeader { offset, length });
            header
        };
        let good = encrypted(0x50000, 2 << 20);
        assert_eq!(good.validate(ParseMode::Open), Ok(()));
        assert_eq!(good.encryption(), Some((HostOffset::new(0x50000), 2 << 20)));
        assert_eq!(sample().encryption(), None);
        for (offset, length) in [
            (0x50000, 0),
            (0x50000, u64::MAX),
            (0x50000, MAX_ENCRYPTION_HEADER_BYTES + 1),
            (0x50200, 592),
            (0, 592),
            // The L1 table is there.
            (0x30000, 592),
            (1 << 56, 592),
        ] {
            let error = encrypted(offset, length).validate(ParseMode::Open).unwrap_err();
            assert!(error.to_string().contains("encryption header"), "{error}");
        }
        let mut twice = good;
        twice.extensions.push(twice.extensions.last().cloned().unwrap());
        assert!(twice.validate(ParseMode::Open).is_err());
    }

    #[test]
    fn strings_that_would_be_read_otherwise() {
        let long = refusal(|h| h.backing_file = Some("x".repeat(1024)));
        assert_eq!(long.kind(), FormatErrorKind::TooLarge);
        refusal(|h| h.backing_file = Some("a\0b".into()));
        refusal(|h| h.extensions.push(Extension::BackingFormat("x".repeat(16))));
        refusal(|h| h.extensions.push(Extension::DataFile("\0".into())));
        refusal(|h| h.extensions.push(Extension::Unknown { magic: 0, data: Vec::new() }));
    }
}
