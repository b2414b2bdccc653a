//! Which file system is full.

use isobath_disk::DiskError;
use std::fs::metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// What to say after an error because of a full file system, or a quota: where that is.
pub(crate) fn place(error: &DiskError) -> Option<String> {
    let DiskError::Storage(error) = error else { return None };
    let what = match error.errno() {
        libc::ENOSPC => "is full",
        libc::EDQUOT => "is full for this user (quota)",
        _ => return None,
    };
    let place = mount_point(&error.name)?;
    Some(format!("the file system '{}' {what}", isobath_storage::shown(&place)))
}

/// The highest directory of the file system that holds a regular file.
fn mount_point(file: &Path) -> Option<PathBuf> {
    let file = file.canonicalize().ok()?;
    let found = metadata(&file).ok().filter(std::fs::Metadata::is_file)?;
    let on_same = |directory: &&Path| metadata(directory).is_ok_and(|it| it.dev() == found.dev());
    file.ancestors().skip(1).take_while(on_same).last().map(Path::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use isobath_storage::{Operation, StorageError};
    use std::io;

    #[test]
    fn a_full_file_system_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("image");
        std::fs::write(&file, "").unwrap();
        let error = |errno, name: &Path| {
            let cause = io::Error::from_raw_os_error(errno);
            DiskError::Storage(StorageError::at(Operation::Write, name, 0, 512, cause))
        };
        let top = mount_point(&file).unwrap();
        let inside = directory.path().canonicalize().unwrap();
        assert!(inside.starts_with(&top), "{top:?}");
        let device = |path: &Path| metadata(path).unwrap().dev();
        assert_eq!(device(&top), device(&file));
        assert!(top.parent().is_none_or(|above| device(above) != device(&top)));
        let expected = format!("the file system '{}' is full", top.display());
        assert_eq!(place(&error(libc::ENOSPC, &file)), Some(expected));
        assert!(place(&error(libc::EDQUOT, &file)).unwrap().contains("quota"));
        assert_eq!(place(&error(libc::EIO, &file)), None);
        // Devices are no file systems, and exports none that is known here.
        for other in ["/dev/null", "nbd://h", "no such file"] {
            assert_eq!(place(&error(libc::ENOSPC, Path::new(other))), None);
        }
    }
}
