//! Feature bits and their names (sections "Header" and "Feature name table").

use crate::bit_set::bit_set;
use crate::error::printable;

macro_rules! features {
    ($(#[$doc:meta])* $name:ident { $($(#[$bit_doc:meta])* $bit:ident = $n:literal, $text:expr;)* }) => {
        bit_set! {
            $(#[$doc])*
            $name(u64) { $($(#[$bit_doc])* $bit = $n;)* }
        }

        impl $name {
            /// The bits that this implementation knows, with the names that QEMU gives them; those that QEMU does not
            /// know have a name chosen by this implementation.
            pub const KNOWN: &'static [(u8, &'static str)] = &[$(($n, $text)),*];

            /// Whether no bit is set.
            pub const fn is_empty(self) -> bool {
                self.0 == 0
            }

            /// The bits that this implementation does not know.
            #[must_use]
            pub const fn unknown(self) -> Self {
                self.without(Self(0 $(| 1 << $n)*))
            }
        }
    };
}

features! {
    /// Features that must be known to open the image.
    IncompatibleFeatures {
        /// Refcounts may be wrong; they are rebuilt before the first write.
        DIRTY = 0, "dirty bit";
        /// Any structure may be wrong; only a repair may write.
        CORRUPT = 1, "corrupt bit";
        /// Guest data is in an external data file.
        DATA_FILE = 2, "external data file";
        /// The compression type is not deflate.
        COMPRESSION_TYPE = 3, "compression type";
        /// L2 entries are 16 bytes long and describe subclusters.
        EXTENDED_L2 = 4, "extended L2 entries";
        /// The [journal](crate::journal) must be replayed before anything else is read. Not known to
        /// QEMU, which refuses the image by this name.
        JOURNAL = 61, "journal; run 'isobath check -r all IMAGE'";
    }
}

impl IncompatibleFeatures {
    /// The bits that QEMU does not know.
    const OWN: Self = Self::JOURNAL;
}

features! {
    /// Features that may be ignored and are kept.
    CompatibleFeatures {
        /// Refcounts may be updated late, under the dirty bit.
        LAZY_REFCOUNTS = 0, "lazy refcounts";
    }
}

features! {
    /// Features that a writer that does not know them clears before writing.
    AutoclearFeatures {
        /// The bitmaps extension is consistent.
        BITMAPS = 0, "bitmaps";
        /// The external data file alone holds the disk's contents.
        DATA_FILE_RAW = 1, "raw external data";
    }
}

/// Which of the header's three feature fields a bit belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FeatureKind {
    /// `incompatible_features`
    Incompatible,
    /// `compatible_features`
    Compatible,
    /// `autoclear_features`
    Autoclear,
    /// A type that the specification does not define.
    Other(u8),
}

impl FeatureKind {
    fn from_byte(byte: u8) -> Self {
        match byte {
            0 => Self::Incompatible,
            1 => Self::Compatible,
            2 => Self::Autoclear,
            other => Self::Other(other),
        }
    }

    fn byte(self) -> u8 {
        match self {
            Self::Incompatible => 0,
            Self::Compatible => 1,
            Self::Autoclear => 2,
            Self::Other(other) => other,
        }
    }
}

/// Longest feature name, in bytes.
pub const FEATURE_NAME_BYTES: usize = 46;

/// An entry of the feature name table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FeatureName {
    /// The field that holds the bit.
    pub kind: FeatureKind,
    /// The bit's number; 0 to 63 are valid.
    pub bit: u8,
    /// The name as stored, padded with zeroes. Hostile text: print [`text`](Self::text).
    pub name: [u8; FEATURE_NAME_BYTES],
}

impl FeatureName {
    pub(crate) const SIZE: usize = 2 + FEATURE_NAME_BYTES;

    /// The name of the incompatible feature [`JOURNAL`](IncompatibleFeatures::JOURNAL).
    pub fn journal() -> Self {
        let bit = IncompatibleFeatures::JOURNAL.bits().trailing_zeros() as u8;
        let known = IncompatibleFeatures::KNOWN.iter().find(|known| known.0 == bit);
        Self::new(FeatureKind::Incompatible, bit, known.map_or("", |known| known.1))
    }

    /// An entry with this name, cut at 46 bytes.
    pub fn new(kind: FeatureKind, bit: u8, text: &str) -> Self {
        let mut name = [0; FEATURE_NAME_BYTES];
        name.iter_mut().zip(text.bytes()).for_each(|(to, from)| *to = from);
        Self { kind, bit, name }
    }

    pub(crate) fn encode(&self) -> impl Iterator<Item = u8> + use<> {
        [self.kind.byte(), self.bit].into_iter().chain(self.name)
    }

    /// The name made safe to print.
    pub fn text(&self) -> String {
        printable(self.name.split(|&b| b == 0).next().unwrap_or_default())
    }
}

/// The feature name table: names for programs that do not know a feature.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FeatureNameTable {
    /// The entries, in order.
    pub entries: Vec<FeatureName>,
}

impl FeatureNameTable {
    /// The table that QEMU writes: every feature that it (and this implementation) knows.
    pub fn known() -> Self {
        let name = |kind| move |&(bit, text): &(u8, &str)| FeatureName::new(kind, bit, text);
        let incompatible = IncompatibleFeatures::KNOWN
            .iter()
            .filter(|(bit, _)| IncompatibleFeatures::OWN.bits() >> bit & 1 == 0);
        let entries = (incompatible.map(name(FeatureKind::Incompatible)))
            .chain(CompatibleFeatures::KNOWN.iter().map(name(FeatureKind::Compatible)))
            .chain(AutoclearFeatures::KNOWN.iter().map(name(FeatureKind::Autoclear)))
            .collect();
        Self { entries }
    }

    /// [`known`](Self::known), followed by the entries of this table that name other bits.
    #[must_use]
    pub fn completed(&self) -> Self {
        let mut table = Self::known();
        for entry in &self.entries {
            if table.find(entry.kind, entry.bit).is_none() {
                table.entries.push(entry.clone());
            }
        }
        table
    }

    /// The entry of a bit.
    pub fn find(&self, kind: FeatureKind, bit: u8) -> Option<&FeatureName> {
        self.entries.iter().find(|entry| entry.kind == kind && entry.bit == bit)
    }

    /// The incompatible features set in `bits`, as QEMU lists them: names from this table, in its order and up to the
    /// first entry without one, and the bits that it has no name for as a hexadecimal number.
    pub fn describe_incompatible(&self, bits: u64) -> String {
        let mut unnamed = bits;
        let mut names = Vec::new();
        for entry in self.entries.iter().take_while(|entry| entry.name[0] != 0) {
            let bit = 1u64.checked_shl(entry.bit.into()).unwrap_or(0);
            if entry.kind == FeatureKind::Incompatible && unnamed & bit != 0 {
                names.push(entry.text());
                unnamed &= !bit;
            }
        }
        if unnamed != 0 {
            names.push(format!("Unknown incompatible feature: {unnamed:x}"));
        }
        names.join(", ")
    }

    /// The table in an extension's data. As in QEMU, an incomplete entry at the end counts, as if zeroes followed.
    pub(crate) fn parse(data: &[u8]) -> Self {
        let entries = data.chunks(Self::ENTRY).filter_map(|entry| {
            let (&[kind, bit], text) = entry.split_first_chunk()?;
            let mut name = [0; FEATURE_NAME_BYTES];
            name.iter_mut().zip(text).for_each(|(to, from)| *to = *from);
            Some(FeatureName { kind: FeatureKind::from_byte(kind), bit, name })
        });
        Self { entries: entries.collect() }
    }

    /// The bytes at the beginning of an extension's data that are whole entries with a name. QEMU stops at the first
    /// entry without one.
    pub(crate) fn used(data: &[u8]) -> usize {
        let named = |entry: &&[u8]| entry.get(2).is_some_and(|first| *first != 0);
        data.chunks_exact(Self::ENTRY).take_while(named).count() * Self::ENTRY
    }

    const ENTRY: usize = FeatureName::SIZE;

    pub(crate) fn encode(&self) -> Vec<u8> {
        self.entries.iter().flat_map(FeatureName::encode).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits() {
        let f = IncompatibleFeatures::DIRTY.with(IncompatibleFeatures::EXTENDED_L2);
        assert_eq!(f.bits(), 0x11);
        assert!(f.contains(IncompatibleFeatures::DIRTY));
        assert!(!f.contains(IncompatibleFeatures::CORRUPT));
        assert!(f.without(f).is_empty());
        assert_eq!(IncompatibleFeatures::from_bits(0x3f).unknown().bits(), 0x20);
        assert_eq!(AutoclearFeatures::from_bits(7).unknown().bits(), 4);
    }

    #[test]
    fn unknown_bits_are_named_by_the_image_and_printed_safely() {
        let mut table = FeatureNameTable::default();
        table.entries.push(FeatureName::new(FeatureKind::Incompatible, 9, "fast\x1b[2Jer"));
        assert_eq!(
            table.describe_incompatible(1 << 9 | 1 << 63),
            "fast?[2Jer, Unknown incompatible feature: 8000000000000000"
        );
        assert_eq!(table.describe_incompatible(3 << 10), "Unknown incompatible feature: c00");
    }

    #[test]
    fn bits_are_named_in_the_order_of_the_table_up_to_an_entry_without_a_name() {
        let entry = |bit, text| FeatureName::new(FeatureKind::Incompatible, bit, text);
        let entries = vec![
            entry(11, "second"),
            FeatureName::new(FeatureKind::Compatible, 10, "compatible"),
            entry(10, "first"),
            entry(10, "again"),
            entry(64, "beyond"),
            entry(12, ""),
            entry(12, "behind the end"),
        ];
        assert_eq!(
            FeatureNameTable { entries }.describe_incompatible(7 << 10),
            "second, first, Unknown incompatible feature: 1000"
        );
    }

    #[test]
    fn an_incomplete_entry_at_the_end_names_a_bit() {
        let whole = FeatureName::new(FeatureKind::Incompatible, 9, "whole");
        let mut data: Vec<u8> = whole.encode().collect();
        data.extend(*b"\x00\x3fpart");
        let table = FeatureNameTable::parse(&data);
        assert_eq!(table.describe_incompatible(1 << 9 | 1 << 63), "whole, part");
        data.truncate(FeatureName::SIZE + 1);
        assert_eq!(FeatureNameTable::parse(&data).entries, [whole]);
    }

    #[test]
    fn completing_keeps_other_names() {
        let mut table = FeatureNameTable::default();
        let other = FeatureName::new(FeatureKind::Autoclear, 40, "map index");
        table.entries.push(FeatureName::new(FeatureKind::Incompatible, 0, "called otherwise"));
        table.entries.push(other.clone());
        let complete = table.completed();
        assert_eq!(complete.entries.len(), 9);
        assert_eq!(complete.entries.last(), Some(&other));
        assert_eq!(complete.entries[0].text(), "dirty bit");
        assert_eq!(FeatureNameTable::parse(&complete.encode()), complete);
        assert_eq!(complete.completed(), complete);
    }

    #[test]
    fn the_journal_has_its_whole_name_but_not_in_the_table_that_qemu_writes() {
        let name = FeatureName::journal();
        assert_eq!((name.kind, name.bit), (FeatureKind::Incompatible, 61));
        assert_eq!(name.text(), "journal; run 'isobath check -r all IMAGE'");
        assert_eq!(FeatureNameTable::known().find(name.kind, name.bit), None);
        let with = FeatureNameTable { entries: vec![name.clone()] };
        assert_eq!(with.completed().entries.last(), Some(&name));
        assert!(IncompatibleFeatures::JOURNAL.unknown().is_empty());
    }

    #[test]
    fn a_name_of_full_length_has_no_terminator() {
        let name = FeatureName::new(FeatureKind::Compatible, 1, &"x".repeat(60));
        assert_eq!(name.text().len(), FEATURE_NAME_BYTES);
    }
}
