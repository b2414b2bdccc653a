//! Files and directories that are held open from the time that they are judged: a rule is about what was judged,
//! whatever its name has come to mean.

use crate::host;
use isobath_storage::FileId;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat};
use rustix::fs::{fstat, open, statat};
use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

/// What may be used of the files of an image, or in place of a name.
#[derive(Debug)]
pub(crate) enum Held {
    /// A directory, and everything below.
    Directory(OwnedFd),
    /// A file alone.
    File(OwnedFd),
    /// A device alone.
    Device(OwnedFd),
}

impl AsFd for Held {
    fn as_fd(&self) -> BorrowedFd<'_> {
        let (Self::Directory(file) | Self::File(file) | Self::Device(file)) = self;
        file.as_fd()
    }
}

impl Held {
    /// The file or device of this name.
    ///
    /// # Errors
    /// There is none.
    pub(crate) fn file(path: &Path) -> io::Result<Self> {
        Ok(Self::File(open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?))
    }

    /// The directory of this name. Everything lies below the root directory, which is refused.
    ///
    /// # Errors
    /// There is none.
    pub(crate) fn directory(path: &Path) -> io::Result<Option<Self>> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = open(path, flags, Mode::empty())?;
        let (found, root) = (fstat(&directory)?, rustix::fs::stat("/")?);
        let is_root = (found.st_dev, found.st_ino) == (root.st_dev, root.st_ino);
        Ok((!is_root).then_some(Self::Directory(directory)))
    }

    /// The directory of this name, which is no link to one.
    ///
    /// # Errors
    /// There is none.
    pub(crate) fn real_directory(path: &Path) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(Self::Directory(open(path, flags, Mode::empty())?))
    }

    /// The directory of a file that need not be there; `None` if that is the root directory.
    ///
    /// # Errors
    /// The directory is not there.
    pub(crate) fn directory_of(file: &Path) -> io::Result<Option<Self>> {
        Self::directory(parent(file))
    }

    /// What the open file `id` of an image brings, by this name: its directory, where its lock, its snapshots and new
    /// files are, and that of a link to it. A device brings itself only, and so does a file in the root directory.
    ///
    /// # Errors
    /// The name, or that of a directory on its path, has come to mean another file.
    pub(crate) fn of_image(name: &Path, id: FileId) -> io::Result<Vec<Self>> {
        let exchanged =
            || io::Error::other("its name has come to mean another file since it was opened");
        let real = fs::canonicalize(name).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => {
                let text = "the file has no name; give it one (ln), or do without (--sandbox off)";
                io::Error::new(error.kind(), text)
            }
            _ => error,
        })?;
        let own = open(&real, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
        let found = fstat(&own)?;
        if identity(&found) != id {
            return Err(exchanged());
        }
        if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
            return Ok(vec![Self::Device(own)]);
        }
        let mut all = Vec::new();
        for path in [name, &real] {
            let Some(directory) = Self::directory_of(path)? else { continue };
            let file = path.file_name().ok_or_else(exchanged)?;
            // A link is followed: only what leads to the file is its directory.
            if identity(&statat(&directory, file, AtFlags::empty())?) != id {
                return Err(exchanged());
            }
            all.push(directory);
        }
        if Self::directory_of(&real)?.is_none() {
            all.push(Self::File(own));
        }
        Ok(all)
    }
}

/// The name of a file's directory.
fn parent(file: &Path) -> &Path {
    let parent = file.parent().filter(|parent| !parent.as_os_str().is_empty());
    parent.unwrap_or(Path::new("."))
}

/// The id of a file as that of an image.
fn identity(found: &Stat) -> FileId {
    host::id_of_file(if FileType::from_raw_mode(found.st_mode) == FileType::BlockDevice {
        FileId { device: u64::MAX, inode: found.st_rdev }
    } else {
        FileId { device: found.st_dev, inode: found.st_ino }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;

    /// What it is, and where.
    fn shown(held: &Held) -> (char, PathBuf) {
        let kind = match held {
            Held::Directory(_) => 'd',
            Held::File(_) => 'f',
            Held::Device(_) => 'b',
        };
        let number = held.as_fd().as_raw_fd();
        (kind, fs::read_link(format!("/proc/self/fd/{number}")).unwrap())
    }

    fn id(path: &Path) -> FileId {
        identity(&rustix::fs::stat(path).unwrap())
    }

    fn of_image(path: &Path) -> Vec<(char, PathBuf)> {
        Held::of_image(path, id(path)).unwrap().iter().map(shown).collect()
    }

    #[test]
    fn an_image_brings_its_directory_and_a_device_only_itself() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().canonicalize().unwrap().join(name);
        fs::create_dir(at("real")).unwrap();
        fs::create_dir(at("names")).unwrap();
        fs::write(at("real/image"), "").unwrap();
        symlink(at("real/image"), at("names/image")).unwrap();
        symlink("/dev/null", at("names/device")).unwrap();
        assert_eq!(of_image(&at("real/image")), [('d', at("real")), ('d', at("real"))]);
        assert_eq!(of_image(&at("names/image")), [('d', at("names")), ('d', at("real"))]);
        assert_eq!(of_image(&at("names/device")), [('b', "/dev/null".into())]);
    }

    #[test]
    fn the_root_directory_is_allowed_to_nobody() {
        for root in ["/", "/proc/..", "/proc/self/root"] {
            assert!(Held::directory(Path::new(root)).unwrap().is_none(), "{root}");
        }
        assert!(Held::directory_of(Path::new("/image")).unwrap().is_none());
        let here = std::env::current_dir().unwrap().canonicalize().unwrap();
        let held = Held::directory_of(Path::new("image")).unwrap().unwrap();
        assert_eq!(shown(&held), ('d', here));
    }

    #[test]
    fn a_link_is_not_a_directory_of_its_own() {
        let place = tempfile::tempdir().unwrap();
        let link = place.path().join("link");
        symlink("/etc", &link).unwrap();
        assert!(Held::real_directory(&link).is_err());
        assert!(Held::real_directory(place.path()).is_ok());
    }

    #[test]
    fn a_directory_that_takes_the_place_of_an_images_brings_nothing() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().canonicalize().unwrap().join(name);
        for name in ["own", "other"] {
            fs::create_dir(at(name)).unwrap();
            fs::write(at(name).join("image"), name).unwrap();
        }
        let image = at("own/image");
        let opened = id(&image);
        let held = Held::of_image(&image, opened).unwrap();
        fs::rename(at("own"), at("moved")).unwrap();
        symlink(at("other"), at("own")).unwrap();
        let refused = Held::of_image(&image, opened).unwrap_err().to_string();
        assert!(refused.contains("has come to mean another file"), "{refused}");
        // What was judged before is what it was.
        assert!(held.iter().all(|held| shown(held) == ('d', at("moved"))));
    }
}
