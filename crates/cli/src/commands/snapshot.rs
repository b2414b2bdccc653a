//! `isobath snapshot`

use super::info;
use crate::failure::{Failure, Outcome};
use crate::host::images;
use crate::image_name::{Naming, reason};
use crate::options::{NamedFormat, printable};
use crate::{options, runtime};
use isobath_disk::{DiskError, apply_snapshot, create_snapshot, delete_snapshot};
use std::io::Write;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

/// List, take, apply and delete internal snapshots
#[derive(clap::Args)]
pub(crate) struct Args {
    /// List the snapshots (the default)
    #[arg(short, long)]
    list: bool,
    /// Take a snapshot of the disk
    #[arg(short, long, value_name = "NAME")]
    create: Option<String>,
    /// Revert the disk to a snapshot
    #[arg(short, long, value_name = "SNAPSHOT")]
    apply: Option<String>,
    /// Delete a snapshot
    #[arg(short, long, value_name = "NAME")]
    delete: Option<String>,
    /// The image's format [default: detected]
    #[arg(short, long, value_name = "FMT", value_parser = options::named_format)]
    format: Option<NamedFormat>,
    /// Read the image even while another program writes to it; only with -l
    #[arg(short = 'U', long)]
    force_share: bool,
    /// Print only errors
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    naming: Naming,
    /// The image
    image: PathBuf,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Outcome {
    let changes = [&args.create, &args.apply, &args.delete];
    let wanted = changes.iter().filter(|change| change.is_some()).count() + usize::from(args.list);
    if wanted > 1 {
        return Err(Failure::new("Cannot mix '-l', '-a', '-c', '-d'"));
    }
    args.naming.instead.check_alone("'snapshot'")?;
    let image = args.naming.image(&args.image, args.format)?;
    if changes.iter().all(|change| change.is_none()) {
        args.naming.instead.check_no_data("snapshot -l")?;
        let locking = options::locking(args.force_share);
        runtime::block_on(async || image.check_data_file(locking).await)?;
        for image in info::read(&image, locking, false)? {
            info::snapshot_list(out, &image.snapshots)?;
        }
        return Ok(0);
    }
    if args.force_share {
        return Err(Failure::new("--force-share cannot be used when the image is changed"));
    }
    let options = image.writable(false)?;
    let (host, image) = (images(), &image.path);
    runtime::block_on(async || {
        if let Some(name) = &args.create {
            let taken = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let created = Box::pin(create_snapshot(host, image, &options, name, taken)).await;
            return created.map_err(|error| failed("create", name, &error));
        }
        if let Some(name) = &args.apply {
            let applied = Box::pin(apply_snapshot(host, image, &options, name)).await;
            return applied.map_err(|error| failed("apply", name, &error));
        }
        if let Some(name) = &args.delete {
            let deleted = Box::pin(delete_snapshot(host, image, &options, name)).await;
            return deleted.map_err(|error| failed("delete", name, &error));
        }
        Ok(())
    })?;
    Ok(0)
}

fn failed(what: &str, snapshot: &str, error: &DiskError) -> Failure {
    let mut reason = reason(error);
    if what == "apply" && reason == "snapshot not found" {
        reason = "Failed to load snapshot: No such file or directory".into();
    }
    Failure::new(format_args!("Could not {what} snapshot '{}': {reason}", printable(snapshot)))
}
