//! The bitmap directory and bitmap tables.
#![no_main]

use isobath_qcow2::{Bitmap, BitmapCluster, Geometry};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((&[count, bits], data)) = data.split_first_chunk() else { return };
    let Ok(geometry) = Geometry::new(3, bits.into(), 4, false, false) else { return };
    let mut copy = data.to_vec();
    for index in 0.. {
        let Some(entry) = BitmapCluster::read(data, index, &geometry) else { break };
        if let Ok(cluster) = entry {
            cluster.write(&mut copy, index).expect("in the table");
        }
    }
    assert_eq!(copy, data);
    let Ok(bitmaps) = Bitmap::parse_directory(data, count.into()) else { return };
    for bitmap in &bitmaps {
        for size in [0, 1 << 30, u64::MAX] {
            let _ = bitmap.validate(&geometry, size);
            let _ = bitmap.table_size_for(&geometry, size);
        }
        assert!(!bitmap.name_text().contains(char::is_control));
    }
    if let Ok(encoded) = Bitmap::encode_directory(&bitmaps) {
        assert_eq!(Bitmap::parse_directory(&encoded, count.into()), Ok(bitmaps));
    }
});
