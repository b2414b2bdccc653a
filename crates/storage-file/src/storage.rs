//! An open file, and what its operations share.

use super::at_once::AtOnce;
use super::atomic;
use super::cached::Cached;
use super::direct::Direct;
use super::flush::{self, Durability};
use super::landing::unblocked;
use super::mapped::Mapped;
use super::named::Named;
use super::open::Kind;
use super::role::{Changed, Writing};
use super::source::Source;
use super::sys;
use super::transfer::{self, Target};
use arc_swap::ArcSwap;
use isobath_storage::error::{Operation, StorageError};
use isobath_storage::{Allocation, IoBuf, Result, SECTOR};
use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// File systems whose files are made longer ahead of need, by their numbers in `statfs(2)`: the new end takes a block,
/// and the rest is a hole. Others might fill it, or change how later writes are stored.
const LENGTHENED: [u64; 2] = [sys::EXT, sys::XFS];

/// What the file system has rejected, so that it is not tried again.
#[derive(Default)]
pub(super) struct Rejected {
    pub(super) punch: AtomicBool,
    pub(super) zero: AtomicBool,
    /// The file cannot be made longer ahead of need.
    pub(super) growth: AtomicBool,
}

/// An open regular file or block device.
pub struct FileStorage {
    pub(super) file: Named,
    pub(super) writing: Writing,
    /// Its mappings, once something cached was read.
    pub(super) mapped: OnceLock<Arc<Mapped>>,
    /// What was found out about it. There may be thousands of files of which nothing is. An admission in it ends before
    /// the descriptor in `source` gives up its locks.
    pub(super) found: OnceLock<Box<Found>>,
    pub(super) source: ArcSwap<Source>,
    pub(super) kind: Kind,
    pub(super) direct: Option<Box<Direct>>,
    pub(super) cached: Cached,
    /// Once it was changed or flushed, or created. There may be thousands of files that are only read.
    pub(super) durability: OnceLock<Arc<Durability>>,
    pub(super) rejected: Rejected,
    /// Whether the file system's times can be trusted, once known.
    pub(super) timed: OnceLock<bool>,
}

/// What a file has only once it is used.
#[derive(Default)]
pub(super) struct Found {
    /// Held during a change of the handle's role.
    pub(super) roles: isobath_sync::AsyncMutex<Changed>,
    /// Whether other files' space can be shared, once known.
    pub(super) clones: OnceLock<Option<u64>>,
    /// Whether flushes are cheaper in written space, once known.
    pub(super) gains: OnceLock<bool>,
    /// Whether it is made longer ahead of need, once known.
    pub(super) lengthens: OnceLock<bool>,
    /// How it is written to without a ring, once known.
    pub(super) at_once: OnceLock<AtOnce>,
    /// The device's atomic write size, once known.
    pub(super) atomic: OnceLock<u64>,
}

impl fmt::Debug for FileStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileStorage")
            .field("name", &self.file.name)
            .field("kind", &self.kind)
            .field("read_only", &self.writing.has_ended())
            .finish_non_exhaustive()
    }
}

impl FileStorage {
    pub(super) fn durability(&self) -> &Arc<Durability> {
        self.durability.get_or_init(Arc::default)
    }

    pub(super) fn roles(&self) -> &isobath_sync::AsyncMutex<Changed> {
        &self.found().roles
    }

    /// The descriptor; if the file gave it up, a new one.
    pub(super) async fn target(&self) -> Result<Arc<Target>> {
        let shared = match &**self.source.load() {
            Source::Kept(target, _) => return Ok(target.clone()),
            Source::Shared(shared) => shared.clone(),
        };
        match shared.ready() {
            Some(target) => Ok(target),
            None => Box::pin(shared.reopen()).await,
        }
    }

    /// Waits for operations whose futures were dropped; there are hardly ever any, and none of a file that never
    /// changes.
    pub(super) async fn landed(&self) {
        if self.writing.is_none() {
            return;
        }
        let landing = match &**self.source.load() {
            Source::Kept(target, _) if target.landing.any() => target.landing.clone(),
            _ => return,
        };
        landing.ended().await;
    }

    /// Reads cached data without waiting; returns the number of bytes from the start on.
    pub(super) fn read_cached(&self, offset: u64, buf: &mut IoBuf) -> usize {
        if self.direct.is_some() {
            return 0;
        }
        // Most of thousands of layers are not in the processor's caches: as few of their parts as can be are looked at.
        if self.mapped().is_some_and(|mapped| mapped.read(offset, buf)) {
            return buf.len();
        }
        match &**self.source.load() {
            Source::Kept(target, _) => self.read_kept(&target.file, offset, buf),
            Source::Shared(shared) => {
                shared.ready().map_or(0, |target| self.cached.read(&target.file, offset, buf))
            }
        }
    }

    fn read_kept(&self, file: &OwnedFd, offset: u64, buf: &mut IoBuf) -> usize {
        let count = self.cached.read(file, offset, buf);
        let mappings = self.file.pool.mappings();
        if count == buf.len() && self.kind == Kind::Regular && mappings.are_allowed() {
            let new = || Mapped::new(mappings, self.file.mode.writable);
            self.mapped.get_or_init(new).was_cached(file, offset, count);
        }
        count
    }

    /// Its mappings, if something cached was read.
    pub(super) fn mapped(&self) -> Option<&Arc<Mapped>> {
        self.mapped.get()
    }

    /// The descriptor of a file that may be changed.
    pub(super) fn kept(&self) -> io::Result<Arc<Target>> {
        match &**self.source.load() {
            Source::Kept(target, _) => Ok(target.clone()),
            Source::Shared(_) => Err(io::Error::from_raw_os_error(libc::EBADF)),
        }
    }

    pub(super) fn at(
        &self,
        operation: Operation,
        offset: u64,
        length: u64,
        source: io::Error,
    ) -> StorageError {
        StorageError::at(operation, &self.file.name, offset, length, source)
    }

    pub(super) fn error(&self, operation: Operation, source: io::Error) -> StorageError {
        StorageError::new(operation, &self.file.name, source)
    }

    /// Reads by system calls from now on: they show the errors that the file system has.
    pub(super) fn end_mappings(&self) {
        if let Some(mapped) = self.mapped() {
            mapped.end();
        }
    }

    /// The error for a refused change.
    pub(super) fn refusal(&self) -> io::Error {
        if !self.file.mode.writable {
            return io::Error::from_raw_os_error(libc::EBADF);
        }
        let text =
            "it was opened for writing, but has been made read-only since, as a backing file is";
        io::Error::new(io::ErrorKind::ReadOnlyFilesystem, text)
    }

    /// The end of a range in which an operation is allowed.
    pub(super) fn check(&self, operation: Operation, offset: u64, length: u64) -> Result<u64> {
        let changes = operation != Operation::Read;
        let result = match offset.checked_add(length).filter(|end| i64::try_from(*end).is_ok()) {
            None if changes => Err(io::Error::from_raw_os_error(libc::EFBIG)),
            None => Err(io::Error::from_raw_os_error(libc::EINVAL)),
            Some(_) if changes && self.writing.has_ended() => Err(self.refusal()),
            Some(end) if changes => {
                let durability = self.durability();
                let writes = matches!(
                    operation,
                    Operation::Write | Operation::WriteZeroes | Operation::Clone
                );
                if writes && length > 0 {
                    durability.note_write(end);
                }
                durability.check().map(|()| end)
            }
            Some(end) => Ok(end),
        };
        result.map_err(|error| self.at(operation, offset, length, error))
    }

    pub(super) async fn write_buf(
        &self,
        target: &Target,
        offset: u64,
        buf: IoBuf,
    ) -> (io::Result<()>, IoBuf) {
        match &self.direct {
            Some(direct) => direct.write(target, offset, buf).await,
            None => transfer::write(target, offset, buf, self.at_once()).await,
        }
    }

    /// How it is written to without a ring, if it may be.
    pub(super) fn at_once(&self) -> Option<&AtOnce> {
        let target = self.kept().ok().filter(|_| self.kind == Kind::Regular)?;
        let new = || AtOnce::of(&target.file, self.file.pool.writes_at_once());
        Some(self.found().at_once.get_or_init(new))
    }

    /// Whether the file system is one where flushes are cheaper in written space.
    pub(super) fn gains_from_written_space(&self) -> bool {
        *self.found().gains.get_or_init(|| {
            let found = self.kept().and_then(|target| sys::file_system(&target.file));
            self.kind == Kind::Regular && found.is_ok_and(flush::gains_from_written_space)
        })
    }

    /// The size of the device's atomic writes.
    pub(super) fn atomic_write(&self) -> u64 {
        *self.found().atomic.get_or_init(|| {
            let found = self.kept().ok().map(|target| atomic::of_file(&target.file));
            found.unwrap_or(SECTOR)
        })
    }

    /// The alignment in which other files' space can be shared; `None` if it cannot.
    pub(super) fn clone_alignment(&self) -> Option<u64> {
        *self.found().clones.get_or_init(|| self.find_clone_alignment())
    }

    fn found(&self) -> &Found {
        self.found.get_or_init(Box::default)
    }

    pub(super) fn length_of(&self, file: &OwnedFd) -> io::Result<u64> {
        match self.kind {
            Kind::Regular => Ok(sys::stat(file)?.st_size as u64),
            Kind::Device { .. } => sys::device_length(file),
        }
    }

    pub(super) async fn change_length(&self, length: u64) -> io::Result<()> {
        let target = self.kept()?;
        if let Kind::Device { .. } = self.kind {
            let have = self.length_of(&target.file)?;
            return if length <= have {
                Ok(())
            } else {
                Err(io::Error::from_raw_os_error(libc::ENOSPC))
            };
        }
        let guard = match &self.direct {
            Some(direct) => Some(direct.hold_from(&target.lease, 0).await),
            None => None,
        };
        if length >= self.length_of(&target.file)? {
            return sys::ftruncate(&target.file, length);
        }
        let cut = self.mapped().map(|mapped| mapped.cut(length));
        let landing = target.landing.clone();
        unblocked(&landing, move || {
            let _guards = (guard, cut);
            sys::ftruncate(&target.file, length)
        })
        .await
    }

    /// Whether the kernel extends the file by one write at a time, as it does with `O_DIRECT`, and can make it longer
    /// before.
    pub(super) fn extends_one_at_a_time(&self) -> bool {
        self.direct.is_some()
            && self.kind == Kind::Regular
            && !self.rejected.growth.load(Ordering::Relaxed)
            && *self.found().lengthens.get_or_init(|| {
                let found = self.kept().and_then(|target| sys::file_system(&target.file));
                found.is_ok_and(|number| LENGTHENED.contains(&number))
            })
    }

    /// Makes the file this long, if it is shorter, at the cost of a block at its end. Nothing behind is written
    /// meanwhile: file systems have been seen to truncate what a direct write adds while they allocate.
    pub(super) async fn make_longer(&self, length: u64) -> io::Result<()> {
        let Some(direct) = self.direct.as_ref().filter(|_| self.extends_one_at_a_time()) else {
            return Ok(());
        };
        let target = self.kept()?;
        // The kernel would send a signal.
        if length > sys::longest_file() {
            return Ok(());
        }
        let start = direct.last_block(length);
        let guard = direct.hold_from(&target.lease, start).await;
        if length <= self.length_of(&target.file)? {
            return Ok(());
        }
        transfer::fallocate(&target.leased(guard), 0, start, length - start).await
    }

    pub(super) fn find_allocation(&self, file: &OwnedFd, offset: u64) -> io::Result<Allocation> {
        let end = self.length_of(file)?;
        if offset >= end {
            return Ok(Allocation { length: 0, data: false });
        }
        let (stop, data) = match sys::seek(file, offset, libc::SEEK_DATA) {
            Ok(None) => (end, false),
            Ok(Some(start)) if start > offset => (start, false),
            Ok(Some(_)) => (sys::seek(file, offset, libc::SEEK_HOLE)?.unwrap_or(end), true),
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => (end, true),
            Err(error) => return Err(error),
        };
        // The file may have changed between the two calls; the answer covers at least one byte.
        Ok(Allocation { length: stop.min(end).max(offset + 1) - offset, data })
    }
}
