//! What tests share: images in memory, what a crash does to each change, and whether QEMU finds what is
//! left consistent.

#![allow(dead_code, reason = "each test uses a part of it")]

use isobath_qcow2::NewImage;
use isobath_storage::memory::MemoryHost;
use isobath_storage::recorder::{Entry, Fate};
use isobath_storage::{Host, IoBuf, OpenMode, Storage};
use isobath_testkit::qemu;
use rand::RngExt;
use rand::rngs::StdRng;
use std::path::Path;

/// Writes a new image.
pub(crate) async fn make(host: &MemoryHost, name: &str, image: &NewImage) {
    let plan = image.plan().unwrap();
    let mode = OpenMode { writable: true, ..OpenMode::default() };
    let file = host.create(Path::new(name), mode).await.unwrap();
    for (offset, bytes) in plan.writes() {
        file.write_at(offset.get(), IoBuf::copy_of(&bytes)).await.unwrap();
    }
    file.set_len(plan.file_length()).await.unwrap();
}

/// Keeps each change with the probability `keep`, some of those torn.
pub(crate) fn random_fates(rng: &mut StdRng, keep: f64) -> impl FnMut(usize, &Entry) -> Fate {
    move |_, _| match rng.random_bool(keep) {
        true if rng.random_bool(0.2) => Fate::Torn(512 * rng.random_range(0..16)),
        true => Fate::Kept,
        false => Fate::Lost,
    }
}

/// The host's files in a directory of their own.
pub(crate) fn export(host: &MemoryHost) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for file in host.names() {
        std::fs::write(directory.path().join(&file), host.contents(&file).unwrap()).unwrap();
    }
    directory
}

/// QEMU finds nothing wrong with an image but leaks.
pub(crate) fn assert_consistent(host: &MemoryHost, image: impl AsRef<Path>) {
    let directory = export(host);
    let checked = qemu::check(&directory.path().join(image));
    assert!([0, 3].contains(&checked.code()), "{}", checked.report());
}
