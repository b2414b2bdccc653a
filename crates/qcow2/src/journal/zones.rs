//! Zones: where data clusters may hold their own mappings, as of a record.

use super::irrecoverable;
use crate::bytes;
use crate::embedded::ZoneId;
use crate::error::FormatError;
use crate::geometry::HOST_OFFSET_LIMIT;
use crate::lsn::Lsn;
use crate::offset::HostOffset;

/// The most zones that a record may list.
pub const MAX_ZONES: usize = 4096;
/// The most clusters in a zone.
pub const MAX_ZONE_CLUSTERS: u32 = 1 << 16;

/// Bytes before the zones.
const HEAD: usize = 16;
/// Bytes of a zone before its bits.
const ZONE: usize = 28;
/// Bytes of the smallest cluster.
const LEAST_CLUSTER: u64 = 512;

/// The zones of an image, of which none overlaps another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Zones {
    /// The mappings of embedded records with lower LSNs are in the tables.
    pub checkpoint_lsn: Lsn,
    /// Embedded records with lower LSNs were durable before this list was written.
    pub durable_lsn: Lsn,
    /// The zones, in any order; at most [`MAX_ZONES`].
    pub zones: Vec<Zone>,
}

/// A run of host clusters, each of which begins with an [embedded record](crate::embedded) unless it
/// is plain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Zone {
    /// Its first byte.
    pub start: HostOffset,
    /// Its clusters: 1 to [`MAX_ZONE_CLUSTERS`].
    pub clusters: u32,
    /// The id that its embedded records begin with.
    pub id: ZoneId,
    /// A bit for each cluster, from the lowest of each byte on: its lead block holds no record,
    /// whatever its bytes are. Spare bits are 0.
    pub plain: Vec<u8>,
}

impl Zone {
    /// Whether the lead block of cluster `n` holds no record; true of one that is not in the zone.
    pub fn is_plain(&self, n: u32) -> bool {
        let byte = self.plain.get((n / 8) as usize).filter(|_| n < self.clusters);
        byte.is_none_or(|byte| byte >> (n % 8) & 1 == 1)
    }

    /// Checks the zone by itself.
    fn check(&self) -> Result<(), FormatError> {
        if !(1..=MAX_ZONE_CLUSTERS).contains(&self.clusters) {
            return Err(irrecoverable(
                "journal record's zone",
                format_args!("of {} clusters", self.clusters),
                format_args!("it must have 1 to {MAX_ZONE_CLUSTERS}"),
            ));
        }
        if self.least_end() > HOST_OFFSET_LIMIT {
            return Err(irrecoverable(
                "journal record's zone",
                format_args!("of {} clusters at {}", self.clusters, self.start),
                "it must end below 2^56",
            ));
        }
        let spare = (8 - self.clusters % 8) % 8;
        let last = self.plain.last().copied().unwrap_or_default();
        if self.plain.len() != bit_bytes(self.clusters) || last.leading_zeros() < spare {
            return Err(irrecoverable(
                "journal record's zone",
                format_args!(
                    "of {} clusters with {} bytes of bits, the last {last:#04x}",
                    self.clusters,
                    self.plain.len()
                ),
                "it must have one bit per cluster, and no other bit set",
            ));
        }
        Ok(())
    }

    /// Its end if its clusters are as small as possible.
    fn least_end(&self) -> u64 {
        self.start.get().saturating_add(u64::from(self.clusters) * LEAST_CLUSTER)
    }
}

impl Zones {
    /// Bytes of the operation's payload.
    pub(super) fn encoded_length(&self) -> usize {
        HEAD + self.zones.iter().map(|zone| ZONE + zone.plain.len()).sum::<usize>()
    }

    /// The operation's payload.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.encoded_length());
        out.extend(self.checkpoint_lsn.get().to_be_bytes());
        out.extend(self.durable_lsn.get().to_be_bytes());
        for zone in &self.zones {
            out.extend(zone.start.get().to_be_bytes());
            out.extend(zone.clusters.to_be_bytes());
            out.extend(zone.id.0);
            out.extend(&zone.plain);
        }
        out
    }

    /// The zones in an operation's payload.
    pub(super) fn parse(payload: &[u8]) -> Result<Self, FormatError> {
        let truncated = |found: usize, needed: usize| {
            irrecoverable(
                "journal record's zones",
                format_args!("{found} bytes long"),
                format_args!("the next field ends at byte {needed}"),
            )
        };
        let (Some(checkpoint), Some(durable), Some(mut rest)) =
            (bytes::be64(payload, 0), bytes::be64(payload, 8), payload.get(HEAD..))
        else {
            return Err(truncated(payload.len(), HEAD));
        };
        let mut zones = Vec::new();
        while !rest.is_empty() {
            if zones.len() == MAX_ZONES {
                return Err(too_many("more"));
            }
            let (Some(start), Some(clusters), Some(id)) =
                (bytes::be64(rest, 0), bytes::be32(rest, 8), bytes::array(rest, 12))
            else {
                return Err(truncated(rest.len(), ZONE));
            };
            let end = ZONE + bit_bytes(clusters);
            let Some(plain) = rest.get(ZONE..end) else {
                return Err(truncated(rest.len(), end));
            };
            let (start, id) = (HostOffset::new(start), ZoneId(id));
            zones.push(Zone { start, clusters, id, plain: plain.to_vec() });
            rest = rest.get(end..).unwrap_or_default();
        }
        let (checkpoint_lsn, durable_lsn) = (Lsn::new(checkpoint), Lsn::new(durable));
        let zones = Self { checkpoint_lsn, durable_lsn, zones };
        zones.check()?;
        Ok(zones)
    }

    /// Checks every field.
    pub(super) fn check(&self) -> Result<(), FormatError> {
        if self.zones.len() > MAX_ZONES {
            return Err(too_many(self.zones.len()));
        }
        self.zones.iter().try_for_each(Zone::check)?;
        let mut sorted: Vec<&Zone> = self.zones.iter().collect();
        sorted.sort_unstable_by_key(|zone| zone.start);
        let overlap = sorted.array_windows().find(|[a, b]| b.start.get() < a.least_end());
        if let Some([a, b]) = overlap {
            return Err(irrecoverable(
                "journal record's zone",
                format_args!("of {} clusters at {}", a.clusters, a.start),
                format_args!("it overlaps the one at {}", b.start),
            ));
        }
        Ok(())
    }
}

fn too_many(found: impl std::fmt::Display) -> FormatError {
    irrecoverable(
        "journal record's zones",
        format_args!("{found}"),
        format_args!("there must be at most {MAX_ZONES}"),
    )
}

/// Bytes of a bit for each cluster.
fn bit_bytes(clusters: u32) -> usize {
    clusters.div_ceil(8) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::{Journal, JournalExtension, Operation, Record};

    fn zone(start: u64, clusters: u32) -> Zone {
        let plain = vec![0; bit_bytes(clusters)];
        Zone { start: HostOffset::new(start), clusters, id: ZoneId([0xab; 16]), plain }
    }

    fn sample() -> Zones {
        let small = Zone { plain: vec![0x81, 2], ..zone(0x5_0000, 10) };
        Zones {
            checkpoint_lsn: Lsn::new(0x0102),
            durable_lsn: Lsn::new(0x0304),
            zones: vec![small, zone(0x1_0000, 8)],
        }
    }

    fn record(lsn: u64, operations: Vec<Operation>) -> Record {
        let (previous, lsn, first) = (Lsn::new(lsn - 1), Lsn::new(lsn), Lsn::new(1));
        Record { lsn, previous, tail: first, data_from: first, operations }
    }

    #[test]
    fn the_layout_is_as_specified() {
        let operation = Operation::Zones(sample());
        let record = record(1, vec![operation.clone(), Operation::Zones(sample())]);
        assert!(record.encode(1).is_err());
        let record = Record { operations: vec![operation.clone()], ..record };
        let blocks = record.encode(1).unwrap();
        let payload = [
            &[0, 0, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 0, 0, 3, 4][..],
            &[0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 10],
            &[0xab; 16],
            &[0x81, 2],
            &[0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 8],
            &[0xab; 16],
            &[0],
        ]
        .concat();
        assert_eq!(payload.len(), 75);
        assert_eq!(blocks[64..80], [6, 0, 0, 0, 0, 0, 0, 75, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(blocks[80..155], payload);
        assert_eq!(operation.encoded_length(), 16 + 80);
        assert_eq!(blocks[40..44], [0, 0, 0, 64 + 16 + 80]);
        assert_eq!(Record::parse(&blocks, 1), Ok(record));
    }

    #[test]
    fn bits_tell_which_clusters_are_plain() {
        let zone = &sample().zones[0];
        let plain: Vec<u32> = (0..10).filter(|n| zone.is_plain(*n)).collect();
        assert_eq!(plain, [0, 7, 9]);
        assert!(zone.is_plain(10) && zone.is_plain(u32::MAX));
    }

    #[test]
    fn what_cannot_be_is_neither_written_nor_read() {
        let most = MAX_ZONES as u64;
        let many = |count: u64| (0..count).map(|n| zone(n << 16, 1)).collect::<Vec<_>>();
        let cases = [
            (vec![zone(0, 0)], "must have 1 to 65536"),
            (vec![zone(0, 65537)], "must have 1 to 65536"),
            (vec![zone((1 << 56) - 512, 2)], "end below 2^56"),
            (vec![zone(u64::MAX, 1)], "end below 2^56"),
            (vec![Zone { plain: vec![0x81, 4], ..zone(0, 10) }], "no other bit set"),
            (vec![zone(512, 8), zone(1 << 20, 1), zone(512, 1)], "overlaps the one at 0x200"),
            (vec![zone(1024, 1), zone(0, 3)], "overlaps the one at 0x400"),
            (many(most + 1), "at most 4096"),
        ];
        for (zones, reason) in cases {
            let zones = Zones { zones, ..Zones::default() };
            let error = Zones::parse(&zones.encode()).unwrap_err();
            assert!(error.reason().contains(reason), "{error}");
            assert!(error.reason().contains("restore it from a backup"), "{error}");
            let error = record(1, vec![Operation::Zones(zones)]).encode(1).unwrap_err();
            assert!(error.reason().contains("not written"), "{error}");
        }
        // Bits that would be mistaken for another zone.
        let long =
            Zone { plain: [vec![0], zone(1 << 20, 8).plain, vec![0; 28]].concat(), ..zone(0, 8) };
        assert!(
            record(1, vec![Operation::Zones(Zones { zones: vec![long], ..Zones::default() })])
                .encode(1)
                .is_err()
        );
        for zones in [many(most), vec![zone(0, 65536)], vec![zone((1 << 56) - 512, 1)]] {
            let zones = Zones { checkpoint_lsn: Lsn::MAX, durable_lsn: Lsn::new(1), zones };
            assert_eq!(Zones::parse(&zones.encode()), Ok(zones));
        }
        let payload = sample().encode();
        for length in (0..payload.len()).filter(|length| ![16, 46].contains(length)) {
            assert!(Zones::parse(&payload[..length]).is_err(), "{length}");
        }
        assert_eq!(Zones::parse(&payload[..46]).unwrap().zones, sample().zones[..1]);
    }

    #[test]
    fn a_list_with_an_offset_or_twice_is_not_read() {
        let changed = |operations, at: usize, to: u8| {
            let mut blocks = record(1, operations).encode(1).unwrap();
            let length = usize::from(blocks[43]);
            blocks[at] = to;
            let sum = crate::Crc32c::of(&blocks[8..length]).to_be_bytes();
            blocks[4..8].copy_from_slice(&sum);
            Record::parse(&blocks, 1).unwrap_err()
        };
        let empty = Zones::default();
        let error = changed(vec![Operation::Zones(empty.clone())], 64 + 15, 1);
        assert!(error.to_string().contains("zones is at 0x1"), "{error}");
        let patch = Operation::Patch { offset: HostOffset::new(0), bytes: vec![0; 16] };
        let error = changed(vec![Operation::Zones(empty), patch], 64 + 32, 6);
        assert!(error.to_string().contains("listed 2 times"), "{error}");
    }

    #[test]
    fn the_last_record_that_counts_lists_the_zones() {
        let other = Zones {
            checkpoint_lsn: Lsn::new(9),
            durable_lsn: Lsn::new(8),
            zones: vec![zone(0, 1)],
        };
        let zero = Operation::Zero { offset: HostOffset::new(0), length: 1 };
        let extension = JournalExtension {
            area_offset: HostOffset::new(1 << 16),
            area_length: 16 << 10,
            id: 1,
            first_lsn: Lsn::new(1),
        };
        let mut area = vec![0; 16 << 10];
        let put = |area: &mut Vec<u8>, lsn: u64, operations: Vec<Operation>| {
            let blocks = record(lsn, operations).encode(1).unwrap();
            let at = (lsn - 1) as usize * 4096;
            area[at..at + 4096].copy_from_slice(&blocks);
        };
        assert_eq!(Journal::scan(&area, &extension).unwrap().zones(), None);
        put(&mut area, 1, vec![Operation::Zones(sample())]);
        put(&mut area, 2, vec![zero.clone(), Operation::Zones(other.clone())]);
        let mut journal = Journal::scan(&area, &extension).unwrap();
        assert_eq!(journal.zones(), Some(other));
        assert_eq!(journal.replay().unwrap().end().get(), 1);
        journal.drop_last().unwrap();
        assert_eq!(journal.zones(), Some(sample()));
        assert!(journal.replay().unwrap().is_empty());
        // One that lists none has none.
        put(&mut area, 3, vec![zero]);
        assert_eq!(Journal::scan(&area, &extension).unwrap().zones(), None);
    }
}
