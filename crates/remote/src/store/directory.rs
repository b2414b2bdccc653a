//! A directory as a store: each object is a file, which appears by a rename when its contents are durable.

use super::{Entry, Found, Limits, Outcome, Parts, Store, Version};
use crate::digest::{Digest, unique};
use crate::error::{Error, Result};
use crate::local::{self, rename_new};
use crate::manifest::MAX_MANIFEST;
use crate::progress::Progress;
use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

/// What the name of a file begins with that is no object yet.
const TEMPORARY: &str = ".tmp-";

/// Who changes objects under a condition has this file's lock.
const LOCK: &str = ".lock";

/// Bytes of a part.
const PART: u64 = 8 << 20;

/// How often it is looked whether a lock is free.
const LOOK: Duration = Duration::from_millis(20);

/// A store in a directory, which is open: whatever its name refers to later, objects go there.
#[derive(Debug)]
pub struct Directory {
    path: PathBuf,
    root: OwnedFd,
    /// Conditional puts of this process, one at a time: the lock is the process's.
    conditional: Mutex<()>,
    limits: Limits,
    progress: Arc<Progress>,
}

impl Directory {
    /// Opens a store, with the usual limits. An empty directory is one.
    ///
    /// # Errors
    /// There is no such directory.
    pub fn open(path: &Path) -> Result<Self> {
        Self::within(path, Limits::default(), &Arc::default())
    }

    /// Opens a store. Of the limits, the overall one is that of a wait for another program that changes the store; the
    /// wait ends early when `progress` is cancelled.
    ///
    /// # Errors
    /// There is no such directory.
    pub fn within(path: &Path, limits: Limits, progress: &Arc<Progress>) -> Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(path, flags, Mode::empty());
        let root = root.map_err(|error| Error::local("open the directory", path, error))?;
        let progress = Arc::clone(progress);
        Ok(Self { path: path.to_owned(), root, conditional: Mutex::default(), limits, progress })
    }

    fn failed(&self, what: &str, key: &str, error: impl std::fmt::Display) -> Error {
        Error::local(what, &self.path.join(key), error)
    }

    /// The directory of an object, and its name there. With `create` it is made.
    fn place<'k>(&self, key: &'k str, create: bool) -> Result<Option<(OwnedFd, &'k str)>> {
        let (directory, name) = key.rsplit_once('/').unwrap_or((".", key));
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut opened = rustix::fs::openat(&self.root, directory, flags, Mode::empty());
        if create && matches!(opened, Err(Errno::NOENT)) {
            match rustix::fs::mkdirat(&self.root, directory, Mode::from_raw_mode(0o777)) {
                Ok(()) | Err(Errno::EXIST) => {}
                Err(error) => return Err(self.failed("create the directory", directory, error)),
            }
            rustix::fs::fsync(&self.root).map_err(|error| self.failed("flush", ".", error))?;
            opened = rustix::fs::openat(&self.root, directory, flags, Mode::empty());
        }
        match opened {
            Ok(directory) => Ok(Some((directory, name))),
            Err(Errno::NOENT) if !create => Ok(None),
            Err(error) => Err(self.failed("open the directory", directory, error)),
        }
    }

    /// Keeps other processes from changing objects under a condition, and from removing them, until it is dropped.
    /// Whoever is not `cancellable` still waits a little after an interruption.
    fn lock(&self, cancellable: bool) -> Result<OwnedFd> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let lock = rustix::fs::openat(&self.root, LOCK, flags, Mode::from_raw_mode(0o666));
        let lock = lock.map_err(|error| self.failed("open", LOCK, error))?;
        let begin = Instant::now();
        loop {
            match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(lock),
                Err(Errno::WOULDBLOCK | Errno::INTR) => {}
                Err(error) => return Err(self.failed("lock", LOCK, error)),
            }
            let mut limit = self.limits.overall;
            if self.progress.is_cancelled() {
                if cancellable {
                    return Err(Error::Interrupted);
                }
                limit = limit.min(self.limits.hurried);
            }
            if begin.elapsed() >= limit {
                return Err(self.failed(
                    "lock",
                    LOCK,
                    format_args!("another program has the lock (given up after {limit:?})"),
                ));
            }
            std::thread::sleep(LOOK.min(limit));
        }
    }

    /// An object's file, opened for reading.
    fn file(&self, key: &str) -> Result<Option<File>> {
        let Some((directory, name)) = self.place(key, false)? else { return Ok(None) };
        match local::open_file(&directory, Path::new(name)) {
            Ok(file) => Ok(file),
            Err(error) => Err(self.failed("open", key, error)),
        }
    }

    fn temporary(&self, key: &str) -> Result<Temporary<'_>> {
        let Some((directory, name)) = self.place(key, true)? else {
            unreachable!("a directory that is created is there")
        };
        let hidden = format!("{TEMPORARY}{}", unique()?);
        let flags =
            OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&directory, &*hidden, flags, Mode::from_raw_mode(0o666));
        let file = File::from(file.map_err(|error| self.failed("create", key, error))?);
        Ok(Temporary {
            store: self,
            key: key.to_owned(),
            name: name.to_owned(),
            directory,
            hidden,
            file,
            kept: false,
        })
    }
}

/// A file that is no object yet.
struct Temporary<'s> {
    store: &'s Directory,
    key: String,
    name: String,
    directory: OwnedFd,
    hidden: String,
    file: File,
    /// It has become an object.
    kept: bool,
}

impl Temporary<'_> {
    fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.file
            .write_all_at(bytes, offset)
            .map_err(|error| self.store.failed("write", &self.key, error))
    }

    /// Makes it the object, in place of another or of none.
    fn keep(mut self, replace: bool) -> Result<Outcome> {
        self.file.sync_all().map_err(|error| self.store.failed("flush", &self.key, error))?;
        let renamed = if replace {
            rustix::fs::renameat(&self.directory, &*self.hidden, &self.directory, &*self.name)
        } else {
            rename_new(&self.directory, Path::new(&self.hidden), Path::new(&self.name))
        };
        match renamed {
            Ok(()) => self.kept = true,
            Err(Errno::EXIST) if !replace => return Ok(Outcome::Changed),
            Err(error) => return Err(self.store.failed("create", &self.key, error)),
        }
        let flushed = rustix::fs::fsync(&self.directory);
        flushed.map_err(|error| self.store.failed("flush the directory of", &self.key, error))?;
        Ok(Outcome::Done)
    }
}

impl Drop for Temporary<'_> {
    fn drop(&mut self) {
        if !self.kept {
            // What stays is removed when objects are collected.
            let _ = rustix::fs::unlinkat(&self.directory, &*self.hidden, AtFlags::empty());
        }
    }
}

impl Store for Directory {
    fn head(&self, key: &str) -> Result<Option<Found>> {
        let Some(file) = self.file(key)? else { return Ok(None) };
        let metadata = file.metadata().map_err(|error| self.failed("examine", key, error))?;
        let modified = metadata.modified().map_err(|error| self.failed("examine", key, error))?;
        Ok(Some(Found { length: metadata.len(), modified }))
    }

    fn get(&self, key: &str, most: u64) -> Result<Option<(Vec<u8>, Version)>> {
        let Some(file) = self.file(key)? else { return Ok(None) };
        let mut bytes = Vec::new();
        let read = file.take(most.saturating_add(1)).read_to_end(&mut bytes);
        read.map_err(|error| self.failed("read", key, error))?;
        if bytes.len() as u64 > most {
            return Err(Error::damaged(format_args!(
                "'{key}' has more than the {most} bytes that it may have"
            )));
        }
        let tag = Digest::of(&bytes).to_string();
        Ok(Some((bytes, Version { tag: Some(tag), number: None })))
    }

    fn read(&self, key: &str, offset: u64, length: usize) -> Result<Vec<u8>> {
        let file = self.file(key)?.ok_or_else(|| Error::missing(key))?;
        let mut bytes = vec![0; length];
        match file.read_exact_at(&mut bytes, offset) {
            Ok(()) => Ok(bytes),
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
                Err(Error::ends(key, offset + length as u64))
            }
            Err(error) => Err(self.failed("read", key, error)),
        }
    }

    fn put(&self, key: &str, bytes: &[u8]) -> Result<()> {
        let temporary = self.temporary(key)?;
        temporary.write(0, bytes)?;
        temporary.keep(true).map(|_| ())
    }

    fn put_if(&self, key: &str, bytes: &[u8], was: Option<&Version>) -> Result<Outcome> {
        let _alone = self.conditional.lock().unwrap_or_else(PoisonError::into_inner);
        let _lock = self.lock(true)?;
        let unchanged = match was {
            None => self.head(key)?.is_none(),
            // No longer one was read before.
            Some(was) => match self.get(key, MAX_MANIFEST) {
                Ok(now) => now.is_some_and(|(_, version)| version == *was),
                Err(Error::Damaged(_)) => false,
                Err(error) => return Err(error),
            },
        };
        if !unchanged {
            return Ok(Outcome::Changed);
        }
        let temporary = self.temporary(key)?;
        temporary.write(0, bytes)?;
        temporary.keep(was.is_some())
    }

    fn settle(&self) -> Result<()> {
        for kind in crate::keys::KINDS.into_iter().chain([crate::keys::MANIFESTS]) {
            let Some((directory, _)) = self.place(kind, false)? else { continue };
            rustix::fs::fsync(&directory).map_err(|error| self.failed("flush", kind, error))?;
        }
        rustix::fs::fsync(&self.root).map_err(|error| self.failed("flush", ".", error))
    }

    fn begin<'a>(&'a self, key: &str, length: u64) -> Result<Box<dyn Parts + 'a>> {
        let begun = self.temporary(key)?;
        begun.file.set_len(length).map_err(|error| self.failed("write", key, error))?;
        Ok(Box::new(begun))
    }

    fn list(&self, prefix: &str) -> Result<Vec<Entry>> {
        let mut entries = Vec::new();
        self.each_file(
            prefix,
            |name| !name.starts_with('.'),
            |key, found| entries.push(Entry { key, found }),
        )?;
        entries.sort_unstable_by(|one, other| one.key.cmp(&other.key));
        Ok(entries)
    }

    fn delete(&self, key: &str) -> Result<()> {
        let _alone = self.conditional.lock().unwrap_or_else(PoisonError::into_inner);
        let _lock = self.lock(false)?;
        let Some((directory, name)) = self.place(key, false)? else { return Ok(()) };
        match rustix::fs::unlinkat(&directory, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(self.failed("remove", key, error)),
        }
    }

    fn sweep(&self, before: SystemTime) -> Result<u64> {
        let mut left = Vec::new();
        let kinds =
            crate::keys::KINDS.into_iter().chain([crate::keys::MANIFESTS, crate::keys::PUSHES, ""]);
        for prefix in kinds {
            let add = |key, found: Found| left.extend((found.modified < before).then_some(key));
            self.each_file(prefix, |name| name.starts_with(TEMPORARY), add)?;
        }
        left.iter().try_for_each(|key| self.delete(key))?;
        Ok(left.len() as u64)
    }
}

impl Directory {
    /// Shows the files of a directory with the names that are wanted. If one of these is anything else than a file, or
    /// cannot be opened, that is an error: whoever collects objects must not overlook a manifest.
    fn each_file(
        &self,
        prefix: &str,
        is_wanted: impl Fn(&str) -> bool,
        mut show: impl FnMut(String, Found),
    ) -> Result<()> {
        let Some((directory, _)) = self.place(prefix, false)? else { return Ok(()) };
        let entries = rustix::fs::Dir::read_from(&directory);
        for entry in entries.map_err(|error| self.failed("read the directory", prefix, error))? {
            let entry = entry.map_err(|error| self.failed("read the directory", prefix, error))?;
            let name = entry.file_name().to_string_lossy();
            if matches!(&*name, "." | "..") || !is_wanted(&name) {
                continue;
            }
            // One that is removed meanwhile is none.
            let key = format!("{prefix}{name}");
            if let Some(found) = self.head(&key)? {
                show(key, found);
            }
        }
        Ok(())
    }
}

impl Parts for Temporary<'_> {
    fn size(&self) -> u64 {
        PART
    }

    fn put(&self, number: u64, bytes: Vec<u8>) -> Result<()> {
        self.write(number * PART, &bytes)
    }

    fn finish(self: Box<Self>) -> Result<()> {
        self.keep(true).map(|_| ())
    }

    fn abandon(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}
