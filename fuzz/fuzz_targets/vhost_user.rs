//! `cargo fuzz run vhost_user`
#![no_main]
libfuzzer_sys::fuzz_target!(|input: &[u8]| isobath_fuzz::vhost_user(input));
