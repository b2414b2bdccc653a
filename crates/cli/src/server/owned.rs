//! Whose a file must be that a server finds and writes to, other than an image.

use isobath_ring::net::own_user;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;

const ROOT: u32 = 0;

/// Checks that a file which was found is the server's to write to: a regular file with one name, of the server's user,
/// the user that it will become, or root, which not everybody may write to.
///
/// # Errors
/// It is not; the text says why, and what to do.
pub(crate) fn check(found: &Metadata, becomes: Option<u32>) -> io::Result<()> {
    if !found.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    if found.nlink() != 1 {
        return Err(io::Error::other("it has another name as well (a hard link), or none"));
    }
    let owner = found.uid();
    if owner != own_user() && owner != ROOT && becomes != Some(owner) {
        return Err(io::Error::other(format!(
            "it belongs to another user ({owner}); remove it, or name another file"
        )));
    }
    if found.mode() & 0o002 != 0 {
        return Err(io::Error::other(format!(
            "everybody can write to it (mode {:o}); remove it, or name another file",
            found.mode() & 0o7777
        )));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_file_that_others_have_made_or_may_write_to_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        fs::write(&file, "").unwrap();
        let judge = |becomes| {
            let found = fs::metadata(&file).unwrap();
            check(&found, becomes).map_err(|error| error.to_string())
        };
        fs::set_permissions(&file, Permissions::from_mode(0o664)).unwrap();
        assert_eq!(judge(None), Ok(()));
        fs::set_permissions(&file, Permissions::from_mode(0o666)).unwrap();
        assert!(judge(None).unwrap_err().contains("mode 666"));
        fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
        fs::hard_link(&file, directory.path().join("other")).unwrap();
        assert!(judge(None).unwrap_err().contains("hard link"));
        fs::remove_file(directory.path().join("other")).unwrap();
        assert!(check(&fs::metadata(directory.path()).unwrap(), None).is_err());
        // Only root can give a file away.
        if own_user() == ROOT {
            std::os::unix::fs::chown(&file, Some(65534), None).unwrap();
            assert!(judge(None).unwrap_err().contains("belongs to another user (65534)"));
            assert_eq!(judge(Some(65534)), Ok(()));
        }
    }
}
