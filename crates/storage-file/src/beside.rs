//! Readers of a file that let a writer of the same process in, and nobody else.
//!
//! To the kernel, descriptors of one process are users like any others: a reader keeps out the process's own writer,
//! too. So it gives up its locks only once the writer's descriptor has its own, and takes them again before the
//! writer's are released. Whoever else asks is refused at every moment in between.

use crate::lock::{self, Locks, Wanted};
use isobath_storage::lock::{Conflict, busy};
use isobath_storage::{FileId, Result};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The files of a pool that have such readers.
#[derive(Default)]
pub(super) struct Besides(Mutex<HashMap<FileId, Beside>>);

/// The users of one file. Never empty.
#[derive(Default)]
struct Beside {
    readers: Vec<Reader>,
    /// A writer was let in. There is no second one: the locks of the first refuse it.
    written: bool,
}

struct Reader {
    file: Arc<OwnedFd>,
    name: PathBuf,
    /// It holds the locks of a reader.
    locked: bool,
}

impl Reader {
    /// Gives way to a writer, which has its locks.
    fn step_aside(&mut self) -> Result<()> {
        if self.locked {
            lock::give_up(&self.file, &self.name)?;
            self.locked = false;
        }
        Ok(())
    }

    /// Takes its locks again, while the writer still has its own.
    fn step_back(&mut self) {
        if !self.locked {
            self.locked = lock::join_again(&self.file, &self.name).is_ok();
        }
    }
}

/// A reader lets writers of this process in until this is dropped.
pub(super) struct Admission {
    besides: Arc<Besides>,
    id: FileId,
    file: Arc<OwnedFd>,
}

/// A writer that was let in: readers deny writing again before this is dropped.
pub(super) struct LetIn {
    besides: Arc<Besides>,
    id: FileId,
}

impl Besides {
    /// From now on a reader, which holds its locks, lets writers of this process in.
    pub(super) fn admit(
        self: &Arc<Self>,
        id: FileId,
        file: &Arc<OwnedFd>,
        name: &Path,
    ) -> Admission {
        let reader = Reader { file: file.clone(), name: name.to_owned(), locked: true };
        self.0.lock().entry(id).or_default().readers.push(reader);
        Admission { besides: self.clone(), id, file: file.clone() }
    }

    /// Takes the locks of a user of the file.
    ///
    /// # Errors
    /// As [`lock::take`].
    pub(super) fn take(
        self: &Arc<Self>,
        id: FileId,
        file: &Arc<OwnedFd>,
        name: &Path,
        wanted: Wanted,
    ) -> Result<(Option<LetIn>, Locks)> {
        let mut files = self.0.lock();
        let Some(beside) =
            files.get_mut(&id).filter(|beside| wanted.writes() && !beside.readers.is_empty())
        else {
            drop(files);
            return Ok((None, lock::take(file, name, wanted)?));
        };
        let locks = lock::set(file, name, wanted)?;
        let aside = beside.readers.iter_mut().try_for_each(Reader::step_aside);
        if let Err(error) = aside.and_then(|()| lock::look(file, name, wanted)) {
            if !beside.written {
                beside.readers.iter_mut().for_each(Reader::step_back);
            }
            return Err(error);
        }
        beside.written = true;
        Ok((Some(LetIn { besides: self.clone(), id }), locks))
    }

    /// Whether a user of the file might get its locks: a look, which others do not notice.
    ///
    /// # Errors
    /// As [`lock::take`].
    pub(super) fn look(
        &self,
        id: FileId,
        file: &OwnedFd,
        name: &Path,
        wanted: Wanted,
    ) -> Result<()> {
        // The readers that would let it in look like others.
        if wanted.writes() && self.0.lock().contains_key(&id) {
            return Ok(());
        }
        lock::look(file, name, wanted)
    }

    /// Ends an admission.
    ///
    /// # Errors
    /// A writer is still there ([`std::io::ErrorKind::ResourceBusy`]); then nothing has changed.
    pub(super) fn deny(&self, admission: &Admission, name: &Path) -> Result<()> {
        let mut denied = Ok(());
        self.change(admission.id, |beside| {
            if beside.written {
                denied = Err(busy(name, Conflict::SHARED_WRITE));
                return;
            }
            let is_own = |reader: &Reader| Arc::ptr_eq(&reader.file, &admission.file);
            if beside.readers.iter().any(|reader| is_own(reader) && !reader.locked) {
                denied = lock::take_again(&admission.file, name);
            }
            if denied.is_ok() {
                beside.readers.retain(|reader| !is_own(reader));
            }
        });
        denied
    }

    /// Whether a reader of the file lets writers in.
    pub(super) fn admits(&self, id: FileId) -> bool {
        self.0.lock().get(&id).is_some_and(|beside| !beside.readers.is_empty())
    }

    fn change(&self, id: FileId, change: impl FnOnce(&mut Beside)) {
        let mut files = self.0.lock();
        if let Some(beside) = files.get_mut(&id) {
            change(beside);
            if beside.readers.is_empty() && !beside.written {
                files.remove(&id);
            }
        }
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        self.besides.change(self.id, |beside| {
            beside.readers.retain(|reader| !Arc::ptr_eq(&reader.file, &self.file));
        });
    }
}

impl Drop for LetIn {
    fn drop(&mut self) {
        self.besides.change(self.id, |beside| {
            beside.written = false;
            beside.readers.iter_mut().for_each(Reader::step_back);
        });
    }
}
