//! `isobath convert`

mod target;

use crate::cache::CacheMode;
use crate::failure::{Failure, Outcome};
use crate::workers::{self, Progress};
use crate::{options, runtime, size};
use isobath_disk::{CopyOptions, Disk, DiskCopy, ImageFormat, OpenOptions};
use isobath_ring::Signals;
use isobath_storage::StorageExt;
use isobath_storage::file::FileHost;
use std::cell::Cell;
use std::io::Write;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use target::Target;

/// Copy disks to a new or existing image
///
/// Several disks are concatenated. Ranges known to be zero are not read. The copy is durable when the command returns.
/// A target created by the command is removed if the copy fails or is interrupted.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The format of the images to copy [default: detected]
    #[arg(short, long, value_name = "FMT", value_parser = options::format)]
    format: Option<ImageFormat>,
    /// The target's format
    #[arg(short = 'O', long, value_name = "FMT", default_value = "raw", value_parser = options::format)]
    output_format: ImageFormat,
    /// The target's backing file; only the active layer is copied, so its contents must equal those of the source's
    /// backing file
    #[arg(short = 'B', long, value_name = "FILE")]
    backing_file: Option<String>,
    /// The backing file's format
    #[arg(short = 'F', long, value_name = "FMT")]
    backing_format: Option<String>,
    /// Options for the target as NAME=VALUE, as in 'isobath create'
    #[arg(short, value_name = "OPTIONS")]
    options: Vec<String>,
    /// Compress the target
    #[arg(short, long)]
    compress: bool,
    /// Write to the target out of order
    #[arg(short = 'W', conflicts_with = "compress")]
    out_of_order: bool,
    /// Number of chunks to copy at once, 1 to 16
    #[arg(short = 'm', value_name = "N", default_value = "8", value_parser = tasks)]
    tasks: usize,
    /// Consecutive zero bytes that are not written as data; 0 writes everything
    #[arg(short = 'S', value_name = "SIZE", default_value = "4k", value_parser = sparse)]
    sparse: u64,
    /// Do not create the target: it exists and is large enough
    #[arg(short = 'n')]
    no_create: bool,
    /// Assume that the existing target reads as zeroes
    #[arg(long, requires = "no_create")]
    target_is_zero: bool,
    /// Cache mode for the target
    #[arg(short = 't', value_name = "MODE", default_value = "writeback")]
    cache: CacheMode,
    /// Cache mode for the images to copy
    #[arg(short = 'T', value_name = "MODE", default_value = "writeback")]
    source_cache: CacheMode,
    /// The internal snapshot to copy (not supported)
    #[arg(short = 'l', value_name = "SNAPSHOT")]
    snapshot: Option<String>,
    /// Show progress
    #[arg(short, long)]
    progress: bool,
    /// Print only errors
    #[arg(short, long)]
    quiet: bool,
    /// Take no locks on the images to copy and ignore other programs' locks
    #[arg(short = 'U', long)]
    force_share: bool,
    /// The images to copy, followed by the target
    #[arg(required = true, value_name = "IMAGE... TARGET")]
    images: Vec<PathBuf>,
}

fn tasks(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|count| (1..=16).contains(count)).ok_or_else(|| {
        "Invalid number of coroutines. Allowed number of coroutines is between 1 and 16".into()
    })
}

fn sparse(text: &str) -> Result<u64, String> {
    size::parse(text).ok().filter(|size| size.is_multiple_of(512) && *size <= 1 << 30).ok_or_else(
        || {
            "Invalid buffer size for sparse output specified. Valid sizes are multiples of 512 up \
             to 1073741824. Select 0 to disable sparse detection (fully allocates output)."
                .into()
        },
    )
}

pub(crate) fn run(args: &Args, _out: &mut dyn Write) -> Outcome {
    let Some((name, inputs)) = args.images.split_last() else {
        return Err(Failure::new("Must specify image file name"));
    };
    if inputs.is_empty() {
        return Err(Failure::new("Must specify the images to copy and the target"));
    }
    if let Some(snapshot) = &args.snapshot {
        return Err(Failure::new(format_args!(
            "cannot copy the internal snapshot '{snapshot}': reading internal snapshots is not \
             supported; use 'qemu-img convert -l'"
        )));
    }
    if args.compress && args.output_format == ImageFormat::Raw {
        return Err(Failure::new("Compression not supported for this file format"));
    }
    runtime::block_on(async || {
        let mut sources = Vec::new();
        for input in inputs {
            let locking = options::locking(args.force_share);
            let options = OpenOptions::new()
                .format(args.format)
                .locking(locking)
                .direct(args.source_cache.is_direct());
            sources.push(Arc::new(Disk::open(FileHost, input, &options).await?));
        }
        target::refuse_source(name, &sources).await?;
        let size = sources.iter().map(|source| source.size()).sum();
        let interrupted = Rc::new(Cell::new(None));
        let mut signals = Signals::new(&[libc::SIGINT, libc::SIGTERM])?;
        let target = if args.no_create {
            Target::existing(name, args).await?
        } else {
            Target::create(name, size, args).await?
        };
        let result = copy(args, sources, &target, &mut signals, &interrupted).await;
        match (&result, interrupted.get()) {
            (Ok(()), None) => Ok(0),
            (_, signal) => {
                let removed = target.remove().await;
                let Some(signal) = signal else { return result.map(|()| 0) };
                let what = if removed { "; the target was removed" } else { "" };
                let failure = Failure::new(format_args!("interrupted{what}"));
                Err(failure.with_code(128 + signal as u8))
            }
        }
    })
}

async fn copy(
    args: &Args,
    sources: Vec<Arc<Disk<FileHost>>>,
    target: &Target,
    signals: &mut Signals,
    interrupted: &Rc<Cell<Option<i32>>>,
) -> Result<(), Failure> {
    let backing = target.disk.layers().nth(1).map(|layer| layer.size());
    let fresh = !args.no_create && target.storage().extends_with_zeroes();
    let options = CopyOptions {
        in_order: !args.out_of_order,
        sparse: args.sparse,
        compressed: args.compress,
        target_is_zero: (fresh && backing.is_none()) || args.target_is_zero,
        backing: target.shares_backing.then_some(backing.unwrap_or(0)),
    };
    let copy = Arc::new(DiskCopy::new(sources, target.disk.clone(), options)?);
    let shown = args.progress && !args.quiet;
    if shown {
        copy.count_data().await?;
    }
    let progress = Progress::show(shown, {
        let copy = copy.clone();
        move || copy.progress()
    });
    let (make, stopping) = (copy.clone(), copy.clone());
    let make = move || {
        let copy = make.clone();
        async move { copy.work().await }
    };
    let work = workers::run(args.tasks, make);
    let results = workers::until_signal(work, signals, |signal| {
        interrupted.set(Some(signal));
        stopping.stop();
    })
    .await?;
    let failed = results.into_iter().find_map(Result::err);
    progress.end(failed.is_none() && interrupted.get().is_none());
    if let Some(error) = failed {
        return Err(error.into());
    }
    if interrupted.get().is_none() {
        target.disk.close().await?;
    }
    Ok(())
}
