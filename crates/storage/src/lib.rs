//! Storage for the bytes of images.
//!
//! The engine above this crate sees only two traits: [`Host`] opens and creates files by name, and [`Storage`] reads,
//! writes and flushes one of them. The crate `isobath-storage-file` has those for files on Linux; tests keep bytes in
//! memory ([`memory::MemoryHost`]) and may inject faults, record operations, or slow them down.
//!
//! Futures returned here need no particular runtime. They are not `Send`: a future stays on the
//! thread that first polled it, since that thread's ring holds its operation.

pub mod either;
pub mod error;
pub mod extension;
mod handed_in;
pub mod lock;
pub mod memory;
pub mod restart_memory;
pub mod sectors;
pub mod window;

pub use error::{Operation, StorageError, cause, note_confinement, shown, word};
pub use extension::{
    BoxFuture, Extensions, Hints, Layout, Reflink, RestartMemories, Roles, Stamps, StorageExt,
    Usage,
};
/// The buffers of every operation.
pub use handed_in::{DESCRIPTOR_SETS, is_descriptor_set};
pub use isobath_buf::IoBuf;
pub use restart_memory::{MemoryUse, RestartMemory};
pub use sectors::SectorCipher;

use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes that every device writes atomically.
pub const SECTOR: u64 = 512;

/// The result of a storage operation.
pub type Result<T> = std::result::Result<T, StorageError>;

/// How [`Storage::write_zeroes`] may produce the zeroes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ZeroMode {
    /// The range may be deallocated, as long as it then reads as zeroes.
    pub may_unmap: bool,
    /// Fail with [`std::io::ErrorKind::Unsupported`] instead of writing zeroes as data.
    pub only_fast: bool,
}

/// Whether a range of a file holds data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Bytes from the given offset to which the answer applies; at least 1 unless at the end of the file.
    pub length: u64,
    /// `true` where the file has data, `false` in a hole (which reads as zeroes).
    pub data: bool,
}

/// How a file is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The host may read ahead as it sees fit.
    Normal,
    /// Randomly: reading ahead is useless.
    Random,
}

/// A file's identity, independent of its name: device and inode, or a number assigned by the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileId {
    /// The device that holds the file.
    pub device: u64,
    /// The file on that device.
    pub inode: u64,
}

/// A value that changes whenever a file's contents do, and is cheap to query.
///
/// It reflects writes, changes of length and anything else for which the file system updates a time. It misses stores
/// to a page that a program has mapped and already written to, a clock set back, and a crash of the machine, after
/// which data may be newer than the times kept with it (`fdatasync` makes data durable without them).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stamp {
    /// Bytes in the file.
    pub length: u64,
    /// When the contents were last modified (mtime), in nanoseconds since the epoch.
    pub modified: i64,
    /// When contents or attributes last changed (ctime), in nanoseconds since the epoch.
    pub changed: i64,
    /// The file on its device.
    pub inode: u64,
}

/// What distinguishes an open file from others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity<'a> {
    /// The name given to [`Host::open`], for messages.
    pub name: &'a Path,
    /// What identifies the file, to find loops and files opened twice.
    pub id: FileId,
}

/// The current properties of an open file. Those that are costly to determine are determined once.
///
/// The default is a file about which nothing is known, open for writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Whether writes are refused. [`Roles::retire`] changes it.
    pub read_only: bool,
    /// Whether a newly extended range of the file is known to read as zeroes (true of regular
    /// files, not of block devices).
    pub extends_with_zeroes: bool,
    /// Whether a [`flush`](Storage::flush) costs less if the bytes written since the last one are in space that was
    /// written before, even if only with zeroes.
    ///
    /// A file system that overwrites in place and keeps a journal (ext4, XFS) commits that journal in an `fdatasync`
    /// when blocks were added to the file or first written to, including those that `fallocate` has reserved: that is
    /// another flush of the device. For blocks that were written and flushed before it does not. Writing zeroes ahead
    /// and flushing them separately, or reusing freed space, then saves half of a flush's cost. Elsewhere it gains
    /// nothing: on file systems that never overwrite (Btrfs), in memory, on block devices, and over a network, where
    /// the remote storage is unknown. A handle that only reads may not know it.
    pub gains_from_written_space: bool,
    /// Whether writes past the end of the file are made one after another, while others wait: a file that will grow is
    /// better [made longer](Hints::expect_length) before. Linux does so for files that bypass the page cache.
    pub extends_one_at_a_time: bool,
    /// Bytes that the device writes atomically, even if its power fails: each aligned block of this size in the file
    /// holds either its old contents or what was written. A power of two, at least 512, which a handle that only reads
    /// may give in any case.
    pub atomic_write: u64,
    /// The block size in bytes, a power of two, by which [`Reflink::clone_range`] may share another file's space in
    /// this one; `None` if it is known that it cannot.
    pub clone_alignment: Option<u64>,
    /// Whether this is a block device, or a part of one.
    pub is_device: bool,
    /// Where byte 0 is in the file that [`Storage::identity`] names, in bytes; above 0 for a part of a file.
    pub begins_at: u64,
}

impl Default for Capabilities {
    fn default() -> Self {
        Self {
            read_only: false,
            extends_with_zeroes: false,
            gains_from_written_space: false,
            extends_one_at_a_time: false,
            atomic_write: SECTOR,
            is_device: false,
            begins_at: 0,
            clone_alignment: None,
        }
    }
}

/// One open file or block device: the operations that every storage has.
///
/// Operations may be issued concurrently; concurrent overlapping writes have no order, and nothing is durable before
/// [`flush`](Storage::flush) returns. Dropping a future does not undo its operation: the buffer it owned is kept until
/// the operation has ended, and a change that is requested later waits for that.
///
/// Features that only some storage has are in [`extensions`](Self::extensions). [`StorageExt`] has methods based on
/// these and the extensions, which the engine uses.
#[allow(clippy::len_without_is_empty)]
pub trait Storage: StorageExt + Sized + Send + Sync + 'static {
    /// Which file it is.
    fn identity(&self) -> Identity<'_>;

    /// Its current properties.
    fn capabilities(&self) -> Capabilities;

    /// What it supports besides these methods; nothing by default.
    fn extensions(&self) -> Extensions<'_, Self> {
        Extensions::default()
    }

    /// The file of what this one holds, encrypted, from `offset` on, a multiple of 512. Without a `cipher` nothing of
    /// it is read or written. A write that begins at its end, or before, makes it longer; what
    /// [`set_len`](Self::set_len) adds is noise.
    ///
    /// # Errors
    /// This storage cannot do so, which is the default, and [`WindowHost`](window::WindowHost) adds; the file is
    /// shorter.
    fn through_cipher(
        self,
        offset: u64,
        cipher: Option<Arc<dyn SectorCipher>>,
    ) -> impl Future<Output = Result<Self>> {
        let _ = (offset, cipher);
        async move { sectors::unsupported(self.identity().name) }
    }

    /// Reads `buf.len()` bytes at `offset`. Bytes past the end of the file read as zeroes.
    fn read_at(&self, offset: u64, buf: IoBuf) -> impl Future<Output = Result<IoBuf>>;

    /// Writes all of the buffers one after another at `offset`, as one request where possible, extending the file where
    /// needed, and returns them.
    fn write_vectored_at(
        &self,
        offset: u64,
        bufs: Vec<IoBuf>,
    ) -> impl Future<Output = Result<Vec<IoBuf>>>;

    /// Writes one buffer, as [`write_vectored_at`](Self::write_vectored_at) does: what [`StorageExt::write_at`] calls.
    /// Storage that needs no list for it saves one allocation.
    fn write_one_at(&self, offset: u64, buf: IoBuf) -> impl Future<Output = Result<IoBuf>> {
        async move {
            let mut bufs = self.write_vectored_at(offset, vec![buf]).await?;
            let back = bufs.pop().filter(|_| bufs.is_empty());
            Ok(back.unwrap_or_else(|| unreachable!("one buffer was written, and one comes back")))
        }
    }

    /// Makes a range read as zeroes, extending the file where needed.
    fn write_zeroes(
        &self,
        offset: u64,
        length: u64,
        mode: ZeroMode,
    ) -> impl Future<Output = Result<()>>;

    /// Releases a range's space if the host can; its contents are undefined afterwards. Otherwise, and by default, it
    /// does nothing and succeeds.
    fn discard(&self, offset: u64, length: u64) -> impl Future<Output = Result<()>> {
        let _ = (offset, length);
        async { Ok(()) }
    }

    /// Makes every write that completed before this call durable (fdatasync), whoever made it: the file may have been
    /// opened for reading.
    fn flush(&self) -> impl Future<Output = Result<()>>;

    /// The file's current length in bytes.
    fn len(&self) -> impl Future<Output = Result<u64>>;

    /// Truncates or extends the file; new bytes read as zeroes.
    fn set_len(&self, length: u64) -> impl Future<Output = Result<()>>;

    /// Returns whether the bytes from `offset` on are data or a hole. Storage that cannot tell returns data up to the
    /// end of the file, which is the default.
    fn allocation(&self, offset: u64) -> impl Future<Output = Result<Allocation>> {
        async move {
            let length = self.len().await?.saturating_sub(offset);
            Ok(Allocation { length, data: length > 0 })
        }
    }

    /// Where the open file is now, as [`Host::canonical`] names it, whatever its name refers to by now: to judge the
    /// file that is open, and not its name. By default the name.
    ///
    /// # Errors
    /// The file has no name any more, or the system does not tell.
    fn real_path(&self) -> impl Future<Output = Result<PathBuf>> {
        async { Ok(self.name().to_owned()) }
    }
}

/// How other programs may use a file while it is open here; QEMU's image locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Locking {
    /// Refuse the open while another program writes, and keep writers out (QEMU's default for readers); for a writable
    /// open, keep out everyone.
    #[default]
    Exclusive,
    /// As [`Exclusive`](Self::Exclusive), but without waiting briefly for a user that is about to release its locks.
    Immediate,
    /// For a writable open, as [`Exclusive`](Self::Exclusive), and keep out everybody else who takes a lock, as
    /// [`Present`](Self::Present) does: for a file that is to be deleted.
    Alone,
    /// Take only the lock that says that the file is used, if the file system has locks; it keeps out nobody but
    /// [`Alone`](Self::Alone). For reading only, while others may write (`qemu-img -U`, `force-share=on`): writing so
    /// would destroy what they write.
    Present,
    /// Take no lock and ignore those of others. For reading only: for a look at a file that this process has locked, or
    /// that is not relied upon.
    Unlocked,
}

impl Locking {
    /// Whether writers are kept out.
    pub fn denies_writing(self) -> bool {
        matches!(self, Self::Exclusive | Self::Immediate | Self::Alone)
    }
}

/// Options of [`Host::open`] and [`Host::create`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct OpenMode {
    /// Allow writes.
    pub writable: bool,
    /// Bypass the page cache (`O_DIRECT`, `--cache none`).
    pub direct: bool,
    /// Image locks to take.
    pub locking: Locking,
}

impl OpenMode {
    /// Refuses to write without locks, as QEMU does.
    ///
    /// # Errors
    /// If the mode is writable and [`Locking::Unlocked`] or [`Locking::Present`].
    pub fn check(self, name: &Path) -> Result<()> {
        if self.writable && !self.locking.denies_writing() {
            let text = "without locks (-U, --force-share) it can only be opened read-only, since \
                        another program may be writing to it; open it read-only or drop the option";
            let cause = io::Error::new(io::ErrorKind::InvalidInput, text);
            return Err(StorageError::new(Operation::Open, name, cause));
        }
        Ok(())
    }
}

/// A file that was created, or emptied.
#[derive(Debug)]
pub struct Made<F> {
    /// The file.
    pub file: F,
    /// There was no file of that name.
    pub is_new: bool,
}

/// A direct-access index of all layers of a chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexFile {
    /// The name under which the host opens the file with its blocks.
    pub name: PathBuf,
    /// The bytes of its root, which are not in that file.
    pub root: Arc<[u8]>,
    /// The files of the layers, from the base to the top.
    pub layers: Vec<FileId>,
}

/// A layer of a chain that a host keeps as it is: it is never written to, and its name is the only one that a header
/// may have for it, a [protocol name](Host::protocol_name).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptLayer {
    /// Its format, as QEMU names it, whatever a header says.
    pub format: &'static str,
    /// The name of the layer below, whatever name the layer's own header has for it. `None` if it is the base: nothing
    /// is below it.
    pub below: Option<PathBuf>,
}

/// Opens files by name.
pub trait Host: Send + Sync + 'static {
    /// The type of an open file.
    type File: Storage;

    /// Opens an existing file.
    fn open(&self, name: &Path, mode: OpenMode) -> impl Future<Output = Result<Self::File>>;

    /// Creates an empty file, or truncates an existing one once its lock is held, open for writing.
    fn create(&self, name: &Path, mode: OpenMode) -> impl Future<Output = Result<Self::File>>;

    /// As [`create`](Self::create), unless there is a file that is to be `spared`, by its [id](StorageExt::id): then it
    /// stays as it is, and the result is `None`. A host whose names other programs may change judges the file that it
    /// has opened, not what its name leads to before; the default looks before.
    fn create_unlike(
        &self,
        name: &Path,
        mode: OpenMode,
        spared: &dyn Fn(FileId) -> bool,
    ) -> impl Future<Output = Result<Option<Made<Self::File>>>> {
        async move {
            let look = OpenMode { locking: Locking::Unlocked, ..OpenMode::default() };
            let found = self.open(name, look).await;
            let is_new = match &found {
                Ok(file) if spared(file.id()) => return Ok(None),
                Ok(_) => false,
                Err(error) => error.kind() == io::ErrorKind::NotFound,
            };
            // A server may end with its last client.
            let found = found.ok().filter(|_| self.protocol_name(&name.to_string_lossy()));
            let file = self.create(name, mode).await?;
            drop(found);
            Ok(Some(Made { file, is_new }))
        }
    }

    /// Removes a file.
    fn remove(&self, name: &Path) -> impl Future<Output = Result<()>>;

    /// Removes the name of an open file, and returns whether that was its name. What another program has put there, or
    /// puts there meanwhile, stays. A link is not followed.
    ///
    /// # Errors
    /// It cannot be removed.
    fn remove_file(&self, name: &Path, file: &Self::File) -> impl Future<Output = Result<bool>>;

    /// The name of a file with every link in it followed, to determine where it really is.
    ///
    /// # Errors
    /// The file does not exist, or is not accessible.
    fn canonical(&self, name: &Path) -> Result<PathBuf> {
        Ok(name.to_owned())
    }

    /// Which file a name leads to, as the [id](StorageExt::id) of the open file, without opening it: no right to the
    /// file is needed. `None` if that cannot be told.
    ///
    /// # Errors
    /// The file does not exist, or its directories may not be searched.
    fn find(&self, name: &Path) -> Result<Option<FileId>> {
        let _ = name;
        Ok(None)
    }

    /// Whether a name with a protocol's prefix, such as `nbd:`, is one that this host opens. It is no path: it stands
    /// for itself, in whichever header it is written. By default no name is.
    fn protocol_name(&self, name: &str) -> bool {
        let _ = name;
        false
    }

    /// Whether a name is one that this host takes for something else than a path, whether or not the header of an image
    /// may have it. Who means a file by it puts `./` in front. By default these are the
    /// [protocol names](Self::protocol_name).
    fn is_no_path(&self, name: &str) -> bool {
        self.protocol_name(name)
    }

    /// The index of the chain whose top layer has this name, as given to [`open`](Self::open), if the host keeps one in
    /// a file of its own, and vouches that it describes the layers that it opens. By default there is none.
    fn index_of(&self, top: &Path) -> Option<IndexFile> {
        let _ = top;
        None
    }

    /// What this host knows of the image with this name, if it keeps it as a layer of a chain and can open it. By
    /// default it keeps none.
    fn kept(&self, image: &Path) -> Option<KeptLayer> {
        let _ = image;
        None
    }

    /// The name under which `name`, as written in the header of the image `referrer`, is opened:
    /// relative names are relative to the referrer's directory.
    fn resolve(&self, referrer: &Path, name: &str) -> PathBuf {
        referrer.parent().map_or_else(|| PathBuf::from(name), |parent| parent.join(name))
    }
}
