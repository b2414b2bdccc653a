//! What a server needs, as long as it may still look for it.

use super::args::Args;
use super::disks;
use crate::failure::Failure;
use crate::host::{ImageFile, images, is_export, is_file_name, is_stored};
use crate::overlays;
use crate::runtime;
use crate::server::endpoint::Endpoint;
use crate::server::sandbox::{Confined, Held, ImageRules, Needs, SandboxArgs};
use crate::stored;
use isobath_disk::encryption::Secrets;
use isobath_disk::{ImageFormat, Layer, MemoryLimit, see_layers};
use isobath_remote::{Address, Place};
use isobath_ring::place::{Identity, identity_of};
use isobath_storage::{Host, Locking, OpenMode, Storage, is_descriptor_set};
use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

/// Confines this thread, the only one, to what serving the images needs.
pub(super) fn enter(
    args: &Args,
    secrets: &Secrets,
    memory: Option<&Arc<MemoryLimit>>,
) -> Result<Confined, Failure> {
    let controlled = !args.qmp.is_empty();
    let writes = controlled || !args.is_read_only();
    let images = ImageRules::new(writes)?;
    // A thread of its own, which may write to nothing when it reads what strangers have written.
    let found = thread::scope(|scope| {
        let found = scope.spawn(|| {
            runtime::block_on(async || try_locks(args).await)?;
            SandboxArgs::only_read()?;
            runtime::block_on(async || image_files(args, secrets, memory, images).await)
        });
        found.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    let Found { images, connects, .. } = found?;
    let endpoints = args.qmp.iter().map(|secured| &secured.endpoint).chain(&args.metrics);
    let mut sockets: Vec<PathBuf> = endpoints
        .filter_map(|endpoint| match endpoint {
            Endpoint::Unix(path) => Some(path.clone()),
            Endpoint::Tcp { .. } | Endpoint::HandedIn(_) => None,
        })
        .collect();
    sockets.extend(args.frontends.socket_files()?);
    let connects = controlled || connects;
    let (read, cache) = stores(args)?;
    let connects = connects || args.images().iter().any(|image| is_bucket(image));
    let pid_file = args.pid_file.clone();
    let needs = Needs { writes, sockets, pid_file, connects, read, cache };
    args.sandbox.enter(images, &needs)
}

/// What the chains in stores among the images are read from, and the directory of their cache.
fn stores(args: &Args) -> Result<(Vec<PathBuf>, Option<PathBuf>), Failure> {
    let (mut read, mut any) = (Vec::new(), false);
    for image in args.images() {
        let Some(address) = stored::address(image)? else { continue };
        any = true;
        match address.place {
            Place::Directory(directory) => read.push(directory),
            Place::Bucket { .. } => read.extend(stored::files_of_clients()),
        }
    }
    let cache = if any { Some(args.stored.make_directory()?) } else { None };
    Ok((read, cache))
}

fn is_bucket(image: &Path) -> bool {
    is_stored(image) && !image.as_os_str().as_encoded_bytes().starts_with(b"file:")
}

/// Fails if an image is in use: only who is not confined can see by whom. Nothing is read.
async fn try_locks(args: &Args) -> Result<(), Failure> {
    let mut files: Vec<&Path> = Vec::new();
    for (number, image) in args.images().iter().enumerate() {
        files.extend(match args.overlay_of(number) {
            Some(overlay) => overlays::exists(overlay)?.then_some(overlay),
            None => is_file_name(image).then_some(image.as_path()),
        });
    }
    for image in files {
        let mode = OpenMode { writable: !args.is_read_only(), ..OpenMode::default() };
        images().open(image, mode).await?;
    }
    Ok(())
}

/// What the images and those below them need.
struct Found {
    /// Their files.
    images: ImageRules,
    /// Which they are: thousands of layers may lie in one directory.
    known: BTreeSet<Identity>,
    /// There are exports among them.
    connects: bool,
}

impl Found {
    /// Adds the files of an open layer.
    fn add_layer(&mut self, layer: &Layer<ImageFile>) -> Result<(), Failure> {
        self.add(layer.name(), &**layer.storage())?;
        layer.files().try_for_each(|file| self.add(file.identity().name, file))
    }

    /// Adds an open file, under this name.
    fn add<F: Storage>(&mut self, name: &Path, file: &F) -> Result<(), Failure> {
        self.connects |= is_export(name);
        if is_file_name(name) && !is_descriptor_set(name) {
            let found = Held::of_image(name, file.identity().id).and_then(|found| {
                let found = found.into_iter().map(|held| Ok((identity_of(&held)?, held)));
                found.collect::<io::Result<Vec<_>>>()
            });
            let found = found.map_err(|error| {
                let name = isobath_storage::shown(name);
                let text = format!("cannot confine the server to the directory of '{name}'");
                Failure::new(error).context(text)
            });
            for (id, held) in found? {
                if self.known.insert(id) {
                    self.images.allow(held)?;
                }
            }
        }
        Ok(())
    }
}

/// The files of an overlay and of the local images below it. One that does not exist will be made.
async fn overlay_files(
    overlay: &Path,
    address: &Address,
    writable: bool,
    found: &mut Found,
) -> Result<(), Failure> {
    if overlays::exists(overlay)? {
        let see = |layer: &Layer<ImageFile>| found.add_layer(layer);
        return overlays::examine(images(), overlay, address, writable, see).await.map(|_| ());
    }
    match Held::directory_of(overlay) {
        Ok(Some(directory)) => {
            let id = identity_of(&directory)?;
            if found.known.insert(id) {
                found.images.allow(directory)?;
            }
            Ok(())
        }
        Ok(None) => Err(Failure::new(format_args!(
            "the overlay '{}' lies in the root directory, to which a confined server has no rights; choose another \
             place, or --sandbox off",
            isobath_storage::shown(overlay)
        ))),
        // That it cannot be made there will be said when it is to be made.
        Err(_) => Ok(()),
    }
}

/// The files of the images and of those below them, as they are now: an image that comes to need others before it is
/// opened cannot be opened.
async fn image_files(
    args: &Args,
    secrets: &Secrets,
    memory: Option<&Arc<MemoryLimit>>,
    rules: ImageRules,
) -> Result<Found, Failure> {
    let mut found = Found { images: rules, known: BTreeSet::new(), connects: false };
    for (number, image) in args.images().iter().enumerate() {
        // Its layers are no files of this machine, but those above are.
        if let Some(address) = stored::address(image)? {
            if let Some(overlay) = args.overlay_of(number) {
                overlay_files(overlay, &address, !args.is_read_only(), &mut found).await?;
            }
            continue;
        }
        // It needs no files, and its server may accept one connection only.
        if is_export(image) && args.format == Some(ImageFormat::Raw) {
            found.connects = true;
            continue;
        }
        let options = args.files_of(number, disks::options(args, secrets, memory))?;
        let options = options.locking(Locking::Unlocked);
        see_layers(images(), image, &options, |layer| found.add_layer(layer)).await?;
    }
    Ok(found)
}
