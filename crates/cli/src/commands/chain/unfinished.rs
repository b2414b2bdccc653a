//! Layers that were merged, but whose files were not deleted because the command was killed. Running it again deletes
//! them.
//!
//! The evidence is a note in an extended attribute of the layer's file. It names the overlay that takes the data, and
//! identifies the file, its size and the time of its last write, so the note is not valid in a copy or after another
//! write. Comparing what the overlay reads then proves that the layer can be deleted.

use super::doomed::Doomed;
use super::note::{Note, fingerprint, of_overlay};
use super::users::{Users, directories, identity};
use crate::failure::Failure;
use crate::host::{ImageHost, images};
use isobath_disk::{BlockStatus, Disk, ImageFormat, OpenOptions, Secrets};
use isobath_image::sabotage::{self, Sabotage};
use isobath_storage::{IoBuf, Locking, Storage, StorageExt};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Maximum guest bytes per block status query and per read, and maximum runs per query.
const WINDOW: u64 = 1 << 30;
const CHUNK: u64 = 1 << 20;
const RUNS: usize = 4096;

/// The file of a layer whose data an image of a chain has taken.
pub(super) struct Unfinished {
    pub(super) layer: PathBuf,
    format: ImageFormat,
    overlay: PathBuf,
}

impl Unfinished {
    /// The file, if its note is valid and names an image of `chain`, and it is not in `chain` and has no other link.
    pub(super) fn of(layer: &Path, chain: &[PathBuf]) -> Option<Self> {
        let Note { format, own, above } = Note::read(layer)?;
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

    /// Deletes the file, or returns an image that needs it. `search` lists other directories with images.
    ///
    /// # Errors
    /// If the overlay lacks some of the layer's data, the layer has internal snapshots, or a program uses one of them.
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
        let overlay = Disk::open(images().clone(), &self.overlay, &options).await?;
        // It is locked already.
        let options = options.locking(Locking::Unlocked).format(self.format);
        let layer = Disk::open(images().clone(), &self.layer, &options).await?;
        let trusted = sabotage::is(Sabotage::TrustedNote);
        if !trusted && !has_all_of(&overlay, &layer).await? {
            let (overlay, layer) = (self.overlay.display(), self.layer.display());
            return Err(kept(&format_args!(
                "'{overlay}' lacks some of the layer's data; delete '{layer}' manually if it is \
                 not needed"
            )));
        }
        layer.close().await?;
        // The change of the overlay's backing file may not be durable yet.
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

/// Whether the image reads as it would with the layer below it.
async fn has_all_of(image: &Disk<ImageHost>, layer: &Disk<ImageHost>) -> Result<bool, Failure> {
    let mut at = 0;
    while at < image.size() {
        let length = WINDOW.min(image.size() - at);
        for run in image.block_status(at, length, RUNS).await? {
            // The image's own data hides the layer.
            if run.depth > 0 && !reads_alike(image, layer, at, run).await? {
                return Ok(false);
            }
            at += run.length;
        }
    }
    Ok(true)
}

async fn reads_alike(
    image: &Disk<ImageHost>,
    layer: &Disk<ImageHost>,
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
    // Past its end, the layer reads as zeroes.
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

/// The file that holds plain data, and the offset in it.
fn place(disk: &Disk<ImageHost>, run: &BlockStatus) -> Option<((u64, u64), u64)> {
    let (depth, host) = run.host?;
    let layer = disk.layers().nth(depth as usize)?;
    let file = layer.data().id();
    Some(((file.device, file.inode), host))
}
