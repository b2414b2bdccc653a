//! A part of a file as a file of its own.
//!
//! QEMU's driver `raw` has the options `offset` and `size` for this: a disk within an archive, or a partition. A part
//! can also be what is behind an encryption header: it is then read and written [through a
//! cipher](Storage::through_cipher).

use crate::error::{Operation, StorageError};
use crate::sectors::{SectorCipher, Sectors, around};
use crate::{
    Allocation, BoxFuture, Capabilities, Extensions, FileId, Host, Identity, IndexFile, IoBuf,
    KeptLayer, Made, OpenMode, Reflink, Result, SECTOR, Storage, StorageExt, ZeroMode,
};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Zeroes encrypted at once, in bytes.
const CHUNK: u64 = 1 << 20;

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

/// The name by which a host opens the file at this path, even if the path looks like the name of a [part](Part), or of
/// another thing that [is no path](Host::is_no_path).
pub fn path_of_file(path: &str, is_no_path: impl FnOnce(&str) -> bool) -> PathBuf {
    let other = Part::of_name(Path::new(path)).is_some() || is_no_path(path);
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
            return Ok(WindowFile {
                file: self.0.open(name, mode).await?,
                part: None,
                sectors: None,
            });
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
        Ok(WindowFile { file, part: Some((offset, size)), sectors: None })
    }

    async fn create(&self, name: &Path, mode: OpenMode) -> Result<Self::File> {
        if Part::of_name(name).is_some() {
            return Err(fixed(name, Operation::Create));
        }
        Ok(WindowFile { file: self.0.create(name, mode).await?, part: None, sectors: None })
    }

    async fn create_unlike(
        &self,
        name: &Path,
        mode: OpenMode,
        spared: &dyn Fn(FileId) -> bool,
    ) -> Result<Option<Made<Self::File>>> {
        if Part::of_name(name).is_some() {
            return Err(fixed(name, Operation::Create));
        }
        let made = self.0.create_unlike(name, mode, spared).await?;
        Ok(made.map(|Made { file, is_new }| {
            let file = WindowFile { file, part: None, sectors: None };
            Made { file, is_new }
        }))
    }

    async fn remove(&self, name: &Path) -> Result<()> {
        if Part::of_name(name).is_some() {
            return Err(fixed(name, Operation::Remove));
        }
        self.0.remove(name).await
    }

    async fn remove_file(&self, name: &Path, file: &Self::File) -> Result<bool> {
        if Part::of_name(name).is_some() {
            return Err(fixed(name, Operation::Remove));
        }
        self.0.remove_file(name, &file.file).await
    }

    fn canonical(&self, name: &Path) -> Result<PathBuf> {
        let Some(part) = Part::of_name(name) else { return self.0.canonical(name) };
        let part = Part { file: self.0.canonical(&part.file)?, ..part };
        Ok(part.name().unwrap_or_else(|| name.to_owned()))
    }

    fn find(&self, name: &Path) -> Result<Option<FileId>> {
        match Part::of_name(name) {
            Some(part) => self.0.find(&part.file),
            None => self.0.find(name),
        }
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

    fn is_no_path(&self, name: &str) -> bool {
        Part::of_name(Path::new(name)).is_some() || self.0.is_no_path(name)
    }

    /// A part is no layer of a chain with an index of its own.
    fn index_of(&self, top: &Path) -> Option<IndexFile> {
        match Part::of_name(top) {
            Some(_) => None,
            None => self.0.index_of(top),
        }
    }

    /// A part is no layer of a chain.
    fn kept(&self, image: &Path) -> Option<KeptLayer> {
        if Part::of_name(image).is_some() { None } else { self.0.kept(image) }
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
    /// How it is encrypted.
    sectors: Option<Box<Sectors>>,
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

    /// Reads bytes as they are stored.
    async fn read_stored(&self, offset: u64, buf: IoBuf) -> Result<IoBuf> {
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

    /// Writes bytes as they are stored.
    async fn write_stored(&self, offset: u64, buf: IoBuf) -> Result<IoBuf> {
        let place = self.place(Operation::Write, offset, buf.len() as u64)?;
        self.file.write_one_at(place, buf).await
    }

    async fn stored_length(&self) -> Result<u64> {
        let length = self.file.len().await?;
        Ok(match self.part {
            None => length,
            Some((_, Some(size))) => size,
            Some((start, None)) => length.saturating_sub(start),
        })
    }

    /// The cipher, if it is known.
    fn cipher<'a>(
        &self,
        sectors: &'a Sectors,
        operation: Operation,
    ) -> Result<&'a dyn SectorCipher> {
        sectors.cipher.as_deref().ok_or_else(|| {
            let text = "it is encrypted, and was opened without its key";
            let source = io::Error::new(io::ErrorKind::PermissionDenied, text);
            StorageError::new(operation, self.file.name(), source)
        })
    }

    /// Checks the range of a write of encrypted sectors. It may extend the file; if it began after the end, there would
    /// be noise in between.
    fn check_write(
        &self,
        sectors: &Sectors,
        operation: Operation,
        offset: u64,
        length: u64,
    ) -> Result<Range<u64>> {
        let end = sectors.end();
        self.check(sectors, operation, offset, length.min(end.saturating_sub(offset)))?;
        self.place(operation, offset, length)?;
        Ok(offset..offset + length)
    }

    /// Checks the range of a change of encrypted sectors.
    fn check(
        &self,
        sectors: &Sectors,
        operation: Operation,
        offset: u64,
        length: u64,
    ) -> Result<Range<u64>> {
        match offset.checked_add(length) {
            Some(end) if end <= sectors.end() => Ok(offset..end),
            end => {
                let errno = if end.is_none() { libc::EFBIG } else { libc::ENOSPC };
                let error = io::Error::from_raw_os_error(errno);
                Err(StorageError::at(operation, self.file.name(), offset, length, error))
            }
        }
    }

    /// Reads and decrypts. The sectors are locked.
    async fn decrypted(
        &self,
        sectors: &Sectors,
        cipher: &dyn SectorCipher,
        offset: u64,
        mut buf: IoBuf,
    ) -> Result<IoBuf> {
        let end = offset.saturating_add(buf.len() as u64).min(sectors.end());
        if end <= offset {
            buf.fill(0);
            return Ok(buf);
        }
        let touched = around(&(offset..end));
        let all = touched == (offset..offset + buf.len() as u64);
        // Nobody else may change the bytes while they are decrypted.
        if all && !buf.is_shared() {
            let mut buf = self.read_stored(offset, buf).await?;
            cipher.decrypt(offset / SECTOR, &mut buf);
            return Ok(buf);
        }
        let whole = IoBuf::zeroed((touched.end - touched.start) as usize);
        let mut whole = self.read_stored(touched.start, whole).await?;
        cipher.decrypt(touched.start / SECTOR, &mut whole);
        let (from, there) = ((offset - touched.start) as usize, (end - offset) as usize);
        buf[..there].copy_from_slice(&whole[from..from + there]);
        buf[there..].fill(0);
        Ok(buf)
    }

    async fn read_encrypted(
        &self,
        sectors: &Sectors,
        offset: u64,
        mut buf: IoBuf,
    ) -> Result<IoBuf> {
        let cipher = self.cipher(sectors, Operation::Read)?;
        let end = offset.saturating_add(buf.len() as u64).min(sectors.end());
        if end <= offset {
            buf.fill(0);
            return Ok(buf);
        }
        let _shared = sectors.locks.lock(around(&(offset..end)), false).await;
        self.decrypted(sectors, cipher, offset, buf).await
    }

    /// Encrypts the buffers into one of its own, and writes that.
    async fn write_encrypted(&self, sectors: &Sectors, offset: u64, bufs: &[IoBuf]) -> Result<()> {
        let cipher = self.cipher(sectors, Operation::Write)?;
        let length: usize = bufs.iter().map(IoBuf::len).sum();
        let range = self.check_write(sectors, Operation::Write, offset, length as u64)?;
        if range.is_empty() {
            return Ok(());
        }
        let touched = around(&range);
        let parts = touched != range;
        let _sectors = sectors.locks.lock(touched.clone(), parts).await;
        let mut stored = IoBuf::zeroed((touched.end - touched.start) as usize);
        if parts {
            let last = touched.end - SECTOR;
            let torn = [touched.start, last]
                .into_iter()
                .filter(|at| *at < range.start || *at + SECTOR > range.end);
            for at in torn {
                let sector = IoBuf::zeroed(SECTOR as usize);
                let sector = self.decrypted(sectors, cipher, at, sector).await?;
                let place = (at - touched.start) as usize;
                stored[place..place + SECTOR as usize].copy_from_slice(&sector);
            }
        }
        let mut next = (range.start - touched.start) as usize;
        for buf in bufs {
            buf.copy_to(&mut stored[next..next + buf.len()]);
            next += buf.len();
        }
        cipher.encrypt(touched.start / SECTOR, &mut stored);
        self.write_stored(touched.start, stored).await?;
        sectors.extend_to(touched.end);
        Ok(())
    }

    /// Writes zeroes, which are data like any other once they are encrypted.
    async fn zero_encrypted(
        &self,
        sectors: &Sectors,
        offset: u64,
        length: u64,
        mode: ZeroMode,
    ) -> Result<()> {
        let range = self.check_write(sectors, Operation::WriteZeroes, offset, length)?;
        if mode.only_fast {
            let text = "zeroes can only be written as data here, which would be slow";
            let source = io::Error::new(io::ErrorKind::Unsupported, text);
            return Err(StorageError::new(Operation::WriteZeroes, self.file.name(), source));
        }
        let cipher = self.cipher(sectors, Operation::WriteZeroes)?;
        let whole = range.start.next_multiple_of(SECTOR)..range.end / SECTOR * SECTOR;
        if whole.is_empty() {
            let zeroes = IoBuf::zeroed(length as usize);
            return self.write_encrypted(sectors, offset, &[zeroes]).await;
        }
        let first = IoBuf::zeroed((whole.start - range.start) as usize);
        self.write_encrypted(sectors, range.start, &[first]).await?;
        let mut buf = IoBuf::empty();
        let mut at = whole.start;
        while at < whole.end {
            let length = CHUNK.min(whole.end - at) as usize;
            if buf.len() == length {
                buf.fill(0);
            } else {
                buf = IoBuf::zeroed(length);
            }
            cipher.encrypt(at / SECTOR, &mut buf);
            let _shared = sectors.locks.lock(at..at + length as u64, false).await;
            buf = self.write_stored(at, buf).await?;
            at += length as u64;
            sectors.extend_to(at);
        }
        let last = IoBuf::zeroed((range.end - whole.end) as usize);
        self.write_encrypted(sectors, whole.end, &[last]).await
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
                // What was never written is noise when it is decrypted.
                extends_with_zeroes: own.extends_with_zeroes
                    && size.is_none()
                    && self.sectors.is_none(),
                // What is aligned here may not be so in the file.
                atomic_write: if start.is_multiple_of(own.atomic_write) {
                    own.atomic_write
                } else {
                    crate::SECTOR
                },
                clone_alignment: None,
                // Hints speak of the whole file.
                extends_one_at_a_time: false,
                begins_at: own.begins_at + start,
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
            Some(_) => Extensions {
                stamps: None,
                restart_memories: None,
                // A header takes space, too.
                usage: all.usage.filter(|_| self.sectors.is_some()),
                ..all
            },
        }
    }

    async fn through_cipher(
        self,
        offset: u64,
        cipher: Option<Arc<dyn SectorCipher>>,
    ) -> Result<Self> {
        let length = self.len().await?;
        let (start, size) = self.part.unwrap_or((0, None));
        let fits = offset <= length && offset.is_multiple_of(SECTOR) && self.sectors.is_none();
        let Some(start) = start.checked_add(offset).filter(|_| fits) else {
            let text = format!("ciphertext cannot begin at {offset}: the file has {length} bytes");
            let source = io::Error::new(io::ErrorKind::InvalidInput, text);
            return Err(StorageError::new(Operation::Open, self.file.name(), source));
        };
        let part = Some((start, size.map(|size| size.saturating_sub(offset))));
        let sectors = Some(Box::new(Sectors::new(cipher, length - offset)));
        Ok(Self { file: self.file, part, sectors })
    }

    async fn read_at(&self, offset: u64, buf: IoBuf) -> Result<IoBuf> {
        match &self.sectors {
            None => self.read_stored(offset, buf).await,
            Some(sectors) => Box::pin(self.read_encrypted(sectors, offset, buf)).await,
        }
    }

    async fn write_vectored_at(&self, offset: u64, bufs: Vec<IoBuf>) -> Result<Vec<IoBuf>> {
        if let Some(sectors) = &self.sectors {
            Box::pin(self.write_encrypted(sectors, offset, &bufs)).await?;
            return Ok(bufs);
        }
        let length: usize = bufs.iter().map(IoBuf::len).sum();
        let place = self.place(Operation::Write, offset, length as u64)?;
        self.file.write_vectored_at(place, bufs).await
    }

    async fn write_one_at(&self, offset: u64, buf: IoBuf) -> Result<IoBuf> {
        if let Some(sectors) = &self.sectors {
            Box::pin(self.write_encrypted(sectors, offset, std::slice::from_ref(&buf))).await?;
            return Ok(buf);
        }
        self.write_stored(offset, buf).await
    }

    async fn write_zeroes(&self, offset: u64, length: u64, mode: ZeroMode) -> Result<()> {
        if let Some(sectors) = &self.sectors {
            return Box::pin(self.zero_encrypted(sectors, offset, length, mode)).await;
        }
        let place = self.place(Operation::WriteZeroes, offset, length)?;
        self.file.write_zeroes(place, length, mode).await
    }

    async fn discard(&self, offset: u64, length: u64) -> Result<()> {
        if let Some(sectors) = &self.sectors {
            // What it leaves would be noise, and tell where there is none.
            return self.check(sectors, Operation::Discard, offset, length).map(drop);
        }
        let place = self.place(Operation::Discard, offset, length)?;
        self.file.discard(place, length).await
    }

    async fn flush(&self) -> Result<()> {
        self.file.flush().await
    }

    async fn len(&self) -> Result<u64> {
        let length = self.stored_length().await?;
        if let Some(sectors) = &self.sectors {
            sectors.set_length(length);
        }
        Ok(length)
    }

    /// What is added to an encrypted file is noise, as in QEMU. Such a file ends with a sector.
    async fn set_len(&self, length: u64) -> Result<()> {
        let length = match &self.sectors {
            Some(_) => length.checked_next_multiple_of(SECTOR).unwrap_or(length),
            None => length,
        };
        match self.part {
            None => self.file.set_len(length).await?,
            Some((_, Some(size))) if length == size => {}
            Some((_, Some(_))) => return Err(fixed(self.file.name(), Operation::SetLength)),
            Some((start, None)) => self.file.set_len(start.saturating_add(length)).await?,
        }
        if let Some(sectors) = &self.sectors {
            sectors.set_length(length);
        }
        Ok(())
    }

    /// Where the file is of which it may be a part.
    async fn real_path(&self) -> Result<PathBuf> {
        self.file.real_path().await
    }

    async fn allocation(&self, offset: u64) -> Result<Allocation> {
        if self.sectors.is_some() {
            let length = self.stored_length().await?.saturating_sub(offset);
            return Ok(Allocation { length, data: length > 0 });
        }
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

    /// Each byte depends on its place, and on all before it in its sector.
    #[derive(Debug)]
    struct Toy;

    impl SectorCipher for Toy {
        fn encrypt(&self, sector: u64, bytes: &mut [u8]) {
            for (number, one) in (sector..).zip(bytes.chunks_exact_mut(512)) {
                let mut last = number as u8 ^ 0x5a;
                for byte in one {
                    *byte = byte.wrapping_add(last);
                    last = byte.wrapping_mul(3);
                }
            }
        }

        fn decrypt(&self, sector: u64, bytes: &mut [u8]) {
            for (number, one) in (sector..).zip(bytes.chunks_exact_mut(512)) {
                let mut last = number as u8 ^ 0x5a;
                for byte in one {
                    let next = byte.wrapping_mul(3);
                    *byte = byte.wrapping_sub(last);
                    last = next;
                }
            }
        }
    }

    /// A file of 4,096 plain bytes that are encrypted behind 1,024 others, which are 9.
    async fn encrypted(memory: &MemoryHost, plain: &[u8]) -> WindowFile<impl Storage> {
        let mut bytes = plain.to_vec();
        Toy.encrypt(0, &mut bytes);
        bytes.splice(..0, [9; 1024]);
        memory.insert("disk", &bytes);
        let host = WindowHost::new(memory.clone());
        let mode = OpenMode { writable: true, ..OpenMode::default() };
        let file = host.open(Path::new("disk"), mode).await.unwrap();
        file.through_cipher(1024, Some(Arc::new(Toy))).await.unwrap()
    }

    fn stored(memory: &MemoryHost) -> Vec<u8> {
        let mut bytes = memory.contents("disk").unwrap();
        assert!(bytes.drain(..1024).all(|byte| byte == 9));
        Toy.decrypt(0, &mut bytes);
        bytes
    }

    #[test]
    fn every_range_is_written_and_read_through_the_cipher() {
        block_on(async {
            let memory = MemoryHost::new();
            let plain: Vec<u8> = (0..4096_u32).map(|at| (at * 7 / 3) as u8).collect();
            let places = [0, 1, 511, 512, 513, 1000, 1024, 3583, 3584, 4095, 4096];
            for (start, end) in places.iter().flat_map(|a| places.iter().map(|b| (*a, *b))) {
                if start > end {
                    continue;
                }
                let file = encrypted(&memory, &plain).await;
                let (at, length) = (start as u64, end - start);
                let read = file.read_at(at, IoBuf::copy_of(&vec![1; length])).await.unwrap();
                assert!(read[..] == plain[start..end], "{start}..{end}");
                let new: Vec<u8> = (0..length).map(|at| at as u8 ^ 0x33).collect();
                let mut wanted = plain.clone();
                wanted[start..end].copy_from_slice(&new);
                let back = file.write_at(at, IoBuf::copy_of(&new)).await.unwrap();
                assert!(back[..] == new[..], "the buffer is the caller's");
                assert!(stored(&memory) == wanted, "{start}..{end}");
                let (one, other) = new.split_at(length / 3);
                let bufs = vec![IoBuf::copy_of(other), IoBuf::copy_of(one)];
                wanted[start..end].copy_from_slice(&[other, one].concat());
                let _ = file.write_vectored_at(at, bufs).await.unwrap();
                assert!(stored(&memory) == wanted, "{start}..{end}");
                file.write_zeroes(at, length as u64, ZeroMode::default()).await.unwrap();
                wanted[start..end].fill(0);
                assert!(stored(&memory) == wanted, "{start}..{end}");
                file.discard(at, length as u64).await.unwrap();
                assert!(stored(&memory) == wanted, "{start}..{end}");
            }
        });
    }

    #[test]
    fn an_encrypted_file_ends_with_a_sector() {
        block_on(async {
            let memory = MemoryHost::new();
            let file = encrypted(&memory, &[1; 2048]).await;
            assert_eq!(file.len().await.unwrap(), 2048);
            assert!(!file.capabilities().extends_with_zeroes);
            let past = file.read_at(2000, IoBuf::copy_of(&[7; 100])).await.unwrap();
            assert!(past[..48] == [1; 48] && past[48..] == [0; 52]);
            assert!(file.read_at(u64::MAX, IoBuf::zeroed(2)).await.unwrap()[..] == [0; 2]);
            // There would be noise in between.
            for (offset, length) in [(2049, 1), (2560, 512), (u64::MAX, 1), (u64::MAX - 1, 1)] {
                assert!(file.write_at(offset, IoBuf::zeroed(length)).await.is_err());
                let mode = ZeroMode::default();
                assert!(file.write_zeroes(offset, length as u64, mode).await.is_err());
                assert!(file.discard(offset, length as u64).await.is_err());
            }
            assert!(file.discard(2047, 2).await.is_err());
            let fast = ZeroMode { only_fast: true, may_unmap: true };
            let slow = file.write_zeroes(0, 512, fast).await.unwrap_err();
            assert_eq!(slow.kind(), io::ErrorKind::Unsupported);
            assert_eq!(
                file.allocation(512).await.unwrap(),
                Allocation { length: 1536, data: true }
            );
            file.set_len(1537).await.unwrap();
            assert_eq!(file.len().await.unwrap(), 2048);
            assert!(stored(&memory)[1536..] == [1; 512], "what is left of a sector is whole");
            // What is written at the end makes the file longer.
            let _ = file.write_at(2047, IoBuf::copy_of(&[3; 600])).await.unwrap();
            file.write_zeroes(3072, 513, ZeroMode::default()).await.unwrap();
            assert_eq!(file.len().await.unwrap(), 4096);
            let longer = [vec![1; 2047], vec![3; 600], vec![0; 1449]].concat();
            assert!(stored(&memory) == longer);
            assert!(file.read_at(0, IoBuf::zeroed(4096)).await.unwrap()[..] == longer);
            file.set_len(2048).await.unwrap();
            // One that would begin after the end, or twice.
            assert!(file.through_cipher(0, None).await.is_err());
            let host = WindowHost::new(memory.clone());
            for offset in [3584, 100] {
                let file = host.open(Path::new("disk"), OpenMode::default()).await.unwrap();
                assert!(file.through_cipher(offset, None).await.is_err(), "{offset}");
            }
        });
    }

    #[test]
    fn without_its_key_nothing_is_read_or_written() {
        block_on(async {
            let memory = MemoryHost::new();
            memory.insert("disk", &[9; 4096]);
            let host = WindowHost::new(memory.clone());
            let mode = OpenMode { writable: true, ..OpenMode::default() };
            let file = host.open(Path::new("disk"), mode).await.unwrap();
            let file = file.through_cipher(512, None).await.unwrap();
            assert_eq!(file.len().await.unwrap(), 3584);
            assert!(file.read_at(0, IoBuf::zeroed(512)).await.is_err());
            assert!(file.write_at(0, IoBuf::zeroed(512)).await.is_err());
            assert!(file.write_zeroes(0, 512, ZeroMode::default()).await.is_err());
            drop(file);
            assert_eq!(memory.contents("disk").unwrap(), [9; 4096]);
            // Other storage has no such view.
            let plain = memory.open(Path::new("disk"), mode).await.unwrap();
            let refused = plain.through_cipher(0, None).await.err().map(|error| error.kind());
            assert_eq!(refused, Some(io::ErrorKind::Unsupported));
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
