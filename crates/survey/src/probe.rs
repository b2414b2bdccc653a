//! Probing one file for its kind and its header. Only reads, and takes no locks.

use crate::name::{self, Refused};
use crate::problem::Trouble;
use isobath_qcow2::probe::{Foreign, Probed, probe};
use isobath_qcow2::{
    Extension, FormatError, FormatErrorKind, Geometry, Header, IncompatibleFeatures, ParseMode,
};
use rustix::fs::{Mode, OFlags};
use std::fs::{self, File, Metadata};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// The number of bytes read first. Nearly every header fits, including the backing file's name.
const START: usize = 4096;
/// The position of `crypt_method` in a header.
const CRYPT_METHOD: std::ops::Range<usize> = 32..36;

/// The identity of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Id {
    pub(crate) device: u64,
    pub(crate) inode: u64,
}

impl Id {
    pub(crate) fn of(data: &Metadata) -> Self {
        Self { device: data.dev(), inode: data.ino() }
    }
}

/// A file's metadata.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    pub(crate) id: Id,
    /// The length in bytes.
    pub(crate) length: u64,
    /// Bytes that the file occupies.
    pub(crate) held: u64,
    /// When the file was created, in seconds since 1970, if the file system records it.
    pub(crate) born: Option<i64>,
    /// When it was last written, in seconds since 1970.
    pub(crate) modified: i64,
}

impl Facts {
    fn of(data: &Metadata) -> Self {
        let born = data.created().ok().and_then(|time| match time.duration_since(UNIX_EPOCH) {
            // A file system without birth times may return 1970.
            Ok(since) => i64::try_from(since.as_secs()).ok().filter(|&seconds| seconds > 0),
            Err(_) => None,
        });
        Self {
            id: Id::of(data),
            length: data.len(),
            held: data.blocks().saturating_mul(512),
            born: born.map(clamp),
            modified: clamp(data.mtime()),
        }
    }
}

/// Limits a time to the years 1 to 9999, whatever the file system returns.
fn clamp(seconds: i64) -> i64 {
    seconds.clamp(-62_135_596_800, 253_402_300_799)
}

/// The parts of a header that a survey needs.
#[derive(Clone, Debug)]
pub(crate) struct Summary {
    pub(crate) geometry: Geometry,
    /// The disk's size in bytes.
    pub(crate) disk: u64,
    pub(crate) l1_size: u32,
    pub(crate) l1_offset: u64,
    pub(crate) encrypted: bool,
    pub(crate) internal_snapshots: bool,
    pub(crate) indexed: bool,
    pub(crate) backing: Option<Backing>,
}

/// The backing file as the header names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Backing {
    pub(crate) name: String,
    /// The header says that it is of a format other than qcow2.
    pub(crate) other_format: bool,
    /// The header says that it is qcow2.
    pub(crate) qcow2: bool,
}

/// A probed regular file.
#[derive(Debug)]
pub(crate) enum Kind {
    /// It does not begin like a qcow2 image: a raw image, or one of another format.
    Other(Option<Foreign>),
    Qcow2(Box<Summary>),
    /// It begins like a qcow2 image, but its header is unusable.
    Broken(FormatError),
}

/// Opens a file for reading; changes nothing and never blocks. Links are followed.
///
/// # Errors
/// If it cannot be opened, or is not a regular file.
pub(crate) fn open(path: &Path) -> io::Result<(File, Metadata)> {
    opened(|flags| Ok(rustix::fs::open(path, flags, Mode::empty())?.into()))
}

/// Opens a file as `open` does with these flags.
///
/// # Errors
/// If it cannot be opened, or is not a regular file.
pub(crate) fn opened(open: impl Fn(OFlags) -> io::Result<File>) -> io::Result<(File, Metadata)> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    // Only a file's owner may suppress the update of its access time.
    let file = match open(flags | OFlags::NOATIME) {
        Err(error) if error.raw_os_error() == Some(libc::EPERM) => open(flags)?,
        other => other?,
    };
    let data = file.metadata()?;
    if !data.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"));
    }
    Ok((file, data))
}

/// Opens and examines a file. The caller must know that it is a regular file: opening a device can have side effects.
pub(crate) fn look(path: &Path) -> io::Result<(Facts, Kind)> {
    let (file, data) = open(path)?;
    facts_and_kind(path, &file, &data)
}

/// Examines an open file.
pub(crate) fn facts_and_kind(
    path: &Path,
    file: &File,
    data: &Metadata,
) -> io::Result<(Facts, Kind)> {
    Ok((Facts::of(data), header(file, path, data.len())?))
}

/// Reads the header of an open file.
pub(crate) fn header(file: &File, path: &Path, length: u64) -> io::Result<Kind> {
    let mut start = [0; START];
    let start = read_up_to(file, 0, &mut start)?;
    match probe(start, path) {
        Probed::Qcow2 => {}
        Probed::Raw => return Ok(Kind::Other(None)),
        Probed::Foreign(format) => return Ok(Kind::Other(Some(format))),
    }
    if let Ok(summary) = parse(start) {
        return Ok(Kind::Qcow2(Box::new(summary)));
    }
    let whole = match Header::probe_length(start) {
        Ok(whole) => whole.min(usize::try_from(length).unwrap_or(usize::MAX)),
        Err(error) => return Ok(Kind::Broken(error)),
    };
    let mut bytes = vec![0; whole.max(start.len())];
    let bytes = read_up_to(file, 0, &mut bytes)?;
    Ok(match parse(bytes) {
        Ok(summary) => Kind::Qcow2(Box::new(summary)),
        Err(error) if error.kind() == FormatErrorKind::NotQcow2 => Kind::Other(None),
        Err(error) => Kind::Broken(error),
    })
}

fn parse(bytes: &[u8]) -> Result<Summary, FormatError> {
    let (header, encrypted) = match Header::parse_for(bytes, ParseMode::Check) {
        Err(error) if error.kind() == FormatErrorKind::Encrypted => {
            // Only the guest's data is encrypted: tables and names are readable.
            let mut plain = bytes.to_vec();
            if let Some(method) = plain.get_mut(CRYPT_METHOD) {
                method.fill(0);
            }
            (Header::parse_for(&plain, ParseMode::Check)?, true)
        }
        other => {
            let header = other?;
            let encrypted = header.crypt_method != 0;
            (header, encrypted)
        }
    };
    let backing_format = header.backing_format();
    Ok(Summary {
        geometry: header.geometry()?,
        disk: header.disk_size(),
        l1_size: header.l1_size,
        l1_offset: header.l1_table_offset.get(),
        encrypted,
        internal_snapshots: header.nb_snapshots > 0
            || header.incompatible.contains(IncompatibleFeatures::DATA_FILE),
        indexed: header.extensions.iter().any(|one| matches!(one, Extension::Index(_))),
        backing: header.backing_file.clone().map(|name| Backing {
            name,
            other_format: backing_format.is_some_and(|format| format != "qcow2"),
            qcow2: backing_format == Some("qcow2"),
        }),
    })
}

/// Reads until the buffer is full or the file ends.
pub(crate) fn read_up_to<'a>(
    file: &File,
    offset: u64,
    buffer: &'a mut [u8],
) -> io::Result<&'a [u8]> {
    let mut done = 0;
    while let Some(rest) = buffer.get_mut(done..).filter(|rest| !rest.is_empty()) {
        match file.read_at(rest, offset.saturating_add(done as u64)) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(buffer.get(..done).unwrap_or_default())
}

/// Resolves a backing file's name.
pub(crate) fn find(referrer: &Path, backing: &Backing) -> Result<(PathBuf, Id), Trouble> {
    let path = name::resolve(referrer, &backing.name).map_err(|why| match why {
        Refused::Json => Trouble::Json,
        Refused::Protocol => Trouble::Protocol,
        Refused::Stored => Trouble::Stored,
        Refused::NoFileName => Trouble::NoFileName,
    })?;
    let data = fs::metadata(&path).map_err(|error| Trouble::of_backing(&error))?;
    let kind = data.file_type();
    if kind.is_file() {
        Ok((path, Id::of(&data)))
    } else if kind.is_block_device() {
        Err(Trouble::Device)
    } else {
        Err(Trouble::NoRegularFile)
    }
}
