//! The plan of a write for one cluster.

use isobath_image::layer::Layer;
use isobath_image::references::referenced;
use isobath_image::{Result, invariant};
use isobath_qcow2::{ClusterKind, Geometry, HostCluster, HostOffset, L2Entry};
use std::ops::Range;
use std::path::Path;

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
        let plan = match kind {
            ClusterKind::Subclusters { offset, copied, allocated, zero } => {
                let host = offset.filter(|_| copied);
                let kept = if host.is_some() { allocated } else { 0 };
                let moved = if host.is_some() { 0 } else { allocated };
                let releases =
                    if host.is_some() { Vec::new() } else { referenced(geometry, &kind) };
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
        };
        plan.check(geometry, &kind, written, layer.name())?;
        Ok(plan)
    }

    /// Checks that it is one for a cluster of this kind.
    fn check(
        &self,
        geometry: &Geometry,
        kind: &ClusterKind,
        written: &Range<u64>,
        name: &Path,
    ) -> Result<()> {
        let within = written.start < written.end && written.end <= geometry.cluster_size();
        invariant(within, name, "what is written of a cluster lies in it")?;
        let unchanged = self.host.is_some() && self.copy.is_empty() && self.releases.is_empty();
        let stays = self.changes || unchanged;
        invariant(stays, name, "a cluster whose entry stays gets what is written, and no more")?;
        if cfg!(debug_assertions) {
            let keeps = usize::from(self.host.is_some() && !geometry.has_data_file());
            let all = referenced(geometry, kind).len() == keeps + self.releases.len();
            invariant(all, name, "a write keeps or releases each cluster that an entry refers to")?;
            invariant(self.copies_beside(written), name, "a write copies what it does not write")?;
        }
        match self.subclusters {
            Some(after) => check_subclusters(geometry, kind, written, after, name),
            None => Ok(()),
        }
    }

    /// Whether the copied parts are in order and apart from what is written.
    fn copies_beside(&self, written: &Range<u64>) -> bool {
        let ordered = self.copy.windows(2).all(|pair| pair[0].end <= pair[1].start);
        let apart = |part: &Range<u64>| {
            !part.is_empty() && (part.end <= written.start || written.end <= part.start)
        };
        ordered && self.copy.iter().all(apart)
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

/// Checks what is in a cluster, and what is zero in it, after a write.
fn check_subclusters(
    geometry: &Geometry,
    kind: &ClusterKind,
    written: &Range<u64>,
    (allocated, zero): (u32, u32),
    name: &Path,
) -> Result<()> {
    let (was_allocated, was_zero) = match *kind {
        ClusterKind::Subclusters { allocated, zero, .. } => (allocated, zero),
        ClusterKind::Compressed(_) => (u32::MAX, 0),
        _ => (0, 0),
    };
    invariant(allocated & zero == 0, name, "a subcluster is not both data and zeroes")?;
    invariant(was_allocated & !allocated == 0, name, "a write loses no subcluster with data")?;
    let uncovered = was_zero & !(allocated | zero);
    invariant(uncovered == 0, name, "a write uncovers no subcluster of zeroes")?;
    let size = geometry.subcluster_size();
    let (first, last) = (written.start / size, written.end.div_ceil(size));
    let touched = (((1_u64 << (last - first)) - 1) << first) as u32;
    invariant(touched & !allocated == 0, name, "a subcluster that is written has data")
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
    use crate::testing::must_violate;
    use futures_executor::block_on;
    use isobath_storage::memory::MemoryHost;
    use isobath_storage::{Host, OpenMode};
    use std::sync::Arc;

    const SIZE: u64 = 1 << 16;
    const PLACE: HostOffset = HostOffset::new(5 << 16);

    fn geometry(extended_l2: bool, data_file: bool) -> Geometry {
        Geometry::new(3, 16, 4, extended_l2, data_file).unwrap()
    }

    fn check(plan: &Plan, kind: ClusterKind, written: Range<u64>) -> Result<()> {
        let extended_l2 = plan.subclusters.is_some();
        plan.check(&geometry(extended_l2, false), &kind, &written, Path::new("disk"))
    }

    fn plan(host: Option<HostOffset>, changes: bool) -> Plan {
        Plan { host, copy: Vec::new(), subclusters: None, changes, releases: Vec::new() }
    }

    #[test]
    fn a_plan_goes_with_what_is_written_and_with_the_entry() {
        let data = ClusterKind::Data { offset: PLACE, copied: true };
        let good = plan(Some(PLACE), false);
        check(&good, data, 0..SIZE).unwrap();
        let within = "what is written of a cluster lies in it";
        must_violate(check(&good, data, 5..5), within);
        must_violate(check(&good, data, 5..SIZE + 1), within);
        let stays = "a cluster whose entry stays gets what is written, and no more";
        must_violate(check(&plan(None, false), data, 0..SIZE), stays);
        let copies = vec![Range { start: 0, end: 512 }];
        let copying = Plan { copy: copies.clone(), ..plan(Some(PLACE), false) };
        must_violate(check(&copying, data, 512..SIZE), stays);
        let releases = Plan { releases: vec![HostCluster::new(5)], ..plan(Some(PLACE), false) };
        must_violate(check(&releases, data, 0..SIZE), stays);
    }

    #[test]
    #[cfg(debug_assertions)]
    fn a_plan_neither_loses_nor_overwrites_anything() {
        let data = ClusterKind::Data { offset: PLACE, copied: true };
        let all = "a write keeps or releases each cluster that an entry refers to";
        must_violate(check(&plan(None, true), data, 0..SIZE), all);
        let twice = Plan { releases: vec![HostCluster::new(5)], ..plan(Some(PLACE), true) };
        must_violate(check(&twice, data, 0..SIZE), all);
        let beside = "a write copies what it does not write";
        for copy in [vec![0..513, 1024..SIZE], vec![1024..SIZE, 0..512], vec![0..0, 1024..SIZE]] {
            let plan = Plan { copy, ..plan(None, true) };
            must_violate(check(&plan, ClusterKind::Unallocated, 512..1024), beside);
        }
    }

    #[test]
    fn no_subcluster_is_lost() {
        let kind =
            ClusterKind::Subclusters { offset: Some(PLACE), copied: true, allocated: 1, zero: 4 };
        let check = |allocated, zero| {
            let subclusters = Some((allocated, zero));
            let plan = Plan { subclusters, ..plan(Some(PLACE), true) };
            // The second subcluster.
            check(&plan, kind, 2048..4096)
        };
        check(3, 4).unwrap();
        must_violate(check(7, 4), "a subcluster is not both data and zeroes");
        must_violate(check(2, 4), "a write loses no subcluster with data");
        must_violate(check(3, 0), "a write uncovers no subcluster of zeroes");
        must_violate(check(1, 4), "a subcluster that is written has data");
    }

    #[test]
    fn a_cluster_of_a_data_file_is_not_released() {
        let geometry = geometry(true, true);
        let file = block_on(MemoryHost::new().create(Path::new("x"), OpenMode::default())).unwrap();
        let layer = Layer::raw("x".into(), Arc::new(file), 0);
        let entry = L2Entry::subclustered(Some(PLACE), false, 1, 0);
        let plan = Plan::new(&layer, &geometry, entry, &(0..512)).unwrap();
        assert_eq!((plan.host, plan.releases), (None, Vec::new()));
    }

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
