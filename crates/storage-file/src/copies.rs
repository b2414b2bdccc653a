//! Locks of copies of descriptors.
//!
//! The kernel's locks belong to an open file, and all copies of a descriptor share it: to the kernel they are one user.
//! So the users of copies are told apart here, as if each had opened the file, and the kernel's lock of a byte is
//! released when none of those who share it has it any more.

use super::sys;
use isobath_storage::FileId;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

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

/// Tells the user of a copy from others who share the open file.
pub(super) fn register(file: &Arc<OwnedFd>, id: FileId) -> Copied {
    let mut users = USERS.lock();
    let same = |user: &&User| user.id == id && share(&user.file, file).unwrap_or(true);
    let known = users.users.values().find(same).map(|user| user.open_file);
    let open_file = known.unwrap_or_else(|| {
        users.next += 1;
        users.next
    });
    let user = User { id, file: file.clone(), open_file, bytes: BTreeSet::new() };
    users.users.insert(file.as_raw_fd(), user);
    Copied(file.as_raw_fd())
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

impl Users {
    /// The others who share the open file of a copy; `None` if it is none.
    fn beside(&self, number: RawFd) -> Option<impl Iterator<Item = &User>> {
        let own = self.users.get(&number)?.open_file;
        let others = self.users.iter().filter(move |(other, _)| **other != number);
        Some(others.map(|(_, user)| user).filter(move |user| user.open_file == own))
    }
}

/// Locks a byte.
///
/// # Errors
/// The file system's.
pub(super) fn lock(file: &OwnedFd, byte: i64) -> io::Result<()> {
    let mut users = USERS.lock();
    sys::lock(file, libc::F_OFD_SETLK, libc::F_RDLCK, byte, 1)?;
    if let Some(user) = users.users.get_mut(&file.as_raw_fd()) {
        user.bytes.insert(byte);
    }
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
        let length = bytes.end - bytes.start;
        return sys::lock(file, libc::F_OFD_SETLK, libc::F_UNLCK, bytes.start, length).map(drop);
    };
    let released: Vec<i64> = user.bytes.extract_if(bytes, |_| true).collect();
    let is_shared = |byte| {
        let others = users.beside(number).into_iter().flatten();
        others.into_iter().any(|user| user.bytes.contains(byte))
    };
    let mut result = Ok(());
    for byte in released.iter().filter(|byte| !is_shared(byte)) {
        let unlocked = sys::lock(file, libc::F_OFD_SETLK, libc::F_UNLCK, *byte, 1);
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
    sys::lock(file, libc::F_OFD_GETLK, libc::F_WRLCK, bytes.start, length)
}
