//! Files of a directory that is open.

use rustix::fs::{AtFlags, Mode, OFlags, RenameFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

/// Opens a regular file of a directory for reading; `None` if there is no file of this name.
///
/// # Errors
/// It cannot be opened, or is no regular file, but a link or a device.
pub(crate) fn open_file(directory: &OwnedFd, name: &Path) -> io::Result<Option<File>> {
    // A pipe or a device is not waited for.
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match rustix::fs::openat(directory, name, flags, Mode::empty()) {
        Ok(file) => File::from(file),
        Err(Errno::NOENT) => return Ok(None),
        Err(Errno::LOOP) => return Err(io::Error::other("it is a symbolic link")),
        Err(error) => return Err(error.into()),
    };
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    Ok(Some(file))
}

/// Renames a file within a directory, if there is none of the new name.
///
/// # Errors
/// `EXIST` if there is one, or those of `renameat2(2)` and `linkat(2)`.
pub(crate) fn rename_new(directory: &OwnedFd, from: &Path, to: &Path) -> rustix::io::Result<()> {
    match rustix::fs::renameat_with(directory, from, directory, to, RenameFlags::NOREPLACE) {
        // Not every file system has it, such as NFS.
        Err(Errno::INVAL | Errno::NOSYS) => {
            rustix::fs::linkat(directory, from, directory, to, AtFlags::empty())?;
            rustix::fs::unlinkat(directory, from, AtFlags::empty())
        }
        done => done,
    }
}
