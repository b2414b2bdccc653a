//! Refcounts of 1 to 64 bits, and the refcount table (section "Host cluster management").

use crate::error::FormatError;
use crate::geometry::Geometry;
use crate::offset::HostOffset;
use crate::table_entry::table_entry;

pub use crate::refcount_order::RefcountOrder;

const RESERVED: u64 = 0x1ff;

/// Bytes of a refcount table entry.
pub const REFCOUNT_TABLE_ENTRY_SIZE: usize = 8;

table_entry! {
    /// A refcount table entry: where a refcount block is.
    RefcountTableEntry: "refcount block" in "a refcount table", ", and all its refcounts are 0"
    field "refcount table entry", offset !RESERVED, reserved RESERVED
}

impl RefcountTableEntry {
    /// The entry of a refcount block at `offset`.
    ///
    /// # Errors
    /// If the offset is 0 or not aligned to a cluster, or not below 2^56.
    pub fn new(offset: HostOffset, geometry: &Geometry) -> Result<Self, FormatError> {
        Self::at(offset, geometry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn order(order: u32) -> RefcountOrder {
        RefcountOrder::new(order).unwrap()
    }

    #[test]
    fn widths() {
        let max: Vec<_> = (0..=6).map(|o| order(o).max()).collect();
        assert_eq!(max, [1, 3, 15, 255, 65535, u64::from(u32::MAX), u64::MAX]);
        assert!(RefcountOrder::new(7).is_err());
    }

    #[test]
    fn narrow_widths_start_at_the_least_significant_bit() {
        let block = [0b1000_0110, 0x21];
        assert_eq!(order(0).read(&block, 0), Some(0));
        assert_eq!(order(0).read(&block, 1), Some(1));
        assert_eq!(order(0).read(&block, 7), Some(1));
        assert_eq!(order(1).read(&block, 0), Some(2));
        assert_eq!(order(1).read(&block, 3), Some(2));
        assert_eq!(order(2).read(&block, 2), Some(1));
        assert_eq!(order(2).read(&block, 3), Some(2));
        assert_eq!(order(4).read(&block, 0), Some(0x8621));
        assert_eq!(order(2).read(&block, 4), None);
    }

    #[test]
    fn too_large_a_value_or_index_writes_nothing() {
        let mut block = [0u8; 8];
        assert!(order(1).write(&mut block, 0, 4).is_err());
        assert!(order(6).write(&mut block, 1, 1).is_err());
        assert!(order(0).write(&mut block, 64, 1).is_err());
        assert!(order(4).write(&mut block, usize::MAX, 1).is_err());
        assert_eq!(block, [0; 8]);
    }

    #[test]
    fn table_entry() {
        let g = Geometry::new(3, 16, 4, false, false).unwrap();
        let entry = RefcountTableEntry::new(HostOffset::new(0x20000), &g).unwrap();
        assert_eq!(entry.offset(&g), Ok(Some(HostOffset::new(0x20000))));
        assert_eq!(RefcountTableEntry::unallocated().offset(&g), Ok(None));
        assert!(RefcountTableEntry::from_raw(0x20200).offset(&g).is_err());
        assert!(RefcountTableEntry::from_raw(1 << 60).offset(&g).is_err());
        assert_eq!(RefcountTableEntry::from_raw(0x20003).reserved_bits(), 3);
        let mut table = [0; 16];
        entry.write(&mut table, 1).unwrap();
        assert_eq!(RefcountTableEntry::read(&table, 1), Some(entry));
        assert_eq!(entry.write(&mut table, 2), None);
    }

    proptest! {
        #[test]
        fn a_write_changes_its_refcount_alone(
            o in 0u32..=6, before in prop::collection::vec(any::<u8>(), 64), at: usize, value: u64,
        ) {
            let o = order(o);
            let count = 64 * 8 / o.bits() as usize;
            let (at, value) = (at % count, value & o.max());
            let mut block = before.clone();
            o.write(&mut block, at, value).unwrap();
            for i in 0..count {
                let expected = if i == at { Some(value) } else { o.read(&before, i) };
                prop_assert_eq!(o.read(&block, i), expected);
            }
            prop_assert_eq!(o.read(&block, count), None);
        }
    }
}
