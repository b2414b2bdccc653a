//! The host clusters that hold the image's own structures, which nothing else may use.

use super::counts::{Counts, ENTRY_BYTES};
use std::collections::BTreeSet;
use std::ops::RangeInclusive;

/// Header, tables and lists, except for the refcount structure.
#[derive(Default)]
pub(crate) struct Own {
    /// The references that a sound image has to each of these clusters; 0 for all others.
    expected: Counts,
    /// Clusters that belong to more than one structure, or to something else as well.
    disputed: BTreeSet<u64>,
}

impl Own {
    /// Says that a structure takes these clusters, and accounts for `references` to each.
    pub(crate) fn claim(&mut self, clusters: RangeInclusive<u64>, references: u64) {
        for cluster in clusters {
            let before = self.expected.get(cluster);
            if before > 0 {
                self.disputed.insert(cluster);
            }
            self.expected.set(cluster, before.saturating_add(references));
        }
    }

    /// Notes a cluster of which more than one thing makes use that should not.
    pub(crate) fn note_shared(&mut self, cluster: u64) {
        self.disputed.insert(cluster);
    }

    /// Notes those of the clusters that a structure takes already. Whether there are any.
    pub(crate) fn collide(&mut self, clusters: RangeInclusive<u64>) -> bool {
        let taken = clusters.filter(|cluster| self.expected.get(*cluster) > 0);
        let taken: Vec<u64> = taken.collect();
        self.disputed.extend(&taken);
        !taken.is_empty()
    }

    /// Notes the clusters with more references than the structures account for, once all of these are
    /// known, and everything that may refer to them by mistake. Whether there are any.
    pub(crate) fn dispute(&mut self, counts: &Counts) -> bool {
        let more = self.expected.nonzero().filter(|at| counts.get(*at) > self.expected.get(*at));
        let more: Vec<u64> = more.collect();
        self.disputed.extend(more);
        !self.disputed.is_empty()
    }

    /// How many bytes of memory it takes.
    pub(crate) fn bytes(&self) -> u64 {
        self.expected.bytes() + self.disputed.len() as u64 * ENTRY_BYTES
    }

    /// Whether a cluster of a structure is part of something else as well.
    pub(crate) fn is_disputed(&self, cluster: u64) -> bool {
        self.disputed.contains(&cluster)
    }

    /// Whether clusters belong to one structure, and to nothing else that was counted.
    pub(crate) fn are_alone(&self, mut clusters: RangeInclusive<u64>, counts: &Counts) -> bool {
        clusters.all(|at| !self.disputed.contains(&at) && counts.get(at) == self.expected.get(at))
    }
}
