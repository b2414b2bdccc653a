//! `isobath push`

use crate::failure::{Failure, Outcome};
use crate::host::{id_of_file, images, is_file_name};
use crate::store::{self, StoreOptions};
use crate::trust::Trusting;
use crate::{json, options, runtime, size};
use isobath_disk::{Disk, ImageFormat, Layer, OpenOptions, Secrets};
use isobath_remote::{Address, Format, Index, LocalLayer, Progress, Pushed, Replace, exists, push};
use isobath_storage::{FileId, Storage};
use serde_json::json;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
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
    /// Read at most so many bytes of the images a second, such as 100M
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    speed: Option<u64>,
    #[command(flatten)]
    store: StoreOptions,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Outcome {
    let address = Address::parse(&args.remote)?;
    let options = OpenOptions::new().format(args.format).trust(args.trusting.trust()?);
    args.sending.send(&args.image, options, &address, out)
}

impl Sending {
    /// Fails unless the store can be reached.
    pub(crate) fn check(&self, address: &Address) -> Result<(), Failure> {
        let (place, name) = (address.place.clone(), address.name.clone());
        let work = move |store: &dyn isobath_remote::Store, _: &_| exists(store, &name);
        runtime::block_on(async || {
            self.store.run(&place, false, "nothing was done", work).await.map(drop)
        })
    }

    /// Pushes an image and what is below it, and says so.
    pub(crate) fn send(
        &self,
        image: &Path,
        options: OpenOptions,
        address: &Address,
        out: &mut dyn Write,
    ) -> Outcome {
        let pushed = self.pushed(image, options, address)?;
        self.say(&pushed, address, out)
    }

    fn pushed(
        &self,
        image: &Path,
        options: OpenOptions,
        address: &Address,
    ) -> Result<Pushed, Failure> {
        let options = options.heads(false).secrets(Secrets::unneeded());
        let replace = if self.overwrite { Replace::Any } else { Replace::Unchanged };
        let speed = self.speed.unwrap_or(0);
        runtime::block_on(async || {
            // As long as the disk is open, no other program writes to any of its images.
            let disk = Disk::open(images().clone(), image, &options).await?;
            let layers: Vec<_> = disk.layers().collect();
            let layers = layers.into_iter().rev().map(|layer| local(layer));
            let layers = layers.collect::<Result<Vec<_>, _>>()?;
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

    fn say(&self, pushed: &Pushed, address: &Address, out: &mut dyn Write) -> Outcome {
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

/// A layer as it is pushed: its file, opened once more, which must be the one that is locked.
fn local<S: Storage>(layer: &Layer<S>) -> Result<LocalLayer, Failure> {
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
    if layer.shown_log() != isobath_image::layer::ShownLog::None {
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
    let id = FileId { device: metadata.dev(), inode: metadata.ino() };
    if id_of_file(id) != layer.storage().id() {
        return Err(refused("another file has got its name just now; try again"));
    }
    Ok(LocalLayer { path: layer.name().to_owned(), file, format })
}
