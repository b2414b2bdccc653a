//! `isobath snapshot`

use super::info;
use crate::failure::Outcome;
use crate::options;
use isobath_disk::ImageFormat;
use std::io::Write;
use std::path::PathBuf;

/// List an image's internal snapshots
#[derive(clap::Args)]
pub(crate) struct Args {
    /// List the snapshots (the default)
    #[arg(short)]
    list: bool,
    /// The image's format [default: detected]
    #[arg(short, long, value_name = "FMT", value_parser = options::format)]
    format: Option<ImageFormat>,
    /// Take no lock on the image and ignore other programs' locks
    #[arg(short = 'U', long)]
    force_share: bool,
    /// The image
    image: PathBuf,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Outcome {
    let locking = options::locking(args.force_share);
    for image in info::read(&args.image, args.format, locking, false)? {
        info::snapshot_list(out, &image.snapshots)?;
    }
    Ok(0)
}
