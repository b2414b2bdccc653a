//! Features that only some storage supports: each trait has one purpose, and [`Storage::extensions`] returns those
//! supported.
//!
//! None of this is on the path of a request, so the traits are used as trait objects, with boxed futures.

use crate::{
    Access, Capabilities, FileId, IoBuf, MemoryUse, RestartMemory, Result, Stamp, Storage,
};
use std::fmt;
use std::future::Future;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;

/// A future on the heap. It stays on its thread.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// What a file supports besides the methods of [`Storage`].
pub struct Extensions<'a, S: ?Sized> {
    /// Sharing of space with another file.
    pub reflink: Option<&'a dyn Reflink<S>>,
    /// Changes of the handle's role.
    pub roles: Option<&'a dyn Roles>,
    /// Stamps of the contents.
    pub stamps: Option<&'a dyn Stamps>,
    /// Memory that outlives the process.
    pub restart_memories: Option<&'a dyn RestartMemories>,
    /// Space used and available.
    pub usage: Option<&'a dyn Usage>,
    /// Hints.
    pub hints: Option<&'a dyn Hints>,
}

impl<S: ?Sized> Default for Extensions<'_, S> {
    /// None.
    fn default() -> Self {
        Self {
            reflink: None,
            roles: None,
            stamps: None,
            restart_memories: None,
            usage: None,
            hints: None,
        }
    }
}

impl<'a, S: ?Sized> Extensions<'a, S> {
    /// The same extensions for a file that wraps this one, with its own way to share space.
    #[must_use]
    pub fn with_reflink<T: ?Sized>(self, reflink: Option<&'a dyn Reflink<T>>) -> Extensions<'a, T> {
        let Self { reflink: _, roles, stamps, restart_memories, usage, hints } = self;
        Extensions { reflink, roles, stamps, restart_memories, usage, hints }
    }
}

impl<S: ?Sized> fmt::Debug for Extensions<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Extensions")
            .field("reflink", &self.reflink.is_some())
            .field("roles", &self.roles.is_some())
            .field("stamps", &self.stamps.is_some())
            .field("restart_memories", &self.restart_memories.is_some())
            .field("usage", &self.usage.is_some())
            .field("hints", &self.hints.is_some())
            .finish()
    }
}

/// Sharing of space among the files `S` of a host.
pub trait Reflink<S: ?Sized> {
    /// Makes `length` bytes of this file the same as those of `from`, by sharing the space that holds
    /// them (a reflink), so that no data moves; extends this file where needed. Both files belong to
    /// the same host, or are the same file with ranges apart.
    ///
    /// Returns `false` if the host cannot do it here: the range may then hold any part of the bytes, and must be
    /// written as usual. All offsets and the length are multiples of
    /// [`clone_alignment`](Capabilities::clone_alignment), except for a length that ends with `from`. Changes in flight
    /// in either range leave undefined bytes, as they would for a copy.
    ///
    /// # Errors
    /// The file is read-only, or the host failed in an attempt, such as for lack of space.
    fn clone_range<'a>(
        &'a self,
        from: &'a S,
        from_offset: u64,
        to_offset: u64,
        length: u64,
    ) -> BoxFuture<'a, Result<bool>>;
}

/// Changes of an open handle's role.
pub trait Roles {
    /// Ends writing through this handle: an image that becomes a backing file while it is open.
    ///
    /// From the call on, new changes fail; those in progress complete normally. Then all writes are made durable, and
    /// the locks of a writer are exchanged for a reader's: other programs may open the image for reading, but never for
    /// writing at any moment in between. The handle can still read, as if it had been opened for reading. Has no effect
    /// on a handle that was.
    ///
    /// If the future is dropped early, the handle is either read-only or writable; calling it again completes the
    /// change.
    ///
    /// # Errors
    /// The file cannot be opened for reading: the handle is as it was. Or the flush failed: the handle is read-only,
    /// and [`flush`](Storage::flush) continues to fail.
    fn retire(&self) -> BoxFuture<'_, Result<()>>;

    /// Lets this process write to the file that this handle reads (`true`), or keeps it out again (`false`,
    /// as when it was opened).
    ///
    /// This is for a job that writes to a backing file: the process then opens the file again, by the same host and
    /// [`writable`](crate::OpenMode::writable), while this handle can still read and does not treat changes as errors.
    /// Other programs are kept out from writing all the time, and from reading while the second handle is open. That
    /// handle must be dropped, or [retired](Self::retire), before writers are kept out again. The last call counts;
    /// repeating it has no effect.
    ///
    /// # Errors
    /// The handle is writable; or the file still has a writer ([`std::io::ErrorKind::ResourceBusy`]): then nothing has
    /// changed.
    fn admit_writer(&self, admit: bool) -> BoxFuture<'_, Result<()>>;
}

/// Stamps of a file's contents.
pub trait Stamps {
    /// The file's stamp, or `None` if no stamp can be trusted: on block devices, and on file systems that may be
    /// changed through another machine or a program.
    ///
    /// Its clock is coarse: a change soon after this call may not change the stamp. To get a stamp that can be compared
    /// with later ones, use [`settled_stamp`](Self::settled_stamp).
    ///
    /// # Errors
    /// The query failed.
    fn stamp(&self) -> BoxFuture<'_, Result<Option<Stamp>>>;

    /// A stamp that differs from any later one if a write or another change of the contents has begun in between;
    /// `None` also if the last change is too recent to tell, or is in the future.
    ///
    /// Waits up to about 50 ms for the clock to advance. The caller must ensure that no writes are in flight: the
    /// kernel sets a file's times when a write begins.
    ///
    /// # Errors
    /// The query failed.
    fn settled_stamp(&self) -> BoxFuture<'_, Result<Option<Stamp>>>;

    /// As [`Storage::flush`], and makes durable that the stamp has changed, too. After a crash a file that has not
    /// changed its length may otherwise have its former stamp.
    ///
    /// # Errors
    /// As [`Storage::flush`].
    fn sync_stamp(&self) -> BoxFuture<'_, Result<()>>;
}

/// Memory that belongs to a file and outlives the process.
pub trait RestartMemories {
    /// The file's memory for this use; `None` also if there can be none.
    ///
    /// Its last user may be a killed process that has not ended yet, although the image's lock is free: the call waits
    /// for it. Memory that begins with something else than is looked for is passed over.
    ///
    /// # Errors
    /// Existing memory cannot be used because it is in use or belongs to another user, or new memory cannot be created.
    fn restart_memory(
        &self,
        how: MemoryUse,
    ) -> BoxFuture<'_, Result<Option<Arc<dyn RestartMemory>>>>;
}

/// How much space a file takes, and may take.
pub trait Usage {
    /// Bytes of space that the file takes, independent of its length; `None` if its runs of [data](Storage::allocation)
    /// must be counted.
    ///
    /// # Errors
    /// The query failed.
    fn allocated(&self) -> BoxFuture<'_, Result<Option<u64>>> {
        Box::pin(async { Ok(None) })
    }

    /// Bytes that the file may still grow by, as far as the host can tell immediately.
    fn free_space(&self) -> Option<u64> {
        None
    }

    /// The end of what was written to the file through this handle that lies the furthest behind, in bytes; 0 before
    /// the first write, and `None` if the host does not keep it. Zeroes count, discards and changes of the length do
    /// not.
    fn highest_write(&self) -> Option<u64> {
        None
    }
}

/// Hints that do not affect the data read.
pub trait Hints {
    /// Tells the host how the file will be read from now on.
    fn advise(&self, access: Access) -> BoxFuture<'_, ()>;

    /// Asks the host to begin to write to the disk what it still has in memory of the file, so that a later
    /// [`flush`](Storage::flush) takes less time. Nothing is durable before that flush, which reports what failed here.
    fn begin_write_back(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {})
    }

    /// Tells the host that the file will soon be written to up to `length`, in bytes. A host whose files [extend one
    /// write at a time](Capabilities::extends_one_at_a_time) makes the file so long now: what is added reads as zeroes
    /// and takes next to no space. A file that is longer, or that others make longer meanwhile, stays as long as it is.
    fn expect_length(&self, length: u64) -> BoxFuture<'_, ()> {
        let _ = length;
        Box::pin(async {})
    }

    /// Tells the host how to lay out a file that was just created, before its first bytes are written. What it does not
    /// support it ignores.
    fn lay_out(&self, layout: Layout) -> BoxFuture<'_, ()> {
        let _ = layout;
        Box::pin(async {})
    }
}

/// How a new file is laid out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// The file system overwrites the file in place instead of copying on write (Btrfs), without checksums of its data.
    pub no_copy_on_write: bool,
    /// Space is allocated in multiples of this many bytes (XFS); 0 leaves that to the file system, and so does `None`
    /// without saying so.
    pub extent_size: Option<u32>,
}

/// Methods that every storage has, based on those of [`Storage`] and its extensions. They define the result if an
/// extension is missing.
pub trait StorageExt {
    /// As [`Hints::lay_out`]; nothing without hints.
    fn lay_out(&self, layout: Layout) -> impl Future<Output = ()>
    where
        Self: Storage,
    {
        async move {
            if let Some(hints) = self.extensions().hints
                && layout != Layout::default()
            {
                hints.lay_out(layout).await;
            }
        }
    }

    /// As [`Hints::begin_write_back`]; nothing without hints.
    fn begin_write_back(&self) -> impl Future<Output = ()>
    where
        Self: Storage,
    {
        async move {
            if let Some(hints) = self.extensions().hints {
                hints.begin_write_back().await;
            }
        }
    }

    /// As [`Hints::expect_length`]; nothing without hints.
    fn expect_length(&self, length: u64) -> impl Future<Output = ()>
    where
        Self: Storage,
    {
        async move {
            if let Some(hints) = self.extensions().hints {
                hints.expect_length(length).await;
            }
        }
    }

    /// The name given to [`Host::open`](crate::Host::open), for messages.
    fn name(&self) -> &Path
    where
        Self: Storage,
    {
        self.identity().name
    }

    /// What identifies the file, to find loops and files opened twice.
    fn id(&self) -> FileId
    where
        Self: Storage,
    {
        self.identity().id
    }

    /// Whether writes are refused.
    fn is_read_only(&self) -> bool
    where
        Self: Storage,
    {
        self.capabilities().read_only
    }

    /// As [`Capabilities::extends_with_zeroes`].
    fn extends_with_zeroes(&self) -> bool
    where
        Self: Storage,
    {
        self.capabilities().extends_with_zeroes
    }

    /// As [`Capabilities::extends_one_at_a_time`].
    fn extends_one_at_a_time(&self) -> bool
    where
        Self: Storage,
    {
        self.capabilities().extends_one_at_a_time
    }

    /// As [`Capabilities::gains_from_written_space`].
    fn gains_from_written_space(&self) -> bool
    where
        Self: Storage,
    {
        self.capabilities().gains_from_written_space
    }

    /// As [`Capabilities::atomic_write`].
    fn atomic_write(&self) -> u64
    where
        Self: Storage,
    {
        self.capabilities().atomic_write
    }

    /// As [`Capabilities::clone_alignment`], and `None` without [`Reflink`].
    fn clone_alignment(&self) -> Option<u64>
    where
        Self: Storage,
    {
        let Capabilities { clone_alignment, .. } = self.capabilities();
        clone_alignment.filter(|_| self.extensions().reflink.is_some())
    }

    /// Writes all of `buf` at `offset`, as [`Storage::write_vectored_at`] does, and returns the buffer.
    fn write_at(&self, offset: u64, buf: IoBuf) -> impl Future<Output = Result<IoBuf>>
    where
        Self: Storage,
    {
        self.write_one_at(offset, buf)
    }

    /// Bytes of space that the file takes, independent of its length: by [`Usage::allocated`], or counted run by run.
    fn allocated(&self) -> impl Future<Output = Result<u64>>
    where
        Self: Storage,
    {
        async move {
            if let Some(usage) = self.extensions().usage
                && let Some(allocated) = usage.allocated().await?
            {
                return Ok(allocated);
            }
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

    /// As [`Usage::free_space`]; `None` without it.
    fn free_space(&self) -> Option<u64>
    where
        Self: Storage,
    {
        self.extensions().usage?.free_space()
    }

    /// As [`Usage::highest_write`]; `None` without it.
    fn highest_write(&self) -> Option<u64>
    where
        Self: Storage,
    {
        self.extensions().usage?.highest_write()
    }

    /// As [`Reflink::clone_range`]; `false` without it.
    fn clone_range(
        &self,
        from: &Self,
        from_offset: u64,
        to_offset: u64,
        length: u64,
    ) -> impl Future<Output = Result<bool>>
    where
        Self: Storage,
    {
        async move {
            match self.extensions().reflink {
                Some(reflink) => reflink.clone_range(from, from_offset, to_offset, length).await,
                None => Ok(false),
            }
        }
    }

    /// As [`Roles::retire`]; a storage without roles stays unchanged, which is not an error.
    fn retire(&self) -> impl Future<Output = Result<()>>
    where
        Self: Storage,
    {
        async move {
            match self.extensions().roles {
                Some(roles) => roles.retire().await,
                None => Ok(()),
            }
        }
    }

    /// As [`Roles::admit_writer`]; without roles nobody is kept out, which is not an error.
    fn admit_writer(&self, admit: bool) -> impl Future<Output = Result<()>>
    where
        Self: Storage,
    {
        async move {
            match self.extensions().roles {
                Some(roles) => roles.admit_writer(admit).await,
                None => Ok(()),
            }
        }
    }

    /// As [`Stamps::stamp`]; `None` without it.
    fn stamp(&self) -> impl Future<Output = Result<Option<Stamp>>>
    where
        Self: Storage,
    {
        async move {
            match self.extensions().stamps {
                Some(stamps) => stamps.stamp().await,
                None => Ok(None),
            }
        }
    }

    /// As [`Stamps::settled_stamp`]; `None` without it.
    fn settled_stamp(&self) -> impl Future<Output = Result<Option<Stamp>>>
    where
        Self: Storage,
    {
        async move {
            match self.extensions().stamps {
                Some(stamps) => stamps.settled_stamp().await,
                None => Ok(None),
            }
        }
    }

    /// As [`Stamps::sync_stamp`]; a flush without it.
    fn sync_stamp(&self) -> impl Future<Output = Result<()>>
    where
        Self: Storage,
    {
        async move {
            match self.extensions().stamps {
                Some(stamps) => stamps.sync_stamp().await,
                None => self.flush().await,
            }
        }
    }

    /// As [`RestartMemories::restart_memory`]; `None` without it.
    fn restart_memory(
        &self,
        how: MemoryUse,
    ) -> impl Future<Output = Result<Option<Arc<dyn RestartMemory>>>>
    where
        Self: Storage,
    {
        async move {
            match self.extensions().restart_memories {
                Some(memories) => memories.restart_memory(how).await,
                None => Ok(None),
            }
        }
    }

    /// As [`Hints::advise`]; nothing without it.
    fn advise(&self, access: Access) -> impl Future<Output = ()>
    where
        Self: Storage,
    {
        async move {
            if let Some(hints) = self.extensions().hints {
                hints.advise(access).await;
            }
        }
    }
}

impl<S: Storage> StorageExt for S {}
