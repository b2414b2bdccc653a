//! What each of the two programs makes of an image.

use crate::damaged::pool::{IMAGE, Sample};
use futures_executor::block_on;
use isobath_disk::{
    CheckEvent, CheckOptions, CheckReport, Disk, DiskError, ImageFormat, MetadataMode, OpenOptions,
    Preallocation, Repair, check,
};
use isobath_storage::memory::MemoryHost;
use isobath_storage::{Host, IoBuf, Locking, OpenMode, Storage};
use isobath_storage_test::any::{AnyHost, ToAny};
use isobath_testkit::process::{Finished, run};
use isobath_testkit::{args, qemu};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// More of a disk is not looked at: a damaged header may say that it is huge.
const MOST: u64 = 9 << 20;
pub(crate) const SECTOR: usize = 512;

/// A disk's bytes, as far as they can be read.
pub(crate) struct Content {
    pub(crate) size: u64,
    bytes: Vec<u8>,
    unreadable: BTreeSet<usize>,
    /// A read that failed although each of its parts could be read.
    pub(crate) only_in_parts: Option<(usize, usize)>,
}

impl Content {
    /// The bytes of a sector; `None` where they cannot be read.
    pub(crate) fn sector(&self, number: usize) -> Option<&[u8]> {
        if self.unreadable.contains(&number) {
            return None;
        }
        self.bytes.get(number * SECTOR..(number + 1) * SECTOR)
    }

    pub(crate) fn sectors(&self) -> usize {
        self.bytes.len() / SECTOR
    }
}

/// A file with a pattern, to be cloned from.
const SOURCE: &str = "source";

/// A write of one pattern.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Write {
    /// Whether Isobath clones the pattern from another file, where that is possible.
    pub(crate) clones: bool,
    pub(crate) offset: u64,
    pub(crate) length: u64,
    pub(crate) pattern: u8,
    pub(crate) mode: MetadataMode,
}

impl Write {
    pub(crate) fn touches(&self, sector: usize) -> bool {
        let at = (sector * SECTOR) as u64;
        at + SECTOR as u64 > self.offset && at < self.offset + self.length
    }
}

/// The files of an image, in memory.
pub(crate) fn host(image: &[u8], sample: &Sample) -> MemoryHost {
    let host = MemoryHost::new();
    host.insert(IMAGE, image);
    for (name, bytes) in &sample.others {
        host.insert(name, bytes);
    }
    host
}

/// The length of a file.
pub(crate) fn length(host: &MemoryHost, name: &str) -> u64 {
    let mode = OpenMode { writable: false, direct: false, locking: Locking::default() };
    block_on(async { host.open(Path::new(name), mode).await.unwrap().len().await.unwrap() })
}

fn name() -> PathBuf {
    PathBuf::from(IMAGE)
}

fn options() -> OpenOptions {
    OpenOptions::new().format(ImageFormat::Qcow2)
}

/// What Isobath reads, or why it does not open the image.
pub(crate) fn isobath_reads(host: &MemoryHost) -> Result<Content, String> {
    block_on(async {
        let disk = Disk::open(host.any(), &name(), &options()).await;
        let disk = disk.map_err(|error| error.to_string())?;
        let size = disk.size();
        let length = size.min(MOST) as usize;
        let mut bytes = vec![0; length];
        let mut unreadable = BTreeSet::new();
        let (mut steps, mut failed) = (vec![(0, length)], Vec::new());
        while let Some((at, length)) = steps.pop() {
            match disk.read(at as u64, IoBuf::zeroed(length)).await {
                Ok(read) => bytes[at..at + length].copy_from_slice(&read),
                Err(_) if length <= SECTOR => drop(unreadable.insert(at / SECTOR)),
                Err(_) => {
                    failed.push((at, length));
                    let half = (length / 2).next_multiple_of(SECTOR);
                    steps.extend([(at, half), (at + half, length - half)]);
                }
            }
        }
        let only_in_parts = failed.into_iter().find(|&(at, length)| {
            unreadable.range(at / SECTOR..(at + length).div_ceil(SECTOR)).next().is_none()
        });
        Ok(Content { size, bytes, unreadable, only_in_parts })
    })
}

/// What Isobath's check says, and every finding; or why it refuses.
pub(crate) fn isobath_checks(
    host: &MemoryHost,
    repair: Repair,
) -> (Result<CheckReport, String>, Vec<String>) {
    let mut found = Vec::new();
    let options =
        CheckOptions { repair, format: Some(ImageFormat::Qcow2), ..CheckOptions::default() };
    let report = block_on(check(&host.any(), &name(), &options, &mut |event| {
        if let CheckEvent::Finding(text) = event {
            found.push(text.to_owned());
        }
    }));
    (report.map_err(|error| error.to_string()), found)
}

/// Writes with Isobath, flushes and closes; the first error.
pub(crate) fn isobath_writes(host: &MemoryHost, write: Write) -> Result<(), String> {
    block_on(async {
        let options = options().writable(true).metadata(write.mode).journal_size(64 << 10);
        let disk = Disk::open(host.any(), &name(), &options).await;
        let disk = disk.map_err(|error| error.to_string())?;
        let written = pattern(host, &disk, write).await;
        let flushed = disk.flush().await;
        let closed = disk.close().await;
        written.and(flushed).and(closed).map_err(|error| error.to_string())
    })
}

async fn pattern(host: &MemoryHost, disk: &Disk<AnyHost>, write: Write) -> Result<(), DiskError> {
    let bytes = vec![write.pattern; write.length as usize];
    if write.clones {
        host.insert(SOURCE, &bytes);
        let source = host.any().open(Path::new(SOURCE), OpenMode::default()).await?;
        if disk.clone_in(write.offset, write.length, &source, 0).await? {
            return Ok(());
        }
    }
    disk.write(write.offset, IoBuf::copy_of(&bytes)).await.map(drop)
}

/// Makes the disk smaller with Isobath, and closes it; the first error.
pub(crate) fn isobath_shrinks(
    host: &MemoryHost,
    size: u64,
    mode: MetadataMode,
) -> Result<(), String> {
    block_on(async {
        let options = options().writable(true).metadata(mode).journal_size(64 << 10);
        let disk = Disk::open(host.any(), &name(), &options).await;
        let disk = disk.map_err(|error| error.to_string())?;
        if size > disk.size() {
            return Err("the header says that it is smaller already".into());
        }
        let resized = Box::pin(disk.resize(size, Preallocation::Off, true)).await;
        let closed = disk.close().await;
        resized.and(closed).map_err(|error| error.to_string())
    })
}

/// Runs one of QEMU's programs in a directory: it looks there for a data file.
fn program(name: &str, directory: &Path, arguments: Vec<OsString>) -> Finished {
    run(Command::new(qemu::program(name)).args(arguments).current_dir(directory))
}

/// Runs `qemu-img` in a directory.
pub(crate) fn qemu_img(directory: &Path, arguments: Vec<OsString>) -> Finished {
    program("qemu-img", directory, arguments)
}

/// Runs commands of `qemu-io` on the image in a directory.
pub(crate) fn qemu_io(directory: &Path, commands: &[String]) -> Finished {
    let mut arguments = args!["-f", "qcow2"];
    for command in commands {
        arguments.extend(args!["-c", command]);
    }
    arguments.push(IMAGE.into());
    program("qemu-io", directory, arguments)
}

/// What QEMU reads, or why it does not open the image.
pub(crate) fn qemu_reads(directory: &Path) -> Result<Content, String> {
    let raw = directory.join("read.raw");
    let _ = fs::remove_file(&raw);
    let arguments = args!["convert", "--salvage", "-f", "qcow2", "-O", "raw", IMAGE, &raw];
    let read = qemu_img(directory, arguments);
    if read.code() != 0 {
        return Err(read.stderr);
    }
    let offsets = read.stderr.lines().filter_map(|line| {
        let (_, rest) = line.split_once("error while reading offset ")?;
        rest.split_once(':')?.0.parse::<usize>().ok()
    });
    let unreadable = offsets.map(|at| at / SECTOR).collect();
    let size = fs::metadata(&raw).unwrap().len();
    let mut bytes = vec![0; size.min(MOST) as usize];
    std::os::unix::fs::FileExt::read_exact_at(&fs::File::open(&raw).unwrap(), &mut bytes, 0)
        .unwrap();
    fs::remove_file(raw).unwrap();
    Ok(Content { size, bytes, unreadable, only_in_parts: None })
}

/// What `qemu-img check` says: 0 is clean, 2 corrupt, 3 leaking.
pub(crate) fn qemu_checks(directory: &Path) -> Finished {
    qemu_img(directory, args!["check", "-f", "qcow2", "--output=json", IMAGE])
}

/// Writes with QEMU.
pub(crate) fn qemu_writes(directory: &Path, write: Write) -> Result<(), String> {
    let Write { offset, length, pattern, .. } = write;
    let command = format!("write -P {pattern} {offset} {length}");
    let done = qemu_io(directory, &[command, "flush".into()]);
    let said = format!("{}{}", done.text(), done.stderr);
    if done.code() == 0 && said.contains("wrote") { Ok(()) } else { Err(said) }
}
