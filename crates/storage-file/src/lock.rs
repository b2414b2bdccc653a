//! Image locks as QEMU takes them.
//!
//! A user of an image holds shared locks, bound to the open file (`F_OFD_SETLK`), on single bytes of it: byte 100 + n
//! for each permission n that it uses, and 200 + n for each that it denies to others. After taking them it checks
//! whether anyone denies what it uses or uses what it denies. QEMU 7.2 was observed to hold these (permission 0 is
//! "consistent read", 1 "write", 3 "resize"):
//!
//! | image | uses | denies |
//! |---|---|---|
//! | qcow2, writable | 100 101 103 | 201 203 |
//! | qcow2, read-only or a backing file | 100 | 201 203 |
//! | raw, writable / read-only (`qemu-io`) | 100 101 / 100 | |
//! | any, `-U` (`force-share`), read-only | 100 | |
//!
//! Here every image is locked like a qcow2 file. One that is to be deleted is locked like a writable one, and 200 is
//! denied, too: nobody can begin to use it. A program that takes no lock at all is not kept out: `qemu-img create -b`
//! reads the backing file so.

use crate::copies;
use isobath_storage::lock::{Conflict, busy};
use isobath_storage::{Locking, OpenMode, Operation, StorageError};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

/// The first byte for permissions in use.
const USED: i64 = 100;
/// The first byte for permissions denied to others.
const DENIED: i64 = 200;

/// A permission's number and QEMU's name for it.
type Permission = (i64, &'static str);

const READ: Permission = (0, "consistent read");
const WRITE: Permission = (1, "write");
const RESIZE: Permission = (3, "resize");

/// The locks of an open image, which are released when dropped.
///
/// Closing the file would release them as well, but not while the file is mapped, nor while a child of this process has
/// it open between its fork and its exec.
pub(crate) struct Locks(Arc<OwnedFd>);

impl Drop for Locks {
    fn drop(&mut self) {
        let _ = copies::unlock(&self.0, copies::IMAGE_LOCKS);
    }
}

/// The locks of a kind of user, by ascending numbers.
#[derive(Clone, Copy)]
pub(crate) struct Wanted {
    used: &'static [Permission],
    denied: &'static [Permission],
}

impl Wanted {
    /// Those of a reader, and of a backing file.
    pub(crate) const READER: Self = Self { used: &[READ], denied: &[WRITE, RESIZE] };

    /// The locks that a mode takes; `None` if it takes none.
    pub(crate) fn of(mode: OpenMode) -> Option<Self> {
        const ALL: &[Permission] = &[READ, WRITE, RESIZE];
        let writer = Self { used: ALL, ..Self::READER };
        match mode.locking {
            Locking::Unlocked => None,
            Locking::Present => Some(Self { used: &[READ], denied: &[] }),
            Locking::Alone if mode.writable => Some(Self { denied: ALL, ..writer }),
            _ if mode.writable => Some(writer),
            _ => Some(Self::READER),
        }
    }

    /// Whether it is a writer.
    pub(crate) fn writes(self) -> bool {
        self.used.len() > 1
    }

    /// The bytes whose locks by another user are in its way.
    pub(crate) fn conflicting(self) -> impl Iterator<Item = i64> {
        let used = self.used.iter().map(|(number, _)| DENIED + number);
        used.chain(self.denied.iter().map(|(number, _)| USED + number))
    }

    fn bytes(self) -> impl Iterator<Item = i64> {
        let used = self.used.iter().map(|(number, _)| USED + number);
        used.chain(self.denied.iter().map(|(number, _)| DENIED + number))
    }
}

/// Takes the locks of an image.
///
/// # Errors
/// Another user's locks conflict ([`io::ErrorKind::ResourceBusy`]), or the file system has no locks.
pub(crate) fn take(
    file: &Arc<OwnedFd>,
    name: &Path,
    wanted: Wanted,
) -> Result<Locks, StorageError> {
    let locks = set(file, name, wanted)?;
    look(file, name, wanted)?;
    Ok(locks)
}

/// Takes the locks of a reader for another descriptor of a file whose writer's locks this process holds: nobody else
/// can hold conflicting ones, and the process's own do not count.
///
/// # Errors
/// The file system has no locks.
pub(crate) fn join(file: &Arc<OwnedFd>, name: &Path) -> Result<Locks, StorageError> {
    set(file, name, Wanted::READER)
}

/// Gives up a reader's locks.
///
/// # Errors
/// The file system reported an error.
pub(crate) fn give_up(file: &OwnedFd, name: &Path) -> Result<(), StorageError> {
    for byte in Wanted::READER.bytes() {
        copies::unlock(file, byte..byte + 1)
            .map_err(|source| StorageError::new(Operation::Lock, name, source))?;
    }
    Ok(())
}

/// Takes a reader's locks again, which [`give_up`] released, while another descriptor of this process holds them:
/// nobody else can have begun to write.
///
/// # Errors
/// The file system reported an error.
pub(crate) fn join_again(file: &OwnedFd, name: &Path) -> Result<(), StorageError> {
    for byte in Wanted::READER.bytes() {
        copies::lock(file, byte)
            .map_err(|source| StorageError::new(Operation::Lock, name, source))?;
    }
    Ok(())
}

/// Takes a reader's locks again, which [`give_up`] released.
///
/// # Errors
/// Another user writes ([`io::ErrorKind::ResourceBusy`]); then nothing has changed.
pub(crate) fn take_again(file: &OwnedFd, name: &Path) -> Result<(), StorageError> {
    join_again(file, name)?;
    let free = look(file, name, Wanted::READER);
    if free.is_err() {
        give_up(file, name)?;
    }
    free
}

/// Takes locks without checking those of others: [`look`] does.
///
/// # Errors
/// As [`take`].
pub(crate) fn set(file: &Arc<OwnedFd>, name: &Path, wanted: Wanted) -> Result<Locks, StorageError> {
    let locks = Locks(file.clone());
    for byte in wanted.bytes() {
        match copies::lock(file, byte) {
            Ok(()) => {}
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => {
                let conflict =
                    if wanted.writes() { Conflict::WRITE } else { Conflict::SHARED_WRITE };
                return Err(busy(name, conflict));
            }
            Err(error) => {
                let text = format!(
                    "the file system refuses image locks: {error}; \
                     -U (--force-share) reads the image without them"
                );
                let source = io::Error::new(error.kind(), text);
                return Err(StorageError::new(Operation::Lock, name, source));
            }
        }
    }
    Ok(locks)
}

/// Whether another user has an image's file open, by its lock: every user holds that of the first byte, but for readers
/// that let a writer in, which holds it then.
///
/// # Errors
/// The file system has no locks.
pub fn is_in_use(file: &OwnedFd) -> io::Result<bool> {
    copies::is_locked(file, USED..USED + 1)
}

/// Checks whether another user's locks conflict with those that this open would take or has taken.
///
/// # Errors
/// As [`take`].
pub(crate) fn look(file: &OwnedFd, name: &Path, wanted: Wanted) -> Result<(), StorageError> {
    let taken = |first: i64, last: i64| {
        let taken = copies::is_locked(file, first..last + 1);
        taken.map_err(|source| StorageError::new(Operation::Lock, name, source))
    };
    // Tests the whole relevant range at once: if there are only readers, nobody holds anything there.
    let first = wanted.denied.first().map_or(DENIED, |(number, _)| USED + number);
    let last = DENIED + wanted.used.last().map_or(0, |(number, _)| *number);
    if !taken(first, last)? {
        return Ok(());
    }
    for (number, permission) in wanted.used {
        if taken(DENIED + number, DENIED + number)? {
            return Err(busy(name, Conflict::wanted(permission)));
        }
    }
    for (number, permission) in wanted.denied {
        if taken(USED + number, USED + number)? {
            return Err(busy(name, Conflict::denied(permission)));
        }
    }
    Ok(())
}
