//! A file with the process ID, locked for as long as the process lives.

use super::owned;
use crate::failure::Failure;
use isobath_ring::place::{Identity, Place, identity_of};
use rustix::fs::OFlags;
use std::fs::{File, Permissions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Whoever stops the server reads the file, maybe as another user.
const MODE: u32 = 0o644;

/// A PID file, removed on drop.
#[derive(Debug)]
pub(crate) struct PidFile {
    place: Place,
    id: Identity,
    /// Holds the lock.
    _file: File,
}

impl PidFile {
    /// Writes this process's ID. A stale file of a process that has ended is reused.
    ///
    /// # Errors
    /// `EBUSY` while another process holds the lock; if something is there that is no file of [its
    /// own](owned::check), which is left as it is; and errors of the file system.
    pub(crate) fn create(path: &Path) -> io::Result<Self> {
        let place = Place::of(path)?;
        loop {
            let found = match place.create_new(MODE) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                    place.open(OFlags::RDWR).map(|file| (file, false))
                }
                created => created.map(|file| (file, true)),
            };
            let (mut file, is_new) = match found {
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
            // Before anything is written to it.
            owned::check(&file.metadata()?, None)?;
            if is_new {
                file.set_permissions(Permissions::from_mode(MODE))?;
            }
            file.set_len(0)?;
            writeln!(file, "{}", std::process::id())?;
            return Ok(Self { place, id, _file: file });
        }
    }
}

/// Creates the PID file that an option names.
pub(crate) fn create(path: &Path) -> Result<PidFile, Failure> {
    PidFile::create(path).map_err(|error| {
        let reason = if error.kind() == io::ErrorKind::ResourceBusy {
            "another process has locked it".to_owned()
        } else {
            isobath_storage::cause(&error)
        };
        Failure::new(format_args!("cannot write the PID file '{}': {reason}", path.display()))
    })
}

impl Drop for PidFile {
    fn drop(&mut self) {
        let _ = self.place.remove(self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    #[test]
    fn one_holder_at_a_time() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pid");
        fs::write(&path, "99999999 and more\n").unwrap();
        let held = PidFile::create(&path).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), format!("{}\n", std::process::id()));
        let error = PidFile::create(&path).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ResourceBusy);
        drop(held);
        assert!(!path.exists());
        PidFile::create(&path).unwrap();
    }

    #[test]
    fn what_is_not_a_file_of_its_own_is_refused_at_once_and_stays() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::write(at("precious"), "precious").unwrap();
        symlink("precious", at("link")).unwrap();
        symlink("nothing", at("dangling")).unwrap();
        fs::hard_link(at("precious"), at("hard")).unwrap();
        let (kind, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::from_raw_mode(0o600));
        rustix::fs::mknodat(rustix::fs::CWD, at("pipe"), kind, mode, 0).unwrap();
        fs::write(at("shared"), "").unwrap();
        fs::set_permissions(at("shared"), Permissions::from_mode(0o666)).unwrap();
        for name in ["link", "dangling", "hard", "pipe", "shared"] {
            PidFile::create(&at(name)).expect_err(name);
            assert!(fs::symlink_metadata(at(name)).is_ok());
        }
        assert_eq!(fs::read(at("precious")).unwrap(), b"precious");
        assert!(!at("nothing").exists());
    }

    #[test]
    fn only_the_file_that_was_written_is_removed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pid");
        let held = PidFile::create(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o644);
        fs::remove_file(&path).unwrap();
        fs::write(&path, "another's").unwrap();
        drop(held);
        assert_eq!(fs::read(&path).unwrap(), b"another's");
    }
}
