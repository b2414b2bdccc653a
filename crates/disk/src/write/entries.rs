//! The entries of the clusters of a change, and what the map knows of them.

use crate::disk::Disk;
use isobath_chain::map::{Unit, UnitKind};
use isobath_image::writer::Qcow2Writer;
use isobath_image::{Result, invariant};
use isobath_qcow2::{ClusterKind, Geometry, L2Entry};
use isobath_storage::Host;
use std::ops::Range;

/// What an entry says of a subcluster, or of a cluster that has none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    /// It is in a layer below.
    Below,
    /// It is in this layer, as zeroes or compressed.
    Here,
    /// It is in this layer's data file.
    At { host: u64, copied: bool },
}

impl Content {
    fn of(kind: ClusterKind, subcluster: u32, geometry: &Geometry) -> Self {
        match kind {
            ClusterKind::Unallocated => Self::Below,
            ClusterKind::Data { offset, copied } => Self::At { host: offset.get(), copied },
            ClusterKind::Subclusters { offset: Some(offset), copied, allocated, .. }
                if allocated >> subcluster & 1 == 1 =>
            {
                let skip = u64::from(subcluster) * geometry.subcluster_size();
                Self::At { host: offset.get() + skip, copied }
            }
            ClusterKind::Subclusters { zero, .. } if zero >> subcluster & 1 == 0 => Self::Below,
            _ => Self::Here,
        }
    }
}

impl<H: Host> Disk<H> {
    /// The entries of adjacent clusters, with the clusters. The caller holds their range.
    pub(super) async fn entries_of(
        &self,
        qcow2: &Qcow2Writer<H::File>,
        clusters: Range<u64>,
    ) -> Result<impl Iterator<Item = (u64, L2Entry)> + use<H>> {
        let entries = qcow2.entries(clusters.clone()).await?;
        let all = entries.len() as u64 == clusters.end - clusters.start;
        invariant(all, self.name(), "there is an entry for each cluster of a change")?;
        if cfg!(debug_assertions) {
            for (cluster, entry) in clusters.clone().zip(&entries) {
                self.check_known(qcow2, cluster, *entry)?;
            }
        }
        Ok(clusters.zip(entries))
    }

    /// Checks that the map knows of a cluster what its entry says.
    fn check_known(
        &self,
        qcow2: &Qcow2Writer<H::File>,
        cluster: u64,
        entry: L2Entry,
    ) -> Result<()> {
        let geometry = qcow2.geometry();
        // To read it is an error.
        let Ok(kind) = entry.kind(&geometry) else { return Ok(()) };
        for subcluster in 0..geometry.subclusters_per_cluster() {
            let skip = u64::from(subcluster) * geometry.subcluster_size();
            let guest = (cluster << geometry.cluster_bits()) + skip;
            if guest >= qcow2.metadata.layer.visible() {
                break;
            }
            if let Some(unit) = self.map.cached(guest, self.map.unit_bits()) {
                self.check_unit(unit, Content::of(kind, subcluster, &geometry))?;
            }
        }
        Ok(())
    }

    fn check_unit(&self, unit: Unit, content: Content) -> Result<()> {
        let here = unit.kind() != UnitKind::Absent && unit.layer() == self.active_index();
        let same = here == (content != Content::Below);
        invariant(same, self.name(), "the map names the layer that the tables name")?;
        if !here || unit.kind() != UnitKind::Data {
            // Data past the end of the file reads as zeroes.
            return Ok(());
        }
        let host = unit.host(self.map.unit_bits());
        let same = matches!(content, Content::At { host: there, .. } if there == host);
        invariant(same, self.name(), "the map names the place that the tables name")?;
        let alone = !unit.in_place() || content == Content::At { host, copied: true };
        invariant(alone, self.name(), "the map allows writes in place where the tables do")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{CLUSTER, chain_of, must_violate, writers};
    use futures_executor::block_on;
    use isobath_chain::chain::LayerIndex;
    use isobath_image::sabotage::Sabotage;
    use isobath_qcow2::HostOffset;
    use isobath_storage::IoBuf;

    #[test]
    #[cfg(debug_assertions)]
    fn a_change_gets_the_entry_of_each_cluster() {
        let disk = chain_of(1);
        let (_, qcow2) = writers(&disk);
        block_on(Box::pin(disk.write(0, IoBuf::copy_of(&[1; 512])))).unwrap();
        let _broken = Sabotage::LostEntry.begin();
        let entries = block_on(disk.entries_of(qcow2, 0..2)).map(drop);
        must_violate(entries, "there is an entry for each cluster of a change");
    }

    #[test]
    #[cfg(debug_assertions)]
    fn the_map_knows_what_the_tables_say() {
        let disk = chain_of(2);
        let (_, qcow2) = writers(&disk);
        block_on(Box::pin(disk.write(0, IoBuf::copy_of(&[1; 512])))).unwrap();
        let entries = || block_on(disk.entries_of(qcow2, 0..2)).map(drop);
        entries().unwrap();
        disk.map.update(CLUSTER..2 * CLUSTER, |_| Unit::zero(LayerIndex::new(1)));
        must_violate(entries(), "the map names the layer that the tables name");
    }

    #[test]
    fn a_unit_agrees_with_its_entry() {
        let disk = chain_of(2);
        let unit = |layer, host, in_place| {
            let bits = disk.map.unit_bits();
            Unit::data(LayerIndex::new(layer), host, bits, in_place).unwrap()
        };
        let at = |host, copied| Content::At { host, copied };
        let (host, other) = (5 * CLUSTER, 6 * CLUSTER);
        for (unit, content) in [
            (Unit::ABSENT, Content::Below),
            (unit(0, host, false), Content::Below),
            (unit(1, host, true), at(host, true)),
            (unit(1, host, false), at(host, true)),
            (Unit::zero(LayerIndex::new(1)), Content::Here),
            (Unit::zero(LayerIndex::new(1)), at(host, true)),
        ] {
            disk.check_unit(unit, content).unwrap();
        }
        let layer = "the map names the layer that the tables name";
        must_violate(disk.check_unit(Unit::ABSENT, at(host, true)), layer);
        must_violate(disk.check_unit(unit(0, host, false), Content::Here), layer);
        must_violate(disk.check_unit(unit(1, host, true), Content::Below), layer);
        let place = "the map names the place that the tables name";
        must_violate(disk.check_unit(unit(1, host, true), at(other, true)), place);
        must_violate(disk.check_unit(unit(1, host, true), Content::Here), place);
        let in_place = "the map allows writes in place where the tables do";
        must_violate(disk.check_unit(unit(1, host, true), at(host, false)), in_place);
    }

    #[test]
    fn a_subcluster_is_where_its_bits_say() {
        let geometry = Geometry::new(3, 16, 4, true, false).unwrap();
        let offset = Some(HostOffset::new(5 * CLUSTER));
        let kind = ClusterKind::Subclusters { offset, copied: true, allocated: 2, zero: 4 };
        let content = |n| Content::of(kind, n, &geometry);
        let host = 5 * CLUSTER + geometry.subcluster_size();
        assert_eq!(content(1), Content::At { host, copied: true });
        assert_eq!([content(0), content(2)], [Content::Below, Content::Here]);
    }
}
