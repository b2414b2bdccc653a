//! Opening descriptors, with their locks.

use super::beside::LetIn;
use super::copies::{self, Copied};
use super::descriptor_sets::{self, InUse};
use super::descriptors::{Permit, Pool};
use super::landing::Landing;
use super::pause::pause;
use super::transfer::Target;
use super::{sys, users};
use crate::lock::{self, Locks, Wanted};
use isobath_ring::place::open_checked;
use isobath_storage::error::{Operation, StorageError};
use isobath_storage::{FileId, Locking, OpenMode, Result, is_descriptor_set};
use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Waits for another user of an image to release its locks: a killed program holds them a little longer, until the
/// kernel has ended its operations.
const LOCK_STEP: Duration = Duration::from_millis(10);
const LOCK_STEPS: u32 = 100;

/// How often a file is opened anew that was replaced while its locks were waited for.
pub(super) const MOST_REPLACED: u32 = 100;

/// An error without the file's name yet, or one that has it already.
pub(super) enum Failure {
    Plain(io::Error),
    Named(StorageError),
}

impl Failure {
    pub(super) fn named(self, operation: Operation, name: &Path) -> StorageError {
        match self {
            Self::Plain(error) => StorageError::new(operation, name, error),
            Self::Named(error) => error,
        }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Plain(error)
    }
}

impl From<StorageError> for Failure {
    fn from(error: StorageError) -> Self {
        Self::Named(error)
    }
}

pub(super) type Attempt<T> = std::result::Result<T, Failure>;

/// What kind of file it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A regular file.
    Regular,
    /// A block device with logical blocks of this many bytes.
    Device { block: u32 },
}

/// A descriptor just opened, with the requested locks.
pub(super) struct Opened {
    pub(super) target: Target,
    pub(super) id: FileId,
    pub(super) kind: Kind,
}

impl Opened {
    /// Whether the file still has this name: while its locks were waited for, it may have been deleted or replaced.
    pub(super) fn is_at(&self, path: &Path) -> io::Result<bool> {
        match fs::metadata(path) {
            Ok(found) => Ok(id_at(&found) == self.id),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// Which file was found by a name: what an open file of this host says of itself.
pub fn id_at(found: &Metadata) -> FileId {
    if found.file_type().is_block_device() {
        // A device is the same whichever node it is opened through.
        FileId { device: u64::MAX, inode: found.rdev() }
    } else {
        FileId { device: found.dev(), inode: found.ino() }
    }
}

/// Owns a file's descriptor, its locks and its place in the pool, which are released in this order; readers that let it
/// in keep others out again before that.
struct OpenDescriptor {
    _let_in: Option<Box<LetIn>>,
    _locks: Option<Locks>,
    _copied: Option<Copied>,
    _file: Arc<OwnedFd>,
    _in_use: Option<InUse>,
    _permit: Permit,
    landing: Arc<Landing>,
}

impl isobath_ring::Leased for OpenDescriptor {
    fn orphaned(&self) {
        self.landing.orphaned();
    }

    fn landed(&self) {
        self.landing.landed();
    }
}

/// How the locks of a mode are taken.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Taking {
    /// If no other user has conflicting locks.
    Alone,
    /// Beside this process's own writer of the same file.
    BesideWriter,
}

/// Opens the existing file at `path`, called `name` in messages.
pub(super) async fn descriptor(
    path: &Path,
    name: &Path,
    mode: OpenMode,
    taking: Taking,
    pool: &Arc<Pool>,
) -> Result<Opened> {
    let handed_in = is_descriptor_set(path);
    let open = async || {
        let permit = pool.admit().await;
        let (file, in_use) = if handed_in {
            let (file, in_use) = pool.open(|| descriptor_sets::open(path, mode)).await?;
            (file, Some(in_use))
        } else {
            let file = pool.open(|| existing(path, mode)).await;
            (file.map_err(|error| explain_direct(error, mode))?, None)
        };
        attach(file, in_use, name, mode, taking, permit, pool).await
    };
    let opened = async {
        for _ in 0..MOST_REPLACED {
            let opened = open().await?;
            if handed_in || mode.locking == Locking::Unlocked || opened.is_at(path)? {
                return Ok(opened);
            }
        }
        Err(replaced().into())
    };
    opened.await.map_err(|error: Failure| error.named(Operation::Open, name))
}

pub(super) fn replaced() -> io::Error {
    io::Error::new(io::ErrorKind::ResourceBusy, "other programs replace it again and again")
}

/// `O_NONBLOCK`, so that no open waits, even if the name now refers to something else.
pub(super) fn options(mode: OpenMode) -> OpenOptions {
    let direct = if mode.direct { libc::O_DIRECT } else { 0 };
    let mut options = OpenOptions::new();
    options.read(true).write(mode.writable);
    options.custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY | direct).mode(0o644);
    options
}

/// Opens an existing file. Its type is checked before, since opening a device can have side effects.
pub(super) fn existing(path: &Path, mode: OpenMode) -> io::Result<File> {
    open_checked(path, &options(mode), |found| check_type(found.st_mode, found.st_rdev, mode))
}

/// Takes the locks of an open file, which may be a copy of a descriptor that was handed in.
pub(super) async fn attach(
    file: File,
    in_use: Option<InUse>,
    name: &Path,
    mode: OpenMode,
    taking: Taking,
    permit: Permit,
    pool: &Pool,
) -> Attempt<Opened> {
    let file: Arc<OwnedFd> = Arc::new(file.into());
    let stat = sys::stat(&file)?;
    check_type(stat.st_mode, stat.st_rdev, mode)?;
    match in_use {
        // Others may have copies of it.
        Some(_) => sys::clear_nonblocking(&file)?,
        None => sys::set_blocking(&file, mode.direct)?,
    }
    let device = stat.st_mode & libc::S_IFMT == libc::S_IFBLK;
    let kind =
        if device { Kind::Device { block: sys::device_block(&file)? } } else { Kind::Regular };
    let id = if device {
        // A device is the same whichever node it is opened through.
        FileId { device: u64::MAX, inode: stat.st_rdev }
    } else {
        FileId { device: stat.st_dev, inode: stat.st_ino }
    };
    let wanted = Wanted::of(mode);
    let copied = match in_use {
        Some(_) => Some(copies::register(&file, id, wanted.is_some())?),
        None => None,
    };
    let (let_in, locks) = match wanted {
        None => (None, None),
        Some(_) if taking == Taking::BesideWriter => (None, Some(lock::join(&file, name)?)),
        Some(wanted) => {
            let besides = pool.besides();
            let free = || besides.look(id, &file, name, wanted);
            let take = || besides.take(id, &file, name, wanted);
            let waits = mode.locking != Locking::Immediate;
            let taken = if waits { wait_for(free, take).await } else { take() };
            match taken {
                Ok((let_in, locks)) => (let_in, Some(locks)),
                // Where there are no locks, nobody deletes what is used here: that needs one.
                Err(error)
                    if mode.locking == Locking::Present
                        && error.kind() != io::ErrorKind::ResourceBusy =>
                {
                    (None, None)
                }
                Err(error) => {
                    // Readers that let it in are not what is in its way.
                    let let_in = wanted.writes() && besides.admits(id);
                    let bytes = wanted.conflicting().filter(|_| !let_in).collect::<Vec<_>>();
                    return Err(users::named_at_open(error, &file, &bytes).into());
                }
            }
        }
    };
    let landing = Arc::<Landing>::default();
    let lease = Arc::new(OpenDescriptor {
        _let_in: let_in.map(Box::new),
        _locks: locks,
        _copied: copied,
        _file: file.clone(),
        _in_use: in_use,
        _permit: permit,
        landing: landing.clone(),
    });
    Ok(Opened { target: Target { file, lease, landing }, id, kind })
}

/// Repeats an attempt that another user of the file is in the way of: it may be about to end. Before each, `free` tells
/// whether it is gone.
pub(super) async fn wait_for<T>(
    free: impl Fn() -> Result<()>,
    mut take: impl FnMut() -> Result<T>,
) -> Result<T> {
    let busy = |error: &StorageError| error.kind() == io::ErrorKind::ResourceBusy;
    let mut taken = take();
    for _ in 0..LOCK_STEPS {
        if !taken.as_ref().is_err_and(busy) {
            break;
        }
        pause(LOCK_STEP).await;
        // Test first, so that others do not see locks that come and go.
        taken = free().and_then(|()| take());
    }
    taken
}

/// `/dev/null`, as a file's `rdev`.
const NULL_DEVICE: u64 = libc::makedev(1, 3);

/// Checks the type in a file's `mode`. `/dev/null` can be read, as an empty image: programs name it as the backing file
/// of an image without one.
pub(super) fn check_type(kind: u32, rdev: u64, mode: OpenMode) -> io::Result<()> {
    let what = match kind & libc::S_IFMT {
        libc::S_IFREG | libc::S_IFBLK => return Ok(()),
        libc::S_IFCHR if rdev == NULL_DEVICE && !mode.writable => return Ok(()),
        libc::S_IFDIR => return Err(io::Error::from_raw_os_error(libc::EISDIR)),
        libc::S_IFIFO => "a named pipe",
        libc::S_IFSOCK => "a socket",
        _ => "a character device",
    };
    let text = format!("it is {what}; an image is a regular file or a block device");
    Err(io::Error::new(io::ErrorKind::InvalidInput, text))
}

pub(super) fn no_direct(error: &io::Error) -> io::Error {
    let text = format!(
        "the file system does not support O_DIRECT ({error}); use the page cache (--cache writeback)"
    );
    io::Error::new(io::ErrorKind::Unsupported, text)
}

pub(super) fn explain_direct(error: io::Error, mode: OpenMode) -> io::Error {
    if mode.direct && error.raw_os_error() == Some(libc::EINVAL) {
        return no_direct(&error);
    }
    error
}
