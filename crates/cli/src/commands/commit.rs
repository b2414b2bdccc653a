//! `isobath commit`

use crate::cache::CacheMode;
use crate::failure::{Failure, Outcome};
use crate::host::images;
use crate::image_name::Naming;
use crate::options::NamedFormat;
use crate::{block_job, chain_files, options, runtime, size};
use isobath_disk::{LayerIndex, LiveDisk};
use isobath_image::sabotage::{self, Sabotage};
use isobath_jobs::CommitOptions;
use isobath_ring::Signals;
use isobath_storage::StorageExt;
use std::io::Write;
use std::path::PathBuf;

/// Commit an image's data to its backing file
///
/// The backing file grows if it is smaller than the disk; a larger one keeps its size. Then the image is emptied. With
/// a base further down the chain, the data of all images above it is committed in one pass, and the image is not
/// emptied; the images in between become invalid.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The image's format [default: detected]
    #[arg(short, long, value_name = "FMT", value_parser = options::named_format)]
    format: Option<NamedFormat>,
    /// The image in the backing chain to commit to [default: the backing file]
    #[arg(short, long, value_name = "BASE")]
    base: Option<String>,
    /// Do not empty the image
    #[arg(short, long)]
    drop: bool,
    /// Cache mode for the images
    #[arg(short = 't', long = "cache", value_name = "MODE", default_value = "writeback")]
    #[arg(value_parser = CacheMode::parse)]
    cache: CacheMode,
    /// Speed limit in bytes per second
    #[arg(short, long, value_name = "RATE", value_parser = size::parse)]
    rate: Option<u64>,
    /// Show progress
    #[arg(short, long)]
    progress: bool,
    /// Print only errors
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    naming: Naming,
    /// The image
    image: PathBuf,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Outcome {
    let chosen = args.naming.instead.has_backing_file() && args.base.is_none();
    if args.naming.trusting.untrusted && !chosen {
        return Err(Failure::usage(
            "an untrusted image does not choose the image that is written to: with --untrusted, 'commit' takes that as \
             --backing-file, without -b",
        ));
    }
    let image = args.naming.image(&args.image, args.format)?;
    let options = image.writable(args.cache.is_direct())?;
    runtime::block_on(async || {
        let mut signals = Signals::new(&[libc::SIGINT, libc::SIGTERM])?;
        let live = LiveDisk::open(images().clone(), &image.path, &options).await;
        let mut live = live.map_err(|error| image.failed(&error))?;
        let layers = live.layers();
        let Some(below) = u16::try_from(layers.len()).ok().and_then(|depth| depth.checked_sub(2))
        else {
            return Err(Failure::new("Image does not have a backing file"));
        };
        let base = match &args.base {
            Some(name) => chain_files::required(&layers, name, &image.path)?,
            None => LayerIndex::new(below),
        };
        let chosen = layers.len() - 1 - usize::from(base.get());
        let commit = CommitOptions {
            base: layers.get(chosen).map(|layer| layer.storage().id()),
            keep_chain: true,
            ..CommitOptions::default()
        };
        let job = block_job::options("commit", args.rate.unwrap_or(0));
        let started = isobath_jobs::commit(&live, commit, job);
        let run = block_job::run(started, &mut signals, args.progress && !args.quiet);
        let mut done = Box::pin(run).await;
        if done.is_ok() && args.base.is_none() && !args.drop {
            // The image has been open and locked since before the copying, so no other program has written to it.
            if sabotage::is(Sabotage::EmptiedLater) {
                live.close().await?;
                drop((layers, live));
                live = LiveDisk::open(images().clone(), &image.path, &options).await?;
            }
            done = live.make_empty().await.map_err(Failure::from);
        }
        live.close().await?;
        done
    })?;
    if !args.quiet {
        writeln!(out, "Image committed.")?;
    }
    Ok(0)
}
