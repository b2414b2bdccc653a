//! Tables that a smaller disk no longer needs.

use super::Tables;
use crate::{Result, violated};
use isobath_qcow2::{HostCluster, HostOffset, L1Entry};
use isobath_storage::Storage;

impl<S: Storage> Tables<S> {
    /// The offset of an L1 entry's L2 table, and whether the table belongs to the active L1 table alone.
    pub fn table(&self, l1_index: u64) -> Result<Option<(HostOffset, bool)>> {
        let entry = self.l1_entry(&self.state.lock(), l1_index);
        let offset =
            entry.offset(&self.geometry).map_err(|error| self.layer.format_error(error))?;
        Ok(offset.map(|offset| (offset, entry.is_copied())))
    }

    /// Records that an L1 entry has no table any more. `releases` are the references that end with it, including the
    /// table's own. No entries of that table may be recorded meanwhile.
    pub fn drop_table(&self, l1_index: u64, releases: &[HostCluster]) {
        let mut state = self.state.lock();
        state.open.l1.insert(l1_index, L1Entry::unallocated());
        state.open.fresh.remove(&l1_index);
        let Some(first) = self.geometry.first_cluster_of_l1(l1_index) else {
            violated("a table that is dropped lies within the largest disk");
        };
        let first = first.get();
        let past = first.saturating_add(self.geometry.l2_entries());
        state.open.entries.retain(|cluster, _| !(first..past).contains(cluster));
        state.open.releases.extend_from_slice(releases);
    }
}
