//! `scripts/fuzz vhost_messages`
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| isobath_fuzz::vhost_messages(data));
