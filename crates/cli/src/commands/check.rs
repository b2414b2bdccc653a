//! `isobath check`

use crate::cache::CacheMode;
use crate::failure::{Failure, Outcome};
use crate::host::{ImageFile, images, is_export};
use crate::image_name::{Image, Naming};
use crate::options::{self, NamedFormat, OutputFormat};
use crate::{json, messages, runtime};
use isobath_disk::{CheckEvent, CheckOptions, CheckReport, DiskError, OpenOptions, Repair, check};
use isobath_formats::Format;
use isobath_qcow2::text::Shown;
use isobath_storage::{Host, OpenMode, StorageExt};
use serde_json::{Map, Value, json};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Check an image for errors and repair it
///
/// Checks only the image itself, not its backing files. Errors found are printed to stderr.
///
/// Exit codes: 0 the image is consistent; 1 the check failed; 2 the image is corrupt; 3 it has leaked
/// clusters but is not corrupt; 63 its format does not support checks.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The image's format [default: detected]
    #[arg(short, long, value_name = "FMT", value_parser = options::named_format)]
    format: Option<NamedFormat>,
    /// Output format
    #[arg(long, value_name = "FMT", default_value = "human")]
    output: OutputFormat,
    /// Repair the image: 'leaks' frees unreferenced clusters, 'all' repairs everything that needs no guessing
    #[arg(short, long, value_name = "WHAT", value_parser = what)]
    repair: Option<Repair>,
    /// Print only the errors found
    #[arg(short, long)]
    quiet: bool,
    /// Read the image even while another program writes to it
    #[arg(short = 'U', long, conflicts_with = "repair")]
    force_share: bool,
    /// Cache mode for the image
    #[arg(short = 'T', long = "cache", value_name = "MODE", default_value = "writeback")]
    #[arg(value_parser = CacheMode::parse_source)]
    cache: CacheMode,
    #[command(flatten)]
    naming: Naming,
    /// The image
    image: PathBuf,
}

fn what(text: &str) -> Result<Repair, String> {
    match text {
        "leaks" => Ok(Repair::Leaks),
        "all" => Ok(Repair::All),
        _ => Err(format!("Unknown option value for -r (expecting 'leaks' or 'all'): {text}")),
    }
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Outcome {
    let repair = args.repair.unwrap_or_default();
    let locking = options::locking(args.force_share);
    args.naming.instead.check_alone("'check'")?;
    args.naming.instead.check_no_data("check")?;
    let image = args.naming.image(&args.image, args.format)?;
    let options = image.options(args.cache.is_direct(), locking);
    let OpenOptions { locking, direct, format, .. } = options;
    let options = CheckOptions { repair, locking, direct, format };
    let human = args.output == OutputFormat::Human;
    runtime::block_on(async || image.check_data_file(locking).await)?;
    let _kept = match repair {
        Repair::None => None,
        _ => runtime::block_on(async || kept(&image).await)?,
    };
    let mut report = examine(&image, options)?;
    if report.corruptions_fixed > 0 || report.leaks_fixed > 0 {
        if human && !args.quiet {
            writeln!(
                out,
                "The following inconsistencies were found and repaired:\n\n    {} leaked \
                 clusters\n    {} corruptions\n\nDouble checking the fixed image now...",
                report.leaks_fixed, report.corruptions_fixed
            )?;
            out.flush()?;
        }
        let again = examine(&image, CheckOptions { repair: Repair::None, ..options })?;
        report = CheckReport {
            corruptions_fixed: report.corruptions_fixed,
            leaks_fixed: report.leaks_fixed,
            ..again
        };
    }
    if report.ended_early {
        return Err(Failure::new("Check failed: Invalid argument"));
    }
    match args.output {
        OutputFormat::Human if args.quiet => {}
        OutputFormat::Human => print(out, &report)?,
        OutputFormat::Json => json::print(out, &to_json(&args.image, &report))?,
    }
    Ok(match report {
        CheckReport { check_errors: 1.., .. } => {
            out.flush()?;
            return Err(Failure::new("Check failed"));
        }
        CheckReport { corruptions: 1.., .. } => 2,
        CheckReport { leaks: 1.., .. } => 3,
        _ => 0,
    })
}

/// Keeps other programs from writing to an image between its repair and the second check. Returns `None` if the image
/// cannot be opened; the repair then fails as well, and reports the reason.
///
/// # Errors
/// If another program writes to it.
async fn kept(image: &Image) -> Result<Option<ImageFile>, Failure> {
    let file = match images().open(&image.path, OpenMode::default()).await {
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
            return Err(image.failed(&DiskError::from(error)));
        }
        Err(_) => return Ok(None),
        Ok(file) => file,
    };
    file.admit_writer(true).await?;
    Ok(Some(file))
}

fn examine(image: &Image, options: CheckOptions) -> Result<CheckReport, Failure> {
    runtime::block_on(async || {
        let mut events = |event: CheckEvent<'_>| match event {
            CheckEvent::Finding(text) => messages::tell(Shown(text)),
            CheckEvent::Complaint(text) => messages::complain(Shown(text)),
            CheckEvent::Progress { .. } => {}
        };
        match check(images(), &image.path, &options, &mut events).await {
            Err(error @ DiskError::Unsupported(_)) => {
                // What cannot be opened is not said to be sound. A server may serve one client only.
                if !is_export(&image.path) {
                    let look = image.options(options.direct, options.locking);
                    let _ = image.open(&look).await?;
                }
                Err(Failure::from(error).with_code(63))
            }
            Err(error) => Err(image.failed(&error)),
            Ok(report) => Ok(report),
        }
    })
}

/// The report as qemu-img prints it.
fn print(out: &mut dyn Write, report: &CheckReport) -> io::Result<()> {
    if report.is_clean() {
        writeln!(out, "No errors were found on the image.")?;
    }
    if report.corruptions > 0 {
        writeln!(
            out,
            "\n{} errors were found on the image.\nData may be corrupted, or further writes to the \
             image may corrupt it.",
            report.corruptions
        )?;
    }
    if report.leaks > 0 {
        writeln!(
            out,
            "\n{} leaked clusters were found on the image.\nThis means waste of disk space, but no \
             harm to data.",
            report.leaks
        )?;
    }
    if report.check_errors > 0 {
        writeln!(out, "\n{} internal errors have occurred during the check.", report.check_errors)?;
    }
    let (total, allocated) = (report.total_clusters, report.allocated_clusters);
    if total > 0 && allocated > 0 {
        let percent = |part: u64, whole: u64| part as f64 * 100.0 / whole as f64;
        writeln!(
            out,
            "{allocated}/{total} = {:.2}% allocated, {:.2}% fragmented, {:.2}% compressed clusters",
            percent(allocated, total),
            percent(report.fragmented_clusters, allocated),
            percent(report.compressed_clusters, allocated)
        )?;
    }
    if report.image_end_offset > 0 {
        writeln!(out, "Image end offset: {}", report.image_end_offset)?;
    }
    Ok(())
}

/// The object that `qemu-img check --output=json` prints, in its order; zeroes other than `check-errors` are omitted.
fn to_json(image: &Path, report: &CheckReport) -> Value {
    let number = |number: u64| (number > 0).then(|| json!(number));
    let pairs = [
        ("image-end-offset", number(report.image_end_offset)),
        ("compressed-clusters", number(report.compressed_clusters)),
        ("total-clusters", number(report.total_clusters)),
        ("corruptions", number(report.corruptions)),
        ("corruptions-fixed", number(report.corruptions_fixed)),
        ("check-errors", Some(json!(report.check_errors))),
        ("leaks", number(report.leaks)),
        ("leaks-fixed", number(report.leaks_fixed)),
        ("allocated-clusters", number(report.allocated_clusters)),
        ("filename", Some(json!(image.display().to_string()))),
        ("format", Some(json!(report.foreign.map_or("qcow2", Format::name)))),
        ("fragmented-clusters", number(report.fragmented_clusters)),
    ];
    let pairs = pairs.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?)));
    Value::Object(pairs.collect::<Map<_, _>>())
}
