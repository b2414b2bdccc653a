//! Which programs have a file open: for the message of one that another program has locked.

use crate::error::StorageError;
use crate::shown;
use std::fs::{self, DirEntry};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// At most so many are named.
const MOST: usize = 3;

/// The error with the programs that have the file open, as far as this user may know.
pub(super) fn named(error: StorageError, file: &OwnedFd) -> StorageError {
    let users = users(file);
    if error.kind() != io::ErrorKind::ResourceBusy || users.is_empty() {
        return error;
    }
    let text = format!("{} (it is open in {})", error.source, users.join(", "));
    let source = io::Error::new(io::ErrorKind::ResourceBusy, text);
    StorageError { source, ..error }
}

/// Other processes that have the file open, by name and number.
fn users(file: &OwnedFd) -> Vec<String> {
    let identity = |path: &Path| {
        let found = fs::metadata(path).ok()?;
        // A device has several nodes.
        Some((found.rdev(), if found.rdev() == 0 { (found.dev(), found.ino()) } else { (0, 0) }))
    };
    let own = format!("/proc/self/fd/{}", file.as_raw_fd());
    let Some(own) = identity(Path::new(&own)) else { return Vec::new() };
    let number = |entry: &DirEntry| entry.file_name().to_str()?.parse::<u32>().ok();
    let Ok(processes) = fs::read_dir("/proc") else { return Vec::new() };
    let mut found: Vec<u32> = processes
        .flatten()
        .filter_map(|process| number(&process))
        .filter(|process| *process != std::process::id())
        .filter(|process| {
            let open = fs::read_dir(format!("/proc/{process}/fd"));
            open.is_ok_and(|mut open| {
                open.any(|one| one.is_ok_and(|one| identity(&one.path()) == Some(own)))
            })
        })
        .collect();
    found.sort_unstable();
    let named = found.iter().take(MOST).map(|process| {
        let name = fs::read_to_string(format!("/proc/{process}/comm")).unwrap_or_default();
        format!("'{}', process {process}", shown(Path::new(name.trim_end())))
    });
    let mut users: Vec<String> = named.collect();
    if found.len() > MOST {
        users.push(format!("{} more", found.len() - MOST));
    }
    users
}
