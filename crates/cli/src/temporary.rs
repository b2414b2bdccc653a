//! Temporary overlays, for writes that are discarded in the end.

use crate::failure::Failure;
use crate::host::{ImageHost, images};
use crate::image_name::Image;
use isobath_disk::{Disk, ImageFormat, NewDisk, OpenOptions, create};
use isobath_storage::Locking;
use std::path::PathBuf;

/// Creates and opens an overlay that nobody else sees: its file is unlinked once it is open. Also returns the options
/// that it was opened with.
pub(crate) async fn overlay(
    image: &Image,
    format: ImageFormat,
    size: u64,
    direct: bool,
    locking: Locking,
) -> Result<(Disk<ImageHost>, OpenOptions), Failure> {
    if image.has_given_data_file() {
        return Err(Failure::new(
            "a temporary overlay is not possible if the options name the image's data file",
        ));
    }
    let directory = std::env::var_os("TMPDIR").map_or_else(|| "/var/tmp".into(), PathBuf::from);
    let named = |what: &str, error: std::io::Error| {
        let cause = isobath_storage::cause(&error);
        Failure::new(format_args!("cannot {what} in '{}': {cause}", directory.display()))
    };
    let file = tempfile::Builder::new().prefix("isobath-").suffix(".qcow2").tempfile_in(&directory);
    let file = file.map_err(|error| named("create a temporary file", error))?.into_temp_path();
    // The image is opened by the options, since not every image name is allowed in a header.
    let mut new = NewDisk::overlay("/dev/null", "raw").open_backing(false).index(false);
    new.size = Some(size);
    create(images(), &file, &new).await?;
    let options = image.overlay_options(format, direct, locking);
    let disk = Disk::open(images().clone(), &file, &options).await?;
    file.close().map_err(|error| named("remove a temporary file", error))?;
    Ok((disk, options))
}
