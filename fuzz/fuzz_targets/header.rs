//! The header: from arbitrary bytes, and from a valid one with changes.
#![no_main]

use isobath_qcow2::{Extension, Header, NewImage, ParseMode, is_qcow2};
use libfuzzer_sys::fuzz_target;

fn check(bytes: &[u8]) {
    let _ = is_qcow2(bytes);
    let _ = Header::probe_length(bytes);
    for mode in [ParseMode::Open, ParseMode::Check] {
        let Ok(mut header) = Header::parse_for(bytes, mode) else { continue };
        let geometry = header.geometry().expect("checked by the parser");
        assert!(geometry.l1_size_for(header.size) <= u64::from(header.l1_size));
        let Ok(encoded) = header.encode() else { continue };
        let mut again = Header::parse_for(&encoded, mode).expect("what was encoded here");
        for header in [&mut header, &mut again] {
            // These are completed with the known names.
            header.extensions.retain(|e| !matches!(e, Extension::FeatureNames(_)));
        }
        assert_eq!(header, again);
    }
}

fuzz_target!(|data: &[u8]| {
    check(data);
    let Some((&[options, bits], rest)) = data.split_first_chunk() else { return };
    let version = if options & 1 != 0 { 2 } else { 3 };
    let image = NewImage {
        version,
        cluster_bits: 9 + u32::from(bits) % 6,
        extended_l2: options & 2 != 0,
        lazy_refcounts: options & 4 != 0,
        data_file: (options & 8 != 0).then(|| "data".into()),
        backing_file: (options & 16 != 0).then(|| "base".into()),
        backing_format: (options & 16 != 0).then(|| "raw".into()),
        ..NewImage::new(1 << 20)
    };
    let Ok(plan) = image.plan() else { return };
    let mut bytes = plan.header().encode().expect("a valid header");
    for change in rest.chunks_exact(4) {
        let at = usize::from(u16::from_be_bytes([change[0], change[1]])) % bytes.len();
        bytes[at] = change[2];
        if let Some(next) = bytes.get_mut(at + 1) {
            *next = change[3];
        }
    }
    check(&bytes);
});
