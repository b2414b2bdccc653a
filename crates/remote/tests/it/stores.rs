//! Stores that stop working, and at whose operations something else happens.

use isobath_remote::store::{Directory, Entry, Found, Outcome, Parts, Store, Version};
use isobath_remote::{Error, Result};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, SystemTime};
use tempfile::TempDir;

/// A new store in a directory.
pub(crate) fn new() -> (TempDir, Directory) {
    let directory = tempfile::tempdir().unwrap();
    let store = Directory::open(directory.path()).unwrap();
    (directory, store)
}

/// A copy of a store.
pub(crate) fn copy(from: &Path) -> (TempDir, Directory) {
    let to = tempfile::tempdir().unwrap();
    let status =
        std::process::Command::new("cp").arg("-a").arg(from.join(".")).arg(to.path()).status();
    assert!(status.unwrap().success());
    let store = Directory::open(to.path()).unwrap();
    (to, store)
}

/// When a store's user is killed: the operation of this number is not done, or nobody learns that it was. What follows
/// is not done either.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Death {
    Before(usize),
    After(usize),
    /// It is interrupted, as everything that follows, and is not done.
    Interrupted(usize),
    /// It is done, but perhaps not durable, as the user is told. What follows is done.
    NotDurable(usize),
}

/// What was asked of a store: an operation, an object, and how many of its bytes.
pub(crate) type Asked = (&'static str, String, usize);

/// A store whose user is killed, or at one of whose operations something else happens.
pub(crate) struct Watched<'s> {
    inner: &'s dyn Store,
    count: AtomicUsize,
    asked: Mutex<Vec<Asked>>,
    death: Option<Death>,
    at: Option<(usize, &'s (dyn Fn() + Sync))>,
}

impl<'s> Watched<'s> {
    pub(crate) fn dying(inner: &'s dyn Store, death: Death) -> Self {
        Self { death: Some(death), ..Self::recording(inner) }
    }

    /// Only records what was asked.
    pub(crate) fn recording(inner: &'s dyn Store) -> Self {
        let (count, asked) = (AtomicUsize::new(0), Mutex::default());
        Self { inner, count, asked, death: None, at: None }
    }

    /// What was asked so far.
    pub(crate) fn asked(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }

    fn note(&self, what: &'static str, key: &str, length: usize) {
        self.asked.lock().unwrap().push((what, key.to_owned(), length));
    }

    /// Calls `what` before the operation of this number.
    pub(crate) fn meanwhile(
        inner: &'s dyn Store,
        number: usize,
        what: &'s (dyn Fn() + Sync),
    ) -> Self {
        Self { at: Some((number, what)), ..Self::recording(inner) }
    }

    /// Operations so far.
    pub(crate) fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    fn step<T>(&self, operation: impl FnOnce() -> Result<T>) -> Result<T> {
        let number = self.count.fetch_add(1, Ordering::SeqCst);
        if let Some((_, what)) = self.at.filter(|(at, _)| *at == number) {
            what();
        }
        let died = || Err(Error::Store("killed".to_owned()));
        match self.death {
            Some(Death::Before(at)) if number >= at => died(),
            Some(Death::Interrupted(at)) if number >= at => Err(Error::Interrupted),
            Some(Death::NotDurable(at)) if number == at => {
                operation().and_then(|_| Err(Error::Local("cannot flush".to_owned())))
            }
            Some(Death::After(at)) if number > at => died(),
            Some(Death::After(at)) if number == at => operation().and_then(|_| died()),
            _ => operation(),
        }
    }
}

impl Store for Watched<'_> {
    fn head(&self, key: &str) -> Result<Option<Found>> {
        self.note("head", key, 0);
        self.step(|| self.inner.head(key))
    }

    fn get(&self, key: &str, most: u64) -> Result<Option<(Vec<u8>, Version)>> {
        self.step(|| self.inner.get(key, most))
    }

    fn read(&self, key: &str, offset: u64, length: usize) -> Result<Vec<u8>> {
        self.note("read", key, length);
        self.step(|| self.inner.read(key, offset, length))
    }

    fn put(&self, key: &str, bytes: &[u8]) -> Result<()> {
        self.step(|| self.inner.put(key, bytes))
    }

    fn put_if(&self, key: &str, bytes: &[u8], was: Option<&Version>) -> Result<Outcome> {
        self.step(|| self.inner.put_if(key, bytes, was))
    }

    fn begin<'a>(&'a self, key: &str, length: u64) -> Result<Box<dyn Parts + 'a>> {
        let parts = self.step(|| self.inner.begin(key, length))?;
        Ok(Box::new(WatchedParts { store: self, parts }))
    }

    fn settle(&self) -> Result<()> {
        self.step(|| self.inner.settle())
    }

    fn list(&self, prefix: &str) -> Result<Vec<Entry>> {
        self.step(|| self.inner.list(prefix))
    }

    fn delete(&self, key: &str) -> Result<()> {
        self.step(|| self.inner.delete(key))
    }

    fn sweep(&self, before: SystemTime) -> Result<u64> {
        self.step(|| self.inner.sweep(before))
    }
}

struct WatchedParts<'s> {
    store: &'s Watched<'s>,
    parts: Box<dyn Parts + 's>,
}

impl Parts for WatchedParts<'_> {
    fn size(&self) -> u64 {
        self.parts.size()
    }

    fn put(&self, number: u64, bytes: Vec<u8>) -> Result<()> {
        self.store.step(|| self.parts.put(number, bytes))
    }

    fn finish(self: Box<Self>) -> Result<()> {
        self.store.step(|| self.parts.finish())
    }

    fn abandon(self: Box<Self>) -> Result<()> {
        self.store.step(|| self.parts.abandon())
    }
}

/// A store all of whose objects are two days old, but for the lock.
pub(crate) struct Aged<'s>(pub(crate) &'s dyn Store);

impl Store for Aged<'_> {
    fn head(&self, key: &str) -> Result<Option<Found>> {
        self.0.head(key)
    }

    fn get(&self, key: &str, most: u64) -> Result<Option<(Vec<u8>, Version)>> {
        self.0.get(key, most)
    }

    fn read(&self, key: &str, offset: u64, length: usize) -> Result<Vec<u8>> {
        self.0.read(key, offset, length)
    }

    fn put(&self, key: &str, bytes: &[u8]) -> Result<()> {
        self.0.put(key, bytes)
    }

    fn put_if(&self, key: &str, bytes: &[u8], was: Option<&Version>) -> Result<Outcome> {
        self.0.put_if(key, bytes, was)
    }

    fn begin<'a>(&'a self, key: &str, length: u64) -> Result<Box<dyn Parts + 'a>> {
        self.0.begin(key, length)
    }

    fn settle(&self) -> Result<()> {
        self.0.settle()
    }

    fn list(&self, prefix: &str) -> Result<Vec<Entry>> {
        let mut entries = self.0.list(prefix)?;
        for entry in &mut entries {
            entry.found.modified -= Duration::from_hours(48);
        }
        Ok(entries)
    }

    fn delete(&self, key: &str) -> Result<()> {
        self.0.delete(key)
    }

    fn sweep(&self, before: SystemTime) -> Result<u64> {
        self.0.sweep(before)
    }
}

/// A store that cannot make durable what it has.
pub(crate) struct Unsettled<'s>(pub(crate) &'s dyn Store);

impl Store for Unsettled<'_> {
    fn head(&self, key: &str) -> Result<Option<Found>> {
        self.0.head(key)
    }

    fn get(&self, key: &str, most: u64) -> Result<Option<(Vec<u8>, Version)>> {
        self.0.get(key, most)
    }

    fn read(&self, key: &str, offset: u64, length: usize) -> Result<Vec<u8>> {
        self.0.read(key, offset, length)
    }

    fn put(&self, key: &str, bytes: &[u8]) -> Result<()> {
        self.0.put(key, bytes)
    }

    fn put_if(&self, key: &str, bytes: &[u8], was: Option<&Version>) -> Result<Outcome> {
        self.0.put_if(key, bytes, was)
    }

    fn begin<'a>(&'a self, key: &str, length: u64) -> Result<Box<dyn Parts + 'a>> {
        self.0.begin(key, length)
    }

    fn settle(&self) -> Result<()> {
        Err(Error::Local("cannot settle".to_owned()))
    }

    fn list(&self, prefix: &str) -> Result<Vec<Entry>> {
        self.0.list(prefix)
    }

    fn delete(&self, key: &str) -> Result<()> {
        self.0.delete(key)
    }

    fn sweep(&self, before: SystemTime) -> Result<u64> {
        self.0.sweep(before)
    }
}
