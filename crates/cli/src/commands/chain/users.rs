//! Which images need a file.

use crate::failure::Failure;
use isobath_qcow2::Header;
use isobath_storage::Host;
use isobath_storage::file::FileHost;
use std::collections::{HashMap, HashSet};
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The most of an image that its header and the names in it take.
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
    /// Reads the images in these directories, and in all directories below those of `trees`.
    ///
    /// # Errors
    /// If a directory or an image cannot be read: it is unknown then what it needs.
    pub(super) fn find(directories: &[PathBuf], trees: &[PathBuf]) -> Result<Self, Failure> {
        let given = directories.iter().map(|directory| (directory, false));
        let given = given.chain(trees.iter().map(|directory| (directory, true)));
        let mut left: Vec<(PathBuf, bool)> = given
            .map(|(directory, deep)| {
                let here = directory.as_os_str().is_empty();
                (if here { PathBuf::from(".") } else { directory.clone() }, deep)
            })
            .collect();
        let mut seen: HashSet<(Identity, bool)> = HashSet::new();
        let mut found = Self::default();
        while let Some((directory, deep)) = left.pop() {
            let id = identity(&directory).map_err(|error| unreadable(&directory, &error))?;
            if !seen.insert((id, deep)) {
                continue;
            }
            let entries =
                fs::read_dir(&directory).map_err(|error| unreadable(&directory, &error))?;
            for entry in entries {
                let entry = entry.map_err(|error| unreadable(&directory, &error))?;
                let kind = entry.file_type().map_err(|error| unreadable(&directory, &error))?;
                let path = entry.path();
                if kind.is_dir() && deep {
                    left.push((path, true));
                } else if fs::metadata(&path).is_ok_and(|metadata| metadata.is_file()) {
                    found.add(&path)?;
                }
            }
        }
        Ok(found)
    }

    fn add(&mut self, image: &Path) -> Result<(), Failure> {
        for name in names(image)? {
            match identity(&FileHost.resolve(image, &name)) {
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

    /// The images that name this file.
    pub(super) fn of(&self, file: &Path) -> Result<&[PathBuf], Failure> {
        let id = identity(file).map_err(|error| unreadable(file, &error))?;
        Ok(self.0.get(&id).map_or(&[], Vec::as_slice))
    }
}

/// The files that a qcow2 image names.
fn names(image: &Path) -> Result<Vec<String>, Failure> {
    let Some(header) = header(image)? else { return Ok(Vec::new()) };
    let data_file = header.data_file().map(str::to_owned);
    Ok([header.backing_file, data_file].into_iter().flatten().collect())
}

/// The header of a qcow2 image; `None` if it is none.
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
        "cannot tell whether '{}' needs the layer's file, which is kept: {error}",
        path.display()
    ))
}
