//! L1 and L2 tables of any geometry.
#![no_main]

use isobath_qcow2::{ClusterKind, Geometry, GuestOffset, L1Entry, L2Entry};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((&[version, bits, flags], table)) = data.split_first_chunk() else { return };
    let Ok(geometry) =
        Geometry::new(version.into(), bits.into(), 4, flags & 1 != 0, flags & 2 != 0)
    else {
        return;
    };
    let mut copy = table.to_vec();
    for index in 0.. {
        let Some(entry) = L1Entry::read(table, index) else { break };
        if let Ok(Some(offset)) = entry.offset(&geometry) {
            let again = L1Entry::new(offset, entry.is_copied(), &geometry).expect("valid");
            assert_eq!(again.raw(), entry.raw() & !entry.reserved_bits());
        }
        entry.write(&mut copy, index).expect("in the table");
    }
    assert_eq!(copy, table);
    for index in 0.. {
        let Some(entry) = L2Entry::read(table, index, &geometry) else { break };
        entry.write(&mut copy, index, &geometry).expect("in the table");
        let _ = entry.reserved_bits(&geometry);
        let Ok(kind) = entry.kind(&geometry) else { continue };
        let _ = kind.check_data_file(GuestOffset::new(0), &geometry);
        if let Some(offset) = kind.host_cluster() {
            assert!(geometry.is_aligned(offset) && offset.get() < 1 << 56);
        }
        match kind {
            ClusterKind::Compressed(c) => {
                assert!(c.length > 0 && c.length <= 2 * geometry.cluster_size());
                assert!(c.offset < c.end() && c.end().get() % 512 == 0);
                let bits = geometry.cluster_bits();
                let again = L2Entry::compressed(c.offset, c.length, bits).expect("valid");
                assert_eq!(again.kind(&geometry), Ok(kind));
            }
            ClusterKind::Subclusters { offset, allocated, zero, .. } => {
                assert!(allocated & zero == 0 && (offset.is_some() || allocated == 0));
            }
            _ => {}
        }
    }
    assert_eq!(copy, table);
});
