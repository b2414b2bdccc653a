//! `isobath chain generate`

use crate::failure::{Failure, Outcome};
use crate::host::images;
use crate::workers::{self, Progress};
use crate::{runtime, size};
use isobath_disk::{Disk, IndexProgress, OpenOptions};
use isobath_generate::{
    Chain, Data, Distribution, Fill, GenerateError, Generated, Ownership, trace,
};
use isobath_ring::{Config, Signals, Worker};
use std::cell::Cell;
use std::fs::File;
use std::io::{self, BufReader, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

/// Generate a backing chain of qcow2 images
///
/// The layers are layer-00000.qcow2 (the base), layer-00001.qcow2 and so on. The last one is the active layer; its path
/// is printed. The same options always produce the same bytes.
#[derive(clap::Args)]
pub(crate) struct Args {
    /// Number of layers in the chain, including the base
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    layers: u32,
    /// The disk's size [default: 4G, or the raw image's size]
    #[arg(long, value_parser = disk_size)]
    size: Option<u64>,
    /// The share of the disk that is allocated, such as 90% or 0.9 [default: 90%]
    #[arg(long, value_name = "SHARE")]
    fill: Option<Fill>,
    /// Which layer owns a cluster: uniform (all equally likely), zipf (a few layers own most), sequential (each layer
    /// owns one contiguous part of the disk), or trace:FILE with one line 'LAYER OFFSET LENGTH' per write
    #[arg(long, value_name = "HOW", default_value = "uniform", value_parser = owners)]
    distribution: Owners,
    /// Cluster size
    #[arg(long, value_name = "SIZE", default_value = "64k", value_parser = cluster_bits)]
    cluster_size: u32,
    /// What the clusters hold: random (random bytes), zero, pattern (each sector names its layer and offset), or
    /// raw:FILE to spread a raw disk image over the layers
    #[arg(long, value_name = "WHAT", default_value = "random", value_parser = contents)]
    data: Contents,
    /// Seed of the random number generator
    #[arg(long, value_name = "N", default_value = "0")]
    seed: u64,
    /// Write the direct-access index to the active layer, as 'isobath index' does
    #[arg(long)]
    indexed: bool,
    /// Write no index, as in a chain created by QEMU (the default)
    #[arg(long, conflicts_with = "indexed")]
    plain: bool,
    /// Show progress even if standard output is no terminal
    #[arg(short, long)]
    progress: bool,
    /// Show no progress
    #[arg(short, long, conflicts_with = "progress")]
    quiet: bool,
    /// The directory to create the images in; it must be new or empty
    directory: PathBuf,
}

/// `--data`
#[derive(Clone)]
enum Contents {
    Made(Data),
    Raw(PathBuf),
}

/// `--distribution`
#[derive(Clone)]
enum Owners {
    Drawn(Distribution),
    Trace(PathBuf),
}

fn owners(text: &str) -> Result<Owners, String> {
    match text.split_once(':').unwrap_or((text, "")) {
        ("uniform", "") => Ok(Owners::Drawn(Distribution::Uniform)),
        ("zipf", "") => Ok(Owners::Drawn(Distribution::Zipf)),
        ("sequential", "") => Ok(Owners::Drawn(Distribution::Sequential)),
        ("trace", file) if !file.is_empty() => Ok(Owners::Trace(file.into())),
        _ => Err("expected uniform, zipf, sequential or trace:FILE".into()),
    }
}

fn contents(text: &str) -> Result<Contents, String> {
    match text.split_once(':').unwrap_or((text, "")) {
        ("random", "") => Ok(Contents::Made(Data::Random)),
        ("zero", "") => Ok(Contents::Made(Data::Zero)),
        ("pattern", "") => Ok(Contents::Made(Data::Pattern)),
        ("raw", file) if !file.is_empty() => Ok(Contents::Raw(file.into())),
        _ => Err("expected random, zero, pattern or raw:FILE".into()),
    }
}

fn disk_size(text: &str) -> Result<u64, String> {
    let size = size::parse(text)?;
    let whole = size.checked_next_multiple_of(512).filter(|size| *size > 0);
    whole.ok_or_else(|| "the size must be at least one sector (512 bytes)".into())
}

fn cluster_bits(text: &str) -> Result<u32, String> {
    let size = size::parse(text)?;
    if size.is_power_of_two() && (512..=2 << 20).contains(&size) {
        return Ok(size.trailing_zeros());
    }
    Err("Cluster size must be a power of two between 512 and 2048k".into())
}

pub(crate) fn run(args: &Args, out: &mut dyn Write) -> Outcome {
    let (data, length) = match &args.data {
        Contents::Made(data) => (data.clone(), None),
        Contents::Raw(_) if args.fill.is_some() => {
            return Err(Failure::new(
                "--fill cannot be combined with --data raw: a raw image is always spread as a \
                 whole",
            ));
        }
        Contents::Raw(path) => open_raw(path).map(|(data, length)| (data, Some(length)))?,
    };
    let chain = Chain {
        layers: args.layers,
        size: args.size.or(length).unwrap_or(4 << 30),
        cluster_bits: args.cluster_size,
        data,
        seed: args.seed,
    };
    let ownership = match (&args.distribution, args.fill) {
        (Owners::Drawn(distribution), fill) => {
            let share = if length.is_some() { 1.0 } else { 0.9 };
            let fill = fill.map_or_else(|| Fill::new(share), Ok).map_err(Failure::new)?;
            Ownership::draw(&chain, fill, *distribution).map_err(Failure::new)?
        }
        (Owners::Trace(_), Some(_)) => {
            return Err(Failure::new(
                "--fill cannot be combined with --distribution trace: the trace determines what is \
                 allocated",
            ));
        }
        (Owners::Trace(file), None) => read_trace(&chain, file)?,
    };
    let indexed = args.indexed && chain.layers > 1;
    let progress = args.progress || (io::stdout().is_terminal() && !args.quiet);
    let active = runtime::block_on(async || {
        let mut signals = Signals::new(&[libc::SIGINT, libc::SIGTERM])?;
        let generated = generate(args, progress, chain, ownership, &mut signals).await?;
        let active = generated.active().to_owned();
        if indexed && let Err(failure) = index(progress, &active, &mut signals).await {
            generated.remove();
            return Err(failure);
        }
        Ok(active)
    })?;
    writeln!(out, "{}", active.display())?;
    Ok(0)
}

/// Adds the index to the active image. Its progress is a line of its own.
async fn write_index(progress: bool, active: &Path) -> Result<(), Failure> {
    let options = OpenOptions::new().writable(true).heads(false);
    let disk = Disk::open(images().clone(), active, &options).await?;
    let state = Rc::new(Cell::new((0, 0)));
    let shown = Progress::show(progress, {
        let state = Rc::clone(&state);
        move || state.get()
    });
    let show = |now: IndexProgress| state.set((now.done, now.total));
    let written = Box::pin(disk.write_index(show)).await;
    shown.end(written.is_ok());
    written?;
    disk.close().await?;
    Ok(())
}

/// Opens a raw image; returns it with its length rounded up to whole sectors.
fn open_raw(path: &Path) -> Result<(Data, u64), Failure> {
    let about = |error| {
        Failure::new(format_args!("cannot read the raw image '{}': {error}", path.display()))
    };
    let file = File::open(path).map_err(about)?;
    let length = file.metadata().map_err(about)?.len();
    Ok((Data::Raw(Arc::new(file)), length.next_multiple_of(512)))
}

fn read_trace(chain: &Chain, path: &Path) -> Result<Ownership, Failure> {
    let about = |error: &dyn std::fmt::Display| {
        Failure::new(format_args!("cannot read the trace '{}': {error}", path.display()))
    };
    let file = File::open(path).map_err(|error| about(&error))?;
    trace::read(chain, BufReader::new(file)).map_err(|error| about(&error))
}

/// Generates the chain on another thread, while this one shows progress and waits for signals.
async fn generate(
    args: &Args,
    progress: bool,
    chain: Chain,
    ownership: Ownership,
    signals: &mut Signals,
) -> Result<Generated, Failure> {
    let worker = Worker::start("generate", &Config::default())
        .map_err(|error| Failure::new(format_args!("cannot start a thread: {error}")))?;
    let total = ownership.total();
    let done = Arc::new(isobath_generate::Progress::default());
    let shown = Progress::show(progress, {
        let done = done.clone();
        move || (done.clusters(), total)
    });
    let work = worker.handle().spawn_with({
        let (directory, done) = (args.directory.clone(), done.clone());
        move || async move { isobath_generate::generate_held(&chain, &ownership, &directory, &done) }
    });
    let interrupted = Cell::new(None);
    let result = workers::until_signal(work, signals, |signal| {
        interrupted.set(Some(signal));
        done.stop();
    })
    .await;
    let result = result.map_err(workers::panicked)?;
    shown.end(result.is_ok());
    match (result, interrupted.get()) {
        (Err(GenerateError::Stopped), Some(signal)) => Err(interrupted_by(signal)),
        (Ok(generated), Some(signal)) => {
            generated.remove();
            Err(interrupted_by(signal))
        }
        (result, _) => result.map_err(Failure::new),
    }
}

fn interrupted_by(signal: i32) -> Failure {
    let failure = Failure::new("interrupted; the images created so far were removed");
    failure.with_code(128 + signal as u8)
}

/// Adds the index to the active image, unless a signal comes.
async fn index(progress: bool, active: &Path, signals: &mut Signals) -> Result<(), Failure> {
    let work = Box::pin(write_index(progress, active));
    let written = workers::unless_signal(work, signals).await;
    written.unwrap_or_else(|signal| Err(interrupted_by(signal)))
}
