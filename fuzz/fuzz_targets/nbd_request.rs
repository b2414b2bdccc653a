//! `scripts/fuzz nbd_request`
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| isobath_fuzz::nbd_request(data));
