//! Files and block devices of the operating system.
//!
//! Inside an [`Executor`](isobath_ring::Executor) operations go through that thread's ring; elsewhere they are blocking
//! system calls, so the same file works on any executor. Calls that a ring does not support (`ioctl`, truncating a
//! file) run on a thread of their own if they can take long.
//!
//! If a write's future is dropped early, its range is undefined until the kernel has finished the write; every later
//! operation on the file waits for that.
//!
//! A chain can have more files than a process may open. Files opened for reading after half the limit (`RLIMIT_NOFILE`
//! when the first file is opened, less a reserve) therefore share the rest of it: near the limit, files not used
//! recently give up their descriptors and are reopened, by name, when they are next used. Until then such a file holds
//! no image locks. If it was meanwhile replaced, removed, made longer or shorter, or given another modification time,
//! the operation fails.
//!
//! A handle that has [retired](isobath_storage::StorageExt::retire) from writing shares descriptors too. One that
//! [admits a writer](isobath_storage::StorageExt::admit_writer) does not: it keeps its descriptor, and from the time
//! when writers are kept out again the file must stay as it is then.
//!
//! After a failed flush the file is poisoned: each later flush and change fails with an error that
//! says so, since a retried `fdatasync` can report success for data that is lost.

mod at_once;
mod atomic;
mod beside;
mod cached;
mod copies;
pub mod descriptor_sets;
mod descriptors;
mod direct;
mod disks;
mod flush;
mod handed_in;
mod host;
mod landing;
mod lock;
mod mapped;
mod named;
mod open;
mod pause;
mod ranges;
mod reflink;
mod restart_memory;
mod role;
mod roles;
mod shared;
mod source;
mod stamp;
mod storage;
mod sys;
mod transfer;
mod users;
mod zero;

pub use at_once::WriteAtOnce;
pub use flush::syncs;
pub use handed_in::{HandedIn, TooMany};
pub use host::{FileHost, LimitedHost};
pub use lock::is_in_use;
pub use open::id_at;
pub use restart_memory::RestartDirectories;
pub use storage::FileStorage;

use crate::flush::Syncing;
use crate::lock::Wanted;
use isobath_ring::unblock;
use isobath_storage::Operation;
use isobath_storage::{
    Access, Allocation, BoxFuture, Capabilities, Extensions, Hints, Identity, IoBuf, Layout,
    MemoryUse, Reflink, RestartMemories, RestartMemory, Result, Roles, SECTOR, Stamp, Stamps,
    Storage, Usage, ZeroMode,
};
use open::Kind;
use source::Source;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl Storage for FileStorage {
    fn identity(&self) -> Identity<'_> {
        Identity { name: &self.file.name, id: self.file.id }
    }

    fn capabilities(&self) -> Capabilities {
        // How the file is best written is not worth the system calls where it is only read.
        let read_only = self.writing.has_ended();
        Capabilities {
            read_only,
            extends_with_zeroes: self.kind == Kind::Regular,
            gains_from_written_space: !read_only && self.gains_from_written_space(),
            extends_one_at_a_time: !read_only && self.extends_one_at_a_time(),
            atomic_write: if read_only { SECTOR } else { self.atomic_write() },
            clone_alignment: if read_only { None } else { self.clone_alignment() },
            is_device: self.kind != Kind::Regular,
            begins_at: 0,
        }
    }

    fn extensions(&self) -> Extensions<'_, Self> {
        Extensions {
            reflink: Some(self),
            roles: Some(self),
            stamps: Some(self),
            restart_memories: Some(self),
            usage: Some(self),
            hints: Some(self),
        }
    }

    async fn read_at(&self, offset: u64, mut buf: IoBuf) -> Result<IoBuf> {
        let length = buf.len();
        self.check(Operation::Read, offset, length as u64)?;
        self.landed().await;
        let done = self.read_cached(offset, &mut buf);
        if done == length {
            return Ok(buf);
        }
        let target = self.target().await?;
        let (result, mut buf) = match &self.direct {
            Some(direct) => direct.read(&target, offset, buf).await,
            None => transfer::read(&target, offset, buf, done, 1).await,
        };
        match result {
            Ok(count) => {
                buf[count..].fill(0);
                Ok(buf)
            }
            Err(error) => {
                self.end_mappings();
                Err(self.at(Operation::Read, offset, length as u64, error))
            }
        }
    }

    async fn write_vectored_at(&self, offset: u64, bufs: Vec<IoBuf>) -> Result<Vec<IoBuf>> {
        let length = bufs.iter().map(|buf| buf.len() as u64).sum();
        self.check(Operation::Write, offset, length)?;
        if length == 0 {
            return Ok(bufs);
        }
        self.landed().await;
        let target =
            self.kept().map_err(|error| self.at(Operation::Write, offset, length, error))?;
        let (result, bufs) = match &self.direct {
            Some(direct) => direct.write_vectored(&target, offset, bufs).await,
            None => transfer::write_vectored(&target, offset, bufs, self.at_once()).await,
        };
        result.map_err(|error| self.at(Operation::Write, offset, length, error))?;
        Ok(bufs)
    }

    async fn write_one_at(&self, offset: u64, buf: IoBuf) -> Result<IoBuf> {
        let length = buf.len() as u64;
        self.check(Operation::Write, offset, length)?;
        if length == 0 {
            return Ok(buf);
        }
        self.landed().await;
        let target =
            self.kept().map_err(|error| self.at(Operation::Write, offset, length, error))?;
        let (result, buf) = self.write_buf(&target, offset, buf).await;
        result.map_err(|error| self.at(Operation::Write, offset, length, error))?;
        Ok(buf)
    }

    async fn write_zeroes(&self, offset: u64, length: u64, mode: ZeroMode) -> Result<()> {
        let end = self.check(Operation::WriteZeroes, offset, length)?;
        if length == 0 {
            return Ok(());
        }
        self.landed().await;
        let result = self.zero(offset, end, mode).await;
        result.map_err(|error| self.at(Operation::WriteZeroes, offset, length, error))
    }

    async fn discard(&self, offset: u64, length: u64) -> Result<()> {
        let end = self.check(Operation::Discard, offset, length)?;
        if length == 0 {
            return Ok(());
        }
        self.landed().await;
        let result = self.punch(offset, end).await;
        result.map_err(|error| self.at(Operation::Discard, offset, length, error))
    }

    async fn flush(&self) -> Result<()> {
        self.sync(Syncing::Data).await
    }

    async fn len(&self) -> Result<u64> {
        let target = self.target().await?;
        if let Some(direct) = &self.direct {
            drop(direct.settled(&target.lease).await);
        }
        self.length_of(&target.file).map_err(|error| self.error(Operation::Query, error))
    }

    async fn set_len(&self, length: u64) -> Result<()> {
        self.check(Operation::SetLength, length, 0)?;
        self.landed().await;
        let result = self.change_length(length).await;
        result.map_err(|error| self.at(Operation::SetLength, length, 0, error))
    }

    async fn real_path(&self) -> Result<PathBuf> {
        let target = self.target().await?;
        sys::path_of(&target.file).map_err(|error| self.error(Operation::Query, error))
    }

    async fn allocation(&self, offset: u64) -> Result<Allocation> {
        let target = self.target().await?;
        let found = self.find_allocation(&target.file, offset);
        found.map_err(|error| self.at(Operation::Query, offset, 0, error))
    }
}

impl Reflink<Self> for FileStorage {
    fn clone_range<'a>(
        &'a self,
        from: &'a Self,
        from_offset: u64,
        to_offset: u64,
        length: u64,
    ) -> BoxFuture<'a, Result<bool>> {
        Box::pin(async move {
            self.check(Operation::Clone, to_offset, length)?;
            from.check(Operation::Read, from_offset, length)?;
            let result = self.reflink(from, from_offset, to_offset, length).await?;
            result.map_err(|error| self.at(Operation::Clone, to_offset, length, error))
        })
    }
}

impl Roles for FileStorage {
    fn retire(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.end_writing())
    }

    fn admit_writer(&self, admit: bool) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.set_admitting(admit))
    }
}

impl FileStorage {
    async fn sync(&self, what: Syncing) -> Result<()> {
        self.landed().await;
        let result = if self.writing.is_flushed() {
            self.durability().check()
        } else {
            // A file that is only read may share its descriptor, and may have been written by others.
            let target = match &**self.source.load() {
                Source::Kept(target, _) => target.clone(),
                Source::Shared(_) => self.target().await?,
            };
            self.durability().flush(&target.file, what).await
        };
        if result.is_err() {
            self.end_mappings();
        }
        result.map_err(|error| self.error(Operation::Flush, error))
    }
}

impl Stamps for FileStorage {
    fn stamp(&self) -> BoxFuture<'_, Result<Option<Stamp>>> {
        Box::pin(async {
            let target = self.target().await?;
            self.present_stamp(&target.file).map_err(|error| self.error(Operation::Query, error))
        })
    }

    fn settled_stamp(&self) -> BoxFuture<'_, Result<Option<Stamp>>> {
        Box::pin(async {
            let target = self.target().await?;
            let stamp = self.wait_for_stamp(&target.file).await;
            stamp.map_err(|error| self.error(Operation::Query, error))
        })
    }

    fn sync_stamp(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.sync(Syncing::Times))
    }
}

impl RestartMemories for FileStorage {
    fn restart_memory(
        &self,
        how: MemoryUse,
    ) -> BoxFuture<'_, Result<Option<Arc<dyn RestartMemory>>>> {
        Box::pin(async move {
            if let MemoryUse::Glance(_) = how {
                let target = self.target().await?;
                if lock::look(&target.file, &self.file.name, Wanted::READER).is_err() {
                    return Ok(None);
                }
            }
            let target = self.target().await?;
            restart_memory::restart_memory(&self.file.name, &target.file, self.file.id, how).await
        })
    }
}

impl Usage for FileStorage {
    fn allocated(&self) -> BoxFuture<'_, Result<Option<u64>>> {
        Box::pin(async {
            let stat = sys::stat(&self.target().await?.file);
            let stat = stat.map_err(|error| self.error(Operation::Query, error))?;
            // Counted in units of 512 bytes, whatever the file system's block size.
            Ok(Some(stat.st_blocks as u64 * 512))
        })
    }

    fn free_space(&self) -> Option<u64> {
        let target = self.kept().ok().filter(|_| self.kind == Kind::Regular)?;
        sys::free_space(&target.file).ok()
    }

    fn highest_write(&self) -> Option<u64> {
        Some(self.durability.get().map_or(0, |durability| durability.highest()))
    }
}

impl Hints for FileStorage {
    fn advise(&self, access: Access) -> BoxFuture<'_, ()> {
        let advice = match access {
            Access::Normal => libc::POSIX_FADV_NORMAL,
            Access::Random => libc::POSIX_FADV_RANDOM,
        };
        Box::pin(async move {
            if let Ok(target) = self.target().await {
                sys::advise(&target.file, advice);
            }
        })
    }

    fn begin_write_back(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            // What was written with O_DIRECT is not in memory.
            let Some(target) = self.kept().ok().filter(|_| self.direct.is_none()) else { return };
            let begun = unblock(move || sys::begin_write_back(&target.file)).await;
            if let Err(error) = begun {
                tracing::debug!(name = ?self.file.name, %error, "cannot begin to write back");
            }
        })
    }

    fn expect_length(&self, length: u64) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            if length == 0 || self.check(Operation::SetLength, length, 0).is_err() {
                return;
            }
            self.landed().await;
            if let Err(error) = self.make_longer(length).await {
                tracing::debug!(name = ?self.file.name, %error, "cannot make the file longer ahead of need");
                self.rejected.growth.store(true, Ordering::Relaxed);
            }
        })
    }

    fn lay_out(&self, layout: Layout) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let Ok(target) = self.target().await else { return };
            let asked = |wanted: bool, what: &str, set: &dyn Fn() -> std::io::Result<()>| {
                if wanted && let Err(error) = set() {
                    tracing::debug!(name = ?self.file.name, %error, "cannot set {what}");
                }
            };
            let size = layout.extent_size;
            asked(layout.no_copy_on_write, "nocow", &|| sys::set_nocow(&target.file));
            asked(size.is_some(), "the extent size", &|| {
                sys::set_extent_size(&target.file, size.unwrap_or(0))
            });
        })
    }
}

#[cfg(test)]
mod tests {
    use super::beside::Besides;
    use super::direct::Direct;
    use super::source::Source;
    use super::*;
    use isobath_ring::{Lease, Leased, block_on};
    use isobath_storage::{FileId, Host, OpenMode, StorageExt};
    use std::sync::OnceLock;

    const WRITABLE: OpenMode =
        OpenMode { writable: true, direct: false, locking: isobath_storage::Locking::Exclusive };

    /// What a descriptor's users keep alive, and whether its file let writers in when the last of them was gone.
    struct Watched {
        besides: Arc<Besides>,
        id: FileId,
        admitted: Arc<OnceLock<bool>>,
        _lease: Lease,
    }

    impl Leased for Watched {}

    impl Drop for Watched {
        fn drop(&mut self) {
            self.admitted.set(self.besides.admits(self.id)).unwrap();
        }
    }

    /// A writer that leaves just then would lock the file in the reader's name, and nobody would unlock it.
    #[test]
    fn no_writer_is_let_in_by_a_reader_that_has_released_its_locks() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        let admitted = Arc::new(OnceLock::new());
        block_on(async {
            let file = FileHost.create(&path, WRITABLE).await.unwrap();
            file.end_writing().await.unwrap();
            file.set_admitting(true).await.unwrap();
            let (besides, id) = (file.file.pool.besides().clone(), file.file.id);
            assert!(besides.admits(id));
            let target = file.kept().unwrap();
            let lease = target.lease.clone();
            let watched = Watched { besides, id, admitted: admitted.clone(), _lease: lease };
            let watched = Arc::new(target.leased(Arc::new(watched)));
            file.source.store(Arc::new(Source::Kept(watched, None)));
        });
        assert_eq!(admitted.get(), Some(&false));
    }

    #[test]
    fn a_poisoned_file_can_only_be_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        block_on(async {
            let file = FileHost.create(&path, WRITABLE).await.unwrap();
            file.write_at(0, IoBuf::copy_of(b"kept")).await.unwrap();
            file.durability().poison("Input/output error");
            let refused = [
                file.write_at(0, IoBuf::copy_of(b"x")).await.err(),
                file.write_vectored_at(0, vec![IoBuf::copy_of(b"x")]).await.err(),
                file.write_zeroes(0, 1, ZeroMode::default()).await.err(),
                file.discard(0, 1).await.err(),
                file.set_len(1).await.err(),
                file.flush().await.err(),
            ];
            for error in refused {
                let error = error.unwrap();
                assert_eq!(error.errno(), libc::EIO);
                assert!(error.to_string().contains("flush failed (Input/output error)"), "{error}");
            }
            assert_eq!(&*file.read_at(0, IoBuf::zeroed(4)).await.unwrap(), b"kept");
            assert!(Roles::retire(&file).await.is_err());
            assert!(file.is_read_only());
            Roles::retire(&file).await.unwrap();
            assert!(file.flush().await.is_err(), "what is lost stays lost");
            assert_eq!(&*file.read_at(0, IoBuf::zeroed(4)).await.unwrap(), b"kept");
        });
    }

    /// While a file system makes a file longer, a write behind the new end may be in flight.
    #[test]
    fn a_file_is_made_longer_once_nobody_writes_behind_the_new_end() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        block_on(async {
            let mut file = FileHost.create(&path, WRITABLE).await.unwrap();
            file.direct = Some(Box::new(Direct::new(4096, 4096, true).unwrap()));
            file.found.get_or_init(Box::default).lengthens.set(true).unwrap();
            let (direct, target) = (file.direct.as_ref().unwrap(), file.kept().unwrap());
            let before = direct.share(&target.lease, 0, 1 << 20).await;
            Hints::expect_length(&file, 2 << 20).await;
            assert_eq!(
                file.len().await.unwrap(),
                2 << 20,
                "a write before the new end is in nobody's way"
            );
            let behind = direct.share(&target.lease, 9 << 20, 10 << 20).await;
            let mut longer = Hints::expect_length(&file, 4 << 20);
            let mut context = std::task::Context::from_waker(std::task::Waker::noop());
            assert!(longer.as_mut().poll(&mut context).is_pending());
            std::fs::File::options().write(true).open(&path).unwrap().set_len(10 << 20).unwrap();
            drop((before, behind));
            longer.await;
            assert_eq!(file.len().await.unwrap(), 10 << 20);
        });
    }

    /// Larger blocks than the test machine's disk may have, and stricter memory.
    #[test]
    fn blocks_of_a_page_keep_their_bytes() {
        let directory = tempfile::tempdir().unwrap();
        block_on(async {
            let mut file =
                FileHost.create(&directory.path().join("image"), WRITABLE).await.unwrap();
            file.direct = Some(Box::new(Direct::new(4096, 4096, true).unwrap()));
            let mut model = Vec::new();
            for step in 0..300_u64 {
                let (offset, length) = (step * 7919 % 30_000, 1 + step * 104_729 % 9000);
                let end = (offset + length) as usize;
                if model.len() < end {
                    model.resize(end, 0);
                }
                model[offset as usize..end].fill(step as u8);
                let half = vec![step as u8; length as usize / 2];
                let rest = vec![step as u8; length as usize - half.len()];
                let bufs = vec![IoBuf::copy_of(&half), IoBuf::copy_of(&rest)];
                file.write_vectored_at(offset, bufs).await.unwrap();
                assert_eq!(file.len().await.unwrap(), model.len() as u64);
                let read = file.read_at(step * 13, IoBuf::zeroed(5000)).await.unwrap();
                let mut wanted = model.get(step as usize * 13..).unwrap_or_default().to_vec();
                wanted.resize(5000, 0);
                assert!(*read == wanted, "step {step}");
            }
        });
        assert!(Direct::new(512, 4095, true).is_err());
        assert!(Direct::new(8192, 8192, true).is_err());
        assert!(Direct::new(0, 512, true).is_err());
    }
}
