//! Locks of copies of descriptors.
//!
//! The kernel's locks belong to an open file, and all copies of a descriptor share it: to the kernel they are one user.
//! So the users of copies are told apart here, as if each had opened the file, and the kernel's lock of a byte is
//! released when none of those who share it has it any more.

use super::{sys, users};
use isobath_storage::FileId;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::ops::{Range, RangeInclusive};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

/// The bytes of images' locks.
pub(super) const IMAGE_LOCKS: Range<i64> = 100..300;
/// Where bytes begin that are locked to find out who shares an open file, far from those of images' locks.
const TRIALS: i64 = 1 << 62;

static USERS: Mutex<Users> = Mutex::new(Users { users: BTreeMap::new(), next: 0 });

struct Users {
    /// The users, by their descriptors.
    users: BTreeMap<RawFd, User>,
    /// The number of the next open file.
    next: u64,
}

struct User {
    id: FileId,
    file: Arc<OwnedFd>,
    /// Those who share an open file have the same.
    open_file: u64,
    /// The bytes that it has locked.
    bytes: BTreeSet<i64>,
}

/// The user of a copy, which has released its locks when this is dropped, and not closed its descriptor.
pub(super) struct Copied(RawFd);

/// Tells the user of a copy from others who share the open file. One that `locks` it is refused if another program
/// does: to the kernel the two would be one user.
///
/// # Errors
/// Another program holds locks through the open file ([`io::ErrorKind::ResourceBusy`]), or its locks are not known.
pub(super) fn register(file: &Arc<OwnedFd>, id: FileId, locks: bool) -> io::Result<Copied> {
    let mut users = USERS.lock();
    let same = |user: &&User| user.id == id && share(&user.file, file).unwrap_or(true);
    let known = users.users.values().find(same).map(|user| user.open_file);
    let open_file = known.unwrap_or_else(|| {
        users.next += 1;
        users.next
    });
    if locks {
        users.check_locks(file, open_file)?;
    }
    let user = User { id, file: file.clone(), open_file, bytes: BTreeSet::new() };
    users.users.insert(file.as_raw_fd(), user);
    Ok(Copied(file.as_raw_fd()))
}

impl Drop for Copied {
    fn drop(&mut self) {
        let gone = USERS.lock().users.remove(&self.0);
        drop(gone);
    }
}

/// Whether two descriptors of a file share an open file: only then is a lock of one nothing to the other.
fn share(one: &OwnedFd, other: &OwnedFd) -> io::Result<bool> {
    // Nobody else chooses the same byte.
    let random = RandomState::new().hash_one(one.as_raw_fd());
    let byte = TRIALS + i64::from(random as u32);
    sys::lock(one, libc::F_OFD_SETLK, libc::F_RDLCK, byte, 1)?;
    let is_foreign = sys::lock(other, libc::F_OFD_GETLK, libc::F_WRLCK, byte, 1);
    sys::lock(one, libc::F_OFD_SETLK, libc::F_UNLCK, byte, 1)?;
    is_foreign.map(|is_foreign| !is_foreign)
}

/// The bytes that are locked through an open file, by whoever has a copy of it.
fn locked(file: &OwnedFd) -> io::Result<Vec<RangeInclusive<i64>>> {
    let path = format!("/proc/self/fdinfo/{}", file.as_raw_fd());
    let text = fs::read_to_string(&path).map_err(|error| {
        let text = format!(
            "cannot read '{path}', which says whether another program locks the image by a copy of its descriptor: \
             {error}"
        );
        io::Error::new(error.kind(), text)
    })?;
    Ok(text.lines().filter_map(users::locked_bytes).collect())
}

impl Users {
    /// Checks that all locks of images in an open file belong to its users here.
    fn check_locks(&self, file: &OwnedFd, open_file: u64) -> io::Result<()> {
        let own = |user: &&User| user.open_file == open_file;
        let known: BTreeSet<i64> =
            self.users.values().filter(own).flat_map(|user| user.bytes.iter().copied()).collect();
        let is_foreign = |range: RangeInclusive<i64>| {
            let (first, last) = (*range.start().max(&IMAGE_LOCKS.start), *range.end());
            (first..=last.min(IMAGE_LOCKS.end - 1)).any(|byte| !known.contains(&byte))
        };
        if !locked(file)?.into_iter().any(is_foreign) {
            return Ok(());
        }
        let text = "another program locks the image by a copy of its descriptor, or one was killed that did; close the \
                    copies, open the file anew for each server, and hand in that descriptor";
        Err(io::Error::new(io::ErrorKind::ResourceBusy, text))
    }

    /// The others who share the open file of a copy; `None` if it is none.
    fn beside(&self, number: RawFd) -> Option<impl Iterator<Item = &User>> {
        let own = self.users.get(&number)?.open_file;
        let others = self.users.iter().filter(move |(other, _)| **other != number);
        Some(others.map(|(_, user)| user).filter(move |user| user.open_file == own))
    }
}

/// Sets or tests a lock; a file system may take its time.
fn call(
    file: &OwnedFd,
    command: libc::c_int,
    kind: libc::c_int,
    start: i64,
    length: i64,
) -> io::Result<bool> {
    #[cfg(test)]
    tests::note_call();
    sys::lock(file, command, kind, start, length)
}

/// Locks a byte.
///
/// # Errors
/// The file system's.
pub(super) fn lock(file: &OwnedFd, byte: i64) -> io::Result<()> {
    let mut users = USERS.lock();
    let Some(user) = users.users.get_mut(&file.as_raw_fd()) else {
        // A file system that hangs holds up nobody else.
        drop(users);
        return call(file, libc::F_OFD_SETLK, libc::F_RDLCK, byte, 1).map(drop);
    };
    call(file, libc::F_OFD_SETLK, libc::F_RDLCK, byte, 1)?;
    user.bytes.insert(byte);
    Ok(())
}

/// Releases locks of these bytes.
///
/// # Errors
/// The file system's.
pub(super) fn unlock(file: &OwnedFd, bytes: Range<i64>) -> io::Result<()> {
    let number = file.as_raw_fd();
    let mut users = USERS.lock();
    let Some(user) = users.users.get_mut(&number) else {
        drop(users);
        let length = bytes.end - bytes.start;
        return call(file, libc::F_OFD_SETLK, libc::F_UNLCK, bytes.start, length).map(drop);
    };
    let released: Vec<i64> = user.bytes.extract_if(bytes, |_| true).collect();
    let is_shared = |byte| {
        let others = users.beside(number).into_iter().flatten();
        others.into_iter().any(|user| user.bytes.contains(byte))
    };
    let mut result = Ok(());
    for byte in released.iter().filter(|byte| !is_shared(byte)) {
        let unlocked = call(file, libc::F_OFD_SETLK, libc::F_UNLCK, *byte, 1);
        result = result.and(unlocked.map(drop));
    }
    result
}

/// Whether another user has locked one of these bytes.
///
/// # Errors
/// The file system's.
pub(super) fn is_locked(file: &OwnedFd, bytes: Range<i64>) -> io::Result<bool> {
    let users = USERS.lock();
    let mut beside = users.beside(file.as_raw_fd()).into_iter().flatten();
    if beside.any(|user| user.bytes.range(bytes.clone()).next().is_some()) {
        return Ok(true);
    }
    drop(beside);
    drop(users);
    let length = bytes.end - bytes.start;
    call(file, libc::F_OFD_GETLK, libc::F_WRLCK, bytes.start, length)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::os::unix::fs::MetadataExt;
    use std::time::Duration;

    /// How long others may have the users.
    const PATIENCE: Duration = Duration::from_secs(20);

    thread_local! {
        /// For each of this thread's calls, if a test asks, whether other threads could use the users meanwhile.
        static CALLS: RefCell<Option<Vec<bool>>> = const { RefCell::new(None) };
    }

    pub(super) fn note_call() {
        CALLS.with_borrow_mut(|calls| {
            if let Some(calls) = calls {
                calls.push(USERS.try_lock_for(PATIENCE).is_some());
            }
        });
    }

    fn calls(during: impl FnOnce()) -> Vec<bool> {
        CALLS.set(Some(Vec::new()));
        during();
        CALLS.take().unwrap_or_default()
    }

    fn opened(path: &std::path::Path) -> Arc<OwnedFd> {
        let options = || fs::OpenOptions::new().read(true).write(true).open(path);
        Arc::new(options().unwrap().into())
    }

    #[test]
    fn a_file_system_that_hangs_holds_up_only_users_of_copies() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let found = file.as_file().metadata().unwrap();
        let id = FileId { device: found.dev(), inode: found.ino() };
        let plain = opened(file.path());
        assert_eq!(calls(|| lock(&plain, 100).unwrap()), [true]);
        assert_eq!(calls(|| assert!(!is_locked(&plain, 100..300).unwrap())), [true]);
        assert_eq!(calls(|| unlock(&plain, IMAGE_LOCKS).unwrap()), [true]);
        let copy = opened(file.path());
        let copied = register(&copy, id, true).unwrap();
        assert_eq!(calls(|| assert!(!is_locked(&copy, 100..300).unwrap())), [true]);
        drop(copied);
    }

    #[test]
    fn the_last_user_of_a_byte_releases_it_whichever_that_is() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let found = file.as_file().metadata().unwrap();
        let id = FileId { device: found.dev(), inode: found.ino() };
        let other = opened(file.path());
        for first_goes_first in [true, false] {
            let one = opened(file.path());
            let two = Arc::new(one.try_clone().unwrap());
            let mut users = [one, two].map(|file| {
                let copied = register(&file, id, true).unwrap();
                lock(&file, 100).unwrap();
                lock(&file, 201).unwrap();
                (file, copied)
            });
            if !first_goes_first {
                users.reverse();
            }
            let [first, last] = users;
            unlock(&first.0, IMAGE_LOCKS).unwrap();
            drop(first);
            for byte in [100, 201] {
                assert!(is_locked(&other, byte..byte + 1).unwrap(), "{byte}");
            }
            unlock(&last.0, 100..101).unwrap();
            assert!(!is_locked(&other, 100..101).unwrap());
            assert!(is_locked(&other, 201..202).unwrap());
            unlock(&last.0, IMAGE_LOCKS).unwrap();
            assert!(!is_locked(&other, IMAGE_LOCKS).unwrap());
            assert!(locked(&last.0).unwrap().is_empty());
            drop(last);
        }
    }
}
