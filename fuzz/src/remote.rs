//! What is read from a store of chains.

use isobath_remote::{Heads, Manifest, Trace};

/// A manifest, a trace or, behind a byte with their number, the heads of layers: what is accepted is written as it was
/// read, and names no file elsewhere.
pub fn remote(input: &[u8]) {
    if let Ok(manifest) = Manifest::decode("fuzz", input) {
        let encoded = manifest.encode().expect("it was short enough");
        assert_eq!(Manifest::decode("fuzz", &encoded).expect("it was just written"), manifest);
        assert!(manifest.layers.iter().all(|layer| !layer.file.contains(['/', '\0'])));
        assert_eq!(manifest.layers.iter().filter(|layer| layer.backing.is_none()).count(), 1);
    }
    if let Ok(trace) = Trace::decode(input) {
        assert_eq!(trace.encode(), input);
    }
    let Some((layers, rest)) = input.split_first() else { return };
    if let Ok(heads) = Heads::decode(rest, usize::from(*layers)) {
        let mut written = heads.encode();
        let again = Heads::decode(&written, usize::from(*layers)).expect("they were just written");
        // Which version they were read from is not written.
        assert_eq!((again.layers(), again.index()), (heads.layers(), heads.index()));
        // The first version is not written any more.
        if rest[7] == written[7] {
            // The reserved bytes are ignored.
            written[20..24].copy_from_slice(&rest[20..24]);
            assert_eq!(written, rest);
        }
    }
}
