//! A file that one server at a time writes to, and that may be left of one that was killed.

use super::owned;
use isobath_ring::place::{Identity, Place, identity_of};
use rustix::fs::OFlags;
use std::fs::{File, TryLockError};
use std::io;
use std::path::Path;

/// A file of one's own, locked as long as it is open.
#[derive(Debug)]
pub(crate) struct Claimed {
    pub(crate) file: File,
    pub(crate) is_new: bool,
    place: Place,
    id: Identity,
}

impl Claimed {
    /// Makes a file with this mode, less the umask, or opens the one that is there, without changing it.
    ///
    /// # Errors
    /// `EBUSY` while another process holds the lock; something is there that is no file of [its own](owned::check), for
    /// a server that will become this user; and errors of the file system.
    pub(crate) fn claim(path: &Path, mode: u32, becomes: Option<u32>) -> io::Result<Self> {
        let place = Place::of(path)?;
        loop {
            let found = match place.create_new(mode) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    place.open(OFlags::RDWR).map(|file| (file, false))
                }
                created => created.map(|file| (file, true)),
            };
            let (file, is_new) = match found {
                Err(error)
                    if error.kind() == io::ErrorKind::NotFound
                        && place.directory()?.st_nlink > 0 =>
                {
                    continue;
                }
                found => found?,
            };
            file.try_lock().map_err(|error| match error {
                TryLockError::WouldBlock => io::Error::from(io::ErrorKind::ResourceBusy),
                TryLockError::Error(error) => error,
            })?;
            // The previous holder may have removed it between the open and the lock.
            let id = identity_of(&file)?;
            if !place.holds(id) {
                continue;
            }
            owned::check(&file.metadata()?, becomes)?;
            return Ok(Self { file, is_new, place, id });
        }
    }

    /// Its path.
    pub(crate) fn path(&self) -> &Path {
        self.place.path()
    }

    /// Removes its name, if it still is that of this file.
    pub(crate) fn remove(&self) {
        let _ = self.place.remove(self.id);
    }
}

/// Why a file cannot be claimed, for people.
pub(crate) fn reason(error: &io::Error) -> String {
    if error.kind() == io::ErrorKind::ResourceBusy {
        "another process has locked it".to_owned()
    } else {
        isobath_storage::cause(error)
    }
}
