//! `scripts/fuzz nbd_handshake`
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| isobath_fuzz::nbd_handshake(data));
