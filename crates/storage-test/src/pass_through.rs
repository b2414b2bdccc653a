//! Wrapping hosts: every operation is forwarded, and hooks are called before and after it.

use isobath_storage::{
    Access, Allocation, BoxFuture, Capabilities, Extensions, FileId, Hints, Host, Identity,
    IndexFile, IoBuf, KeptLayer, Layout, Made, OpenMode, Reflink, Result, Roles, Stamp, Stamps,
    Storage, ZeroMode,
};
use std::future::Future;
use std::path::{Path, PathBuf};

/// An operation of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostCall {
    /// [`Host::open`].
    Open,
    /// [`Host::create`] and [`Host::create_unlike`].
    Create,
    /// [`Host::remove`] and [`Host::remove_file`].
    Remove,
}

/// An operation of a file. Offsets and lengths are in bytes.
#[derive(Clone, Copy, Debug)]
pub enum Call<'a> {
    /// [`Storage::read_at`].
    Read {
        /// Where.
        offset: u64,
        /// How much.
        length: u64,
    },
    /// [`Storage::write_vectored_at`].
    Write {
        /// Where.
        offset: u64,
        /// The data.
        bufs: &'a [IoBuf],
    },
    /// [`Storage::write_zeroes`].
    WriteZeroes {
        /// Where.
        offset: u64,
        /// How much.
        length: u64,
        /// How.
        mode: ZeroMode,
    },
    /// [`Storage::discard`].
    Discard {
        /// Where.
        offset: u64,
        /// How much.
        length: u64,
    },
    /// [`Storage::flush`].
    Flush,
    /// [`Storage::set_len`].
    SetLength(u64),
    /// [`Hints::expect_length`].
    ExpectLength(u64),
    /// Operations that change nothing: [`Storage::len`], [`Storage::allocation`] and [`Stamps`].
    Query,
    /// [`Reflink::clone_range`].
    Clone {
        /// Where to.
        offset: u64,
        /// How much.
        length: u64,
    },
    /// [`Roles::retire`].
    Retire,
    /// [`Roles::admit_writer`].
    AdmitWriter,
}

/// Hooks around the operations of one file.
pub trait Hooks: Send + Sync + 'static {
    /// State kept from the beginning of an operation to its end.
    type Begun;

    /// Called before an operation on `file`, the wrapped file. On an error, the operation fails with it and is not
    /// executed, and [`end`](Self::end) is not called.
    fn begin(
        &self,
        file: &impl Storage,
        request: Call<'_>,
    ) -> impl Future<Output = Result<Self::Begun>>;

    /// Called after an operation: `done` is the request, if it succeeded and had an effect. An error replaces its
    /// result.
    fn end(
        &self,
        file: &impl Storage,
        begun: Self::Begun,
        done: Option<Call<'_>>,
    ) -> impl Future<Output = Result<()>>;

    /// Called before the wrapped file is asked to begin to write back.
    fn begin_write_back(&self) -> impl Future<Output = ()> {
        async {}
    }

    /// Called before the wrapped file is asked to make its stamp durable, too, with a flush.
    fn sync_stamp(&self) {}

    /// Whether the file has stamps, if the wrapped file has.
    fn has_stamps(&self) -> bool {
        true
    }

    /// The file's capabilities, given the wrapped file's.
    fn capabilities(&self, own: Capabilities) -> Capabilities {
        own
    }
}

/// Hooks around the operations of a host.
pub trait HostHooks: Send + Sync + 'static {
    /// The hooks of its files.
    type File: Hooks;
    /// State kept from the beginning of an operation to its end.
    type Begun;

    /// Called before an operation. On an error, the operation fails with it and is not executed.
    fn begin(&self, request: HostCall, name: &Path) -> impl Future<Output = Result<Self::Begun>>;

    /// Called after a successful operation.
    fn end(&self, request: HostCall, name: &Path, begun: Self::Begun);

    /// The hooks of a file that was opened or created.
    fn file(&self, file: &impl Storage) -> Self::File;
}

/// A host that wraps another.
#[derive(Clone, Debug)]
pub struct PassThrough<H, K> {
    inner: H,
    hooks: K,
}

impl<H: Host, K: HostHooks> PassThrough<H, K> {
    /// Wraps a host.
    pub fn around(inner: H, hooks: K) -> Self {
        Self { inner, hooks }
    }

    /// Its hooks.
    pub fn hooks(&self) -> &K {
        &self.hooks
    }

    /// Its hooks, mutably.
    pub fn hooks_mut(&mut self) -> &mut K {
        &mut self.hooks
    }

    fn wrap(&self, inner: H::File) -> PassThroughFile<H::File, K::File> {
        let hooks = self.hooks.file(&inner);
        PassThroughFile { inner, hooks }
    }
}

impl<H: Host, K: HostHooks> Host for PassThrough<H, K> {
    type File = PassThroughFile<H::File, K::File>;

    async fn open(&self, name: &Path, mode: OpenMode) -> Result<Self::File> {
        let begun = self.hooks.begin(HostCall::Open, name).await?;
        let file = self.wrap(self.inner.open(name, mode).await?);
        self.hooks.end(HostCall::Open, name, begun);
        Ok(file)
    }

    async fn create(&self, name: &Path, mode: OpenMode) -> Result<Self::File> {
        let begun = self.hooks.begin(HostCall::Create, name).await?;
        let file = self.wrap(self.inner.create(name, mode).await?);
        self.hooks.end(HostCall::Create, name, begun);
        Ok(file)
    }

    async fn create_unlike(
        &self,
        name: &Path,
        mode: OpenMode,
        spared: &dyn Fn(FileId) -> bool,
    ) -> Result<Option<Made<Self::File>>> {
        let begun = self.hooks.begin(HostCall::Create, name).await?;
        let made = self.inner.create_unlike(name, mode, spared).await?;
        let made = made.map(|Made { file, is_new }| Made { file: self.wrap(file), is_new });
        self.hooks.end(HostCall::Create, name, begun);
        Ok(made)
    }

    async fn remove(&self, name: &Path) -> Result<()> {
        let begun = self.hooks.begin(HostCall::Remove, name).await?;
        self.inner.remove(name).await?;
        self.hooks.end(HostCall::Remove, name, begun);
        Ok(())
    }

    async fn remove_file(&self, name: &Path, file: &Self::File) -> Result<bool> {
        let begun = self.hooks.begin(HostCall::Remove, name).await?;
        let removed = self.inner.remove_file(name, &file.inner).await?;
        self.hooks.end(HostCall::Remove, name, begun);
        Ok(removed)
    }

    fn canonical(&self, name: &Path) -> Result<PathBuf> {
        self.inner.canonical(name)
    }

    fn find(&self, name: &Path) -> Result<Option<FileId>> {
        self.inner.find(name)
    }

    fn protocol_name(&self, name: &str) -> bool {
        self.inner.protocol_name(name)
    }

    fn is_no_path(&self, name: &str) -> bool {
        self.inner.is_no_path(name)
    }

    fn index_of(&self, top: &Path) -> Option<IndexFile> {
        self.inner.index_of(top)
    }

    fn kept(&self, image: &Path) -> Option<KeptLayer> {
        self.inner.kept(image)
    }

    fn resolve(&self, referrer: &Path, name: &str) -> PathBuf {
        self.inner.resolve(referrer, name)
    }
}

/// A file that wraps another.
#[derive(Debug)]
pub struct PassThroughFile<S, K> {
    inner: S,
    hooks: K,
}

impl<S: Storage, K: Hooks> PassThroughFile<S, K> {
    /// Runs an operation between the hooks.
    async fn around<T>(
        &self,
        request: Call<'_>,
        operation: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let begun = self.hooks.begin(&self.inner, request).await?;
        let result = operation.await;
        self.hooks.end(&self.inner, begun, result.is_ok().then_some(request)).await?;
        result
    }
}

impl<S: Storage, K: Hooks> Storage for PassThroughFile<S, K> {
    fn identity(&self) -> Identity<'_> {
        self.inner.identity()
    }

    fn capabilities(&self) -> Capabilities {
        self.hooks.capabilities(self.inner.capabilities())
    }

    fn extensions(&self) -> Extensions<'_, Self> {
        let inner = self.inner.extensions();
        let reflink = inner.reflink.is_some();
        let roles = inner.roles.is_some();
        let stamps = inner.stamps.is_some() && self.hooks.has_stamps();
        Extensions {
            roles: roles.then_some(self),
            stamps: stamps.then_some(self),
            hints: Some(self),
            ..inner.with_reflink(reflink.then_some(self as &dyn Reflink<Self>))
        }
    }

    async fn read_at(&self, offset: u64, buf: IoBuf) -> Result<IoBuf> {
        let request = Call::Read { offset, length: buf.len() as u64 };
        self.around(request, self.inner.read_at(offset, buf)).await
    }

    async fn write_vectored_at(&self, offset: u64, bufs: Vec<IoBuf>) -> Result<Vec<IoBuf>> {
        let request = Call::Write { offset, bufs: &bufs };
        let begun = self.hooks.begin(&self.inner, request).await?;
        let result = self.inner.write_vectored_at(offset, bufs).await;
        let done = result.as_ref().ok().map(|bufs| Call::Write { offset, bufs });
        self.hooks.end(&self.inner, begun, done).await?;
        result
    }

    async fn write_zeroes(&self, offset: u64, length: u64, mode: ZeroMode) -> Result<()> {
        let request = Call::WriteZeroes { offset, length, mode };
        self.around(request, self.inner.write_zeroes(offset, length, mode)).await
    }

    async fn discard(&self, offset: u64, length: u64) -> Result<()> {
        let request = Call::Discard { offset, length };
        self.around(request, self.inner.discard(offset, length)).await
    }

    async fn flush(&self) -> Result<()> {
        self.around(Call::Flush, self.inner.flush()).await
    }

    async fn len(&self) -> Result<u64> {
        self.around(Call::Query, self.inner.len()).await
    }

    async fn set_len(&self, length: u64) -> Result<()> {
        self.around(Call::SetLength(length), self.inner.set_len(length)).await
    }

    async fn allocation(&self, offset: u64) -> Result<Allocation> {
        self.around(Call::Query, self.inner.allocation(offset)).await
    }

    async fn real_path(&self) -> Result<PathBuf> {
        self.inner.real_path().await
    }
}

impl<S: Storage, K: Hooks> Reflink<Self> for PassThroughFile<S, K> {
    fn clone_range<'a>(
        &'a self,
        from: &'a Self,
        from_offset: u64,
        to_offset: u64,
        length: u64,
    ) -> BoxFuture<'a, Result<bool>> {
        Box::pin(async move {
            let request = Call::Clone { offset: to_offset, length };
            let begun = self.hooks.begin(&self.inner, request).await?;
            let from = &from.inner;
            let result = self.inner.clone_range(from, from_offset, to_offset, length).await;
            let done = matches!(result, Ok(true)).then_some(request);
            self.hooks.end(&self.inner, begun, done).await?;
            result
        })
    }
}

impl<S: Storage, K: Hooks> Roles for PassThroughFile<S, K> {
    fn retire(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.around(Call::Retire, self.inner.retire()))
    }

    fn admit_writer(&self, admit: bool) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.around(Call::AdmitWriter, self.inner.admit_writer(admit)))
    }
}

impl<S: Storage, K: Hooks> Stamps for PassThroughFile<S, K> {
    fn stamp(&self) -> BoxFuture<'_, Result<Option<Stamp>>> {
        Box::pin(self.around(Call::Query, self.inner.stamp()))
    }

    fn settled_stamp(&self) -> BoxFuture<'_, Result<Option<Stamp>>> {
        Box::pin(self.around(Call::Query, self.inner.settled_stamp()))
    }

    fn sync_stamp(&self) -> BoxFuture<'_, Result<()>> {
        self.hooks.sync_stamp();
        Box::pin(self.around(Call::Flush, self.inner.sync_stamp()))
    }
}

impl<S: Storage, K: Hooks> Hints for PassThroughFile<S, K> {
    fn advise(&self, access: Access) -> BoxFuture<'_, ()> {
        Box::pin(self.inner.advise(access))
    }

    fn begin_write_back(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {
            self.hooks.begin_write_back().await;
            self.inner.begin_write_back().await;
        })
    }

    fn expect_length(&self, length: u64) -> BoxFuture<'_, ()> {
        Box::pin(async move {
            let request = Call::ExpectLength(length);
            let inner = async {
                self.inner.expect_length(length).await;
                Ok(())
            };
            // A hint that fails does nothing.
            self.around(request, inner).await.ok();
        })
    }

    fn lay_out(&self, layout: Layout) -> BoxFuture<'_, ()> {
        Box::pin(self.inner.lay_out(layout))
    }
}
