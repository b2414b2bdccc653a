//! Header extensions (section "Header extensions").

use crate::bytes;
use crate::error::{FormatError, printable};
use crate::features::FeatureNameTable;
use crate::index::IndexExtension;
use crate::journal::JournalExtension;
use crate::offset::HostOffset;

const END: u32 = 0;
pub(crate) const BACKING_FORMAT: u32 = 0xe279_2aca;
pub(crate) const FEATURE_NAMES: u32 = 0x6803_f857;
pub(crate) const BITMAPS: u32 = 0x2385_2875;
const ENCRYPTION: u32 = 0x0537_be77;
pub(crate) const DATA_FILE: u32 = 0x4441_5441;

/// Longest backing format name, in bytes (QEMU's limit).
pub const MAX_BACKING_FORMAT_BYTES: usize = 15;

/// Bytes of type and length before an extension's data, and of the mark that ends the extensions.
pub(crate) const HEAD: usize = 8;

/// A header extension.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Extension {
    /// The backing file's format.
    BackingFormat(String),
    /// Names for feature bits.
    FeatureNames(FeatureNameTable),
    /// Where the bitmap directory is.
    Bitmaps(BitmapsExtension),
    /// The external data file's name.
    DataFile(String),
    /// Where the encryption header is: its offset, and its length in bytes.
    EncryptionHeader {
        /// First byte of the encryption header.
        offset: HostOffset,
        /// Its length in bytes.
        length: u64,
    },
    /// Where the direct-access index is.
    Index(IndexExtension),
    /// Where the journal is. It counts only with the feature
    /// [`JOURNAL`](crate::IncompatibleFeatures::JOURNAL).
    Journal(JournalExtension),
    /// One that this implementation does not know; kept as it is.
    Unknown {
        /// The extension's type.
        magic: u32,
        /// Its data, without padding.
        data: Vec<u8>,
    },
}

/// The bitmaps extension: where the bitmap directory is (section "Bitmaps extension"). Consistent
/// only with the autoclear bit [`BITMAPS`](crate::AutoclearFeatures::BITMAPS).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BitmapsExtension {
    /// Bitmaps in the directory.
    pub count: u32,
    /// The directory's length in bytes.
    pub directory_size: u64,
    /// Where it starts.
    pub directory_offset: HostOffset,
    /// The reserved field, which must be 0.
    pub reserved: u32,
}

impl BitmapsExtension {
    pub(crate) const SIZE: usize = 24;

    pub(crate) fn parse(data: &[u8]) -> Option<Self> {
        if data.len() != Self::SIZE {
            return None;
        }
        Some(Self {
            count: bytes::be32(data, 0)?,
            reserved: bytes::be32(data, 4)?,
            directory_size: bytes::be64(data, 8)?,
            directory_offset: HostOffset::new(bytes::be64(data, 16)?),
        })
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut data = Vec::with_capacity(Self::SIZE);
        data.extend(self.count.to_be_bytes());
        data.extend(self.reserved.to_be_bytes());
        data.extend(self.directory_size.to_be_bytes());
        data.extend(self.directory_offset.get().to_be_bytes());
        data
    }
}

impl Extension {
    /// The extensions in `area`: the bytes between the header and the backing file name, or the end
    /// of the first cluster.
    ///
    /// # Errors
    /// If an extension, or the mark that ends them, is longer than what is left of the area, or one
    /// of a known type has a length or text that QEMU refuses.
    pub fn parse_all(area: &[u8]) -> Result<Vec<Self>, FormatError> {
        Self::parse_area(area, false)
    }

    /// Like [`parse_all`](Self::parse_all); with `goes_on` zeroes follow the area.
    pub(crate) fn parse_area(area: &[u8], goes_on: bool) -> Result<Vec<Self>, FormatError> {
        let mut extensions = Vec::new();
        let mut rest = Some(0);
        for extent in Extents::new(area, 0) {
            let Some(data) = extent.data else {
                return Err(FormatError::invalid(
                    format!("header extension {:#010x}'s length", extent.magic),
                    extent.length,
                    format!(
                        "only {} bytes are left in the header cluster",
                        area.len().saturating_sub(extent.at + HEAD)
                    ),
                ));
            };
            if extent.is_end() {
                return Ok(extensions);
            }
            rest = extent.next();
            extensions.push(Self::parse(extent.magic, data)?);
        }
        let left = rest.map_or(0, |rest| area.len().saturating_sub(rest));
        if left > 0 && !goes_on {
            return Err(FormatError::invalid(
                "header extensions' area",
                format_args!("{} bytes", area.len()),
                format!(
                    "an extension begins in its last {left} bytes; backing_file_offset is wrong"
                ),
            ));
        }
        Ok(extensions)
    }

    fn parse(magic: u32, data: &[u8]) -> Result<Self, FormatError> {
        match magic {
            BACKING_FORMAT => {
                if data.len() > MAX_BACKING_FORMAT_BYTES {
                    return Err(FormatError::too_large(
                        "backing file format name's length",
                        data.len(),
                        format!("must not exceed {MAX_BACKING_FORMAT_BYTES} bytes"),
                    ));
                }
                text("backing file format name", data).map(Self::BackingFormat)
            }
            FEATURE_NAMES => Ok(Self::FeatureNames(FeatureNameTable::parse(data))),
            BITMAPS => BitmapsExtension::parse(data).map(Self::Bitmaps).ok_or_else(|| {
                FormatError::invalid("bitmaps extension's length", data.len(), "must be 24 bytes")
            }),
            DATA_FILE => text("external data file name", data).map(Self::DataFile),
            ENCRYPTION => match (bytes::be64(data, 0), bytes::be64(data, 8), data.len()) {
                (Some(offset), Some(length), 16) => {
                    Ok(Self::EncryptionHeader { offset: HostOffset::new(offset), length })
                }
                _ => Err(FormatError::invalid(
                    "full disk encryption header pointer's length",
                    data.len(),
                    "must be 16 bytes",
                )),
            },
            // Those of another version are kept as they are.
            _ => {
                let own = match magic {
                    IndexExtension::MAGIC => IndexExtension::parse(data).map(Self::Index),
                    JournalExtension::MAGIC => JournalExtension::parse(data).map(Self::Journal),
                    _ => None,
                };
                Ok(own.unwrap_or_else(|| Self::Unknown { magic, data: data.to_vec() }))
            }
        }
    }

    /// The extension's type on disk.
    pub fn magic(&self) -> u32 {
        match self {
            Self::BackingFormat(_) => BACKING_FORMAT,
            Self::FeatureNames(_) => FEATURE_NAMES,
            Self::Bitmaps(_) => BITMAPS,
            Self::DataFile(_) => DATA_FILE,
            Self::EncryptionHeader { .. } => ENCRYPTION,
            Self::Index(_) => IndexExtension::MAGIC,
            Self::Journal(_) => JournalExtension::MAGIC,
            Self::Unknown { magic, .. } => *magic,
        }
    }

    /// Appends the extension with its type, length and padding.
    fn encode(&self, out: &mut Vec<u8>) {
        let data = match self {
            Self::BackingFormat(text) | Self::DataFile(text) => text.as_bytes().to_vec(),
            Self::FeatureNames(table) => table.encode(),
            Self::Bitmaps(bitmaps) => bitmaps.encode(),
            Self::EncryptionHeader { offset, length } => {
                [offset.get().to_be_bytes(), length.to_be_bytes()].concat()
            }
            Self::Index(index) => index.encode(),
            Self::Journal(journal) => journal.encode(),
            Self::Unknown { data, .. } => data.clone(),
        };
        out.extend(self.magic().to_be_bytes());
        out.extend((data.len() as u32).to_be_bytes());
        out.extend(&data);
        out.resize(out.len().next_multiple_of(8), 0);
    }

    /// Appends extensions and the mark that ends them.
    pub fn encode_all(extensions: &[Self], out: &mut Vec<u8>) {
        for extension in extensions {
            extension.encode(out);
        }
        out.extend([0; HEAD]);
    }
}

/// A header extension, or the mark that ends them, at its position.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent<'a> {
    /// Where its type is.
    pub(crate) at: usize,
    /// Its type.
    pub(crate) magic: u32,
    /// The stated length of its data.
    pub(crate) length: u32,
    /// Its data without padding; `None` if it does not end in the bytes searched.
    pub(crate) data: Option<&'a [u8]>,
}

impl Extent<'_> {
    /// Whether it is the mark that ends the extensions.
    pub(crate) fn is_end(&self) -> bool {
        self.magic == END
    }

    /// Where the next one is.
    pub(crate) fn next(&self) -> Option<usize> {
        self.at.checked_add(HEAD)?.checked_add((self.length as usize).next_multiple_of(8))
    }
}

/// The extensions in some bytes, and finally the mark that ends them, if present. An area may end without it, even in
/// the padding of an extension.
pub(crate) struct Extents<'a> {
    bytes: &'a [u8],
    next: Option<usize>,
}

impl<'a> Extents<'a> {
    /// Those from `first` on.
    pub(crate) fn new(bytes: &'a [u8], first: usize) -> Self {
        Self { bytes, next: Some(first) }
    }
}

impl<'a> Iterator for Extents<'a> {
    type Item = Extent<'a>;

    fn next(&mut self) -> Option<Extent<'a>> {
        let at = self.next.take()?;
        let head = self.bytes.get(at..)?;
        let (magic, length) = (bytes::be32(head, 0)?, bytes::be32(head, 4)?);
        let data = head.get(HEAD..)?.get(..length as usize);
        let extent = Extent { at, magic, length, data };
        self.next = if extent.is_end() { None } else { extent.next() };
        Some(extent)
    }
}

/// A string in the image, up to its first NUL as QEMU reads it.
pub(crate) fn text(field: &'static str, data: &[u8]) -> Result<String, FormatError> {
    let data = data.split(|&b| b == 0).next().unwrap_or_default();
    String::from_utf8(data.to_vec()).map_err(|_| {
        FormatError::invalid(field, format!("\"{}\"", printable(data)), "must be UTF-8")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lsn::Lsn;
    use proptest::prelude::*;

    fn encoded(extensions: &[Extension]) -> Vec<u8> {
        let mut area = Vec::new();
        Extension::encode_all(extensions, &mut area);
        area
    }

    #[test]
    fn every_kind_round_trips_in_order() {
        let all = [
            Extension::BackingFormat("qcow2".into()),
            Extension::Unknown { magic: 0x1234_5678, data: vec![1, 2, 3] },
            Extension::DataFile("disk.raw".into()),
            Extension::FeatureNames(FeatureNameTable::known()),
            Extension::Bitmaps(BitmapsExtension {
                count: 1,
                directory_size: 32,
                directory_offset: HostOffset::new(0x50000),
                reserved: 0,
            }),
            Extension::EncryptionHeader { offset: HostOffset::new(0x40000), length: 592 },
            Extension::Journal(JournalExtension {
                area_offset: HostOffset::new(0x10_0000),
                area_length: 1 << 20,
                id: 1,
                first_lsn: Lsn::new(2),
            }),
            Extension::Unknown { magic: 0x1234_5678, data: Vec::new() },
        ];
        let area = encoded(&all);
        assert_eq!(area.len() % 8, 0);
        assert_eq!(Extension::parse_all(&area), Ok(all.to_vec()));
    }

    #[test]
    fn nothing_after_the_end_mark_is_read() {
        let mut area = encoded(&[]);
        area.extend([0xff; 64]);
        assert_eq!(Extension::parse_all(&area), Ok(Vec::new()));
        area[7] = 65; // QEMU looks at the length of the end mark too.
        assert!(Extension::parse_all(&area).is_err());
        assert_eq!(Extension::parse_all(&[]), Ok(Vec::new()));
        let cut = Extension::parse_all(&[1, 2, 3]).unwrap_err();
        assert!(cut.to_string().contains("begins in its last 3 bytes"), "{cut}");
        assert_eq!(Extension::parse_area(&[1, 2, 3], true), Ok(Vec::new()));
    }

    #[test]
    fn too_long_an_extension_names_itself() {
        let mut area = 0x1234_5678_u32.to_be_bytes().to_vec();
        area.extend(u32::MAX.to_be_bytes());
        area.extend([0; 16]);
        let error = Extension::parse_all(&area).unwrap_err();
        assert_eq!(
            error.to_string(),
            "header extension 0x12345678's length is 4294967295: only 16 bytes are left in the \
             header cluster"
        );
    }

    #[test]
    fn what_qemu_refuses_is_refused() {
        let long = encoded(&[Extension::BackingFormat("0123456789abcdef".into())]);
        assert!(Extension::parse_all(&long).is_err());
        for (magic, length) in [(BITMAPS, 23), (BITMAPS, 32), (ENCRYPTION, 8), (ENCRYPTION, 24)] {
            let area = encoded(&[Extension::Unknown { magic, data: vec![0; length] }]);
            assert!(Extension::parse_all(&area).is_err(), "{magic:#x} {length}");
        }
        let area = encoded(&[Extension::Unknown { magic: DATA_FILE, data: vec![0xff] }]);
        assert!(Extension::parse_all(&area).is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_parse_or_fail_and_encode_back(
            area in prop::collection::vec(any::<u8>(), 0..256),
            magic in prop::sample::select(vec![BACKING_FORMAT, FEATURE_NAMES, BITMAPS, DATA_FILE, ENCRYPTION, 7]),
            length in 0u32..64,
        ) {
            let mut all = magic.to_be_bytes().to_vec();
            all.extend(length.to_be_bytes());
            all.extend(&area);
            for area in [&area, &all] {
                if let Ok(extensions) = Extension::parse_all(area) {
                    prop_assert_eq!(Extension::parse_all(&encoded(&extensions)), Ok(extensions));
                }
            }
        }
    }
}
