//! Small objects, whole, each in a file that is named by its digest; and the last manifest that was seen of a chain.

use super::directory::{Directory, is_linked};
use super::sys::{self, Lock, Part};
use crate::digest::Digest;
use crate::store::Version;
use rustix::fs::{Timespec, Timestamps, UTIME_NOW, UTIME_OMIT};
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// What an object is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ObjectKind {
    /// The manifest of a chain.
    Manifest,
    /// The heads of a chain's layers.
    Heads,
    /// The checksums of a layer's blocks.
    Table,
    /// What was read of a chain.
    Trace,
}

impl ObjectKind {
    fn name(self) -> &'static str {
        match self {
            Self::Manifest => "manifest",
            Self::Heads => "heads",
            Self::Table => "table",
            Self::Trace => "trace",
        }
    }

    pub(super) fn file(self, digest: &Digest) -> String {
        format!("{}-{digest}", self.name())
    }
}

/// Whether a name is that of an object's file.
pub(super) fn is_object(name: &str) -> bool {
    let kinds = [ObjectKind::Manifest, ObjectKind::Heads, ObjectKind::Table, ObjectKind::Trace];
    let digest = name.split_once('-').and_then(|(_, digest)| Digest::parse(digest));
    digest.is_some_and(|digest| kinds.iter().any(|kind| kind.file(&digest) == name))
}

/// Whether a name is that of the file for a chain's manifest.
pub(super) fn is_manifest(name: &str) -> bool {
    Digest::parse(name).is_some_and(|digest| digest.to_string() == name)
}

/// An object in memory. Its file, if it has one, is not evicted before this is dropped.
#[derive(Debug)]
pub struct Held {
    bytes: Arc<[u8]>,
    file: Option<File>,
}

impl Held {
    /// One that is in no file.
    pub(super) fn loose(bytes: &[u8]) -> Self {
        Self { bytes: bytes.into(), file: None }
    }

    /// What it holds.
    pub fn bytes(&self) -> &Arc<[u8]> {
        &self.bytes
    }

    /// Whether it is in the cache.
    pub fn is_kept(&self) -> bool {
        self.file.is_some()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(file) = &self.file {
            sys::unlock(file);
        }
    }
}

/// A manifest as it was when it was last read from the store.
#[derive(Debug)]
pub struct Remembered {
    held: Held,
    start: usize,
    version: Version,
}

impl Remembered {
    /// The object.
    pub fn bytes(&self) -> &[u8] {
        self.held.bytes.get(self.start..).unwrap_or_default()
    }

    /// Which contents of it these are.
    pub fn version(&self) -> &Version {
        &self.version
    }
}

/// All bytes of a file of at most `most`, in use from now on; `None` if there is none, or somebody removes it.
fn read(directory: &Directory, name: &str, most: u64) -> io::Result<Option<Held>> {
    let Some(file) = directory.file(name)? else { return Ok(None) };
    if !sys::try_lock(&file, Part::Use, Lock::Shared)? || !is_linked(&file)? {
        return Ok(None);
    }
    let mut held = Held { bytes: Arc::default(), file: Some(file.try_clone()?) };
    let mut bytes = Vec::new();
    file.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it is too long"));
    }
    held.bytes = bytes.into();
    Ok(Some(held))
}

/// As [`read`]; removes what is not what it should be.
fn find<T>(
    directory: &Directory,
    name: &str,
    most: u64,
    check: impl FnOnce(Held) -> Option<T>,
) -> io::Result<Option<T>> {
    let found = match read(directory, name, most) {
        Ok(None) => return Ok(None),
        Ok(Some(held)) => {
            let file = held.file.as_ref().map(File::try_clone).transpose()?;
            check(held).zip(file)
        }
        Err(error) if error.kind() == io::ErrorKind::InvalidData => None,
        Err(error) => return Err(error),
    };
    let Some((found, file)) = found else {
        directory.put_aside(name)?;
        return Ok(None);
    };
    // Its last use, which decides about its eviction.
    let kept = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
    let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
    let times = Timestamps { last_access: kept, last_modification: now };
    // Whoever cannot set it finds the object evicted earlier.
    let _ = rustix::fs::futimens(&file, &times);
    Ok(Some(found))
}

/// An object; `None` if there is none, or not as it should be.
///
/// # Errors
/// It cannot be read.
pub(super) fn object(
    directory: &Directory,
    kind: ObjectKind,
    digest: &Digest,
    most: u64,
) -> io::Result<Option<Held>> {
    let is_right = |held: Held| (Digest::of(&held.bytes) == *digest).then_some(held);
    find(directory, &kind.file(digest), most, is_right)
}

/// Writes a file whole, in place of another.
///
/// # Errors
/// It cannot be written.
pub(super) fn keep(directory: &Directory, name: &str, bytes: Vec<u8>) -> io::Result<Held> {
    let new = directory.temporary()?;
    new.file().write_all_at(&bytes, 0)?;
    Ok(Held { bytes: bytes.into(), file: Some(new.replace(name)?) })
}

/// The name of the file for a chain's manifest.
pub(super) fn manifest_name(address: &str) -> String {
    Digest::of(address.as_bytes()).to_string()
}

/// The file for a chain's manifest: a digest of the rest, a line about it, and the manifest.
pub(super) fn remembered(address: &str, bytes: &[u8], version: &Version) -> Vec<u8> {
    let about = serde_json::json!({
        "address": address,
        "tag": version.tag,
        "number": version.number,
    });
    let rest = [format!("{about}\n").as_bytes(), bytes].concat();
    [format!("{}\n", Digest::of(&rest)).as_bytes(), &rest].concat()
}

fn recall(held: Held, address: &str) -> Option<Remembered> {
    let (first, rest) = split_line(&held.bytes)?;
    let is_whole = Digest::parse(first)? == Digest::of(rest);
    let (about, manifest) = split_line(rest).filter(|_| is_whole)?;
    let about: serde_json::Value = serde_json::from_str(about).ok()?;
    let text = |key: &str| about.get(key)?.as_str().map(str::to_owned);
    let version = Version { tag: text("tag"), number: text("number") };
    let start = held.bytes.len() - manifest.len();
    (text("address")? == address).then_some(Remembered { held, start, version })
}

fn split_line(bytes: &[u8]) -> Option<(&str, &[u8])> {
    let end = bytes.iter().position(|byte| *byte == b'\n')?;
    let (line, rest) = bytes.split_at_checked(end)?;
    Some((std::str::from_utf8(line).ok()?, rest.get(1..)?))
}

/// The last manifest of a chain; `None` if none was kept.
///
/// # Errors
/// It cannot be read.
pub(super) fn manifest(
    directory: &Directory,
    address: &str,
    most: u64,
) -> io::Result<Option<Remembered>> {
    find(directory, &manifest_name(address), most, |held| recall(held, address))
}
