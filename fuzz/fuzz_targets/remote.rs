//! `scripts/fuzz remote`
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| isobath_fuzz::remote(data));
