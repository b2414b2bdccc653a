//! Opening files.

use super::beside::LetIn;
use super::cached::Cached;
use super::descriptors::{Permit, Pool};
use super::direct::Direct;
use super::flush::Durability;
use super::landing::Landing;
use super::roles::Writing;
use super::source::{Named, Source};
use super::stamp::pause;
use super::transfer::Target;
use super::zero::Abilities;
use super::{FileStorage, Kind, sys, users};
use crate::error::{Operation, StorageError};
use crate::lock::{self, Locks, Wanted};
use crate::{FileId, Host, Locking, OpenMode, Result};
use arc_swap::ArcSwap;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Waits for another user of an image to release its locks: a killed program holds them a little longer, until the
/// kernel has ended its operations.
const LOCK_STEP: Duration = Duration::from_millis(10);
const LOCK_STEPS: u32 = 100;

/// How often a file is opened anew that was replaced while its locks were waited for.
const MOST_REPLACED: u32 = 100;

/// Opens files and block devices by path. Relative paths start at the working directory.
///
/// All its files share the process's descriptors (see [`file`](super)).
#[derive(Clone, Copy, Debug, Default)]
pub struct FileHost;

impl FileHost {
    /// A host whose files share `count` descriptors of their own, at least 2. Files opened for writing keep theirs even
    /// beyond that.
    pub fn with_descriptors(count: usize) -> LimitedHost {
        LimitedHost { pool: Arc::new(Pool::new(count.max(2))) }
    }
}

/// A [`FileHost`] with its own limit on descriptors.
#[derive(Clone)]
pub struct LimitedHost {
    pool: Arc<Pool>,
}

impl Host for FileHost {
    type File = FileStorage;

    async fn open(&self, name: &Path, mode: OpenMode) -> Result<FileStorage> {
        open(name, mode, Pool::of_process()).await
    }

    async fn create(&self, name: &Path, mode: OpenMode) -> Result<FileStorage> {
        let created = create(name, mode, Pool::of_process()).await;
        created.map_err(|error| error.named(Operation::Create, name))
    }

    async fn remove(&self, name: &Path) -> Result<()> {
        let removed = fs::remove_file(name);
        removed.map_err(|error| StorageError::new(Operation::Remove, name, error))
    }

    fn canonical(&self, name: &Path) -> Result<PathBuf> {
        let found = fs::canonicalize(name);
        found.map_err(|error| StorageError::new(Operation::Query, name, error))
    }
}

impl Host for LimitedHost {
    type File = FileStorage;

    async fn open(&self, name: &Path, mode: OpenMode) -> Result<FileStorage> {
        open(name, mode, &self.pool).await
    }

    async fn create(&self, name: &Path, mode: OpenMode) -> Result<FileStorage> {
        let created = create(name, mode, &self.pool).await;
        created.map_err(|error| error.named(Operation::Create, name))
    }

    async fn remove(&self, name: &Path) -> Result<()> {
        FileHost.remove(name).await
    }

    fn canonical(&self, name: &Path) -> Result<PathBuf> {
        FileHost.canonical(name)
    }
}

/// An error without the file's name yet, or one that has it already.
enum Failure {
    Plain(io::Error),
    Named(StorageError),
}

impl Failure {
    fn named(self, operation: Operation, name: &Path) -> StorageError {
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

type Attempt<T> = std::result::Result<T, Failure>;

/// A descriptor just opened, with the requested locks.
pub(super) struct Opened {
    pub(super) target: Target,
    pub(super) id: FileId,
    pub(super) kind: Kind,
}

impl Opened {
    /// Whether the file still has this name: while its locks were waited for, it may have been deleted or replaced.
    fn is_at(&self, path: &Path) -> io::Result<bool> {
        match fs::metadata(path) {
            Ok(found) => {
                let device = matches!(self.kind, Kind::Device { .. });
                let id = if device && found.mode() & libc::S_IFMT == libc::S_IFBLK {
                    FileId { device: u64::MAX, inode: found.rdev() }
                } else {
                    FileId { device: found.dev(), inode: found.ino() }
                };
                Ok(id == self.id)
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// Owns a file's descriptor, its locks and its place in the pool, which are released in this order; readers that let it
/// in keep others out again before that.
struct Held {
    _let_in: Option<LetIn>,
    _locks: Option<Locks>,
    _file: Arc<OwnedFd>,
    _permit: Permit,
    landing: Arc<Landing>,
}

impl isobath_ring::Held for Held {
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
    let open = async || {
        // Checked before it is opened, since opening a device can have side effects.
        check_type(fs::metadata(path)?.mode())?;
        let permit = pool.admit().await;
        let file = pool.open(|| options(mode).open(path)).await;
        let file = file.map_err(|error| explain_direct(error, mode))?;
        attach(file, name, mode, taking, permit, pool).await
    };
    let opened = async {
        for _ in 0..MOST_REPLACED {
            let opened = open().await?;
            if mode.locking == Locking::Unlocked || opened.is_at(path)? {
                return Ok(opened);
            }
        }
        Err(replaced().into())
    };
    opened.await.map_err(|error: Failure| error.named(Operation::Open, name))
}

async fn open(name: &Path, mode: OpenMode, pool: &Arc<Pool>) -> Result<FileStorage> {
    mode.check(name)?;
    let opened = descriptor(name, name, mode, Taking::Alone, pool).await?;
    let storage = storage(opened, name, mode, Durability::default(), pool);
    storage.map_err(|error| error.named(Operation::Open, name))
}

async fn create(name: &Path, mode: OpenMode, pool: &Arc<Pool>) -> Attempt<FileStorage> {
    let mode = OpenMode { writable: true, ..mode };
    mode.check(name)?;
    for _ in 0..MOST_REPLACED {
        match fs::metadata(name) {
            Ok(found) => check_type(found.mode())?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error.into()),
        }
        let permit = pool.admit().await;
        let (file, is_new) = new_or_found(name, mode, pool).await?;
        let durability = if is_new {
            Durability::created(pool.open(|| File::open(directory_of(name)?)).await?.into())
        } else {
            Durability::default()
        };
        let created = if is_new { Some(file.metadata()?) } else { None };
        let opened = match attach(file, name, mode, Taking::Alone, permit, pool).await {
            Ok(opened) => opened,
            Err(error) => {
                let is_it = |found: &fs::Metadata, it: &fs::Metadata| {
                    (found.dev(), found.ino()) == (it.dev(), it.ino())
                };
                // It stays if it has got another name.
                if let (Some(it), Ok(real)) = (created, fs::canonicalize(name))
                    && fs::metadata(&real).is_ok_and(|found| is_it(&found, &it))
                {
                    let _ = fs::remove_file(real);
                }
                return Err(error);
            }
        };
        if !opened.is_at(name)? {
            continue;
        }
        if opened.kind == Kind::Regular {
            sys::ftruncate(&opened.target.file, 0)?;
        }
        return storage(opened, name, mode, durability, pool);
    }
    Err(replaced().into())
}

/// Opens a file, and tells whether it is new.
async fn new_or_found(name: &Path, mode: OpenMode, pool: &Pool) -> Attempt<(File, bool)> {
    let explained = |error| Failure::Plain(explain_direct(error, mode));
    match pool.open(|| options(mode).create_new(true).open(name)).await {
        Ok(file) => return Ok((file, true)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(explained(error)),
    }
    match pool.open(|| options(mode).open(name)).await {
        Ok(file) => Ok((file, false)),
        // The name is a link to a file that does not exist, or was removed in between.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let file = pool.open(|| options(mode).create(true).truncate(false).open(name)).await;
            Ok((file.map_err(explained)?, true))
        }
        Err(error) => Err(explained(error)),
    }
}

/// The directory of a file, or of the one that its name is a link to.
fn directory_of(name: &Path) -> io::Result<PathBuf> {
    let real = if name.is_symlink() { fs::canonicalize(name)? } else { name.to_owned() };
    let parent = real.parent().filter(|parent| !parent.as_os_str().is_empty());
    Ok(parent.unwrap_or(Path::new(".")).to_owned())
}

fn replaced() -> io::Error {
    io::Error::new(io::ErrorKind::ResourceBusy, "other programs replace it again and again")
}

/// `O_NONBLOCK`, so that no open waits, even if the name now refers to something else.
fn options(mode: OpenMode) -> OpenOptions {
    let direct = if mode.direct { libc::O_DIRECT } else { 0 };
    let mut options = OpenOptions::new();
    options.read(true).write(mode.writable);
    options.custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY | direct).mode(0o644);
    options
}

async fn attach(
    file: File,
    name: &Path,
    mode: OpenMode,
    taking: Taking,
    permit: Permit,
    pool: &Pool,
) -> Attempt<Opened> {
    let file: Arc<OwnedFd> = Arc::new(file.into());
    let stat = sys::stat(&file)?;
    check_type(stat.st_mode)?;
    sys::set_blocking(&file, mode.direct)?;
    let device = stat.st_mode & libc::S_IFMT == libc::S_IFBLK;
    let kind =
        if device { Kind::Device { block: sys::device_block(&file)? } } else { Kind::Regular };
    let id = if device {
        // A device is the same whichever node it is opened through.
        FileId { device: u64::MAX, inode: stat.st_rdev }
    } else {
        FileId { device: stat.st_dev, inode: stat.st_ino }
    };
    let (let_in, locks) = match Wanted::of(mode) {
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
                Err(error) => return Err(users::named(error, &file).into()),
            }
        }
    };
    let landing = Arc::<Landing>::default();
    let lease = Arc::new(Held {
        _let_in: let_in,
        _locks: locks,
        _file: file.clone(),
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

fn storage(
    opened: Opened,
    name: &Path,
    mode: OpenMode,
    durability: Durability,
    pool: &Arc<Pool>,
) -> Attempt<FileStorage> {
    let Opened { target, id, kind } = opened;
    let direct = if mode.direct { Some(direct(&target.file, kind)?) } else { None };
    let file = Named {
        name: name.to_owned(),
        path: std::path::absolute(name)?,
        mode,
        id,
        pool: pool.clone(),
    };
    let target = Arc::new(target);
    let source = if mode.writable || kind != Kind::Regular {
        Source::Kept(target, None)
    } else {
        Source::of_reader(&file, target)?
    };
    Ok(FileStorage {
        writing: Writing::new(mode.writable),
        file,
        source: ArcSwap::from_pointee(source),
        roles: isobath_sync::AsyncMutex::default(),
        kind,
        direct,
        cached: Cached::default(),
        durability: Arc::new(durability),
        abilities: Abilities::default(),
        clones: OnceLock::new(),
        timed: OnceLock::new(),
        gains: OnceLock::new(),
        atomic: OnceLock::new(),
    })
}

/// Checks the type in a file's mode.
fn check_type(mode: u32) -> io::Result<()> {
    let what = match mode & libc::S_IFMT {
        libc::S_IFREG | libc::S_IFBLK => return Ok(()),
        libc::S_IFDIR => return Err(io::Error::from_raw_os_error(libc::EISDIR)),
        libc::S_IFIFO => "a named pipe",
        libc::S_IFSOCK => "a socket",
        _ => "a character device",
    };
    let text = format!("it is {what}; an image is a regular file or a block device");
    Err(io::Error::new(io::ErrorKind::InvalidInput, text))
}

fn no_direct(error: &io::Error) -> io::Error {
    let text = format!(
        "the file system does not support O_DIRECT ({error}); use the page cache (--cache writeback)"
    );
    io::Error::new(io::ErrorKind::Unsupported, text)
}

fn explain_direct(error: io::Error, mode: OpenMode) -> io::Error {
    if mode.direct && error.raw_os_error() == Some(libc::EINVAL) {
        return no_direct(&error);
    }
    error
}

fn direct(file: &OwnedFd, kind: Kind) -> io::Result<Direct> {
    let (memory, block) = match (sys::direct_alignment(file), kind) {
        (Some((0, _) | (_, 0)), _) => {
            return Err(no_direct(&io::Error::from_raw_os_error(libc::EINVAL)));
        }
        (Some(alignment), _) => alignment,
        (None, Kind::Device { block }) => (block, block),
        // Enough for the block device of every file system with blocks of at most a page.
        (None, Kind::Regular) => (4096, 4096),
    };
    Direct::new(memory, block, kind == Kind::Regular)
}
