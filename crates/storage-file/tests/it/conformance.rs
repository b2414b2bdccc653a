//! Every host behaves the same.

use isobath_ring::block_on;
use isobath_ring::{Config, Executor};
use isobath_storage::memory::MemoryHost;
use isobath_storage_file::{FileHost, WriteAtOnce};
use isobath_storage_test::any::ToAny;
use isobath_storage_test::conformance;
use std::path::Path;
use tempfile::TempDir;

/// On the disk of the build, since a file system in memory can lack `O_DIRECT`.
fn directory() -> TempDir {
    TempDir::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

#[test]
fn memory() {
    block_on(conformance::check(&MemoryHost::new(), Path::new("/images"), false));
}

#[test]
fn files_through_the_page_cache() {
    let executor = Executor::new(&Config::default()).unwrap();
    executor.block_on(conformance::check(&FileHost, directory().path(), false));
}

#[test]
fn files_past_the_page_cache() {
    let executor = Executor::new(&Config::default()).unwrap();
    executor.block_on(conformance::check(&FileHost, directory().path(), true));
}

#[test]
fn hosts_whose_type_is_forgotten() {
    block_on(conformance::check(&MemoryHost::new().any(), Path::new("/images"), false));
    let executor = Executor::new(&Config::default()).unwrap();
    executor.block_on(conformance::check(&FileHost.any(), directory().path(), false));
}

#[test]
fn files_with_a_tiny_ring() {
    let executor = Executor::new(&Config { entries: 1, batch: 1, ..Config::default() }).unwrap();
    executor.block_on(conformance::check(&FileHost, directory().path(), false));
    executor.block_on(conformance::check(&FileHost, directory().path(), true));
}

#[test]
fn files_without_a_ring() {
    block_on(conformance::check(&FileHost, directory().path(), false));
    block_on(conformance::check(&FileHost, directory().path(), true));
}

#[test]
fn files_that_are_written_to_at_once() {
    let host = FileHost::with_descriptors(10);
    host.write_at_once(WriteAtOnce::Anywhere);
    let executor = Executor::new(&Config::default()).unwrap();
    executor.block_on(conformance::check(&host, directory().path(), false));
    executor.block_on(conformance::check(&host, directory().path(), true));
}

#[test]
fn files_that_share_descriptors() {
    let host = FileHost::with_descriptors(2);
    let executor = Executor::new(&Config::default()).unwrap();
    executor.block_on(conformance::check(&host, directory().path(), false));
    block_on(conformance::check(&host, directory().path(), true));
}
