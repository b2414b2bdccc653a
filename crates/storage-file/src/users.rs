//! Which programs hold the locks of a file: for the message of one that is locked.

use isobath_storage::error::StorageError;
use isobath_storage::shown;
use std::ffi::OsString;
use std::fs::{self, DirEntry};
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// At most so many are named.
const MOST: usize = 3;

/// If `error` says that another program holds the file's locks: the same with its name, as far as this user may know.
pub(super) fn named(error: StorageError, file: &OwnedFd) -> StorageError {
    if error.kind() != io::ErrorKind::ResourceBusy {
        return error;
    }
    said(error, &holders(file))
}

/// Like [`named`], for a file that was just opened and holds no locks: this program itself is named if nobody else is
/// and it holds a lock of one of the `conflicting` bytes, by another descriptor.
pub(super) fn named_at_open(
    error: StorageError,
    file: &OwnedFd,
    conflicting: &[i64],
) -> StorageError {
    if error.kind() != io::ErrorKind::ResourceBusy {
        return error;
    }
    let mut users = holders(file);
    if users.is_empty() && held_here(file, conflicting) {
        users.push("this program itself".into());
    }
    said(error, &users)
}

/// The error with who has the file open, if that is known.
fn said(error: StorageError, users: &[String]) -> StorageError {
    if users.is_empty() {
        return error;
    }
    let text = format!("{} (it is open in {})", error.source, users.join(", "));
    let source = io::Error::new(io::ErrorKind::ResourceBusy, text);
    StorageError { source, ..error }
}

/// Whether this process holds a lock of one of these bytes of the file.
fn held_here(file: &OwnedFd, bytes: &[i64]) -> bool {
    let own = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let (Some(name), Ok(stat)) = (name_of(&own), fs::metadata(&own)) else { return false };
    let is_among = |line: &str| {
        locked_bytes(line).is_some_and(|locked| bytes.iter().any(|byte| locked.contains(byte)))
    };
    holds(std::process::id(), &name, stat.ino(), is_among)
}

/// Other processes that hold locks of the file, by name and number.
///
/// Nothing here asks the file systems that other processes use: one that hangs, or that this very process serves, would
/// not answer. The kernel itself knows the name of a descriptor's file, and its locks.
fn holders(file: &OwnedFd) -> Vec<String> {
    let own = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let (Some(name), Ok(stat)) = (name_of(&own), fs::metadata(&own)) else { return Vec::new() };
    let number = |entry: &DirEntry| entry.file_name().to_str()?.parse::<u32>().ok();
    let Ok(processes) = fs::read_dir("/proc") else { return Vec::new() };
    let mut found: Vec<u32> = processes
        .flatten()
        .filter_map(|process| number(&process))
        .filter(|process| *process != std::process::id())
        .filter(|process| holds(*process, &name, stat.ino(), |_| true))
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

/// The last part of the name of a descriptor's file.
fn name_of(descriptor: &Path) -> Option<OsString> {
    fs::read_link(descriptor).ok()?.file_name().map(OsString::from)
}

/// Whether a process holds locks of the file with this name and inode number, of which one `matters`.
fn holds(process: u32, name: &OsString, inode: u64, matters: impl Fn(&str) -> bool) -> bool {
    let Ok(descriptors) = fs::read_dir(format!("/proc/{process}/fd")) else { return false };
    descriptors.flatten().filter(|one| name_of(&one.path()).as_ref() == Some(name)).any(|one| {
        let number = one.file_name();
        let locks = fs::read_to_string(format!("/proc/{process}/fdinfo/{}", number.display()));
        locks.is_ok_and(|locks| locks.lines().any(|line| is_lock(line, inode) && matters(line)))
    })
}

/// Whether a line of a descriptor's description is a lock of the file with this inode number, such as
/// `lock: 1: OFDLCK  ADVISORY  READ -1 fe:00:1234 100 101`.
fn is_lock(line: &str, inode: u64) -> bool {
    let mut words = line.split_whitespace();
    let file = words.find(|word| word.matches(':').count() == 2);
    line.starts_with("lock:") && file.is_some_and(|file| file.ends_with(&format!(":{inode}")))
}

/// The bytes of a lock that belongs to an open file, in a line of a descriptor's description.
pub(super) fn locked_bytes(line: &str) -> Option<RangeInclusive<i64>> {
    let words: Vec<&str> = line.strip_prefix("lock:")?.split_whitespace().collect();
    let [.., first, last] = words.as_slice() else { return None };
    let last = if *last == "EOF" { i64::MAX } else { last.parse().ok()? };
    words.contains(&"OFDLCK").then_some(first.parse().ok()?..=last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lock::{self, Wanted};
    use isobath_storage::{Locking, OpenMode};
    use std::fs::File;
    use std::sync::Arc;

    #[test]
    fn only_locks_that_are_in_the_way_are_said_to_be_this_programs() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let _ = File::create(&path).unwrap();
        let open = || Arc::new(OwnedFd::from(File::options().read(true).open(&path).unwrap()));
        let (first, second) = (open(), open());
        let writer = OpenMode { writable: true, direct: false, locking: Locking::Exclusive };
        let writer: Vec<i64> = Wanted::of(writer).unwrap().conflicting().collect();
        let reader: Vec<i64> = Wanted::READER.conflicting().collect();
        assert!(!held_here(&second, &writer));
        let _locks = lock::join(&first, &path).unwrap();
        assert!(held_here(&second, &writer));
        // Two readers may use it.
        assert!(!held_here(&second, &reader) && !held_here(&second, &[]));
    }

    #[test]
    fn locks_are_recognised() {
        let line = "lock:\t1: OFDLCK  ADVISORY  READ -1 fe:00:1234 100 101";
        assert!(is_lock(line, 1234) && !is_lock(line, 234) && !is_lock(line, 100));
        assert!(!is_lock("pos:\t1234", 1234) && !is_lock("mnt_id:\t00:00:1234", 1234));
    }

    #[test]
    fn the_bytes_of_an_open_files_locks_are_recognised() {
        let line = "lock:\t1: OFDLCK  ADVISORY  READ -1 fe:00:1234 100 101";
        assert_eq!(locked_bytes(line), Some(100..=101));
        let all = "lock:\t1: OFDLCK  ADVISORY  WRITE -1 fe:00:1234 0 EOF";
        assert_eq!(locked_bytes(all), Some(0..=i64::MAX));
        assert_eq!(locked_bytes("lock:\t1: FLOCK  ADVISORY  WRITE 9 fe:00:1234 0 EOF"), None);
        assert_eq!(locked_bytes("pos:\t100"), None);
    }
}
