//! `isobath push`

use crate::failure::{Failure, Outcome};
use crate::host::{id_of_file, images, is_file_name};
use crate::store::{self, StoreOptions};
use crate::trust::Trusting;
use crate::{json, options, runtime, size};
use isobath_disk::{Disk, DiskError, ImageFormat, Layer, OpenOptions, Secrets};
use isobath_remote::{
    Address, Format, Index, LocalLayer, Progress, Pushed, Replace, TopIs, check_layers, may_push,
    push,
};
use isobath_storage::{FileId, Host, Storage, StorageExt};
use isobath_storage_file::id_at;
use serde_json::json;
use std::collections::HashSet;
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Copy a chain to a directory or an object store
///
/// Every layer becomes an object that is named by its digest, so that only those are sent that are not there. The chain
/// appears under its name when all of it is there. Nobody may write to the image meanwhile; 'isobath ctl push' pushes a
/// disk in use.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The image's format [default: detected]
    #[arg(short, long, value_name = "FMT", value_parser = options::format)]
    format: Option<ImageFormat>,
    #[command(flatten)]
    sending: Sending,
    #[command(flatten)]
    trusting: Trusting,
    /// The image, the top of the chain
    image: PathBuf,
    #[arg(help = store::CHAIN)]
    remote: String,
}

/// The files of a disk that a server reads, the top first.
pub(crate) struct ServedFiles {
    /// Their names.
    pub(crate) names: Vec<PathBuf>,
    /// The files that may be pushed.
    pub(crate) open: Open,
}

/// Files that are open.
pub(crate) enum Open {
    /// All that the server has open for reading.
    InServer(HashSet<FileId>),
    /// Those that any program has open as images, by their locks: which ones the server has cannot be seen.
    Anywhere(HashSet<FileId>),
}

impl Open {
    /// Fails if a file is not among them.
    fn check(&self, id: FileId, name: &Path) -> Result<(), Failure> {
        let (open, what, more) = match self {
            Self::InServer(open) => (open, "not open for reading in the server", ""),
            Self::Anywhere(open) => (
                open,
                "locked by no program as an image in use",
                ", or its file system has no locks; root with CAP_SYS_PTRACE can see what the server has open",
            ),
        };
        if open.contains(&id) {
            return Ok(());
        }
        Err(Failure::new(format_args!(
            "'{}' is {what}: another file has got its name, or the server's limit of open files is lower than what \
             its chains have{more}",
            isobath_storage::shown(name)
        )))
    }
}

/// How often an image in use is looked at before it counts as damaged.
const MOST_LOOKS: usize = 8;

/// How a chain is sent.
#[derive(clap::Args)]
pub(crate) struct Sending {
    /// Replace whatever the store has under the name, even if another push changes it at the same time
    #[arg(long)]
    overwrite: bool,
    /// Output format
    #[arg(long, value_name = "FMT", default_value = "human")]
    output: options::OutputFormat,
    /// Show progress
    #[arg(short, long)]
    progress: bool,
    /// Print only errors
    #[arg(short, long)]
    quiet: bool,
    /// Read at most so many bytes of the images a second, such as 100M; 0 is no limit
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    speed: Option<u64>,
    #[command(flatten)]
    store: StoreOptions,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Outcome {
    let address = Address::parse(&args.remote)?;
    let options = OpenOptions::new().format(args.format).trust(args.trusting.trust()?);
    let pushed = args.sending.send(&args.image, options, None, &address)?;
    args.sending.say(&pushed, &address, out)
}

impl Sending {
    /// Fails if the store takes no push now.
    pub(crate) fn check_store(&self, address: &Address) -> Result<(), Failure> {
        let replace = self.replace();
        let (place, name) = (address.place.clone(), address.name.clone());
        runtime::block_on(async || {
            let work =
                move |store: &dyn isobath_remote::Store, _: &_| may_push(store, &name, replace);
            self.store.run(&place, false, "nothing was done", work).await
        })
    }

    /// Fails if what has these files could not be pushed, although the server writes to the top.
    pub(crate) fn check_files(
        files: &ServedFiles,
        format: Option<ImageFormat>,
    ) -> Result<(), Failure> {
        let Some(image) = files.names.first() else {
            return Err(Failure::new("a disk without an image cannot be pushed"));
        };
        let options = OpenOptions::new().format(format).heads(false);
        let options = options.secrets(Secrets::unneeded()).locking(options::locking(true));
        runtime::block_on(async || {
            let mut opened = Disk::open(images().clone(), image, &options).await;
            for _ in 1..MOST_LOOKS {
                if !opened.as_ref().is_err_and(may_be_half_written) {
                    break;
                }
                opened = Disk::open(images().clone(), image, &options).await;
            }
            let disk = opened?;
            let layers = locals(&disk, Some(files), TopIs::InUse);
            disk.close().await?;
            check_layers(&layers?, TopIs::InUse)?;
            Ok(())
        })
    }

    fn replace(&self) -> Replace {
        if self.overwrite { Replace::Any } else { Replace::Unchanged }
    }

    /// The options, for a command line.
    pub(crate) fn shown(&self) -> String {
        let overwrite = if self.overwrite { " --overwrite" } else { "" };
        let speed = self.speed.map(|speed| format!(" --speed {speed}")).unwrap_or_default();
        [overwrite, &speed, &self.store.shown()].concat()
    }

    /// Pushes an image and what is below it, which must be these `files` if they are given.
    pub(crate) fn send(
        &self,
        image: &Path,
        options: OpenOptions,
        files: Option<&ServedFiles>,
        address: &Address,
    ) -> Result<Pushed, Failure> {
        let options = options.heads(false).secrets(Secrets::unneeded());
        let replace = self.replace();
        let speed = self.speed.unwrap_or(0);
        runtime::block_on(async || {
            // As long as the disk is open, no other program writes to any of its images.
            let disk = Disk::open(images().clone(), image, &options).await?;
            let layers = locals(&disk, files, TopIs::Closed)?;
            let index = disk.whole_index().await?;
            let index = index.map(|index| Index { root: index.root.encode(), bytes: index.bytes });
            let (place, name) = (address.place.clone(), address.name.clone());
            let work = move |store: &dyn isobath_remote::Store, progress: &Progress| {
                progress.limit_to(speed);
                push(store, &name, &layers, index.as_ref(), replace, progress)
            };
            let interrupted = "what was sent stays in the store for the next push, and the chain there is unchanged";
            let shown = self.progress && !self.quiet;
            let pushed = self.store.run(&place, shown, interrupted, work).await;
            disk.close().await?;
            pushed
        })
    }

    /// Reports what was pushed.
    pub(crate) fn say(&self, pushed: &Pushed, address: &Address, out: &mut dyn Write) -> Outcome {
        match self.output {
            options::OutputFormat::Json => {
                let done = json!({
                    "remote": address.to_string(),
                    "layers": pushed.layers,
                    "layers-sent": pushed.sent,
                    "bytes-sent": pushed.bytes,
                });
                json::print(out, &done)?;
            }
            options::OutputFormat::Human if self.quiet => {}
            options::OutputFormat::Human => writeln!(
                out,
                "Pushed to {address}: {} layers, {} of them sent ({}).",
                pushed.layers,
                pushed.sent,
                size::human(pushed.bytes)
            )?,
        }
        Ok(0)
    }
}

/// The layers of a disk as they are pushed, from the base to the top. If `files` are given, they must be those.
fn locals<H: Host>(
    disk: &Disk<H>,
    files: Option<&ServedFiles>,
    top: TopIs,
) -> Result<Vec<LocalLayer>, Failure> {
    let layers: Vec<_> = disk.layers().collect();
    if let Some(files) = files {
        let other = || {
            Failure::new(
                "the headers of the images lead to other files than the server reads: they cannot be pushed as a chain",
            )
        };
        if files.names.len() != layers.len() {
            return Err(other());
        }
        for (file, layer) in files.names.iter().zip(&layers) {
            let id = file.metadata().map(|found| id_at(&found)).map_err(|_| other())?;
            if id_of_file(id) != layer.storage().id() {
                return Err(other());
            }
            files.open.check(id, file)?;
        }
    }
    let is_open = |number: usize| top == TopIs::InUse && number == 0;
    let locals = layers.into_iter().enumerate();
    locals.rev().map(|(number, layer)| local(layer, is_open(number))).collect()
}

/// Whether an image that is written to may be in order, although it was not opened: what is read of it while it
/// changes may look damaged, or end too early.
fn may_be_half_written(error: &DiskError) -> bool {
    match error {
        DiskError::Backing { source, .. } => may_be_half_written(source),
        DiskError::Storage(error) => error.kind() == ErrorKind::UnexpectedEof,
        DiskError::Format { .. } | DiskError::Refused { .. } | DiskError::Corrupt { .. } => true,
        _ => false,
    }
}

/// A layer as it is pushed: its file, opened once more, which must be the one that is locked.
fn local<S: Storage>(layer: &Layer<S>, is_open: bool) -> Result<LocalLayer, Failure> {
    let name = isobath_storage::shown(layer.name()).to_string();
    let refused = |why: &str| Failure::new(format_args!("'{name}' cannot be pushed: {why}"));
    if !is_file_name(layer.name()) {
        return Err(refused("it is not a file"));
    }
    let format = match layer.format() {
        ImageFormat::Qcow2 => Format::Qcow2,
        ImageFormat::Raw => Format::Raw,
        other => {
            return Err(refused(&format!(
                "its format is {}, and only qcow2 and raw images can be; 'isobath convert -O qcow2' makes one",
                other.name()
            )));
        }
    };
    if !is_open && layer.shown_log() != isobath_image::layer::ShownLog::None {
        return Err(refused(
            "its server was killed, and left changes; run 'isobath seal' on it first",
        ));
    }
    let mut open = File::options();
    let file = open.read(true).custom_flags(libc::O_NONBLOCK).open(layer.name());
    let file = file.map_err(|error| refused(&isobath_storage::cause(&error)))?;
    let metadata = file.metadata().map_err(|error| refused(&isobath_storage::cause(&error)))?;
    if !metadata.is_file() {
        return Err(refused("it is a device, and not a file; 'isobath convert' copies it to one"));
    }
    if id_of_file(id_at(&metadata)) != layer.storage().id() {
        return Err(refused("another file has got its name just now; try again"));
    }
    Ok(LocalLayer { path: layer.name().to_owned(), file, format })
}

#[cfg(test)]
mod tests {
    use super::*;
    use isobath_storage::{Operation, StorageError};

    #[test]
    fn only_an_image_that_looks_damaged_is_looked_at_again() {
        let image = || PathBuf::from("image");
        let io = |kind: ErrorKind| {
            DiskError::from(StorageError::new(Operation::Open, &image(), kind.into()))
        };
        let corrupt = || DiskError::Corrupt { image: image(), reason: String::new() };
        let below = |source| DiskError::Backing { overlay: image(), source: Box::new(source) };
        for error in [corrupt(), io(ErrorKind::UnexpectedEof), below(corrupt())] {
            assert!(may_be_half_written(&error), "{error}");
        }
        for kind in [ErrorKind::NotFound, ErrorKind::PermissionDenied, ErrorKind::ResourceBusy] {
            assert!(!may_be_half_written(&io(kind)) && !may_be_half_written(&below(io(kind))));
        }
    }
}
