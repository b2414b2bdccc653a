//! `isobath measure`

use crate::commands::{create, foreign};
use crate::failure::{Failure, Outcome};
use crate::host::{ImageHost, images};
use crate::image_name::{Naming, reason};
use crate::options::{self, NamedFormat, OutputFormat};
use crate::{json, null, runtime, size};
use isobath_disk::{
    BitmapInfo, Disk, ImageFormat, MeasureError, NewDisk, SnapshotChoice, info, measure,
};
use serde_json::{Map, Value};
use std::io::Write;
use std::path::PathBuf;

/// Bytes of an entry of the bitmap directory, before its name.
const BITMAP_ENTRY: u64 = 24;

/// Calculate the file size a new image would need
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The format of the image to copy [default: detected]
    #[arg(short, long, value_name = "FMT", value_parser = options::named_format)]
    format: Option<NamedFormat>,
    /// The new image's format
    #[arg(
        short = 'O',
        long = "target-format",
        alias = "output-format",
        value_name = "FMT",
        default_value = "raw"
    )]
    #[arg(value_parser = options::format)]
    output_format: ImageFormat,
    /// Options for the new image as NAME=VALUE, as in 'isobath create'
    #[arg(short, long, value_name = "OPTIONS", value_parser = options::list)]
    options: Vec<String>,
    /// Measure an empty disk of this size instead of an image
    #[arg(short, long, value_parser = size::parse)]
    size: Option<u64>,
    /// Output format
    #[arg(long, value_name = "FMT", default_value = "human")]
    output: OutputFormat,
    /// Read the image even while another program writes to it
    #[arg(short = 'U', long)]
    force_share: bool,
    /// The internal snapshot to measure: its ID or name, or snapshot.id=ID,snapshot.name=NAME
    #[arg(short = 'l', long, value_name = "SNAPSHOT", value_parser = options::snapshot)]
    snapshot: Option<SnapshotChoice>,
    #[command(flatten)]
    naming: Naming,
    /// The image to copy
    #[arg(value_name = "IMAGE")]
    images: Vec<PathBuf>,
}

/// Bytes that bitmaps for a disk of `size` bytes take, if all their bits are set.
fn length_of(bitmaps: &[BitmapInfo], size: u64, cluster: u64) -> u64 {
    let whole = |bytes: u64| bytes.next_multiple_of(cluster);
    let (mut length, mut directory) = (0, 0);
    for bitmap in bitmaps {
        let bits = whole(size.div_ceil(bitmap.granularity.max(1)).div_ceil(8));
        length += bits + whole(bits / cluster * 8);
        directory += (BITMAP_ENTRY + bitmap.name.len() as u64).next_multiple_of(8);
    }
    length + whole(directory)
}

/// Whether a disk does not say what it holds. QEMU counts nothing of it as data.
fn is_silent(disk: &Disk<ImageHost>) -> bool {
    disk.layers().all(|layer| null::says_nothing(layer.name()))
}

/// The image to measure, if no size is given. Wrong combinations are refused in QEMU's words and order.
fn image_of(args: &Args) -> Result<Option<&PathBuf>, Failure> {
    let refused = |reason: &str| Err(Failure::new(reason));
    let describes = args.naming.image_opts || args.format.is_some() || args.snapshot.is_some();
    match (args.images.as_slice(), args.size) {
        ([_, _, ..], _) => refused("At most one filename argument is allowed."),
        ([], _) if describes => refused("--image-opts, -f, and -l require a filename argument."),
        ([], None) => refused("Either --size N or one filename must be specified."),
        ([_], Some(_)) => refused("--size N cannot be used together with a filename."),
        ([image], None) => Ok(Some(image)),
        ([], Some(_)) => Ok(None),
    }
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Outcome {
    let image = image_of(args)?;
    let mut new = NewDisk::default().format(args.output_format);
    new.size = args.size;
    let given = options::parse(&args.options);
    if let ImageFormat::Foreign(format) = new.format {
        foreign::Options::parse(format, &given).map_err(|error| {
            let (program, name) = (crate::program::name(), format.name());
            let more = format_args!("{program}: Invalid options for file format '{name}'");
            Failure::new(format_args!("{error}\n{more}"))
        })?;
    } else {
        create::apply_all(&mut new, &given).map_err(Failure::new)?;
    }
    new.encryption =
        create::encryption(&new, &given, &args.naming.objects).map_err(Failure::new)?;
    let failed = |error| match error {
        // The image is yet to be made, and has no name.
        MeasureError::New(error) => Failure::new(reason(&error)),
        MeasureError::Source(error) => error.into(),
    };
    let (measured, bitmaps) = runtime::block_on(async || {
        let Some(image) = image else {
            return Ok((measure::<ImageHost>(&new, None).await.map_err(failed)?, None));
        };
        let locking = options::locking(args.force_share);
        let image = args.naming.image(image, args.format)?;
        let options = image.options(false, locking).snapshot(args.snapshot.clone());
        let disk = image.open(&options).await?;
        // 'convert --bitmaps' copies bitmaps. As in QEMU, inconsistent ones count, too.
        let header = disk.layers().next().and_then(|layer| layer.header());
        let can = new.format == ImageFormat::Qcow2
            && new.version >= 3
            && header.as_ref().is_some_and(|header| header.version >= 3);
        let any = header.as_ref().is_some_and(|header| header.bitmaps().is_some());
        let measured = if new.backing_file.is_none() && is_silent(&disk) {
            let mut empty = new.clone();
            empty.size = Some(disk.size());
            measure::<ImageHost>(&empty, None).await
        } else {
            measure(&new, Some(&disk)).await
        };
        let measured = measured.map_err(failed)?;
        let bitmaps = match can {
            true if any => {
                let look = image.look(options.locking);
                let found = info(images(), &image.path, &look).await;
                let found = found.map_err(|error| image.failed(&error))?;
                let bitmaps = found.qcow2.map(|qcow2| qcow2.bitmaps).unwrap_or_default();
                Some(length_of(&bitmaps, disk.size(), new.cluster_size))
            }
            true => Some(0),
            false => None,
        };
        Ok((measured, bitmaps))
    })?;
    match args.output {
        OutputFormat::Human => {
            writeln!(out, "required size: {}", measured.required)?;
            writeln!(out, "fully allocated size: {}", measured.fully_allocated)?;
            if let Some(bitmaps) = bitmaps {
                writeln!(out, "bitmaps size: {bitmaps}")?;
            }
        }
        OutputFormat::Json => {
            let mut object = Map::new();
            if let Some(bitmaps) = bitmaps {
                object.insert("bitmaps".into(), bitmaps.into());
            }
            object.insert("required".into(), measured.required.into());
            object.insert("fully-allocated".into(), measured.fully_allocated.into());
            json::print(out, &Value::Object(object))?;
        }
    }
    Ok(0)
}
