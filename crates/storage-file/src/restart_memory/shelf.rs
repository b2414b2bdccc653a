//! The places where restart memory of a file may be.

use isobath_ring::place::{Place, identity, is_regular};
use isobath_storage::{FileId, shown};
use rustix::fs::FlockOperation;
use std::collections::hash_map::RandomState;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::hash::BuildHasher;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How the names of all directories with restart memory begin, and those of memory of earlier versions, which is not in
/// a directory.
const PREFIX: &str = "isobath-";

/// Nobody else may write to a directory, or list it. But who opens another user's image must see that there is a log of
/// that user, although it cannot be read.
const DIRECTORY_MODE: u32 = 0o711;

/// How often a directory is made that somebody removes at once.
const MOST_REMOVED: u32 = 100;

/// The time between two looks whether it has been removed.
const REMOVAL_STEP: Duration = Duration::from_millis(5);

/// Who has left something, by what this process may do with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Whose {
    /// This process's user.
    Own,
    /// The owner of the image, who could change the image anyway.
    Owner,
    /// Others.
    Others,
}

/// Whose image it is, and its permissions.
#[derive(Clone, Copy, Debug)]
pub(super) struct Image {
    pub(super) owner: u32,
    pub(super) mode: u32,
}

impl Image {
    /// Whether a user may have written to it, so that a log of his may be its log. Who belongs to its group is not
    /// known.
    fn may_be_written_by(self, user: u32) -> bool {
        user == 0 || user == self.owner || self.mode & 0o022 != 0
    }
}

/// The places for memory of one file.
pub(super) struct Shelf {
    memory: PathBuf,
    user: u32,
    image: Image,
    file: FileId,
}

/// A place where there is something.
pub(super) struct Spot {
    pub(super) whose: Whose,
    pub(super) place: Place,
    /// The user who left it.
    pub(super) user: u32,
}

impl Shelf {
    /// For a file, as seen by `user`; `memory` is a directory that all users share.
    pub(super) fn new(memory: &Path, user: u32, image: Image, file: FileId) -> Self {
        Self { memory: memory.to_owned(), user, image, file }
    }

    fn whose(&self, user: u32) -> Whose {
        match user {
            user if user == self.user => Whose::Own,
            user if user == self.image.owner => Whose::Owner,
            _ => Whose::Others,
        }
    }

    /// The file's name in a directory.
    pub(super) fn name(&self) -> OsString {
        format!("{:x}-{:x}", self.file.device, self.file.inode).into()
    }

    /// The regular files with the file's name, those of this user first, and none of users who may not write to the
    /// image.
    ///
    /// # Errors
    /// If there may be one in a directory of this user or of the image's owner, but cannot be looked for.
    pub(super) fn spots(&self) -> io::Result<Vec<Spot>> {
        let mut spots = Vec::new();
        let former = OsString::from(format!("{PREFIX}{}", self.name().display()));
        let entries = self.entries(PREFIX)?;
        if entries.is_empty() {
            return Ok(spots);
        }
        let root = self.root()?;
        for entry in entries {
            if entry == former {
                spots.extend(self.spot(root.beside(&entry), Whose::Own)?);
                continue;
            }
            let Some((user, place)) = self.directory(&root.beside(&entry))? else { continue };
            let whose = self.whose(user);
            match self.spot(place, whose) {
                Ok(spot) => spots.extend(spot),
                Err(error) if whose == Whose::Others => {
                    tracing::debug!(uid = user, %error, "another user's restart logs are not seen");
                }
                Err(error) => {
                    let directory = self.memory.join(entry);
                    let text = format!(
                        "'{}', where the restart memory may be, cannot be searched: {error}; open \
                         the image as the user who owns it",
                        shown(&directory)
                    );
                    return Err(io::Error::new(error.kind(), text));
                }
            }
        }
        spots.retain(|spot| spot.whose != Whose::Others || self.image.may_be_written_by(spot.user));
        spots.sort_by_key(|spot| spot.whose);
        Ok(spots)
    }

    /// A regular file at a place in a directory of this kind.
    fn spot(&self, place: Place, directory: Whose) -> io::Result<Option<Spot>> {
        match place.stat() {
            Ok(found) if is_regular(&found) => {
                let whose = self.whose(found.st_uid).max(directory);
                Ok(Some(Spot { whose, place, user: found.st_uid }))
            }
            Ok(_) => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The names in the shared directory that begin like this.
    fn entries(&self, prefix: &str) -> io::Result<Vec<OsString>> {
        let entries = match fs::read_dir(&self.memory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut names = Vec::new();
        for entry in entries {
            names.push(entry?.file_name());
        }
        names.retain(|name| begins(name, prefix));
        names.sort();
        Ok(names)
    }

    /// The directories of all users that there are.
    pub(super) fn directories(&self) -> io::Result<Vec<PathBuf>> {
        let mut found = Vec::new();
        for entry in self.entries(PREFIX)? {
            let path = self.memory.join(entry);
            if fs::symlink_metadata(&path).is_ok_and(|found| found.is_dir()) {
                found.push(path);
            }
        }
        Ok(found)
    }

    /// A place in the shared directory.
    fn root(&self) -> io::Result<Place> {
        Place::of(&self.memory.join(PREFIX))
    }

    /// The file's place in this directory, and the user who made that. `None` if there is no directory.
    fn directory(&self, directory: &Place) -> io::Result<Option<(u32, Place)>> {
        let found = directory.below(&self.name());
        match found.and_then(|place| Ok((place.directory()?.st_uid, place))) {
            Ok(found) => Ok(Some(found)),
            Err(error) if is_no_directory(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// A directory of this user's own, which is made if there is none.
    ///
    /// # Errors
    /// If it cannot be made.
    pub(super) fn own(&self) -> io::Result<Place> {
        let plain = format!("{PREFIX}{}", self.user);
        let root = self.root()?;
        for _ in 0..MOST_REMOVED {
            if let Some(place) = self.made(&root.beside(OsStr::new(&plain)))? {
                return Ok(place);
            }
            // Another user has taken the name. This user may have found another one before.
            for entry in self.entries(&format!("{plain}."))? {
                if let Some(place) = self.usable(&root.beside(&entry))? {
                    return Ok(place);
                }
            }
            let random = RandomState::new().hash_one(self.file.inode);
            let other = format!("{plain}.{random:x}");
            if let Some(place) = self.made(&root.beside(OsStr::new(&other)))? {
                tracing::warn!(
                    "another user has made '{}', so restart logs go to '{}'",
                    shown(&self.memory.join(&plain)),
                    shown(place.path().parent().unwrap_or(place.path()))
                );
                return Ok(place);
            }
        }
        Err(io::ErrorKind::ResourceBusy.into())
    }

    /// The place in this user's own directory, which is made if there is nothing; `None` if there is something else.
    fn made(&self, directory: &Place) -> io::Result<Option<Place>> {
        match directory.create_directory(DIRECTORY_MODE) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => self.usable(directory),
        }
    }

    /// The place in a directory, if that belongs to this user. From now on nobody else may write there.
    fn usable(&self, directory: &Place) -> io::Result<Option<Place>> {
        let Some((user, place)) = self.directory(directory)? else { return Ok(None) };
        if user != self.user {
            return Ok(None);
        }
        if place.directory()?.st_mode & 0o7777 != DIRECTORY_MODE {
            place.set_directory_mode(DIRECTORY_MODE)?;
        }
        Ok(Some(place))
    }

    /// Removes the directory of a place if it is empty, and one of those for memory.
    pub(super) fn tidy(place: &Place) {
        if let Some(directory) = place.path().parent() {
            Self::remove_unused(directory);
        }
    }

    /// Removes a directory for memory if it is empty and nobody [keeps](Self::keep) it.
    pub(super) fn remove_unused(directory: &Path) {
        if !directory.file_name().is_some_and(|name| begins(name, PREFIX)) {
            return;
        }
        let Ok(directory) = Place::of(directory) else { return };
        let Ok(found) = directory.open_directory() else { return };
        // Until it is gone, nobody comes to keep it. Who makes a file in it meanwhile either prevents the removal, or
        // finds that there is no directory, and makes another.
        let locked = rustix::fs::flock(&found, FlockOperation::NonBlockingLockExclusive).is_ok();
        let is_here = || {
            let id = rustix::fs::fstat(&found).map(|found| identity(&found));
            id.is_ok_and(|id| directory.holds(id))
        };
        if locked && is_here() {
            // Others may use it.
            let _ = directory.remove_directory();
        }
    }

    /// Makes this user's own directory, which is not removed while the result lives. Returns its path as well.
    ///
    /// # Errors
    /// If it cannot be made.
    pub(super) fn keep(&self) -> io::Result<(PathBuf, OwnedFd)> {
        for _ in 0..MOST_REMOVED {
            let place = self.own()?;
            let path = place.path().parent().unwrap_or(&self.memory).to_owned();
            let directory = Place::of(&path)?;
            let found = match directory.open_directory() {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                found => found?,
            };
            match rustix::fs::flock(&found, FlockOperation::NonBlockingLockShared) {
                // It is being removed, which is soon over. Another process of this user may hold it for longer.
                Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) => {
                    std::thread::sleep(REMOVAL_STEP);
                    continue;
                }
                locked => locked?,
            }
            if directory.holds(identity(&rustix::fs::fstat(&found)?)) {
                return Ok((path, found));
            }
        }
        Err(io::ErrorKind::ResourceBusy.into())
    }
}

/// Whether an error says that there is no directory for memory. Only another file system, which a user has mounted
/// there, denies a look at its root.
fn is_no_directory(error: &io::Error) -> bool {
    let kinds = [
        io::ErrorKind::NotFound,
        io::ErrorKind::NotADirectory,
        io::ErrorKind::PermissionDenied,
        io::ErrorKind::NotConnected,
    ];
    kinds.contains(&error.kind())
}

fn begins(name: &OsStr, prefix: &str) -> bool {
    name.as_encoded_bytes().starts_with(prefix.as_bytes())
}
