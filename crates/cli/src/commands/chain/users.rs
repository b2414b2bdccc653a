//! Which images need a file.

use crate::failure::Failure;
use isobath_qcow2::Header;
use isobath_storage::Host;
use isobath_storage::file::FileHost;
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The most of an image that its header and the names in it take.
const HEADER: u64 = 2 << 20;

/// An image in these directories whose backing file or data file is `file`, if there is one.
///
/// # Errors
/// If a directory or an image cannot be read: it is unknown then what it needs.
pub(super) fn user_of(
    file: &Path,
    mut directories: Vec<PathBuf>,
) -> Result<Option<PathBuf>, Failure> {
    let identity = |path: &Path| fs::metadata(path).map(|found| (found.dev(), found.ino()));
    let wanted = identity(file).map_err(|error| unreadable(file, &error))?;
    for directory in &mut directories {
        if directory.as_os_str().is_empty() {
            *directory = ".".into();
        }
    }
    directories.sort_unstable();
    directories.dedup();
    for directory in directories {
        let entries = fs::read_dir(&directory).map_err(|error| unreadable(&directory, &error))?;
        for entry in entries {
            let entry = entry.map_err(|error| unreadable(&directory, &error))?;
            let path = entry.path();
            if !fs::metadata(&path).is_ok_and(|metadata| metadata.is_file()) {
                continue;
            }
            for name in names(&path)? {
                match identity(&FileHost.resolve(&path, &name)) {
                    Ok(named) if named == wanted => return Ok(Some(path)),
                    Err(error) if error.kind() != ErrorKind::NotFound => {
                        return Err(unreadable(&path, &error));
                    }
                    _ => {}
                }
            }
        }
    }
    Ok(None)
}

/// The files that a qcow2 image names.
fn names(image: &Path) -> Result<Vec<String>, Failure> {
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
        return Ok(Vec::new());
    }
    let header = Header::parse(&bytes).map_err(|error| unreadable(image, &error))?;
    let data_file = header.data_file().map(str::to_owned);
    Ok([header.backing_file, data_file].into_iter().flatten().collect())
}

fn unreadable(path: &Path, error: &dyn std::fmt::Display) -> Failure {
    Failure::new(format_args!(
        "cannot tell whether '{}' needs the layer's file, which is kept: {error}",
        path.display()
    ))
}
