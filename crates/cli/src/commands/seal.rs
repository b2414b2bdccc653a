//! `isobath seal`

use crate::failure::Outcome;
use crate::options;
use crate::runtime;
use isobath_disk::{Disk, ImageFormat, OpenOptions};
use isobath_storage::file::FileHost;
use std::io::Write;
use std::path::PathBuf;

/// Make plain qcow2 images of images that were not closed
///
/// Replays what a server that ended without closing them has left in their journals and, with 'serve
/// --metadata embedded', in their data. Images that were closed stay as they are. Other programs can use
/// the images afterwards.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The images' format; found out unless given
    #[arg(short, long, value_name = "FMT", value_parser = options::format)]
    format: Option<ImageFormat>,
    /// The images
    #[arg(required = true, value_name = "IMAGE")]
    images: Vec<PathBuf>,
}

pub(crate) fn run(args: &Args, _: &mut dyn Write) -> Outcome {
    let options = OpenOptions {
        writable: true,
        format: args.format,
        backing: false,
        ..OpenOptions::default()
    };
    runtime::block_on(async || {
        for image in &args.images {
            Disk::open(FileHost, image, &options).await?.close().await?;
        }
        Ok(0)
    })
}
