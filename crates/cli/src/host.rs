//! The host of images: files and block devices, exports of NBD servers, layers in stores, disks without contents, and
//! parts of all.
//!
//! The program uses one type of host, so that the engine is compiled once.

use crate::failure::Failure;
use crate::null::{self, NullHost};
use isobath_nbd_client::name::ExportName;
use isobath_nbd_client::{Encryption, NbdHost, OtherEncryption, is_name};
use isobath_remote::served::{self, RemoteHost};
use isobath_storage::either::{EitherHost, Side};
use isobath_storage::window::{Part, WindowHost};
use isobath_storage::{FileId, Host, Locking, OpenMode, StorageExt};
use isobath_storage_file::{FileHost, WriteAtOnce};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

/// The type of that host. The beginning of a name decides whether it is that of an export.
pub(crate) type ImageHost = WindowHost<WholeHost>;

type WholeHost = EitherHost<FileHost, OtherHost>;
type OtherHost = EitherHost<NbdHost, NeitherHost>;
type NeitherHost = EitherHost<NullHost, RemoteHost>;

/// A file, or something else.
type WholeFile = <WholeHost as Host>::File;
/// An export, a layer in a store, or a disk without contents.
type OtherFile = <OtherHost as Host>::File;

/// An open file of an image.
pub(crate) type ImageFile = <ImageHost as Host>::File;

static EXPORTS: LazyLock<NbdHost> = LazyLock::new(NbdHost::default);

static REMOTES: LazyLock<RemoteHost> = LazyLock::new(RemoteHost::default);

static IMAGES: LazyLock<ImageHost> = LazyLock::new(|| {
    let side = |second| if second { Side::Second } else { Side::First };
    let is_other =
        |name: &Path| null::is_name(name) || name.to_str().is_some_and(is_name) || is_stored(name);
    let neither = EitherHost::new(NullHost, REMOTES.clone(), move |name| side(is_stored(name)));
    let others = EitherHost::new(EXPORTS.clone(), neither, move |name| {
        side(null::is_name(name) || is_stored(name))
    });
    WindowHost::new(EitherHost::new(FileHost, others, move |name| side(is_other(name))))
});

/// The most bytes of images' files that a server maps at a time, unless told otherwise or half of the machine's memory
/// is less.
const MOST_MAPPED: u64 = 16 << 30;

/// Lets images that are opened from now on be read through mappings of together at most `most` bytes, or as many as is
/// usual. For servers, which read the same data again and again.
pub(crate) fn map_reads(most: Option<u64>) {
    FileHost.map_reads(most.unwrap_or_else(|| MOST_MAPPED.min(memory() / 2)));
}

/// Lets images be written to by the thread that serves them, where that hardly ever waits.
pub(crate) fn write_at_once() {
    FileHost.write_at_once(WriteAtOnce::OnDisks);
}

/// Bytes of memory that the machine has; 0 if the system does not say.
fn memory() -> u64 {
    // SAFETY: the calls have no preconditions.
    let found = unsafe { [libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)] };
    found.iter().map(|count| u64::try_from(*count).unwrap_or(0)).product()
}

/// The host of all images.
pub(crate) fn images() -> &'static ImageHost {
    &IMAGES
}

/// The chains in stores whose layers can be opened.
pub(crate) fn remotes() -> &'static RemoteHost {
    &REMOTES
}

/// Encrypts all later connections to an export.
///
/// # Errors
/// They are encrypted in another way.
pub(crate) fn encrypt_export(
    name: &ExportName,
    encryption: Encryption,
) -> Result<(), OtherEncryption> {
    EXPORTS.encrypt(name, encryption)
}

/// Forgets how exports are encrypted. No image is open.
pub(crate) fn forget_encryption() {
    EXPORTS.forget_encryption();
}

/// Whether a name is that of an NBD export, or of a part of one.
pub(crate) fn is_export(name: &Path) -> bool {
    match Part::of_name(name) {
        Some(part) => is_export(&part.file),
        None => name.to_str().is_some_and(is_name),
    }
}

/// Whether a name is that of a layer in a store.
pub(crate) fn is_stored(name: &Path) -> bool {
    name.to_str().is_some_and(served::is_name)
}

/// Whether a name is that of a file or a device, and not of anything else.
pub(crate) fn is_file_name(name: &Path) -> bool {
    Part::of_name(name).is_none() && !is_export(name) && !null::is_name(name) && !is_stored(name)
}

/// The path that opens the file of this name, even if the name looks like that of anything else.
pub(crate) fn path_of_file(name: &str) -> PathBuf {
    isobath_storage::window::path_of_file(name, |name| images().is_no_path(name))
}

/// Refuses the name of an export or a part for an operation that only files support.
///
/// # Errors
/// The name is that of an export or a part.
pub(crate) fn only_files(name: &Path, what: &str) -> Result<(), Failure> {
    if Part::of_name(name).is_some() || null::is_name(name) || is_stored(name) {
        return Err(Failure::new(format_args!("{what} works on whole files and devices only")));
    }
    if !is_export(name) {
        return Ok(());
    }
    Err(Failure::new(format_args!(
        "'{}' is an NBD export: {what} works on files and devices only; for a file of this name, use './NAME'",
        isobath_storage::shown(name)
    )))
}

/// The identity of an image in the file with this ID in the file system.
pub(crate) fn id_of_file(id: FileId) -> FileId {
    WholeFile::id_of(Side::First, id)
}

/// The identity of the image with this name, if there is one. This does not connect to a server, since a server for a
/// single client would accept no other afterwards.
pub(crate) async fn identity(name: &Path) -> Option<FileId> {
    if let Some(part) = Part::of_name(name) {
        return Box::pin(identity(&part.file)).await;
    }
    if is_export(name) {
        let id = isobath_nbd_client::identity(name).ok()?;
        return Some(WholeFile::id_of(Side::Second, OtherFile::id_of(Side::First, id)));
    }
    let look = OpenMode { locking: Locking::Unlocked, ..OpenMode::default() };
    images().open(name, look).await.ok().map(|file| file.id())
}
