//! What the crash tests share: what a crash does to each change, and whether QEMU finds what is left
//! consistent.

use isobath_storage::memory::MemoryHost;
use isobath_storage::recorder::{Entry, Fate};
use isobath_testkit::qemu;
use rand::RngExt;
use rand::rngs::StdRng;
use std::path::Path;

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
