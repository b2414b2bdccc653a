//! Memory that this process creates, and maps.

use super::shelf::Shelf;
use super::sys::{self, Mapping};
use isobath_ring::place::{Identity, Place, identity_of};
use isobath_storage::restart_memory::{RESTART_MEMORY_BYTES, RestartMemory};
use isobath_storage::shown;
use rustix::fs::OFlags;
use std::fs::{File, Permissions, TryLockError};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::sync::atomic::AtomicU64;

/// The mode of a log.
const MODE: u32 = 0o600;

/// A file at a place.
pub(super) struct Held {
    pub(super) place: Place,
    pub(super) id: Identity,
    /// Holds the lock that keeps other processes from using the same memory.
    pub(super) file: File,
}

/// A mapped file.
struct Mapped {
    held: Held,
    mapping: Mapping,
}

impl Held {
    pub(super) fn name(&self) -> String {
        shown(self.place.path()).to_string()
    }

    pub(super) fn remove(&self) {
        match self.place.remove(self.id) {
            Ok(_) => Shelf::tidy(&self.place),
            Err(error) => {
                tracing::warn!(file = self.name(), %error, "cannot remove a restart log");
            }
        }
    }

    pub(super) fn set_aside(&self) -> io::Result<Option<String>> {
        if !self.place.holds(self.id) {
            return Ok(None);
        }
        for number in 0.. {
            let mut name = self.place.path().file_name().unwrap_or_default().to_owned();
            name.push(format!(".aside-{number}"));
            let aside = self.place.beside(&name);
            match self.place.move_to(&aside) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                moved => return moved.map(|()| Some(shown(aside.path()).to_string())),
            }
        }
        Ok(None)
    }
}

impl RestartMemory for Mapped {
    fn words(&self) -> &[AtomicU64] {
        self.mapping.words()
    }

    fn name(&self) -> String {
        self.held.name()
    }

    fn remove(&self) {
        self.held.remove();
    }

    fn is_there(&self) -> bool {
        // If it cannot be determined, it is considered gone. Who looks for it goes by its path.
        let found = Place::of(self.held.place.path());
        found.is_ok_and(|found| found.holds(self.held.id))
    }

    fn set_aside(&self) -> io::Result<Option<String>> {
        self.held.set_aside()
    }
}

/// Creates memory. What this user has left at the place is removed.
///
/// # Errors
/// `WouldBlock` if another process of this user uses it, or made or removed it in between; errors of the file system.
pub(super) fn create(shelf: &Shelf) -> io::Result<impl RestartMemory + use<>> {
    let place = shelf.own()?;
    let named = |error: io::Error| {
        let text = format!("the restart memory '{}': {error}", shown(place.path()));
        io::Error::new(error.kind(), text)
    };
    let file = match new(&place) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            remove_unused(&place).map_err(named)?;
            new(&place).map_err(|error| match error.kind() {
                io::ErrorKind::AlreadyExists => io::ErrorKind::WouldBlock.into(),
                _ => named(error),
            })?
        }
        // The directory has been removed.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        new => new.map_err(named)?,
    };
    let held = Held { id: identity_of(&file)?, place, file };
    if held.file.metadata()?.nlink() == 0 {
        return Err(io::ErrorKind::WouldBlock.into());
    }
    // A page that cannot be allocated later would end the process.
    let reserved = reserve(&held.file);
    let mapping = reserved.and_then(|()| Mapping::of(&held.file, RESTART_MEMORY_BYTES));
    match mapping {
        Ok(mapping) => Ok(Mapped { held, mapping }),
        Err(error) => {
            // It is useless now.
            held.remove();
            let text = format!("the restart memory '{}': {error}", held.name());
            Err(io::Error::new(error.kind(), text))
        }
    }
}

fn new(place: &Place) -> io::Result<File> {
    let file = place.create_new(MODE)?;
    // Whatever the umask.
    file.set_permissions(Permissions::from_mode(MODE))?;
    // Another process may have found it before, and is about to remove it.
    file.try_lock()?;
    Ok(file)
}

/// Removes a file that nobody uses.
fn remove_unused(place: &Place) -> io::Result<()> {
    let file = place.open(OFlags::RDONLY)?;
    file.try_lock().map_err(|error| match error {
        TryLockError::WouldBlock => {
            io::Error::new(io::ErrorKind::WouldBlock, "another process is using it")
        }
        TryLockError::Error(error) => error,
    })?;
    place.remove(identity_of(&file)?).map(|_| ())
}

fn reserve(file: &File) -> io::Result<()> {
    let file = OwnedFd::from(file.try_clone()?);
    sys::fallocate(&file, 0, 0, RESTART_MEMORY_BYTES as u64)
}
