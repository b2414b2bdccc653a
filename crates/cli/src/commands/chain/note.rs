//! A note in an extended attribute of the file of a layer that is being merged.

use super::users::identity;
use isobath_disk::ImageFormat;
use rustix::fs::{XattrFlags, fremovexattr, fsetxattr, getxattr, removexattr};
use std::fs::{self, File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

const ATTRIBUTE: &str = "user.isobath.merge";

/// Durably records in a layer's open file that the overlay is taking its data. On a file system without extended
/// attributes, a killed command leaves the file behind.
pub(super) fn leave(layer: &File, name: &Path, format: ImageFormat, overlay: &Path) {
    let noted = || {
        let (own, above) = (fingerprint_of(&layer.metadata()?), of_overlay(overlay)?);
        let value = format!("{} {own} {above}", format.name());
        fsetxattr(layer, ATTRIBUTE, value.as_bytes(), XattrFlags::empty())?;
        layer.sync_all()
    };
    if let Err(error) = noted() {
        let (layer, error): (_, std::io::Error) = (name.display(), error);
        tracing::debug!("cannot record in '{layer}' that it is being merged: {error}");
    }
}

/// Removes the note from a file that is to be kept.
pub(super) fn forget(layer: &Path) {
    // There may be no note.
    let _ = removexattr(layer, ATTRIBUTE);
}

/// Removes the note from an open file.
pub(super) fn forget_in(layer: &File) {
    let _ = fremovexattr(layer, ATTRIBUTE);
}

/// Identifies the file in its current state: it differs for other files, and for this file after a write.
pub(super) fn fingerprint(layer: &Path) -> std::io::Result<String> {
    fs::metadata(layer).map(|file| fingerprint_of(&file))
}

fn fingerprint_of(file: &Metadata) -> String {
    let written = (file.mtime(), file.mtime_nsec());
    format!("{}:{}:{}:{}.{}", file.dev(), file.ino(), file.len(), written.0, written.1)
}

pub(super) fn of_overlay(overlay: &Path) -> std::io::Result<String> {
    identity(overlay).map(|(device, inode)| format!("{device}:{inode}"))
}

/// The contents of a note.
pub(super) struct Note {
    pub(super) format: ImageFormat,
    /// The layer's [fingerprint], by which a note is valid for this file only.
    pub(super) own: String,
    /// Identifies the overlay; see [`of_overlay`].
    pub(super) above: String,
}

impl Note {
    /// The note in a file; `None` if there is none, or it is malformed.
    pub(super) fn read(layer: &Path) -> Option<Self> {
        let mut value = [0; 256];
        let length = getxattr(layer, ATTRIBUTE, &mut value).ok()?;
        let text = std::str::from_utf8(value.get(..length)?).ok()?;
        let mut words = text.split(' ');
        let (format, own, above) = (words.next()?, words.next()?, words.next()?);
        let format = ImageFormat::from_name(format)?;
        Some(Self { format, own: own.to_owned(), above: above.to_owned() })
    }
}
