//! `scripts/fuzz tls_name`
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| isobath_fuzz::tls_name(data));
