//! Bitmaps that an export offers as `qemu:dirty-bitmap:NAME`.

use std::ops::Range;

/// Maximum number of bitmaps of an export.
pub const MAX_BITMAPS: usize = 62;

/// An immutable bitmap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportedBitmap {
    name: String,
    /// The dirty ranges in bytes, in order, with adjacent ones merged.
    dirty: Vec<Range<u64>>,
}

impl ExportedBitmap {
    /// A bitmap of this name whose bits are set in the ranges `dirty`, which must be in order.
    pub fn new(name: impl Into<String>, dirty: impl IntoIterator<Item = Range<u64>>) -> Self {
        let mut merged: Vec<Range<u64>> = Vec::new();
        for range in dirty.into_iter().filter(|range| !range.is_empty()) {
            match merged.last_mut() {
                Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                _ => merged.push(range),
            }
        }
        Self { name: name.into(), dirty: merged }
    }

    /// The name of its metadata context.
    pub fn context(&self) -> String {
        format!("qemu:dirty-bitmap:{}", self.name)
    }

    /// The extents of a range as `(length, flags)`, as in `BLOCK_STATUS`. There are at most `most`, which may end
    /// before the range does.
    pub fn extents(&self, offset: u64, length: u32, most: usize) -> Vec<(u32, u32)> {
        let end = offset + u64::from(length);
        let mut extents = Vec::new();
        let mut at = offset;
        let first = self.dirty.partition_point(|range| range.end <= offset);
        let mut ranges = self.dirty.iter().skip(first);
        while at < end && extents.len() < most {
            let (start, stop) = ranges.next().map_or((end, end), |range| (range.start, range.end));
            // Both lengths fit into 32 bits, since the range's does.
            if at < start {
                extents.push(((start.min(end) - at) as u32, 0));
                at = start.min(end);
            }
            if at < end && extents.len() < most {
                extents.push(((stop.min(end) - at) as u32, 1));
                at = stop.min(end);
            }
        }
        extents
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_become_extents() {
        let bitmap = ExportedBitmap::new("b", [0..10, 10..20, 30..30, 40..1 << 40]);
        assert_eq!(bitmap.context(), "qemu:dirty-bitmap:b");
        assert_eq!(bitmap.extents(0, 50, 9), [(20, 1), (20, 0), (10, 1)]);
        assert_eq!(bitmap.extents(5, 30, 9), [(15, 1), (15, 0)]);
        assert_eq!(bitmap.extents(25, 5, 9), [(5, 0)]);
        assert_eq!(bitmap.extents(0, 50, 2), [(20, 1), (20, 0)]);
        assert_eq!(bitmap.extents(0, 50, 1), [(20, 1)]);
        assert_eq!(bitmap.extents(1 << 40, u32::MAX, 9), [(u32::MAX, 0)]);
        assert_eq!(ExportedBitmap::new("e", []).extents(7, 9, 9), [(9, 0)]);
    }
}
