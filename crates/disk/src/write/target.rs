//! The clusters of a write, and what is written to each.

use super::plan::Plan;
use isobath_chain::map::{Extent, Source};
use isobath_image::guest_io::Destination;
use isobath_image::writer::Qcow2Writer;
use isobath_image::{Result, always};
use isobath_qcow2::{ClusterIndex, HostOffset};
use isobath_storage::{IoBuf, Storage};
use std::ops::Range;

/// One cluster of a write.
pub(super) struct Target {
    pub(super) cluster: ClusterIndex,
    /// The written part, from the cluster's start.
    pub(super) written: Range<u64>,
    pub(super) plan: Plan,
    /// The host cluster for the data; `None` until there is one.
    pub(super) host: Option<HostOffset>,
    /// The host cluster is new and known to hold zeroes.
    pub(super) zeroed: bool,
    /// It is past the end of the file.
    pub(super) beyond: bool,
    /// The mapping is embedded in the data.
    pub(super) embedding: Option<Embedding>,
}

impl Target {
    /// The host cluster that was assigned to it.
    pub(super) fn placed<S: Storage>(&self, qcow2: &Qcow2Writer<S>) -> Result<HostOffset> {
        always(self.host, qcow2.metadata.layer.name(), "a cluster that is written has a place")
    }

    pub(super) fn destination(&self) -> Destination {
        if let Some(embedding) = &self.embedding {
            return Destination::Embedded { checked: embedding.checked };
        }
        match (self.plan.changes, self.beyond, self.zeroed) {
            (false, ..) => Destination::InUse,
            (true, true, _) => Destination::Beyond,
            (true, false, true) => Destination::Prepared,
            (true, false, false) => Destination::New,
        }
    }
}

/// A cluster that contains its mapping.
pub(super) struct Embedding {
    /// The lead block as it is to be stored.
    pub(super) lead: IoBuf,
    /// Whether the record has a checksum of the rest.
    pub(super) checked: bool,
}

/// What must be written besides a target's own data.
pub(super) struct CopiedPart {
    /// From the cluster's start.
    pub(super) at: u64,
    pub(super) length: u64,
    /// `None` for zeroes.
    pub(super) bytes: Option<IoBuf>,
}

/// Whether there are only zeroes.
pub(super) fn reads_zero(extents: &[Extent]) -> bool {
    extents.iter().all(|extent| matches!(extent.source, Source::Absent | Source::Zero(_)))
}
