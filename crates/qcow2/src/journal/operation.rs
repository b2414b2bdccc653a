//! Operations: a record's changes of ranges of the file.

use super::{Zones, irrecoverable};
use crate::bytes;
use crate::error::FormatError;
use crate::geometry::HOST_OFFSET_LIMIT;
use crate::offset::HostOffset;

/// Bytes before an operation's payload.
const HEAD: usize = 16;
/// Payloads are padded to a multiple of this.
const ALIGN: usize = 8;

const PATCH: u8 = 1;
const ZERO: u8 = 2;
const DATA: u8 = 3;
const CHECKSUM: u8 = 4;
const REVOKE: u8 = 5;
const ZONES: u8 = 6;

/// An operation of a record. Offsets are in the image's file; lengths are in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Metadata becomes these bytes.
    Patch {
        /// Where.
        offset: HostOffset,
        /// The bytes; below 4 GiB.
        bytes: Vec<u8>,
    },
    /// Metadata becomes zeroes.
    Zero {
        /// Where.
        offset: HostOffset,
        /// How many.
        length: u32,
    },
    /// Guest data becomes these bytes.
    Data {
        /// Where.
        offset: HostOffset,
        /// The bytes; below 4 GiB.
        bytes: Vec<u8>,
    },
    /// Data that was written in place at the same time as the record: if the file does not contain it, the record is
    /// not complete. Neither earlier records nor this one are replayed on this range.
    Checksum {
        /// Where.
        offset: HostOffset,
        /// How many bytes.
        length: u32,
        /// Their [CRC-32C](crate::Crc32c).
        crc: u32,
    },
    /// Operations of earlier records on this range are not replayed.
    Revoke {
        /// Where.
        offset: HostOffset,
        /// How many bytes.
        length: u32,
    },
    /// Where data may hold its own mappings, as of this record; at most one in a record. It writes
    /// nothing.
    Zones(Zones),
}

impl Operation {
    /// Bytes that it takes in a record.
    pub fn encoded_length(&self) -> usize {
        let payload = match self {
            Self::Patch { bytes, .. } | Self::Data { bytes, .. } => bytes.len(),
            Self::Checksum { .. } => 4,
            Self::Zones(zones) => zones.encoded_length(),
            Self::Zero { .. } | Self::Revoke { .. } => 0,
        };
        HEAD + payload.next_multiple_of(ALIGN)
    }

    pub(super) fn write(&self, out: &mut Vec<u8>) {
        let length = |bytes: &[u8]| bytes.len() as u32;
        let (crc_bytes, zone_bytes);
        let (kind, offset, length, payload) = match self {
            Self::Patch { offset, bytes } => (PATCH, offset, length(bytes), bytes.as_slice()),
            Self::Zero { offset, length } => (ZERO, offset, *length, &[][..]),
            Self::Data { offset, bytes } => (DATA, offset, length(bytes), bytes.as_slice()),
            Self::Checksum { offset, length, crc } => {
                crc_bytes = crc.to_be_bytes();
                (CHECKSUM, offset, *length, &crc_bytes[..])
            }
            Self::Revoke { offset, length } => (REVOKE, offset, *length, &[][..]),
            Self::Zones(zones) => {
                zone_bytes = zones.encode();
                (ZONES, &HostOffset::new(0), length(&zone_bytes), zone_bytes.as_slice())
            }
        };
        out.extend([kind, 0, 0, 0]);
        out.extend(length.to_be_bytes());
        out.extend(offset.get().to_be_bytes());
        out.extend(payload);
        out.resize(out.len().next_multiple_of(ALIGN), 0);
    }
}

/// An operation in a record's bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Item<'a> {
    pub(super) offset: HostOffset,
    pub(super) length: u32,
    pub(super) kind: Kind<'a>,
}

/// The effect of an [`Item`].
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind<'a> {
    Patch(&'a [u8]),
    Zero,
    Data(&'a [u8]),
    Checksum(u32),
    Revoke,
    /// Not [parsed](Zones::parse) yet.
    Zones(&'a [u8]),
}

impl Item<'_> {
    pub(super) fn to_operation(self) -> Result<Operation, FormatError> {
        let Self { offset, length, kind } = self;
        Ok(match kind {
            Kind::Patch(bytes) => Operation::Patch { offset, bytes: bytes.to_vec() },
            Kind::Zero => Operation::Zero { offset, length },
            Kind::Data(bytes) => Operation::Data { offset, bytes: bytes.to_vec() },
            Kind::Checksum(crc) => Operation::Checksum { offset, length, crc },
            Kind::Revoke => Operation::Revoke { offset, length },
            Kind::Zones(payload) => Operation::Zones(Zones::parse(payload)?),
        })
    }
}

/// The operations in the bytes after a record's header; ends after the first invalid one.
#[derive(Clone, Debug)]
pub(super) struct Items<'a> {
    rest: &'a [u8],
}

impl<'a> Items<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    fn parse(&mut self) -> Result<Item<'a>, FormatError> {
        let truncated = |found: usize, needed: usize| {
            irrecoverable(
                "journal record's operation",
                format_args!("{found} bytes long"),
                format_args!("it needs {needed}"),
            )
        };
        let Some((head, rest)) = self.rest.split_at_checked(HEAD) else {
            return Err(truncated(self.rest.len(), HEAD));
        };
        let (Some([kind, reserved @ ..]), Some(length), Some(offset)) =
            (bytes::array::<4>(head, 0), bytes::be32(head, 4), bytes::be64(head, 8))
        else {
            return Err(truncated(head.len(), HEAD));
        };
        let payload_length = match kind {
            PATCH | DATA | ZONES => length as usize,
            CHECKSUM => 4,
            _ => 0,
        };
        let padded = payload_length.next_multiple_of(ALIGN);
        let Some((payload, rest)) = rest.split_at_checked(padded) else {
            return Err(truncated(rest.len(), padded));
        };
        let (payload, padding) = payload.split_at(payload_length);
        let end = offset.checked_add(u64::from(length)).filter(|end| *end <= HOST_OFFSET_LIMIT);
        if end.is_none() {
            return Err(irrecoverable(
                "journal record's operation",
                format_args!("on {length} bytes at {}", HostOffset::new(offset)),
                "it must end below 2^56",
            ));
        }
        if reserved != [0; 3] || padding.iter().any(|byte| *byte != 0) {
            return Err(irrecoverable(
                "journal record's operation",
                format_args!("of kind {kind} with {reserved:02x?} and {padding:02x?}"),
                "reserved bytes must be 0",
            ));
        }
        let kind = match kind {
            PATCH => Kind::Patch(payload),
            ZERO => Kind::Zero,
            DATA => Kind::Data(payload),
            CHECKSUM => Kind::Checksum(bytes::be32(payload, 0).unwrap_or_default()),
            REVOKE => Kind::Revoke,
            ZONES if offset != 0 => {
                return Err(irrecoverable(
                    "journal record's zones",
                    format_args!("at {}", HostOffset::new(offset)),
                    "their offset must be 0",
                ));
            }
            ZONES => Kind::Zones(payload),
            other => {
                return Err(FormatError::unsupported(
                    "journal record's operation",
                    format_args!("of kind {other}"),
                    "only 1 to 6 are known; recover the image with the version of Isobath that \
                     wrote it",
                ));
            }
        };
        self.rest = rest;
        Ok(Item { offset: HostOffset::new(offset), length, kind })
    }
}

impl<'a> Iterator for Items<'a> {
    type Item = Result<Item<'a>, FormatError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let item = self.parse();
        if item.is_err() {
            self.rest = &[];
        }
        Some(item)
    }
}
