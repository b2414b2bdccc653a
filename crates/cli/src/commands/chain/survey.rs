//! `isobath chain survey`

use crate::failure::{Failure, Outcome};
use crate::{json, screen};
use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use isobath_qcow2::is_qcow2;
use isobath_ring::place::Place;
use isobath_survey::render::{self, Listing};
use isobath_survey::{Options, Phase, Progress, SortBy, Survey, cost, shown, survey};
use rustix::fs::OFlags;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// The exit code after a signal, once partial results are printed.
const INTERRUPTED: u8 = 130;

/// Survey a fleet of images: chain lengths, snapshot frequency and costs
///
/// Examines every qcow2 image below the given paths and follows its backing files. Reads only headers unless --bytes is
/// given, writes nothing to images and takes no locks. Exit codes: 0 the survey is complete, even if some images are
/// damaged; 1 the survey failed; 130 it was interrupted, and partial results were printed.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Directories and images to survey
    #[arg(required = true, value_name = "PATH")]
    paths: Vec<PathBuf>,
    /// Also read the L1 and L2 tables, to count bytes that no disk can see
    #[arg(long)]
    bytes: bool,
    /// Output format; csv and parquet list every chain
    #[arg(long, value_name = "FMT", default_value = "human")]
    output: Output,
    /// Write the output to this file
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Also write an HTML page with charts to this file
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Number of chains to list
    #[arg(long, value_name = "N", default_value_t = 20)]
    top: usize,
    /// Sort the listed chains by this, largest first
    #[arg(long, value_name = "WHAT", default_value = "length")]
    sort: Sort,
    /// Advise merging chains of at least this length
    #[arg(long, value_name = "N", default_value_t = cost::STREAMING_THRESHOLD,
          value_parser = clap::value_parser!(u32).range(2..))]
    merge_at: u32,
    /// How to date a snapshot: by the file's birth time (or last write, where the file system records no birth time),
    /// or by its last write
    #[arg(long, value_name = "WHAT", default_value = "birth")]
    times: Times,
    /// Do not cross file system boundaries
    #[arg(short = 'x', long)]
    one_file_system: bool,
    /// Number of reader threads
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Do not show progress
    #[arg(short, long)]
    quiet: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Output {
    /// Human-readable tables
    Human,
    /// JSON
    Json,
    /// CSV
    Csv,
    /// Parquet
    Parquet,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Sort {
    /// Number of files in the chain
    Length,
    /// Memory QEMU uses for the chain
    Memory,
    /// Bytes the chain's files use
    Held,
    /// Bytes that no disk can see; requires --bytes
    Hidden,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Times {
    /// Birth time
    Birth,
    /// Last write
    Modified,
}

/// Bytes of an existing file that are looked at.
const START: usize = 1024;

/// What begins a page.
const PAGE: &[&str] = &["<!DOCTYPE html>", "<title>Chain survey</title>"];

impl Output {
    /// What begins it.
    fn beginning(self) -> &'static [&'static str] {
        match self {
            Self::Human => &[" file", " in ", " director", " s, "],
            Self::Json => &["{", "\"paths\": ["],
            Self::Csv => &["image,length,"],
            Self::Parquet => &["PAR1"],
        }
    }

    /// Whether it must be as it is, even where a person may read it.
    fn is_for_programs(self) -> bool {
        matches!(self, Self::Csv | Self::Parquet) && !io::IsTerminal::is_terminal(&io::stdout())
    }
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Outcome {
    if args.output == Output::Parquet && !render::HAS_PARQUET {
        return Err(Failure::new("this build of isobath writes no Parquet; use --output csv"));
    }
    if args.output == Output::Parquet
        && args.file.is_none()
        && io::IsTerminal::is_terminal(&io::stdout())
    {
        return Err(Failure::new(
            "refusing to write Parquet to a terminal; use --file to write to a file",
        ));
    }
    if args.sort == Sort::Hidden && !args.bytes {
        return Err(Failure::new("--sort hidden requires --bytes, which counts hidden bytes"));
    }
    let surveyed = watched(args)?;
    let report = surveyed.report();
    let listing = Listing {
        count: args.top,
        sort: match args.sort {
            Sort::Length => SortBy::Length,
            Sort::Memory => SortBy::Memory,
            Sort::Held => SortBy::Held,
            Sort::Hidden => SortBy::Hidden,
        },
    };
    if let Some(path) = &args.html {
        let page = render::html(&surveyed, &report, listing);
        to_file(path, PAGE, |file| file.write_all(page.as_bytes()))?;
    }
    let print = |out: &mut dyn Write| match args.output {
        Output::Human => render::text(&surveyed, &report, listing, out),
        Output::Json => json::print(out, &render::json(&surveyed, &report, listing)),
        Output::Csv => render::csv(&surveyed, out),
        Output::Parquet => {
            // The Parquet writer must be `Send`; the lock of standard output is not.
            let mut bytes = Vec::new();
            render::parquet(&surveyed, &mut bytes)?;
            out.write_all(&bytes)
        }
    };
    match &args.file {
        Some(path) => to_file(path, args.output.beginning(), |file| print(file))?,
        None if args.output.is_for_programs() => print(&mut screen::raw())?,
        None => print(out)?,
    }
    Ok(if surveyed.is_interrupted() { INTERRUPTED } else { 0 })
}

/// Runs the survey with progress on the terminal; the first signal ends it with partial results.
fn watched(args: &Args) -> Result<Survey, Failure> {
    let defaults = Options::default();
    let options = Options {
        threads: args.threads.map_or(defaults.threads, usize::from),
        one_file_system: args.one_file_system,
        births: args.times == Times::Birth,
        clusters: args.bytes,
        merge_at: args.merge_at,
    };
    let progress = Arc::new(Progress::default());
    let failed =
        |error: io::Error| Failure::new(format_args!("cannot set up signal handlers: {error}"));
    let mut signals = Signals::new([SIGINT, SIGTERM]).map_err(failed)?;
    let handle = signals.handle();
    let watcher = {
        let progress = progress.clone();
        thread::spawn(move || {
            for signal in &mut signals {
                if progress.is_stopped() {
                    // A second signal ends the process.
                    let _ = signal_hook::low_level::emulate_default_handler(signal);
                }
                progress.stop();
            }
        })
    };
    let result = thread::scope(|scope| {
        let work = scope.spawn(|| survey(&args.paths, &options, &progress));
        let bar = bar(args.quiet);
        while !work.is_finished() {
            show(&bar, &progress);
            thread::sleep(Duration::from_millis(20));
        }
        bar.finish_and_clear();
        work.join()
    });
    handle.close();
    let _ = watcher.join();
    match result {
        Ok(result) => result.map_err(Failure::new),
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

fn bar(quiet: bool) -> ProgressBar {
    // On stderr, and hidden if stderr is not a terminal.
    let target =
        if quiet { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr_with_hz(5) };
    let bar = ProgressBar::with_draw_target(None, target);
    if let Ok(style) = ProgressStyle::with_template("{spinner} {elapsed} {msg}") {
        bar.set_style(style);
    }
    bar
}

fn show(bar: &ProgressBar, progress: &Progress) {
    let (directories, files, images) = progress.walked();
    let found = format!("{directories} directories, {files} files, {images} images");
    bar.set_message(match progress.phase() {
        Phase::Walking => found,
        Phase::Linking => format!("{found}; linking chains"),
        Phase::Counting => format!("{found}; clusters of {} counted", progress.counted()),
    });
    bar.tick();
}

/// Writes a file. An existing one is overwritten only if it is empty, or begins with all of these words.
fn to_file(
    path: &Path,
    beginning: &[&str],
    print: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> Result<(), Failure> {
    let write = || {
        let place = Place::of(path)?;
        let file = match place.create_new(0o666) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                let file = place.open(OFlags::RDWR)?;
                refuse_others(&file, beginning)?;
                file.set_len(0)?;
                file
            }
            created => created?,
        };
        let mut file = BufWriter::new(file);
        print(&mut file)?;
        file.flush()
    };
    write().map_err(|error| {
        let name = shown(path.as_os_str().as_bytes());
        Failure::new(format_args!("cannot write '{name}': {error}"))
    })
}

/// Refuses to overwrite what no survey has written: a misplaced name among the arguments must do no harm.
fn refuse_others(file: &File, beginning: &[&str]) -> io::Result<()> {
    let mut start = vec![0; START];
    let length = file.read_at(&mut start, 0)?;
    start.truncate(length);
    if start.is_empty() {
        return Ok(());
    }
    let what = if is_qcow2(&start) {
        "a qcow2 image"
    } else if beginning.iter().all(|word| contains(&start, word.as_bytes())) {
        return Ok(());
    } else {
        "what is no survey of this kind; remove it first"
    };
    Err(io::Error::new(io::ErrorKind::AlreadyExists, format!("refusing to overwrite {what}")))
}

fn contains(text: &[u8], part: &[u8]) -> bool {
    text.windows(part.len()).any(|window| window == part)
}
