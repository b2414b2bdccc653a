//! Storage for the bytes of images.
//!
//! The engine above this crate sees only two traits: [`Host`] opens and creates files by name, and
//! [`Storage`] reads, writes and flushes one of them. Files on Linux go through io_uring
//! ([`file::FileHost`] on a [`isobath_ring::Executor`]); tests keep bytes in memory ([`memory::MemoryHost`]) and
//! may inject faults, record what happens, or slow it down.
//!
//! Futures returned here need no particular runtime. They are not `Send`: a future stays on the
//! thread that first polled it, since that thread's ring holds its operation.

pub mod error;
pub mod file;
mod lock;
pub mod memory;
pub mod restart_memory;

pub use error::{Operation, StorageError, shown};
/// The buffers of every operation.
pub use isobath_ring::IoBuf;
pub use restart_memory::RestartMemory;

use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes that every device writes atomically.
const SECTOR: u64 = 512;

/// The result of a storage operation.
pub type Result<T> = std::result::Result<T, StorageError>;

/// How [`Storage::write_zeroes`] may reach its goal.
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
    /// Bytes from the asked offset to which the answer applies; at least 1 unless at end of file.
    pub length: u64,
    /// `true` where the file has data, `false` in a hole (which reads as zeroes).
    pub data: bool,
}

/// How a file is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The host may read ahead as it sees fit.
    Normal,
    /// At random: reading ahead is useless.
    Random,
}

/// A file's identity, whatever its name: device and inode, or a number of the host's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileId {
    /// The device that holds the file.
    pub device: u64,
    /// The file on that device.
    pub inode: u64,
}

/// A value that changes whenever a file's contents do, and is cheap to query.
///
/// It follows writes, changes of length and anything else that the file system gives a time for. What
/// it misses: stores to a page that a program has mapped and already written to, a clock set back, and
/// a crash of the machine, after which data may be newer than the times kept with it (`fdatasync`
/// makes data durable without them).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stamp {
    /// Bytes in the file.
    pub length: u64,
    /// When the content was last modified (mtime), in nanoseconds since the epoch.
    pub modified: i64,
    /// When content or attributes last changed (ctime), in nanoseconds since the epoch.
    pub changed: i64,
    /// The file on its device.
    pub inode: u64,
}

/// One open file or block device.
///
/// Operations may be issued concurrently; overlapping writes in flight together have no order, and
/// nothing is durable before [`flush`](Storage::flush) returns. Dropping a future does not undo its
/// operation: the buffer it owned is kept until the operation has ended.
#[allow(clippy::len_without_is_empty)]
pub trait Storage: Send + Sync + 'static {
    /// The name given to [`Host::open`], for messages.
    fn name(&self) -> &Path;

    /// What identifies the file, to find loops and files opened twice.
    fn id(&self) -> FileId;

    /// Reads `buf.len()` bytes at `offset`. Bytes past the end of the file read as zeroes.
    fn read_at(&self, offset: u64, buf: IoBuf) -> impl Future<Output = Result<IoBuf>>;

    /// Writes all of `buf` at `offset`, extending the file where needed, and gives the buffer back.
    fn write_at(&self, offset: u64, buf: IoBuf) -> impl Future<Output = Result<IoBuf>>;

    /// Writes the buffers one after another at `offset`, as one request where possible.
    fn write_vectored_at(
        &self,
        offset: u64,
        bufs: Vec<IoBuf>,
    ) -> impl Future<Output = Result<Vec<IoBuf>>>;

    /// Makes a range read as zeroes, extending the file where needed.
    fn write_zeroes(
        &self,
        offset: u64,
        length: u64,
        mode: ZeroMode,
    ) -> impl Future<Output = Result<()>>;

    /// Releases a range's space if the host can; its contents are undefined afterwards. Otherwise does nothing,
    /// successfully.
    fn discard(&self, offset: u64, length: u64) -> impl Future<Output = Result<()>>;

    /// Makes every write that completed before this call durable (fdatasync).
    fn flush(&self) -> impl Future<Output = Result<()>>;

    /// The file's current length in bytes.
    fn len(&self) -> impl Future<Output = Result<u64>>;

    /// Truncates or extends the file; new bytes read as zeroes.
    fn set_len(&self, length: u64) -> impl Future<Output = Result<()>>;

    /// Tells whether the bytes from `offset` on are data or a hole. Storage that cannot tell answers
    /// data up to the end of the file.
    fn allocation(&self, offset: u64) -> impl Future<Output = Result<Allocation>>;

    /// Bytes that the file uses in its file system, whatever its length.
    fn allocated(&self) -> impl Future<Output = Result<u64>> {
        async move {
            let (mut offset, mut total) = (0u64, 0);
            loop {
                let run = self.allocation(offset).await?;
                if run.length == 0 {
                    return Ok(total);
                }
                total += if run.data { run.length } else { 0 };
                offset += run.length;
            }
        }
    }

    /// The file's stamp, or `None` where nothing of the kind can be trusted: block devices, and file
    /// systems that others may change through another machine or a program.
    ///
    /// The clock behind it is coarse: a change soon after this call can leave the stamp as it is. A
    /// stamp to be compared with later ones comes from [`settled_stamp`](Self::settled_stamp).
    fn stamp(&self) -> impl Future<Output = Result<Option<Stamp>>> {
        async { Ok(None) }
    }

    /// A stamp from which any later one differs if a write or another change of the content has begun
    /// in between; `None` also where the last change is too recent to tell, or lies in the future.
    ///
    /// Waits up to about 50 ms for the clock to move on. Writes already in flight are the caller's to
    /// keep out: the kernel sets a file's times when a write begins.
    fn settled_stamp(&self) -> impl Future<Output = Result<Option<Stamp>>> {
        async { Ok(None) }
    }

    /// Tells the host how the file is read from now on: a hint, without effect on what is read.
    fn advise(&self, access: Access) -> impl Future<Output = ()> {
        let _ = access;
        async {}
    }

    /// Whether writes are refused.
    fn is_read_only(&self) -> bool;

    /// Ends writing through this handle: an image that becomes a backing file while it is open.
    ///
    /// From the call on, changes begun later fail; those under way end as they would have. Then
    /// what was written is made durable, and the locks of a writer are exchanged for a reader's: other
    /// programs may open the image for reading, and none for writing at any moment in between. The
    /// handle reads on, as if it had been opened for reading. Does nothing to one that was.
    ///
    /// Dropped before its end, the future leaves the handle read-only or writable; called again, it
    /// completes what is left.
    ///
    /// # Errors
    /// The file cannot be opened for reading: the handle is as it was. Or the flush failed: the handle
    /// is read-only, and [`flush`](Self::flush) goes on failing.
    fn retire(&self) -> impl Future<Output = Result<()>> {
        async { Ok(()) }
    }

    /// Allows others to write to the file that this handle reads (`true`), or excludes them again (`false`, as when it
    /// was opened).
    ///
    /// For a job that writes to a backing file: this process then opens the file once more,
    /// [`writable`](OpenMode::writable), which keeps all other programs out, while this handle reads
    /// on and takes no change for a fault. Before writers are kept out again that one is dropped, or
    /// [retired](Self::retire). Whichever was asked last holds; asking twice is asking once.
    ///
    /// # Errors
    /// The handle is writable; or the file is still written to ([`std::io::ErrorKind::ResourceBusy`]):
    /// nothing has changed then.
    fn admit_writer(&self, admit: bool) -> impl Future<Output = Result<()>> {
        let _ = admit;
        async { Ok(()) }
    }

    /// Makes `length` bytes of this file the same as those of `from`, by sharing the space that holds
    /// them (a reflink), so that no data moves; extends this file where needed. Both files belong to
    /// the same host, or are the same file with ranges apart.
    ///
    /// `false` where the host cannot do it here: the range may then hold any part of the bytes, and is to
    /// be written as usual. All offsets and the length are multiples of
    /// [`clone_alignment`](Self::clone_alignment), but for a length that ends with `from`. Changes in
    /// flight in either range leave undefined bytes, as they would for a copy.
    ///
    /// # Errors
    /// The file is read-only, or the host failed in an attempt, such as for lack of space.
    fn clone_range(
        &self,
        from: &Self,
        from_offset: u64,
        to_offset: u64,
        length: u64,
    ) -> impl Future<Output = Result<bool>> {
        let _ = (from, from_offset, to_offset, length);
        async { Ok(false) }
    }

    /// The block size in bytes, a power of two, by which [`clone_range`](Self::clone_range) may share
    /// another file's space in this one; `None` where it is known that it cannot.
    fn clone_alignment(&self) -> Option<u64> {
        None
    }

    /// Whether a newly extended range of the file is known to read as zeroes (true of regular
    /// files, not of block devices).
    fn extends_with_zeroes(&self) -> bool;

    /// Bytes that the file may still grow by, as far as the host knows.
    fn free_space(&self) -> Option<u64> {
        None
    }

    /// Whether a [`flush`](Self::flush) costs less where the bytes written since the last one lie in
    /// space that has been written before, be it with zeroes.
    ///
    /// A file system that overwrites in place and keeps a journal (ext4, XFS) commits that journal in an
    /// `fdatasync` when blocks were added to the file or first written to, also those that `fallocate`
    /// has reserved: another flush of the device. For blocks written before and flushed it does not. Who
    /// writes zeroes ahead and flushes them apart, or uses freed space again, then saves half of a
    /// flush's cost. Elsewhere that is work for nothing: on file systems that never overwrite (Btrfs), in
    /// memory, on block devices, and over a network, whose far side is not known.
    fn gains_from_written_space(&self) -> bool {
        false
    }

    /// Bytes that the device writes atomically, even when its power fails: each aligned block of this size holds either
    /// its old contents or what was written. A power of two, at least 512.
    fn atomic_write(&self) -> u64 {
        SECTOR
    }

    /// Memory that belongs to this file and survives a kill of the process; if there is none, it is created if `create`
    /// is set. `None` also if there can be none.
    ///
    /// Its last user may be a process that was killed and has not ended yet, although the image's lock is
    /// free: the call waits for that.
    ///
    /// # Errors
    /// The memory exists but cannot be used: it is in use, or belongs to another user. Or it cannot be created.
    fn restart_memory(
        &self,
        create: bool,
    ) -> impl Future<Output = Result<Option<Arc<dyn RestartMemory>>>> {
        let _ = create;
        async { Ok(None) }
    }
}

/// How other programs may use a file while it is open here; QEMU's image locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Locking {
    /// Refuse the open while another program writes, and keep writers out (QEMU's default for
    /// readers), or for a writable open keep out everybody.
    #[default]
    Exclusive,
    /// As [`Exclusive`](Self::Exclusive), but without waiting a moment for a user that is about to
    /// let go.
    Immediate,
    /// Take no lock and ignore those of others (`qemu-img -U`, `force-share=on`). For reading only: writing without a
    /// lock destroys what others write meanwhile.
    Unlocked,
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
    /// Refuses to write where no locks are taken, as QEMU does.
    ///
    /// # Errors
    /// If the mode is writable and [`Locking::Unlocked`].
    pub fn check(self, name: &Path) -> Result<()> {
        if self.writable && self.locking == Locking::Unlocked {
            let text = "without locks (-U, --force-share) it can only be opened read-only, since \
                        another program may be writing to it; open it read-only or drop the option";
            let cause = io::Error::new(io::ErrorKind::InvalidInput, text);
            return Err(StorageError::new(Operation::Open, name, cause));
        }
        Ok(())
    }
}

/// Opens files by name.
pub trait Host: Send + Sync + 'static {
    /// The type of an open file.
    type File: Storage;

    /// Opens an existing file.
    fn open(&self, name: &Path, mode: OpenMode) -> impl Future<Output = Result<Self::File>>;

    /// Creates an empty file, or truncates an existing one once its lock is held, open for writing.
    fn create(&self, name: &Path, mode: OpenMode) -> impl Future<Output = Result<Self::File>>;

    /// Removes a file.
    fn remove(&self, name: &Path) -> impl Future<Output = Result<()>>;

    /// The name of a file with every link in it followed, to tell where it really lies.
    ///
    /// # Errors
    /// There is no such file, or it cannot be reached.
    fn canonical(&self, name: &Path) -> Result<PathBuf> {
        Ok(name.to_owned())
    }

    /// The name under which `name`, as written in the header of the image `referrer`, is opened:
    /// relative names are relative to the referrer's directory.
    fn resolve(&self, referrer: &Path, name: &str) -> PathBuf {
        referrer.parent().map_or_else(|| PathBuf::from(name), |parent| parent.join(name))
    }
}
