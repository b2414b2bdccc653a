//! Small disks in memory, and what must never be, made to be: for tests.

use crate::disk::Disk;
use crate::live::LiveDisk;
use futures_executor::block_on;
use isobath_chain::create::{NewDisk, create};
use isobath_image::options::OpenOptions;
use isobath_image::writer::{Qcow2Writer, Writer};
use isobath_image::{DiskError, Result};
use isobath_storage::memory::{MemoryFile, MemoryHost};
use isobath_storage_test::careless::{CarelessHost, Slips};
use std::fmt::Debug;
use std::path::Path;
use std::sync::Arc;

/// Bytes in a cluster.
pub(crate) const CLUSTER: u64 = 1 << 16;
/// Bytes of a disk.
pub(crate) const SIZE: u64 = 4 << 20;

/// An empty disk.
pub(crate) fn disk() -> Disk<MemoryHost> {
    disk_of(&NewDisk::new(SIZE))
}

/// A new disk, open for writing.
pub(crate) fn disk_of(new: &NewDisk) -> Disk<MemoryHost> {
    make(&MemoryHost::new(), "0", new)
}

/// A disk of so many layers, named by their numbers.
pub(crate) fn chain_of(layers: usize) -> Disk<MemoryHost> {
    chain_with(layers, &NewDisk::new(SIZE))
}

/// The same, with other options for the active layer.
fn chain_with(layers: usize, active: &NewDisk) -> Disk<MemoryHost> {
    let host = MemoryHost::new();
    for number in 0..layers - 1 {
        make(&host, &number.to_string(), &below(number, NewDisk::new(SIZE)));
    }
    make(&host, &(layers - 1).to_string(), &below(layers - 1, active.clone()))
}

/// An overlay in version 2 of the format, which has no entries of zeroes.
pub(crate) fn old_overlay() -> Disk<MemoryHost> {
    let mut new = NewDisk::new(SIZE);
    new.version = 2;
    chain_with(2, &new)
}

fn below(number: usize, new: NewDisk) -> NewDisk {
    match number.checked_sub(1) {
        Some(below) => new.backing_file(below.to_string(), "qcow2"),
        None => new,
    }
}

fn make(host: &MemoryHost, name: &str, new: &NewDisk) -> Disk<MemoryHost> {
    block_on(Box::pin(create(host, Path::new(name), new))).unwrap();
    open(host, name)
}

/// Opens an image for writing.
pub(crate) fn open(host: &MemoryHost, name: &str) -> Disk<MemoryHost> {
    open_as(host, name, &OpenOptions::new().writable(true))
}

/// Opens an image with other options.
pub(crate) fn open_as(host: &MemoryHost, name: &str, options: &OpenOptions) -> Disk<MemoryHost> {
    block_on(Box::pin(Disk::open(host.clone(), Path::new(name), options))).unwrap()
}

/// A new disk on a host that can be made careless.
pub(crate) fn careless_disk() -> (Disk<CarelessHost<MemoryHost>>, Slips) {
    let host = CarelessHost::around(MemoryHost::new());
    let options = OpenOptions::new().writable(true);
    let disk = block_on(async {
        Box::pin(create(&host, Path::new("0"), &NewDisk::new(SIZE))).await.unwrap();
        Box::pin(Disk::open(host.clone(), Path::new("0"), &options)).await.unwrap()
    });
    (disk, host.slips().clone())
}

/// The disk with a chain that can change.
pub(crate) fn live(disk: Disk<MemoryHost>) -> Arc<LiveDisk<MemoryHost>> {
    let options = OpenOptions::new().writable(true);
    LiveDisk::new(disk, &options, Arc::<crate::clock::SystemClock>::default())
}

/// The write side of a disk.
pub(crate) fn writers(disk: &Disk<MemoryHost>) -> (&Writer<MemoryFile>, &Qcow2Writer<MemoryFile>) {
    let writer = disk.writer().unwrap();
    (writer, writer.qcow2().unwrap())
}

/// Fails unless the invariant `what` was violated.
#[track_caller]
pub(crate) fn must_violate<T: Debug>(done: Result<T>, what: &str) {
    match done {
        Err(DiskError::Internal { violated, .. }) => assert_eq!(violated, what),
        other => panic!("{other:?} although not: {what}"),
    }
}

/// Fails unless `change` violates the invariant `what`, and says so by a panic.
#[track_caller]
pub(crate) fn must_panic<T>(change: impl FnOnce() -> T, what: &str) {
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(change())));
    let payload = caught.expect_err(what);
    let text = payload.downcast_ref::<String>().unwrap();
    assert!(text.contains(what), "{text}");
}
