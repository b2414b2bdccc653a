//! The device as the kernel sees it: its size, its blocks and what it can do.

use crate::keeper::wire::{BASIC, Basic, DISCARD, Discard, Parameters, SECTOR, attribute};
use zerocopy::IntoBytes;

/// The most bytes of a request that has data.
pub(super) const MAX_BYTES: u32 = 1 << 20;
/// The logical block size, which all requests are multiples of.
const LOGICAL: u32 = 512;
/// The physical block size told to the kernel.
const PHYSICAL: u32 = 4096;

/// The disk cannot be a block device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GeometryError {
    /// Its size is no multiple of the block size.
    #[error(
        "the disk has {0} bytes, which is no multiple of {LOGICAL}, the block size of the device; \
         'isobath resize' makes it longer"
    )]
    Size(u64),
    /// It has no blocks.
    #[error("the disk is empty; a block device has at least one block")]
    Empty,
}

/// The size of a device, and whether it may be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Geometry {
    /// Bytes.
    pub(super) size: u64,
    pub(super) read_only: bool,
    /// The optimal alignment of requests in bytes: a power of two.
    unit: u32,
}

impl Geometry {
    /// Of a disk of `size` bytes, whose requests are best aligned to `preferred` bytes.
    pub(super) fn new(size: u64, preferred: u32, read_only: bool) -> Result<Self, GeometryError> {
        if size == 0 {
            return Err(GeometryError::Empty);
        }
        if !size.is_multiple_of(u64::from(LOGICAL)) {
            return Err(GeometryError::Size(size));
        }
        let unit = 1 << preferred.max(LOGICAL).ilog2();
        Ok(Self { size, read_only, unit })
    }

    pub(super) fn parameters(&self) -> Parameters {
        let shift = |bytes: u32| bytes.ilog2() as u8;
        let access = if self.read_only { attribute::READ_ONLY } else { 0 };
        let basic = Basic {
            attributes: access | attribute::VOLATILE_CACHE | attribute::FUA,
            logical_shift: shift(LOGICAL),
            physical_shift: shift(PHYSICAL),
            optimal_shift: shift(self.unit.max(PHYSICAL)),
            minimal_shift: shift(PHYSICAL),
            max_sectors: MAX_BYTES / SECTOR as u32,
            chunk_sectors: 0,
            sectors: self.size / SECTOR,
            boundary: 0,
        };
        // As many whole units as 32 bits can count bytes of.
        let most = u32::MAX / self.unit * (self.unit / SECTOR as u32);
        let discard = Discard {
            alignment: 0,
            granularity: self.unit,
            max_sectors: most,
            max_zero_sectors: most,
            max_ranges: 1,
            reserved: 0,
        };
        let (types, discard) =
            if self.read_only { (BASIC, Discard::default()) } else { (BASIC | DISCARD, discard) };
        let mut parameters = Parameters { length: 0, types, basic, discard, padding: 0 };
        parameters.length = parameters.as_bytes().len() as u32;
        parameters
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_of_whole_blocks_is_a_device() {
        assert_eq!(Geometry::new(0, 65536, false), Err(GeometryError::Empty));
        assert_eq!(Geometry::new(1025, 65536, false), Err(GeometryError::Size(1025)));
        let text = GeometryError::Size(1025).to_string();
        assert!(text.contains("1025 bytes, which is no multiple of 512"), "{text}");
        let geometry = Geometry::new(1 << 30, 65536, false).unwrap();
        let parameters = geometry.parameters();
        assert_eq!((parameters.length, parameters.types), (64, 3));
        let Basic { attributes, logical_shift, physical_shift, .. } = parameters.basic;
        assert_eq!((attributes, logical_shift, physical_shift), (0b1100, 9, 12));
        let Basic { optimal_shift, minimal_shift, max_sectors, sectors, .. } = parameters.basic;
        assert_eq!((optimal_shift, minimal_shift, max_sectors, sectors), (16, 12, 2048, 1 << 21));
        let Discard { granularity, max_sectors, max_zero_sectors, max_ranges, .. } =
            parameters.discard;
        assert_eq!((granularity, max_ranges), (65536, 1));
        assert_eq!((max_sectors, max_zero_sectors), (8_388_480, 8_388_480));
        assert!(u32::try_from(u64::from(max_sectors) * SECTOR).is_ok());
    }

    #[test]
    fn a_read_only_device_discards_nothing_and_small_clusters_are_no_small_blocks() {
        let parameters = Geometry::new(512, 512, true).unwrap().parameters();
        assert_eq!((parameters.types, parameters.basic.attributes), (1, 0b1101));
        assert_eq!(parameters.discard, Discard::default());
        assert_eq!((parameters.basic.optimal_shift, parameters.basic.sectors), (12, 1));
        // What is no power of two is rounded down.
        let odd = Geometry::new(1 << 20, 3 << 16, false).unwrap().parameters();
        assert_eq!((odd.basic.optimal_shift, odd.discard.granularity), (17, 128 << 10));
    }
}
