//! A store that is read, which need not be there yet.

use crate::address::Place;
use crate::error::{Error, Result};
use crate::progress::Progress;
use crate::store::{self, Limits, Store, Version};
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, PoisonError};

/// A store that is read.
pub(crate) enum Source {
    /// One that is open.
    Open(Arc<dyn Store>),
    /// One that is opened when it is first needed, and a directory also when it has failed.
    Place { place: Place, limits: Limits, progress: Arc<Progress>, opened: Opened, was: Option<Id> },
}

/// A store that may be open.
type Opened = Mutex<Option<Arc<dyn Store>>>;

/// Which directory it is: the numbers of its file system and its inode.
type Id = (u64, u64);

/// Which directory has the path of a store, if it is one and there is any.
fn directory_of(place: &Place) -> Option<Id> {
    let Place::Directory(path) = place else { return None };
    let found = std::fs::metadata(path).ok()?;
    Some((found.dev(), found.ino()))
}

/// Whether the system forbids to open the directory of a store.
fn is_denied(place: &Place) -> bool {
    let Place::Directory(path) = place else { return false };
    File::open(path).is_err_and(|error| error.kind() == ErrorKind::PermissionDenied)
}

impl Source {
    /// A store that is not opened yet. Its operations end early when `progress` is cancelled.
    pub(crate) fn new(place: &Place, limits: Limits, progress: &Arc<Progress>) -> Self {
        let was = directory_of(place);
        let (place, progress) = (place.clone(), Arc::clone(progress));
        Self::Place { place, limits, progress, opened: Mutex::new(None), was }
    }

    fn store(&self) -> Result<Arc<dyn Store>> {
        let (place, limits, progress, opened, was) = match self {
            Self::Open(store) => return Ok(Arc::clone(store)),
            Self::Place { place, limits, progress, opened, was } => {
                (place, limits, progress, opened, was)
            }
        };
        let mut opened = opened.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(store) = &*opened {
            return Ok(Arc::clone(store));
        }
        let store = store::open(place, *limits, progress).map_err(|error| match error {
            // A confined process may read what was there when it was confined.
            Error::Local(text) if is_denied(place) && directory_of(place) != *was => {
                Error::Local(format!(
                    "{text}; it is another directory than when the server was started: if a file system was mounted \
                     there, restart the server, whose sandbox has the one that was there before"
                ))
            }
            error => error,
        })?;
        let store: Arc<dyn Store> = Arc::from(store);
        *opened = Some(Arc::clone(&store));
        Ok(store)
    }

    fn with<T>(&self, work: impl FnOnce(&dyn Store) -> Result<T>) -> Result<T> {
        let store = self.store()?;
        let done = work(&*store);
        // Of a directory it may be the descriptor that has failed: another file system may be mounted there by now.
        if let (Err(_), Self::Place { place: Place::Directory(_), opened, .. }) = (&done, self) {
            let mut opened = opened.lock().unwrap_or_else(PoisonError::into_inner);
            if opened.as_ref().is_some_and(|opened| Arc::ptr_eq(opened, &store)) {
                *opened = None;
            }
        }
        done
    }

    /// All of an object, of at most `most` bytes.
    pub(crate) fn get(&self, key: &str, most: u64) -> Result<Option<(Vec<u8>, Version)>> {
        self.with(|store| store.get(key, most))
    }

    /// So many bytes of an object.
    pub(crate) fn read(&self, key: &str, offset: u64, length: usize) -> Result<Vec<u8>> {
        self.with(|store| store.read(key, offset, length))
    }
}
