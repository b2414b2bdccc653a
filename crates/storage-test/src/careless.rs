//! A host that, with its files, can break what [`Host`] and [`Storage`] promise: to find out whether those who rely on
//! it would notice.

use isobath_storage::{
    Allocation, Capabilities, FileId, Host, Identity, IndexFile, IoBuf, KeptLayer, Made, OpenMode,
    Result, Storage, StorageExt as _, ZeroMode,
};
use parking_lot::Mutex;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// What a careless host or file does wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Slip {
    /// Nothing.
    #[default]
    None,
    /// A read gives back a buffer without its last sector.
    ShortRead,
    /// A read gives back a buffer with another sector, of ones, at its end.
    LongRead,
    /// A write gives back one buffer less.
    LostBuffer,
    /// A write gives back buffers without their last sectors.
    ShortBuffers,
    /// A write changes nothing.
    LostWrite,
    /// [`Host::create_unlike`] empties a file that is to be spared.
    SparesNone,
    /// Another program replaces a file, with [`ANOTHERS`], right before it is removed: no slip of the host's.
    ReplacedBeforeRemoval,
}

/// The contents of a file that replaces another.
pub const ANOTHERS: &[u8] = b"another's";

/// What a host and all its files do wrong from now on.
#[derive(Clone, Debug, Default)]
pub struct Slips(Arc<Mutex<Slip>>);

impl Slips {
    /// They do this wrong from now on.
    pub fn set(&self, slip: Slip) {
        *self.0.lock() = slip;
    }

    fn is(&self, slip: Slip) -> bool {
        *self.0.lock() == slip
    }
}

/// A host that wraps another, and is careful at first.
#[derive(Clone, Debug, Default)]
pub struct CarelessHost<H> {
    inner: H,
    slips: Slips,
}

/// A file of a [`CarelessHost`].
#[derive(Debug)]
pub struct CarelessFile<S> {
    inner: S,
    slips: Slips,
}

impl<H: Host> CarelessHost<H> {
    /// Wraps a host.
    pub fn around(inner: H) -> Self {
        Self { inner, slips: Slips::default() }
    }

    /// What its files do wrong.
    pub fn slips(&self) -> &Slips {
        &self.slips
    }

    /// The wrapped host.
    pub fn inner(&self) -> &H {
        &self.inner
    }

    /// Has another program replace a file, if it does so now.
    async fn replace(&self, name: &Path) -> Result<()> {
        if self.slips.is(Slip::ReplacedBeforeRemoval) {
            self.inner.remove(name).await?;
            let file = self.inner.create(name, OpenMode::default()).await?;
            file.write_at(0, IoBuf::copy_of(ANOTHERS)).await?;
        }
        Ok(())
    }

    fn wrap(&self, inner: H::File) -> CarelessFile<H::File> {
        CarelessFile { inner, slips: self.slips.clone() }
    }
}

impl<H: Host> Host for CarelessHost<H> {
    type File = CarelessFile<H::File>;

    async fn open(&self, name: &Path, mode: OpenMode) -> Result<Self::File> {
        Ok(self.wrap(self.inner.open(name, mode).await?))
    }

    async fn create(&self, name: &Path, mode: OpenMode) -> Result<Self::File> {
        Ok(self.wrap(self.inner.create(name, mode).await?))
    }

    async fn create_unlike(
        &self,
        name: &Path,
        mode: OpenMode,
        spared: &dyn Fn(FileId) -> bool,
    ) -> Result<Option<Made<Self::File>>> {
        let spared = |id| spared(id) && !self.slips.is(Slip::SparesNone);
        let made = self.inner.create_unlike(name, mode, &spared).await?;
        Ok(made.map(|Made { file, is_new }| Made { file: self.wrap(file), is_new }))
    }

    async fn remove(&self, name: &Path) -> Result<()> {
        self.replace(name).await?;
        self.inner.remove(name).await
    }

    async fn remove_file(&self, name: &Path, file: &Self::File) -> Result<bool> {
        self.replace(name).await?;
        self.inner.remove_file(name, &file.inner).await
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

const SECTOR: usize = isobath_storage::SECTOR as usize;

impl<S: Storage> Storage for CarelessFile<S> {
    fn identity(&self) -> Identity<'_> {
        self.inner.identity()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    async fn read_at(&self, offset: u64, buf: IoBuf) -> Result<IoBuf> {
        let mut buf = self.inner.read_at(offset, buf).await?;
        if self.slips.is(Slip::ShortRead) {
            return Ok(buf.split_to(buf.len().saturating_sub(SECTOR)));
        }
        if self.slips.is(Slip::LongRead) {
            return Ok(IoBuf::copy_of(&[&*buf, &[1; SECTOR]].concat()));
        }
        Ok(buf)
    }

    async fn write_vectored_at(&self, offset: u64, bufs: Vec<IoBuf>) -> Result<Vec<IoBuf>> {
        if self.slips.is(Slip::LostWrite) {
            return Ok(bufs);
        }
        let mut bufs = self.inner.write_vectored_at(offset, bufs).await?;
        if self.slips.is(Slip::LostBuffer) {
            bufs.pop();
        }
        if self.slips.is(Slip::ShortBuffers) {
            let short = |buf: &mut IoBuf| *buf = buf.split_to(buf.len().saturating_sub(SECTOR));
            bufs.iter_mut().for_each(short);
        }
        Ok(bufs)
    }

    async fn write_one_at(&self, offset: u64, buf: IoBuf) -> Result<IoBuf> {
        if self.slips.is(Slip::LostWrite) {
            return Ok(buf);
        }
        self.inner.write_at(offset, buf).await
    }

    async fn write_zeroes(&self, offset: u64, length: u64, mode: ZeroMode) -> Result<()> {
        self.inner.write_zeroes(offset, length, mode).await
    }

    async fn flush(&self) -> Result<()> {
        self.inner.flush().await
    }

    async fn len(&self) -> Result<u64> {
        self.inner.len().await
    }

    async fn set_len(&self, length: u64) -> Result<()> {
        self.inner.set_len(length).await
    }

    async fn allocation(&self, offset: u64) -> Result<Allocation> {
        self.inner.allocation(offset).await
    }

    async fn real_path(&self) -> Result<PathBuf> {
        self.inner.real_path().await
    }
}
