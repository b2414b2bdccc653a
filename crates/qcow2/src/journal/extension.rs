//! The header extension.

use super::{BLOCK, irrecoverable};
use crate::bytes;
use crate::error::FormatError;
use crate::geometry::{Geometry, HOST_OFFSET_LIMIT};
use crate::lsn::Lsn;
use crate::offset::HostOffset;

/// Bytes of the smallest area.
pub const MIN_AREA: u64 = 16 << 10;
/// Bytes of the largest area.
pub const MAX_AREA: u64 = 64 << 20;

/// The header extension that gives the journal's place. It has no meaning unless the incompatible feature bit
/// [`JOURNAL`](crate::IncompatibleFeatures::JOURNAL) is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JournalExtension {
    /// First byte of the area: a multiple of the cluster size, and not 0.
    pub area_offset: HostOffset,
    /// Bytes of the area: a multiple of the cluster size and of a [block](BLOCK), from [`MIN_AREA`]
    /// to [`MAX_AREA`].
    pub area_length: u64,
    /// Random; records of another journal have another id.
    pub id: u64,
    /// Records with a lower LSN do not belong to the journal.
    pub first_lsn: Lsn,
}

impl JournalExtension {
    /// The extension's type: "IBJ1".
    pub const MAGIC: u32 = 0x4942_4a31;
    /// Bytes of its data.
    pub const BYTES: usize = 32;

    /// The extension in `data`; `None` if it is not valid with any cluster size.
    pub(crate) fn parse(data: &[u8]) -> Option<Self> {
        if data.len() != Self::BYTES {
            return None;
        }
        let extension = Self {
            area_offset: HostOffset::new(bytes::be64(data, 0)?),
            area_length: bytes::be64(data, 8)?,
            id: bytes::be64(data, 16)?,
            first_lsn: Lsn::new(bytes::be64(data, 24)?),
        };
        extension.is_sane().then_some(extension)
    }

    fn is_sane(&self) -> bool {
        let end = self.area_offset.get().checked_add(self.area_length);
        self.area_offset.get() != 0
            && self.area_length.is_multiple_of(BLOCK as u64)
            && (MIN_AREA..=MAX_AREA).contains(&self.area_length)
            && end.is_some_and(|end| end <= HOST_OFFSET_LIMIT)
    }

    /// Checks the area against the image's clusters.
    ///
    /// # Errors
    /// If it does not consist of whole clusters, is at offset 0, has a length out of range, or ends beyond 2^56.
    pub fn validate(&self, geometry: &Geometry) -> Result<(), FormatError> {
        let cluster = geometry.cluster_size();
        if self.is_sane()
            && geometry.is_aligned(self.area_offset)
            && self.area_length.is_multiple_of(cluster)
        {
            return Ok(());
        }
        Err(irrecoverable(
            "journal area",
            format_args!("{} bytes at {}", self.area_length, self.area_offset),
            format_args!(
                "it must be whole clusters of {cluster} bytes after the header's and below 2^56, \
                 and \
                 a multiple of {BLOCK} from {MIN_AREA} to {MAX_AREA} bytes long"
            ),
        ))
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        [self.area_offset.get(), self.area_length, self.id, self.first_lsn.get()]
            .iter()
            .flat_map(|field| field.to_be_bytes())
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> JournalExtension {
        JournalExtension {
            area_offset: HostOffset::new(1 << 21),
            area_length: 1 << 21,
            id: 0x0123_4567_89ab_cdef,
            first_lsn: Lsn::new(7),
        }
    }

    #[test]
    fn only_areas_that_can_be_are_taken() {
        let geometry = |bits| Geometry::new(3, bits, 4, false, false).unwrap();
        assert_eq!(JournalExtension::parse(&sample().encode()), Some(sample()));
        assert_eq!(sample().encode().len(), JournalExtension::BYTES);
        assert_eq!(sample().validate(&geometry(21)), Ok(()));
        for (offset, length) in [
            (0, 1 << 21),
            (1 << 21, 0),
            (1 << 21, MIN_AREA - 4096),
            (1 << 21, MAX_AREA + 4096),
            (1 << 21, MIN_AREA + 512),
            ((1 << 56) - 4096, MIN_AREA),
            (u64::MAX - 4095, MIN_AREA),
        ] {
            let area_offset = HostOffset::new(offset);
            let wrong = JournalExtension { area_offset, area_length: length, ..sample() };
            assert_eq!(JournalExtension::parse(&wrong.encode()), None, "{offset:#x} {length}");
            assert!(wrong.validate(&geometry(9)).is_err(), "{offset:#x} {length}");
        }
        // Valid only for clusters of 512 bytes.
        let small =
            JournalExtension { area_offset: HostOffset::new(512), area_length: 16384, ..sample() };
        assert_eq!(JournalExtension::parse(&small.encode()), Some(small));
        assert_eq!(small.validate(&geometry(9)), Ok(()));
        let error = small.validate(&geometry(10)).unwrap_err().to_string();
        assert!(
            error.starts_with("journal area is 16384 bytes at 0x200: it must be whole"),
            "{error}"
        );
        assert_eq!(JournalExtension::parse(&sample().encode()[1..]), None);
    }
}
