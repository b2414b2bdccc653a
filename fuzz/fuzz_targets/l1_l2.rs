//! `scripts/fuzz l1_l2`
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| isobath_fuzz::l1_l2(data));
