//! `scripts/fuzz nbd_starttls`
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| isobath_fuzz::nbd_starttls(data));
