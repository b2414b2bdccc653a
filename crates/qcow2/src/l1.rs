//! L1 table entries (section "Cluster mapping").

use crate::bytes;
use crate::error::FormatError;
use crate::geometry::Geometry;
use crate::offset::HostOffset;

/// Bytes of an L1 table entry.
pub const L1_ENTRY_SIZE: usize = 8;

const COPIED: u64 = 1 << 63;
/// Bits 9 to 55: the offset, for entries of L1, L2 and bitmap tables.
pub(crate) const OFFSET_MASK: u64 = 0x00ff_ffff_ffff_fe00;
const RESERVED: u64 = !(COPIED | OFFSET_MASK);

/// An L1 table entry: where an L2 table is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct L1Entry(u64);

impl L1Entry {
    /// The entry of an L2 table at `offset`; `copied` says that its refcount is exactly one.
    ///
    /// # Errors
    /// If the offset is 0, not aligned to a cluster, or not below 2^56.
    pub fn new(offset: HostOffset, copied: bool, geometry: &Geometry) -> Result<Self, FormatError> {
        geometry.check_offset("L1 entry's offset", offset)?;
        if offset.get() == 0 {
            return Err(FormatError::invalid(
                "L1 entry's offset",
                0,
                "is the offset of the header",
            ));
        }
        Ok(Self(offset.get() | if copied { COPIED } else { 0 }))
    }

    /// The entry where there is no L2 table.
    pub const fn unallocated() -> Self {
        Self(0)
    }

    /// The entry with this value on disk.
    pub const fn from_raw(raw: u64) -> Self {
        Self(raw)
    }

    /// The value on disk.
    pub const fn raw(self) -> u64 {
        self.0
    }

    /// Where the L2 table is; `None` if there is none. Reserved bits are ignored, as QEMU does; see
    /// [`reserved_bits`](Self::reserved_bits).
    ///
    /// # Errors
    /// If the offset is not aligned to a cluster.
    #[inline]
    pub fn offset(self, geometry: &Geometry) -> Result<Option<HostOffset>, FormatError> {
        let offset = self.0 & OFFSET_MASK;
        if offset == 0 {
            return Ok(None);
        }
        geometry.check_offset("L1 entry's offset", HostOffset::new(offset)).map(Some)
    }

    /// The COPIED bit: the L2 table's refcount is exactly one. Accurate only in the active L1 table.
    #[inline]
    pub const fn is_copied(self) -> bool {
        self.0 & COPIED != 0
    }

    /// The same entry with the COPIED bit set or clear.
    #[must_use]
    pub const fn with_copied(self, copied: bool) -> Self {
        Self(if copied { self.0 | COPIED } else { self.0 & !COPIED })
    }

    /// Reserved bits that are set; a check reports them.
    pub const fn reserved_bits(self) -> u64 {
        self.0 & RESERVED
    }

    /// Entry `index` of an L1 table's bytes; `None` past its end.
    #[inline]
    pub fn read(table: &[u8], index: usize) -> Option<Self> {
        bytes::entry64(table, index).map(Self)
    }

    /// Puts the entry at `index` of an L1 table's bytes; `None`, and nothing written, past its end.
    #[inline]
    #[must_use = "nothing is written past the table's end"]
    pub fn write(self, table: &mut [u8], index: usize) -> Option<()> {
        bytes::put_entry64(table, index, self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn geometry() -> Geometry {
        Geometry::new(3, 16, 4, false, false).unwrap()
    }

    #[test]
    fn entry_as_qemu_writes_it() {
        let entry = L1Entry::new(HostOffset::new(0x40000), true, &geometry()).unwrap();
        assert_eq!(entry.raw(), 0x8000_0000_0004_0000);
        assert_eq!(entry.offset(&geometry()), Ok(Some(HostOffset::new(0x40000))));
        assert!(entry.is_copied());
        assert_eq!(entry.with_copied(false).raw(), 0x40000);
    }

    #[test]
    fn misaligned_offset_is_refused_and_reserved_bits_are_reported() {
        assert!(L1Entry::from_raw(0x40200).offset(&geometry()).is_err());
        assert!(L1Entry::new(HostOffset::new(0x40200), false, &geometry()).is_err());
        assert!(L1Entry::new(HostOffset::new(0), false, &geometry()).is_err());
        assert!(L1Entry::new(HostOffset::new(1 << 56), false, &geometry()).is_err());
        let odd = L1Entry::from_raw(0x4100_0000_0004_0001);
        assert_eq!(odd.offset(&geometry()), Ok(Some(HostOffset::new(0x40000))));
        assert_eq!(odd.reserved_bits(), 0x4100_0000_0000_0001);
    }

    #[test]
    fn tables_are_big_endian_and_bounded() {
        let mut table = [0; 16];
        L1Entry::from_raw(0x0102).write(&mut table, 1).unwrap();
        assert_eq!(table[8..], [0, 0, 0, 0, 0, 0, 1, 2]);
        assert_eq!(L1Entry::read(&table, 1), Some(L1Entry::from_raw(0x0102)));
        assert_eq!(L1Entry::read(&table, 2), None);
        assert_eq!(L1Entry::read(&table, usize::MAX), None);
        assert_eq!(L1Entry::from_raw(1).write(&mut table, 2), None);
    }

    proptest! {
        #[test]
        fn any_bits_are_read_without_panic(raw: u64, bits in 9u32..=21) {
            let g = Geometry::new(3, bits, 4, false, false).unwrap();
            if let Ok(Some(offset)) = L1Entry::from_raw(raw).offset(&g) {
                let copied = L1Entry::from_raw(raw).is_copied();
                let again = L1Entry::new(offset, copied, &g).unwrap();
                prop_assert_eq!(again.raw(), raw & !L1Entry::from_raw(raw).reserved_bits());
            }
        }
    }
}
