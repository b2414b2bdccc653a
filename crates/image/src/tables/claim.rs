//! Clusters between being given out and being referred to.

use super::Tables;
use crate::alloc::Run;
use isobath_qcow2::HostCluster;

/// Clusters that were given out for a change that is not recorded yet.
///
/// Where that does not come to be, because it fails or whoever waits for it gives it up, the next commit
/// releases them, as it does clusters that were replaced. They are not free before: what was kept of their
/// data may be in a record already, which must then revoke it, and a write that was given up may still land.
pub struct Claim<'a, S> {
    tables: &'a Tables<S>,
    clusters: Vec<HostCluster>,
}

impl<S> Tables<S> {
    /// A claim of no clusters so far.
    pub fn claim(&self) -> Claim<'_, S> {
        Claim { tables: self, clusters: Vec::new() }
    }
}

impl<S> Claim<'_, S> {
    /// Adds a cluster, once for each reference that was given out.
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

    /// The change is recorded from here on, with no way to end early.
    pub fn keep(mut self) {
        self.clusters.clear();
    }
}

impl<S> Drop for Claim<'_, S> {
    fn drop(&mut self) {
        if !self.clusters.is_empty() {
            let open = &mut self.tables.state.lock().open;
            open.allocated.extend_from_slice(&self.clusters);
            open.releases.extend_from_slice(&self.clusters);
        }
    }
}
