//! A file to which a server's messages are appended.

use super::owned;
use crate::failure::Failure;
use std::env;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// Messages name files and clients.
const MODE: u32 = 0o600;
/// How much of an existing file is looked at.
const LOOK: usize = 4096;

/// The environment variable that names the log of programs with QEMU's options.
const VARIABLE: &str = "ISOBATH_LOG_FILE";

/// Opens the file that the environment names, if it names one.
///
/// # Errors
/// As [`open`], and if the name is empty.
pub(crate) fn of_environment() -> Result<Option<File>, Failure> {
    let Some(name) = env::var_os(VARIABLE) else { return Ok(None) };
    if name.is_empty() {
        return Err(Failure::new(format_args!(
            "{VARIABLE} is empty; unset it, or let it name a file for messages"
        )));
    }
    open(Path::new(&name), None).map(Some).map_err(|failure| failure.context(VARIABLE))
}

/// Opens the file, or creates it, for a server that `becomes` another user. What is no log stays as it is.
///
/// # Errors
/// If something is there that is no file of [its own](owned::check), or whose beginning is not text; and errors of the
/// file system.
pub(crate) fn open(path: &Path, becomes: Option<u32>) -> Result<File, Failure> {
    opened(path, becomes).map_err(|error| {
        let reason = isobath_storage::cause(&error);
        Failure::new(format_args!("cannot log to '{}': {reason}", isobath_storage::shown(path)))
    })
}

fn opened(path: &Path, becomes: Option<u32>) -> io::Result<File> {
    // A pipe without a reader is not waited for.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let mut options = OpenOptions::new();
    options.read(true).append(true).create(true).mode(MODE).custom_flags(flags);
    let file = options.open(path).map_err(|error| match error.raw_os_error() {
        Some(libc::ELOOP) => io::Error::other("it is a symbolic link"),
        _ => error,
    })?;
    owned::check(&file.metadata()?, becomes)?;
    let mut start = [0; LOOK];
    let length = file.read_at(&mut start, 0)?;
    if !start.get(..length).unwrap_or_default().iter().all(|byte| is_text(*byte)) {
        return Err(io::Error::other("it is no text, but maybe an image; name another file"));
    }
    Ok(file)
}

fn is_text(byte: u8) -> bool {
    matches!(byte, b'\t' | b'\n' | b' '..=b'~' | 0x80..)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::fs::Permissions;
    use std::io::Write;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    #[test]
    fn a_log_is_continued_and_nothing_else_is() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        for line in ["one\n", "zwölf\n"] {
            open(&at("log"), None).unwrap().write_all(line.as_bytes()).unwrap();
        }
        assert_eq!(fs::read_to_string(at("log")).unwrap(), "one\nzwölf\n");
        assert_eq!(fs::metadata(at("log")).unwrap().mode() & 0o777, MODE);
        fs::write(at("image"), b"QFI\xfb\0\0\0\x03").unwrap();
        fs::write(at("raw"), [0; 512]).unwrap();
        symlink(at("log"), at("link")).unwrap();
        fs::write(at("shared"), "").unwrap();
        fs::set_permissions(at("shared"), Permissions::from_mode(0o666)).unwrap();
        fs::write(at("two"), "").unwrap();
        fs::hard_link(at("two"), at("names")).unwrap();
        let pipe = std::ffi::CString::new(at("pipe").to_str().unwrap()).unwrap();
        // SAFETY: the path is a live C string.
        assert_eq!(unsafe { libc::mkfifo(pipe.as_ptr(), 0o600) }, 0);
        for (name, says) in [
            ("image", "maybe an image"),
            ("raw", "maybe an image"),
            ("link", "symbolic link"),
            ("two", "another name"),
            ("pipe", "no regular file"),
            ("shared", "everybody can write to it"),
            ("", "directory"),
            ("none/log", "No such file"),
        ] {
            let error = open(&at(name), None).unwrap_err().to_string();
            assert!(error.contains(says), "{name}: {error}");
        }
        assert_eq!(fs::read(at("raw")).unwrap(), [0; 512]);
    }
}
