//! Records: the changes of one commit.

use super::extension::MAX_AREA;
use super::operation::{Item, Items, Kind, Operation};
use super::{BLOCK, Zones, irrecoverable};
use crate::bytes;
use crate::checksum::Crc32c;
use crate::error::FormatError;
use crate::lsn::Lsn;

const MAGIC: [u8; 4] = *b"IBJR";
const CRC: usize = 4;
/// First byte that the checksum covers.
pub(super) const SUMMED: usize = 8;
/// Bytes of a record before its operations.
pub const HEAD_BYTES: usize = 64;

/// A record: operations that take effect together or not at all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// Its LSN.
    pub lsn: Lsn,
    /// The LSN of the previous record, or the one before the journal's first; below `lsn`.
    pub previous: Lsn,
    /// The LSN from which records' metadata must be replayed, as of this one; at most `lsn`.
    pub tail: Lsn,
    /// The LSN from which records' data must be replayed, as of this one; at most `lsn`. Data of records before `tail`
    /// is not replayed in any case.
    pub data_from: Lsn,
    /// The operations, in order.
    pub operations: Vec<Operation>,
}

impl Record {
    /// The length of the result of [`encode`](Self::encode): whole [blocks](BLOCK).
    pub fn encoded_length(&self) -> usize {
        self.length().next_multiple_of(BLOCK)
    }

    fn length(&self) -> usize {
        HEAD_BYTES + self.operations.iter().map(Operation::encoded_length).sum::<usize>()
    }

    /// The record's blocks in the journal `id`, padded with zeroes.
    ///
    /// # Errors
    /// If the record is one that [`parse`](Self::parse) would refuse, or longer than [`MAX_AREA`].
    pub fn encode(&self, id: u64) -> Result<Vec<u8>, FormatError> {
        let length = self.length();
        if length as u64 > MAX_AREA {
            return Err(FormatError::too_large(
                "journal record's length",
                length,
                format!("must not exceed {MAX_AREA} bytes"),
            ));
        }
        for operation in &self.operations {
            if let Operation::Zones(zones) = operation {
                zones.check().map_err(not_written)?;
            }
        }
        let Some(gap) = self
            .lsn
            .get()
            .checked_sub(1)
            .and_then(|before| before.checked_sub(self.previous.get()))
        else {
            return Err(not_written(previous_not_below(self.lsn, self.previous)));
        };
        let mut out = Vec::with_capacity(self.encoded_length());
        out.extend(MAGIC);
        out.extend([0; 4]);
        for field in [id, self.lsn.get(), self.tail.get(), self.data_from.get()] {
            out.extend(field.to_be_bytes());
        }
        out.extend((length as u32).to_be_bytes());
        out.extend((self.operations.len() as u32).to_be_bytes());
        out.extend(gap.to_be_bytes());
        out.resize(HEAD_BYTES, 0);
        for operation in &self.operations {
            operation.write(&mut out);
        }
        let crc = Crc32c::of(out.get(SUMMED..).unwrap_or_default());
        out.resize(self.encoded_length(), 0);
        let _ = bytes::put(&mut out, CRC, &crc.to_be_bytes());
        View::at(&out, id).and_then(|view| view.check()).map_err(not_written)?;
        Ok(out)
    }

    /// The record of the journal `id` at the start of `bytes`; anything after it is ignored.
    ///
    /// # Errors
    /// If there is none, it is truncated, or its checksum, a field or an operation is not valid.
    pub fn parse(bytes: &[u8], id: u64) -> Result<Self, FormatError> {
        let view = View::at(bytes, id)?;
        let crc = bytes.get(SUMMED..view.length).map(Crc32c::of);
        if crc != Some(view.crc) {
            return Err(irrecoverable(
                "journal record's checksum",
                format_args!("{:#010x}", view.crc),
                format_args!("the checksum of its bytes is {:#010x}", crc.unwrap_or_default()),
            ));
        }
        view.check()?;
        let items: Result<Vec<_>, _> = view.items().collect();
        Ok(Self {
            lsn: view.lsn,
            previous: view.previous(),
            tail: view.tail,
            data_from: view.data_from,
            operations: items?.into_iter().map(Item::to_operation).collect::<Result<_, _>>()?,
        })
    }
}

fn previous_not_below(lsn: Lsn, previous: Lsn) -> FormatError {
    irrecoverable(
        "journal record's previous",
        previous,
        format_args!("must be below the record's number, {lsn}"),
    )
}

#[allow(clippy::needless_pass_by_value, reason = "for map_err")]
fn not_written(error: FormatError) -> FormatError {
    FormatError::invalid(
        error.field().to_owned(),
        error.value(),
        "a record with it could not be replayed, so it is not written",
    )
}

/// A record in an area's bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct View<'a> {
    pub(super) crc: u32,
    pub(super) lsn: Lsn,
    /// The number of LSNs between that of the previous record and its own.
    gap: u64,
    pub(super) tail: Lsn,
    pub(super) data_from: Lsn,
    /// Bytes of the record, without padding.
    pub(super) length: usize,
    count: u32,
    reserved: &'a [u8],
    operations: &'a [u8],
}

impl<'a> View<'a> {
    /// Whether a record of the journal `id` may start here; cheap.
    pub(super) fn may_start(bytes: &[u8], id: u64) -> bool {
        bytes.starts_with(&MAGIC) && bytes::be64(bytes, 8) == Some(id)
    }

    /// The record at the start of `bytes`, within which it ends. Its checksum and everything that
    /// [`check`](Self::check) verifies have not been checked yet.
    pub(super) fn at(bytes: &'a [u8], id: u64) -> Result<Self, FormatError> {
        let Some((head, _)) = bytes.split_at_checked(HEAD_BYTES) else {
            return Err(irrecoverable(
                "journal record",
                format_args!("{} bytes long", bytes.len()),
                format_args!("it needs {HEAD_BYTES}"),
            ));
        };
        if !Self::may_start(head, id) {
            return Err(irrecoverable(
                "journal record's start",
                format_args!("{:02x?}", head.get(..16).unwrap_or(head)),
                format_args!(
                    "a record of this journal starts with \"IBJR\" and has the id {id:#x}"
                ),
            ));
        }
        let field = |at| bytes::be64(head, at).unwrap_or_default();
        let length = bytes::be32(head, 40).unwrap_or_default() as usize;
        let Some(operations) = bytes.get(HEAD_BYTES..length) else {
            return Err(irrecoverable(
                "journal record's length",
                length,
                format_args!("must be from {HEAD_BYTES} to {}", bytes.len()),
            ));
        };
        Ok(Self {
            crc: bytes::be32(head, CRC).unwrap_or_default(),
            lsn: Lsn::new(field(16)),
            gap: field(48),
            tail: Lsn::new(field(24)),
            data_from: Lsn::new(field(32)),
            length,
            count: bytes::be32(head, 44).unwrap_or_default(),
            reserved: head.get(56..).unwrap_or_default(),
            operations,
        })
    }

    /// The number of the record before.
    pub(super) fn previous(&self) -> Lsn {
        Lsn::new(self.lsn.before().get().saturating_sub(self.gap))
    }

    /// Checks every field and operation.
    pub(super) fn check(&self) -> Result<(), FormatError> {
        for (field, value) in [("tail", self.tail), ("data_from", self.data_from)] {
            if value > self.lsn {
                return Err(irrecoverable(
                    format!("journal record's {field}"),
                    value,
                    format_args!("must not exceed the record's number, {}", self.lsn),
                ));
            }
        }
        if self.gap >= self.lsn.get() {
            return Err(irrecoverable(
                "journal record's gap",
                self.gap,
                format_args!("must be below the record's number, {}", self.lsn),
            ));
        }
        if self.reserved.iter().any(|byte| *byte != 0) {
            return Err(irrecoverable(
                "journal record's reserved bytes",
                format_args!("{:02x?}", self.reserved),
                "must be 0",
            ));
        }
        let (mut found, mut tables) = (0u32, 0u32);
        for item in self.items() {
            if let Kind::Zones(payload) = item?.kind {
                Zones::parse(payload)?;
                tables = tables.saturating_add(1);
            }
            found = found.saturating_add(1);
        }
        if tables > 1 {
            return Err(irrecoverable(
                "journal record's zones",
                format_args!("listed {tables} times"),
                "they must be listed at most once",
            ));
        }
        if found != self.count {
            return Err(irrecoverable(
                "journal record's operations",
                self.count,
                format_args!("its bytes hold {found}"),
            ));
        }
        Ok(())
    }

    /// The operations; the last is an error if one is not valid.
    pub(super) fn items(&self) -> Items<'a> {
        Items::new(self.operations)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::embedded::ZoneId;
    use crate::error::FormatErrorKind;
    use crate::journal::Zone;
    use crate::offset::HostOffset;
    use proptest::prelude::*;
    use proptest::sample::Index;

    const ID: u64 = 0xfeed_beef_0bad_cafe;

    fn operation(offsets: u64) -> impl Strategy<Value = Operation> {
        let bytes = prop::collection::vec(any::<u8>(), 0..40);
        (0..5, 0..offsets, bytes, 0u32..40, any::<u32>()).prop_map(
            |(kind, offset, bytes, length, crc)| {
                let offset = HostOffset::new(offset);
                match kind {
                    0 => Operation::Patch { offset, bytes },
                    1 => Operation::Zero { offset, length },
                    2 => Operation::Data { offset, bytes },
                    3 => Operation::Checksum { offset, length, crc },
                    _ => Operation::Revoke { offset, length },
                }
            },
        )
    }

    /// So many of them, with at most one list of zones.
    pub(in crate::journal) fn operations(
        offsets: u64,
        count: std::ops::Range<usize>,
    ) -> impl Strategy<Value = Vec<Operation>> {
        let zones = prop::option::of((any_zones(), any::<Index>()));
        (prop::collection::vec(operation(offsets), count), zones).prop_map(
            |(mut operations, zones)| {
                if let Some((zones, at)) = zones {
                    operations.insert(at.index(operations.len() + 1), Operation::Zones(zones));
                }
                operations
            },
        )
    }

    fn any_zones() -> impl Strategy<Value = Zones> {
        let zone = (1u32..40, 0u64..1 << 20, any::<[u8; 16]>(), any::<u64>());
        let zones = prop::collection::vec(zone, 0..6).prop_map(|zones| {
            let mut start = 0;
            let zones = zones.into_iter().map(|(clusters, gap, id, bits)| {
                let offset = HostOffset::new(start + gap);
                start += gap + u64::from(clusters) * 512;
                let bits = bits & ((1 << clusters) - 1);
                let plain = bits.to_le_bytes()[..clusters.div_ceil(8) as usize].to_vec();
                Zone { start: offset, clusters, id: ZoneId(id), plain }
            });
            zones.collect()
        });
        let zones = Strategy::prop_shuffle(zones);
        (any::<u64>(), any::<u64>(), zones).prop_map(|(checkpoint, durable, zones)| Zones {
            checkpoint_lsn: Lsn::new(checkpoint),
            durable_lsn: Lsn::new(durable),
            zones,
        })
    }

    fn sample() -> Record {
        let offset = HostOffset::new(0x5_0000);
        Record {
            lsn: Lsn::new(9),
            previous: Lsn::new(7),
            tail: Lsn::new(4),
            data_from: Lsn::new(6),
            operations: vec![
                Operation::Patch { offset, bytes: b"123456789".to_vec() },
                Operation::Zero { offset, length: u32::MAX },
                Operation::Data { offset, bytes: vec![7; 4096] },
                Operation::Checksum { offset, length: 512, crc: 0x0102_0304 },
                Operation::Revoke { offset, length: 65536 },
            ],
        }
    }

    /// The sample's blocks with a change, and its sum made right again.
    fn changed(change: impl FnOnce(&mut Vec<u8>)) -> FormatError {
        let mut blocks = sample().encode(ID).unwrap();
        change(&mut blocks);
        let length = (bytes::be32(&blocks, 40).unwrap() as usize).clamp(SUMMED, blocks.len());
        let crc = Crc32c::of(&blocks[SUMMED..length]).to_be_bytes();
        blocks[4..8].copy_from_slice(&crc);
        Record::parse(&blocks, ID).unwrap_err()
    }

    #[test]
    fn the_layout_is_as_specified() {
        let blocks = sample().encode(ID).unwrap();
        assert_eq!(blocks.len(), 2 * BLOCK);
        assert_eq!(blocks.len(), sample().encoded_length());
        let length = 64 + 16 + 16 + 16 + 16 + 4096 + 16 + 8 + 16;
        assert_eq!(&blocks[..4], b"IBJR");
        assert_eq!(blocks[4..8], Crc32c::of(&blocks[8..length]).to_be_bytes());
        assert_eq!(blocks[8..16], ID.to_be_bytes());
        assert_eq!(blocks[16..24], 9u64.to_be_bytes());
        assert_eq!(blocks[24..32], 4u64.to_be_bytes());
        assert_eq!(blocks[32..40], 6u64.to_be_bytes());
        assert_eq!(blocks[40..44], (length as u32).to_be_bytes());
        assert_eq!(blocks[44..48], 5u32.to_be_bytes());
        assert_eq!(blocks[48..56], 1u64.to_be_bytes());
        assert_eq!(blocks[56..64], [0; 8]);
        let patch = [&[1, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 5, 0, 0][..], b"123456789", &[0; 7]];
        assert_eq!(blocks[64..96], patch.concat());
        let cover = [4, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 5, 0, 0, 1, 2, 3, 4, 0, 0, 0, 0];
        assert_eq!(blocks[length - 40..length - 16], cover);
        assert!(blocks[length..].iter().all(|byte| *byte == 0));
        assert_eq!(Record::parse(&blocks[..length], ID), Ok(sample()));
    }

    #[test]
    fn what_is_not_valid_is_refused_by_name() {
        let fields = [
            ("start", changed(|b| b[0] = b'X')),
            ("start", changed(|b| b[8] ^= 1)),
            ("tail", changed(|b| b[31] = 10)),
            ("data_from", changed(|b| b[39] = 10)),
            ("length", changed(|b| b[40] = 1)),
            ("length", changed(|b| b[40..44].copy_from_slice(&63u32.to_be_bytes()))),
            ("operations", changed(|b| b[47] = 4)),
            ("operations", changed(|b| b[47] = 6)),
            ("gap", changed(|b| b[55] = 9)),
            ("reserved bytes", changed(|b| b[63] = 1)),
            ("operation", changed(|b| b[64 + 1] = 1)),
            ("operation", changed(|b| b[64 + 31] = 1)),
            ("operation", changed(|b| b[64 + 4] = 1)),
            ("operation", changed(|b| b[64 + 8] = 1)),
            ("operation", changed(|b| b[64 + 8..64 + 16].fill(0xff))),
            // Garbage behind the last one.
            ("operation", changed(|b| b[43] += 8)),
        ];
        for (field, error) in fields {
            assert!(error.field().ends_with(field), "{field}: {error}");
            assert!(error.to_string().contains("restore it from a backup"), "{error}");
        }
        for kind in [0, 7, 255] {
            let error = changed(|b| b[64] = kind);
            assert_eq!(error.kind(), FormatErrorKind::Unsupported, "{error}");
        }
        let mut blocks = sample().encode(ID).unwrap();
        blocks[5] ^= 1;
        assert!(Record::parse(&blocks, ID).unwrap_err().field().ends_with("checksum"));
        assert!(Record::parse(&blocks[..63], ID).is_err());
        assert!(Record::parse(&[], ID).is_err());
    }

    #[test]
    fn what_could_not_be_read_is_not_written() {
        let end = HostOffset::new((1 << 56) - 1);
        for operations in [
            vec![Operation::Zero { offset: end, length: 2 }],
            vec![Operation::Patch { offset: HostOffset::new(0), bytes: vec![0; 64 << 20] }],
        ] {
            assert!(Record { operations, ..sample() }.encode(ID).is_err());
        }
        assert!(Record { tail: Lsn::new(10), ..sample() }.encode(ID).is_err());
        assert!(Record { data_from: Lsn::new(10), ..sample() }.encode(ID).is_err());
        assert!(Record { previous: Lsn::new(9), ..sample() }.encode(ID).is_err());
        assert!(Record::default().encode(ID).is_err());
        let last = Record {
            lsn: Lsn::MAX,
            operations: vec![Operation::Zero { offset: end, length: 1 }],
            ..Record::default()
        };
        assert_eq!(Record::parse(&last.encode(0).unwrap(), 0), Ok(last));
    }

    proptest! {
        #[test]
        fn a_record_comes_back(
            operations in operations(1 << 40, 0..20),
            id: u64, lsn in 1u64.., previous: u64, tail: u64, data_from: u64,
        ) {
            let [tail, data_from] = [tail, data_from].map(|field| Lsn::new(field.min(lsn)));
            let (lsn, previous) = (Lsn::new(lsn), Lsn::new(previous.min(lsn - 1)));
            let record = Record { lsn, previous, tail, data_from, operations };
            let blocks = record.encode(id).unwrap();
            prop_assert_eq!(blocks.len() % BLOCK, 0);
            prop_assert_eq!(Record::parse(&blocks, id), Ok(record));
            prop_assert!(Record::parse(&blocks, id ^ 1).is_err());
        }

        #[test]
        fn any_change_of_a_byte_is_noticed(at in 0usize..4248, by in 1u8..) {
            let mut blocks = sample().encode(ID).unwrap();
            blocks[at] ^= by;
            prop_assert!(Record::parse(&blocks, ID).is_err());
        }
    }
}
