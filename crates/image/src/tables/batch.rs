//! Changes that reach the file together.

use crate::{MOST_CHECKED, violated};
use isobath_qcow2::{Geometry, HostCluster, HostOffset, L1Entry, L2Entry};
use isobath_storage::IoBuf;
use isobath_sync::Invariants;
use std::collections::BTreeMap;

/// A set of table changes. Maps are ordered so that the same history issues the same writes.
#[derive(Default)]
pub(super) struct Batch {
    /// New L2 entries by guest cluster.
    pub(super) entries: BTreeMap<u64, L2Entry>,
    /// New L1 entries by index.
    pub(super) l1: BTreeMap<u64, L1Entry>,
    /// New tables by L1 index: host offset, and contents without this batch's entries.
    pub(super) fresh: BTreeMap<u64, (HostOffset, IoBuf)>,
    /// Clusters to which the batch refers, once for each new reference.
    pub(super) allocated: Vec<HostCluster>,
    /// References that end once the batch is durable.
    pub(super) releases: Vec<HostCluster>,
    /// The guest discarded some of what is released.
    pub(super) discarded: bool,
    /// Data must be durable before the entries.
    pub(super) ordered: bool,
    /// There are changes besides entries that are embedded in their data.
    pub(super) needs_record: bool,
}

impl Invariants for Batch {
    fn check_invariants(&self) {
        let Some(&first) = self.fresh.keys().next() else { return };
        // Side by side: looking each of them up would take a third of the simulator's time.
        let mut entries = self.l1.range(first..).peekable();
        for (index, (offset, _)) in self.fresh.iter().take(MOST_CHECKED) {
            while entries.next_if(|(at, _)| *at < index).is_some() {}
            let entry = entries.peek().filter(|(at, entry)| *at == index && entry.is_copied());
            if entry.map(|(_, entry)| entry.with_copied(false).raw()) != Some(offset.get()) {
                violated("the L1 entry of a new table points to it");
            }
        }
    }
}

impl Batch {
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.l1.is_empty() && self.releases.is_empty()
    }

    /// Whether all changes are embedded in data.
    pub(super) fn is_embedded(&self) -> bool {
        !self.needs_record && self.l1.is_empty() && self.releases.is_empty()
    }

    /// The new tables with this batch's entries in them: host offset and contents.
    pub(super) fn complete_tables(&self, geometry: &Geometry) -> Vec<(u64, IoBuf)> {
        let mut tables = Vec::with_capacity(self.fresh.len());
        for (&l1_index, (offset, content)) in &self.fresh {
            let mut bytes = IoBuf::copy_of(content);
            let Some(first) = geometry.first_cluster_of_l1(l1_index) else {
                violated("a new table lies within the largest disk");
            };
            let first = first.get();
            for (&cluster, entry) in self.entries.range(first..first + geometry.l2_entries()) {
                if entry.write(&mut bytes, (cluster - first) as usize, geometry).is_none() {
                    violated("a table has a place for each of its clusters");
                }
            }
            tables.push((offset.get(), bytes));
        }
        tables
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broken::{assert_violated, must_panic};
    use isobath_qcow2::NewImage;

    #[test]
    fn a_broken_batch_is_noticed() {
        assert_violated("points to it", Batch::default(), |batch| {
            batch.fresh.insert(0, (HostOffset::new(65536), IoBuf::empty()));
        });
        assert_violated("points to it", Batch::default(), |batch| {
            batch.fresh.insert(0, (HostOffset::new(65536), IoBuf::empty()));
            batch.l1.insert(0, L1Entry::unallocated());
        });
    }

    #[test]
    fn a_new_table_describes_a_part_of_a_disk() {
        let geometry = NewImage::new(1 << 30).plan().unwrap().header().geometry().unwrap();
        let of = |l1_index| {
            let mut batch = Batch::default();
            batch.fresh.insert(l1_index, (HostOffset::new(65536), IoBuf::zeroed(8)));
            batch.entries.insert(1, L2Entry::unallocated());
            batch
        };
        let past = || of(u64::MAX).complete_tables(&geometry);
        must_panic(past, "a new table lies within the largest disk");
        let short = || of(0).complete_tables(&geometry);
        must_panic(short, "a table has a place for each of its clusters");
    }
}
