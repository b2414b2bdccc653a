//! Where images are: in files and on block devices, or on NBD servers.
//!
//! The program uses one type of host, so that the engine is compiled once.

use crate::failure::Failure;
use isobath_nbd_client::{NbdHost, is_name};
use isobath_storage::either::{EitherHost, Side};
use isobath_storage::{FileId, Host, Locking, OpenMode, StorageExt};
use isobath_storage_file::FileHost;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

/// The host of all images: a name that begins like that of an NBD export is one.
pub(crate) type ImageHost = EitherHost<FileHost, NbdHost>;

/// An open file of an image.
pub(crate) type ImageFile = <ImageHost as Host>::File;

static IMAGES: LazyLock<ImageHost> = LazyLock::new(|| {
    EitherHost::new(FileHost, NbdHost::default(), |name| {
        if is_export(name) { Side::Second } else { Side::First }
    })
});

/// The host of all images.
pub(crate) fn images() -> &'static ImageHost {
    &IMAGES
}

/// Whether a name is that of an NBD export.
pub(crate) fn is_export(name: &Path) -> bool {
    name.to_str().is_some_and(is_name)
}

/// The path of a file, which is none of an export even if it looks like one.
pub(crate) fn path_of_file(name: &str) -> PathBuf {
    if is_name(name) { Path::new(".").join(name) } else { name.into() }
}

/// Refuses the name of an export for what only files can do.
///
/// # Errors
/// It is one.
pub(crate) fn only_files(name: &Path, what: &str) -> Result<(), Failure> {
    if !is_export(name) {
        return Ok(());
    }
    Err(Failure::new(format_args!(
        "'{}' is an NBD export: {what} works on files and devices only; for a file of this name, use './NAME'",
        isobath_storage::shown(name)
    )))
}

/// What identifies an image in a file that has this id in the file system.
pub(crate) fn id_of_file(id: FileId) -> FileId {
    ImageFile::id_of(Side::First, id)
}

/// What identifies the image of this name, if there is one. No server is asked: one that serves a single client would
/// not serve another afterwards.
pub(crate) async fn identity(name: &Path) -> Option<FileId> {
    if is_export(name) {
        let id = isobath_nbd_client::identity(name).ok()?;
        return Some(ImageFile::id_of(Side::Second, id));
    }
    let look = OpenMode { locking: Locking::Unlocked, ..OpenMode::default() };
    images().open(name, look).await.ok().map(|file| file.id())
}
