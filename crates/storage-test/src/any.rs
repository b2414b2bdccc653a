//! One type for every host.
//!
//! The engine is generic over its host, so a test program that uses five kinds of hosts compiles it five times. With
//! [`AnyHost`] it is compiled once; each operation then costs an allocation and an indirect call.

use isobath_storage::{
    Allocation, BoxFuture, Capabilities, Extensions, FileId, Host, Identity, IndexFile, IoBuf,
    KeptLayer, Made, OpenMode, Reflink, Result, Storage, ZeroMode,
};
use std::any::Any;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Any host.
#[derive(Clone)]
pub struct AnyHost(Arc<dyn DynHost>);

/// Hosts that can be cloned into an [`AnyHost`].
pub trait ToAny: Host {
    /// A type-erased copy.
    fn any(&self) -> AnyHost;
}

impl<H: Host + Clone> ToAny for H {
    fn any(&self) -> AnyHost {
        AnyHost(Arc::new(Typed(self.clone())))
    }
}

/// An open file of any host.
pub struct AnyFile(Box<dyn DynFile>);

/// A host or a file of a known type.
struct Typed<T>(T);

trait DynHost: Send + Sync {
    fn open<'a>(&'a self, name: &'a Path, mode: OpenMode) -> BoxFuture<'a, Result<AnyFile>>;
    fn create<'a>(&'a self, name: &'a Path, mode: OpenMode) -> BoxFuture<'a, Result<AnyFile>>;
    fn create_unlike<'a>(
        &'a self,
        name: &'a Path,
        mode: OpenMode,
        spared: &'a dyn Fn(FileId) -> bool,
    ) -> BoxFuture<'a, Result<Option<Made<AnyFile>>>>;
    fn remove<'a>(&'a self, name: &'a Path) -> BoxFuture<'a, Result<()>>;
    fn remove_file<'a>(&'a self, name: &'a Path, file: &'a AnyFile) -> BoxFuture<'a, Result<bool>>;
    fn canonical(&self, name: &Path) -> Result<PathBuf>;
    fn find(&self, name: &Path) -> Result<Option<FileId>>;
    fn protocol_name(&self, name: &str) -> bool;
    fn is_no_path(&self, name: &str) -> bool;
    fn index_of(&self, top: &Path) -> Option<IndexFile>;
    fn kept(&self, image: &Path) -> Option<KeptLayer>;
    fn resolve(&self, referrer: &Path, name: &str) -> PathBuf;
}

impl<H: Host> DynHost for Typed<H> {
    fn open<'a>(&'a self, name: &'a Path, mode: OpenMode) -> BoxFuture<'a, Result<AnyFile>> {
        Box::pin(async move { Ok(AnyFile(Box::new(Typed(self.0.open(name, mode).await?)))) })
    }

    fn create<'a>(&'a self, name: &'a Path, mode: OpenMode) -> BoxFuture<'a, Result<AnyFile>> {
        Box::pin(async move { Ok(AnyFile(Box::new(Typed(self.0.create(name, mode).await?)))) })
    }

    fn create_unlike<'a>(
        &'a self,
        name: &'a Path,
        mode: OpenMode,
        spared: &'a dyn Fn(FileId) -> bool,
    ) -> BoxFuture<'a, Result<Option<Made<AnyFile>>>> {
        Box::pin(async move {
            let made = self.0.create_unlike(name, mode, spared).await?;
            Ok(made.map(|Made { file, is_new }| {
                let file = AnyFile(Box::new(Typed(file)));
                Made { file, is_new }
            }))
        })
    }

    fn remove<'a>(&'a self, name: &'a Path) -> BoxFuture<'a, Result<()>> {
        Box::pin(self.0.remove(name))
    }

    fn remove_file<'a>(&'a self, name: &'a Path, file: &'a AnyFile) -> BoxFuture<'a, Result<bool>> {
        Box::pin(async move {
            match file.0.as_any().downcast_ref::<Typed<H::File>>() {
                Some(file) => self.0.remove_file(name, &file.0).await,
                // A file of another host.
                None => Ok(false),
            }
        })
    }

    fn canonical(&self, name: &Path) -> Result<PathBuf> {
        self.0.canonical(name)
    }

    fn find(&self, name: &Path) -> Result<Option<FileId>> {
        self.0.find(name)
    }

    fn protocol_name(&self, name: &str) -> bool {
        self.0.protocol_name(name)
    }

    fn is_no_path(&self, name: &str) -> bool {
        self.0.is_no_path(name)
    }

    fn index_of(&self, top: &Path) -> Option<IndexFile> {
        self.0.index_of(top)
    }

    fn kept(&self, image: &Path) -> Option<KeptLayer> {
        self.0.kept(image)
    }

    fn resolve(&self, referrer: &Path, name: &str) -> PathBuf {
        self.0.resolve(referrer, name)
    }
}

impl Host for AnyHost {
    type File = AnyFile;

    async fn open(&self, name: &Path, mode: OpenMode) -> Result<AnyFile> {
        self.0.open(name, mode).await
    }

    async fn create(&self, name: &Path, mode: OpenMode) -> Result<AnyFile> {
        self.0.create(name, mode).await
    }

    async fn create_unlike(
        &self,
        name: &Path,
        mode: OpenMode,
        spared: &dyn Fn(FileId) -> bool,
    ) -> Result<Option<Made<AnyFile>>> {
        self.0.create_unlike(name, mode, spared).await
    }

    async fn remove(&self, name: &Path) -> Result<()> {
        self.0.remove(name).await
    }

    async fn remove_file(&self, name: &Path, file: &AnyFile) -> Result<bool> {
        self.0.remove_file(name, file).await
    }

    fn canonical(&self, name: &Path) -> Result<PathBuf> {
        self.0.canonical(name)
    }

    fn find(&self, name: &Path) -> Result<Option<FileId>> {
        self.0.find(name)
    }

    fn protocol_name(&self, name: &str) -> bool {
        self.0.protocol_name(name)
    }

    fn is_no_path(&self, name: &str) -> bool {
        self.0.is_no_path(name)
    }

    fn index_of(&self, top: &Path) -> Option<IndexFile> {
        self.0.index_of(top)
    }

    fn kept(&self, image: &Path) -> Option<KeptLayer> {
        self.0.kept(image)
    }

    fn resolve(&self, referrer: &Path, name: &str) -> PathBuf {
        self.0.resolve(referrer, name)
    }
}

trait DynFile: Send + Sync {
    fn as_any(&self) -> &dyn Any;
    fn identity(&self) -> Identity<'_>;
    fn capabilities(&self) -> Capabilities;
    fn extensions(&self) -> Extensions<'_, AnyFile>;
    fn read_at(&self, offset: u64, buf: IoBuf) -> BoxFuture<'_, Result<IoBuf>>;
    fn write_vectored_at(&self, offset: u64, bufs: Vec<IoBuf>)
    -> BoxFuture<'_, Result<Vec<IoBuf>>>;
    fn write_one_at(&self, offset: u64, buf: IoBuf) -> BoxFuture<'_, Result<IoBuf>>;
    fn write_zeroes(&self, offset: u64, length: u64, mode: ZeroMode) -> BoxFuture<'_, Result<()>>;
    fn discard(&self, offset: u64, length: u64) -> BoxFuture<'_, Result<()>>;
    fn flush(&self) -> BoxFuture<'_, Result<()>>;
    fn len(&self) -> BoxFuture<'_, Result<u64>>;
    fn set_len(&self, length: u64) -> BoxFuture<'_, Result<()>>;
    fn allocation(&self, offset: u64) -> BoxFuture<'_, Result<Allocation>>;
    fn real_path(&self) -> BoxFuture<'_, Result<PathBuf>>;
}

impl<S: Storage> DynFile for Typed<S> {
    fn as_any(&self) -> &dyn Any {
        self
    }

    fn identity(&self) -> Identity<'_> {
        self.0.identity()
    }

    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    fn extensions(&self) -> Extensions<'_, AnyFile> {
        let inner = self.0.extensions();
        let reflink = inner.reflink.is_some();
        inner.with_reflink(reflink.then_some(self as &dyn Reflink<AnyFile>))
    }

    fn read_at(&self, offset: u64, buf: IoBuf) -> BoxFuture<'_, Result<IoBuf>> {
        Box::pin(self.0.read_at(offset, buf))
    }

    fn write_vectored_at(
        &self,
        offset: u64,
        bufs: Vec<IoBuf>,
    ) -> BoxFuture<'_, Result<Vec<IoBuf>>> {
        Box::pin(self.0.write_vectored_at(offset, bufs))
    }

    fn write_one_at(&self, offset: u64, buf: IoBuf) -> BoxFuture<'_, Result<IoBuf>> {
        Box::pin(self.0.write_one_at(offset, buf))
    }

    fn write_zeroes(&self, offset: u64, length: u64, mode: ZeroMode) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.0.write_zeroes(offset, length, mode))
    }

    fn discard(&self, offset: u64, length: u64) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.0.discard(offset, length))
    }

    fn flush(&self) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.0.flush())
    }

    fn len(&self) -> BoxFuture<'_, Result<u64>> {
        Box::pin(self.0.len())
    }

    fn set_len(&self, length: u64) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.0.set_len(length))
    }

    fn allocation(&self, offset: u64) -> BoxFuture<'_, Result<Allocation>> {
        Box::pin(self.0.allocation(offset))
    }

    fn real_path(&self) -> BoxFuture<'_, Result<PathBuf>> {
        Box::pin(self.0.real_path())
    }
}

impl<S: Storage> Reflink<AnyFile> for Typed<S> {
    fn clone_range<'a>(
        &'a self,
        from: &'a AnyFile,
        from_offset: u64,
        to_offset: u64,
        length: u64,
    ) -> BoxFuture<'a, Result<bool>> {
        Box::pin(async move {
            match from.0.as_any().downcast_ref::<Self>() {
                Some(from) => self.0.clone_range(&from.0, from_offset, to_offset, length).await,
                // A file of another host.
                None => Ok(false),
            }
        })
    }
}

impl Storage for AnyFile {
    fn identity(&self) -> Identity<'_> {
        self.0.identity()
    }

    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }

    fn extensions(&self) -> Extensions<'_, Self> {
        self.0.extensions()
    }

    async fn read_at(&self, offset: u64, buf: IoBuf) -> Result<IoBuf> {
        self.0.read_at(offset, buf).await
    }

    async fn write_vectored_at(&self, offset: u64, bufs: Vec<IoBuf>) -> Result<Vec<IoBuf>> {
        self.0.write_vectored_at(offset, bufs).await
    }

    async fn write_one_at(&self, offset: u64, buf: IoBuf) -> Result<IoBuf> {
        self.0.write_one_at(offset, buf).await
    }

    async fn write_zeroes(&self, offset: u64, length: u64, mode: ZeroMode) -> Result<()> {
        self.0.write_zeroes(offset, length, mode).await
    }

    async fn discard(&self, offset: u64, length: u64) -> Result<()> {
        self.0.discard(offset, length).await
    }

    async fn flush(&self) -> Result<()> {
        self.0.flush().await
    }

    async fn len(&self) -> Result<u64> {
        self.0.len().await
    }

    async fn set_len(&self, length: u64) -> Result<()> {
        self.0.set_len(length).await
    }

    async fn allocation(&self, offset: u64) -> Result<Allocation> {
        self.0.allocation(offset).await
    }

    async fn real_path(&self) -> Result<PathBuf> {
        self.0.real_path().await
    }
}
