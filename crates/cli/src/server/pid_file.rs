//! A file with the process ID, locked for as long as the process lives.

use super::claimed::{Claimed, reason};
use crate::failure::Failure;
use std::fs::Permissions;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Whoever stops the server reads the file, maybe as another user.
const MODE: u32 = 0o644;

/// A PID file, removed on drop.
#[derive(Debug)]
pub(crate) struct PidFile(Claimed);

impl PidFile {
    /// Writes this process's ID. A stale file of a process that has ended is reused.
    ///
    /// # Errors
    /// As [`Claimed::claim`].
    pub(crate) fn create(path: &Path) -> io::Result<Self> {
        let claimed = Claimed::claim(path, MODE, None)?;
        let mut file = &claimed.file;
        if claimed.is_new {
            file.set_permissions(Permissions::from_mode(MODE))?;
        }
        file.set_len(0)?;
        writeln!(file, "{}", std::process::id())?;
        Ok(Self(claimed))
    }
}

/// Creates the PID file that an option names.
pub(crate) fn create(path: &Path) -> Result<PidFile, Failure> {
    PidFile::create(path).map_err(|error| {
        let reason = reason(&error);
        Failure::new(format_args!("cannot write the PID file '{}': {reason}", path.display()))
    })
}

impl Drop for PidFile {
    fn drop(&mut self) {
        self.0.remove();
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
