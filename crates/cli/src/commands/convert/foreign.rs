//! Targets in other programs' formats, written from the start of the disk to its end.

use super::Args;
use crate::failure::{Failure, Outcome};
use crate::workers::{self, Progress};
use crate::{options, size};
use isobath_disk::Disk;
use isobath_formats::{Format, PIECE, Piece, VhdxOptions, VmdkOptions, Writer};
use isobath_ring::Signals;
use isobath_storage::{Host, IoBuf, Locking, OpenMode, StorageExt};
use isobath_storage_file::FileHost;
use std::cell::Cell;
use std::hash::{BuildHasher, RandomState};
use std::io::Write;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::thread;

/// Guest bytes read at once.
const WINDOW: u64 = 8 << 20;

const VMDK_HELP: &str = "Supported vmdk options:
  adapter_type=ADAPTER   - ide, lsilogic, buslogic or legacyESX
  hwversion=VERSION      - Version of VMware's virtual hardware, 4 or greater
  subformat=NAME         - streamOptimized; other subformats are read-only
";

const VHDX_HELP: &str = "Supported vhdx options:
  block_size=SIZE        - Block size, a power of two from 1M to 256M
  subformat=NAME         - dynamic; fixed images are read-only
";

/// Prints the options of a format.
pub(super) fn help(format: Format, out: &mut dyn Write) -> Outcome {
    let text = match format {
        Format::Vmdk => VMDK_HELP,
        Format::Vhdx => VHDX_HELP,
        _ => return Err(only_read(format)),
    };
    out.write_all(text.as_bytes())?;
    Ok(0)
}

fn only_read(format: Format) -> Failure {
    Failure::new(format_args!(
        "Format driver '{}' does not support image creation; supported formats are qcow2, raw, \
         vmdk and vhdx",
        format.name()
    ))
}

/// Refuses options that such a target does not support.
pub(super) fn check(args: &Args, format: Format) -> Result<(), Failure> {
    if !matches!(format, Format::Vmdk | Format::Vhdx) {
        return Err(only_read(format));
    }
    let name = format.name();
    let refused = [
        (args.no_create, "-n not supported"),
        (args.backing_file.is_some(), "Backing file not supported"),
        (args.backing_format.is_some(), "Backing file format not supported"),
        (args.compress && format != Format::Vmdk, "Compression not supported"),
        (args.bitmaps, "bitmaps not supported"),
        (args.salvage, "--salvage not supported"),
        (args.rate.is_some(), "--rate not supported"),
        (args.cache.is_direct(), "cache mode 'none' not supported"),
    ];
    match refused.into_iter().find(|(wrong, _)| *wrong) {
        Some((_, reason)) => Err(Failure::new(format_args!("{reason} for file format '{name}'"))),
        None => Ok(()),
    }
}

/// The options of the new image.
pub(super) enum Options {
    Vmdk(VmdkOptions),
    Vhdx(VhdxOptions),
}

impl Options {
    /// Parses `-o`.
    pub(super) fn parse(args: &Args, format: Format) -> Result<Self, Failure> {
        let pairs = options::parse(&args.options);
        if format == Format::Vmdk { vmdk(&pairs) } else { vhdx(&pairs) }
    }
}

fn unknown(name: &str) -> Failure {
    Failure::new(format_args!("Invalid parameter '{name}'"))
}

fn not_accepted(name: &str, value: &str) -> Failure {
    Failure::new(format_args!("Parameter '{name}' does not accept value '{value}'"))
}

fn vmdk(pairs: &[(String, String)]) -> Result<Options, Failure> {
    let ids = RandomState::new();
    // All ones would stand for no parent.
    let content_id = ids.hash_one("content") as u32 & 0x7fff_ffff;
    let mut new = VmdkOptions { content_id, adapter: "ide", hardware_version: 4 };
    let mut subformat = None;
    for (name, value) in pairs {
        match name.as_str() {
            "subformat" => subformat = Some(value.as_str()),
            "adapter_type" => {
                let known = ["ide", "lsilogic", "buslogic", "legacyESX"];
                let adapter = known.into_iter().find(|known| known == value);
                new.adapter = adapter.ok_or_else(|| not_accepted(name, value))?;
            }
            "hwversion" => {
                let version = value.parse().ok().filter(|version| *version >= 4);
                new.hardware_version = version.ok_or_else(|| not_accepted(name, value))?;
            }
            _ => return Err(unknown(name)),
        }
    }
    match subformat {
        Some("streamOptimized") => Ok(Options::Vmdk(new)),
        Some(other) => Err(Failure::new(format_args!(
            "vmdk subformat '{other}' is read-only; use -o subformat=streamOptimized"
        ))),
        None => Err(Failure::new(
            "vmdk subformat 'monolithicSparse', the default, is read-only; use \
             -o subformat=streamOptimized",
        )),
    }
}

fn vhdx(pairs: &[(String, String)]) -> Result<Options, Failure> {
    let ids = RandomState::new();
    let id = |n: u64| u128::from(ids.hash_one(n)) << 64 | u128::from(ids.hash_one(!n));
    let mut new = VhdxOptions { block_size: None, ids: [id(1), id(2), id(3)] };
    for (name, value) in pairs {
        match (name.as_str(), value.as_str()) {
            ("subformat", "dynamic") => {}
            ("subformat", other) => {
                return Err(Failure::new(format_args!(
                    "vhdx subformat '{other}' is read-only; use -o subformat=dynamic"
                )));
            }
            ("block_size", text) => {
                let bytes = size::parse(text).map_err(Failure::new)?;
                // 0 is QEMU's default: a size that suits the disk.
                new.block_size = Some(bytes).filter(|bytes| *bytes != 0);
            }
            _ => return Err(unknown(name)),
        }
    }
    Ok(Options::Vhdx(new))
}

/// Copies the sources, one after another, to a new image.
pub(super) async fn convert(
    args: &Args,
    sources: &[Arc<Disk<FileHost>>],
    name: &Path,
    new: Options,
    signals: &mut Signals,
) -> Outcome {
    if name.exists() && !name.is_file() {
        return Err(Failure::new(format_args!(
            "'{}' is not a regular file; images in this format must be regular files",
            name.display()
        )));
    }
    let total: u64 = sources.iter().map(|source| source.size()).sum();
    let mode = OpenMode { writable: true, ..OpenMode::default() };
    let file = Arc::new(FileHost.create(name, mode).await?);
    // Its locks are held until the end.
    let kept = Arc::clone(&file);
    // A symbolic link stays, whatever happens to the file.
    let real = FileHost.canonical(name)?;
    let done = Rc::new(Cell::new(0));
    let interrupted = Cell::new(None);
    let progress = Progress::show(args.progress && !args.quiet, {
        let done = done.clone();
        move || (done.get(), total)
    });
    let work = async {
        let mut writer = match new {
            Options::Vmdk(new) => Writer::vmdk(file, total, new)?,
            Options::Vhdx(new) => Writer::vhdx(file, total, new)?,
        };
        let mut at = 0;
        while at < total {
            if interrupted.get().is_some() {
                return Ok(());
            }
            let length = WINDOW.min(total - at);
            if let Some(bytes) = read(sources, at, length).await? {
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
    let look = OpenMode { locking: Locking::Unlocked, ..OpenMode::default() };
    if FileHost.open(&real, look).await.is_ok_and(|found| found.id() == kept.id())
        && let Err(error) = FileHost.remove(&real).await
    {
        tracing::warn!("{error}");
    }
    match interrupted.get() {
        Some(signal) => {
            Err(Failure::new("interrupted; the target was removed").with_code(128 + signal as u8))
        }
        None => result.map(|()| 0),
    }
}

/// Bytes of the concatenated disks; `None` if they are known to be zero.
async fn read(
    sources: &[Arc<Disk<FileHost>>],
    at: u64,
    length: u64,
) -> Result<Option<IoBuf>, Failure> {
    let (mut whole, mut rest) = (IoBuf::empty(), IoBuf::zeroed(length as usize));
    let (mut start, mut has_data) = (0, false);
    for source in sources {
        let (from, to) = (at.max(start), (at + length).min(start + source.size()));
        if from < to {
            let mut part = rest.split_to((to - from) as usize);
            let runs = source.block_status(from - start, to - from, usize::MAX).await?;
            if runs.iter().any(|run| !run.zero) {
                has_data = true;
                part = source.read(from - start, part).await?;
            }
            whole.unsplit(part);
        }
        start += source.size();
    }
    Ok(has_data.then_some(whole))
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
