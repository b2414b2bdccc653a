//! A whole chain: its files, written several at a time.

use crate::data::Data;
use crate::error::GenerateError;
use crate::image::{self, Failed};
use crate::ownership::Ownership;
use isobath_qcow2::{Geometry, NewImage};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread;

/// What a chain is like, but for who owns which cluster.
#[derive(Clone, Debug)]
pub struct Chain {
    /// The layers, at least 1.
    pub layers: u32,
    /// The disk's size in bytes, a multiple of 512 and at least that.
    pub size: u64,
    /// Base-2 logarithm of the cluster size, 9 to 21.
    pub cluster_bits: u32,
    /// What the clusters hold.
    pub data: Data,
    /// The seed of everything that is random.
    pub seed: u64,
}

impl Chain {
    /// The geometry of every image.
    ///
    /// # Errors
    /// If there are no layers, or the format cannot hold such a disk.
    pub fn geometry(&self) -> Result<Geometry, GenerateError> {
        if self.layers == 0 {
            return Err(GenerateError::NoLayers);
        }
        if self.size == 0 || !self.size.is_multiple_of(512) {
            return Err(GenerateError::Size(self.size));
        }
        let image = NewImage { cluster_bits: self.cluster_bits, ..NewImage::new(self.size) };
        Ok(image.plan()?.header().geometry()?)
    }

    /// The file name of a layer, from the base at 0: `layer-00000.qcow2`, with more digits where the
    /// chain has more layers than five can count.
    pub fn file_name(&self, layer: u32) -> String {
        let digits = self.layers.saturating_sub(1).to_string().len().max(5);
        format!("layer-{layer:0digits$}.qcow2")
    }
}

/// How far the work is, for another thread to look at and to stop.
#[derive(Debug, Default)]
pub struct Progress {
    done: AtomicU64,
    stop: AtomicBool,
}

impl Progress {
    /// The clusters written so far, of [`Ownership::total`].
    pub fn clusters(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Ends the work soon, with [`GenerateError::Stopped`].
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    pub(crate) fn advance(&self, clusters: u64) {
        self.done.fetch_add(clusters, Ordering::Relaxed);
    }
}

/// Writes a chain's images into a directory, which is new or empty, on as many threads as there are
/// processors, and gives the active layer's path.
///
/// Each file has a name that ends in `.partial` until it is whole, and the active layer's file gets
/// its own name last. On failure everything is removed again.
///
/// # Errors
/// If the directory has something in it, a file cannot be written, a layer has more clusters than an
/// image can count, or the work was stopped.
pub fn generate(
    chain: &Chain,
    ownership: &Ownership,
    directory: &Path,
    progress: &Progress,
) -> Result<PathBuf, GenerateError> {
    chain.geometry()?;
    let made = prepare(directory)?;
    let work = Work { chain, ownership, directory, progress, next: AtomicU32::new(0) };
    let result = work.run();
    if result.is_err() {
        work.remove();
        if made {
            // What else is in it is not ours to remove.
            let _ = fs::remove_dir(directory);
        }
    }
    result
}

/// Makes the directory unless it is there and empty; says whether it was made.
fn prepare(directory: &Path) -> Result<bool, GenerateError> {
    match fs::create_dir(directory) {
        Ok(()) => return Ok(true),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(failed("make the directory", directory, error)),
    }
    let mut entries =
        fs::read_dir(directory).map_err(|error| failed("read the directory", directory, error))?;
    if entries.next().is_some() {
        return Err(GenerateError::NotEmpty(directory.to_owned()));
    }
    Ok(false)
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

    /// Gives a whole file its name.
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

    /// Removes what was written; the cause of it is told, not what cannot be removed either.
    fn remove(&self) {
        for layer in 0..self.next.load(Ordering::Relaxed).min(self.chain.layers) {
            let _ = fs::remove_file(self.partial(layer));
            let _ = fs::remove_file(self.path(layer));
        }
    }
}

/// Of two threads' results the one that says why both ended.
fn first_cause(
    one: Result<(), GenerateError>,
    other: Result<(), GenerateError>,
) -> Result<(), GenerateError> {
    match (&one, &other) {
        (Ok(()), _) | (Err(GenerateError::Stopped), Err(_)) => other,
        _ => one,
    }
}
