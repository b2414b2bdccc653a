//! Clusters that are allocated but not referred to yet.

use super::Tables;
use crate::alloc::Run;
use isobath_qcow2::HostCluster;

/// Clusters that were allocated for a change that is not recorded yet.
///
/// If the change fails or is cancelled, the next commit releases them, like clusters that were replaced. They are not
/// free before that: journaled data of theirs may already be in a record, which must then be revoked, and a cancelled
/// write may still reach the file.
pub struct Claim<'a, S> {
    tables: &'a Tables<S>,
    clusters: Vec<HostCluster>,
    published: bool,
}

impl<S> Tables<S> {
    /// A claim of no clusters so far.
    pub fn claim(&self) -> Claim<'_, S> {
        Claim { tables: self, clusters: Vec::new(), published: false }
    }
}

impl<S> Claim<'_, S> {
    /// Adds a cluster, once for each reference that was allocated.
    pub fn add(&mut self, cluster: HostCluster) {
        self.clusters.push(cluster);
    }

    /// Adds a run of clusters.
    pub fn add_run(&mut self, run: &Run) {
        self.clusters.extend(run.clusters());
    }

    /// The clusters.
    pub fn clusters(&self) -> &[HostCluster] {
        &self.clusters
    }

    /// The clusters' references were [published](crate::alloc::Allocator::publish).
    pub fn set_published(&mut self) {
        self.published = true;
    }

    /// Ends the claim. From here on the change is recorded, and nothing may return early.
    pub fn keep(mut self) {
        self.clusters.clear();
    }
}

impl<S> Drop for Claim<'_, S> {
    fn drop(&mut self) {
        if !self.clusters.is_empty() {
            let open = &mut self.tables.state.lock().open;
            if !self.published {
                open.allocated.extend_from_slice(&self.clusters);
            }
            open.releases.extend_from_slice(&self.clusters);
        }
    }
}
