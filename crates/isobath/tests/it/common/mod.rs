//! What tests share: images in memory, what a crash does to each change, and whether QEMU finds what is
//! left consistent.

#![allow(dead_code, reason = "each test uses a part of it")]

use futures_util::FutureExt;
use futures_util::task::noop_waker_ref;
use isobath_disk::clock::Clock;
use isobath_disk::{CheckEvent, CheckOptions, check};
pub(crate) use isobath_disk_test::complete;
use isobath_qcow2::index::WholeRoot;
use isobath_qcow2::{IncompatibleFeatures, NewImage};
use isobath_storage::memory::{MemoryFile, MemoryHost};
use isobath_storage::{
    FileId, Host, IndexFile, IoBuf, Locking, OpenMode, Result, Storage, StorageExt,
};
use isobath_storage_test::any::ToAny;
use isobath_storage_test::recorder::{Entry, Fate};
use isobath_testkit::qemu;
use parking_lot::Mutex;
use rand::RngExt;
use rand::rngs::StdRng;
use std::future::{Future, poll_fn};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::ptr::NonNull;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

/// The memory of a guest.
struct GuestMemory(NonNull<[u8]>);

// SAFETY: it only keeps the memory, and frees it.
unsafe impl Send for GuestMemory {}
// SAFETY: as above.
unsafe impl Sync for GuestMemory {}

impl Drop for GuestMemory {
    fn drop(&mut self) {
        // SAFETY: from `Box::into_raw`, and the last buffer over it is gone.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

/// A buffer over memory of a guest, which may change at any time.
pub(crate) fn guest_memory(bytes: Vec<u8>) -> IoBuf {
    let length = bytes.len();
    let memory = NonNull::from(Box::leak(bytes.into_boxed_slice()));
    // SAFETY: the owner keeps the memory, and nothing else refers to it.
    unsafe { IoBuf::shared(memory.cast(), length, Arc::new(GuestMemory(memory))) }
}

/// Time that passes whenever somebody waits.
#[derive(Default)]
pub(crate) struct Ticking(Arc<Mutex<Duration>>);

impl Clock for Ticking {
    fn now(&self) -> Duration {
        let mut now = self.0.lock();
        *now += Duration::from_micros(10);
        *now
    }

    fn sleep_until(&self, time: Duration) -> Pin<Box<dyn Future<Output = ()>>> {
        let now = Arc::clone(&self.0);
        let mut turns = 3;
        Box::pin(poll_fn(move |context| {
            turns -= 1;
            if turns > 0 {
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            let mut now = now.lock();
            *now = time.max(*now);
            Poll::Ready(())
        }))
    }
}

/// As many turns as any future takes.
pub(crate) const ALWAYS: u64 = 1 << 40;

/// Polls a future `turns` times, and then gives it up; `None` if it has not ended by then.
pub(crate) fn run<T>(future: impl Future<Output = T>, turns: u64) -> Option<T> {
    let mut future = Box::pin(future);
    let mut context = Context::from_waker(noop_waker_ref());
    for _ in 0..turns {
        if let Poll::Ready(output) = future.poll_unpin(&mut context) {
            return Some(output);
        }
    }
    None
}

/// Writes a new image.
pub(crate) async fn make(host: &MemoryHost, name: &str, image: &NewImage) {
    let plan = image.plan().unwrap();
    let mode = OpenMode { writable: true, ..OpenMode::default() };
    let file = host.create(Path::new(name), mode).await.unwrap();
    for (offset, bytes) in plan.writes() {
        file.write_at(offset.get(), IoBuf::copy_of(&bytes)).await.unwrap();
    }
    file.set_len(plan.file_length()).await.unwrap();
}

/// Keeps each change with the probability `keep`, some of those torn.
pub(crate) fn random_fates(rng: &mut StdRng, keep: f64) -> impl FnMut(usize, &Entry) -> Fate {
    move |_, _| match rng.random_bool(keep) {
        true if rng.random_bool(0.2) => Fate::Torn(512 * rng.random_range(0..16)),
        true => Fate::Kept,
        false => Fate::Lost,
    }
}

/// The host's files in a directory of their own.
pub(crate) fn export(host: &MemoryHost) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for file in host.names() {
        std::fs::write(directory.path().join(&file), host.contents(&file).unwrap()).unwrap();
    }
    directory
}

/// Whether an image's header says that it has a journal.
pub(crate) fn has_journal(host: &MemoryHost, image: &str) -> bool {
    let start = host.contents(image).unwrap();
    let bits = u64::from_be_bytes(start[72..80].try_into().unwrap());
    IncompatibleFeatures::from_bits(bits).contains(IncompatibleFeatures::JOURNAL)
}

/// What a check finds wrong with an image.
pub(crate) async fn findings(host: &MemoryHost, image: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut hear = |event: CheckEvent<'_>| {
        if let CheckEvent::Finding(text) = event {
            found.push(text.to_string());
        }
    };
    check(&host.any(), Path::new(image), &CheckOptions::default(), &mut hear).await.unwrap();
    found
}

/// QEMU finds nothing wrong with an image but leaks.
pub(crate) fn assert_consistent(host: &MemoryHost, image: impl AsRef<Path>) {
    let directory = export(host);
    let checked = qemu::check(&directory.path().join(image));
    assert!([0, 3].contains(&checked.code()), "{}", checked.report());
}

/// A host that has an index beside the layers of a chain.
#[derive(Clone)]
pub(crate) struct Beside {
    inner: MemoryHost,
    top: PathBuf,
    pub(crate) index: IndexFile,
}

impl Beside {
    /// With an index of these layers, from the base to the top.
    pub(crate) fn new<'n>(
        host: &MemoryHost,
        layers: impl IntoIterator<Item = &'n String>,
        root: &WholeRoot,
        bytes: &[u8],
    ) -> Self {
        host.insert("whole", bytes);
        let (inner, mut top, mut files) = (host.clone(), PathBuf::new(), Vec::new());
        for name in layers {
            top = name.into();
            let look = OpenMode { locking: Locking::Unlocked, ..OpenMode::default() };
            files.push(host.open(&top, look).now_or_never().unwrap().unwrap().id());
        }
        let index = IndexFile { name: "whole".into(), root: root.encode().into(), layers: files };
        Self { inner, top, index }
    }
}

impl Host for Beside {
    type File = MemoryFile;

    async fn open(&self, name: &Path, mode: OpenMode) -> Result<MemoryFile> {
        self.inner.open(name, mode).await
    }

    async fn create(&self, name: &Path, mode: OpenMode) -> Result<MemoryFile> {
        self.inner.create(name, mode).await
    }

    async fn remove(&self, name: &Path) -> Result<()> {
        self.inner.remove(name).await
    }

    async fn remove_file(&self, name: &Path, file: &MemoryFile) -> Result<bool> {
        self.inner.remove_file(name, file).await
    }

    fn find(&self, name: &Path) -> Result<Option<FileId>> {
        self.inner.find(name)
    }

    fn index_of(&self, top: &Path) -> Option<IndexFile> {
        (top == self.top).then(|| self.index.clone())
    }
}
