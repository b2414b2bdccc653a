//! Zones: where data clusters may hold their own mappings, as of a record.

use super::irrecoverable;
use crate::bytes;
use crate::embedded::ZoneId;
use crate::error::FormatError;
use crate::geometry::HOST_OFFSET_LIMIT;
use crate::offset::HostOffset;

/// Most zones that a record may list.
pub const MAX_ZONES: usize = 4096;
/// Most clusters of a zone.
pub const MAX_ZONE_CLUSTERS: u32 = 1 << 16;

/// Bytes before the zones.
const FLOOR: usize = 8;
/// Bytes of a zone before its bits.
const ZONE: usize = 28;
/// Bytes of the smallest cluster.
const LEAST_CLUSTER: u64 = 512;

/// The zones of an image, of which none overlaps another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Zones {
    /// Records with lower serials are in the tables.
    pub floor: u64,
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
    /// What its records begin with.
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

    /// Checks what can be seen of it alone.
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
                "it must have a bit for each, and no other that is set",
            ));
        }
        Ok(())
    }

    /// Where it ends if its clusters are the smallest.
    fn least_end(&self) -> u64 {
        self.start.get().saturating_add(u64::from(self.clusters) * LEAST_CLUSTER)
    }
}

impl Zones {
    /// Bytes of the operation's payload.
    pub(super) fn encoded_length(&self) -> usize {
        FLOOR + self.zones.iter().map(|zone| ZONE + zone.plain.len()).sum::<usize>()
    }

    /// The operation's payload.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.encoded_length());
        out.extend(self.floor.to_be_bytes());
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
                format_args!("the next field ends {needed} bytes on"),
            )
        };
        let Some((floor, mut rest)) = payload.split_first_chunk() else {
            return Err(truncated(payload.len(), FLOOR));
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
        let zones = Self { floor: u64::from_be_bytes(*floor), zones };
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
