//! QEMU's drivers `null-co` and `null-aio`: a disk without contents, for tests and measurements. It reads as zeroes,
//! and what is written to it is lost.
//!
//! It has a name that nobody can type and no image's header may hold, so that only options name it.

use crate::size;
use isobath_storage::{
    Allocation, Capabilities, FileId, Host, Identity, IoBuf, OpenMode, Operation, Result, Storage,
    StorageError, ZeroMode,
};
use serde_json::{Map, Value};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// How its names begin, before `SIZE:` and `zero` or `data`.
const PREFIX: &str = "null\0";
/// Its size in bytes, if none is given.
const SIZE: u64 = 1 << 30;

/// Whether a driver is one of these.
pub(crate) fn is_null(driver: &str) -> bool {
    matches!(driver, "null-co" | "null-aio")
}

/// The name by which a disk with these values of its options is opened.
///
/// # Errors
/// In QEMU's words.
pub(crate) fn named(
    length: Option<&str>,
    reads_zeroes: bool,
) -> std::result::Result<PathBuf, String> {
    let length = length.map_or(Ok(SIZE), |length| size::parameter("size", length))?;
    if length > i64::MAX as u64 {
        return Err("size is invalid".into());
    }
    let says = if reads_zeroes { "zero" } else { "data" };
    Ok(format!("{PREFIX}{length}:{says}").into())
}

/// The size of the disk of this name, and whether it says that it reads as zeroes. `None` for other names.
fn parse(name: &Path) -> Option<(u64, bool)> {
    let (size, says) = name.to_str()?.strip_prefix(PREFIX)?.split_once(':')?;
    Some((size.parse().ok()?, says == "zero"))
}

/// Whether this is the name of such a disk.
pub(crate) fn is_name(name: &Path) -> bool {
    parse(name).is_some()
}

/// Whether this is the name of such a disk that does not say what it holds.
pub(crate) fn says_nothing(name: &Path) -> bool {
    matches!(parse(name), Some((_, false)))
}

/// The options that make it what it is, but for its driver.
const OPTIONS: [&str; 3] = ["size", "read-zeroes", "latency-ns"];

/// The name by which QEMU shows the disk that was named by these options, or by `typed`, if that is a description.
pub(crate) fn shown(typed: &str, options: &[(String, String)]) -> String {
    let own = |name: &str| name.strip_prefix("file.").unwrap_or(name).to_owned();
    let driver = options.iter().map(|(_, value)| value).find(|value| is_null(value));
    if !options.iter().any(|(name, _)| OPTIONS.contains(&&*own(name))) {
        return format!("{}://", driver.map_or("null-co", |driver| driver));
    }
    let described = typed.strip_prefix("json:").map(crate::json::standard);
    let described = described.and_then(|json| isobath_qmp::json::parse(json.as_bytes()).ok());
    let mut object = match described {
        Some(Value::Object(object)) => object,
        _ => nested(options),
    };
    retain_own(&mut object);
    let line = isobath_qmp::json::to_line(&Value::Object(object));
    format!("json:{}", String::from_utf8_lossy(line.trim_ascii_end()))
}

/// The options as an object, which has an object for the file below.
fn nested(options: &[(String, String)]) -> Map<String, Value> {
    let mut object = Map::new();
    let mut file = Map::new();
    for (name, value) in options {
        match name.strip_prefix("file.") {
            Some(name) => file.insert(name.to_owned(), value.clone().into()),
            None => object.insert(name.clone(), value.clone().into()),
        };
    }
    if !file.is_empty() {
        object.insert("file".into(), Value::Object(file));
    }
    object
}

/// Drops what says how the disk is opened.
fn retain_own(object: &mut Map<String, Value>) {
    object.retain(|name, value| {
        if let Value::Object(file) = value {
            retain_own(file);
        }
        let name = name.strip_prefix("file.").unwrap_or(name);
        matches!(name, "driver" | "file") || OPTIONS.contains(&name)
    });
}

/// The host of these disks.
#[derive(Clone, Debug, Default)]
pub(crate) struct NullHost;

/// An open disk.
#[derive(Debug)]
pub(crate) struct NullFile {
    name: PathBuf,
    id: FileId,
    size: u64,
    says_zeroes: bool,
    writable: bool,
}

fn unsupported(operation: Operation, name: &Path) -> StorageError {
    StorageError::new(operation, name, io::Error::from_raw_os_error(libc::ENOTSUP))
}

impl Host for NullHost {
    type File = NullFile;

    async fn open(&self, name: &Path, mode: OpenMode) -> Result<NullFile> {
        /// Each is another disk.
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let (size, says_zeroes) = parse(name).ok_or_else(|| {
            StorageError::new(Operation::Open, name, io::Error::from_raw_os_error(libc::ENOENT))
        })?;
        let id = FileId { device: 0, inode: NEXT.fetch_add(1, Ordering::Relaxed) };
        Ok(NullFile { name: name.to_owned(), id, size, says_zeroes, writable: mode.writable })
    }

    async fn create(&self, name: &Path, _mode: OpenMode) -> Result<NullFile> {
        Err(unsupported(Operation::Create, name))
    }

    async fn remove(&self, name: &Path) -> Result<()> {
        Err(unsupported(Operation::Remove, name))
    }

    async fn remove_file(&self, name: &Path, _file: &NullFile) -> Result<bool> {
        Err(unsupported(Operation::Remove, name))
    }

    fn is_no_path(&self, name: &str) -> bool {
        is_name(Path::new(name))
    }
}

impl NullFile {
    fn check(&self, operation: Operation, offset: u64, length: u64) -> Result<()> {
        let error = if operation != Operation::Read && !self.writable {
            libc::EBADF
        } else if offset.checked_add(length).is_none_or(|end| end > self.size) {
            libc::EIO
        } else {
            return Ok(());
        };
        Err(StorageError::at(
            operation,
            &self.name,
            offset,
            length,
            io::Error::from_raw_os_error(error),
        ))
    }
}

impl Storage for NullFile {
    fn identity(&self) -> Identity<'_> {
        Identity { name: &self.name, id: self.id }
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { read_only: !self.writable, ..Capabilities::default() }
    }

    async fn read_at(&self, _offset: u64, mut buf: IoBuf) -> Result<IoBuf> {
        // What is past its end is zeroes too.
        buf.fill(0);
        Ok(buf)
    }

    async fn write_vectored_at(&self, offset: u64, bufs: Vec<IoBuf>) -> Result<Vec<IoBuf>> {
        let length = bufs.iter().map(|buf| buf.len() as u64).sum();
        self.check(Operation::Write, offset, length)?;
        Ok(bufs)
    }

    async fn write_zeroes(&self, offset: u64, length: u64, _mode: ZeroMode) -> Result<()> {
        self.check(Operation::WriteZeroes, offset, length)
    }

    async fn flush(&self) -> Result<()> {
        Ok(())
    }

    async fn len(&self) -> Result<u64> {
        Ok(self.size)
    }

    async fn set_len(&self, length: u64) -> Result<()> {
        if length == self.size {
            return Ok(());
        }
        Err(unsupported(Operation::SetLength, &self.name))
    }

    async fn allocation(&self, offset: u64) -> Result<Allocation> {
        let length = self.size.saturating_sub(offset);
        Ok(Allocation { length, data: length > 0 && !self.says_zeroes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use isobath_ring::block_on;
    use isobath_storage::StorageExt;

    #[test]
    fn it_is_shown_as_it_was_named() {
        let options = |pairs: &[(&str, &str)]| -> Vec<(String, String)> {
            pairs.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect()
        };
        let bare = options(&[("file.driver", "null-aio"), ("driver", "raw")]);
        assert_eq!(shown("", &bare), "null-aio://");
        let sized = options(&[("driver", "null-co"), ("size", "64k"), ("read-only", "on")]);
        assert_eq!(shown("x", &sized), r#"json:{"driver": "null-co", "size": "64k"}"#);
        let json = "json:{'driver':'null-co','size':65536}";
        assert_eq!(shown(json, &sized), r#"json:{"driver": "null-co", "size": 65536}"#);
        let below = options(&[("driver", "raw"), ("file.driver", "null-co"), ("file.size", "1")]);
        let expected = r#"json:{"driver": "raw", "file": {"driver": "null-co", "size": "1"}}"#;
        assert_eq!(shown("x", &below), expected);
    }

    #[test]
    fn a_null_disk_reads_as_zeroes_and_ends_somewhere() {
        let open = |name: &Path, writable| {
            block_on(NullHost.open(name, OpenMode { writable, ..OpenMode::default() })).unwrap()
        };
        let name = named(Some("64k"), false).unwrap();
        let file = open(&name, true);
        let written = block_on(file.write_at(65024, IoBuf::copy_of(&[1; 512]))).unwrap();
        assert_eq!(written.len(), 512);
        let read = block_on(file.read_at(65024, IoBuf::copy_of(&[9; 512]))).unwrap();
        assert_eq!(read[..], [0; 512]);
        assert!(block_on(file.write_at(65025, IoBuf::zeroed(512))).is_err());
        assert!(block_on(file.set_len(512)).is_err());
        assert_eq!(block_on(file.len()).unwrap(), 65536);
        assert!(block_on(file.allocation(0)).unwrap().data);
        let zeroes = open(&named(None, true).unwrap(), false);
        assert_eq!(
            block_on(zeroes.allocation(5)).unwrap(),
            Allocation { length: SIZE - 5, data: false }
        );
        assert!(block_on(zeroes.write_at(0, IoBuf::zeroed(512))).is_err());
        assert_ne!(open(&name, true).id(), file.id());
        assert!(named(Some("x"), false).is_err());
        assert!(says_nothing(&name) && !says_nothing(&named(None, true).unwrap()));
        for other in ["null", "null:512:data", "part\x000:0:null\x00512:data"] {
            assert!(!is_name(Path::new(other)), "{other}");
        }
    }
}
