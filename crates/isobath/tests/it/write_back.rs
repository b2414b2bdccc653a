//! What a copy has written is on its way to the disk before the sync at its end.

use futures_executor::block_on;
use futures_util::future::join;
use isobath_disk::{CopyOptions, Disk, DiskCopy, ImageFormat, OpenOptions};
use isobath_qcow2::NewImage;
use isobath_storage::Storage;
use isobath_storage::memory::MemoryHost;
use isobath_storage_test::pass_through::{Call, Hooks, HostCall, HostHooks, PassThrough};
use std::future::pending;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const SIZE: u64 = 160 << 20;

/// Counts what is written, and notes how much that was when the file was last asked to begin to write back.
#[derive(Clone, Default)]
struct Written {
    bytes: Arc<AtomicU64>,
    asked: Arc<AtomicU64>,
    /// The most that was written between two times.
    most: Arc<AtomicU64>,
    /// Whether the host never gets round to it.
    never: bool,
}

impl HostHooks for Written {
    type File = Self;
    type Begun = ();

    async fn begin(&self, _request: HostCall, _name: &Path) -> isobath_storage::Result<()> {
        Ok(())
    }

    fn end(&self, _request: HostCall, _name: &Path, (): ()) {}

    fn file(&self, _file: &impl Storage) -> Self {
        self.clone()
    }
}

impl Hooks for Written {
    type Begun = ();

    async fn begin(&self, _file: &impl Storage, request: Call<'_>) -> isobath_storage::Result<()> {
        if let Call::Write { bufs, .. } = request {
            let bytes = bufs.iter().map(|buf| buf.len() as u64).sum();
            let all = self.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
            self.most.fetch_max(all - self.asked.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        Ok(())
    }

    async fn end(
        &self,
        _file: &impl Storage,
        (): (),
        _done: Option<Call<'_>>,
    ) -> isobath_storage::Result<()> {
        Ok(())
    }

    async fn begin_write_back(&self) {
        self.asked.store(self.bytes.load(Ordering::Relaxed), Ordering::Relaxed);
        if self.never {
            pending::<()>().await;
        }
    }
}

type Copy = DiskCopy<PassThrough<MemoryHost, Written>>;

/// A copy to a new image, the target.
async fn copy(written: &Written) -> (Copy, Arc<Disk<PassThrough<MemoryHost, Written>>>) {
    let memory = MemoryHost::new();
    crate::common::make(&memory, "target", &NewImage::new(SIZE)).await;
    memory.insert("source", &vec![7; SIZE as usize]);
    let host = PassThrough::around(memory, written.clone());
    let raw = OpenOptions::new().format(ImageFormat::Raw);
    let writable = OpenOptions::new().writable(true);
    let source = Disk::open(host.clone(), Path::new("source"), &raw).await.unwrap();
    let target = Disk::open(host, Path::new("target"), &writable).await.unwrap();
    let (source, target) = (Arc::new(source), Arc::new(target));
    let copy = DiskCopy::new(vec![source], target.clone(), CopyOptions::default()).unwrap();
    (copy, target)
}

#[test]
fn a_copy_writes_back_as_it_goes_on() {
    block_on(async {
        let written = Written::default();
        let (copy, target) = copy(&written).await;
        copy.work().await.unwrap();
        let all = written.bytes.load(Ordering::Relaxed);
        assert!(all >= SIZE);
        let most = written.most.load(Ordering::Relaxed);
        assert!(most < SIZE / 4, "{most} of {all} bytes were written in one go");
        target.close().await.unwrap();
    });
}

#[test]
fn a_copy_waits_for_no_write_back_that_does_not_end() {
    block_on(async {
        let written = Written { never: true, ..Written::default() };
        let (copy, target) = copy(&written).await;
        let one = copy.work();
        let other = async {
            copy.work().await.unwrap();
            assert!(written.bytes.load(Ordering::Relaxed) >= SIZE);
            copy.stop();
        };
        join(one, other).await.0.unwrap();
        target.close().await.unwrap();
    });
}
