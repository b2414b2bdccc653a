//! The snapshot table.
#![no_main]

use isobath_qcow2::{Geometry, Snapshot};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((&[count], table)) = data.split_first_chunk() else { return };
    let geometry = Geometry::new(3, 16, 4, false, false).expect("a valid geometry");
    let Ok((snapshots, length)) = Snapshot::parse_table(table, count.into()) else { return };
    assert!(length < table.len() + 8);
    let mut at = 0;
    for snapshot in &snapshots {
        at += Snapshot::entry_length(&table[at..]).expect("parsed before");
        let _ = snapshot.check(&geometry);
        assert!(!snapshot.name_text().contains(char::is_control));
        assert!(!snapshot.id_text().contains(char::is_control));
    }
    assert_eq!(at, length);
    let encoded = Snapshot::encode_table(&snapshots).expect("parsed before");
    assert_eq!(Snapshot::parse_table(&encoded, count.into()), Ok((snapshots, encoded.len())));
});
