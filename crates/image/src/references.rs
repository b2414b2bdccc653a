//! What an L2 entry refers to.

use isobath_qcow2::{ClusterKind, Geometry, HostCluster, HostOffset};
use std::ops::Range;

/// Where the data lies to which an entry of this kind refers, in bytes of the image or of its external data file.
pub fn data_place(geometry: &Geometry, kind: &ClusterKind) -> Option<Range<u64>> {
    match kind {
        ClusterKind::Compressed(cluster) => Some(cluster.offset.get()..cluster.end().get()),
        other => other.host_cluster().map(|at| at.get()..at.get() + geometry.cluster_size()),
    }
}

/// The host clusters to which one of the image's entries holds a reference. Clusters in an external data file have
/// none.
pub fn referenced(geometry: &Geometry, kind: &ClusterKind) -> Vec<HostCluster> {
    match kind {
        _ if geometry.has_data_file() => Vec::new(),
        ClusterKind::Compressed(cluster) => {
            // References cover whole sectors.
            let first =
                geometry.host_cluster_of(HostOffset::new(cluster.offset.get() & !511)).get();
            let last = geometry.host_cluster_of(HostOffset::new(cluster.end().get() - 1)).get();
            (first..=last).map(HostCluster::new).collect()
        }
        other => other.host_cluster().map(|at| geometry.host_cluster_of(at)).into_iter().collect(),
    }
}
