//! L1 table entries (section "Cluster mapping").

use crate::error::FormatError;
use crate::geometry::Geometry;
use crate::offset::HostOffset;
use crate::table_entry::{OFFSET_MASK, table_entry};

/// Bytes of an L1 table entry.
pub const L1_ENTRY_SIZE: usize = 8;

const COPIED: u64 = 1 << 63;

table_entry! {
    /// An L1 table entry: where an L2 table is.
    L1Entry: "L2 table" in "an L1 table", ""
    field "L1 entry's offset", offset OFFSET_MASK, reserved !(COPIED | OFFSET_MASK)
}

impl L1Entry {
    /// The entry of an L2 table at `offset`; `copied` says that its refcount is exactly one.
    ///
    /// # Errors
    /// If the offset is 0, not aligned to a cluster, or not below 2^56.
    pub fn new(offset: HostOffset, copied: bool, geometry: &Geometry) -> Result<Self, FormatError> {
        Self::at(offset, geometry).map(|entry| entry.with_copied(copied))
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
