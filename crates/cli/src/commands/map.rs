//! `isobath map`

use crate::failure::{Failure, Outcome};
use crate::host::ImageHost;
use crate::image_name::Naming;
use crate::options::{self, NamedFormat, OutputFormat, printable};
use crate::{null, runtime, size};
use isobath_disk::{Disk, MapEntry};
use isobath_storage::IoBuf;
use std::io::Write;
use std::path::PathBuf;

/// Show which image of a chain holds which data, and at which offset
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The image's format [default: detected]
    #[arg(short, long, value_name = "FMT", value_parser = options::named_format)]
    format: Option<NamedFormat>,
    /// The guest offset at which to start
    #[arg(short, long, value_name = "OFFSET", value_parser = start, default_value = "0")]
    start_offset: u64,
    /// The length of the range to describe [default: up to the end of the disk]
    #[arg(short = 'l', long, value_name = "LEN", value_parser = length)]
    max_length: Option<u64>,
    /// Output format
    #[arg(long, value_name = "FMT", default_value = "human")]
    output: OutputFormat,
    /// Read the images even while other programs write to them
    #[arg(short = 'U', long)]
    force_share: bool,
    #[command(flatten)]
    naming: Naming,
    /// The image
    image: PathBuf,
}

fn start(text: &str) -> Result<u64, String> {
    size::parse(text).map_err(|_| size::explained("start offset"))
}

fn length(text: &str) -> Result<u64, String> {
    size::parse(text).map_err(|_| size::explained("max length"))
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Outcome {
    let locking = options::locking(args.force_share);
    let image = args.naming.image(&args.image, args.format)?;
    runtime::block_on(async || {
        let disk = image.open(&image.options(false, locking)).await?;
        let length = args.max_length.unwrap_or(u64::MAX);
        let end = disk.size().min(args.start_offset.saturating_add(length));
        let range = args.start_offset.min(end)..end;
        let silent = silent_depths(&disk);
        match args.output {
            OutputFormat::Human => human(&disk, range, &silent, out).await,
            OutputFormat::Json => json(&disk, range, args.start_offset, &silent, out).await,
        }
    })?;
    Ok(0)
}

/// The depths of disks without contents that do not say what they hold.
fn silent_depths(disk: &Disk<ImageHost>) -> Vec<u32> {
    let layers = (0..).zip(disk.layers());
    let silent = layers.filter(|(_, layer)| null::says_nothing(layer.name()));
    silent.map(|(depth, _)| depth).collect()
}

/// An entry as QEMU shows it: of such a disk nothing is known.
fn shown(entry: MapEntry, silent: &[u32]) -> MapEntry {
    if entry.data && silent.contains(&entry.depth) {
        return MapEntry { present: false, data: false, offset: None, ..entry };
    }
    entry
}

async fn json(
    disk: &Disk<ImageHost>,
    range: std::ops::Range<u64>,
    start: u64,
    silent: &[u32],
    out: &mut dyn Write,
) -> Result<(), Failure> {
    let mut result = write!(out, "[");
    let mut between = "";
    let mut print = |entry: &MapEntry| {
        if result.is_ok() {
            let entry = shown(*entry, silent);
            let MapEntry { start, length, depth, present, zero, data, .. } = entry;
            let offset =
                entry.offset.map_or(String::new(), |offset| format!(", \"offset\": {offset}"));
            result = write!(
                out,
                "{between}{{ \"start\": {start}, \"length\": {length}, \"depth\": {depth}, \
                 \"present\": {present}, \"zero\": {zero}, \"data\": {data}{offset}}}"
            );
            between = ",\n";
        }
    };
    if range.is_empty() {
        // qemu-img describes an empty range with one entry.
        print(&MapEntry {
            start,
            length: 0,
            depth: 0,
            present: false,
            zero: false,
            data: false,
            compressed: false,
            offset: None,
        });
    } else {
        disk.chain_map(range, &mut print).await?;
    }
    result?;
    writeln!(out, "]")?;
    Ok(())
}

async fn human(
    disk: &Disk<ImageHost>,
    range: std::ops::Range<u64>,
    silent: &[u32],
    out: &mut dyn Write,
) -> Result<(), Failure> {
    let names: Vec<String> = disk
        .layers()
        .map(|layer| {
            let name = isobath_storage::StorageExt::name(&**layer.data());
            printable(&name.display().to_string())
        })
        .collect();
    let mut result =
        writeln!(out, "{:<16}{:<16}{:<16}File", "Offset", "Length", "Mapped to").map(|()| None);
    let mut print = |entry: &MapEntry| {
        let entry = shown(*entry, silent);
        if !matches!(result, Ok(None)) || !entry.data || entry.zero {
            return;
        }
        let Some(offset) = entry.offset else {
            result = Ok(Some(entry.start));
            return;
        };
        let name = names.get(entry.depth as usize).map_or("", String::as_str);
        let (start, length) = (hex(entry.start), hex(entry.length));
        result = writeln!(out, "{start:<16}{length:<16}{:<16}{name}", hex(offset)).map(|()| None);
    };
    if !range.is_empty() {
        disk.chain_map(range, &mut print).await?;
    }
    if let Some(start) = result? {
        // If a table is invalid, reading reports why.
        disk.read(start, IoBuf::zeroed(1)).await?;
        return Err(Failure::new("File contains external, encrypted or compressed clusters."));
    }
    Ok(())
}

/// `printf("%#x")`.
fn hex(number: u64) -> String {
    if number == 0 { "0".into() } else { format!("{number:#x}") }
}
