//! `isobath resize`

use crate::failure::{Failure, Outcome};
use crate::{options, runtime, size};
use isobath_disk::{Disk, ImageFormat, OpenOptions, Preallocation};
use isobath_storage::file::FileHost;
use std::io::Write;
use std::path::PathBuf;

/// Change a disk's size
///
/// Before shrinking a disk, shrink the guest's file systems and partitions. After growing a disk, grow them to use the
/// new space.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The image's format [default: detected]
    #[arg(short, long, value_name = "FMT", value_parser = options::format)]
    format: Option<ImageFormat>,
    /// Preallocation of the new part: off, metadata, falloc or full
    #[arg(long, value_name = "MODE", default_value = "off", value_parser = preallocation)]
    preallocation: Preallocation,
    /// Allow the disk to shrink, which deletes all data past its new end
    #[arg(long)]
    shrink: bool,
    /// Print only errors
    #[arg(short, long)]
    quiet: bool,
    /// The image
    image: PathBuf,
    /// The new size; with + or - in front, relative to the current size
    #[arg(allow_hyphen_values = true)]
    size: String,
}

fn preallocation(name: &str) -> Result<Preallocation, String> {
    Preallocation::from_name(name).ok_or_else(|| format!("Invalid preallocation mode '{name}'"))
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Outcome {
    let (sign, number) = match args.size.split_at_checked(1) {
        Some((sign @ ("+" | "-"), number)) => (Some(sign), number),
        _ => (None, args.size.as_str()),
    };
    let number = size::parse(number).map_err(Failure::new)?;
    let options = OpenOptions::new().writable(true).format(args.format);
    runtime::block_on(async || {
        let disk = Disk::open(FileHost, &args.image, &options).await?;
        let old = disk.size();
        let new = match sign {
            Some("+") => old.checked_add(number),
            Some(_) => old.checked_sub(number),
            None => Some(number),
        };
        let Some(new) = new.filter(|new| *new > 0) else {
            return Err(Failure::new("New image size must be positive"));
        };
        if new < old && !args.shrink {
            return Err(Failure::new(
                "Use the --shrink option to perform a shrink operation; it deletes all data \
                 beyond the new end",
            ));
        }
        if new <= old && args.preallocation != Preallocation::Off {
            return Err(Failure::new("Preallocation can only be used for growing images"));
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
