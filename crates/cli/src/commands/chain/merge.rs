//! `isobath chain merge`, `flatten` and `delete`: shorten chains without changing the contents of any disk.

use super::doomed::Doomed;
use super::note;
use super::unfinished::Unfinished;
use super::users::{Users, directories, header, identity};
use crate::failure::{Failure, Outcome};
use crate::host::{ImageHost, images, only_files};
use crate::image_name::SecretFile;
use crate::options::printable;
use crate::{block_job, chain_files, runtime, size};
use isobath_disk::{Disk, ImageFormat, LiveDisk, OpenOptions, Secrets};
use isobath_jobs::StreamOptions;
use isobath_ring::Signals;
use isobath_storage::{FileId, Locking, StorageExt};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Options of every command that merges.
#[derive(clap::Args)]
pub(super) struct Shared {
    /// Speed limit in bytes per second
    #[arg(short, value_name = "RATE", value_parser = size::parse)]
    pub(super) rate: Option<u64>,
    /// Show progress
    #[arg(short, long)]
    pub(super) progress: bool,
    /// Print only errors
    #[arg(short, long)]
    pub(super) quiet: bool,
    /// Merge even if the image has internal snapshots, whose contents then change
    #[arg(long)]
    pub(super) change_snapshots: bool,
    #[command(flatten)]
    pub(super) secret_file: SecretFile,
}

/// Merge all backing files into an image
///
/// Afterwards the image needs no backing file. The former backing files are left unchanged.
#[derive(clap::Args)]
pub(crate) struct FlattenArgs {
    #[command(flatten)]
    shared: Shared,
    /// The image
    image: PathBuf,
}

/// Merge consecutive layers into the topmost one
///
/// The data of the images from FROM up to TO is merged into TO, and FROM's backing file becomes that of TO. The
/// contents of TO and of its overlays do not change. The other images are left unchanged, and images that need them
/// still work.
#[derive(clap::Args)]
pub(crate) struct MergeArgs {
    #[command(flatten)]
    shared: Shared,
    /// The lowest image to merge, a backing file of TO
    from: String,
    /// The image to merge into
    to: PathBuf,
}

/// Remove one layer from a chain
///
/// The layer's data that its overlay needs moves into the overlay, and the layer's backing file becomes that of the
/// overlay. The layer's file is deleted, unless another image in or below the chain's directories needs it. A layer
/// that another program has open is refused.
#[derive(clap::Args)]
pub(crate) struct DeleteArgs {
    #[command(flatten)]
    shared: Shared,
    /// Keep the layer's file
    #[arg(long)]
    keep: bool,
    /// Another directory to search, with all directories below it, for images that need the layer; can be repeated
    #[arg(long, value_name = "DIR")]
    search: Vec<PathBuf>,
    /// The chain's active image, or any image above the layer
    image: PathBuf,
    /// The layer to remove
    layer: String,
}

pub(crate) fn flatten(args: &FlattenArgs, out: &mut dyn Write) -> Outcome {
    let merged =
        runtime::block_on(async || Box::pin(merge_into(&args.image, None, &args.shared)).await)?;
    let what = if merged {
        "Image flattened."
    } else {
        "The image has no backing file: there is nothing to do."
    };
    say(&args.shared, out, what)
}

pub(crate) fn merge(args: &MergeArgs, out: &mut dyn Write) -> Outcome {
    runtime::block_on(async || {
        Box::pin(merge_into(&args.to, Some(&args.from), &args.shared)).await
    })?;
    say(&args.shared, out, "Images merged.")
}

pub(crate) fn delete(args: &DeleteArgs, out: &mut dyn Write) -> Outcome {
    let removed = runtime::block_on(async || Box::pin(removed(args)).await)?;
    match removed {
        Some((layer, Some(user))) => {
            let (layer, user) = (layer.display(), user.display());
            say(&args.shared, out, &format!("Layer removed; '{layer}' stays: '{user}' needs it."))
        }
        Some((layer, None)) => {
            let layer = layer.display();
            say(&args.shared, out, &format!("Layer removed; '{layer}' is deleted."))
        }
        None => say(&args.shared, out, "Layer removed; its file is kept."),
    }
}

/// Removes the layer. Returns its file, unless `--keep` is given, and an image that needs the file, if any.
async fn removed(args: &DeleteArgs) -> Result<Option<(PathBuf, Option<PathBuf>)>, Failure> {
    only_files(&args.image, "'chain'")?;
    let look = OpenOptions::new().locking(Locking::Unlocked).secrets(Secrets::unneeded());
    let disk = Disk::open(images().clone(), &args.image, &look).await?;
    let layers: Vec<_> = disk.layers().cloned().collect();
    let chain: Vec<_> = layers.iter().map(|layer| layer.name().to_owned()).collect();
    if chain_files::find(&layers, &args.layer).is_none()
        && let Some(left) = left(args, &chain)
    {
        drop((layers, disk));
        let secrets = args.shared.secret_file.secrets()?;
        let user = Box::pin(left.finish(&chain, &args.search, &secrets)).await?;
        if user.is_some() {
            note::forget(&left.layer);
        }
        return Ok(Some((left.layer, user)));
    }
    let place = chain_files::required(&layers, &args.layer, &args.image)?;
    let (Ok(overlay), Ok(layer)) = (disk.layer(place.above()), disk.layer(place)) else {
        return Err(Failure::new(format_args!(
            "'{}' is the active image: it has no overlay to take its data; use 'isobath commit'",
            printable(&args.layer)
        )));
    };
    let format = layer.format();
    let (overlay, layer) = (overlay.name().to_owned(), layer.name().to_owned());
    let snapshots = header(&layer)?.map_or(0, |header| header.nb_snapshots);
    if snapshots > 0 && !args.keep {
        return Err(Failure::new(format_args!(
            "'{}' has internal snapshots ({snapshots}), which would be lost; keep the file with --keep, or delete \
             them first with 'isobath snapshot -d'",
            layer.display()
        )));
    }
    let directories = directories(layers.iter().map(|one| one.name()), &args.search);
    drop((layers, disk));
    if args.keep {
        note::forget(&layer);
        let name = layer.to_string_lossy();
        Box::pin(merge_into(&overlay, Some(&name), &args.shared)).await?;
        return Ok(None);
    }
    // Fail before changing anything if it is unknown who needs the file, or the file is in use.
    Users::find(&directories)?;
    let doomed = vec![Doomed::lock(&layer).await?];
    let merged = Box::pin(merge_away(doomed, format, &overlay, &args.shared)).await?;
    let mut user = None;
    for doomed in merged.layers {
        user = doomed?.delete(&Users::find(&directories)?, None)?;
    }
    if user.is_some() {
        note::forget(&layer);
    }
    drop(merged.overlay);
    Ok(Some((layer, user)))
}

/// The layer, if a killed command left its file behind.
fn left(args: &DeleteArgs, chain: &[PathBuf]) -> Option<Unfinished> {
    let named = Path::new(&args.layer);
    let beside = chain.iter().filter_map(|image| Some(image.parent()?.join(named)));
    let mut files = beside.chain([named.to_owned()]);
    files.find_map(|file| Unfinished::of(&file, chain)).filter(|_| !args.keep)
}

fn say(args: &Shared, out: &mut dyn Write, what: &str) -> Outcome {
    if !args.quiet {
        writeln!(out, "{what}")?;
    }
    Ok(0)
}

/// The files of an image's chain, the active one first.
pub(super) async fn chain_of(image: &Path) -> Result<Vec<PathBuf>, Failure> {
    let look = OpenOptions::new().locking(Locking::Unlocked).secrets(Secrets::unneeded());
    let disk = Disk::open(images().clone(), image, &look).await?;
    Ok(disk.layers().map(|one| one.name().to_owned()).collect())
}

/// Merges the layers from `from` up into `image` above them; without `from`, all layers below it.
/// Merges the layers from `from` up, or all, into `image`. Returns whether there were any.
async fn merge_into(image: &Path, from: Option<&str>, args: &Shared) -> Result<bool, Failure> {
    only_files(image, "'chain'")?;
    let mut signals = Signals::new(&[libc::SIGINT, libc::SIGTERM])?;
    let (live, base) = open(image, from, args).await?;
    let any = live.depth() > 1;
    let done = run(&live, base, args, &mut signals).await;
    live.close().await?;
    done.map(|()| any)
}

/// Layers that were merged.
pub(super) struct Merged {
    /// The disk of the image that took their data. It is closed, but keeps its locks.
    pub(super) overlay: Arc<LiveDisk<ImageHost>>,
    /// Their files, locked; or why one must stay.
    pub(super) layers: Vec<Result<Doomed, Failure>>,
}

/// Merges `layers`, the lowest first, into the image above them.
///
/// # Errors
/// If they are not the layers directly below the image, or cannot be merged.
pub(super) async fn merge_away(
    layers: Vec<Doomed>,
    format: ImageFormat,
    image: &Path,
    args: &Shared,
) -> Result<Merged, Failure> {
    let mut signals = Signals::new(&[libc::SIGINT, libc::SIGTERM])?;
    let mut readable = Vec::new();
    for layer in layers {
        readable.push(layer.let_read().await?);
    }
    let from = readable.first().map(|layer| layer.path().to_string_lossy());
    let (overlay, base) = open(image, from.as_deref(), args).await?;
    let below: Vec<_> = overlay.layers().iter().map(|layer| layer.storage().id()).collect();
    let below = below.into_iter().skip(1).take_while(|id| Some(*id) != base);
    if !below.eq(readable.iter().rev().map(Doomed::id)) {
        overlay.close().await?;
        return Err(Failure::new(format_args!(
            "another program has changed the chain of '{}': its layers are no longer those to be \
             merged",
            image.display()
        )));
    }
    for layer in &readable {
        if let Some(file) = layer.file() {
            note::leave(&file, layer.path(), format, image);
        }
    }
    let done = run(&overlay, base, args, &mut signals).await;
    let closed = overlay.close().await;
    if let Err(failure) = done.and(closed.map_err(Failure::from)) {
        // Layers that are no longer in the chain keep their notes, for the next command.
        if let Ok(chain) = chain_of(image).await {
            let chain: Vec<_> = chain.iter().filter_map(|file| identity(file).ok()).collect();
            let is_left =
                |layer: &&Doomed| identity(layer.path()).is_ok_and(|id| chain.contains(&id));
            let left = readable.iter().filter(is_left).filter_map(Doomed::file);
            left.for_each(|file| note::forget_in(&file));
        }
        return Err(failure);
    }
    let mut locked = Vec::new();
    for layer in readable {
        locked.push(layer.lock_again().await);
    }
    Ok(Merged { overlay, layers: locked })
}

/// Opens a chain to merge its layers from `from` up. Also returns the file below them.
async fn open(
    image: &Path,
    from: Option<&str>,
    args: &Shared,
) -> Result<(Arc<LiveDisk<ImageHost>>, Option<FileId>), Failure> {
    let options = OpenOptions::new().writable(true).secrets(args.secret_file.secrets()?);
    let live = LiveDisk::open(images().clone(), image, &options).await?;
    let Some(from) = from else { return Ok((live, None)) };
    let layers = live.layers();
    let found = chain_files::required(&layers, from, image).and_then(|from| {
        if usize::from(from.get()) + 1 == layers.len() {
            return Err(Failure::new("the two images are the same"));
        }
        Ok(from)
    });
    let from = match found {
        Ok(from) => usize::from(from.get()),
        Err(failure) => {
            live.close().await?;
            return Err(failure);
        }
    };
    // The active layer comes first.
    let below = layers.get(layers.len() - from).map(|layer| layer.storage().id());
    Ok((live, below))
}

/// Merges all layers above `base`; without it, all layers.
async fn run(
    live: &Arc<LiveDisk<ImageHost>>,
    base: Option<FileId>,
    args: &Shared,
    signals: &mut Signals,
) -> Result<(), Failure> {
    if live.depth() == 1 {
        return Ok(());
    }
    let change_snapshots = args.change_snapshots;
    let stream = StreamOptions { base, change_snapshots, ..StreamOptions::default() };
    let job = block_job::options("merge", args.rate.unwrap_or(0));
    let started = isobath_jobs::stream(live, stream, job);
    block_job::run(started, signals, args.progress && !args.quiet).await
}
