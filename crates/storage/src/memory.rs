//! Files in memory, for tests and simulation.
//!
//! Every operation completes at its first poll, so a run depends only on its inputs. Files are sparse in pages of 64
//! KiB: a disk of many TiB takes only the memory of what was written to it. There is no clock: a stamp contains the
//! number of changes and a digest of them instead of times.

use crate::error::{Operation, StorageError};
use crate::lock;
use crate::restart_memory::RESTART_MEMORY_BYTES;
use crate::{
    Access, Allocation, BoxFuture, Capabilities, Extensions, FileId, Hints, Host, Identity, IoBuf,
    MemoryUse, OpenMode, Reflink, RestartMemories, RestartMemory, Result, Roles, SECTOR, Stamp,
    Stamps, Storage, ZeroMode,
};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Bytes in a page of a file in memory; holes are reported at this granularity.
pub const PAGE: u64 = 64 * 1024;

/// The greatest length of a file, as on Linux.
const MAX_LENGTH: u64 = i64::MAX as u64;

type Page = Box<[u8]>;

#[derive(Clone, Default)]
struct Contents {
    length: u64,
    /// The number of changes.
    changes: u64,
    /// A digest of all changes, so that copies that diverged differ.
    history: u64,
    pages: BTreeMap<u64, Page>,
}

impl Contents {
    fn read(&self, offset: u64, buf: &mut [u8]) {
        for (page, within, part) in parts_mut(offset, buf) {
            match self.pages.get(&page) {
                Some(data) => part.copy_from_slice(&data[within..within + part.len()]),
                None => part.fill(0),
            }
        }
    }

    /// Updates the stamp for a change.
    fn changed(&mut self, offset: u64, length: u64, bytes: &[u8]) {
        let mix = |digest: u64, word: u64| {
            (digest.rotate_left(5) ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15)
        };
        self.changes += 1;
        let digest = mix(mix(self.history, offset), length);
        self.history = bytes.chunks(8).fold(digest, |digest, chunk| {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            mix(digest, u64::from_le_bytes(word))
        });
    }

    fn write(&mut self, offset: u64, buf: &[u8]) {
        self.changed(offset, buf.len() as u64, buf);
        let mut done = 0;
        while done < buf.len() {
            let at = offset + done as u64;
            let (page, within) = (at / PAGE, (at % PAGE) as usize);
            let count = (PAGE as usize - within).min(buf.len() - done);
            let data =
                self.pages.entry(page).or_insert_with(|| vec![0; PAGE as usize].into_boxed_slice());
            data[within..within + count].copy_from_slice(&buf[done..done + count]);
            done += count;
        }
        self.length = self.length.max(offset + buf.len() as u64);
    }

    /// Zeroes `[start, end)`, freeing whole pages.
    fn zero(&mut self, start: u64, end: u64) {
        if start >= end {
            return;
        }
        self.changed(start, end - start, &[]);
        let touched: Vec<u64> =
            self.pages.range(start / PAGE..=(end - 1) / PAGE).map(|(page, _)| *page).collect();
        for page in touched {
            let (from, to) =
                ((page * PAGE).max(start), (page * PAGE).saturating_add(PAGE).min(end));
            if to - from == PAGE {
                self.pages.remove(&page);
            } else if let Some(data) = self.pages.get_mut(&page) {
                data[(from - page * PAGE) as usize..(to - page * PAGE) as usize].fill(0);
            }
        }
    }

    fn set_length(&mut self, length: u64) {
        self.zero(length, self.length);
        self.changed(length, 0, &[]);
        self.length = length;
    }

    fn allocation(&self, offset: u64) -> Allocation {
        if offset >= self.length {
            return Allocation { length: 0, data: false };
        }
        let first = offset / PAGE;
        let data = self.pages.contains_key(&first);
        let end = if data {
            let mut next = first + 1;
            for page in self.pages.range(next..).map(|(page, _)| *page) {
                if page != next {
                    break;
                }
                next += 1;
            }
            next.saturating_mul(PAGE)
        } else {
            self.pages.range(first..).next().map_or(u64::MAX, |(page, _)| page * PAGE)
        };
        Allocation { length: end.min(self.length) - offset, data }
    }
}

/// The parts of `buf` that fall into each page: page, offset within it, bytes.
fn parts_mut(offset: u64, mut buf: &mut [u8]) -> impl Iterator<Item = (u64, usize, &mut [u8])> {
    let mut at = offset;
    std::iter::from_fn(move || {
        if buf.is_empty() {
            return None;
        }
        let (page, within) = (at / PAGE, (at % PAGE) as usize);
        let count = (PAGE as usize - within).min(buf.len());
        let (part, rest) = std::mem::take(&mut buf).split_at_mut(count);
        buf = rest;
        at += count as u64;
        Some((page, within, part))
    })
}

#[derive(Default)]
struct Users {
    readers: usize,
    writers: usize,
}

struct Node {
    id: u64,
    contents: Mutex<Contents>,
    users: Mutex<Users>,
    restart_memory: Arc<Mutex<Option<Words>>>,
}

/// Restart memory.
type Words = Arc<[AtomicU64]>;

/// The restart memory of a file in memory.
struct KeptMemory {
    words: Words,
    place: Arc<Mutex<Option<Words>>>,
}

impl RestartMemory for KeptMemory {
    fn words(&self) -> &[AtomicU64] {
        &self.words
    }

    fn name(&self) -> String {
        "restart memory".into()
    }

    fn remove(&self) {
        let mut place = self.place.lock();
        if place.as_ref().is_some_and(|words| Arc::ptr_eq(words, &self.words)) {
            *place = None;
        }
    }

    fn set_aside(&self) -> io::Result<Option<String>> {
        let there = self.is_there().then(|| "restart memory, set aside".into());
        self.remove();
        Ok(there)
    }

    fn is_there(&self) -> bool {
        self.place.lock().as_ref().is_some_and(|words| Arc::ptr_eq(words, &self.words))
    }
}

/// A copy of restart memory as it is.
fn copied(words: &Words) -> Words {
    words.iter().map(|word| AtomicU64::new(word.load(Ordering::Relaxed))).collect()
}

#[derive(Default)]
struct Directory {
    next_id: u64,
    files: BTreeMap<PathBuf, Arc<Node>>,
}

impl Directory {
    fn add(&mut self, name: &Path, contents: Contents) -> Arc<Node> {
        self.next_id += 1;
        let node = Arc::new(Node {
            id: self.next_id,
            contents: Mutex::new(contents),
            users: Mutex::default(),
            restart_memory: Arc::default(),
        });
        self.files.insert(name.to_owned(), node.clone());
        node
    }
}

/// Named files in memory. Clones share the files.
#[derive(Clone, Default)]
pub struct MemoryHost {
    directory: Arc<Mutex<Directory>>,
    settings: Arc<Settings>,
}

/// The capabilities that a host's files report.
struct Settings {
    gains: AtomicBool,
    devices: AtomicBool,
    restart_memories: AtomicBool,
    /// 0 if cloning is not supported.
    clone_alignment: AtomicU64,
    atomic_write: AtomicU64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            gains: AtomicBool::new(false),
            devices: AtomicBool::new(false),
            restart_memories: AtomicBool::new(true),
            clone_alignment: AtomicU64::new(4096),
            atomic_write: AtomicU64::new(SECTOR),
        }
    }
}

impl MemoryHost {
    /// A host without files.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets [`Capabilities::gains_from_written_space`] of this host's files, including open ones; `false` by default.
    pub fn set_gains_from_written_space(&self, gains: bool) {
        self.settings.gains.store(gains, Ordering::Relaxed);
    }

    /// Sets whether files, including open ones, behave like block devices: their length is fixed, and unwritten
    /// contents are unknown. `false` by default.
    pub fn set_devices(&self, devices: bool) {
        self.settings.devices.store(devices, Ordering::Relaxed);
    }

    /// Sets [`Capabilities::clone_alignment`] of this host's writable files, including open ones: a power of two, 4096
    /// by default. They clone by copying. `None` disables cloning.
    pub fn set_clone_alignment(&self, alignment: Option<u64>) {
        let alignment = alignment.unwrap_or(0);
        self.settings.clone_alignment.store(alignment, Ordering::Relaxed);
    }

    /// Sets [`Capabilities::atomic_write`] of this host's files, including open ones: 512 by default.
    pub fn set_atomic_write(&self, bytes: u64) {
        self.settings.atomic_write.store(bytes, Ordering::Relaxed);
    }

    /// Sets whether files, including open ones, have [restart memory](RestartMemories::restart_memory); `true` by
    /// default.
    pub fn set_restart_memories(&self, have: bool) {
        self.settings.restart_memories.store(have, Ordering::Relaxed);
    }

    /// Forgets all restart memory, as a reboot does.
    pub fn forget_restart_memories(&self) {
        for node in self.directory.lock().files.values() {
            *node.restart_memory.lock() = None;
        }
    }

    /// Adds a file with these bytes, replacing one of the same name.
    pub fn insert(&self, name: impl AsRef<Path>, bytes: &[u8]) {
        let mut contents = Contents::default();
        contents.write(0, bytes);
        self.directory.lock().add(name.as_ref(), contents);
    }

    /// All bytes of a file; `None` if there is none of that name.
    pub fn contents(&self, name: impl AsRef<Path>) -> Option<Vec<u8>> {
        let node = self.directory.lock().files.get(name.as_ref()).cloned()?;
        let contents = node.contents.lock();
        let mut bytes = vec![0; usize::try_from(contents.length).ok()?];
        contents.read(0, &mut bytes);
        Some(bytes)
    }

    /// The names of all files, in order.
    pub fn names(&self) -> Vec<PathBuf> {
        self.directory.lock().files.keys().cloned().collect()
    }

    /// A host with copies of all files as they are now, none of them open. They keep their identity, stamp, restart
    /// memory and settings.
    #[must_use = "the copy is returned"]
    pub fn deep_copy(&self) -> Self {
        let directory = self.directory.lock();
        let copy = Self::new();
        copy.set_gains_from_written_space(self.settings.gains.load(Ordering::Relaxed));
        copy.set_devices(self.settings.devices.load(Ordering::Relaxed));
        let alignment = self.settings.clone_alignment.load(Ordering::Relaxed);
        copy.set_clone_alignment(Some(alignment));
        copy.set_atomic_write(self.settings.atomic_write.load(Ordering::Relaxed));
        copy.set_restart_memories(self.settings.restart_memories.load(Ordering::Relaxed));
        {
            let mut target = copy.directory.lock();
            for (name, node) in &directory.files {
                let contents = Mutex::new(node.contents.lock().clone());
                let restart_memory =
                    Arc::new(Mutex::new(node.restart_memory.lock().as_ref().map(copied)));
                let node = Node { id: node.id, contents, users: Mutex::default(), restart_memory };
                target.files.insert(name.clone(), Arc::new(node));
            }
            target.next_id = directory.next_id;
        }
        copy
    }

    fn attach(&self, node: Arc<Node>, name: &Path, mode: OpenMode) -> Result<MemoryFile> {
        mode.check(name)?;
        let mut role = Role { writable: mode.writable, locked: false, admits: false };
        if mode.locking.denies_writing() {
            role.locked = true;
            let mut users = node.users.lock();
            if mode.writable {
                if users.readers + users.writers > 0 {
                    return Err(lock::busy(name, lock::Conflict::WRITE));
                }
                users.writers += 1;
            } else {
                if users.writers > 0 {
                    return Err(lock::busy(name, lock::Conflict::SHARED_WRITE));
                }
                users.readers += 1;
            }
        }
        Ok(MemoryFile {
            name: name.to_owned(),
            node,
            settings: self.settings.clone(),
            opened_writable: mode.writable,
            role: Mutex::new(role),
        })
    }
}

impl Host for MemoryHost {
    type File = MemoryFile;

    async fn open(&self, name: &Path, mode: OpenMode) -> Result<MemoryFile> {
        let node = self.directory.lock().files.get(name).cloned();
        let node = node.ok_or_else(|| missing(Operation::Open, name))?;
        self.attach(node, name, mode)
    }

    async fn create(&self, name: &Path, mode: OpenMode) -> Result<MemoryFile> {
        let node = {
            let mut directory = self.directory.lock();
            match directory.files.get(name) {
                Some(node) => node.clone(),
                None => directory.add(name, Contents::default()),
            }
        };
        let file = self.attach(node, name, OpenMode { writable: true, ..mode })?;
        file.node.contents.lock().set_length(0);
        Ok(file)
    }

    async fn remove(&self, name: &Path) -> Result<()> {
        let removed = self.directory.lock().files.remove(name);
        removed.map(drop).ok_or_else(|| missing(Operation::Remove, name))
    }

    async fn remove_file(&self, name: &Path, file: &MemoryFile) -> Result<bool> {
        let files = &mut self.directory.lock().files;
        let is_here = files.get(name).is_some_and(|node| Arc::ptr_eq(node, &file.node));
        Ok(is_here && files.remove(name).is_some())
    }
}

fn missing(operation: Operation, name: &Path) -> StorageError {
    StorageError::new(operation, name, io::Error::from_raw_os_error(libc::ENOENT))
}

/// An open file of a [`MemoryHost`].
pub struct MemoryFile {
    name: PathBuf,
    node: Arc<Node>,
    settings: Arc<Settings>,
    opened_writable: bool,
    role: Mutex<Role>,
}

/// The current role of an open file.
struct Role {
    writable: bool,
    locked: bool,
    /// Others may write.
    admits: bool,
}

impl Role {
    /// The count of users that the file belongs to.
    fn count<'a>(&self, users: &'a mut Users) -> Option<&'a mut usize> {
        match self {
            Self { locked: false, .. } | Self { admits: true, .. } => None,
            Self { writable: true, .. } => Some(&mut users.writers),
            Self { writable: false, .. } => Some(&mut users.readers),
        }
    }
}

impl MemoryFile {
    fn is_device(&self) -> bool {
        self.settings.devices.load(Ordering::Relaxed)
    }

    fn is_read_only(&self) -> bool {
        !self.role.lock().writable
    }

    /// The end of the range, once the operation is allowed there.
    #[inline]
    fn check(&self, operation: Operation, offset: u64, length: u64) -> Result<u64> {
        let error = |code| {
            let source = io::Error::from_raw_os_error(code);
            Err(StorageError::at(operation, &self.name, offset, length, source))
        };
        if operation != Operation::Read && self.is_read_only() {
            if !self.opened_writable {
                return error(libc::EBADF);
            }
            let text = "it was opened for writing, but has been made read-only since";
            let source = io::Error::new(io::ErrorKind::ReadOnlyFilesystem, text);
            return Err(StorageError::at(operation, &self.name, offset, length, source));
        }
        let changes = !matches!(operation, Operation::Read | Operation::Discard);
        match offset.checked_add(length) {
            Some(end) if changes && self.is_device() && end > self.node.contents.lock().length => {
                error(libc::ENOSPC)
            }
            Some(end) if end <= MAX_LENGTH => Ok(end),
            _ => error(if operation == Operation::Read { libc::EINVAL } else { libc::EFBIG }),
        }
    }
}

impl Drop for MemoryFile {
    fn drop(&mut self) {
        if let Some(count) = self.role.lock().count(&mut self.node.users.lock()) {
            *count -= 1;
        }
    }
}

impl Storage for MemoryFile {
    fn identity(&self) -> Identity<'_> {
        Identity { name: &self.name, id: FileId { device: 0, inode: self.node.id } }
    }

    fn capabilities(&self) -> Capabilities {
        let read_only = self.is_read_only();
        let alignment = self.settings.clone_alignment.load(Ordering::Relaxed);
        Capabilities {
            read_only,
            extends_with_zeroes: !self.is_device(),
            gains_from_written_space: self.settings.gains.load(Ordering::Relaxed),
            // It does not, but then all that is above it makes files longer ahead.
            extends_one_at_a_time: !read_only && !self.is_device(),
            atomic_write: self.settings.atomic_write.load(Ordering::Relaxed),
            clone_alignment: (alignment > 0 && !read_only).then_some(alignment),
            is_device: self.is_device(),
            begins_at: 0,
        }
    }

    fn extensions(&self) -> Extensions<'_, Self> {
        Extensions {
            reflink: Some(self),
            roles: Some(self),
            stamps: Some(self),
            restart_memories: Some(self),
            hints: Some(self),
            ..Extensions::default()
        }
    }

    async fn read_at(&self, offset: u64, mut buf: IoBuf) -> Result<IoBuf> {
        self.check(Operation::Read, offset, buf.len() as u64)?;
        self.node.contents.lock().read(offset, &mut buf);
        Ok(buf)
    }

    async fn write_vectored_at(&self, offset: u64, bufs: Vec<IoBuf>) -> Result<Vec<IoBuf>> {
        let length = bufs.iter().map(|buf| buf.len() as u64).sum();
        self.check(Operation::Write, offset, length)?;
        let mut contents = self.node.contents.lock();
        let mut at = offset;
        for buf in bufs.iter().filter(|buf| !buf.is_empty()) {
            contents.write(at, buf);
            at += buf.len() as u64;
        }
        drop(contents);
        Ok(bufs)
    }

    async fn write_one_at(&self, offset: u64, buf: IoBuf) -> Result<IoBuf> {
        self.check(Operation::Write, offset, buf.len() as u64)?;
        if !buf.is_empty() {
            self.node.contents.lock().write(offset, &buf);
        }
        Ok(buf)
    }

    async fn write_zeroes(&self, offset: u64, length: u64, _mode: ZeroMode) -> Result<()> {
        let end = self.check(Operation::WriteZeroes, offset, length)?;
        if length > 0 {
            let mut contents = self.node.contents.lock();
            contents.zero(offset, end);
            contents.length = contents.length.max(end);
        }
        Ok(())
    }

    async fn discard(&self, offset: u64, length: u64) -> Result<()> {
        let end = self.check(Operation::Discard, offset, length)?;
        self.node.contents.lock().zero(offset, end);
        Ok(())
    }

    async fn flush(&self) -> Result<()> {
        Ok(())
    }

    async fn len(&self) -> Result<u64> {
        Ok(self.node.contents.lock().length)
    }

    async fn set_len(&self, length: u64) -> Result<()> {
        self.check(Operation::SetLength, length, 0)?;
        if !self.is_device() {
            self.node.contents.lock().set_length(length);
        }
        Ok(())
    }

    async fn allocation(&self, offset: u64) -> Result<Allocation> {
        Ok(self.node.contents.lock().allocation(offset))
    }
}

impl Hints for MemoryFile {
    fn advise(&self, _: Access) -> BoxFuture<'_, ()> {
        Box::pin(async {})
    }

    fn expect_length(&self, length: u64) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            if self.check(Operation::SetLength, length, 0).is_ok() && !self.is_device() {
                let mut contents = self.node.contents.lock();
                if length > contents.length {
                    contents.set_length(length);
                }
            }
        })
    }
}

impl Stamps for MemoryFile {
    fn stamp(&self) -> BoxFuture<'_, Result<Option<Stamp>>> {
        Box::pin(async {
            let contents = self.node.contents.lock();
            Ok(Some(Stamp {
                length: contents.length,
                modified: contents.history as i64,
                changed: contents.changes as i64,
                inode: self.node.id,
            }))
        })
    }

    fn settled_stamp(&self) -> BoxFuture<'_, Result<Option<Stamp>>> {
        self.stamp()
    }

    fn sync_stamp(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.flush())
    }
}

impl Roles for MemoryFile {
    fn retire(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(async {
            let (mut role, mut users) = (self.role.lock(), self.node.users.lock());
            if role.writable {
                if let Some(count) = role.count(&mut users) {
                    *count -= 1;
                }
                role.writable = false;
                if let Some(count) = role.count(&mut users) {
                    *count += 1;
                }
            }
            Ok(())
        })
    }

    fn admit_writer(&self, admit: bool) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let (mut role, mut users) = (self.role.lock(), self.node.users.lock());
            if role.writable {
                let text = "it is already open for writing";
                let source = io::Error::new(io::ErrorKind::InvalidInput, text);
                return Err(StorageError::new(Operation::Lock, &self.name, source));
            }
            if role.locked && role.admits && !admit && users.writers > 0 {
                return Err(lock::busy(&self.name, lock::Conflict::SHARED_WRITE));
            }
            if role.admits != admit {
                if let Some(count) = role.count(&mut users) {
                    *count -= 1;
                }
                role.admits = admit;
                if let Some(count) = role.count(&mut users) {
                    *count += 1;
                }
            }
            Ok(())
        })
    }
}

impl Reflink<Self> for MemoryFile {
    fn clone_range<'a>(
        &'a self,
        from: &'a Self,
        from_offset: u64,
        to_offset: u64,
        length: u64,
    ) -> BoxFuture<'a, Result<bool>> {
        Box::pin(async move {
            self.check(Operation::Clone, to_offset, length)?;
            let from_end = from.check(Operation::Read, from_offset, length)?;
            let Some(align) = self.capabilities().clone_alignment else { return Ok(false) };
            let from_length = from.node.contents.lock().length;
            let whole = |value: u64| value.is_multiple_of(align);
            let ends = whole(length) || from_end == from_length;
            if !whole(from_offset) || !whole(to_offset) || !ends || from_end > from_length {
                return Ok(false);
            }
            let mut done = 0;
            while done < length {
                let mut buf = vec![0; (length - done).min(PAGE) as usize];
                from.node.contents.lock().read(from_offset + done, &mut buf);
                self.node.contents.lock().write(to_offset + done, &buf);
                done += buf.len() as u64;
            }
            Ok(true)
        })
    }
}

impl RestartMemories for MemoryFile {
    fn restart_memory(
        &self,
        how: MemoryUse,
    ) -> BoxFuture<'_, Result<Option<Arc<dyn RestartMemory>>>> {
        Box::pin(async move {
            if !self.settings.restart_memories.load(Ordering::Relaxed) {
                return Ok(None);
            }
            let mut place = self.node.restart_memory.lock();
            if place.is_none() && how == MemoryUse::Create {
                let count = RESTART_MEMORY_BYTES / size_of::<AtomicU64>();
                *place = Some((0..count).map(|_| AtomicU64::new(0)).collect());
            }
            let Some(words) = place.clone() else { return Ok(None) };
            let place = Arc::clone(&self.node.restart_memory);
            let memory: Arc<dyn RestartMemory> = Arc::new(KeptMemory { words, place });
            Ok(Some(memory))
        })
    }
}
