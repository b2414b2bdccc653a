//! A file opened for reading whose descriptor can be given up and reopened.

use super::descriptors::{GiveUp, Lender};
use super::named::Named;
use super::open::{self, Taking};
use super::sys;
use super::transfer::Target;
use isobath_storage::error::{Operation, StorageError};
use isobath_storage::{FileId, OpenMode, Result};
use parking_lot::Mutex;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

/// The properties compared when a file is reopened. They do not include the ctime: a new link, owner or security label
/// changes no byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seen {
    id: FileId,
    length: i64,
    /// Seconds and nanoseconds.
    modified: (i64, i64),
}

impl Seen {
    /// Queried with the locks held, so that no program that honours them is changing the file.
    fn of(target: &Target, id: FileId) -> io::Result<Self> {
        let stat = sys::stat(&target.file)?;
        let modified = (stat.st_mtime, stat.st_mtime_nsec);
        Ok(Self { id, length: stat.st_size, modified })
    }

    /// How `now` differs.
    fn difference(&self, now: &Self) -> Option<String> {
        let FileId { device, inode } = self.id;
        if now.id != self.id {
            return Some(format!(
                "it was replaced by another file while in use (device {device} inode {inode}, now \
                 device {} inode {})",
                now.id.device, now.id.inode
            ));
        }
        if now.length != self.length {
            return Some(format!(
                "it was modified while in use (length {}, now {})",
                self.length, now.length
            ));
        }
        let ((seconds, nanoseconds), (seconds_now, nanoseconds_now)) =
            (self.modified, now.modified);
        (now.modified != self.modified).then(|| {
            format!(
                "it was modified while in use (modification time {seconds}.{nanoseconds:09}, now \
                 {seconds_now}.{nanoseconds_now:09})"
            )
        })
    }
}

/// An open file, with or without a descriptor.
pub(super) struct Shared {
    /// Opened for reading.
    file: Named,
    seen: Seen,
    /// Used since this was last checked.
    used: AtomicBool,
    target: Mutex<Option<Arc<Target>>>,
}

impl Shared {
    /// A file that is not changed from now on.
    pub(super) fn new(file: &Named, target: Arc<Target>) -> io::Result<Arc<Self>> {
        let mode = OpenMode { writable: false, ..file.mode };
        let this = Arc::new(Self {
            seen: Seen::of(&target, file.id)?,
            file: Named { mode, ..file.clone() },
            used: AtomicBool::new(true),
            target: Mutex::new(Some(target)),
        });
        this.offer();
        Ok(this)
    }

    /// Lets the pool ask for the descriptor.
    fn offer(self: &Arc<Self>) {
        let this: Weak<Self> = Arc::downgrade(self);
        self.file.pool.offer(this);
    }

    /// The descriptor, if there is one.
    pub(super) fn ready(&self) -> Option<Arc<Target>> {
        if !self.used.load(Ordering::Relaxed) {
            self.used.store(true, Ordering::Relaxed);
        }
        self.target.lock().clone()
    }

    /// Opens a new descriptor of the same file with the same contents.
    pub(super) async fn reopen(self: &Arc<Self>) -> Result<Arc<Target>> {
        let Named { name, path, mode, pool, .. } = &self.file;
        let opened = open::descriptor(path, name, *mode, Taking::Alone, pool).await;
        let opened = opened.map_err(|error| self.explain(error))?;
        let now = Seen::of(&opened.target, opened.id);
        let now = now.map_err(|error| StorageError::new(Operation::Open, name, error))?;
        if let Some(difference) = self.seen.difference(&now) {
            let text = format!(
                "{difference}; backing files must not change while they are in use; restore the \
                 file, then reopen the disk"
            );
            let source = io::Error::other(text);
            return Err(StorageError::new(Operation::Open, name, source));
        }
        let mut target = self.target.lock();
        if let Some(target) = &*target {
            // Another thread was faster.
            return Ok(target.clone());
        }
        let found = Arc::new(opened.target);
        *target = Some(found.clone());
        drop(target);
        self.offer();
        Ok(found)
    }

    /// The error for a failed reopen.
    fn explain(&self, error: StorageError) -> StorageError {
        if error.operation == Operation::Lock {
            return error;
        }
        let text = format!(
            "{} (it was closed and reopened, as {} descriptors are shared among more files; keep \
             backing files in place while they are in use, or raise the limit on open files)",
            error.source,
            self.file.pool.limit()
        );
        StorageError::new(
            Operation::Open,
            &self.file.name,
            io::Error::new(error.source.kind(), text),
        )
    }
}

impl Lender for Shared {
    fn give_up(&self) -> GiveUp {
        let Some(mut target) = self.target.try_lock() else { return GiveUp::InUse };
        let lately = self.used.swap(false, Ordering::Relaxed);
        // New references are created only under the lock.
        if target.as_ref().is_some_and(|target| lately || Arc::strong_count(target) > 1) {
            return GiveUp::InUse;
        }
        GiveUp::Done(target.take())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_difference_is_named() {
        let id = FileId { device: 1, inode: 2 };
        let seen = Seen { id, length: 3, modified: (4, 5) };
        assert_eq!(seen.difference(&seen), None);
        for (now, words) in [
            (Seen { id: FileId { inode: 7, ..id }, ..seen }, "inode 2, now device 1 inode 7"),
            (Seen { id: FileId { device: 7, ..id }, ..seen }, "now device 7 inode 2"),
            (Seen { length: 8, ..seen }, "length 3, now 8"),
            (Seen { modified: (4, 6), ..seen }, "4.000000005, now 4.000000006"),
        ] {
            let difference = seen.difference(&now).unwrap();
            assert!(difference.contains(words), "{difference}");
        }
    }
}
