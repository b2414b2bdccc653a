//! `isobath dd`

use super::convert::{files_of, refuse_source};
use super::foreign;
use crate::failure::{Failure, Outcome};
use crate::host::{ImageHost, images};
use crate::image_name::Naming;
use crate::options::NamedFormat;
use crate::{messages, options, runtime, size};
use isobath_disk::{Disk, ImageFormat, NewDisk, OpenOptions, ZeroFlags, create_held_beside};
use isobath_formats::{Format, PIECE};
use isobath_storage::{IoBuf, Layout, StorageExt};
use std::io::Write;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Maximum bytes per read, whatever the block size.
const CHUNK: u64 = 2 << 20;
/// Maximum guest bytes and runs per block status query.
const WINDOW: (u64, usize) = (1 << 30, 4096);

/// Copy part of a disk to a new image
///
/// The new disk consists of the copied blocks, up to the end of the input.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The input's format [default: detected]
    #[arg(short, long, value_name = "FMT", value_parser = options::named_format)]
    format: Option<NamedFormat>,
    /// The new image's format
    #[arg(short = 'O', long, value_name = "FMT", default_value = "raw", value_parser = options::named_format)]
    output_format: NamedFormat,
    /// Read the input even while another program writes to it
    #[arg(short = 'U', long)]
    force_share: bool,
    #[command(flatten)]
    naming: Naming,
    /// if=INPUT of=OUTPUT [bs=BYTES] [count=BLOCKS] [skip=BLOCKS]
    #[arg(value_name = "OPERANDS")]
    operands: Vec<String>,
}

/// The operands' values.
#[derive(Default)]
struct Operands<'a> {
    input: Option<&'a str>,
    output: Option<&'a str>,
    block: Option<u64>,
    count: Option<u64>,
    skip: u64,
}

fn parse(operands: &[String]) -> Result<Operands<'_>, Failure> {
    let mut parsed = Operands::default();
    for operand in operands {
        let Some((name, value)) = operand.split_once('=') else {
            return Err(Failure::new(format_args!("unrecognized operand {operand}")));
        };
        let number = || size::parse(value).map_err(|_| Failure::new(size::explained(name)));
        match name {
            "if" => parsed.input = Some(value),
            "of" => parsed.output = Some(value),
            "bs" => {
                let bytes = number()?;
                if !(1..=i32::MAX as u64).contains(&bytes) {
                    return Err(Failure::new(
                        "Invalid bs specified. Must be between 1 and 2147483647.",
                    ));
                }
                parsed.block = Some(bytes);
            }
            "count" => parsed.count = Some(number()?),
            "skip" => parsed.skip = number()?,
            _ => return Err(Failure::new(format_args!("unrecognized operand {name}"))),
        }
    }
    Ok(parsed)
}

pub(crate) fn run(args: &Args, _out: &mut dyn Write) -> Outcome {
    let operands = parse(&args.operands)?;
    let (Some(input), Some(output)) = (operands.input, operands.output) else {
        return Err(Failure::new("Must specify both input and output files"));
    };
    let block = operands.block.unwrap_or(512);
    let image = args.naming.image(Path::new(input), args.format)?;
    let mut place = Naming::target(Path::new(output)).map_err(Failure::new)?;
    place.device = args.output_format.device().or(place.device);
    let checked = match args.output_format.format {
        ImageFormat::Foreign(_) => place.check_file(),
        _ => place.check(),
    };
    checked.map_err(|reason| {
        Failure::new(reason).context(format_args!("{output}: error while creating output image"))
    })?;
    let target = Naming::default().file_image(Path::new(output), Some(args.output_format))?;
    runtime::block_on(async || {
        let locking = options::locking(args.force_share);
        let source = image.open(&image.options(false, locking)).await?;
        let skipped = operands.skip.saturating_mul(block);
        if skipped > source.size() {
            messages::complain(format_args!("{input}: cannot skip to specified offset"));
        }
        let skipped = skipped.min(source.size());
        let wanted = operands.count.map_or(u64::MAX, |count| count.saturating_mul(block));
        let range = skipped..skipped.saturating_add(wanted).min(source.size());
        refuse_source(&target.path, std::slice::from_ref(&source)).await?;
        let length = range.end - range.start;
        if let ImageFormat::Foreign(format) = args.output_format.format {
            return copy_to_foreign(&source, range, format, &target.path).await.map_err(
                |failure| {
                    failure.context(format_args!("{output}: error while creating output image"))
                },
            );
        }
        // Without a secret, for which `dd` has no option, a LUKS image is refused.
        let mut new = NewDisk::new(length.next_multiple_of(512)).format(args.output_format.format);
        new.on_device = place.device.is_some();
        let others = files_of(std::slice::from_ref(&source));
        let created = create_held_beside(images(), &target.path, &new, &others).await;
        let created = created.map_err(|error| {
            Failure::new(crate::image_name::reason(&error))
                .context(format_args!("{output}: error while creating output image"))
        })?;
        let options: OpenOptions = target.writable(false)?;
        created.let_in().await?;
        let sink = target.open(&options).await?;
        copy(&source, &sink, range).await?;
        sink.close().await?;
        Ok(())
    })?;
    Ok(0)
}

/// Copies a range to a new image in another program's format.
async fn copy_to_foreign(
    source: &Arc<Disk<ImageHost>>,
    range: Range<u64>,
    format: Format,
    target: &Path,
) -> Result<(), Failure> {
    let length = range.end - range.start;
    let new = foreign::Options::parse(format, &[]).and_then(|options| options.image());
    let (new, size) = (new.map_err(Failure::new)?, length.next_multiple_of(512));
    let others = files_of(std::slice::from_ref(source));
    let made = new.create(target, size, false, Layout::default(), &others).await;
    let (mut writer, files) = made.map_err(Failure::new)?;
    let work = async {
        let mut at = 0;
        while at < length {
            // A multiple of the size of a write.
            let (from, size) = (range.start + at, CHUNK.min(length - at));
            let status = source.block_status(from, size, usize::MAX).await?;
            let zero: u64 = status.iter().filter(|run| run.zero).map(|run| run.length).sum();
            if zero < size {
                let bytes = source.read(from, IoBuf::zeroed(size as usize)).await?;
                let pieces = (at..).step_by(PIECE).zip(bytes.chunks(PIECE));
                let pieces = pieces.filter_map(|(at, piece)| writer.prepare(at, piece)).collect();
                writer.write(pieces).await?;
            }
            at += size;
        }
        Ok::<_, Failure>(writer.finish().await?)
    };
    let result = work.await;
    if result.is_err() {
        files.remove(true).await;
    }
    result
}

async fn copy(
    source: &Disk<ImageHost>,
    sink: &Disk<ImageHost>,
    range: Range<u64>,
) -> Result<(), Failure> {
    // A device or an export has what it had before; a new file has zeroes.
    let is_fixed = sink.layers().next().is_some_and(|layer| {
        layer.format() == ImageFormat::Raw && !layer.storage().extends_with_zeroes()
    });
    let zero = async |range: Range<u64>| {
        if is_fixed && !range.is_empty() {
            let flags = ZeroFlags { may_unmap: true, only_fast: false };
            sink.write_zeroes(range.start, range.end - range.start, flags).await?;
        }
        Ok::<_, Failure>(())
    };
    let mut at = range.start;
    while at < range.end {
        let (window, runs) = WINDOW;
        for run in source.block_status(at, window.min(range.end - at), runs).await? {
            let end = (at + run.length).min(range.end);
            while at < end {
                let next = if run.zero { end } else { end.min(at + CHUNK) };
                let there = at - range.start..next - range.start;
                if run.zero {
                    zero(there).await?;
                } else {
                    let data = source.read(at, IoBuf::zeroed((next - at) as usize)).await?;
                    sink.write(there.start, data).await?;
                }
                at = next;
            }
        }
    }
    // The rest of the last sector.
    let length = range.end - range.start;
    zero(length..length.next_multiple_of(512).min(sink.size())).await
}
