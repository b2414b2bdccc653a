//! What is wrong with one L2 entry.

use isobath_qcow2::{ClusterKind, Geometry, GuestOffset, L2Entry};

/// Bits 9 to 55 of a standard cluster descriptor: the offset.
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// Bit 0 of a standard cluster descriptor: reads as zeroes.
const ZERO: u64 = 1;

/// The host bytes that an entry refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refers {
    Nothing,
    /// One cluster from this byte on, aligned or not.
    Cluster(u64),
    /// Compressed data: first byte, length.
    Compressed(u64, u64),
}

/// The meaning of an entry, and what is wrong with it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Inspection {
    pub(super) refers: Refers,
    /// A line for each error.
    pub(super) errors: Vec<String>,
    /// The entry without its errors, if that is certain and does not change what the guest reads.
    pub(super) mended: Option<L2Entry>,
    /// It has no usable offset: what it should refer to is unknown.
    pub(super) lost: bool,
}

/// Examines the entry of the guest cluster at `guest`, the `index`th of its table. `fixed_offsets`
/// says that guest data must lie at its guest offset (raw external data file).
pub(super) fn inspect(
    entry: L2Entry,
    index: usize,
    guest: Option<GuestOffset>,
    geometry: &Geometry,
) -> Inspection {
    if entry == L2Entry::unallocated() {
        return fine(Refers::Nothing);
    }
    if entry.reserved_bits(geometry) == (0, 0)
        && let Ok(kind) = entry.kind(geometry)
    {
        let says_nothing = matches!(
            kind,
            ClusterKind::Unallocated
                | ClusterKind::Subclusters { offset: None, allocated: 0, zero: 0, .. }
        );
        let refers = match kind {
            ClusterKind::Compressed(cluster) => {
                Refers::Compressed(cluster.offset.get(), cluster.length)
            }
            kind => kind.host_cluster().map_or(Refers::Nothing, |at| Refers::Cluster(at.get())),
        };
        let mut inspection = fine(refers);
        // Only a flag is left of an entry that had an offset.
        inspection.lost = says_nothing;
        if let Some(Err(error)) = guest.map(|guest| kind.check_data_file(guest, geometry)) {
            inspection.errors.push(format!("ERROR {error}"));
        }
        return inspection;
    }
    if entry.is_compressed() {
        compressed(entry, index, geometry)
    } else {
        standard(entry, geometry)
    }
}

fn fine(refers: Refers) -> Inspection {
    Inspection { refers, errors: Vec::new(), mended: None, lost: false }
}

fn compressed(entry: L2Entry, index: usize, geometry: &Geometry) -> Inspection {
    let mut found = fine(Refers::Nothing);
    let raw = entry.descriptor;
    if geometry.has_data_file() {
        let error = format!("ERROR compressed cluster {index} with data file, entry={raw:#x}");
        found.errors.push(error);
        found.lost = true;
        return found;
    }
    let mended = L2Entry { subclusters: 0, ..entry.with_copied(false) };
    if entry.is_copied() {
        found.errors.push(format!(
            "ERROR: L2 entry {raw:x}: copied flag must never be set for compressed clusters"
        ));
    }
    if entry.subclusters != 0 {
        found.errors.push(format!(
            "ERROR compressed cluster {index} with non-zero subcluster allocation bitmap, \
             entry={raw:#x}"
        ));
    }
    if let Ok(ClusterKind::Compressed(cluster)) = mended.kind(geometry) {
        found.refers = Refers::Compressed(cluster.offset.get(), cluster.length);
        found.mended = Some(mended);
    } else {
        found.errors.push(format!("ERROR compressed cluster {index} past 2^56, entry={raw:#x}"));
        found.lost = true;
    }
    found
}

fn standard(entry: L2Entry, geometry: &Geometry) -> Inspection {
    let mut found = fine(Refers::Nothing);
    let raw = entry.descriptor;
    let offset = raw & OFFSET;
    let (reserved, _) = entry.reserved_bits(geometry);
    let mut mended = L2Entry { descriptor: raw & !reserved, ..entry };
    if reserved != 0 {
        found.errors.push(format!("ERROR found l2 entry with reserved bits set: {raw:x}"));
    }
    let (allocated, zero) = (entry.subclusters as u32, (entry.subclusters >> 32) as u32);
    let none = offset == 0 && !(geometry.has_data_file() && entry.is_copied());
    let mut certain = true;
    if none {
        // Unless the entry reads as zeroes, its offset may have been lost.
        found.lost = if geometry.extended_l2() { zero == 0 } else { raw & ZERO == 0 };
        if geometry.extended_l2() && allocated != 0 {
            found.errors.push(
                "ERROR: Unallocated cluster has non-zero subcluster allocation map".to_owned(),
            );
            found.lost = true;
        }
    } else {
        found.refers = Refers::Cluster(offset);
        if geometry.extended_l2() && allocated & zero != 0 {
            found.errors.push(format!(
                "ERROR offset={offset:x}: Allocated cluster has corrupted subcluster allocation bitmap"
            ));
            // It is unknown which of the two is right.
            certain = false;
        }
        if !offset.is_multiple_of(geometry.cluster_size()) {
            let no_data = if geometry.extended_l2() { allocated == 0 } else { raw & ZERO != 0 };
            if no_data {
                found.errors.push(format!(
                    "ERROR offset={offset:x}: Preallocated cluster is not properly aligned; L2 \
                     entry corrupted."
                ));
                mended.descriptor = if geometry.extended_l2() { 0 } else { ZERO };
            } else {
                found.errors.push(format!(
                    "ERROR offset={offset:x}: Data cluster is not properly aligned; L2 entry \
                     corrupted."
                ));
                found.lost = true;
            }
        }
    }
    if raw & ZERO != 0 && geometry.version() < 3 {
        found.errors.push(format!("ERROR zero cluster in a version 2 image: l2_entry={raw:x}"));
        found.lost = true;
    }
    if certain && !found.lost && mended != entry {
        found.mended = Some(mended);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use isobath_qcow2::HostOffset;

    fn geometry(version: u32, extended_l2: bool, data_file: bool) -> Geometry {
        Geometry::new(version, 16, 4, extended_l2, data_file).unwrap()
    }

    fn look(descriptor: u64, subclusters: u64, geometry: &Geometry) -> Inspection {
        inspect(L2Entry { descriptor, subclusters }, 3, None, geometry)
    }

    #[test]
    fn sound_entries_have_no_errors() {
        let g = geometry(3, false, false);
        assert_eq!(look(0, 0, &g).refers, Refers::Nothing);
        assert_eq!(look(1, 0, &g).refers, Refers::Nothing);
        for raw in [0x5_0000, 0x8000_0000_0005_0001] {
            let found = look(raw, 0, &g);
            assert_eq!((found.refers, found.errors.len()), (Refers::Cluster(0x5_0000), 0));
        }
        let entry = L2Entry::compressed(HostOffset::new(0x5_0210), 100, 16).unwrap();
        assert_eq!(inspect(entry, 0, None, &g), fine(Refers::Compressed(0x5_0210, 0x1f0)));
        // Offset 0 in an external data file.
        let found = look(1 << 63, 0, &geometry(3, false, true));
        assert_eq!((found.refers, found.errors.len()), (Refers::Cluster(0), 0));
    }

    #[test]
    fn what_can_be_mended_reads_as_before() {
        let g = geometry(3, false, false);
        let found = look(0x8100_0000_0005_0004, 0, &g);
        assert_eq!(found.mended.unwrap().descriptor, 0x8000_0000_0005_0000);
        let found = look(0x5_0200 | 1, 0, &g);
        assert_eq!(found.mended, Some(L2Entry::zero_plain()));
        let compressed = L2Entry::compressed(HostOffset::new(0x5_0210), 100, 16).unwrap();
        let found = inspect(compressed.with_copied(true), 0, None, &g);
        assert_eq!((found.mended, found.errors.len()), (Some(compressed), 1));
        let e = geometry(3, true, false);
        let found = look(0x5_0200, 0xf_0000_0000, &e);
        assert_eq!(found.mended.unwrap(), L2Entry::subclustered(None, false, 0, 0xf));
    }

    #[test]
    fn a_subcluster_that_is_two_things_is_left_alone() {
        for raw in [0x5_0000, 0x5_0004] {
            let found = look(raw, 0x3_0000_0006, &geometry(3, true, false));
            assert_eq!((found.mended, found.lost), (None, false));
            assert_eq!(found.refers, Refers::Cluster(0x5_0000));
            assert!(!found.errors.is_empty());
        }
    }

    #[test]
    fn an_entry_of_which_only_a_flag_is_left_has_lost_its_cluster() {
        let found = look(1 << 63, 0, &geometry(3, false, false));
        assert!(found.lost && found.errors.is_empty() && found.mended.is_none());
        assert!(!look(1, 0, &geometry(3, false, false)).lost);
    }

    #[test]
    fn what_leads_nowhere_is_lost() {
        for (raw, bitmap, g) in [
            (0x5_0200, 0, geometry(3, false, false)),
            (0x5_0001, 0, geometry(2, false, false)),
            (0, 1, geometry(3, true, false)),
            (1 << 62, 0, geometry(3, false, true)),
            (0x0100_0000_0000_0000, 0, geometry(3, false, false)),
        ] {
            let found = look(raw, bitmap, &g);
            assert!(found.lost && found.mended.is_none() && found.errors.len() == 1, "{found:?}");
        }
    }
}
