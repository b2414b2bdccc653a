//! Surviving memory of files: one file of its own for each in `/dev/shm`, mapped.

use super::sys::{self, Mapping};
use crate::survivor::{SURVIVOR_BYTES, Survivor};
use crate::{FileId, shown};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Where the kernel keeps files in memory.
const DIRECTORY: &str = "/dev/shm";

/// A mapped file.
struct Mapped {
    path: PathBuf,
    /// Holds the lock that keeps other processes from the same memory.
    _file: File,
    mapping: Mapping,
}

impl Survivor for Mapped {
    fn words(&self) -> &[AtomicU64] {
        self.mapping.words()
    }

    fn remove(&self) {
        if let Err(error) = fs::remove_file(&self.path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(file = %shown(&self.path), %error, "it was not removed");
        }
    }
}

/// The surviving memory of the file `id`; made if there is none and `create` says so. `None` also where
/// it cannot be used, which is logged.
pub(super) fn survivor(id: FileId, create: bool) -> Option<Arc<dyn Survivor>> {
    let path = Path::new(DIRECTORY).join(format!("isobath-{:x}-{:x}", id.device, id.inode));
    match open(&path, create) {
        Ok(mapped) => Some(Arc::new(mapped)),
        Err(error) if error.kind() == io::ErrorKind::NotFound && !create => None,
        Err(error) => {
            tracing::warn!(file = %shown(&path), %error, "no memory there can be used");
            None
        }
    }
}

fn open(path: &Path, create: bool) -> io::Result<Mapped> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(create)
        .truncate(false)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC | libc::O_NONBLOCK)
        .open(path)?;
    let refused = |reason: &str| Err(io::Error::new(io::ErrorKind::PermissionDenied, reason));
    let found = file.metadata()?;
    if !found.is_file() {
        return refused("it is no regular file");
    }
    if found.uid() != sys::effective_user() || found.nlink() != 1 || found.mode() & 0o077 != 0 {
        return refused("it may be somebody else's");
    }
    file.try_lock()?;
    let length = SURVIVOR_BYTES as u64;
    if found.len() != length {
        if found.len() != 0 {
            return refused("it is of another length");
        }
        // A page that cannot be had later would end the process.
        if let Err(error) = reserve(&file, length) {
            // Of no use to anybody.
            let _ = fs::remove_file(path);
            return Err(error);
        }
    }
    let mapping = Mapping::of(&file, SURVIVOR_BYTES)?;
    Ok(Mapped { path: path.to_owned(), _file: file, mapping })
}

fn reserve(file: &File, length: u64) -> io::Result<()> {
    let file = OwnedFd::from(file.try_clone()?);
    sys::fallocate(&file, 0, 0, length)
}
