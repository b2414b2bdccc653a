//! A store that is read, which need not be there yet.

use crate::address::Place;
use crate::error::Result;
use crate::progress::Progress;
use crate::store::{self, Limits, Store, Version};
use std::sync::{Arc, Mutex, PoisonError};

/// A store that is read.
pub(crate) enum Source {
    /// One that is open.
    Open(Arc<dyn Store>),
    /// One that is opened when it is first needed, and a directory also when it has failed.
    Place { place: Place, limits: Limits, progress: Arc<Progress>, opened: Opened },
}

/// A store that may be open.
type Opened = Mutex<Option<Arc<dyn Store>>>;

impl Source {
    /// A store that is not opened yet. Its operations end early when `progress` is cancelled.
    pub(crate) fn new(place: &Place, limits: Limits, progress: &Arc<Progress>) -> Self {
        let (place, progress) = (place.clone(), Arc::clone(progress));
        Self::Place { place, limits, progress, opened: Mutex::new(None) }
    }

    fn store(&self) -> Result<Arc<dyn Store>> {
        let (place, limits, progress, opened) = match self {
            Self::Open(store) => return Ok(Arc::clone(store)),
            Self::Place { place, limits, progress, opened } => (place, limits, progress, opened),
        };
        let mut opened = opened.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(store) = &*opened {
            return Ok(Arc::clone(store));
        }
        let store: Arc<dyn Store> = Arc::from(store::open(place, *limits, progress)?);
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
