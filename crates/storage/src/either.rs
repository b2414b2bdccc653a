//! Two hosts as one: a file's name decides which host it is on.
//!
//! So the layers of a chain may be of different kinds, such as an active layer whose backing files are stored
//! elsewhere. A request takes one branch more than on the host itself. More than two hosts are pairs of pairs.

use crate::error::{Operation, StorageError};
use crate::{
    Allocation, BoxFuture, Capabilities, Extensions, FileId, Host, Identity, IndexFile, IoBuf,
    KeptLayer, Made, OpenMode, Reflink, Result, Storage, ZeroMode,
};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// One of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// The first host.
    First,
    /// The second host.
    Second,
}

type Rule = dyn Fn(&Path) -> Side + Send + Sync;

/// A host whose files are on two others. Clones share the files as clones of those hosts do.
#[derive(Clone)]
pub struct EitherHost<A, B> {
    first: A,
    second: B,
    rule: Arc<Rule>,
}

impl<A: Host, B: Host> EitherHost<A, B> {
    /// Combines two hosts. `rule` decides where a name, as given to [`Host::open`], belongs; the same name must always
    /// get the same answer. A name in an image is [resolved](Host::resolve) first: by the host whose
    /// [protocol](Host::protocol_name) it has, or by the host of that image.
    pub fn new(first: A, second: B, rule: impl Fn(&Path) -> Side + Send + Sync + 'static) -> Self {
        Self { first, second, rule: Arc::new(rule) }
    }
}

impl<A: fmt::Debug, B: fmt::Debug> fmt::Debug for EitherHost<A, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EitherHost")
            .field("first", &self.first)
            .field("second", &self.second)
            .finish_non_exhaustive()
    }
}

/// The futures that open a file are boxed: they are large, and need not be in those of everything that opens one.
impl<A: Host, B: Host> Host for EitherHost<A, B> {
    type File = EitherFile<A::File, B::File>;

    async fn open(&self, name: &Path, mode: OpenMode) -> Result<Self::File> {
        match (self.rule)(name) {
            Side::First => Ok(EitherFile::First(Box::pin(self.first.open(name, mode)).await?)),
            Side::Second => Ok(EitherFile::Second(Box::pin(self.second.open(name, mode)).await?)),
        }
    }

    async fn create(&self, name: &Path, mode: OpenMode) -> Result<Self::File> {
        match (self.rule)(name) {
            Side::First => Ok(EitherFile::First(Box::pin(self.first.create(name, mode)).await?)),
            Side::Second => Ok(EitherFile::Second(Box::pin(self.second.create(name, mode)).await?)),
        }
    }

    async fn create_unlike(
        &self,
        name: &Path,
        mode: OpenMode,
        spared: &dyn Fn(FileId) -> bool,
    ) -> Result<Option<Made<Self::File>>> {
        fn map<F, G>(made: Option<Made<F>>, to: impl FnOnce(F) -> G) -> Option<Made<G>> {
            made.map(|Made { file, is_new }| Made { file: to(file), is_new })
        }
        match (self.rule)(name) {
            Side::First => {
                let made =
                    Box::pin(self.first.create_unlike(name, mode, &|id| {
                        spared(Self::File::id_of(Side::First, id))
                    }))
                    .await?;
                Ok(map(made, EitherFile::First))
            }
            Side::Second => {
                let made =
                    Box::pin(self.second.create_unlike(name, mode, &|id| {
                        spared(Self::File::id_of(Side::Second, id))
                    }))
                    .await?;
                Ok(map(made, EitherFile::Second))
            }
        }
    }

    async fn remove(&self, name: &Path) -> Result<()> {
        match (self.rule)(name) {
            Side::First => self.first.remove(name).await,
            Side::Second => self.second.remove(name).await,
        }
    }

    async fn remove_file(&self, name: &Path, file: &Self::File) -> Result<bool> {
        match ((self.rule)(name), file) {
            (Side::First, EitherFile::First(file)) => self.first.remove_file(name, file).await,
            (Side::Second, EitherFile::Second(file)) => self.second.remove_file(name, file).await,
            _ => Ok(false),
        }
    }

    /// # Errors
    /// Those of the name's host; or the file's canonical name belongs to the other host.
    fn canonical(&self, name: &Path) -> Result<PathBuf> {
        let side = (self.rule)(name);
        let canonical = match side {
            Side::First => self.first.canonical(name),
            Side::Second => self.second.canonical(name),
        }?;
        if (self.rule)(&canonical) != side {
            let text = format!(
                "it is a link to '{}', a name that belongs to another host",
                crate::shown(&canonical)
            );
            let source = io::Error::new(io::ErrorKind::CrossesDevices, text);
            return Err(StorageError::new(Operation::Query, name, source));
        }
        Ok(canonical)
    }

    fn find(&self, name: &Path) -> Result<Option<FileId>> {
        let side = (self.rule)(name);
        let found = match side {
            Side::First => self.first.find(name),
            Side::Second => self.second.find(name),
        }?;
        Ok(found.map(|id| Self::File::id_of(side, id)))
    }

    fn protocol_name(&self, name: &str) -> bool {
        self.first.protocol_name(name) || self.second.protocol_name(name)
    }

    fn is_no_path(&self, name: &str) -> bool {
        self.first.is_no_path(name) || self.second.is_no_path(name)
    }

    fn index_of(&self, top: &Path) -> Option<IndexFile> {
        let side = (self.rule)(top);
        let mut index = match side {
            Side::First => self.first.index_of(top),
            Side::Second => self.second.index_of(top),
        }?;
        for file in &mut index.layers {
            *file = Self::File::id_of(side, *file);
        }
        Some(index)
    }

    fn kept(&self, image: &Path) -> Option<KeptLayer> {
        match (self.rule)(image) {
            Side::First => self.first.kept(image),
            Side::Second => self.second.kept(image),
        }
    }

    fn resolve(&self, referrer: &Path, name: &str) -> PathBuf {
        if self.first.protocol_name(name) {
            return self.first.resolve(referrer, name);
        }
        if self.second.protocol_name(name) {
            return self.second.resolve(referrer, name);
        }
        match (self.rule)(referrer) {
            Side::First => self.first.resolve(referrer, name),
            Side::Second => self.second.resolve(referrer, name),
        }
    }
}

/// A file of one of two hosts.
#[derive(Debug)]
pub enum EitherFile<A, B> {
    /// A file of the first host.
    First(A),
    /// A file of the second host.
    Second(B),
}

impl<A, B> EitherFile<A, B> {
    /// What identifies a file here that has this id on its own host.
    pub fn id_of(side: Side, id: FileId) -> FileId {
        // Hosts may use the same device numbers: the lowest bit distinguishes them. Linux's numbers have 32 bits.
        let lowest = match side {
            Side::First => 0,
            Side::Second => 1,
        };
        FileId { device: id.device << 1 | lowest, ..id }
    }
}

/// Calls the same on whichever variant it is.
macro_rules! either {
    ($file:expr, $inner:ident => $result:expr) => {
        match $file {
            EitherFile::First($inner) => $result,
            EitherFile::Second($inner) => $result,
        }
    };
}

impl<A: Storage, B: Storage> Storage for EitherFile<A, B> {
    fn identity(&self) -> Identity<'_> {
        let (Identity { name, id }, side) = match self {
            Self::First(file) => (file.identity(), Side::First),
            Self::Second(file) => (file.identity(), Side::Second),
        };
        Identity { name, id: Self::id_of(side, id) }
    }

    fn capabilities(&self) -> Capabilities {
        either!(self, file => file.capabilities())
    }

    fn extensions(&self) -> Extensions<'_, Self> {
        either!(self, file => {
            let extensions = file.extensions();
            let reflink = extensions.reflink.is_some();
            extensions.with_reflink(reflink.then_some(self as &dyn Reflink<Self>))
        })
    }

    async fn read_at(&self, offset: u64, buf: IoBuf) -> Result<IoBuf> {
        either!(self, file => file.read_at(offset, buf).await)
    }

    async fn write_vectored_at(&self, offset: u64, bufs: Vec<IoBuf>) -> Result<Vec<IoBuf>> {
        either!(self, file => file.write_vectored_at(offset, bufs).await)
    }

    async fn write_one_at(&self, offset: u64, buf: IoBuf) -> Result<IoBuf> {
        either!(self, file => file.write_one_at(offset, buf).await)
    }

    async fn write_zeroes(&self, offset: u64, length: u64, mode: ZeroMode) -> Result<()> {
        either!(self, file => file.write_zeroes(offset, length, mode).await)
    }

    async fn discard(&self, offset: u64, length: u64) -> Result<()> {
        either!(self, file => file.discard(offset, length).await)
    }

    async fn flush(&self) -> Result<()> {
        either!(self, file => file.flush().await)
    }

    async fn len(&self) -> Result<u64> {
        either!(self, file => file.len().await)
    }

    async fn set_len(&self, length: u64) -> Result<()> {
        either!(self, file => file.set_len(length).await)
    }

    async fn allocation(&self, offset: u64) -> Result<Allocation> {
        either!(self, file => file.allocation(offset).await)
    }

    async fn real_path(&self) -> Result<PathBuf> {
        either!(self, file => file.real_path().await)
    }
}

/// Files share space only within a host.
impl<A: Storage, B: Storage> Reflink<Self> for EitherFile<A, B> {
    fn clone_range<'a>(
        &'a self,
        from: &'a Self,
        from_offset: u64,
        to_offset: u64,
        length: u64,
    ) -> BoxFuture<'a, Result<bool>> {
        match (self, from) {
            (Self::First(to), Self::First(from)) => {
                Box::pin(to.clone_range(from, from_offset, to_offset, length))
            }
            (Self::Second(to), Self::Second(from)) => {
                Box::pin(to.clone_range(from, from_offset, to_offset, length))
            }
            _ => Box::pin(async { Ok(false) }),
        }
    }
}
