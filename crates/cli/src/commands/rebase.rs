//! `isobath rebase`

use crate::cache::CacheMode;
use crate::failure::{Failure, Outcome};
use crate::workers::{self, Progress};
use crate::{options, runtime};
use isobath_disk::{Disk, ImageFormat, OpenOptions, Rebase};
use isobath_ring::Signals;
use isobath_storage::Host;
use isobath_storage::file::FileHost;
use std::cell::Cell;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

/// Tasks that compare and copy at once.
const TASKS: usize = 8;

/// Change an image's backing file
///
/// The disk reads as before: what the old and the new backing file have in common is found from their tables, the rest
/// is compared, and what differs is copied to the image first. With -u, only the name in the header changes, which is
/// for a backing file that was moved.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The image's format [default: detected]
    #[arg(short, long, value_name = "FMT", value_parser = options::format)]
    format: Option<ImageFormat>,
    /// The new backing file; an empty name leaves the image without one
    #[arg(short, value_name = "FILE")]
    backing_file: Option<String>,
    /// The new backing file's format
    #[arg(short = 'F', value_name = "FMT")]
    backing_format: Option<String>,
    /// Change only the name, without looking at either backing file
    #[arg(short)]
    unsafe_mode: bool,
    /// Compress what is copied
    #[arg(short)]
    compress: bool,
    /// Cache mode for the image
    #[arg(short = 't', value_name = "MODE", default_value = "writeback")]
    cache: CacheMode,
    /// Cache mode for the backing files
    #[arg(short = 'T', value_name = "MODE", default_value = "writeback")]
    source_cache: CacheMode,
    /// Take no locks on the backing files and ignore other programs' locks
    #[arg(short = 'U', long)]
    force_share: bool,
    /// Show progress
    #[arg(short)]
    progress: bool,
    /// Print only errors
    #[arg(short)]
    quiet: bool,
    /// The image
    image: PathBuf,
}

pub(crate) fn run(args: &Args, _out: &mut dyn Write) -> Outcome {
    if args.backing_file.is_none() && !args.unsafe_mode {
        return Err(Failure::new("Must specify backing file (-b) or use unsafe mode (-u)"));
    }
    if args.compress && args.unsafe_mode {
        return Err(Failure::new(
            "Cannot use both compression and unsafe mode (-u): nothing is copied in that mode",
        ));
    }
    let name = args.backing_file.as_deref().unwrap_or_default();
    let backing = match (name, &args.backing_format) {
        ("", _) => None,
        (name, Some(format)) => Some((name, format.as_str())),
        // Whoever guesses the format of a raw disk lets its guest choose what is opened.
        (name, None) => {
            return Err(Failure::new(format_args!(
                "Could not change the backing file to '{}': backing format must be specified",
                options::printable(name)
            )));
        }
    };
    let options = OpenOptions::new()
        .writable(true)
        .format(args.format)
        .direct(args.cache.is_direct())
        .backing(!args.unsafe_mode);
    runtime::block_on(async || {
        let mut signals = Signals::new(&[libc::SIGINT, libc::SIGTERM])?;
        let disk = Arc::new(Disk::open(FileHost, &args.image, &options).await?);
        if disk.layers().next().is_none_or(|layer| layer.header().is_none()) {
            return Err(Failure::new(format_args!(
                "The format of '{}' does not support backing files",
                args.image.display()
            )));
        }
        if args.unsafe_mode {
            disk.set_backing(backing).await?;
            disk.close().await?;
            return Ok(());
        }
        let below = match backing {
            Some((name, format)) => Some(open_below(args, name, format).await?),
            None => None,
        };
        let rebase = Arc::new(Rebase::new(Arc::clone(&disk), below, args.compress));
        let done = copy(args, &rebase, &mut signals).await;
        if done.is_ok() {
            rebase.finish(backing).await?;
        }
        disk.close().await?;
        done
    })?;
    Ok(0)
}

/// Opens the new backing file.
async fn open_below(args: &Args, name: &str, format: &str) -> Result<Arc<Disk<FileHost>>, Failure> {
    let path = FileHost.resolve(&args.image, name);
    let format = options::format(format).map_err(Failure::new)?;
    let options = OpenOptions::new()
        .format(format)
        .locking(options::locking(args.force_share))
        .direct(args.source_cache.is_direct());
    let below = Disk::open(FileHost, &path, &options).await;
    let below = below.map_err(|error| {
        let name = options::printable(name);
        Failure::new(format_args!("Could not open new backing file '{name}': {error}"))
    });
    Ok(Arc::new(below?))
}

async fn copy(
    args: &Args,
    rebase: &Arc<Rebase<FileHost>>,
    signals: &mut Signals,
) -> Result<(), Failure> {
    let progress = Progress::show(args.progress && !args.quiet, {
        let rebase = Arc::clone(rebase);
        move || rebase.progress()
    });
    let make = Arc::clone(rebase);
    let make = move || {
        let rebase = Arc::clone(&make);
        async move { rebase.work().await }
    };
    let interrupted = Cell::new(None);
    let results = workers::until_signal(workers::run(TASKS, make), signals, |signal| {
        interrupted.set(Some(signal));
        rebase.stop();
    })
    .await?;
    let failed = results.into_iter().find_map(Result::err);
    progress.end(failed.is_none() && interrupted.get().is_none());
    match (failed, interrupted.get()) {
        (Some(error), _) => Err(error.into()),
        (None, Some(signal)) => {
            let failure = Failure::new("interrupted; the old backing file stays");
            Err(failure.with_code(128 + signal as u8))
        }
        (None, None) => Ok(()),
    }
}
