//! The plan of a write for one cluster.

use isobath_image::Result;
use isobath_image::layer::Layer;
use isobath_image::references::referenced;
use isobath_qcow2::{ClusterKind, Geometry, HostCluster, HostOffset, L2Entry};
use std::ops::Range;

/// The consequences of writing part of a cluster.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Plan {
    /// The host cluster that takes the data; `None` asks for a new one.
    pub(super) host: Option<HostOffset>,
    /// Parts of the cluster besides the data that must be written with it to preserve their contents; bytes from the
    /// cluster's start, in order.
    pub(super) copy: Vec<Range<u64>>,
    /// Bits of the subclusters that the host cluster holds afterwards, and of those that are zero.
    subclusters: Option<(u32, u32)>,
    /// Whether the table entry changes.
    pub(super) changes: bool,
    /// References that the old entry makes and the new one does not.
    pub(super) releases: Vec<HostCluster>,
}

impl Plan {
    /// Plans a write of the bytes `written` of a cluster whose entry is `entry`.
    pub(super) fn new<S: isobath_storage::Storage>(
        layer: &Layer<S>,
        geometry: &Geometry,
        entry: L2Entry,
        written: &Range<u64>,
    ) -> Result<Self> {
        let kind = entry.kind(geometry).map_err(|error| layer.format_error(error))?;
        let whole = |host, changes, releases| Self {
            host,
            copy: if changes { outside(written, 0..geometry.cluster_size()) } else { Vec::new() },
            subclusters: None,
            changes,
            releases,
        };
        Ok(match kind {
            ClusterKind::Subclusters { offset, copied, allocated, zero } => {
                let host = offset.filter(|_| copied);
                let kept = if host.is_some() { allocated } else { 0 };
                let moved = if host.is_some() { 0 } else { allocated };
                let releases = match offset {
                    Some(offset) if host.is_none() => vec![geometry.host_cluster_of(offset)],
                    _ => Vec::new(),
                };
                Self::subclustered(geometry, host, kept, moved, zero, written, releases)
            }
            ClusterKind::Compressed(_) if geometry.extended_l2() => {
                let releases = referenced(geometry, &kind);
                Self::subclustered(geometry, None, 0, u32::MAX, 0, written, releases)
            }
            ClusterKind::Data { offset, copied: true } => whole(Some(offset), false, Vec::new()),
            ClusterKind::ZeroAllocated { offset, copied: true } => {
                whole(Some(offset), true, Vec::new())
            }
            _ => whole(None, true, referenced(geometry, &kind)),
        })
    }

    /// `kept` subclusters are already in the host cluster; `moved` ones must be copied to a new one.
    fn subclustered(
        geometry: &Geometry,
        host: Option<HostOffset>,
        kept: u32,
        moved: u32,
        zero: u32,
        written: &Range<u64>,
        releases: Vec<HostCluster>,
    ) -> Self {
        let size = geometry.subcluster_size();
        let mut copy: Vec<Range<u64>> = Vec::new();
        let (mut allocated, mut zero_after) = (kept, zero);
        for n in 0..geometry.subclusters_per_cluster() {
            let range = u64::from(n) * size..(u64::from(n) + 1) * size;
            let bit = 1 << n;
            let touched = written.start < range.end && range.start < written.end;
            if kept & bit != 0 || !(touched || moved & bit != 0) {
                continue;
            }
            allocated |= bit;
            zero_after &= !bit;
            for part in outside(written, range) {
                match copy.last_mut() {
                    Some(last) if last.end == part.start => last.end = part.end,
                    _ => copy.push(part),
                }
            }
        }
        Self {
            host,
            copy,
            subclusters: Some((allocated, zero_after)),
            changes: host.is_none() || allocated != kept || zero_after != zero,
            releases,
        }
    }

    /// The entry once the host cluster at `host` holds the data.
    pub(super) fn entry(&self, host: HostOffset) -> L2Entry {
        match self.subclusters {
            Some((allocated, zero)) => L2Entry::subclustered(Some(host), true, allocated, zero),
            None => L2Entry::data(host, true),
        }
    }
}

/// The parts of `range` before and after `written`.
fn outside(written: &Range<u64>, range: Range<u64>) -> Vec<Range<u64>> {
    let before = range.start..written.start.clamp(range.start, range.end);
    let after = written.end.clamp(range.start, range.end)..range.end;
    [before, after].into_iter().filter(|part| !part.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lies_outside() {
        assert_eq!(outside(&(10..20), 0..30), [0..10, 20..30]);
        assert!(outside(&(0..30), 0..30).is_empty());
        assert!(outside(&(5..40), 10..30).is_empty());
        let all = vec![Range { start: 10, end: 30 }];
        assert_eq!(outside(&(0..10), 10..30), all);
        assert_eq!(outside(&(30..40), 10..30), all);
    }
}
