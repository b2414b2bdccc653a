//! `isobath resize`

use crate::failure::{Failure, Outcome};
use crate::host::is_export;
use crate::image_name::Naming;
use crate::options::NamedFormat;
use crate::size::NewSize;
use crate::{null, options, program, runtime};
use isobath_disk::{Layer, Preallocation};
use std::io::Write;
use std::path::PathBuf;

/// Change a disk's size
///
/// Before shrinking a disk, shrink the guest's file systems and partitions. After growing a disk, grow them to use the
/// new space.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The image's format [default: detected]
    #[arg(short, long, value_name = "FMT", value_parser = options::named_format)]
    format: Option<NamedFormat>,
    /// Preallocation of the added space: off, metadata, falloc or full
    #[arg(long, value_name = "MODE", default_value = "off", value_parser = preallocation)]
    preallocation: Preallocation,
    /// Allow the disk to shrink, which deletes all data past its new end
    #[arg(long)]
    shrink: bool,
    /// Print only errors
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    naming: Naming,
    /// The image
    image: PathBuf,
    /// The new size; with + or - in front, relative to the current size
    #[arg(allow_hyphen_values = true)]
    size: Option<String>,
}

fn preallocation(name: &str) -> Result<Preallocation, String> {
    Preallocation::from_name(name).ok_or_else(|| format!("Invalid preallocation mode '{name}'"))
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Outcome {
    let Some(size) = &args.size else { return Err(Failure::usage("Not enough arguments")) };
    let size = NewSize::parse(size).map_err(Failure::new)?;
    let image = args.naming.image(&args.image, args.format)?;
    let options = image.writable(false)?;
    runtime::block_on(async || {
        let disk = image.open(&options).await?;
        let old = disk.size();
        let Some(new) = size.of(old) else {
            return Err(Failure::new("New image size must be positive"));
        };
        if new < old && !args.shrink {
            let program = program::name();
            return Err(Failure::new(format_args!(
                "Use the --shrink option to perform a shrink operation.\n{program}: warning: Shrinking \
                 an image will delete all data beyond the shrunken image's end. Before performing \
                 such an operation, make sure there is no important data there."
            )));
        }
        let keeps_size = |layer: &Layer<_>| layer.header().is_none() && is_export(layer.name());
        if new != old && disk.layers().next().is_some_and(|layer| keeps_size(layer)) {
            return Err(Failure::new("Cannot resize NBD nodes"));
        }
        if new <= old && args.preallocation != Preallocation::Off {
            return Err(Failure::new("Preallocation can only be used for growing images"));
        }
        if disk.layers().next().is_some_and(|layer| null::is_name(layer.name())) {
            return Err(Failure::new("Image format driver does not support resize"));
        }
        Box::pin(disk.resize(new, args.preallocation, args.shrink)).await?;
        disk.close().await?;
        Ok(())
    })?;
    if !args.quiet {
        writeln!(out, "Image resized.")?;
    }
    Ok(0)
}
