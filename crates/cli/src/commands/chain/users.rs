//! Finds the images that need a file.

use super::unfinished;
use crate::failure::Failure;
use isobath_image::name::plain_file_name;
use isobath_image::sabotage::{self, Sabotage};
use isobath_qcow2::Header;
use isobath_storage::file::{FileHost, FileStorage};
use isobath_storage::{FileId, Host, Locking, OpenMode, StorageExt};
use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Maximum bytes of an image's header and the names in it.
const HEADER: u64 = 2 << 20;

/// A file's device and inode number.
pub(super) type Identity = (u64, u64);

/// The images that name each file as their backing file or data file.
#[derive(Default)]
pub(super) struct Users(HashMap<Identity, Vec<PathBuf>>);

pub(super) fn identity(path: &Path) -> std::io::Result<Identity> {
    fs::metadata(path).map(|found| (found.dev(), found.ino()))
}

impl Users {
    /// Reads the images in these directories, and in all directories below them.
    ///
    /// # Errors
    /// If a directory or an image cannot be read: what it needs is then unknown.
    pub(super) fn find(directories: &[PathBuf]) -> Result<Self, Failure> {
        let mut found = Self::default();
        each_file(directories, |image| found.add(image))?;
        Ok(found)
    }

    fn add(&mut self, image: &Path) -> Result<(), Failure> {
        for (field, name) in names(image)? {
            // A name that `open` refuses may refer to a file for QEMU.
            let plain = plain_file_name(image, field, &name);
            let plain = plain.map_err(|error| unreadable(image, &error))?;
            let plain = if sabotage::is(Sabotage::PlainNames) { &name } else { plain };
            match identity(&FileHost.resolve(image, plain)) {
                Ok(id) => {
                    let users = self.0.entry(id).or_default();
                    if !users.iter().any(|user| user == image) {
                        users.push(image.to_owned());
                    }
                }
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(unreadable(image, &error)),
            }
        }
        Ok(())
    }

    /// Whether an image names this file.
    ///
    /// # Errors
    /// If the image cannot be read.
    pub(super) fn is(image: &Path, file: Identity) -> Result<bool, Failure> {
        let mut found = Self::default();
        found.add(image)?;
        Ok(!found.of(file).is_empty())
    }

    /// The images that name this file.
    pub(super) fn of(&self, file: Identity) -> &[PathBuf] {
        self.0.get(&file).map_or(&[], Vec::as_slice)
    }
}

/// Visits the files in these directories, and in all directories below them.
///
/// # Errors
/// If a directory cannot be read, or `visit` fails.
pub(super) fn each_file(
    directories: &[PathBuf],
    mut visit: impl FnMut(&Path) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let here = |directory: &PathBuf| directory.as_os_str().is_empty();
    let mut left: Vec<PathBuf> = directories
        .iter()
        .map(|directory| if here(directory) { PathBuf::from(".") } else { directory.clone() })
        .collect();
    let mut seen: HashSet<Identity> = HashSet::new();
    while let Some(directory) = left.pop() {
        let id = identity(&directory).map_err(|error| unreadable(&directory, &error))?;
        if !seen.insert(id) {
            continue;
        }
        let entries = fs::read_dir(&directory).map_err(|error| unreadable(&directory, &error))?;
        for entry in entries {
            let entry = entry.map_err(|error| unreadable(&directory, &error))?;
            let kind = entry.file_type().map_err(|error| unreadable(&directory, &error))?;
            let path = entry.path();
            if kind.is_dir() {
                left.push(path);
            } else if fs::metadata(&path).is_ok_and(|metadata| metadata.is_file()) {
                visit(&path)?;
            }
        }
    }
    Ok(())
}

/// The directories to search for images that need a chain's files: those of the files and of the targets of their
/// symbolic links, and `others`.
pub(super) fn directories<'a>(
    files: impl Iterator<Item = &'a Path>,
    others: &[PathBuf],
) -> Vec<PathBuf> {
    let of = |file: &Path| {
        let real = fs::canonicalize(file).ok().filter(|_| file.is_symlink());
        let real = real.and_then(|real| real.parent().map(Path::to_owned));
        file.parent().map(Path::to_owned).into_iter().chain(real)
    };
    files.flat_map(of).chain(others.iter().cloned()).collect()
}

/// A layer's file that is to be deleted. From the first lock until this is dropped, no other program can write to it.
/// While it is locked, no program that takes locks has it open, under any name or through any overlay, or can open it
/// or name it in a new overlay. QEMU's `create -b` takes none.
pub(super) struct Doomed {
    path: PathBuf,
    locked: FileStorage,
}

impl Doomed {
    /// Locks the file.
    ///
    /// # Errors
    /// If another program uses it; it cannot be opened for writing, which the locks require; its name is a symbolic
    /// link to another directory; or it has internal snapshots.
    pub(super) async fn lock(path: &Path) -> Result<Self, Failure> {
        let locked = open(path).await?;
        // Others may use a link's target by links of their own, which are not searched for.
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

    pub(super) fn id(&self) -> FileId {
        self.locked.id()
    }

    /// Admits readers, as for a merge of the layer, but still no writers of other programs.
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

    /// Deletes the file, and its name if that is a symbolic link; or returns an image that needs it, other than
    /// `overlay`. `users` must have been found while the file was locked.
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
        // An image that is gone was merged, too.
        let needs = |user: &&PathBuf| match identity(user) {
            Ok(id) => Some(id) != overlay,
            Err(error) => error.kind() != ErrorKind::NotFound,
        };
        if let Some(user) = users.of(now).iter().find(needs) {
            return Ok(Some(user.clone()));
        }
        let real = fs::canonicalize(&self.path).map_err(|error| failed(&error))?;
        if fs::metadata(&real).map_err(|error| failed(&error))?.nlink() > 1 {
            unfinished::forget(&real);
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

/// The file names in a qcow2 image's header, each with its role.
fn names(image: &Path) -> Result<Vec<(&'static str, String)>, Failure> {
    let Some(header) = header(image)? else { return Ok(Vec::new()) };
    let data_file = header.data_file().map(|name| ("data file", name.to_owned()));
    let backing_file = header.backing_file.map(|name| ("backing file", name));
    Ok(backing_file.into_iter().chain(data_file).collect())
}

/// The header of a qcow2 image; `None` for other files.
pub(super) fn header(image: &Path) -> Result<Option<Header>, Failure> {
    let read = || {
        let mut bytes = Vec::new();
        let mut file = File::open(image)?;
        let mut magic = [0; 4];
        if file.read(&mut magic)? < magic.len() || magic != *b"QFI\xfb" {
            return Ok(bytes);
        }
        bytes.extend(magic);
        file.take(HEADER).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().map_err(|error: std::io::Error| unreadable(image, &error))?;
    if bytes.is_empty() {
        return Ok(None);
    }
    Header::parse(&bytes).map(Some).map_err(|error| unreadable(image, &error))
}

fn unreadable(path: &Path, error: &dyn std::fmt::Display) -> Failure {
    Failure::new(format_args!(
        "cannot read '{}', which may need the layer; the layer's file is kept: {error}",
        path.display()
    ))
}
