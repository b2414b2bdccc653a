//! `isobath rebase`

use crate::cache::CacheMode;
use crate::failure::{Failure, Outcome};
use crate::host::{ImageHost, images, is_export};
use crate::image_name::{Naming, is_of_kind};
use crate::options::NamedFormat;
use crate::workers::{self, Progress};
use crate::{options, runtime};
use isobath_disk::{Disk, ImageFormat, OpenOptions, Rebase, Secrets, Trust};
use isobath_image::name::{backing_format as described_format, name_in_header};
use isobath_image::sabotage::{self, Sabotage};
use isobath_ring::Signals;
use isobath_storage::{Host, Locking, StorageExt};
use std::cell::Cell;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Tasks that compare and copy at once.
const TASKS: usize = 8;

/// The most bytes of a backing file's name in a header.
const MOST_NAME: usize = 1023;
/// QEMU's drivers, which it accepts as the format of a backing file, besides the formats that Isobath has.
const DRIVERS: &[&str] = &[
    "blkdebug",
    "blklogwrites",
    "blkverify",
    "bochs",
    "cloop",
    "compress",
    "copy-before-write",
    "copy-on-read",
    "dmg",
    "ftp",
    "ftps",
    "gluster",
    "http",
    "https",
    "io_uring",
    "iscsi",
    "iser",
    "nbd",
    "nfs",
    "null-aio",
    "null-co",
    "nvme",
    "nvme-io_uring",
    "parallels",
    "preallocate",
    "qcow",
    "quorum",
    "rbd",
    "replication",
    "snapshot-access",
    "ssh",
    "throttle",
    "virtio-blk-vfio-pci",
    "virtio-blk-vhost-user",
    "virtio-blk-vhost-vdpa",
    "vvfat",
];

/// Change an image's backing file
///
/// The disk's contents do not change: data that differs between the old and the new backing file is first copied to the
/// image. What the two share is found from their tables; only the rest is read and compared. With -u, only the name in
/// the header changes, as for a backing file that was moved.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The image's format [default: detected]
    #[arg(short, long, value_name = "FMT", value_parser = options::named_format)]
    format: Option<NamedFormat>,
    /// The new backing file; an empty name removes the backing file
    #[arg(short, long = "backing", value_name = "FILE")]
    backing_file: Option<String>,
    /// The new backing file's format
    #[arg(short = 'F', long, value_name = "FMT")]
    backing_format: Option<String>,
    /// Change only the name in the header, without opening either backing file
    #[arg(short, long = "backing-unsafe")]
    unsafe_mode: bool,
    /// Compress the copied data
    #[arg(short, long)]
    compress: bool,
    /// Cache mode for the image
    #[arg(short = 't', long = "cache", value_name = "MODE", default_value = "writeback")]
    #[arg(value_parser = CacheMode::parse)]
    cache: CacheMode,
    /// Cache mode for the backing files
    #[arg(short = 'T', long = "backing-cache", value_name = "MODE", default_value = "writeback")]
    #[arg(value_parser = CacheMode::parse_source)]
    source_cache: CacheMode,
    /// Read the backing files even while other programs write to them
    #[arg(short = 'U', long)]
    force_share: bool,
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

pub(crate) fn run(args: &Args, _out: &mut dyn Write) -> Outcome {
    if args.backing_file.is_none() && !args.unsafe_mode {
        let present = if args.naming.instead.has_backing_file() {
            "; --backing-file is the present one"
        } else {
            ""
        };
        return Err(Failure::new(format_args!(
            "Must specify backing file (-b) or use unsafe mode (-u){present}"
        )));
    }
    if args.compress && args.unsafe_mode {
        return Err(Failure::new(
            "Cannot use both compression and unsafe mode (-u): nothing is copied in that mode",
        ));
    }
    if args.unsafe_mode && args.naming.instead.has_backing_file() {
        return Err(Failure::usage(
            "--backing-file is the present backing file, which unsafe mode (-u) does not open; -b gives the new one",
        ));
    }
    let image = args.naming.image(&args.image, args.format)?;
    let name = args.backing_file.as_deref().unwrap_or_default();
    let backing = match (name, &args.backing_format) {
        ("", _) => None,
        (name, Some(format)) => Some((name, format.as_str())),
        // Guessing the format would let the guest of a raw disk choose what is opened.
        (name, None) => {
            let path = images().resolve(&image.path, name);
            if !args.unsafe_mode
                && !is_export(&path)
                && let Err(error) = std::fs::metadata(&path)
            {
                let error = isobath_storage::cause(&error);
                return Err(new_backing(name, format_args!("Could not open '{name}': {error}")));
            }
            return Err(cannot_change(name, "backing format must be specified"));
        }
    };
    if name.len() > MOST_NAME {
        let reason = format_args!("the name has {} bytes; at most {MOST_NAME} fit", name.len());
        return Err(cannot_change(name, reason));
    }
    // In unsafe mode the name is only written, whatever it means to whoever opens it: it may be one that this program
    // refuses, that of a file that is not there yet, or of one that is about to be replaced.
    let known = backing.filter(|_| !args.unsafe_mode);
    if let Some((name, format)) = known {
        described_format(&image.path, name, Some(format))?;
    }
    let below = known.map(|(name, format)| file_of(&image.path, name).map(|file| (file, format)));
    let below = below.transpose()?;
    if let Some((file, driver)) = &below {
        let file = file.to_string_lossy();
        is_of_kind(driver, &file).map_err(|error| new_backing(&file, error))?;
    }
    let with_backing = image.has_backing() && !args.unsafe_mode;
    let options = image.writable(args.cache.is_direct())?.backing(with_backing);
    runtime::block_on(async || {
        let mut signals = Signals::new(&[libc::SIGINT, libc::SIGTERM])?;
        let disk = image.open(&options).await?;
        if disk.layers().next().is_none_or(|layer| layer.header().is_none()) {
            return Err(Failure::new(format_args!(
                "The format of '{}' does not support backing files",
                args.image.display()
            )));
        }
        if let Some(format) = args.backing_format.as_deref().filter(|name| !is_driver(name)) {
            let format = options::printable(format);
            return Err(Failure::new(format_args!("Invalid format name: '{format}'")));
        }
        if let Some((file, format)) = &below
            && !sabotage::is(Sabotage::UnseenLoop)
        {
            refuse_loop(&disk, file, format).await?;
        }
        if args.unsafe_mode {
            let progress = Progress::show(args.progress && !args.quiet, || (0, 1));
            disk.set_backing(backing).await?;
            disk.close().await?;
            progress.end(true);
            return Ok(());
        }
        let below = match (backing, &below) {
            (Some((name, format)), Some((file, _))) => {
                Some(open_below(args, name, file, format).await?)
            }
            _ => None,
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

/// Whether QEMU has a driver of this name: it accepts no other as a format.
fn is_driver(name: &str) -> bool {
    DRIVERS.contains(&name) || backing_format(name).is_ok()
}

/// The file that the new backing file's name, as stored in the header, refers to.
fn file_of(image: &Path, name: &str) -> Result<PathBuf, Failure> {
    let field = "new backing file";
    let named = name_in_header(images(), image, field, name, &Trust::Full);
    Ok(images().resolve(image, &named?))
}

/// The format of the new backing file.
fn backing_format(name: &str) -> Result<ImageFormat, Failure> {
    let format = ImageFormat::of_backing(name);
    format.map_or_else(|| options::format(name).map_err(Failure::new), Ok)
}

/// Refuses a new backing file whose chain contains the image.
async fn refuse_loop(disk: &Disk<ImageHost>, below: &Path, format: &str) -> Result<(), Failure> {
    let format = backing_format(format)?;
    let look =
        OpenOptions::new().format(format).locking(Locking::Unlocked).secrets(Secrets::unneeded());
    // A file that cannot be opened now may still be moved to its place.
    let Ok(chain) = Disk::open(images().clone(), below, &look).await else { return Ok(()) };
    let own = disk.layers().next().map(|layer| layer.storage().id());
    if chain.layers().any(|layer| Some(layer.storage().id()) == own) {
        return Err(new_backing(
            &below.to_string_lossy(),
            "it is the image itself, or has the image in its backing chain",
        ));
    }
    Ok(())
}

fn cannot_change(name: &str, reason: impl std::fmt::Display) -> Failure {
    let name = options::printable(name);
    Failure::new(format_args!("Could not change the backing file to '{name}': {reason}"))
}

fn new_backing(name: &str, reason: impl std::fmt::Display) -> Failure {
    let name = options::printable(name);
    Failure::new(format_args!("Could not open new backing file '{name}': {reason}"))
}

/// Opens the new backing file.
async fn open_below(
    args: &Args,
    name: &str,
    path: &Path,
    format: &str,
) -> Result<Arc<Disk<ImageHost>>, Failure> {
    let format = backing_format(format)?;
    let options = OpenOptions::new()
        .format(format)
        .locking(options::locking(args.force_share))
        .direct(args.source_cache.is_direct())
        .bring_in(true)
        .trust(args.naming.trusting.trust()?)
        .secrets(args.naming.secrets().map_err(Failure::new)?);
    let below = Disk::open(images().clone(), path, &options).await;
    let below = below.map_err(|error| new_backing(name, crate::image_name::reason(&error)));
    Ok(Arc::new(below?))
}

async fn copy(
    args: &Args,
    rebase: &Arc<Rebase<ImageHost>>,
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
            let failure = Failure::new("interrupted; the image keeps its old backing file");
            Err(failure.with_code(128 + signal as u8))
        }
        (None, None) => Ok(()),
    }
}
