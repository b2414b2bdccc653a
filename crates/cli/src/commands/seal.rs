//! `isobath seal`

use crate::failure::Outcome;
use crate::host::{images, only_files};
use crate::options;
use crate::runtime;
use isobath_disk::{Disk, ImageFormat, OpenOptions, Secrets};
use std::io::Write;
use std::path::PathBuf;

/// Recover images that were not closed, and turn them into plain qcow2 images
///
/// Replays what a crashed or killed server left in their journals and, after 'serve --metadata embedded', in their
/// data. Images that were closed are left unchanged. Afterwards other programs can use the images.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The images' format [default: detected]
    #[arg(short, long, value_name = "FMT", value_parser = options::format)]
    format: Option<ImageFormat>,
    /// The images
    #[arg(required = true, value_name = "IMAGE")]
    images: Vec<PathBuf>,
}

pub(crate) fn run(args: &Args, _: &mut dyn Write) -> Outcome {
    let options = OpenOptions::new()
        .writable(true)
        .format(args.format)
        .backing(false)
        .secrets(Secrets::unneeded());
    runtime::block_on(async || {
        for image in &args.images {
            only_files(image, "'seal'")?;
            Disk::open(images().clone(), image, &options).await?.close().await?;
        }
        Ok(0)
    })
}
