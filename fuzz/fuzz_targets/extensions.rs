//! Header extensions and the feature name table.
#![no_main]

use isobath_qcow2::{Extension, Geometry};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(extensions) = Extension::parse_all(data) else { return };
    let geometry = Geometry::new(3, 16, 4, false, false).expect("a valid geometry");
    let mut encoded = Vec::new();
    for extension in &extensions {
        match extension {
            Extension::FeatureNames(table) => {
                for entry in &table.entries {
                    assert!(!entry.text().contains(char::is_control));
                    let _ = table.describe(entry.kind, u64::MAX);
                }
                assert_eq!(table.completed().completed(), table.completed());
            }
            Extension::Bitmaps(bitmaps) => drop(bitmaps.validate(&geometry)),
            _ => {}
        }
        extension.encode(&mut encoded);
    }
    Extension::encode_end(&mut encoded);
    assert_eq!(Extension::parse_all(&encoded), Ok(extensions));
});
