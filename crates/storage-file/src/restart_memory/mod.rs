//! Restart memory of files: for each, a file in a directory of the user's own in `/dev/shm`.
//!
//! Everybody may write to `/dev/shm`. So whatever another user puts there is only ever looked at: it is never waited
//! for, and memory is mapped only if this process has created it. What a killed process left is read into memory of
//! this process's own, since the owner of its file may truncate it at any moment.

mod found;
mod mapped;
mod shelf;

#[cfg(test)]
mod tests;

use super::pause::pause;
use super::sys;
use isobath_storage::error::{Operation, StorageError};
use isobath_storage::restart_memory::{MemoryUse, RestartMemory};
use isobath_storage::{FileId, Result};
use shelf::{Image, Shelf};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Where the kernel keeps files in memory.
const DIRECTORY: &str = "/dev/shm";

/// A killed process holds the lock of its memory until the last user of its address space, such as a reader of
/// `/proc/PID/smaps`, is gone: longer than its image locks. These are the numbers of attempts to find existing memory,
/// and to create new memory.
const FIND_STEPS: u32 = 3000;
const CREATE_STEPS: u32 = 100;
const STEP: Duration = Duration::from_millis(10);

/// The restart memory of the file `id`, which is open under `name` as `file`.
pub(super) async fn restart_memory(
    name: &Path,
    file: &OwnedFd,
    id: FileId,
    how: MemoryUse,
) -> Result<Option<Arc<dyn RestartMemory>>> {
    let stat = sys::stat(file).map_err(|error| StorageError::new(Operation::Query, name, error))?;
    let image = Image { owner: stat.st_uid, mode: stat.st_mode };
    let shelf = Shelf::new(Path::new(DIRECTORY), sys::effective_user(), image, id);
    let mut steps = match how {
        MemoryUse::Create => CREATE_STEPS,
        MemoryUse::Take(_) | MemoryUse::Look(_) | MemoryUse::Glance(_) => FIND_STEPS,
        MemoryUse::Stale => 0,
    };
    loop {
        match open(&shelf, how) {
            Ok(memory) => return Ok(memory),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && steps > 0 => {
                steps -= 1;
                pause(STEP).await;
            }
            Err(error) => return Err(StorageError::new(Operation::Open, name, error)),
        }
    }
}

/// The directories with restart memory, for a process that gives up the right to make or open others.
#[derive(Debug)]
pub struct RestartDirectories {
    /// The directory of this process's user. It is not removed while this value lives, and then if it is empty.
    pub own: PathBuf,
    /// Those that other users have made so far.
    pub others: Vec<PathBuf>,
    /// The directory of them all.
    pub parent: PathBuf,
    /// Holds the lock by which it is kept.
    kept: Option<OwnedFd>,
}

impl Drop for RestartDirectories {
    fn drop(&mut self) {
        self.kept = None;
        Shelf::remove_unused(&self.own);
    }
}

impl RestartDirectories {
    /// Makes this user's own directory, if there is none, and looks for those of others.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn keep() -> io::Result<Self> {
        let parent = Path::new(DIRECTORY);
        let image = Image { owner: sys::effective_user(), mode: 0 };
        let none = FileId { device: 0, inode: 0 };
        let shelf = Shelf::new(parent, sys::effective_user(), image, none);
        let (own, kept) = shelf.keep()?;
        let mut others = shelf.directories()?;
        others.retain(|other| *other != own);
        Ok(Self { own, others, parent: parent.to_owned(), kept: Some(kept) })
    }
}

fn open(shelf: &Shelf, how: MemoryUse) -> io::Result<Option<Arc<dyn RestartMemory>>> {
    Ok(match how {
        MemoryUse::Create => Some(Arc::new(mapped::create(shelf)?)),
        MemoryUse::Stale => found::stale(shelf)?.map(|found| Arc::new(found) as _),
        MemoryUse::Take(mark) => found::find(shelf, mark, true)?.map(|found| Arc::new(found) as _),
        MemoryUse::Look(mark) | MemoryUse::Glance(mark) => {
            found::find(shelf, mark, false)?.map(|found| Arc::new(found) as _)
        }
    })
}
