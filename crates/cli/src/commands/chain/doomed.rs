//! Layers whose files are to be deleted.

use super::note;
use super::users::{Identity, Users, header, identity};
use crate::failure::Failure;
use crate::host;
use isobath_image::sabotage::{self, Sabotage};
use isobath_ring::place::{self, Place};
use isobath_storage::{FileId, Host, Locking, OpenMode, StorageExt};
use isobath_storage_file::{FileHost, FileStorage};
use rustix::fs::{FileType, OFlags};
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A layer's file that is to be deleted. From the first lock until this is dropped, no other program can write to it.
/// While it is locked, no program that takes locks has it open or can open it, under any name or through any overlay,
/// and none can create an overlay that names it. QEMU's `create -b` takes no locks.
pub(super) struct Doomed {
    path: PathBuf,
    /// Where the file is, whatever becomes of the path.
    place: Place,
    /// A symbolic link to it beside it, by which it was named.
    link: Option<(Place, Identity)>,
    locked: FileStorage,
}

impl Doomed {
    /// Locks the file.
    ///
    /// # Errors
    /// If another program uses it; if it cannot be opened for writing, which the locks require; if its name is a
    /// symbolic link to another directory; or if it has internal snapshots.
    pub(super) async fn lock(path: &Path) -> Result<Self, Failure> {
        host::only_files(path, "the deletion of a layer")?;
        let named = Place::of(path).map_err(|error| kept(path, &error))?;
        let locked = open(path).await?;
        let found = named.stat().map_err(|error| kept(path, &error))?;
        let (place, link) = match FileType::from_raw_mode(found.st_mode) {
            FileType::Symlink => {
                // Other images may refer to it through other links, which are not searched for.
                let file = target(path, &named).map_err(|error| kept(path, &error))?;
                (file, Some((named, place::identity(&found))))
            }
            _ => (named, None),
        };
        if !place.holds(identity_of(&locked)) {
            return Err(kept(path, &"another program has replaced it, or it is a device"));
        }
        let snapshots = header(path)?.map_or(0, |header| header.nb_snapshots);
        if snapshots > 0 {
            return Err(Failure::new(format_args!(
                "'{}' has internal snapshots ({snapshots}), which would be lost; delete them first with 'isobath \
                 snapshot -d'",
                path.display()
            )));
        }
        Ok(Self { path: path.to_owned(), place, link, locked })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Its identity among the layers of a chain.
    pub(super) fn id(&self) -> FileId {
        host::id_of_file(self.locked.id())
    }

    /// Admits readers, as a merge of the layer requires, but still keeps out other programs' writers.
    ///
    /// # Errors
    /// If the storage fails.
    pub(super) async fn let_read(self) -> Result<Self, Failure> {
        self.locked.retire().await?;
        self.locked.admit_writer(true).await?;
        Ok(self)
    }

    /// Locks the file again.
    ///
    /// # Errors
    /// If another program uses it, or its name now refers to another file.
    pub(super) async fn lock_again(self) -> Result<Self, Failure> {
        let locked = open(&self.path).await?;
        if locked.id() != self.locked.id() {
            return Err(kept(&self.path, &"another program has replaced it"));
        }
        Ok(Self { locked, ..self })
    }

    /// Deletes the file, and the symbolic link beside it by which it was named, if any. If an image other than
    /// `overlay` needs the file, returns that image instead. `users` must have been found while the file was locked.
    ///
    /// # Errors
    /// If it cannot be deleted, or its name now refers to another file.
    pub(super) fn delete(
        self,
        users: &Users,
        overlay: Option<Identity>,
    ) -> Result<Option<PathBuf>, Failure> {
        let failed = |error: &dyn std::fmt::Display| {
            Failure::new(format_args!("cannot delete '{}': {error}", self.path.display()))
        };
        let own = identity_of(&self.locked);
        let now = self.place.stat().map_err(|error| failed(&error))?;
        if place::identity(&now) != own {
            return Err(failed(&"another program has replaced it"));
        }
        // An image that no longer exists was merged as well.
        let needs = |user: &&PathBuf| match identity(user) {
            Ok(id) => Some(id) != overlay,
            Err(error) => error.kind() != ErrorKind::NotFound,
        };
        if let Some(user) = users.of(own).iter().find(needs) {
            return Ok(Some(user.clone()));
        }
        if now.st_nlink > 1
            && let Some(file) = self.file()
        {
            note::forget_in(&file);
        }
        if let Some((link, id)) = &self.link {
            link.remove_aside(*id).map_err(|error| failed(&error))?;
        }
        match self.place.remove_aside(own) {
            Ok(true) => Ok(None),
            Ok(false) => Err(failed(&"another program has replaced it")),
            Err(error) => Err(failed(&error)),
        }
    }

    /// The file, to be read; `None` if it is not at its place, or cannot be opened.
    pub(super) fn file(&self) -> Option<File> {
        let file = self.place.open(OFlags::RDONLY).ok()?;
        let same = place::identity_of(&file).is_ok_and(|id| id == identity_of(&self.locked));
        same.then_some(file)
    }
}

fn identity_of(file: &FileStorage) -> Identity {
    (file.id().device, file.id().inode)
}

/// The place of the file that the link at a place leads to.
///
/// # Errors
/// If that is in another directory.
fn target(path: &Path, link: &Place) -> io::Result<Place> {
    let real = fs::canonicalize(path)?;
    let there = real.parent().map(fs::metadata).transpose()?;
    let there = there.map(|there| (there.dev(), there.ino()));
    if let Some(name) = real.file_name()
        && there == Some(place::identity(&link.directory()?))
    {
        return Ok(link.beside(name));
    }
    Err(io::Error::other(format!("it is a symbolic link to '{}'", real.display())))
}

async fn open(path: &Path) -> Result<FileStorage, Failure> {
    let broken = sabotage::is(Sabotage::UnlockedDeletion);
    let locking = if broken { Locking::Unlocked } else { Locking::Alone };
    let mode = OpenMode { writable: !broken, locking, ..OpenMode::default() };
    FileHost.open(path, mode).await.map_err(|error| kept(path, &error))
}

fn kept(path: &Path, error: &dyn std::fmt::Display) -> Failure {
    Failure::new(format_args!("'{}' may be in use elsewhere and is kept: {error}", path.display()))
}
