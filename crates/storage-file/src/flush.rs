//! Making writes durable, and remembering failures.

use super::{sys, transfer};
use isobath_ring::unblock;
use parking_lot::Mutex;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// File systems that overwrite in place and journal a file's block mapping, by their numbers in `statfs(2)`. As
/// measured, an `fdatasync` of 64 KiB there costs two flushes of the device in new space, and one in written space.
const WRITTEN_IN_PLACE: [u64; 2] = [sys::EXT, sys::XFS];

/// Whether a file system is one where flushes are cheaper in written space.
pub(super) fn gains_from_written_space(file_system: u64) -> bool {
    WRITTEN_IN_PLACE.contains(&file_system)
}

/// The count for this process.
static SYNCS: AtomicU64 = AtomicU64::new(0);

/// How many times this process has asked the kernel for an `fdatasync` or `fsync` of a [`FileHost`](super::FileHost)'s
/// file, or of the directory of one that it has created.
pub fn syncs() -> u64 {
    SYNCS.load(Ordering::Relaxed)
}

/// What is made durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Syncing {
    /// What is needed to read the data.
    Data,
    /// The file's times as well.
    Times,
}

async fn sync(file: &Arc<OwnedFd>, what: Syncing) -> io::Result<()> {
    SYNCS.fetch_add(1, Ordering::Relaxed);
    match what {
        Syncing::Data => transfer::fdatasync(file).await,
        Syncing::Times => {
            let file = Arc::clone(file);
            unblock(move || sys::fsync(&file)).await
        }
    }
}

/// Whether a file's writes can still become durable.
///
/// The kernel reports a failed write-back to one flush and then forgets it, so a later flush that succeeds proves
/// nothing about the lost writes. After a failed one the file therefore refuses every flush and change. Flushes run one
/// at a time, so that none succeeds concurrently with one that fails.
#[derive(Default)]
pub(super) struct Durability {
    turn: isobath_sync::AsyncMutex<()>,
    poisoned: AtomicBool,
    /// The end of the highest write so far.
    highest: AtomicU64,
    cause: Mutex<String>,
    /// The directory of a file that was created, until its entry is durable.
    directory: Mutex<Option<Arc<OwnedFd>>>,
}

impl Durability {
    /// State of a file whose entry in `directory` is new.
    pub(super) fn created(directory: OwnedFd) -> Self {
        Self { directory: Mutex::new(Some(Arc::new(directory))), ..Self::default() }
    }

    /// Notes a write that ends there.
    pub(super) fn note_write(&self, end: u64) {
        // Most writes are below: they leave the cache line shared.
        if end > self.highest() {
            self.highest.fetch_max(end, Ordering::Relaxed);
        }
    }

    /// The end of the highest write so far.
    pub(super) fn highest(&self) -> u64 {
        self.highest.load(Ordering::Relaxed)
    }

    /// Fails after a failed flush.
    pub(super) fn check(&self) -> io::Result<()> {
        if !self.poisoned.load(Ordering::Acquire) {
            return Ok(());
        }
        Err(io::Error::other(format!(
            "an earlier flush failed ({}), so writes before it may be lost; close the image, check \
             the storage, and reopen it",
            self.cause.lock()
        )))
    }

    pub(super) fn poison(&self, cause: &str) {
        let mut stored = self.cause.lock();
        if !self.poisoned.load(Ordering::Relaxed) {
            cause.clone_into(&mut stored);
            self.poisoned.store(true, Ordering::Release);
        }
    }

    /// `fdatasync`, or `fsync`. Its result is recorded even if the future is dropped.
    pub(super) async fn flush(
        self: &Arc<Self>,
        file: &Arc<OwnedFd>,
        what: Syncing,
    ) -> io::Result<()> {
        self.check()?;
        let (this, file) = (self.clone(), file.clone());
        let flush = async move { this.flush_now(&file, what).await };
        match isobath_ring::current() {
            Some(_) => {
                let joined = isobath_ring::spawn(flush).await;
                joined.map_err(|error| io::Error::other(error.to_string()))?
            }
            None => flush.await,
        }
    }

    async fn flush_now(&self, file: &Arc<OwnedFd>, what: Syncing) -> io::Result<()> {
        let _turn = self.turn.lock().await;
        self.check()?;
        let mut unseen = Unseen(Some(self));
        let directory = self.directory.lock().take();
        let mut result = sync(file, what).await;
        if let (Ok(()), Some(directory)) = (&result, directory) {
            result = sync(&directory, Syncing::Data).await;
        }
        unseen.0 = None;
        if let Err(error) = &result {
            self.poison(&error.to_string());
        }
        result
    }
}

/// Poisons the file if a flush ends without its result having been recorded.
struct Unseen<'a>(Option<&'a Durability>);

impl Drop for Unseen<'_> {
    fn drop(&mut self) {
        if let Some(durability) = self.0 {
            durability.poison("the thread that ran it ended early");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use isobath_ring::{Config, Executor, yield_now};
    use std::fs::File;

    #[test]
    fn only_file_systems_that_overwrite_in_place_gain() {
        let numbers = [
            (libc::EXT4_SUPER_MAGIC, true),
            (libc::XFS_SUPER_MAGIC, true),
            (libc::BTRFS_SUPER_MAGIC, false),
            (libc::TMPFS_MAGIC, false),
            (libc::F2FS_SUPER_MAGIC, false),
            (libc::NFS_SUPER_MAGIC, false),
            (libc::FUSE_SUPER_MAGIC, false),
            (libc::OVERLAYFS_SUPER_MAGIC, false),
        ];
        for (number, gains) in numbers {
            assert_eq!(gains_from_written_space(number as u64), gains, "{number:#x}");
        }
    }

    #[test]
    fn a_failed_flush_poisons() {
        let executor = Executor::new(&Config::default()).unwrap();
        // A pipe cannot be flushed.
        let (pipe, _end) = std::io::pipe().unwrap();
        let pipe: Arc<OwnedFd> = Arc::new(pipe.into());
        let file: Arc<OwnedFd> = Arc::new(File::open("/").unwrap().into());
        let durability = Arc::new(Durability::default());
        executor.block_on(async {
            durability.flush(&file, Syncing::Data).await.unwrap();
            let error = durability.flush(&pipe, Syncing::Data).await.unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
            for _ in 0..2 {
                let error = durability.flush(&file, Syncing::Data).await.unwrap_err();
                assert!(error.to_string().contains("an earlier flush failed (Invalid"), "{error}");
            }
            assert!(durability.check().is_err());

            let durability = Arc::new(Durability::default());
            durability.flush(&file, Syncing::Times).await.unwrap();
            let error = durability.flush(&pipe, Syncing::Times).await.unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EINVAL));
            assert!(durability.check().is_err());
        });
        assert!(isobath_ring::block_on(durability.flush(&file, Syncing::Data)).is_err());
    }

    #[test]
    fn the_outcome_of_a_dropped_flush_is_seen() {
        let executor = Executor::new(&Config::default()).unwrap();
        let (pipe, _end) = std::io::pipe().unwrap();
        let pipe: Arc<OwnedFd> = Arc::new(pipe.into());
        let durability = Arc::new(Durability::default());
        executor.block_on(async {
            {
                let mut flush = std::pin::pin!(durability.flush(&pipe, Syncing::Data));
                std::future::poll_fn(|context| {
                    assert!(flush.as_mut().poll(context).is_pending());
                    std::task::Poll::Ready(())
                })
                .await;
            }
            while durability.check().is_ok() {
                yield_now().await;
            }
        });

        // This is what happens to a flush when the executor ends.
        let durability = Durability::default();
        executor.block_on(async {
            {
                let mut flush = std::pin::pin!(durability.flush_now(&pipe, Syncing::Data));
                assert!(
                    std::future::poll_fn(|context| {
                        std::task::Poll::Ready(flush.as_mut().poll(context).is_pending())
                    })
                    .await
                );
            }
            let error = durability.check().unwrap_err();
            assert!(error.to_string().contains("the thread that ran it ended"), "{error}");
        });
    }
}
