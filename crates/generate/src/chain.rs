//! Writing a whole chain, several files at a time.

use crate::error::GenerateError;
use crate::image::{self, Failed};
use crate::ownership::Ownership;
use crate::shape::{Chain, Progress};
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

/// Writes a chain's images to a new or empty directory, on as many threads as there are processors, and returns the
/// active layer's path.
///
/// Each file has a name that ends in `.partial` until it is complete; the active layer's file is renamed last. On
/// failure, everything is removed again.
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
    chain.geometry()?;
    // The directory stays locked until the end.
    let (made, _lock) = prepare(directory)?;
    let work = Work { chain, ownership, directory, progress, next: AtomicU32::new(0) };
    let result = work.run();
    if result.is_err() {
        work.remove();
        if made {
            // Other files in it are not ours to remove.
            let _ = fs::remove_dir(directory);
        }
    }
    result
}

/// Creates the directory unless it exists and is empty, and locks it against other runs. Returns whether it was
/// created, and the lock.
fn prepare(directory: &Path) -> Result<(bool, File), GenerateError> {
    let made = match fs::create_dir(directory) {
        Ok(()) => true,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
        Err(error) => return Err(failed("create the directory", directory, error)),
    };
    let read = |error| failed("read the directory", directory, error);
    let lock = File::open(directory).map_err(read)?;
    match lock.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Err(GenerateError::NotEmpty(directory.to_owned())),
        Err(TryLockError::Error(error)) => {
            return Err(failed("lock the directory", directory, error));
        }
    }
    if fs::read_dir(directory).map_err(read)?.next().is_some() {
        return Err(GenerateError::NotEmpty(directory.to_owned()));
    }
    Ok((made, lock))
}

fn failed(what: &'static str, path: &Path, error: io::Error) -> GenerateError {
    GenerateError::Io { what, path: path.to_owned(), error }
}

struct Work<'a> {
    chain: &'a Chain,
    ownership: &'a Ownership,
    directory: &'a Path,
    progress: &'a Progress,
    /// The next layer to write.
    next: AtomicU32,
}

impl Work<'_> {
    fn run(&self) -> Result<PathBuf, GenerateError> {
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
        let active = self.chain.layers - 1;
        self.publish(active)?;
        Ok(self.path(active))
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
        let partial = self.partial(layer);
        let file = File::create_new(&partial).map_err(|error| failed("create", &partial, error))?;
        let backing = layer.checked_sub(1).map(|below| self.chain.file_name(below));
        let clusters = self.ownership.clusters_of(layer);
        image::write(self.chain, layer, backing, clusters, &file, buffer, self.progress).map_err(
            |error| match error {
                Failed::Io(error) => failed("write", &partial, error),
                Failed::Other(error) => error,
            },
        )?;
        if layer + 1 < self.chain.layers { self.publish(layer) } else { Ok(()) }
    }

    /// Gives a complete file its final name.
    fn publish(&self, layer: u32) -> Result<(), GenerateError> {
        let partial = self.partial(layer);
        fs::rename(&partial, self.path(layer)).map_err(|error| failed("rename", &partial, error))
    }

    fn path(&self, layer: u32) -> PathBuf {
        self.directory.join(self.chain.file_name(layer))
    }

    fn partial(&self, layer: u32) -> PathBuf {
        self.directory.join(self.chain.file_name(layer) + ".partial")
    }

    /// Removes what was written. Errors are ignored: the failure that led here is reported instead.
    fn remove(&self) {
        for layer in 0..self.next.load(Ordering::Relaxed).min(self.chain.layers) {
            let _ = fs::remove_file(self.partial(layer));
            let _ = fs::remove_file(self.path(layer));
        }
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
