//! A part of a file as a file of its own.
//!
//! QEMU's driver `raw` has the options `offset` and `size` for this: a disk within an archive, or a partition.

use crate::error::{Operation, StorageError};
use crate::{
    Allocation, BoxFuture, Capabilities, Extensions, Host, Identity, IoBuf, OpenMode, Reflink,
    Result, Storage, StorageExt, ZeroMode,
};
use std::io;
use std::path::{Path, PathBuf};

/// How the name of a part begins, before `OFFSET:SIZE:NAME`, with an empty size for one that reaches to the file's end.
/// No file has a name with a NUL byte, nobody can type one, and no header may hold one.
const PREFIX: &str = "part\0";

/// A part of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Where it begins, in bytes.
    pub offset: u64,
    /// Its bytes; `None` if it reaches to the end of the file, wherever that is.
    pub size: Option<u64>,
    /// The name of the file.
    pub file: PathBuf,
}

impl Part {
    /// The name by which a [`WindowHost`] opens it. `None` if the file's name is not UTF-8.
    pub fn name(&self) -> Option<PathBuf> {
        let size = self.size.map(|size| size.to_string()).unwrap_or_default();
        let file = self.file.to_str()?;
        Some(format!("{PREFIX}{}:{size}:{file}", self.offset).into())
    }

    /// The part of this name; `None` for the name of a whole file.
    pub fn of_name(name: &Path) -> Option<Self> {
        let rest = name.to_str()?.strip_prefix(PREFIX)?;
        let (offset, rest) = rest.split_once(':')?;
        let (size, file) = rest.split_once(':')?;
        let size = if size.is_empty() { None } else { Some(size.parse().ok()?) };
        Some(Self { offset: offset.parse().ok()?, size, file: file.into() })
    }
}

/// The name by which a host opens the file at this path, even if the path looks like the name of a [part](Part), or has
/// a [protocol](Host::protocol_name).
pub fn path_of_file(path: &str, has_protocol: impl FnOnce(&str) -> bool) -> PathBuf {
    let other = Part::of_name(Path::new(path)).is_some() || has_protocol(path);
    if other { Path::new(".").join(path) } else { path.into() }
}

/// A host that opens parts of another's files by their [names](Part::name), and everything else as that host does.
///
/// Parts cannot be created or removed, and a part with a size keeps it. No name in an image's header is that of a part.
#[derive(Clone, Debug)]
pub struct WindowHost<H>(H);

impl<H> WindowHost<H> {
    /// Adds parts to a host.
    pub const fn new(host: H) -> Self {
        Self(host)
    }
}

impl<H: Host> Host for WindowHost<H> {
    type File = WindowFile<H::File>;

    /// # Errors
    /// Those of the host; or the part reaches past the end of its file.
    async fn open(&self, name: &Path, mode: OpenMode) -> Result<Self::File> {
        let Some(Part { offset, size, file }) = Part::of_name(name) else {
            return Ok(WindowFile { file: self.0.open(name, mode).await?, part: None });
        };
        let file = self.0.open(&file, mode).await?;
        let length = file.len().await?;
        let fits = offset.checked_add(size.unwrap_or(0)).is_some_and(|end| end <= length);
        if !fits {
            // QEMU's words.
            let text = match size {
                None => format!(
                    "Offset ({offset}) cannot be greater than size of the containing file ({length})"
                ),
                Some(size) => format!(
                    "The sum of offset ({offset}) and size ({size}) has to be smaller or equal to the \
                     actual size of the containing file ({length})"
                ),
            };
            let source = io::Error::new(io::ErrorKind::InvalidInput, text);
            return Err(StorageError::new(Operation::Open, file.name(), source));
        }
        Ok(WindowFile { file, part: Some((offset, size)) })
    }

    async fn create(&self, name: &Path, mode: OpenMode) -> Result<Self::File> {
        if Part::of_name(name).is_some() {
            return Err(fixed(name, Operation::Create));
        }
        Ok(WindowFile { file: self.0.create(name, mode).await?, part: None })
    }

    async fn remove(&self, name: &Path) -> Result<()> {
        if Part::of_name(name).is_some() {
            return Err(fixed(name, Operation::Remove));
        }
        self.0.remove(name).await
    }

    fn canonical(&self, name: &Path) -> Result<PathBuf> {
        let Some(part) = Part::of_name(name) else { return self.0.canonical(name) };
        let part = Part { file: self.0.canonical(&part.file)?, ..part };
        Ok(part.name().unwrap_or_else(|| name.to_owned()))
    }

    /// A part is where its file is.
    fn protocol_name(&self, name: &str) -> bool {
        match Part::of_name(Path::new(name))
            .and_then(|part| part.file.into_os_string().into_string().ok())
        {
            Some(file) => self.0.protocol_name(&file),
            None => self.0.protocol_name(name),
        }
    }

    /// Names in an image that is a part are relative to the file's directory.
    fn resolve(&self, referrer: &Path, name: &str) -> PathBuf {
        match Part::of_name(referrer) {
            Some(part) => self.0.resolve(&part.file, name),
            None => self.0.resolve(referrer, name),
        }
    }
}

/// The error of an operation that a part does not allow.
fn fixed(name: &Path, operation: Operation) -> StorageError {
    let text = "it is a part of a file, which keeps its place and its size";
    StorageError::new(operation, name, io::Error::new(io::ErrorKind::Unsupported, text))
}

/// A file, or a part of one.
#[derive(Debug)]
pub struct WindowFile<S> {
    file: S,
    /// Where it begins, and its size if that is fixed.
    part: Option<(u64, Option<u64>)>,
}

impl<S: Storage> WindowFile<S> {
    /// Where a range is in the file; fails if it is not within the part.
    fn place(&self, operation: Operation, offset: u64, length: u64) -> Result<u64> {
        let Some((start, size)) = self.part else { return Ok(offset) };
        let end = offset.checked_add(length);
        let place = start.checked_add(offset);
        let errno = match (end, place.filter(|place| place.checked_add(length).is_some())) {
            (Some(end), Some(place)) if size.is_none_or(|size| end <= size) => return Ok(place),
            (Some(_), Some(_)) => libc::ENOSPC,
            _ => libc::EFBIG,
        };
        let error = io::Error::from_raw_os_error(errno);
        Err(StorageError::at(operation, self.file.name(), offset, length, error))
    }
}

impl<S: Storage> Storage for WindowFile<S> {
    fn identity(&self) -> Identity<'_> {
        self.file.identity()
    }

    fn capabilities(&self) -> Capabilities {
        let own = self.file.capabilities();
        match self.part {
            None => own,
            Some((start, size)) => Capabilities {
                extends_with_zeroes: own.extends_with_zeroes && size.is_none(),
                // What is aligned here may not be so in the file.
                atomic_write: if start.is_multiple_of(own.atomic_write) {
                    own.atomic_write
                } else {
                    crate::SECTOR
                },
                clone_alignment: None,
                ..own
            },
        }
    }

    fn extensions(&self) -> Extensions<'_, Self> {
        let own = self.file.extensions();
        let reflink = own.reflink.is_some() && self.part.is_none();
        let all = own.with_reflink(reflink.then_some(self as &dyn Reflink<Self>));
        match self.part {
            None => all,
            // The others speak of the whole file.
            Some(_) => Extensions { stamps: None, restart_memories: None, usage: None, ..all },
        }
    }

    async fn read_at(&self, offset: u64, buf: IoBuf) -> Result<IoBuf> {
        let Some((start, size)) = self.part else { return self.file.read_at(offset, buf).await };
        let wanted = buf.len() as u64;
        let left = size.map_or(wanted, |size| size.saturating_sub(offset).min(wanted));
        let place = start.saturating_add(offset);
        if left == wanted {
            return self.file.read_at(place, buf).await;
        }
        let mut buf = buf;
        let there = left as usize;
        if there > 0 {
            let part = self.file.read_at(place, IoBuf::zeroed(there)).await?;
            buf[..there].copy_from_slice(&part);
        }
        buf[there..].fill(0);
        Ok(buf)
    }

    async fn write_vectored_at(&self, offset: u64, bufs: Vec<IoBuf>) -> Result<Vec<IoBuf>> {
        let length: usize = bufs.iter().map(IoBuf::len).sum();
        let place = self.place(Operation::Write, offset, length as u64)?;
        self.file.write_vectored_at(place, bufs).await
    }

    async fn write_one_at(&self, offset: u64, buf: IoBuf) -> Result<IoBuf> {
        let place = self.place(Operation::Write, offset, buf.len() as u64)?;
        self.file.write_one_at(place, buf).await
    }

    async fn write_zeroes(&self, offset: u64, length: u64, mode: ZeroMode) -> Result<()> {
        let place = self.place(Operation::WriteZeroes, offset, length)?;
        self.file.write_zeroes(place, length, mode).await
    }

    async fn discard(&self, offset: u64, length: u64) -> Result<()> {
        let place = self.place(Operation::Discard, offset, length)?;
        self.file.discard(place, length).await
    }

    async fn flush(&self) -> Result<()> {
        self.file.flush().await
    }

    async fn len(&self) -> Result<u64> {
        let length = self.file.len().await?;
        Ok(match self.part {
            None => length,
            Some((_, Some(size))) => size,
            Some((start, None)) => length.saturating_sub(start),
        })
    }

    async fn set_len(&self, length: u64) -> Result<()> {
        match self.part {
            None => self.file.set_len(length).await,
            Some((_, Some(size))) if length == size => Ok(()),
            Some((_, Some(_))) => Err(fixed(self.file.name(), Operation::SetLength)),
            Some((start, None)) => self.file.set_len(start.saturating_add(length)).await,
        }
    }

    async fn allocation(&self, offset: u64) -> Result<Allocation> {
        let Some((start, size)) = self.part else { return self.file.allocation(offset).await };
        let left = size.map_or(u64::MAX, |size| size.saturating_sub(offset));
        if left == 0 {
            return Ok(Allocation { length: 0, data: false });
        }
        let found = self.file.allocation(start.saturating_add(offset)).await?;
        Ok(Allocation { length: found.length.min(left), ..found })
    }
}

/// Whole files share space, not parts.
impl<S: Storage> Reflink<Self> for WindowFile<S> {
    fn clone_range<'a>(
        &'a self,
        from: &'a Self,
        from_offset: u64,
        to_offset: u64,
        length: u64,
    ) -> BoxFuture<'a, Result<bool>> {
        if self.part.is_some() || from.part.is_some() {
            return Box::pin(async { Ok(false) });
        }
        Box::pin(self.file.clone_range(&from.file, from_offset, to_offset, length))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::MemoryHost;
    use futures_executor::block_on;

    fn part(offset: u64, size: Option<u64>) -> PathBuf {
        Part { offset, size, file: "disk".into() }.name().unwrap()
    }

    #[test]
    fn names_are_found_again() {
        for name in ["/a/b:c", "part\x0000::x", "part:0::x", ""] {
            for size in [None, Some(0), Some(u64::MAX)] {
                let part = Part { offset: 512, size, file: name.into() };
                assert_eq!(Part::of_name(&part.name().unwrap()), Some(part));
            }
        }
        for name in ["disk", "part:0:5:a", "part\0", "part\x005", "part\0x:5:a", "./part\x000:5:a"]
        {
            assert_eq!(Part::of_name(Path::new(name)), None, "{name}");
        }
    }

    #[test]
    fn files_that_look_like_something_else_are_opened_as_files() {
        let has_protocol = |name: &str| name.starts_with("nbd:");
        for plain in ["disk", "/a/nbd:x", "./part\x000::x"] {
            assert_eq!(path_of_file(plain, has_protocol), Path::new(plain));
        }
        for other in ["nbd:x", "part\x000::x", "part\x000:5:nbd:x"] {
            assert_eq!(path_of_file(other, has_protocol), Path::new(".").join(other));
        }
    }

    #[test]
    fn a_part_is_a_file_of_its_own_size() {
        block_on(async {
            let memory = MemoryHost::new();
            memory.insert("disk", &[1, 2, 3, 4, 5, 6, 7, 8]);
            let host = WindowHost::new(memory.clone());
            let mode = OpenMode { writable: true, ..OpenMode::default() };
            let file = host.open(&part(2, Some(4)), mode).await.unwrap();
            assert_eq!(file.len().await.unwrap(), 4);
            let read = file.read_at(1, IoBuf::copy_of(&[9; 5])).await.unwrap();
            assert_eq!(&read[..], [4, 5, 6, 0, 0]);
            let past = file.read_at(7, IoBuf::copy_of(&[9; 2])).await.unwrap();
            assert_eq!(&past[..], [0, 0]);
            let _ = file.write_at(3, IoBuf::copy_of(&[70])).await.unwrap();
            for (offset, length, errno) in
                [(3, 2, libc::ENOSPC), (4, 1, libc::ENOSPC), (u64::MAX, 1, libc::EFBIG)]
            {
                let written = file.write_at(offset, IoBuf::zeroed(length)).await;
                assert_eq!(written.unwrap_err().errno(), errno);
                let zeroes = file.write_zeroes(offset, length as u64, ZeroMode::default()).await;
                assert_eq!(zeroes.unwrap_err().errno(), errno);
                assert!(file.discard(offset, length as u64).await.is_err());
            }
            file.write_zeroes(0, 1, ZeroMode::default()).await.unwrap();
            assert_eq!(file.allocation(1).await.unwrap().length, 3);
            assert_eq!(file.allocation(4).await.unwrap().length, 0);
            assert!(file.set_len(5).await.is_err());
            file.set_len(4).await.unwrap();
            drop(file);
            assert_eq!(memory.contents("disk").unwrap(), [1, 2, 0, 4, 5, 70, 7, 8]);
        });
    }

    #[test]
    fn a_part_without_a_size_ends_with_its_file() {
        block_on(async {
            let memory = MemoryHost::new();
            memory.insert("disk", &[1, 2, 3, 4]);
            let host = WindowHost::new(memory.clone());
            let mode = OpenMode { writable: true, ..OpenMode::default() };
            let file = host.open(&part(2, None), mode).await.unwrap();
            assert_eq!(file.len().await.unwrap(), 2);
            let _ = file.write_at(1, IoBuf::copy_of(&[5, 6])).await.unwrap();
            assert_eq!(file.len().await.unwrap(), 3);
            file.set_len(1).await.unwrap();
            drop(file);
            assert_eq!(memory.contents("disk").unwrap(), [1, 2, 3]);
        });
    }

    #[test]
    fn what_is_not_in_the_file_is_refused() {
        block_on(async {
            let memory = MemoryHost::new();
            memory.insert("disk", &[0; 8]);
            let host = WindowHost::new(memory);
            for (offset, size) in [(9, None), (4, Some(5)), (u64::MAX, Some(2))] {
                assert!(host.open(&part(offset, size), OpenMode::default()).await.is_err());
            }
            assert!(host.open(&part(8, None), OpenMode::default()).await.is_ok());
            assert!(host.create(&part(0, None), OpenMode::default()).await.is_err());
            assert!(host.remove(&part(0, None)).await.is_err());
        });
    }
}
