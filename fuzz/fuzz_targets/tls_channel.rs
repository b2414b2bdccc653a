//! `scripts/fuzz tls_channel`
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| isobath_fuzz::tls_channel(data));
