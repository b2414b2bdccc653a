//! Checks images after a crash, recovers them, and checks them again.

use super::guest;
use super::oracle::Sectors;
use isobath_disk::{CheckOptions, Disk, MetadataMode, OpenOptions, Repair, check};
use isobath_qcow2::IncompatibleFeatures;
use isobath_ring::{Config, Executor};
use isobath_storage::IoBuf;
use isobath_storage_file::FileHost;
use isobath_storage_test::any::ToAny;
use isobath_testkit::bytes::first_difference;
use isobath_testkit::qemu;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// The journal's name that QEMU must print.
const NAMED: &str = "run 'isobath check -r all IMAGE'";
/// Bytes read at once.
const PIECE: u64 = 1 << 20;

/// The guarantees for a disk's contents after a crash.
pub enum Promises {
    /// Those from its clients' writes.
    Sectors(Sectors),
    /// The files of a guest.
    Files(guest::Files),
}

/// How an image is recovered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// It is opened for writing, and closed.
    Open,
    /// `isobath check -r all`.
    Repair,
}

/// The state of an image before it was recovered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Before {
    /// QEMU found nothing wrong.
    Clean,
    /// QEMU found leaked clusters, which `ordered` allows.
    Leaking,
    /// QEMU refused it, and named the journal.
    Refused,
}

/// Checks images, one after another, in a directory of its own.
pub struct Judge<'a> {
    mode: MetadataMode,
    promises: &'a Promises,
    directory: TempDir,
    executor: Executor,
}

fn told(what: &str) -> impl Fn(isobath_disk::DiskError) -> String {
    move |error| format!("{what}: {error}")
}

/// Writes a file with holes for zeroes.
fn write_sparse(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let file = File::create(path)?;
    file.set_len(bytes.len() as u64)?;
    for (number, piece) in bytes.chunks(64 << 10).enumerate() {
        if piece.iter().any(|byte| *byte != 0) {
            file.write_all_at(piece, (number * (64 << 10)) as u64)?;
        }
    }
    Ok(())
}

/// Whether the journal of an image is in use.
pub fn journal_in_use(image: &[u8]) -> bool {
    let bits = image.get(72..80).and_then(|bytes| bytes.try_into().ok()).map(u64::from_be_bytes);
    bits.is_some_and(|bits| bits & IncompatibleFeatures::JOURNAL.bits() != 0)
}

/// QEMU's verdict on the image before recovery.
fn before_recovery(image: &Path, journal: bool) -> Result<Before, String> {
    let found = qemu::check(image);
    match (journal, found.code()) {
        (true, 1) if found.stderr.contains(NAMED) => Ok(Before::Refused),
        (false, 0) => Ok(Before::Clean),
        (false, 3) => Ok(Before::Leaking),
        _ => Err(format!(
            "before recovery, the journal {} in use: {}",
            if journal { "being" } else { "not being" },
            found.report()
        )),
    }
}

impl<'a> Judge<'a> {
    /// A judge for images of one mode. Works in memory if there is `/dev/shm`, since its own files need not survive a
    /// crash.
    pub fn new(mode: MetadataMode, promises: &'a Promises) -> Result<Self, String> {
        let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
        let directory = directory.map_err(|error| format!("no directory: {error}"))?;
        let executor = Executor::new(&Config::default());
        let executor = executor.map_err(|error| format!("no executor: {error}"))?;
        Ok(Self { mode, promises, directory, executor })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Checks the image after a crash at which the record had `position` entries. With `by_qemu` QEMU reads the
    /// recovered disk too.
    pub fn judge(
        &self,
        bytes: &[u8],
        position: usize,
        way: Way,
        by_qemu: bool,
    ) -> Result<Before, String> {
        let image = self.path("image");
        write_sparse(&image, bytes).map_err(|error| format!("the image: {error}"))?;
        let before = before_recovery(&image, journal_in_use(bytes))?;
        let seen = self.read(&image)?;
        self.content(position, &seen).map_err(|error| format!("before recovery, {error}"))?;
        match way {
            Way::Open => self.open_and_close(&image)?,
            Way::Repair => self.repair(&image, Repair::All)?,
        }
        let left = qemu::check(&image);
        let leaks = way == Way::Open && before == Before::Leaking;
        match left.code() {
            0 => {}
            3 if leaks => {
                self.repair(&image, Repair::Leaks)?;
                if qemu::check(&image).code() != 0 {
                    return Err(format!("'check -r leaks' does not mend it: {}", left.report()));
                }
            }
            _ => return Err(format!("after recovery: {}", left.report())),
        }
        let recovered = self.read(&image)?;
        if let Some(at) = first_difference(&seen, &recovered) {
            return Err(format!("byte {at} was read otherwise before recovery"));
        }
        if by_qemu {
            let raw = self.path("raw");
            qemu::to_raw(&image, "qcow2", &raw);
            let same = fs::read(&raw).is_ok_and(|read| read == recovered);
            let _ = fs::remove_file(raw);
            if !same {
                return Err("QEMU reads something else".into());
            }
        }
        Ok(before)
    }

    fn content(&self, position: usize, disk: &[u8]) -> Result<(), String> {
        match self.promises {
            Promises::Sectors(sectors) => sectors.check(position, disk),
            Promises::Files(files) => {
                let raw = self.path("disk");
                write_sparse(&raw, disk).map_err(|error| format!("the disk: {error}"))?;
                files.check(position, &raw, &self.path("tree"))
            }
        }
    }

    /// Every byte of a disk, opened read-only.
    pub fn read(&self, image: &Path) -> Result<Vec<u8>, String> {
        let read = async {
            let disk = Disk::open(FileHost.any(), image, &OpenOptions::default()).await?;
            let mut bytes = Vec::with_capacity(disk.size() as usize);
            while (bytes.len() as u64) < disk.size() {
                let at = bytes.len() as u64;
                let length = PIECE.min(disk.size() - at) as usize;
                bytes.extend_from_slice(&disk.read(at, IoBuf::zeroed(length)).await?);
            }
            Ok(bytes)
        };
        self.executor.block_on(read).map_err(told("it could not be read"))
    }

    fn open_and_close(&self, image: &Path) -> Result<(), String> {
        let options = OpenOptions::new().writable(true).metadata(self.mode);
        self.executor
            .block_on(async { Disk::open(FileHost.any(), image, &options).await?.close().await })
            .map_err(told("it could not be opened for writing and closed"))
    }

    fn repair(&self, image: &Path, repair: Repair) -> Result<(), String> {
        let options = CheckOptions { repair, ..CheckOptions::default() };
        let report = self.executor.block_on(check(&FileHost.any(), image, &options, &mut |_| {}));
        let report = report.map_err(told("it could not be repaired"))?;
        if report.is_clean() { Ok(()) } else { Err(format!("its repair leaves {report:?}")) }
    }
}
