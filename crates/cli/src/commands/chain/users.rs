//! Finds the images that need a file.

use crate::failure::Failure;
use crate::host::images;
use isobath_image::name::plain_file_name;
use isobath_image::sabotage::{self, Sabotage};
use isobath_qcow2::Header;
use isobath_ring::place::open_regular;
use isobath_storage::Host;
use std::collections::{HashMap, HashSet};
use std::fs;
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
    /// If a directory or an image cannot be read, since the files that it needs are then unknown.
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
            let plain = if sabotage::is(Sabotage::PlainNames) { &name } else { &*plain };
            match identity(&images().resolve(image, plain)) {
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
        let mut file = open_regular(image)?;
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
