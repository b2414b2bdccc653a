//! Detection of an image's format.

use crate::layer::ImageFormat;
use crate::{DiskError, Result};
use isobath_formats::Format;
use isobath_qcow2::probe::{Foreign, Probed, probe};
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
    let foreign = match probe(start, name) {
        Probed::Qcow2 => return Ok(ImageFormat::Qcow2),
        Probed::Raw => return Ok(ImageFormat::Raw),
        Probed::Foreign(Foreign::Luks) => return Ok(ImageFormat::Luks),
        Probed::Foreign(foreign) => foreign,
    };
    match Format::detected(foreign) {
        Some(format) => Ok(ImageFormat::Foreign(format)),
        None => Err(DiskError::Refused {
            image: name.to_owned(),
            reason: format!(
                "it is {foreign}, which is not supported. Convert it with 'qemu-img \
                 convert -f {} -O qcow2'; if it is in fact a raw disk, use '-f raw', or for a \
                 backing file 'qemu-img rebase -u -F raw' on the image above it",
                foreign.name()
            ),
        }),
    }
}
