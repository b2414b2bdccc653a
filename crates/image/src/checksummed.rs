//! Proof that the log knows of the data that a new entry refers to.

use std::ops::Range;

/// Proof that the log knows of data that was written to a new place: its next record will contain checksums of the
/// data, or waits until it is durable. A caller that [records](crate::tables::Tables::record) an entry that refers to
/// such data must present this, so that no crash leaves the entry without the data.
#[derive(Debug)]
pub struct Checksummed {
    /// Where the data is, in order.
    places: Vec<Range<u64>>,
}

impl Checksummed {
    /// For [`DataJournal`](crate::durability::data_journal::DataJournal), which knows of the data.
    pub(crate) fn new(mut places: Vec<Range<u64>>) -> Self {
        places.sort_unstable_by_key(|place| place.start);
        Self { places }
    }

    /// Whether any of it is in these bytes of the file.
    pub fn is_in(&self, range: &Range<u64>) -> bool {
        let next = self.places.partition_point(|place| place.end <= range.start);
        self.places.get(next).is_some_and(|place| place.start < range.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_is_only_where_it_was_written() {
        let written = Checksummed::new(vec![100..200, 0..50]);
        for inside in [0..1, 49..60, 60..101, 150..160, 199..300] {
            assert!(written.is_in(&inside), "{inside:?}");
        }
        for outside in [50..100, 200..300] {
            assert!(!written.is_in(&outside), "{outside:?}");
        }
    }
}
