//! Names in directories that are held open.

use rustix::fs::{AtFlags, FileType, Mode, OFlags, RenameFlags, Stat};
use rustix::fs::{fstat, mkdirat, openat, renameat_with, statat, unlinkat};
use std::ffi::{OsStr, OsString};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A file's device and inode number.
pub type Identity = (u64, u64);

/// A name in a directory that is held open. Whoever renames a directory on the path, or puts a link there, does not
/// lead it elsewhere. Links under the name itself are not followed.
#[derive(Clone, Debug)]
pub struct Place {
    directory: Arc<OwnedFd>,
    name: OsString,
    path: PathBuf,
}

impl Place {
    /// The place that a path names now.
    ///
    /// # Errors
    /// The directory cannot be opened, or the path ends with `..`.
    pub fn of(path: &Path) -> io::Result<Self> {
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let name = path.file_name().ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = rustix::fs::open(parent.unwrap_or(Path::new(".")), flags, Mode::empty())?;
        Ok(Self { directory: Arc::new(directory), name: name.to_owned(), path: path.to_owned() })
    }

    /// Another name in the same directory.
    #[must_use]
    pub fn beside(&self, name: &OsStr) -> Self {
        let path = self.path.with_file_name(name);
        Self { directory: Arc::clone(&self.directory), name: name.to_owned(), path }
    }

    /// A name in the directory that is here.
    ///
    /// # Errors
    /// There is no directory here; a link to one is none.
    pub fn below(&self, name: &OsStr) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let directory = openat(&self.directory, &self.name, flags, Mode::empty())?;
        let path = self.path.join(name);
        Ok(Self { directory: Arc::new(directory), name: name.to_owned(), path })
    }

    /// The path that led here, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What is known of the directory.
    ///
    /// # Errors
    /// As `fstat(2)`.
    pub fn directory(&self) -> io::Result<Stat> {
        Ok(fstat(&self.directory)?)
    }

    /// Changes the mode of the directory.
    ///
    /// # Errors
    /// As `chmod(2)`; also without `/proc`.
    pub fn set_directory_mode(&self, mode: u32) -> io::Result<()> {
        let directory = format!("/proc/self/fd/{}", self.directory.as_raw_fd());
        Ok(rustix::fs::chmod(directory, Mode::from_raw_mode(mode))?)
    }

    /// What is known of the file here, which may be a link.
    ///
    /// # Errors
    /// As `fstatat(2)`: `NotFound` if there is none.
    pub fn stat(&self) -> io::Result<Stat> {
        Ok(statat(&self.directory, &self.name, AtFlags::SYMLINK_NOFOLLOW)?)
    }

    /// Whether this file is here.
    pub fn holds(&self, file: Identity) -> bool {
        self.stat().is_ok_and(|found| identity(&found) == file)
    }

    /// Opens the regular file that is here, without waiting for anything.
    ///
    /// # Errors
    /// There is none, or something else is here.
    pub fn open(&self, access: OFlags) -> io::Result<File> {
        let flags = access | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        check_regular(&self.stat()?)?;
        let file = openat(&self.directory, &self.name, flags, Mode::empty())?;
        check_regular(&fstat(&file)?)?;
        Ok(file.into())
    }

    /// Opens what is here as a path alone, whatever it is; a link is not followed.
    ///
    /// # Errors
    /// `NotFound` if nothing is here.
    pub fn open_path(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(openat(&self.directory, &self.name, flags, Mode::empty())?)
    }

    /// Creates a file with this mode, less the umask, and opens it for reading and writing.
    ///
    /// # Errors
    /// `AlreadyExists` if anything is here.
    pub fn create_new(&self, mode: u32) -> io::Result<File> {
        let flags =
            OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(mode);
        Ok(openat(&self.directory, &self.name, flags, mode)?.into())
    }

    /// Creates a directory with this mode, less the umask.
    ///
    /// # Errors
    /// `AlreadyExists` if anything is here.
    pub fn create_directory(&self, mode: u32) -> io::Result<()> {
        Ok(mkdirat(&self.directory, &self.name, Mode::from_raw_mode(mode))?)
    }

    /// Opens the directory that is here.
    ///
    /// # Errors
    /// There is none; a link to one is none.
    pub fn open_directory(&self) -> io::Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(openat(&self.directory, &self.name, flags, Mode::empty())?)
    }

    /// Removes this file's name. Returns whether it was here.
    ///
    /// # Errors
    /// As `unlinkat(2)`.
    pub fn remove(&self, file: Identity) -> io::Result<bool> {
        match self.stat() {
            Ok(found) if identity(&found) == file => {}
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => return Ok(false),
        }
        match unlinkat(&self.directory, &self.name, AtFlags::empty()) {
            Err(error) if error == rustix::io::Errno::NOENT => Ok(false),
            removed => Ok(removed.map(|()| true)?),
        }
    }

    /// Removes this file's name, as [`remove`](Self::remove), and no file that another program puts here meanwhile: it
    /// is compared under a name of its own, and moved back if it is another. Returns whether it was here. For files
    /// whose contents matter.
    ///
    /// Where the file system cannot move a file without replacing another, or is full, this is `remove`. If the process
    /// is killed in between, the file, or another program's that took its place at that moment, has the other name:
    /// `.isobath-aside-` with numbers.
    ///
    /// # Errors
    /// As `renameat(2)` and `unlinkat(2)`. The file is then where it was, or the error says where it is.
    pub fn remove_aside(&self, file: Identity) -> io::Result<bool> {
        self.remove_aside_with(file, || {}, |aside| aside.remove(file))
    }

    /// Calls `meanwhile` where another program may act, and removes what is aside by `remove`.
    fn remove_aside_with(
        &self,
        file: Identity,
        meanwhile: impl FnOnce(),
        remove: impl FnOnce(&Self) -> io::Result<bool>,
    ) -> io::Result<bool> {
        match self.stat() {
            Ok(found) if identity(&found) == file => {}
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => return Ok(false),
        }
        meanwhile();
        let aside = match self.move_aside() {
            Ok(aside) => aside,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(_) => return self.remove(file),
        };
        let removed = remove(&aside);
        if let Ok(true) = removed {
            return Ok(true);
        }
        match (removed, aside.move_to(self)) {
            (removed, Ok(())) => removed,
            // Whoever has it took it.
            (Ok(_), Err(error)) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            (removed, Err(error)) => {
                let aside = Path::new(&aside.name).display();
                let text = match removed {
                    Err(first) => format!("{first}; it is now '{aside}': {error}"),
                    Ok(_) => {
                        format!("another program has replaced it by what is now '{aside}': {error}")
                    }
                };
                Err(io::Error::new(error.kind(), text))
            }
        }
    }

    /// Gives what is here a name that nothing else has.
    fn move_aside(&self) -> io::Result<Self> {
        /// Numbers the names of this process.
        static NEXT: AtomicU64 = AtomicU64::new(0);
        loop {
            let (process, number) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
            let aside = self.beside(format!(".isobath-aside-{process}-{number}").as_ref());
            match self.move_to(&aside) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                moved => return moved.map(|()| aside),
            }
        }
    }

    /// Removes the directory that is here, if it is empty.
    ///
    /// # Errors
    /// As `unlinkat(2)`.
    pub fn remove_directory(&self) -> io::Result<()> {
        Ok(unlinkat(&self.directory, &self.name, AtFlags::REMOVEDIR)?)
    }

    /// Moves the file here to another place in the same file system, and replaces what is there.
    ///
    /// # Errors
    /// As `renameat(2)`.
    pub fn replace(&self, other: &Self) -> io::Result<()> {
        let (from, to) = (&self.directory, &other.directory);
        Ok(renameat_with(from, &self.name, to, &other.name, RenameFlags::empty())?)
    }

    /// Moves the file here to another place in the same file system.
    ///
    /// # Errors
    /// `AlreadyExists` if anything is there.
    pub fn move_to(&self, other: &Self) -> io::Result<()> {
        let (from, to) = (&self.directory, &other.directory);
        Ok(renameat_with(from, &self.name, to, &other.name, RenameFlags::NOREPLACE)?)
    }
}

/// Opens what a path leads to, once `check` has seen what that is: nothing else is opened, and nothing before, since
/// an open may wait, or have side effects, as of a device. Links are followed.
///
/// # Errors
/// If it cannot be opened, or `check` refuses it.
pub fn open_checked(
    path: &Path,
    options: &OpenOptions,
    check: impl FnOnce(&Stat) -> io::Result<()>,
) -> io::Result<File> {
    let found = rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    let seen = fstat(&found)?;
    check(&seen)?;
    match options.open(format!("/proc/self/fd/{}", found.as_raw_fd())) {
        Err(error) if error.kind() == io::ErrorKind::NotFound && seen.st_nlink > 0 => {}
        opened => return opened,
    }
    // There is no /proc.
    let file = options.open(path)?;
    if identity_of(&file)? != identity(&seen) {
        return Err(io::ErrorKind::ResourceBusy.into());
    }
    Ok(file)
}

/// Opens the regular file that a path leads to, for reading. Links are followed, and nothing is waited for.
///
/// # Errors
/// If it is no regular file, or cannot be opened.
pub fn open_regular(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY);
    open_checked(path, &options, check_regular)
}

/// The identity of an open file.
///
/// # Errors
/// As `fstat(2)`.
pub fn identity_of(file: impl AsFd) -> io::Result<Identity> {
    Ok(identity(&fstat(file)?))
}

/// The identity of a file of which this is known.
pub fn identity(found: &Stat) -> Identity {
    (found.st_dev, found.st_ino)
}

/// Whether it is a regular file.
pub fn is_regular(found: &Stat) -> bool {
    FileType::from_raw_mode(found.st_mode) == FileType::RegularFile
}

fn check_regular(found: &Stat) -> io::Result<()> {
    if is_regular(found) {
        return Ok(());
    }
    let what = match FileType::from_raw_mode(found.st_mode) {
        FileType::Directory => return Err(io::ErrorKind::IsADirectory.into()),
        FileType::Symlink => "a symbolic link",
        FileType::Fifo => "a named pipe",
        FileType::Socket => "a socket",
        _ => "a device",
    };
    Err(io::Error::new(io::ErrorKind::InvalidInput, format!("it is {what}, not a regular file")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_place_stays_when_its_directory_is_renamed() {
        let root = tempfile::tempdir().unwrap();
        let [directory, moved, other] = ["d", "moved", "other"].map(|name| root.path().join(name));
        fs::create_dir(&directory).unwrap();
        fs::create_dir(&other).unwrap();
        let place = Place::of(&directory.join("file")).unwrap();
        let id = identity_of(place.create_new(0o640).unwrap()).unwrap();
        fs::rename(&directory, &moved).unwrap();
        fs::hard_link(moved.join("file"), other.join("file")).unwrap();
        symlink(&other, &directory).unwrap();
        assert!(place.holds(id));
        assert!(place.remove(id).unwrap() && !place.remove(id).unwrap());
        assert!(!moved.join("file").exists() && other.join("file").exists());
    }

    #[test]
    fn what_has_taken_the_place_of_a_file_is_not_removed() {
        let root = tempfile::tempdir().unwrap();
        let place = Place::of(&root.path().join("file")).unwrap();
        let held = place.create_new(0o600).unwrap();
        let id = identity_of(&held).unwrap();
        place.move_to(&place.beside(OsStr::new("away"))).unwrap();
        symlink("away", place.path()).unwrap();
        assert!(!place.holds(id) && !place.remove(id).unwrap());
        assert!(place.path().is_symlink());
        let taken = place.beside(OsStr::new("away")).move_to(&place).unwrap_err();
        assert_eq!(taken.kind(), io::ErrorKind::AlreadyExists);
    }

    #[test]
    fn what_takes_the_place_of_a_file_while_it_is_removed_stays() {
        let root = tempfile::tempdir().unwrap();
        let place = Place::of(&root.path().join("file")).unwrap();
        let names = || {
            let entries = fs::read_dir(root.path()).unwrap();
            let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
            names.sort();
            names
        };
        let held = place.create_new(0o600).unwrap();
        let id = identity_of(&held).unwrap();
        let exchange = || {
            fs::rename(place.path(), root.path().join("moved")).unwrap();
            fs::write(place.path(), "another's").unwrap();
        };
        assert!(!place.remove_aside_with(id, exchange, |aside| aside.remove(id)).unwrap());
        assert_eq!(fs::read(place.path()).unwrap(), b"another's");
        assert_eq!(names(), ["file", "moved"]);
        assert!(!place.remove_aside(id).unwrap());

        let moved = place.beside(OsStr::new("moved"));
        let gone = || fs::rename(moved.path(), root.path().join("again")).unwrap();
        assert!(!moved.remove_aside_with(id, gone, |aside| aside.remove(id)).unwrap());
        let again = place.beside(OsStr::new("again"));
        assert!(again.remove_aside(id).unwrap() && !again.remove_aside(id).unwrap());
        assert_eq!(names(), ["file"]);
    }

    #[test]
    fn a_file_that_cannot_be_removed_keeps_its_name_or_the_error_tells_the_other() {
        let root = tempfile::tempdir().unwrap();
        let place = Place::of(&root.path().join("file")).unwrap();
        let id = identity_of(place.create_new(0o600).unwrap()).unwrap();
        let fails = |_: &Place| Err(io::Error::from_raw_os_error(libc::EIO));
        let error = place.remove_aside_with(id, || {}, fails).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
        assert!(place.holds(id));
        let taken = |aside: &Place| {
            fs::write(place.path(), "another's").unwrap();
            fails(aside)
        };
        let error = place.remove_aside_with(id, || {}, taken).unwrap_err().to_string();
        let aside = error.split('\'').nth(1).unwrap();
        assert!(place.beside(aside.as_ref()).holds(id), "{error}");
        assert_eq!(fs::read(place.path()).unwrap(), b"another's");
    }

    #[test]
    fn a_name_that_is_taken_is_not_used_to_remove_a_file() {
        let root = tempfile::tempdir().unwrap();
        let place = Place::of(&root.path().join("file")).unwrap();
        let id = identity_of(place.create_new(0o600).unwrap()).unwrap();
        let aside = place.move_aside().unwrap();
        let taken = place.create_new(0o600).unwrap();
        assert_ne!(place.move_aside().unwrap().path(), aside.path());
        assert!(aside.holds(id) && identity_of(&taken).unwrap() != id);
    }

    #[test]
    fn only_a_regular_file_is_opened_and_nothing_is_waited_for() {
        let root = tempfile::tempdir().unwrap();
        let place = |name: &str| Place::of(&root.path().join(name)).unwrap();
        let mode = Mode::from_raw_mode(0o600);
        rustix::fs::mknodat(rustix::fs::CWD, place("pipe").path(), FileType::Fifo, mode, 0)
            .unwrap();
        fs::create_dir(place("directory").path()).unwrap();
        fs::write(place("file").path(), "x").unwrap();
        symlink("file", place("link").path()).unwrap();
        let _socket = UnixListener::bind(place("socket").path()).unwrap();
        for name in ["pipe", "directory", "link", "socket"] {
            place(name).open(OFlags::RDWR).unwrap_err();
        }
        place("file").open(OFlags::RDWR).unwrap();
    }

    #[test]
    fn what_was_looked_at_is_what_is_opened() {
        let root = tempfile::tempdir().unwrap();
        let [file, moved, other] = ["file", "moved", "other"].map(|name| root.path().join(name));
        fs::write(&file, "looked at").unwrap();
        fs::write(&other, "not looked at").unwrap();
        let exchange = |_: &Stat| {
            fs::rename(&file, &moved)?;
            symlink(&other, &file)
        };
        let opened = open_checked(&file, OpenOptions::new().read(true), exchange).unwrap();
        assert_eq!(io::read_to_string(opened).unwrap(), "looked at");
        assert_eq!(io::read_to_string(open_regular(&file).unwrap()).unwrap(), "not looked at");
        open_regular(root.path()).unwrap_err();
    }
}
