//! What a server needs, as long as it may still look for it.

use super::args::Args;
use super::disks;
use crate::failure::Failure;
use crate::host::{images, is_export, is_file_name};
use crate::runtime;
use crate::server::endpoint::Endpoint;
use crate::server::sandbox::{Confined, Needs, SandboxArgs};
use isobath_disk::encryption::Secrets;
use isobath_disk::{Disk, ImageFormat, MemoryLimit};
use isobath_storage::{Host, Locking, OpenMode, Storage};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;

/// Confines this thread, the only one, to what serving the images needs.
pub(super) fn enter(
    args: &Args,
    secrets: &Secrets,
    memory: Option<&Arc<MemoryLimit>>,
) -> Result<Confined, Failure> {
    // A thread of its own, which may write to nothing when it reads what strangers have written.
    let found = thread::scope(|scope| {
        let found = scope.spawn(|| {
            runtime::block_on(async || try_locks(args).await)?;
            SandboxArgs::only_read()?;
            runtime::block_on(async || image_files(args, secrets, memory).await)
        });
        found.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    let files = found?;
    let controlled = !args.qmp.is_empty();
    let endpoints = args.qmp.iter().map(|secured| &secured.endpoint).chain(&args.metrics);
    let mut sockets: Vec<PathBuf> = endpoints
        .filter_map(|endpoint| match endpoint {
            Endpoint::Unix(path) => Some(path.clone()),
            Endpoint::Tcp { .. } | Endpoint::HandedIn(_) => None,
        })
        .collect();
    sockets.extend(args.frontends.socket_files()?);
    args.sandbox.enter(&Needs {
        connects: controlled || files.iter().any(|file| is_export(file)),
        writes: controlled || !args.is_read_only(),
        images: files,
        sockets,
        pid_file: args.pid_file.clone(),
    })
}

/// Fails if an image is in use: only who is not confined can see by whom. Nothing is read.
async fn try_locks(args: &Args) -> Result<(), Failure> {
    for image in args.images.iter().filter(|image| is_file_name(image)) {
        let mode = OpenMode { writable: !args.is_read_only(), ..OpenMode::default() };
        images().open(image, mode).await?;
    }
    Ok(())
}

/// The files of the images and of those below them, as they are now: an image that comes to need others before it is
/// opened cannot be opened.
async fn image_files(
    args: &Args,
    secrets: &Secrets,
    memory: Option<&Arc<MemoryLimit>>,
) -> Result<Vec<PathBuf>, Failure> {
    let mut files = Vec::new();
    for (number, image) in args.images.iter().enumerate() {
        // It needs no files, and its server may accept one connection only.
        if is_export(image) && args.format == Some(ImageFormat::Raw) {
            files.push(image.clone());
            continue;
        }
        let options = disks::options(args, secrets, memory).trust(args.trusting.of(image)?);
        let options = options.data_file(args.data_file(number));
        let options = options.writable(false).locking(Locking::Unlocked);
        let disk = Disk::open(images().clone(), image, &options).await?;
        files.push(image.clone());
        for layer in disk.layers() {
            files.push(layer.name().to_owned());
            files.extend(layer.files().map(|file| file.identity().name.to_owned()));
        }
        disk.close().await?;
    }
    files.sort();
    files.dedup();
    Ok(files)
}
