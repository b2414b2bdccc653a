//! Compressed clusters: arbitrary data, damaged data, and round trips.
#![no_main]

use isobath_qcow2::CompressionType;
use isobath_qcow2::compress::{compress, decompress};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((&[kind, bits, at, with], data)) = data.split_first_chunk() else { return };
    let kind = if kind & 1 == 0 { CompressionType::Zlib } else { CompressionType::Zstd };
    let mut cluster = vec![0; 1 << (9 + bits % 8)];
    let _ = decompress(kind, data, &mut cluster);
    if let Some(mut packed) = compress(kind, data) {
        assert!(packed.len() < data.len());
        let mut back = vec![0; data.len()];
        decompress(kind, &packed, &mut back).expect("what was compressed here");
        assert_eq!(back, data);
        let at = usize::from(at) % packed.len();
        packed[at] ^= with;
        let _ = decompress(kind, &packed, &mut back);
        let _ = decompress(kind, &packed[at..], &mut cluster);
        let _ = decompress(kind, &packed[..at], &mut cluster);
    }
});
