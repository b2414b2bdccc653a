//! `isobath compare`

use crate::cache::CacheMode;
use crate::failure::{Failure, Outcome};
use crate::host::ImageHost;
use crate::image_name::Naming;
use crate::options::NamedFormat;
use crate::workers::{self, Progress};
use crate::{options, runtime};
use isobath_disk::{Compare, CompareError, Difference, Disk};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Reads in flight.
const TASKS: usize = 8;

/// Compare the contents of two disks
///
/// If one disk is shorter, it is treated as padded with zeroes.
///
/// Exit codes: 0 the disks are identical; 1 they differ; 2 an image cannot be opened; 3 the block status cannot be
/// read; 4 the data cannot be read.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// The first image's format [default: detected]
    #[arg(short, long = "a-format", alias = "format", value_name = "FMT", value_parser = options::named_format)]
    format: Option<NamedFormat>,
    /// The second image's format [default: detected]
    #[arg(short = 'F', long = "b-format", alias = "second-format", value_name = "FMT")]
    #[arg(value_parser = options::named_format)]
    second_format: Option<NamedFormat>,
    /// Cache mode for both images
    #[arg(
        short = 'T',
        long = "cache",
        alias = "source-cache",
        value_name = "MODE",
        default_value = "writeback"
    )]
    source_cache: String,
    /// Strict mode: also fail if the sizes or the allocated ranges differ
    #[arg(short, long)]
    strict: bool,
    /// Show progress
    #[arg(short, long)]
    progress: bool,
    /// Print only errors
    #[arg(short, long)]
    quiet: bool,
    /// Read the images even while other programs write to them
    #[arg(short = 'U', long)]
    force_share: bool,
    #[command(flatten)]
    naming: Naming,
    /// The two images
    #[arg(value_name = "IMAGE1 IMAGE2")]
    images: Vec<PathBuf>,
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Outcome {
    let cache = CacheMode::parse_source(&args.source_cache);
    let cache = cache.map_err(|message| Failure::new(message).with_code(2))?;
    let [first, second] = args.images.as_slice() else {
        return Err(Failure::usage("Expecting two image file names"));
    };
    args.naming.check_for_several().map_err(|failure| failure.with_code(2))?;
    let mut say = |text: &str| if args.quiet { Ok(()) } else { writeln!(out, "{text}") };
    runtime::block_on(async || {
        let one = open(args, cache, first, args.format).await?;
        let other = open(args, cache, second, args.second_format).await?;
        let same_size = one.size() == other.size();
        let shared = one.size().min(other.size());
        if args.strict && !same_size {
            say("Strict mode: Image size mismatch!")?;
            return Ok(1);
        }
        let compare = Arc::new(Compare::new(one, other, args.strict));
        let shown = compare.clone();
        let progress = Progress::show(args.progress && !args.quiet, move || shown.progress());
        let make = {
            let compare = compare.clone();
            move || {
                let compare = compare.clone();
                async move { compare.work().await }
            }
        };
        let results = workers::run(TASKS, make).await?;
        let difference = compare.difference();
        let failed = results.into_iter().find_map(Result::err);
        progress.end(failed.is_none() && difference.is_none());
        if let Some(error) = failed {
            return Err(failure(args, error));
        }
        let early = difference.is_some_and(|found| match found {
            Difference::Status(_) => true,
            Difference::Content(offset) => offset < shared,
        });
        if !same_size && !early {
            say("Warning: Image size mismatch!")?;
        }
        match difference {
            None => say("Images are identical.")?,
            Some(Difference::Content(offset)) => {
                say(&format!("Content mismatch at offset {offset}!"))?;
            }
            Some(Difference::Status(offset)) => {
                say(&format!("Strict mode: Offset {offset} block status mismatch!"))?;
            }
        }
        Ok(u8::from(difference.is_some()))
    })
}

async fn open(
    args: &Args,
    cache: CacheMode,
    image: &Path,
    format: Option<NamedFormat>,
) -> Result<Arc<Disk<ImageHost>>, Failure> {
    let image = args.naming.image(image, format).map_err(|failure| failure.with_code(2))?;
    let locking = options::locking(args.force_share);
    let options = image.options(cache.is_direct(), locking);
    image.open(&options).await.map_err(|failure| failure.with_code(2))
}

fn failure(args: &Args, error: CompareError) -> Failure {
    let name = |side: usize| {
        args.images.get(side).map_or_else(String::new, |image| image.display().to_string())
    };
    match error {
        CompareError::Status(side, error) => {
            let what = format!("Sector allocation test failed for {}", name(side));
            Failure::from(error).context(what).with_code(3)
        }
        CompareError::Read(side, offset, error) => {
            let what = format!("Error while reading offset {offset} of {}", name(side));
            Failure::from(error).context(what).with_code(4)
        }
    }
}
