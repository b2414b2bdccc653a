//! A guest that knows the image's file, and writes data that imitates the engine's own.

use crate::value::{Given, Sort, Value};
use isobath_qcow2::embedded::{LEAD, Mapping, ZoneId, embed};
use isobath_qcow2::journal::{Journal, Zones};
use isobath_qcow2::{ClusterIndex, Crc32c, Header, Lsn};
use rand::RngExt;
use rand::rngs::SmallRng;
use std::ops::Range;

/// What such a guest knows.
#[derive(Debug, Default)]
pub struct Spy {
    /// The id of every zone that was ever listed, the newest last, and the LSN from which records counted.
    zones: Vec<(ZoneId, u64)>,
}

/// The zones that an image's journal lists.
fn zones(image: &[u8]) -> Option<Zones> {
    let header = Header::parse(image).ok()?;
    let extension = header.journal()?;
    let start = extension.area_offset.get() as usize;
    let area = image.get(start..start + extension.area_length as usize)?;
    Journal::scan(area, extension).ok()?.zones()
}

impl Spy {
    /// Reads the image's file.
    fn look(&mut self, image: &[u8]) {
        let Some(found) = zones(image) else { return };
        for zone in found.zones {
            self.zones.retain(|(id, _)| *id != zone.id);
            self.zones.push((zone.id, found.checkpoint_lsn.get()));
        }
    }

    /// Bytes of a sort for a range of the disk with clusters of `cluster_size` bytes; `None` if nothing is known that
    /// could be mistaken for the engine's.
    pub fn bytes(
        &mut self,
        sort: Sort,
        image: &[u8],
        range: &Range<u64>,
        number: u32,
        cluster_size: u64,
        rng: &mut SmallRng,
    ) -> Option<Given> {
        self.look(image);
        let start = range.start / cluster_size * cluster_size;
        let end = range.end.next_multiple_of(cluster_size);
        let mut bytes = Vec::with_capacity((end - start) as usize);
        for cluster in start / cluster_size..end / cluster_size {
            bytes.extend(match sort {
                Sort::Hostile => self.record(cluster, number, cluster_size, rng)?,
                _ => stolen(cluster, image, cluster_size, rng)?,
            });
        }
        let part = (range.start - start) as usize..(range.end - start) as usize;
        let bytes = bytes.get(part)?.into();
        Some(Given { sort, number, start: range.start, bytes })
    }

    /// A cluster with a record that names another cluster.
    fn record(
        &self,
        cluster: u64,
        number: u32,
        cluster_size: u64,
        rng: &mut SmallRng,
    ) -> Option<Vec<u8>> {
        let newest = self.zones.len().checked_sub(1)?;
        let place = if rng.random_bool(0.7) { newest } else { rng.random_range(0..=newest) };
        let (id, checkpoint) = self.zones[place];
        let start = cluster * cluster_size;
        let sort = [Sort::Plain, Sort::Text, Sort::Block, Sort::Mixed][rng.random_range(0..4)];
        let mut bytes = Value::Pattern(sort, number).bytes(start..start + cluster_size);
        if rng.random_bool(0.2) {
            bytes.fill(0);
        }
        let other = if rng.random_bool(0.2) { cluster } else { rng.random_range(0..cluster + 16) };
        let lsn = match rng.random_range(0..4) {
            0 => u64::MAX - rng.random_range(0..2),
            1 => checkpoint.saturating_add(1 << 40),
            _ => checkpoint.saturating_add(rng.random_range(0..64)),
        };
        let durable = if rng.random() { lsn } else { checkpoint.min(lsn) };
        let rest = match rng.random_range(0..3) {
            0 => None,
            1 => Some(rng.random()),
            _ => Some(Crc32c::of(bytes.get(LEAD..)?)),
        };
        let (lsn, durable_lsn) = (Lsn::new(lsn), Lsn::new(durable));
        let mapping = Mapping { cluster: ClusterIndex::new(other), lsn, durable_lsn, rest };
        embed(&mut bytes, &mapping, id)?;
        Some(bytes)
    }
}

/// A cluster of the image's file, padded at the end of the file, for this cluster of the disk. The header often goes to
/// where a raw image below would have one.
fn stolen(cluster: u64, image: &[u8], cluster_size: u64, rng: &mut SmallRng) -> Option<Vec<u8>> {
    let size = cluster_size as usize;
    let count = image.len().div_ceil(size).max(1);
    let start = if cluster == 0 && rng.random() { 0 } else { rng.random_range(0..count) * size };
    let mut bytes = image.get(start..(start + size).min(image.len()))?.to_vec();
    bytes.resize(size, 0);
    Some(bytes)
}
