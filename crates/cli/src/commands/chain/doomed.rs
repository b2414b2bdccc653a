//! Layers whose files are to be deleted.

use super::note;
use super::users::{Identity, Users, header, identity};
use crate::failure::Failure;
use crate::host;
use isobath_image::sabotage::{self, Sabotage};
use isobath_storage::{FileId, Host, Locking, OpenMode, StorageExt};
use isobath_storage_file::{FileHost, FileStorage};
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A layer's file that is to be deleted. From the first lock until this is dropped, no other program can write to it.
/// While it is locked, no program that takes locks has it open or can open it, under any name or through any overlay,
/// and none can create an overlay that names it. QEMU's `create -b` takes no locks.
pub(super) struct Doomed {
    path: PathBuf,
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
        let locked = open(path).await?;
        // Other images may refer to a link's target through other links, which are not searched for.
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let directory = fs::canonicalize(parent.unwrap_or(Path::new(".")));
        let directory = directory.map_err(|error| kept(path, &error))?;
        let real = fs::canonicalize(path).map_err(|error| kept(path, &error))?;
        if path.is_symlink() && real.parent() != Some(&directory) {
            return Err(kept(path, &format_args!("it is a symbolic link to '{}'", real.display())));
        }
        let snapshots = header(path)?.map_or(0, |header| header.nb_snapshots);
        if snapshots > 0 {
            return Err(Failure::new(format_args!(
                "'{}' has internal snapshots ({snapshots}), which would be lost; delete them first with 'isobath \
                 snapshot -d'",
                path.display()
            )));
        }
        Ok(Self { path: path.to_owned(), locked })
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

    /// Deletes the file, and its name if that is a symbolic link. If an image other than `overlay` needs the file,
    /// returns that image instead. `users` must have been found while the file was locked.
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
        let locked = self.locked.id();
        let now = identity(&self.path).map_err(|error| failed(&error))?;
        if now != (locked.device, locked.inode) {
            return Err(failed(&"another program has replaced it"));
        }
        // An image that no longer exists was merged as well.
        let needs = |user: &&PathBuf| match identity(user) {
            Ok(id) => Some(id) != overlay,
            Err(error) => error.kind() != ErrorKind::NotFound,
        };
        if let Some(user) = users.of(now).iter().find(needs) {
            return Ok(Some(user.clone()));
        }
        let real = fs::canonicalize(&self.path).map_err(|error| failed(&error))?;
        if fs::metadata(&real).map_err(|error| failed(&error))?.nlink() > 1 {
            note::forget(&real);
        }
        if self.path.is_symlink() {
            fs::remove_file(&self.path).map_err(|error| failed(&error))?;
        }
        fs::remove_file(real).map_err(|error| failed(&error))?;
        Ok(None)
    }
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
