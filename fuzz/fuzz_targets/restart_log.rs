//! `scripts/fuzz restart_log`
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| isobath_fuzz::restart_log(data));
