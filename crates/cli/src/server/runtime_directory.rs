//! The directory for sockets whose names nobody chose.

use isobath_ring::net::own_user;
use rustix::fs::{FileType, Mode, OFlags};
use std::env;
use std::io;
use std::path::{Path, PathBuf};

/// The user whose directory is in `/run`.
const ROOT: u32 = 0;

/// Creates the directory if there is none: `$XDG_RUNTIME_DIR/isobath`, for root `/run/isobath`.
///
/// # Errors
/// There is no directory for such files, or others can write to it.
pub(crate) fn create() -> Result<PathBuf, String> {
    let parent = if own_user() == ROOT {
        // Not the variable's, which may be that of the user who became root.
        PathBuf::from("/run")
    } else {
        let given = env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        let given = given.filter(|path| path.is_absolute());
        given.ok_or_else(|| "XDG_RUNTIME_DIR is not set".to_owned())?
    };
    create_in(&parent)
}

/// Creates the directory in `parent`.
fn create_in(parent: &Path) -> Result<PathBuf, String> {
    let fails = |path: &Path, error: io::Error| {
        let cause = isobath_storage::cause(&error);
        format!("cannot use the directory '{}': {cause}", path.display())
    };
    let owners = [own_user(), ROOT];
    check(parent, OFlags::empty(), &owners).map_err(|error| fails(parent, error))?;
    let directory = parent.join("isobath");
    match rustix::fs::mkdir(&directory, Mode::RWXU) {
        Err(error) if error != rustix::io::Errno::EXIST => Err(error.into()),
        _ => check(&directory, OFlags::NOFOLLOW, &owners[..1]),
    }
    .map_err(|error| fails(&directory, error))?;
    Ok(directory)
}

/// Checks that a directory belongs to one of these users, and that others can replace nothing in it.
fn check(directory: &Path, flags: OFlags, owners: &[u32]) -> io::Result<()> {
    let flags = flags | OFlags::PATH | OFlags::CLOEXEC;
    let stat = rustix::fs::fstat(rustix::fs::open(directory, flags, Mode::empty())?)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
        return Err(io::Error::other("it is a link or a file"));
    }
    if !owners.contains(&stat.st_uid) {
        return Err(io::Error::other(format!("it belongs to another user ({})", stat.st_uid)));
    }
    let mode = Mode::from_raw_mode(stat.st_mode);
    if mode.intersects(Mode::WGRP | Mode::WOTH) && !mode.contains(Mode::SVTX) {
        return Err(io::Error::other(format!(
            "other users can write to it (mode {:o})",
            mode.as_raw_mode()
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn mode(path: &Path) -> u32 {
        path.metadata().unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn the_directory_is_this_users_alone() {
        let parent = tempfile::tempdir().unwrap();
        let directory = create_in(parent.path()).unwrap();
        assert_eq!(
            (directory.as_path(), mode(&directory)),
            (&*parent.path().join("isobath"), 0o700)
        );
        assert_eq!(create_in(parent.path()).unwrap(), directory, "it may exist");
        fs::set_permissions(&directory, PermissionsExt::from_mode(0o755)).unwrap();
        assert!(create_in(parent.path()).is_ok(), "others may look into it");
        fs::set_permissions(&directory, PermissionsExt::from_mode(0o770)).unwrap();
        let refused = create_in(parent.path()).unwrap_err();
        assert!(refused.contains("other users can write to it (mode 770)"), "{refused}");
    }

    #[test]
    fn a_link_and_a_directory_that_others_can_replace_are_refused() {
        let parent = tempfile::tempdir().unwrap();
        let target = tempfile::tempdir().unwrap();
        symlink(target.path(), parent.path().join("isobath")).unwrap();
        let refused = create_in(parent.path()).unwrap_err();
        assert!(refused.contains("it is a link or a file"), "{refused}");
        fs::set_permissions(target.path(), PermissionsExt::from_mode(0o777)).unwrap();
        assert!(create_in(target.path()).is_err());
        assert!(!target.path().join("isobath").exists());
        assert!(create_in(&parent.path().join("none")).is_err());
    }
}
