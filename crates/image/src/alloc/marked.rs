//! Clusters that have become the image's own since it was opened: tables, and the journal's area.
//!
//! Nothing maps guest data to the tables that there were when an image was opened: that is checked where an entry is
//! looked up. But if the refcounts of a damaged image call a cluster with data free, it may become a table later, while
//! the place is still known as one for data. So each write of data asks again, and the answer must cost next to
//! nothing.

use isobath_qcow2::HostCluster;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// Clusters whose numbers have these last bits in common share a mark.
const BITS: u32 = 16;
const MARKS: u64 = 1 << BITS;

/// For each cluster whether it may have become one of them. There are never fewer marks, so an answer of "no" holds,
/// and one of "perhaps" needs a look at the clusters themselves.
pub(super) struct Marked(Box<[AtomicU64]>);

impl Marked {
    pub(super) fn new() -> Self {
        Self((0..MARKS / 64).map(|_| AtomicU64::new(0)).collect())
    }

    /// These clusters become the image's own.
    pub(super) fn add(&self, run: Range<u64>) {
        for cluster in run.start..run.end.min(run.start.saturating_add(MARKS)) {
            self.word(cluster).fetch_or(1 << (cluster % 64), Ordering::Release);
        }
    }

    /// Whether a cluster may have become one.
    pub(super) fn may_have(&self, cluster: HostCluster) -> bool {
        self.word(cluster.get()).load(Ordering::Acquire) >> (cluster.get() % 64) & 1 == 1
    }

    fn word(&self, cluster: u64) -> &AtomicU64 {
        &self.0[(cluster % MARKS / 64) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_became_the_images_own_is_never_denied() {
        let marked = Marked::new();
        assert!((0..MARKS).all(|cluster| !marked.may_have(HostCluster::new(cluster))));
        marked.add(70..73);
        let found: Vec<_> =
            (0..100).filter(|&cluster| marked.may_have(HostCluster::new(cluster))).collect();
        assert_eq!(found, [70, 71, 72]);
        // One that shares a mark.
        assert!(marked.may_have(HostCluster::new(70 + MARKS)));
        marked.add(MARKS - 1..MARKS + 1);
        assert!(marked.may_have(HostCluster::new(MARKS - 1)));
        assert!(marked.may_have(HostCluster::new(MARKS)));
        marked.add(0..u64::MAX);
        assert!((0..MARKS).all(|cluster| marked.may_have(HostCluster::new(cluster))));
    }
}
