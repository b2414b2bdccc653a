//! What only some storage has: each trait has one purpose, and [`Storage::extensions`] tells which there are.
//!
//! None of this is on the path of a request, so the traits are for trait objects, with boxed futures.

use crate::{Access, Capabilities, FileId, IoBuf, RestartMemory, Result, Stamp, Storage};
use std::fmt;
use std::future::Future;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;

/// A future on the heap. It stays on its thread.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// What a file has besides the methods of [`Storage`].
pub struct Extensions<'a, S: ?Sized> {
    /// Sharing of space with another file.
    pub reflink: Option<&'a dyn Reflink<S>>,
    /// Changes of what the handle is for.
    pub roles: Option<&'a dyn Roles>,
    /// Stamps of the content.
    pub stamps: Option<&'a dyn Stamps>,
    /// Memory that outlives the process.
    pub restart_memories: Option<&'a dyn RestartMemories>,
    /// How much space there is.
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
    /// The same of a file around this one, with its own way to share space.
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
    /// `false` where the host cannot do it here: the range may then hold any part of the bytes, and is to
    /// be written as usual. All offsets and the length are multiples of
    /// [`clone_alignment`](Capabilities::clone_alignment), but for a length that ends with `from`. Changes in
    /// flight in either range leave undefined bytes, as they would for a copy.
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

/// Changes of what an open handle is for.
pub trait Roles {
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
    /// is read-only, and [`flush`](Storage::flush) goes on failing.
    fn retire(&self) -> BoxFuture<'_, Result<()>>;

    /// Lets others write to the file that this handle reads (`true`), or keeps them out again (`false`,
    /// as when it was opened).
    ///
    /// For a job that writes to a backing file: this process then opens the file once more,
    /// [`writable`](crate::OpenMode::writable), which keeps all other programs out, while this handle reads
    /// on and takes no change for a fault. Before writers are kept out again that one is dropped, or
    /// [retired](Self::retire). Whichever was asked last holds; asking twice is asking once.
    ///
    /// # Errors
    /// The handle is writable; or the file is still written to ([`std::io::ErrorKind::ResourceBusy`]):
    /// nothing has changed then.
    fn admit_writer(&self, admit: bool) -> BoxFuture<'_, Result<()>>;
}

/// Stamps of a file's content.
pub trait Stamps {
    /// The file's stamp, or `None` where nothing of the kind can be trusted: block devices, and file
    /// systems that others may change through another machine or a program.
    ///
    /// The clock behind it is coarse: a change soon after this call can leave the stamp as it is. A
    /// stamp to be compared with later ones comes from [`settled_stamp`](Self::settled_stamp).
    ///
    /// # Errors
    /// The host cannot be asked.
    fn stamp(&self) -> BoxFuture<'_, Result<Option<Stamp>>>;

    /// A stamp from which any later one differs if a write or another change of the content has begun
    /// in between; `None` also where the last change is too recent to tell, or lies in the future.
    ///
    /// Waits up to about 50 ms for the clock to move on. Writes already in flight are the caller's to
    /// keep out: the kernel sets a file's times when a write begins.
    ///
    /// # Errors
    /// The host cannot be asked.
    fn settled_stamp(&self) -> BoxFuture<'_, Result<Option<Stamp>>>;
}

/// Memory that belongs to a file and outlives the process.
pub trait RestartMemories {
    /// The file's memory; if there is none it is made when `create` says so. `None` also where there can
    /// be none.
    ///
    /// Its last user may be a process that was killed and has not ended yet, although the image's lock is
    /// free: the call waits for that.
    ///
    /// # Errors
    /// There is memory that cannot be used: it is in use, or somebody else's. Or it cannot be made.
    fn restart_memory(&self, create: bool)
    -> BoxFuture<'_, Result<Option<Arc<dyn RestartMemory>>>>;
}

/// How much space a file takes, and may take.
pub trait Usage {
    /// Bytes that the file takes where it is kept, whatever its length; `None` where its runs of
    /// [data](Storage::allocation) are to be counted.
    ///
    /// # Errors
    /// The host cannot be asked.
    fn allocated(&self) -> BoxFuture<'_, Result<Option<u64>>> {
        Box::pin(async { Ok(None) })
    }

    /// Bytes that the file may still grow by, as far as the host can tell at once.
    fn free_space(&self) -> Option<u64> {
        None
    }
}

/// Hints, without effect on what is read.
pub trait Hints {
    /// Tells the host how the file is read from now on.
    fn advise(&self, access: Access) -> BoxFuture<'_, ()>;
}

/// What follows from the methods and extensions of a [`Storage`]: every storage has it. Where an extension is
/// missing, the answer is the one that is said here.
pub trait StorageExt {
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

    /// Writes all of `buf` at `offset`, as [`Storage::write_vectored_at`] does, and gives the buffer back.
    fn write_at(&self, offset: u64, buf: IoBuf) -> impl Future<Output = Result<IoBuf>>
    where
        Self: Storage,
    {
        self.write_one_at(offset, buf)
    }

    /// Bytes that the file takes where it is kept, whatever its length: by [`Usage::allocated`], or counted
    /// run by run.
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

    /// As [`Roles::retire`]; a storage without roles stays as it is, which is no error.
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

    /// As [`Roles::admit_writer`]; without roles nobody is kept out, which is no error.
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

    /// As [`RestartMemories::restart_memory`]; `None` without it.
    fn restart_memory(
        &self,
        create: bool,
    ) -> impl Future<Output = Result<Option<Arc<dyn RestartMemory>>>>
    where
        Self: Storage,
    {
        async move {
            match self.extensions().restart_memories {
                Some(memories) => memories.restart_memory(create).await,
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
