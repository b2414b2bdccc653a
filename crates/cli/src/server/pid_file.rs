//! A file with the process ID, locked for as long as the process lives.

use crate::failure::Failure;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A PID file, removed on drop.
#[derive(Debug)]
pub(crate) struct PidFile {
    path: PathBuf,
    /// Holds the lock.
    _file: File,
}

impl PidFile {
    /// Writes this process's ID. A stale file of a process that has ended is reused.
    ///
    /// # Errors
    /// `EBUSY` while another process holds the lock; and errors of the file system.
    pub(crate) fn create(path: &Path) -> io::Result<Self> {
        loop {
            let mut file =
                OpenOptions::new().create(true).write(true).truncate(false).open(path)?;
            file.try_lock().map_err(|error| match error {
                TryLockError::WouldBlock => io::Error::from(io::ErrorKind::ResourceBusy),
                TryLockError::Error(error) => error,
            })?;
            // The previous holder may have removed it between the open and the lock.
            let ours = file.metadata()?;
            match fs::metadata(path) {
                Ok(there) if (there.dev(), there.ino()) == (ours.dev(), ours.ino()) => {}
                _ => continue,
            }
            file.set_len(0)?;
            writeln!(file, "{}", std::process::id())?;
            return Ok(Self { path: path.to_owned(), _file: file });
        }
    }
}

/// Creates the PID file that an option names.
pub(crate) fn create(path: &Path) -> Result<PidFile, Failure> {
    PidFile::create(path).map_err(|error| {
        let reason = if error.kind() == io::ErrorKind::ResourceBusy {
            "another process has locked it".to_owned()
        } else {
            error.to_string()
        };
        Failure::new(format_args!("cannot write the PID file '{}': {reason}", path.display()))
    })
}

impl Drop for PidFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
