//! Detection of an image's format.

use crate::layer::ImageFormat;
use crate::{DiskError, Result};
use isobath_qcow2::probe::{Probed, probe};
use std::path::Path;

/// The format of the image `name`, of which `start` is the beginning: the one that is named, or else the one detected.
///
/// # Errors
/// If none is named and the image has an unsupported format: opened as raw it would show its container instead of the
/// disk.
pub fn format_of(name: &Path, named: Option<ImageFormat>, start: &[u8]) -> Result<ImageFormat> {
    if let Some(format) = named {
        return Ok(format);
    }
    match probe(start, name) {
        Probed::Qcow2 => Ok(ImageFormat::Qcow2),
        Probed::Raw => Ok(ImageFormat::Raw),
        Probed::Foreign(format) => Err(DiskError::Refused {
            image: name.to_owned(),
            reason: format!(
                "it is {format}; only qcow2 and raw are supported. Convert it with 'qemu-img \
                 convert -f {} -O qcow2'; if it is in fact a raw disk, use '-f raw', or for a \
                 backing file 'qemu-img rebase -u -F raw' on the image above it",
                format.name()
            ),
        }),
    }
}
