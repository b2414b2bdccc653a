//! `scripts/fuzz job_file`
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| isobath_fuzz::job_file(data));
