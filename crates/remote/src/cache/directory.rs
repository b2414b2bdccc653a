//! The directory of a cache, and files in it.

use super::sys::{self, Lock, Part};
use crate::digest::unique;
use crate::error::{Error, Result};
use crate::local::rename_new;
use rustix::fs::{AtFlags, FileType, FlockOperation, Mode, OFlags, Stat};
use rustix::io::Errno;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

/// What the name of a file begins with that is not in use yet.
const TEMPORARY: &str = ".new-";

/// The file that makes a directory a cache. It is empty.
const MARK: &str = "isobath-cache";

/// How often something is tried again that another process has just removed.
pub(super) const ATTEMPTS: usize = 8;

/// File systems of this machine alone, whose mappings and files show the same and which can take blocks out of files,
/// with their magic numbers.
const LOCAL: [(&str, u64); 8] = [
    ("ext4", 0xef53),
    ("XFS", 0x5846_5342),
    ("Btrfs", 0x9123_683e),
    ("tmpfs", 0x0102_1994),
    ("F2FS", 0xf2f5_2010),
    ("ZFS", 0x2fc1_2fc1),
    ("bcachefs", 0xca45_1a4e),
    ("overlayfs", 0x794c_7630),
];

/// A directory that is open.
#[derive(Debug)]
pub(super) struct Directory {
    path: PathBuf,
    opened: OwnedFd,
}

impl Directory {
    /// Opens the directory of a cache, which is created if it does not exist.
    ///
    /// # Errors
    /// It cannot be used, or others could write to it.
    pub(super) fn open(path: &Path) -> Result<Self> {
        // Without a slash or a dot at the end, for which a link is followed.
        let path: &Path = &path.components().collect::<PathBuf>();
        match rustix::fs::mkdir(path, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(Error::local("create the cache directory", path, error)),
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = match rustix::fs::open(path, flags, Mode::empty()) {
            Ok(opened) => opened,
            // Another user may have made it.
            Err(Errno::LOOP | Errno::NOTDIR) if path.is_symlink() => {
                let shown = crate::error::shown(path);
                return Err(Error::refused(format_args!(
                    "the cache directory '{shown}' is a symbolic link; name the directory that it leads to"
                )));
            }
            Err(error) => return Err(Error::local("open the cache directory", path, error)),
        };
        // Later changes of the process's own directory do not matter.
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let opened = Self { path, opened };
        opened.check()?;
        opened.mark()?;
        Ok(opened)
    }

    /// Makes an empty directory a cache, and refuses any other one that is none.
    fn mark(&self) -> Result<()> {
        let path = self.path(MARK);
        let failed = |error: io::Error| Error::local("open the mark of a cache", &path, error);
        if self.file(MARK).map_err(failed)?.is_some() {
            return Ok(());
        }
        let is_empty = self.names().map_err(failed)?.is_empty();
        // Another process may have made it a cache meanwhile.
        if is_empty {
            let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            rustix::fs::openat(&self.opened, MARK, flags, Mode::RUSR | Mode::WUSR)
                .and_then(|_| rustix::fs::fsync(&self.opened))
                .map_err(|error| failed(error.into()))?;
        } else if self.file(MARK).map_err(failed)?.is_none() {
            let shown = crate::error::shown(&self.path);
            return Err(Error::refused(format_args!(
                "'{shown}' cannot hold a cache: it is not empty, and no cache, as it has no file '{MARK}'; name \
                 a new or an empty directory"
            )));
        }
        Ok(())
    }

    /// Opens a directory in this one, which is created if it does not exist.
    ///
    /// # Errors
    /// As of [`open`](Self::open).
    pub(super) fn inner(&self, name: &str) -> Result<Self> {
        let path = self.path.join(name);
        match rustix::fs::mkdirat(&self.opened, name, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(Error::local("create the directory", &path, error)),
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = rustix::fs::openat(&self.opened, name, flags, Mode::empty());
        let opened = opened.map_err(|error| Error::local("open the directory", &path, error))?;
        let opened = Self { path, opened };
        opened.check()?;
        Ok(opened)
    }

    fn check(&self) -> Result<()> {
        let failed = |error| Error::local("examine the directory", &self.path, error);
        let stat = rustix::fs::fstat(&self.opened).map_err(failed)?;
        let us = rustix::process::geteuid().as_raw();
        let refused = |what: &str| {
            let shown = crate::error::shown(&self.path);
            Err(Error::refused(format_args!(
                "'{shown}' cannot hold a cache: {what}; name a directory of your own on a local disk"
            )))
        };
        if stat.st_uid != us {
            return refused(&format!("it belongs to the user {}, not to {us}", stat.st_uid));
        }
        if stat.st_mode & 0o022 != 0 {
            return refused(&format!(
                "others may write to it (its mode is {:o})",
                stat.st_mode & 0o7777
            ));
        }
        let kind = rustix::fs::fstatfs(&self.opened).map_err(failed)?.f_type as u64 & 0xffff_ffff;
        if !LOCAL.iter().any(|(_, known)| *known == kind) {
            let known: Vec<&str> = LOCAL.iter().map(|(name, _)| *name).collect();
            return refused(&format!(
                "its file system (type {kind:#x}) may be shared with other machines, and is none of {}",
                known.join(", ")
            ));
        }
        Ok(())
    }

    /// The path of a file.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Opens a file for reading and writing; `None` if there is none.
    ///
    /// # Errors
    /// It cannot be opened, or is not a file of ours ([`io::ErrorKind::InvalidData`]).
    pub(super) fn file(&self, name: &str) -> io::Result<Option<File>> {
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let foreign = |what: &str| Err(io::Error::new(io::ErrorKind::InvalidData, what));
        let file = match rustix::fs::openat(&self.opened, name, flags, Mode::empty()) {
            Ok(file) => file,
            Err(Errno::NOENT) => return Ok(None),
            Err(Errno::LOOP | Errno::ISDIR | Errno::NXIO) => return foreign("it is not a file"),
            Err(error) => return Err(error.into()),
        };
        let stat = rustix::fs::fstat(&file)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return foreign("it is not a file");
        }
        if stat.st_uid != rustix::process::geteuid().as_raw() {
            return foreign("it belongs to another user");
        }
        Ok(Some(File::from(file)))
    }

    /// Creates a file, in use by the caller, who unlocks it.
    ///
    /// # Errors
    /// It cannot be created.
    pub(super) fn create(&self, name: &str) -> io::Result<File> {
        let flags =
            OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        for _ in 0..ATTEMPTS {
            let file = rustix::fs::openat(&self.opened, name, flags, Mode::RUSR | Mode::WUSR)?;
            let file = File::from(file);
            sys::lock(&file, Part::Use, Lock::Shared)?;
            if is_linked(&file)? {
                return Ok(file);
            }
            // Somebody who tidies up took it for a file that was left.
        }
        Err(io::Error::new(io::ErrorKind::ResourceBusy, "another process removes what is created"))
    }

    /// Creates a file with a name that is not used for anything else, in use by the caller.
    ///
    /// # Errors
    /// It cannot be created.
    pub(super) fn temporary(&self) -> io::Result<Temporary<'_>> {
        let name = format!("{TEMPORARY}{}", unique().map_err(io::Error::other)?);
        let file = self.create(&name)?;
        Ok(Temporary { directory: self, name, file })
    }

    /// Removes the name of an open file if it is still that of this file. That it is not is no error.
    ///
    /// # Errors
    /// It stays.
    pub(super) fn unlink_file(&self, name: &str, file: &File) -> io::Result<()> {
        let ours = rustix::fs::fstat(file)?;
        match self.stat(name)? {
            Some(stat) if (stat.st_dev, stat.st_ino) == (ours.st_dev, ours.st_ino) => {
                self.unlink(name)
            }
            _ => Ok(()),
        }
    }

    /// Removes a name. That it does not exist is no error.
    ///
    /// # Errors
    /// It stays.
    pub(super) fn unlink(&self, name: &str) -> io::Result<()> {
        match rustix::fs::unlinkat(&self.opened, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Removes what is no file of ours.
    ///
    /// # Errors
    /// It stays.
    pub(super) fn put_aside(&self, name: &str) -> io::Result<()> {
        match rustix::fs::unlinkat(&self.opened, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(Errno::ISDIR | Errno::PERM) => {
                let aside = format!("{TEMPORARY}{}", unique().map_err(io::Error::other)?);
                Ok(rustix::fs::renameat(&self.opened, name, &self.opened, &*aside)?)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Removes a file that nobody uses, and whether it was removed.
    ///
    /// # Errors
    /// It cannot be opened or removed.
    pub(super) fn remove_unused(&self, name: &str) -> io::Result<bool> {
        self.remove_if(name, || true)
    }

    /// Removes a file that nobody uses if `is_left` then says so, and whether it was removed.
    ///
    /// # Errors
    /// It cannot be opened or removed.
    pub(super) fn remove_if(&self, name: &str, is_left: impl FnOnce() -> bool) -> io::Result<bool> {
        let Some(file) = self.file(name)? else { return Ok(false) };
        let alone = sys::try_lock(&file, Part::Use, Lock::Alone)?;
        let removed = alone && is_linked(&file)? && is_left();
        if removed {
            self.unlink(name)?;
        }
        sys::unlock(&file);
        Ok(removed)
    }

    /// All names. One that is no text is not one of ours, and is not like one here.
    ///
    /// # Errors
    /// They cannot be read.
    pub(super) fn names(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::read_from(&self.opened)? {
            let name = entry?.file_name().to_owned();
            let name = name.to_string_lossy().into_owned();
            if !matches!(&*name, "." | "..") {
                names.push(name);
            }
        }
        Ok(names)
    }

    /// What is known of a file; `None` if there is none.
    ///
    /// # Errors
    /// It cannot be examined.
    pub(super) fn stat(&self, name: &str) -> io::Result<Option<Stat>> {
        match rustix::fs::statat(&self.opened, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(stat)),
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Keeps other processes and threads that call this out, until it is dropped; `None` if one of them is in.
    ///
    /// # Errors
    /// The file system has no locks.
    pub(super) fn try_alone(&self) -> io::Result<Option<OwnedFd>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let own = rustix::fs::openat(&self.opened, ".", flags, Mode::empty())?;
        match rustix::fs::flock(&own, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(own)),
            Err(Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }
}

/// Whether a name is that of a file that is not in use yet.
pub(super) fn is_temporary(name: &str) -> bool {
    name.strip_prefix(TEMPORARY).is_some_and(|id| is_hex(id, 32))
}

/// Whether a text has so many digits of a hexadecimal number, as [`unique`] writes them.
pub(super) fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

/// Whether a file that is open still has a name.
///
/// # Errors
/// It cannot be examined.
pub(super) fn is_linked(file: &File) -> io::Result<bool> {
    Ok(rustix::fs::fstat(file)?.st_nlink > 0)
}

/// A file that is to get its name, and is removed if it does not.
pub(super) struct Temporary<'d> {
    directory: &'d Directory,
    name: String,
    file: File,
}

impl Temporary<'_> {
    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Gives it this name, in place of another file; the file stays in use by the caller, who unlocks it.
    ///
    /// # Errors
    /// It cannot be renamed.
    pub(super) fn replace(self, name: &str) -> io::Result<File> {
        let opened = &self.directory.opened;
        rustix::fs::renameat(opened, &*self.name, opened, name)?;
        self.file.try_clone()
    }

    /// Gives it this name, unless there is a file of that name; whether it has it.
    ///
    /// # Errors
    /// It cannot be renamed.
    pub(super) fn add(self, name: &str) -> io::Result<bool> {
        let renamed = rename_new(&self.directory.opened, Path::new(&self.name), Path::new(name));
        let added = match renamed {
            Ok(()) => true,
            Err(Errno::EXIST) => false,
            Err(error) => return Err(error.into()),
        };
        Ok(added)
    }
}

impl Drop for Temporary<'_> {
    fn drop(&mut self) {
        // After it got its name there is none.
        let _ = self.directory.unlink(&self.name);
    }
}
