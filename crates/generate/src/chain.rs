//! Writing a whole chain, several files at a time.

use crate::error::GenerateError;
use crate::image::{self, Failed};
use crate::ownership::Ownership;
use crate::shape::{Chain, Progress};
use isobath_ring::place::{self, Identity, Place};
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

/// Writes a chain's images to a new or empty directory, on as many threads as there are processors, and returns the
/// active layer's path.
///
/// Each file has a name that ends in `.partial` until it is complete; the active layer's file is renamed last. On
/// failure, everything is removed again; what other programs have put into the directory stays.
///
/// # Errors
/// If the directory is not empty, a file cannot be written, a layer has more clusters than an image can count, or the
/// work was stopped.
pub fn generate(
    chain: &Chain,
    ownership: &Ownership,
    directory: &Path,
    progress: &Progress,
) -> Result<PathBuf, GenerateError> {
    generate_held(chain, ownership, directory, progress).map(|generated| generated.active)
}

/// As [`generate`], for a chain that is to be changed before it is complete. No other run writes to the directory until
/// what this returns is dropped.
///
/// # Errors
/// As [`generate`].
pub fn generate_held(
    chain: &Chain,
    ownership: &Ownership,
    directory: &Path,
    progress: &Progress,
) -> Result<Generated, GenerateError> {
    chain.geometry()?;
    let made = Made::prepare(directory)?;
    let work = Work { chain, ownership, made: &made, progress, next: AtomicU32::new(0) };
    match work.run() {
        Ok(()) => {
            let active = directory.join(chain.file_name(chain.layers - 1));
            Ok(Generated { active, made })
        }
        Err(error) => {
            made.remove();
            Err(error)
        }
    }
}

/// A generated chain, whose directory is locked against other runs.
pub struct Generated {
    active: PathBuf,
    made: Made,
}

impl Generated {
    /// The active layer's path.
    pub fn active(&self) -> &Path {
        &self.active
    }

    /// Removes the chain again, and its directory if that was new. What other programs have put there stays.
    pub fn remove(self) {
        self.made.remove();
    }
}

/// What a run has made.
struct Made {
    /// The directory, by any name in it.
    inside: Place,
    /// Where the directory is, if it was made.
    directory: Option<(Place, Identity)>,
    /// The files, by their final names.
    files: Mutex<Vec<(String, Identity)>>,
    /// The directory is locked until this is dropped.
    _lock: File,
}

impl Made {
    /// Creates the directory unless it exists and is empty, and locks it against other runs.
    fn prepare(directory: &Path) -> Result<Self, GenerateError> {
        let is_new = match fs::create_dir(directory) {
            Ok(()) => true,
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
            Err(error) => return Err(failed("create the directory", directory, error)),
        };
        let read = |error| failed("read the directory", directory, error);
        let inside = Place::of(&directory.join("layer")).map_err(read)?;
        let lock = File::from(inside.beside(".".as_ref()).open_directory().map_err(read)?);
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(GenerateError::NotEmpty(directory.to_owned()));
            }
            Err(TryLockError::Error(error)) => {
                return Err(failed("lock the directory", directory, error));
            }
        }
        if fs::read_dir(directory).map_err(read)?.next().is_some() {
            return Err(GenerateError::NotEmpty(directory.to_owned()));
        }
        let place = Place::of(directory).ok().filter(|_| is_new);
        let directory = place.zip(place::identity_of(&lock).ok());
        Ok(Self { inside, directory, files: Mutex::default(), _lock: lock })
    }

    /// The place of a file with this final name, until it is complete.
    fn partial(&self, name: &str) -> Place {
        self.inside.beside(format!("{name}.partial").as_ref())
    }

    fn create(&self, name: &str) -> io::Result<File> {
        let file = self.partial(name).create_new(0o666)?;
        let id = place::identity_of(&file)?;
        self.files.lock().unwrap_or_else(PoisonError::into_inner).push((name.to_owned(), id));
        Ok(file)
    }

    /// Gives a complete file its final name.
    fn publish(&self, name: &str) -> Result<(), GenerateError> {
        let (partial, place) = (self.partial(name), self.inside.beside(name.as_ref()));
        let is_free = || place.stat().is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
        let moved = match partial.move_to(&place) {
            // Some file systems cannot keep what is there.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput && is_free() => {
                partial.replace(&place)
            }
            moved => moved,
        };
        moved.map_err(|error| failed("rename", partial.path(), error))
    }

    /// Removes what was made. Errors are ignored: the failure that led here is reported instead.
    fn remove(&self) {
        for (name, id) in &*self.files.lock().unwrap_or_else(PoisonError::into_inner) {
            for place in [self.partial(name), self.inside.beside(name.as_ref())] {
                let _ = place.remove_aside(*id);
            }
        }
        if let Some((place, id)) = &self.directory
            && place.holds(*id)
        {
            // It stays if there are others' files in it.
            let _ = place.remove_directory();
        }
    }
}

fn failed(what: &'static str, path: &Path, error: io::Error) -> GenerateError {
    GenerateError::Io { what, path: path.to_owned(), error }
}

struct Work<'a> {
    chain: &'a Chain,
    ownership: &'a Ownership,
    made: &'a Made,
    progress: &'a Progress,
    /// The next layer to write.
    next: AtomicU32,
}

impl Work<'_> {
    fn run(&self) -> Result<(), GenerateError> {
        let threads = thread::available_parallelism().map_or(1, usize::from);
        thread::scope(|scope| {
            let others: Vec<_> =
                (1..threads).map(|_| scope.spawn(|| self.write_layers())).collect();
            let mut result = self.write_layers();
            for other in others {
                match other.join() {
                    Ok(theirs) => result = first_cause(result, theirs),
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
            result
        })?;
        self.made.publish(&self.chain.file_name(self.chain.layers - 1))
    }

    fn write_layers(&self) -> Result<(), GenerateError> {
        let mut buffer = Vec::new();
        loop {
            let layer = self.next.fetch_add(1, Ordering::Relaxed);
            if layer >= self.chain.layers {
                return Ok(());
            }
            let written = self.write_layer(layer, &mut buffer);
            if written.is_err() {
                self.progress.stop();
                return written;
            }
        }
    }

    fn write_layer(&self, layer: u32, buffer: &mut Vec<u8>) -> Result<(), GenerateError> {
        if self.progress.is_stopped() {
            return Err(GenerateError::Stopped);
        }
        let name = self.chain.file_name(layer);
        let about = |what, error| failed(what, self.made.partial(&name).path(), error);
        let file = self.made.create(&name).map_err(|error| about("create", error))?;
        let backing = layer.checked_sub(1).map(|below| self.chain.file_name(below));
        let clusters = self.ownership.clusters_of(layer);
        image::write(self.chain, layer, backing, clusters, &file, buffer, self.progress).map_err(
            |error| match error {
                Failed::Io(error) => about("write", error),
                Failed::Other(error) => error,
            },
        )?;
        if layer + 1 < self.chain.layers { self.made.publish(&name) } else { Ok(()) }
    }
}

/// Of two threads' results, the one that explains why both ended.
fn first_cause(
    one: Result<(), GenerateError>,
    other: Result<(), GenerateError>,
) -> Result<(), GenerateError> {
    match (&one, &other) {
        (Ok(()), _) | (Err(GenerateError::Stopped), Err(_)) => other,
        _ => one,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_have_put_into_the_directory_stays() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("chain");
        let made = Made::prepare(&directory).unwrap();
        let path = |name: &str| directory.join(name);
        drop(made.create("first").unwrap());
        drop(made.create("second").unwrap());
        drop(made.create("third").unwrap());
        made.publish("first").unwrap();
        fs::rename(path("first"), path("moved")).unwrap();
        let others = ["first", "second", "fourth.partial"];
        for name in others {
            fs::write(path(name), "another's").unwrap();
        }
        let taken = made.publish("second").unwrap_err().to_string();
        assert!(taken.contains("second.partial"), "{taken}");
        assert_eq!(made.create("fourth").unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        made.remove();
        assert!(others.iter().all(|name| fs::read(path(name)).unwrap() == b"another's"));
        // This is its own, but nobody knows any more where.
        fs::remove_file(path("moved")).unwrap();
        assert_eq!(fs::read_dir(&directory).unwrap().count(), others.len());
    }

    #[test]
    fn a_directory_that_was_there_stays() {
        let root = tempfile::tempdir().unwrap();
        let made = Made::prepare(root.path()).unwrap();
        drop(made.create("first").unwrap());
        made.remove();
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
    }
}
