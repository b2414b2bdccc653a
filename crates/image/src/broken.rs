//! What tests of invariants share.

use crate::layer::{Layer, Qcow2Layer};
use crate::open::{Opening, open_layer};
use crate::options::OpenOptions;
use crate::writer::{Qcow2Writer, Writer};
use crate::{DiskError, Result};
use futures_executor::block_on;
use isobath_qcow2::NewImage;
use isobath_storage::memory::{MemoryFile, MemoryHost};
use isobath_storage::{Host, IoBuf, Storage, StorageExt};
use isobath_sync::Invariants;
use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

/// The name of the image that tests make.
pub(crate) const NAME: &str = "image";

/// A structure is sound, and after a change it violates the invariant `what`.
#[track_caller]
pub(crate) fn assert_violated<T: Invariants>(
    what: &str,
    mut structure: T,
    change: impl FnOnce(&mut T),
) {
    structure.check_invariants();
    change(&mut structure);
    must_panic(|| structure.check_invariants(), what);
}

/// Fails unless `change` violates the invariant `what`, and says so by a panic.
#[track_caller]
pub(crate) fn must_panic<T>(change: impl FnOnce() -> T, what: &str) {
    let caught = catch_unwind(AssertUnwindSafe(|| drop(change())));
    let panic = caught.expect_err(what);
    let text = panic.downcast_ref::<String>().unwrap();
    assert!(text.contains(what), "{what}: {text}");
}

/// Fails unless a request violates the invariant `what`, and returns it as its error.
#[track_caller]
pub(crate) fn must_violate<T: Debug>(done: Result<T>, what: &str) {
    match done {
        Err(DiskError::Internal { violated, .. }) => assert_eq!(violated, what),
        other => panic!("{other:?} although not: {what}"),
    }
}

/// A host with a new image of 1 GiB.
pub(crate) fn host() -> MemoryHost {
    let host = MemoryHost::new();
    block_on(async {
        let mode = OpenOptions::new().mode(true);
        let file = host.create(Path::new(NAME), mode).await.unwrap();
        let plan = NewImage::new(1 << 30).plan().unwrap();
        file.set_len(plan.file_length()).await.unwrap();
        for (at, bytes) in plan.writes() {
            file.write_at(at.get(), IoBuf::copy_of(&bytes)).await.unwrap();
        }
    });
    host
}

/// A new image, open for writing.
pub(crate) fn layer() -> Arc<Layer<MemoryFile>> {
    layer_on(&host())
}

/// The image of a host, open for writing.
pub(crate) fn layer_on<H: Host>(host: &H) -> Arc<Layer<H::File>> {
    let options = OpenOptions::new().writable(true);
    let opened = open_layer(host, Path::new(NAME), Opening::of(&options));
    Arc::new(block_on(Box::pin(opened)).unwrap())
}

/// The write side of a new image.
pub(crate) fn writer(options: &OpenOptions) -> Writer<MemoryFile> {
    writer_of(&layer(), options)
}

/// The write side of an image that is open for writing.
pub(crate) fn writer_of<S: Storage>(layer: &Arc<Layer<S>>, options: &OpenOptions) -> Writer<S> {
    let layer = Qcow2Layer::of(layer).unwrap();
    block_on(Box::pin(Writer::open(&layer, options, true))).unwrap()
}

/// What it needs because the image is qcow2.
pub(crate) fn qcow2<S: Storage>(writer: &Writer<S>) -> &Qcow2Writer<S> {
    writer.qcow2().unwrap()
}
