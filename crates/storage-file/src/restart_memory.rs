//! Restart memory of files: for each, a mapped file in `/dev/shm`.

use super::pause::pause;
use super::sys::{self, Mapping};
use isobath_storage::error::{Operation, StorageError};
use isobath_storage::restart_memory::{MemoryUse, RESTART_MEMORY_BYTES, RestartMemory};
use isobath_storage::{FileId, Result, shown};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// Where the kernel keeps files in memory.
const DIRECTORY: &str = "/dev/shm";

/// A killed process holds the lock of its memory until the last user of its address space, such as a reader of
/// `/proc/PID/smaps`, is gone: longer than its image locks. These are the numbers of attempts to find existing memory,
/// and to create new memory.
const FIND_STEPS: u32 = 3000;
const CREATE_STEPS: u32 = 100;
const STEP: Duration = Duration::from_millis(10);

/// A mapped file.
struct Mapped {
    path: PathBuf,
    /// Holds the lock that keeps other processes from using the same memory.
    file: File,
    mapping: Mapping,
}

impl RestartMemory for Mapped {
    fn words(&self) -> &[AtomicU64] {
        self.mapping.words()
    }

    fn name(&self) -> String {
        shown(&self.path).to_string()
    }

    fn remove(&self) {
        if !self.is_there() {
            return;
        }
        if let Err(error) = fs::remove_file(&self.path)
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(file = %shown(&self.path), %error, "cannot remove a restart log");
        }
    }

    fn is_there(&self) -> bool {
        // If it cannot be determined, it is considered gone.
        let (own, named) = (self.file.metadata(), fs::symlink_metadata(&self.path));
        own.and_then(|own| Ok((own, named?)))
            .is_ok_and(|(own, named)| (own.dev(), own.ino()) == (named.dev(), named.ino()))
    }

    fn set_aside(&self) -> io::Result<Option<String>> {
        if !self.is_there() {
            return Ok(None);
        }
        // Whoever holds the lock is the only one who names a file like this.
        for number in 0.. {
            let aside = self.path.with_added_extension(format!("aside-{number}"));
            if fs::symlink_metadata(&aside).is_err() {
                fs::rename(&self.path, &aside)?;
                return Ok(Some(shown(&aside).to_string()));
            }
        }
        Ok(None)
    }
}

/// The restart memory of the file `id`, which is open under `name` as `image`.
pub(super) async fn restart_memory(
    name: &Path,
    image: Option<&OwnedFd>,
    id: FileId,
    how: MemoryUse,
) -> Result<Option<Arc<dyn RestartMemory>>> {
    let create = how == MemoryUse::Create;
    let path = Path::new(DIRECTORY).join(format!("isobath-{:x}-{:x}", id.device, id.inode));
    // The image's owner could change the image anyway.
    let owner = image.filter(|_| !create).and_then(|image| sys::stat(image).ok());
    let owner = owner.map(|image| image.st_uid);
    let mut steps = if create { CREATE_STEPS } else { FIND_STEPS };
    loop {
        match open(&path, owner, how) {
            Ok(mapped) => return Ok(Some(Arc::new(mapped))),
            Err(error) if error.kind() == io::ErrorKind::NotFound && !create => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && steps > 0 => {
                steps -= 1;
                pause(STEP).await;
            }
            Err(error) => {
                let text = format!(
                    "the restart memory '{}', which may hold acknowledged writes of a killed \
                     process: {}",
                    shown(&path),
                    explained(&error)
                );
                let error = io::Error::new(error.kind(), text);
                return Err(StorageError::new(Operation::Open, name, error));
            }
        }
    }
}

fn explained(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::WouldBlock => "another process is using it".into(),
        io::ErrorKind::PermissionDenied if error.raw_os_error().is_some() => {
            format!("{error}; open the image as the user who owns it")
        }
        _ => error.to_string(),
    }
}

/// It may also have been created by `owner`.
fn open(path: &Path, owner: Option<u32>, how: MemoryUse) -> io::Result<Mapped> {
    let create = how == MemoryUse::Create;
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(create)
        .truncate(false)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC | libc::O_NONBLOCK)
        .open(path)?;
    match how {
        MemoryUse::Create | MemoryUse::Take => file.try_lock()?,
        MemoryUse::Look | MemoryUse::Glance => file.try_lock_shared()?,
    }
    let refused = |reason: &str| Err(io::Error::new(io::ErrorKind::PermissionDenied, reason));
    let found = file.metadata()?;
    if found.nlink() == 0 {
        // Its last user has removed it meanwhile.
        return Err(if create { io::ErrorKind::WouldBlock } else { io::ErrorKind::NotFound }.into());
    }
    if !found.is_file() {
        return refused("it is not a regular file");
    }
    let known = [Some(sys::effective_user()), owner].contains(&Some(found.uid()));
    if !known || found.nlink() != 1 || found.mode() & 0o077 != 0 {
        return refused("it may belong to another user");
    }
    let length = RESTART_MEMORY_BYTES as u64;
    if found.len() != length {
        if found.len() != 0 {
            return refused("it has the wrong length");
        }
        if matches!(how, MemoryUse::Look | MemoryUse::Glance) {
            // Its user was killed before there was anything in it.
            return Err(io::ErrorKind::NotFound.into());
        }
        // A page that cannot be allocated later would end the process.
        if let Err(error) = reserve(&file, length) {
            // It is useless now.
            let _ = fs::remove_file(path);
            return Err(error);
        }
    }
    let mapping = Mapping::of(&file, RESTART_MEMORY_BYTES)?;
    Ok(Mapped { path: path.to_owned(), file, mapping })
}

fn reserve(file: &File, length: u64) -> io::Result<()> {
    let file = OwnedFd::from(file.try_clone()?);
    sys::fallocate(&file, 0, 0, length)
}
