//! Layers whose file is to be deleted once an overlay has what they hold: a command that was killed in between, run
//! again, finishes it.
//!
//! The evidence is an extended attribute of the layer's file. It says which overlay takes the data, and which file it
//! belongs to, with its size and the time of its last write: a copy, or a file that was written since, has none. That
//! the layer may go is then proved by comparing what the overlay reads.

use super::users::{Doomed, Users, directories, identity};
use crate::failure::Failure;
use isobath_disk::{BlockStatus, Disk, ImageFormat, OpenOptions, Secrets};
use isobath_image::sabotage::{self, Sabotage};
use isobath_storage::file::FileHost;
use isobath_storage::{IoBuf, Locking, Storage, StorageExt};
use rustix::fs::{XattrFlags, getxattr, removexattr, setxattr};
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

const ATTRIBUTE: &str = "user.isobath.merge";

/// Guest bytes whose status is asked for at once, and that are read at once.
const WINDOW: u64 = 1 << 30;
const CHUNK: u64 = 1 << 20;
const RUNS: usize = 4096;

/// Notes at the layer's file that its data goes to the overlay, durably. Where files have no such attributes, a command
/// that is killed leaves the file.
pub(super) fn note(layer: &Path, format: ImageFormat, overlay: &Path) {
    let noted = || {
        let (own, above) = (fingerprint(layer)?, of_overlay(overlay)?);
        let value = format!("{} {own} {above}", format.name());
        setxattr(layer, ATTRIBUTE, value.as_bytes(), XattrFlags::empty())?;
        File::open(layer)?.sync_all()
    };
    if let Err(error) = noted() {
        let (layer, error): (_, std::io::Error) = (layer.display(), error);
        tracing::debug!("'{layer}' does not say that it is being merged: {error}");
    }
}

/// Takes the note back: the file stays.
pub(super) fn forget(layer: &Path) {
    // There may be none.
    let _ = removexattr(layer, ATTRIBUTE);
}

/// What tells the file, as it is, from others, and from what it becomes if it is written.
pub(super) fn fingerprint(layer: &Path) -> std::io::Result<String> {
    let file = fs::metadata(layer)?;
    let written = (file.mtime(), file.mtime_nsec());
    Ok(format!("{}:{}:{}:{}.{}", file.dev(), file.ino(), file.len(), written.0, written.1))
}

fn of_overlay(overlay: &Path) -> std::io::Result<String> {
    identity(overlay).map(|(device, inode)| format!("{device}:{inode}"))
}

/// A file that an image of a chain has taken the data of.
pub(super) struct Unfinished {
    pub(super) layer: PathBuf,
    format: ImageFormat,
    overlay: PathBuf,
}

impl Unfinished {
    /// The file, if its note is its own and names one of these images, and it is none of them, and has no other name.
    pub(super) fn of(layer: &Path, chain: &[PathBuf]) -> Option<Self> {
        let mut value = [0; 256];
        let length = getxattr(layer, ATTRIBUTE, &mut value).ok()?;
        let text = std::str::from_utf8(value.get(..length)?).ok()?;
        let mut words = text.split(' ');
        let (format, own, above) = (words.next()?, words.next()?, words.next()?);
        let format = ImageFormat::from_name(format)?;
        if own != fingerprint(layer).ok()? || fs::metadata(layer).ok()?.nlink() != 1 {
            return None;
        }
        let own = identity(layer).ok()?;
        if chain.iter().any(|image| identity(image).is_ok_and(|id| id == own)) {
            return None;
        }
        let mut images = chain.iter();
        let overlay = images.find(|image| of_overlay(image).is_ok_and(|id| id == above))?.clone();
        Some(Self { layer: layer.to_owned(), format, overlay })
    }

    /// Deletes the file, or returns an image that needs it. `search` are other directories with images.
    ///
    /// # Errors
    /// If the overlay lacks something that the layer has, the layer has internal snapshots, or a program uses one of
    /// them.
    pub(super) async fn finish(
        &self,
        chain: &[PathBuf],
        search: &[PathBuf],
        secrets: &Secrets,
    ) -> Result<Option<PathBuf>, Failure> {
        let doomed = Doomed::lock(&self.layer).await?;
        let kept = |why: &dyn std::fmt::Display| {
            Failure::new(format_args!("'{}' is kept: {why}", self.layer.display()))
        };
        if Self::of(&self.layer, chain).is_none() {
            return Err(kept(&"another program has changed it"));
        }
        let options = OpenOptions::new().secrets(secrets.clone());
        let overlay = Disk::open(FileHost, &self.overlay, &options).await?;
        // It is locked already.
        let options = options.locking(Locking::Unlocked).format(self.format);
        let layer = Disk::open(FileHost, &self.layer, &options).await?;
        let trusted = sabotage::is(Sabotage::TrustedNote);
        if !trusted && !has_all_of(&overlay, &layer).await? {
            let overlay = self.overlay.display();
            return Err(kept(&format_args!(
                "'{overlay}' does not have all of its data; delete it by hand if it is not needed"
            )));
        }
        layer.close().await?;
        // That the overlay has another backing file may not be durable yet.
        for file in overlay.layers().take(1).flat_map(|layer| layer.files()) {
            file.flush().await?;
        }
        let files = chain.iter().chain([&self.layer]).map(PathBuf::as_path);
        let users = Users::find(&directories(files, search))?;
        let user = doomed.delete(&users, None)?;
        overlay.close().await?;
        Ok(user)
    }
}

/// Whether the image reads as it would above the layer.
async fn has_all_of(image: &Disk<FileHost>, layer: &Disk<FileHost>) -> Result<bool, Failure> {
    let mut at = 0;
    while at < image.size() {
        let length = WINDOW.min(image.size() - at);
        for run in image.block_status(at, length, RUNS).await? {
            // What the image itself has hides the layer.
            if run.depth > 0 && !reads_alike(image, layer, at, run).await? {
                return Ok(false);
            }
            at += run.length;
        }
    }
    Ok(true)
}

async fn reads_alike(
    image: &Disk<FileHost>,
    layer: &Disk<FileHost>,
    offset: u64,
    run: BlockStatus,
) -> Result<bool, Failure> {
    let end = offset + run.length;
    let mut at = offset;
    while at < end.min(layer.size()) {
        let length = (end.min(layer.size()) - at).min(CHUNK);
        let below = layer.block_status(at, length, 1).await?;
        let Some(other) = below.first() else { return Ok(false) };
        let length = other.length.min(length);
        let same = run.zero && other.zero || {
            let there = place(image, &run).map(|(file, host)| (file, host + (at - offset)));
            there.is_some() && there == place(layer, other)
        };
        if !same {
            let one = image.read(at, IoBuf::zeroed(length as usize)).await?;
            let other = layer.read(at, IoBuf::zeroed(length as usize)).await?;
            if one[..] != other[..] {
                return Ok(false);
            }
        }
        at += length;
    }
    // Behind the layer's end are zeroes.
    while at < end && !run.zero {
        let length = (end - at).min(CHUNK);
        let found = image.read(at, IoBuf::zeroed(length as usize)).await?;
        if found.iter().any(|byte| *byte != 0) {
            return Ok(false);
        }
        at += length;
    }
    Ok(true)
}

/// The file and the offset in it where plain data lies.
fn place(disk: &Disk<FileHost>, run: &BlockStatus) -> Option<((u64, u64), u64)> {
    let (depth, host) = run.host?;
    let layer = disk.layers().nth(depth as usize)?;
    let file = layer.data().id();
    Some(((file.device, file.inode), host))
}
