//! `cargo fuzz run nbd_session`
#![no_main]
libfuzzer_sys::fuzz_target!(|input: &[u8]| isobath_fuzz::nbd_session(input));
