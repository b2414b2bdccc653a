//! `isobath index`

use crate::failure::{Failure, Outcome};
use crate::host::{images, only_files};
use crate::size::human;
use crate::stored::{self, CacheOptions};
use crate::workers::Progress;
use crate::{options, runtime};
use isobath_disk::{Disk, ImageFormat, IndexMismatch, IndexProgress, OpenOptions, Secrets};
use isobath_remote::Address;
use isobath_storage::word;
use std::cell::Cell;
use std::io::Write;
use std::path::PathBuf;
use std::rc::Rc;

/// Write an image's direct-access index of the layers below it
///
/// With an index, opening a chain and accessing data for the first time cost the same at any depth. 'create -b' writes
/// one automatically; this command adds one to chains created by other programs, and replaces one that is out of date.
/// The image must not be in use. QEMU reads and writes images with an index as usual. The index of a chain in a store
/// is made by 'push'; --verify examines it.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Remove the index
    #[arg(long, conflicts_with = "verify")]
    drop: bool,
    /// Compare the index with the layers' tables; the exit code is 2 if they differ
    #[arg(long)]
    verify: bool,
    /// Show progress
    #[arg(short, long)]
    progress: bool,
    /// Print only errors
    #[arg(short, long)]
    quiet: bool,
    /// With --verify: read the image even while another program writes to it
    #[arg(short = 'U', long)]
    force_share: bool,
    #[command(flatten)]
    stored: CacheOptions,
    /// The image; with --verify also a chain in a store
    image: PathBuf,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Outcome {
    if args.force_share && !args.verify {
        return Err(Failure::usage("-U (--force-share) requires --verify"));
    }
    if let Some(address) = stored::address(&args.image)? {
        return verify_stored(args, &address, out);
    }
    only_files(&args.image, "'index'")?;
    let options = OpenOptions::new()
        .writable(!args.verify)
        .format(ImageFormat::Qcow2)
        .heads(false)
        .locking(options::locking(args.force_share))
        .secrets(Secrets::unneeded());
    runtime::block_on(async || {
        let disk = Disk::open(images().clone(), &args.image, &options).await?;
        let name = isobath_storage::shown(&args.image);
        let rewrites = format!("'isobath index {}' rewrites it", word(&args.image));
        if args.drop {
            let dropped = disk.drop_index().await?;
            disk.close().await?;
            if !args.quiet {
                let what = if dropped { "Index removed." } else { "The image has no index." };
                writeln!(out, "{what}")?;
            }
            return Ok(0);
        }
        for layer in disk.layers() {
            only_files(layer.name(), "an index of the layers")?;
        }
        let (progress, show) = progress(args);
        if args.verify {
            let verified = disk.verify_index(show).await;
            progress.end(verified.is_ok());
            return match verified? {
                Err(reason) => Err(Failure::new(format_args!(
                    "the index of '{name}' is out of date: {reason}; {rewrites}"
                ))
                .with_code(2)),
                Ok(differ) => {
                    let failure = format!("the index of '{name}' is damaged; {rewrites}");
                    compared(args, &differ, "overwritten", &failure, out)
                }
            };
        }
        let written = Box::pin(disk.write_index(show)).await;
        progress.end(written.is_ok());
        let info = written?;
        disk.close().await?;
        if !args.quiet {
            writeln!(out, "Index written: {} layers, {}.", info.layers, human(info.bytes))?;
        }
        Ok(0)
    })
}

/// Compares the index of a chain in a store with its layers' tables.
fn verify_stored(args: &Args, address: &Address, out: &mut dyn Write) -> Outcome {
    if !args.verify {
        return Err(Failure::new(format_args!(
            "'{address}' is a chain in a store, whose index 'isobath push' makes; --verify compares it with the layers"
        )));
    }
    let chain = args.stored.open_now(address)?;
    let options = stored::options_of(&chain, OpenOptions::new().secrets(Secrets::unneeded()));
    let again = "push the chain again from where it is whole";
    runtime::block_on(async || {
        let disk = Disk::open(images().clone(), &args.image, &options).await?;
        let (progress, show) = progress(args);
        let verified = disk.verify_index_beside(show).await;
        progress.end(verified.is_ok());
        match verified? {
            Some(differ) => {
                let failure = format!("the index of '{address}' is damaged; {again}");
                compared(args, &differ, "damaged", &failure, out)
            }
            None if chain.has_index() => {
                let failure = format_args!("the index of '{address}' is damaged; {again}");
                Err(Failure::new(failure).with_code(2))
            }
            None => Err(Failure::new(format_args!(
                "'{address}' has no index; unless the disk is too fragmented for one, a push of the chain makes it"
            ))),
        }
    })
}

/// Progress in pages, if it is to be shown, and what it is told by.
fn progress(args: &Args) -> (Progress, impl FnMut(IndexProgress) + use<>) {
    let state = Rc::new(Cell::new((0, 0)));
    let progress = Progress::show(args.progress && !args.quiet, {
        let state = Rc::clone(&state);
        move || state.get()
    });
    (progress, move |now: IndexProgress| state.set((now.done, now.total)))
}

/// Says where an index differs from the layers, if anywhere. What reads notice as well has a word of its own.
fn compared(
    args: &Args,
    differ: &[IndexMismatch],
    noticed: &str,
    failure: &str,
    out: &mut dyn Write,
) -> Outcome {
    for part in differ {
        let how = if part.noticed { noticed } else { "differs" };
        writeln!(out, "{how} at {} ({} bytes)", part.offset, part.length)?;
    }
    if !differ.is_empty() {
        return Err(Failure::new(failure).with_code(2));
    }
    if !args.quiet {
        writeln!(out, "The index matches the layers.")?;
    }
    Ok(0)
}
