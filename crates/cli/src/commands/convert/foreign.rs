//! Targets in other programs' formats, written from the start of the disk to its end.

use super::{Args, files_of, refuse_source};
use crate::commands::foreign::{NewImage, Options, no_backing};
use crate::failure::{Failure, Outcome};
use crate::host::ImageHost;
use crate::options;
use crate::workers::{self, Progress};
use isobath_disk::Disk;
use isobath_disk::copy::{Content, Sources};
use isobath_formats::{Format, PIECE, Piece, Writer};
use isobath_ring::{Signals, sleep_until};
use isobath_storage::IoBuf;
use std::cell::Cell;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Guest bytes read at a time.
const WINDOW: u64 = 8 << 20;

/// Refuses options that such a target does not support, in QEMU's words where it refuses them too.
pub(super) fn check(args: &Args, format: Format) -> Result<(), Failure> {
    let name = format.name();
    if args.backing_file.is_some() {
        return Err(Failure::new(no_backing(format)));
    }
    if args.bitmaps {
        return Err(Failure::new(format_args!("Format driver '{name}' does not support bitmaps")));
    }
    if args.compress && format != Format::Vmdk {
        return Err(Failure::new("Compression not supported for this file format"));
    }
    let refused = [
        (args.no_create, "-n not supported"),
        (args.backing_format.is_some(), "Backing file format not supported"),
    ];
    match refused.into_iter().find(|(wrong, _)| *wrong) {
        Some((_, reason)) => Err(Failure::new(format_args!("{reason} for file format '{name}'"))),
        None => Ok(()),
    }
}

/// The target's options.
pub(super) fn options(args: &Args, format: Format) -> Result<Options, Failure> {
    Options::parse(format, &options::parse(&args.options)).map_err(Failure::new)
}

/// Copies the sources, one after another, to a new image.
pub(super) async fn convert(
    args: &Args,
    sources: &[Arc<Disk<ImageHost>>],
    name: &Path,
    new: &Options,
    signals: &mut Signals,
) -> Outcome {
    let disks = Sources::new(sources.to_vec(), None, args.salvage);
    let total = disks.size();
    let failed = |reason: String| {
        let what = format!("error while converting {}", new.format().name());
        Failure::new(reason).context(what).context(name.display())
    };
    let image = new.image().map_err(failed)?;
    if args.compress && matches!(&image, NewImage::Vmdk(vmdk) if vmdk.subformat.is_flat()) {
        return Err(Failure::new("invalid cluster size"));
    }
    for extent in image.extents(name, total)? {
        refuse_source(&extent, sources).await?;
    }
    let (direct, others) = (args.cache.is_direct(), files_of(sources));
    let created = image.create(name, total, direct, new.layout(), &others).await;
    let (mut writer, files) = created.map_err(failed)?;
    let done = Rc::new(Cell::new(0));
    let interrupted = Cell::new(None);
    let progress = Progress::show(args.progress && !args.quiet, {
        let done = done.clone();
        move || (done.get(), total)
    });
    let work = async {
        let rate = args.rate.filter(|rate| *rate > 0);
        // As much as is copied in a second or two, so that signals are noticed.
        let window = rate.map_or(WINDOW, |rate| rate.min(WINDOW).next_multiple_of(PIECE as u64));
        let (mut at, mut due) = (0, Instant::now());
        while at < total {
            if interrupted.get().is_some() {
                return Ok(());
            }
            let length = window.min(total - at);
            if let Some(bytes) = read(&disks, at, length).await? {
                if let Some(rate) = rate {
                    sleep_until(due).await;
                    let takes = Duration::from_secs_f64(length as f64 / rate as f64);
                    due = due.max(Instant::now()) + takes;
                }
                writer.write(prepare(&writer, at, &bytes, args.tasks)).await?;
            }
            at += length;
            done.set(at);
        }
        Ok::<_, Failure>(writer.finish().await?)
    };
    let result = workers::until_signal(work, signals, |signal| interrupted.set(Some(signal))).await;
    progress.end(result.is_ok() && interrupted.get().is_none());
    if result.is_ok() && interrupted.get().is_none() {
        return Ok(0);
    }
    let what = if files.remove(false).await { "; the target was removed" } else { "" };
    match interrupted.get() {
        Some(signal) => {
            let failure = Failure::new(format_args!("interrupted{what}"));
            Err(failure.with_code(128 + signal as u8))
        }
        None => result.map(|()| 0),
    }
}

/// Bytes of the disks; `None` if they are known to be zero.
async fn read(disks: &Sources<ImageHost>, at: u64, length: u64) -> Result<Option<IoBuf>, Failure> {
    let end = at + length;
    let mut examined = at;
    while examined < end {
        let (content, run) = disks.content(examined).await?;
        match content {
            Content::Data => {
                let (bytes, _) = disks.read(at, IoBuf::zeroed(length as usize)).await?;
                return Ok(Some(bytes));
            }
            Content::Zero | Content::Backing => examined += run,
        }
    }
    Ok(None)
}

/// The pieces of a window that are not zero, compressed on several threads.
fn prepare<S: isobath_storage::Storage>(
    writer: &Writer<S>,
    at: u64,
    bytes: &[u8],
    tasks: usize,
) -> Vec<Piece> {
    let prepare = |first: u64, bytes: &[u8]| -> Vec<Piece> {
        let places = (first..).step_by(PIECE);
        places
            .zip(bytes.chunks(PIECE))
            .filter_map(|(at, piece)| writer.prepare(at, piece))
            .collect()
    };
    let threads = thread::available_parallelism().map_or(1, usize::from).min(tasks);
    if !writer.compresses() || threads < 2 {
        return prepare(at, bytes);
    }
    let share = bytes.len().div_ceil(threads).next_multiple_of(PIECE);
    thread::scope(|scope| {
        let shares = (at..).step_by(share).zip(bytes.chunks(share));
        let prepare = &prepare;
        let threads: Vec<_> =
            shares.map(|(first, bytes)| scope.spawn(move || prepare(first, bytes))).collect();
        let parts = threads.into_iter().map(|thread| match thread.join() {
            Ok(pieces) => pieces,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        parts.flatten().collect()
    })
}
