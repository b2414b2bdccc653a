//! Opening files.

use super::direct::Direct;
use super::flush::Durability;
use super::transfer::Target;
use super::zero::Abilities;
use super::{FileStorage, Kind, sys};
use crate::error::{Operation, StorageError};
use crate::ring::Lease;
use crate::{FileId, Host, Locking, OpenMode, Result, lock};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// Opens files and block devices by path. Relative paths start at the working directory.
#[derive(Clone, Copy, Debug, Default)]
pub struct FileHost;

impl Host for FileHost {
    type File = FileStorage;

    async fn open(&self, name: &Path, mode: OpenMode) -> Result<FileStorage> {
        open(name, mode).map_err(|error| error.named(Operation::Open, name))
    }

    async fn create(&self, name: &Path, mode: OpenMode) -> Result<FileStorage> {
        create(name, mode).map_err(|error| error.named(Operation::Create, name))
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

/// An error before it has the file's name, or one that has it already.
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

fn open(name: &Path, mode: OpenMode) -> std::result::Result<FileStorage, Failure> {
    // Looked at before it is opened, since opening a device can have effects.
    check_type(fs::metadata(name)?.file_type())?;
    let file = options(mode).open(name).map_err(|error| explain_direct(error, mode))?;
    attach(file, name, mode, Durability::default())
}

fn create(name: &Path, mode: OpenMode) -> std::result::Result<FileStorage, Failure> {
    let mode = OpenMode { writable: true, ..mode };
    let found = match fs::metadata(name) {
        Ok(found) => {
            check_type(found.file_type())?;
            true
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => false,
        Err(error) => return Err(error.into()),
    };
    let file = options(mode).create(true).truncate(false).open(name);
    let file = file.map_err(|error| explain_direct(error, mode))?;
    let durability = if found {
        Durability::default()
    } else {
        let directory = name.parent().filter(|parent| !parent.as_os_str().is_empty());
        Durability::created(File::open(directory.unwrap_or(Path::new(".")))?.into())
    };
    let storage = attach(file, name, mode, durability)?;
    if storage.kind == Kind::Regular {
        sys::ftruncate(&storage.target.file, 0)?;
    }
    Ok(storage)
}

/// `O_NONBLOCK`, so that no open waits, whatever the name has come to mean meanwhile.
fn options(mode: OpenMode) -> OpenOptions {
    let direct = if mode.direct { libc::O_DIRECT } else { 0 };
    let mut options = OpenOptions::new();
    options.read(true).write(mode.writable);
    options.custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY | direct).mode(0o644);
    options
}

fn attach(
    file: File,
    name: &Path,
    mode: OpenMode,
    durability: Durability,
) -> std::result::Result<FileStorage, Failure> {
    let kind = file.metadata()?.file_type();
    check_type(kind)?;
    let device = kind.is_block_device();
    let file: Arc<OwnedFd> = Arc::new(file.into());
    sys::set_blocking(&file)?;
    let stat = sys::stat(&file)?;
    let kind =
        if device { Kind::Device { block: sys::device_block(&file)? } } else { Kind::Regular };
    let id = if device {
        // A device is the same through whatever node it is opened.
        FileId { device: u64::MAX, inode: stat.st_rdev }
    } else {
        FileId { device: stat.st_dev, inode: stat.st_ino }
    };
    let lease: Lease = match mode.locking {
        Locking::Exclusive => Arc::new(lock::take(&file, name, mode.writable)?),
        Locking::Unlocked => file.clone(),
    };
    let direct = if mode.direct { Some(direct(&file, kind)?) } else { None };
    Ok(FileStorage {
        name: name.to_owned(),
        id,
        target: Target { file, lease },
        kind,
        read_only: !mode.writable,
        direct,
        durability: Arc::new(durability),
        abilities: Abilities::default(),
        timed: OnceLock::new(),
    })
}

fn check_type(kind: fs::FileType) -> io::Result<()> {
    let what = if kind.is_file() || kind.is_block_device() {
        return Ok(());
    } else if kind.is_dir() {
        return Err(io::Error::from_raw_os_error(libc::EISDIR));
    } else if kind.is_fifo() {
        "a named pipe"
    } else if kind.is_socket() {
        "a socket"
    } else {
        "a character device"
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
        // Enough for every file system's block device that has blocks up to a page.
        (None, Kind::Regular) => (4096, 4096),
    };
    Direct::new(memory, block, kind == Kind::Regular)
}
