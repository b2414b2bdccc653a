//! `isobath convert`

mod bitmaps;
mod foreign;
mod target;

use crate::cache::CacheMode;
use crate::commands::create;
use crate::failure::{Failure, Outcome};
use crate::host::{ImageHost, only_files};
use crate::image_name::{Image, Naming, could_not_open, is_of_kind};
use crate::options::NamedFormat;
use crate::program::NotUnderLinks;
use crate::workers::{self, Progress};
use crate::{messages, options, runtime, size};
use isobath_disk::copy::total_size;
use isobath_disk::{CopyOptions, Disk, DiskCopy, ImageFormat, SnapshotChoice};
use isobath_ring::Signals;
use isobath_storage::StorageExt;
use std::cell::Cell;
use std::io::Write;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use target::Target;
pub(super) use target::{files_of, refuse_source};

/// Copy disks to a new or existing image
///
/// Several disks are concatenated. Ranges known to be zero are not read. The copy is durable when the command returns.
/// A target created by the command is removed if the copy fails or is interrupted.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The format of the images to copy [default: detected]
    #[arg(short, long = "source-format", alias = "format", value_name = "FMT", value_parser = options::named_format)]
    format: Option<NamedFormat>,
    /// The target's format [default: raw]
    #[arg(short = 'O', long = "target-format", alias = "output-format", value_name = "FMT")]
    #[arg(value_parser = options::named_format)]
    output_format: Option<NamedFormat>,
    /// The target's backing file; only the active layer is copied, so its contents must equal those of the source's
    /// backing file
    #[arg(short = 'B', long = "backing", value_name = "FILE")]
    backing_file: Option<String>,
    /// The format of the target's backing file
    #[arg(short = 'F', long, value_name = "FMT")]
    backing_format: Option<String>,
    /// Options for the target as NAME=VALUE, as in 'isobath create'
    #[arg(short, long = "target-options", value_name = "OPTIONS", value_parser = options::list)]
    options: Vec<String>,
    /// Compress the target
    #[arg(short, long)]
    compress: bool,
    /// Write to the target out of order
    #[arg(short = 'W', long = "oob-writes")]
    out_of_order: bool,
    /// Number of chunks to copy at once, 1 to 16
    #[arg(short = 'm', long = "parallel", value_name = "N", default_value = "8", value_parser = tasks)]
    tasks: usize,
    /// Minimum number of consecutive zero bytes that are not written as data; 0 writes everything
    #[arg(short = 'S', long = "sparse-size", value_name = "SIZE", value_parser = sparse)]
    sparse: Option<u64>,
    /// Do not create the target; it must exist and be large enough
    #[arg(short = 'n', long)]
    no_create: bool,
    /// Assume that the existing target reads as zeroes
    #[arg(long)]
    target_is_zero: bool,
    /// Treat the target's name as QEMU options; requires -n
    #[arg(long)]
    target_image_opts: bool,
    /// Also copy the persistent bitmaps
    #[arg(long)]
    bitmaps: bool,
    /// With --bitmaps: skip inconsistent bitmaps
    #[arg(long)]
    skip_broken_bitmaps: bool,
    /// Write zeroes for data that cannot be read, with a warning, and continue
    #[arg(long)]
    salvage: bool,
    /// Accepted for compatibility; data is always shared or copied by the host where possible
    #[arg(short = 'C', long = "copy-range-offloading")]
    copy_offloading: bool,
    /// Speed limit in bytes per second
    #[arg(short, long, value_name = "RATE", value_parser = rate)]
    rate: Option<u64>,
    /// Cache mode for the target
    #[arg(short = 't', long = "target-cache", value_name = "MODE", default_value = "writeback")]
    #[arg(value_parser = CacheMode::parse)]
    cache: CacheMode,
    /// Cache mode for the images to copy
    #[arg(short = 'T', long, value_name = "MODE", default_value = "writeback", value_parser = CacheMode::parse_source)]
    source_cache: CacheMode,
    /// The internal snapshot to copy: its ID or name, or snapshot.id=ID,snapshot.name=NAME
    #[arg(short = 'l', long = "source-snapshot", value_name = "SNAPSHOT", value_parser = options::snapshot)]
    snapshot: Option<SnapshotChoice>,
    /// Show progress
    #[arg(short, long)]
    progress: bool,
    /// Print only errors
    #[arg(short, long)]
    quiet: bool,
    /// Read the images to copy even while other programs write to them
    #[arg(short = 'U', long)]
    force_share: bool,
    #[command(flatten)]
    naming: Naming,
    /// The images to copy, followed by the target
    #[arg(value_name = "IMAGE... TARGET")]
    images: Vec<PathBuf>,
}

impl Args {
    fn output_format(&self) -> ImageFormat {
        self.output_format.map_or(ImageFormat::Raw, |target| target.format)
    }

    /// Refuses conflicting options, in QEMU's words.
    fn check(&self) -> Result<(), Failure> {
        let has =
            |wrong: bool, message: &str| if wrong { Err(Failure::new(message)) } else { Ok(()) };
        let multiple = self.images.len() > 2;
        has(
            self.copy_offloading && self.compress,
            "Cannot enable copy offloading when -c is used",
        )?;
        has(
            self.copy_offloading && self.sparse.is_some(),
            "Cannot enable copy offloading when -S is used",
        )?;
        has(self.target_is_zero && !self.no_create, "--target-is-zero requires use of -n flag")?;
        has(
            self.target_is_zero && self.backing_file.is_some(),
            "Cannot use --target-is-zero when the destination image has a backing file",
        )?;
        has(
            self.target_image_opts && !self.no_create,
            "--target-image-opts requires use of -n flag",
        )?;
        has(
            self.skip_broken_bitmaps && !self.bitmaps,
            "Use of --skip-broken-bitmaps requires --bitmaps",
        )?;
        has(
            self.compress && matches!(self.output_format(), ImageFormat::Raw | ImageFormat::Luks),
            "Compression not supported for this file format",
        )?;
        has(self.snapshot.is_some() && multiple, "No support for concatenating multiple snapshot")?;
        has(
            self.backing_file.is_some() && multiple,
            "Having a backing file for the target makes no sense when concatenating multiple input \
             images",
        )?;
        has(self.bitmaps && multiple, "Copying bitmaps only possible with single source")?;
        let plain = self.output_format();
        let plain =
            Some(plain).filter(|format| matches!(format, ImageFormat::Raw | ImageFormat::Luks));
        if let Some(format) = plain.filter(|_| self.bitmaps && !self.target_image_opts) {
            let name = format.name();
            let reason = format_args!("Format driver '{name}' does not support bitmaps");
            return Err(Failure::new(reason));
        }
        match self.output_format() {
            ImageFormat::Foreign(format) => foreign::check(self, format),
            _ => Ok(()),
        }
    }
}

fn rate(text: &str) -> Result<u64, String> {
    size::parse(text).map_err(|_| size::explained("rate limit"))
}

fn tasks(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|count| (1..=16).contains(count)).ok_or_else(|| {
        "Invalid number of coroutines. Allowed number of coroutines is between 1 and 16".into()
    })
}

fn sparse(text: &str) -> Result<u64, String> {
    size::parse(text).ok().filter(|size| size.is_multiple_of(512) && *size <= 16 << 20).ok_or_else(
        || {
            "Invalid buffer size for sparse output specified. Valid sizes are multiples of 512 up \
             to 16777216. Select 0 to disable sparse detection (fully allocates output)."
                .into()
        },
    )
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Outcome {
    let pairs = options::parse(&args.options);
    if pairs.iter().any(|(name, _)| name == "help" || name == "?") {
        return match args.output_format() {
            ImageFormat::Foreign(format) => {
                crate::commands::foreign::help(format, args.images.len() > 1, out)
            }
            format => create::help(format, args.images.len() > 1, out),
        };
    }
    let Some((name, inputs)) = args.images.split_last().filter(|(_, inputs)| !inputs.is_empty())
    else {
        return Err(Failure::new("Must specify image file name"));
    };
    args.check()?;
    if args.no_create && !args.options.is_empty() {
        return Err(Failure::new("-o has no effect when skipping image creation"));
    }
    if inputs.len() > 1 {
        args.naming.check_for_several()?;
    }
    let inputs = inputs.iter().map(|input| args.naming.image(input, args.format));
    let inputs: Vec<Image> = inputs.collect::<Result<_, _>>()?;
    let target_naming = Naming {
        image_opts: args.target_image_opts,
        trusting: NotUnderLinks::default(),
        instead: NotUnderLinks::default(),
        ..args.naming.clone()
    };
    let device = args.output_format.and_then(NamedFormat::device);
    let on_device = if args.no_create {
        None
    } else {
        let mut new = Naming::target(name).map_err(Failure::new)?;
        if let Some(driver @ "file") = args.output_format.and_then(|format| format.protocol) {
            is_of_kind(driver, &new.path.to_string_lossy())
                .map_err(|reason| could_not_open(&name.to_string_lossy(), reason))?;
        }
        new.device = device.or(new.device);
        let checked = match args.output_format() {
            ImageFormat::Foreign(_) => new.check_file(),
            _ => new.check(),
        };
        checked.map_err(|reason| {
            let format = device.unwrap_or(args.output_format().name());
            let what = format!("error while converting {format}");
            Failure::new(reason).context(what).context(name.display())
        })?;
        new.device
    };
    if !args.no_create && args.output_format.is_none() && !args.quiet {
        messages::note_raw(name, "-O");
    }
    let format = args.output_format.filter(|_| args.no_create);
    let mut name = target_naming.file_image(name, format)?;
    name.must_be_on(device)?;
    let name = &name;
    runtime::block_on(async || {
        let mut sources = Vec::new();
        for input in &inputs {
            let locking = options::locking(args.force_share);
            let direct = args.source_cache.is_direct();
            let options = input.options(direct, locking).snapshot(args.snapshot.clone());
            sources.push(input.open(&options).await?);
        }
        let bitmaps = match inputs.first().filter(|_| args.bitmaps) {
            Some(input) => bitmaps::of(input, args).await?,
            None => Vec::new(),
        };
        refuse_source(&name.path, &sources).await?;
        let sizes: Vec<u64> = sources.iter().map(|source| source.size()).collect();
        let size = total_size(&sizes).map_err(|too_large| {
            let input = args.images.get(too_large.index).map(|name| name.to_string_lossy());
            let name = options::printable(&input.unwrap_or_default());
            Failure::new(format_args!("'{name}': {too_large}"))
        })?;
        let interrupted = Rc::new(Cell::new(None));
        let mut signals = Signals::new(&[libc::SIGINT, libc::SIGTERM])?;
        if let ImageFormat::Foreign(format) = args.output_format() {
            only_files(&name.path, "writing this format")?;
            let new = foreign::options(args, format)?;
            return foreign::convert(args, &sources, &name.path, &new, &mut signals).await;
        }
        let target = if args.no_create {
            Target::existing(name, &sources, args).await?
        } else {
            Target::create(name, size, &sources, on_device.is_some(), args).await?
        };
        let result = copy(args, sources, &target, &mut signals, &interrupted).await;
        match (&result, interrupted.get()) {
            (Ok(()), None) => {
                if !bitmaps.is_empty() {
                    target.let_in().await?;
                    bitmaps::copy(bitmaps, name).await?;
                }
                Ok(0)
            }
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
    sources: Vec<Arc<Disk<ImageHost>>>,
    target: &Target,
    signals: &mut Signals,
    interrupted: &Rc<Cell<Option<i32>>>,
) -> Result<(), Failure> {
    let backing = target.disk.layers().nth(1).map(|layer| layer.size());
    let fresh = !args.no_create && target.storage().extends_with_zeroes();
    let options = CopyOptions {
        in_order: !args.out_of_order,
        sparse: args.sparse.unwrap_or(4096),
        salvage: args.salvage,
        speed: args.rate.unwrap_or(0),
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
