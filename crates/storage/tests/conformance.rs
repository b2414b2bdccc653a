//! Every place where bytes can be kept behaves the same.

#![allow(clippy::unwrap_used)]

mod common;

use isobath_storage::block_on;
use isobath_storage::memory::MemoryHost;
use std::path::Path;

#[test]
fn memory() {
    block_on(common::conformance(&MemoryHost::new(), Path::new("/images"), false));
}
