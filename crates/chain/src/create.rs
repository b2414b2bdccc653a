//! Creating images.

use crate::chain::Chain;
use crate::index::{Built, Folding, IndexLimits, NoIndex, Place, build};
use crate::open::open_chain;
use isobath_image::encryption::{Secrets, keys_on_thread};
use isobath_image::layer::ImageFormat;
use isobath_image::name::{backing_format, name_in_header};
use isobath_image::open::DATA_FILE;
use isobath_image::options::{OpenOptions, Trust, setters};
use isobath_image::{DiskError, Result, invariant};
use isobath_luks::{CreateOptions, Secret, system_random};
use isobath_qcow2::index::{BlockHash, IndexExtension};
use isobath_qcow2::{CompressionType, FormatError, HostOffset, NewImage, Plan};
use isobath_storage::{
    FileId, Host, IoBuf, Layout, Locking, Made, OpenMode, Storage, StorageError, StorageExt,
    ZeroMode, shown,
};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes of an encryption header before its key material.
const HEADER: usize = 4096;

/// Zeroes written at once for [`Preallocation::Full`].
const CHUNK: u64 = 1 << 20;

/// What is allocated for the new part of a disk that grows (`--preallocation`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preallocation {
    /// Nothing.
    #[default]
    Off,
    /// Tables and clusters, which take no space in the host's file system yet.
    Metadata,
    /// Tables and clusters, with space reserved by the host's file system.
    Falloc,
    /// Tables and clusters, filled with zeroes.
    Full,
}

impl Preallocation {
    /// QEMU's name of the mode.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Metadata => "metadata",
            Self::Falloc => "falloc",
            Self::Full => "full",
        }
    }

    /// The mode of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Off, Self::Metadata, Self::Falloc, Self::Full]
            .into_iter()
            .find(|mode| mode.name() == name)
    }
}

/// A disk to create: qemu-img's options and defaults.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NewDisk {
    /// The disk's size in bytes; rounded up to a multiple of 512. `None` takes the backing file's.
    pub size: Option<u64>,
    /// The image's format.
    pub format: ImageFormat,
    /// Bytes in a cluster, a power of two from 512 to 2 MiB.
    pub cluster_size: u64,
    /// The qcow2 version: 2 (`compat=0.10`) or 3 (`compat=1.1`).
    pub version: u32,
    /// Bits in a refcount, a power of two from 1 to 64.
    pub refcount_bits: u32,
    /// L2 entries with subclusters.
    pub extended_l2: bool,
    /// The compression of compressed clusters.
    pub compression_type: CompressionType,
    /// Refcounts may be updated late.
    pub lazy_refcounts: bool,
    /// What is allocated now.
    pub preallocation: Preallocation,
    /// The external data file's name, as the image will hold it.
    pub data_file: Option<String>,
    /// The external data file must stay valid as a raw image.
    pub data_file_raw: bool,
    /// The backing file's name, as the image will hold it.
    pub backing_file: Option<String>,
    /// The backing file's format; must be given with `backing_file`.
    pub backing_format: Option<String>,
    /// Open the backing file, to check it and to get its size. Without this (`-u`) `size` is required.
    pub open_backing: bool,
    /// Encrypt the guest's data.
    pub encryption: Option<NewEncryption>,
    /// How the host lays out the files.
    pub layout: Layout,
    /// The image's file is a device that there is already; nothing else is created or overwritten in its place.
    pub on_device: bool,
    /// Write the direct-access index of the layers below. It needs an open backing file, and is omitted if the chain is
    /// not suited.
    pub index: bool,
    /// What that may cost.
    pub index_limits: IndexLimits,
}

impl Default for NewDisk {
    fn default() -> Self {
        Self {
            size: None,
            format: ImageFormat::Qcow2,
            cluster_size: 1 << 16,
            version: 3,
            refcount_bits: 16,
            extended_l2: false,
            compression_type: CompressionType::Zlib,
            lazy_refcounts: false,
            preallocation: Preallocation::Off,
            data_file: None,
            data_file_raw: false,
            backing_file: None,
            backing_format: None,
            open_backing: true,
            encryption: None,
            layout: Layout::default(),
            on_device: false,
            index: true,
            index_limits: IndexLimits::default(),
        }
    }
}

impl NewDisk {
    /// A qcow2 image of `size` bytes without a backing file.
    pub fn new(size: u64) -> Self {
        Self { size: Some(size), ..Self::default() }
    }

    /// A qcow2 overlay of the image `backing_file` in that format, of the same size.
    pub fn overlay(backing_file: impl Into<String>, format: impl Into<String>) -> Self {
        Self::default().backing_file(backing_file, format)
    }

    /// Sets [`backing_file`](Self::backing_file) and [`backing_format`](Self::backing_format).
    #[must_use]
    pub fn backing_file(mut self, name: impl Into<String>, format: impl Into<String>) -> Self {
        self.backing_file = Some(name.into());
        self.backing_format = Some(format.into());
        self
    }

    /// Sets [`data_file`](Self::data_file).
    #[must_use]
    pub fn data_file(mut self, name: impl Into<String>) -> Self {
        self.data_file = Some(name.into());
        self
    }
}

/// How a new image is encrypted.
#[derive(Clone, Debug)]
pub struct NewEncryption {
    /// The cipher, and how its key is derived from a secret.
    pub options: CreateOptions,
    /// The secret that unlocks the image.
    pub secret: Arc<Secret>,
}

impl NewEncryption {
    /// AES-256 in mode XTS, as QEMU encrypts by default.
    pub fn new(secret: impl Into<Arc<Secret>>) -> Self {
        Self { options: CreateOptions::default(), secret: secret.into() }
    }
}

impl PartialEq for NewEncryption {
    /// Secrets are equal only if they are one.
    fn eq(&self, other: &Self) -> bool {
        self.options == other.options && Arc::ptr_eq(&self.secret, &other.secret)
    }
}

impl Eq for NewEncryption {}

setters! {
    NewDisk:
    size: u64,
    format: ImageFormat,
    cluster_size: u64,
    version: u32,
    refcount_bits: u32,
    extended_l2: bool,
    compression_type: CompressionType,
    lazy_refcounts: bool,
    preallocation: Preallocation,
    data_file_raw: bool,
    open_backing: bool,
    encryption: Option<NewEncryption>,
    layout: Layout,
    on_device: bool,
    index: bool,
    index_limits: IndexLimits,
}

/// Creates an image, durably, replacing an existing file that is not in use. Returns the disk's size in bytes.
///
/// # Errors
/// If options exclude each other, the size is not given and cannot be taken from a backing file, the
/// backing file cannot be opened or is named without its format, the file is in use or is the
/// backing file itself, or the storage fails. A new file is then removed.
pub async fn create<H: Host>(host: &H, name: &Path, new: &NewDisk) -> Result<u64> {
    create_held(host, name, new).await.map(|created| created.size())
}

/// As [`create`]. No other program can write to the files, or replace the image by a newer one, until what this returns
/// is dropped.
///
/// # Errors
/// As [`create`].
pub async fn create_held<'a, H: Host>(
    host: &'a H,
    name: &Path,
    new: &NewDisk,
) -> Result<Created<'a, H>> {
    create_held_beside(host, name, new, &[]).await
}

/// As [`create_held`], for a copy of disks that have these files: none of them is replaced.
///
/// # Errors
/// As [`create`], and if a file of the image is one of them.
pub async fn create_held_beside<'a, H: Host>(
    host: &'a H,
    name: &Path,
    new: &NewDisk,
    sources: &[FileId],
) -> Result<Created<'a, H>> {
    let prepared = prepare(host, name, new).await?;
    let keys = match &prepared.new.encryption {
        Some(encryption) => {
            let keys = new_keys(name, encryption.clone()).await?;
            let planned = encryption.options.area_length();
            let fits = keys.len() as u64 == planned;
            invariant(fits, name, "an encryption header has its own length")?;
            keys
        }
        None => Vec::new(),
    };
    prepared.write(host, name, sources, &keys, false).await
}

/// All that new images of one kind have in common. While this is there, no command that looks at locks deletes their
/// backing file.
pub(crate) struct Prepared<S> {
    new: NewDisk,
    size: u64,
    index_left: bool,
    /// The layout of a qcow2 image and the bytes of its index.
    plan: Option<(Plan, Vec<u8>)>,
    /// The files of the backing chain.
    chain: Arc<[FileId]>,
    _present: Option<S>,
}

/// Checks the options of an image, opens its backing chain, and plans what the image will hold.
pub(crate) async fn prepare<H: Host>(
    host: &H,
    name: &Path,
    new: &NewDisk,
) -> Result<Prepared<H::File>> {
    let refused =
        |reason: &str| DiskError::Refused { image: name.to_owned(), reason: reason.into() };
    let mut new = new.clone();
    if new.backing_file.as_deref() == Some("") {
        new.backing_file = None;
    }
    let backing = backing(host, name, &new).await?;
    let mut others: Vec<FileId> = Vec::new();
    if let Some(Backing { chain, .. }) = &backing {
        others.extend(chain.layers().flat_map(|(_, layer)| layer.files()).map(StorageExt::id));
        new.size = new.size.or(Some(chain.active().size()));
    }
    let size = new.size.ok_or_else(|| refused("Image creation needs a size parameter"))?;
    let size = size
        .checked_next_multiple_of(512)
        .filter(|size| i64::try_from(*size).is_ok())
        .ok_or_else(|| refused("the size must be below 8 EiB"))?;
    let mut index_left = false;
    let plan = match new.format {
        ImageFormat::Qcow2 => {
            // The options are checked before the chain is looked at.
            let plain = plan(name, &new, size, None)?;
            let index = match &backing {
                Some(backing) if new.index => index_of(host, backing, &new).await?,
                _ => Err(NoIndex::Unsuited),
            };
            index_left = matches!(index, Err(NoIndex::Much)) && has_room(name, &new, size);
            // If the header has no room for the extension, the index is omitted.
            let indexed = index.ok().and_then(|index| {
                let plan = plan(name, &new, size, Some(index.extension)).ok()?;
                index_left = index.deferred;
                Some((plan, index.bytes))
            });
            Some(indexed.unwrap_or((plain, Vec::new())))
        }
        ImageFormat::Raw => {
            check_plain(name, &new)?;
            None
        }
        ImageFormat::Luks => {
            check_plain(name, &NewDisk { encryption: None, ..new.clone() })?;
            if new.encryption.is_none() {
                return Err(refused("Parameter 'key-secret' is required for cipher"));
            }
            None
        }
        ImageFormat::Foreign(format) => {
            return Err(DiskError::Refused {
                image: name.to_owned(),
                reason: format!(
                    "Format driver '{}' does not support image creation",
                    format.name()
                ),
            });
        }
    };
    // Writers are let in again. What an index describes has stamps.
    let present = backing.and_then(|backing| backing.present);
    Ok(Prepared { new, size, index_left, plan, chain: others.into(), _present: present })
}

impl<S: Storage> Prepared<S> {
    /// The disk's size in bytes.
    pub(crate) fn size(&self) -> u64 {
        self.size
    }

    /// As [`Created::is_index_left`].
    pub(crate) fn is_index_left(&self) -> bool {
        self.index_left
    }

    /// Makes an image with the encryption header `keys`. If it is to be `fresh`, a file of that name is an error.
    pub(crate) async fn write<'a, H: Host<File = S>>(
        &self,
        host: &'a H,
        name: &Path,
        sources: &[FileId],
        keys: &[u8],
        fresh: bool,
    ) -> Result<Created<'a, H>> {
        let new = &self.new;
        let mut created = Created {
            host,
            size: self.size,
            index_left: self.index_left,
            layout: new.layout,
            sources: sources.to_vec(),
            chain: Arc::clone(&self.chain),
            on_device: new.on_device,
            fresh,
            files: Vec::new(),
        };
        let result = match &self.plan {
            Some((plan, index)) => {
                let contents = Contents { plan, index, keys };
                write_qcow2(&mut created, name, new, contents).await
            }
            None => write_plain(&mut created, name, self.size, new.preallocation, keys).await,
        };
        match result {
            Ok(()) => Ok(created),
            Err(error) => {
                created.files.retain(|file| file.is_new);
                created.remove().await;
                Err(error)
            }
        }
    }
}

/// The encryption header of a new image, with a new key.
async fn new_keys(name: &Path, encryption: NewEncryption) -> Result<Vec<u8>> {
    let made = keys_on_thread(name, move || {
        let NewEncryption { options, secret } = encryption;
        options.create(&secret, &mut system_random).map(|made| made.area)
    });
    made.await?
        .map_err(|error| DiskError::Refused { image: name.to_owned(), reason: error.to_string() })
}

/// The backing file of a new image, with those below it. While this is there, it is not deleted by a command that looks
/// at locks.
struct Backing<S> {
    present: Option<S>,
    chain: Chain<S>,
    /// Writers are kept out of them.
    frozen: bool,
}

/// Checks the backing file that `new` names.
async fn backing<H: Host>(
    host: &H,
    name: &Path,
    new: &NewDisk,
) -> Result<Option<Backing<H::File>>> {
    let refused = |reason: String| DiskError::Refused { image: name.to_owned(), reason };
    let Some(file) = &new.backing_file else {
        if new.backing_format.is_some() && new.format != ImageFormat::Qcow2 {
            let format = new.format.name();
            return Err(refused(format!(
                "Backing file format not supported for file format '{format}'"
            )));
        }
        return Ok(None);
    };
    if new.format != ImageFormat::Qcow2 {
        let format = new.format.name();
        return Err(refused(format!("Backing file not supported for file format '{format}'")));
    }
    let plain = name_in_header(host, name, "backing file", file, &Trust::Full);
    let path = plain.as_ref().ok().map(|plain| host.resolve(name, plain));
    if path.as_deref() == Some(name) {
        return Err(refused(
            "Error: Trying to create an image with the same filename as the backing file".into(),
        ));
    }
    let unsuitable = |source: DiskError| DiskError::Backing {
        overlay: name.to_owned(),
        source: Box::new(source),
    };
    let present = OpenMode { locking: Locking::Present, ..OpenMode::default() };
    if let (None, true, Some(path)) = (&new.backing_format, new.open_backing, &path) {
        // That there is no such file says more than that its format is missing.
        host.open(path, present).await.map_err(|error| unsuitable(error.into()))?;
    }
    // Probing the format of a raw disk would let its guest choose what is opened.
    let Some(format) = &new.backing_format else {
        return Err(refused("Backing file specified without backing format".into()));
    };
    backing_format(name, file, Some(format))?;
    if !new.open_backing {
        return Ok(None);
    }
    let format = ImageFormat::of_backing(format)
        .ok_or_else(|| refused(format!("Unknown driver '{}'", format.escape_debug())))?;
    let path = host.resolve(name, &plain?);
    let options = OpenOptions::new().format(format).secrets(Secrets::unneeded());
    let options = options.index(host.kept(&path).is_none());
    let present = match host.open(&path, present).await {
        Ok(file) => Some(file),
        Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
            return Err(unsuitable(error.into()));
        }
        // The chain's error says more.
        Err(_) => None,
    };
    if new.index {
        // What an index describes must not change between the first look at a file's tables and its stamp.
        let chain = open_chain(host, &path, &options.clone().locking(Locking::Immediate)).await;
        if let Ok(chain) = chain {
            return Ok(Some(Backing { present, chain, frozen: true }));
        }
    }
    // Others may be using it: it is enough that it can be opened.
    let chain = open_chain(host, &path, &options.locking(Locking::Unlocked)).await;
    let chain = chain.map_err(unsuitable)?;
    Ok(Some(Backing { present, chain, frozen: false }))
}

/// The backing chain of a new image, kept from being written to while this is there.
///
/// # Errors
/// Another program has a file of it open for writing, or it cannot be opened.
pub(crate) async fn unwritten<H: Host>(
    host: &H,
    name: &Path,
    new: &NewDisk,
) -> Result<Option<Chain<H::File>>> {
    let (Some(file), Some(format)) = (&new.backing_file, &new.backing_format) else {
        return Ok(None);
    };
    backing_format(name, file, Some(format))?;
    let refused = |reason| DiskError::Refused { image: name.to_owned(), reason };
    let format = ImageFormat::of_backing(format)
        .ok_or_else(|| refused(format!("Unknown driver '{}'", format.escape_debug())))?;
    let path = host.resolve(name, &name_in_header(host, name, "backing file", file, &Trust::Full)?);
    let options = OpenOptions::new().format(format).secrets(Secrets::unneeded());
    let options = options.index(host.kept(&path).is_none());
    let chain = open_chain(host, &path, &options.locking(Locking::Immediate)).await;
    let unsuitable = |source: DiskError| DiskError::Backing {
        overlay: name.to_owned(),
        source: Box::new(source),
    };
    chain.map(Some).map_err(unsuitable)
}

/// The index for the overlay of a chain, if the chain is suited.
async fn index_of<H: Host>(
    host: &H,
    backing: &Backing<H::File>,
    new: &NewDisk,
) -> Result<std::result::Result<Built, NoIndex>> {
    let chain = &backing.chain;
    // Whether an index still fits is found out by opening the layers, and a server may admit one client only once.
    if chain.layers().any(|(_, layer)| host.protocol_name(&layer.name().to_string_lossy())) {
        return Ok(Err(NoIndex::Unsuited));
    }
    let place = Place {
        at: HostOffset::new(new.cluster_size),
        cluster_size: new.cluster_size,
        position: chain.depth() as u32,
    };
    let folding = Folding::InTurn(new.index_limits);
    if backing.frozen {
        let name = new.backing_file.as_deref().unwrap_or_default();
        return build(chain, name, place, folding, |_, _| {}).await;
    }
    // An image that a writer has open still changes; it is frozen only when the overlay replaces it. The index
    // describes those below.
    let Some(top) = chain.depth().checked_sub(2).and_then(|place| chain.layers().nth(place)) else {
        return Ok(Err(NoIndex::Unsuited));
    };
    let (_, top) = top;
    let options = OpenOptions::new().format(top.format()).secrets(Secrets::unneeded());
    let options = options.locking(Locking::Immediate);
    let Ok(frozen) = open_chain(host, top.name(), &options).await else {
        return Ok(Err(NoIndex::Unsuited));
    };
    let name = chain.active().header().and_then(|header| header.backing_file).unwrap_or_default();
    build(&frozen, &name, place, folding, |_, _| {}).await
}

/// Whether the header of a new image has room for an index.
fn has_room(name: &Path, new: &NewDisk, size: u64) -> bool {
    let index = IndexExtension {
        area_offset: HostOffset::new(new.cluster_size),
        area_length: new.cluster_size,
        root_offset: HostOffset::new(new.cluster_size),
        root_length: 1,
        root_hash: BlockHash::default(),
    };
    plan(name, new, size, Some(index)).is_ok()
}

/// The layout of a qcow2 image.
pub fn plan(name: &Path, new: &NewDisk, size: u64, index: Option<IndexExtension>) -> Result<Plan> {
    let refused =
        |reason: &str| DiskError::Refused { image: name.to_owned(), reason: reason.into() };
    if !new.cluster_size.is_power_of_two() || !(512..=2 << 20).contains(&new.cluster_size) {
        return Err(refused("Cluster size must be a power of two between 512 and 2048k"));
    }
    if !new.refcount_bits.is_power_of_two() || new.refcount_bits > 64 {
        return Err(refused("Refcount width must be a power of two and may not exceed 64 bits"));
    }
    let image = NewImage {
        size,
        version: new.version,
        cluster_bits: new.cluster_size.trailing_zeros(),
        refcount_order: new.refcount_bits.trailing_zeros(),
        extended_l2: new.extended_l2,
        compression_type: new.compression_type,
        lazy_refcounts: new.lazy_refcounts,
        backing_file: new.backing_file.clone(),
        backing_format: new.backing_format.clone(),
        data_file: new.data_file.clone(),
        data_file_raw: new.data_file_raw,
        // The data file alone can hold the disk's contents only if every cluster is in it.
        preallocate: new.preallocation != Preallocation::Off || new.data_file_raw,
        encryption: new.encryption.as_ref().map(|encryption| encryption.options.area_length()),
        index,
    };
    let error = |source: FormatError| DiskError::Format { image: name.to_owned(), source };
    image.plan().map_err(error)
}

/// Checks the options of an image without tables.
fn check_plain(name: &Path, new: &NewDisk) -> Result<()> {
    let refused = |reason: String| Err(DiskError::Refused { image: name.to_owned(), reason });
    let format = new.format.name();
    if new.preallocation == Preallocation::Metadata && new.format == ImageFormat::Raw {
        return refused("Unsupported preallocation mode: metadata".into());
    }
    let plain = NewDisk {
        size: new.size,
        format: new.format,
        preallocation: new.preallocation,
        open_backing: new.open_backing,
        layout: new.layout,
        on_device: new.on_device,
        index: new.index,
        index_limits: new.index_limits,
        ..NewDisk::default()
    };
    if *new != plain {
        return refused(format!("a {format} image has no options but size and preallocation"));
    }
    Ok(())
}

/// A new image, whose files are kept: nobody else can write to them, or delete them by a command that looks at locks.
pub struct Created<'a, H: Host> {
    host: &'a H,
    size: u64,
    index_left: bool,
    layout: Layout,
    /// The files of the disks that are copied.
    sources: Vec<FileId>,
    /// The files of the backing chain.
    chain: Arc<[FileId]>,
    /// The image's own file, the first, is a device.
    on_device: bool,
    /// None of its files may have been there before.
    fresh: bool,
    files: Vec<Kept<H::File>>,
}

struct Kept<S> {
    name: PathBuf,
    file: Arc<S>,
    /// There was no file of that name.
    is_new: bool,
}

impl<H: Host> Created<'_, H> {
    /// The disk's size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Whether there was too much to read for the direct-access index of the layers below. Then it has no digests yet,
    /// which later overlays add, or there is none, since there was too much for those, too. Writing one makes all of
    /// it.
    pub fn is_index_left(&self) -> bool {
        self.index_left
    }

    /// Lets this process, and nobody else, open the image for writing. It should do so before this is dropped.
    ///
    /// # Errors
    /// If the storage fails.
    pub async fn let_in(&self) -> Result<()> {
        for kept in &self.files {
            kept.file.retire().await?;
            kept.file.admit_writer(true).await?;
        }
        Ok(())
    }

    /// Deletes its files, if they still have their names. Devices stay, and so does what another program has put in a
    /// file's place. Returns whether none stays.
    pub async fn remove(self) -> bool {
        let mut all = true;
        for Kept { name, file, .. } in &self.files {
            if !file.extends_with_zeroes() {
                all = false;
                continue;
            }
            match self.host.remove_file(name, file).await {
                Ok(true) => continue,
                Ok(false) => {
                    let name = shown(name);
                    tracing::warn!(
                        "'{name}' stays as it is: another program has changed what it names"
                    );
                }
                Err(error) => tracing::warn!("{error}"),
            }
            all = false;
        }
        all
    }

    /// Creates an empty file, unless it is one that the image is made from, or that it has already.
    async fn file(&mut self, name: &Path) -> Result<Arc<H::File>> {
        let refused =
            |reason: &str| DiskError::Refused { image: name.to_owned(), reason: reason.into() };
        let own = self.files.iter().map(|kept| kept.file.id());
        let others: Vec<FileId> =
            self.chain.iter().chain(&self.sources).copied().chain(own).collect();
        let spared = |id| self.fresh || others.contains(&id);
        let made = if self.on_device && self.files.is_empty() {
            // Opening creates nothing, and what was opened is judged before it is written to.
            let mode = OpenMode { writable: true, ..OpenMode::default() };
            let file = self.host.open(name, mode).await?;
            if !file.capabilities().is_device {
                return Err(refused("it is not a device, as its driver requires"));
            }
            (!spared(file.id())).then_some(Made { file, is_new: false })
        } else {
            self.host.create_unlike(name, OpenMode::default(), &spared).await?
        };
        let Some(made) = made else {
            return Err(match self.host.find(name) {
                _ if self.fresh => refused("there is a file of that name already"),
                Ok(Some(found)) if self.sources.contains(&found) => {
                    refused("it is one of the images to copy, or in their backing chains")
                }
                Ok(Some(found)) if self.files.iter().any(|kept| kept.file.id() == found) => {
                    refused("it is the new image itself, or another of its files")
                }
                _ => refused("it is the backing file itself, or part of its chain"),
            });
        };
        let Made { file, is_new } = made;
        let is_other = !others.contains(&file.id());
        invariant(is_other, name, "a file that an image is made from is not emptied for it")?;
        invariant(is_new || !self.fresh, name, "a file that was there is not taken for a new one")?;
        let file = Arc::new(file);
        file.lay_out(self.layout).await;
        // A link stays.
        let name = self.host.canonical(name)?;
        self.files.push(Kept { name, file: Arc::clone(&file), is_new });
        Ok(file)
    }
}

/// What a new image holds.
struct Contents<'a> {
    plan: &'a Plan,
    index: &'a [u8],
    /// The encryption header.
    keys: &'a [u8],
}

/// Checks that QEMU, which looks for a data file with a relative name in the directory that it runs in, does not find
/// another one there than that beside the image.
fn check_new_data_file<H: Host>(host: &H, image: &Path, data: &str) -> Result<()> {
    let here = Path::new(data);
    let path = host.resolve(image, data);
    match host.find(here) {
        Ok(Some(other)) if here.is_relative() && host.find(&path).ok().flatten() != Some(other) => {
            Err(DiskError::Refused {
                image: image.to_owned(),
                reason: format!(
                    "its data file '{}' would be '{}', in the image's directory, but QEMU takes the file of that name \
                     in the current directory; give the absolute path",
                    data.escape_debug(),
                    isobath_storage::shown(&path),
                ),
            })
        }
        _ => Ok(()),
    }
}

async fn write_qcow2<H: Host>(
    created: &mut Created<'_, H>,
    name: &Path,
    new: &NewDisk,
    contents: Contents<'_>,
) -> Result<()> {
    let Contents { plan, index, keys } = contents;
    let data_file = match &new.data_file {
        Some(data) => {
            // What the header names is what is created.
            let plain = name_in_header(created.host, name, DATA_FILE, data, &Trust::Full)?;
            check_new_data_file(created.host, name, &plain)?;
            Some(created.host.resolve(name, &plain))
        }
        None => None,
    };
    let file = created.file(name).await?;
    let first = created.files.first().map(|kept| kept.file.id());
    invariant(first == Some(file.id()), name, "the first file of a new image is its own")?;
    let data = match (data_file, plan.data_file_length()) {
        (Some(path), Some(length)) => Some((created.file(&path).await?, length)),
        _ => None,
    };
    if let Some((data, length)) = &data {
        clear(&**data, *length).await?;
        preallocate(&**data, 0, *length, new.preallocation).await?;
        data.flush().await?;
    }
    clear(&*file, plan.file_length()).await?;
    let (at, length) = plan.data();
    preallocate(&*file, at.get(), length, new.preallocation).await?;
    if let Some(extension) = plan.header().index() {
        let mut at = extension.area_offset.get();
        for piece in index.chunks(CHUNK as usize) {
            file.write_at(at, IoBuf::copy_of(piece)).await?;
            at += piece.len() as u64;
        }
    }
    if let Some((offset, length)) = plan.header().encryption() {
        invariant(length == keys.len() as u64, name, "an encryption header has its own length")?;
        file.write_at(offset.get(), IoBuf::copy_of(keys)).await?;
    }
    for (at, bytes) in plan.writes() {
        if at.get() == 0 {
            // The header makes it an image: the files that it names exist before it.
            file.flush().await?;
        }
        file.write_at(at.get(), IoBuf::copy_of(&bytes)).await?;
    }
    file.flush().await?;
    Ok(())
}

/// Writes an image without tables: a raw one, or one behind an encryption header, `keys`.
async fn write_plain<H: Host>(
    created: &mut Created<'_, H>,
    name: &Path,
    size: u64,
    preallocation: Preallocation,
    keys: &[u8],
) -> Result<()> {
    let file = created.file(name).await?;
    let at = keys.len() as u64;
    let end = at.checked_add(size).ok_or_else(|| DiskError::Refused {
        image: name.to_owned(),
        reason: format!("the size {size} is too large"),
    })?;
    // A device keeps its contents, as with qemu-img. One that is too small keeps its header as well.
    file.set_len(end).await?;
    if !keys.is_empty() {
        // A device may hold another header, whose keys are overwritten next.
        file.write_at(0, IoBuf::zeroed(HEADER.min(keys.len()))).await?;
        file.flush().await?;
    }
    preallocate(&*file, at, size, preallocation).await?;
    if let Some((header, slots)) = keys.split_at_checked(HEADER) {
        // A new file has zeroes, which take no space. What a device has may be keys of an earlier header.
        let written = |block: &&[u8]| !file.extends_with_zeroes() || block.iter().any(|b| *b != 0);
        let mut at = HEADER;
        for run in
            slots.chunks(HEADER).collect::<Vec<_>>().chunk_by(|a, b| written(a) == written(b))
        {
            let bytes = run.concat();
            let length = bytes.len();
            if run.iter().any(written) {
                file.write_at(at as u64, IoBuf::copy_of(&bytes)).await?;
            }
            at += length;
        }
        // The header makes it an image: what it needs is there before it.
        file.flush().await?;
        file.write_at(0, IoBuf::copy_of(header)).await?;
    }
    file.flush().await?;
    Ok(())
}

/// Makes a file `length` zero bytes long.
async fn clear<S: Storage>(file: &S, length: u64) -> Result<()> {
    file.set_len(length).await?;
    if !file.extends_with_zeroes() && length > 0 {
        file.write_zeroes(0, length, ZeroMode { may_unmap: true, only_fast: false }).await?;
    }
    Ok(())
}

/// Allocates space for a range that reads as zeroes.
async fn preallocate<S: Storage>(file: &S, at: u64, length: u64, how: Preallocation) -> Result<()> {
    let end = at + length;
    match how {
        Preallocation::Falloc if length > 0 => {
            let fast = ZeroMode { may_unmap: false, only_fast: true };
            match file.write_zeroes(at, length, fast).await {
                Err(error) if error.kind() == io::ErrorKind::Unsupported => {
                    write_zeroes(file, at, end).await?;
                }
                done => done?,
            }
        }
        Preallocation::Full => write_zeroes(file, at, end).await?,
        _ => {}
    }
    Ok(())
}

async fn write_zeroes<S: Storage>(
    file: &S,
    start: u64,
    end: u64,
) -> std::result::Result<(), StorageError> {
    let mut zeroes = IoBuf::zeroed(CHUNK.min(end - start) as usize);
    let mut at = start;
    while at < end {
        if end - at < zeroes.len() as u64 {
            zeroes = IoBuf::zeroed((end - at) as usize);
        }
        let written = zeroes.len() as u64;
        zeroes = file.write_at(at, zeroes).await?;
        at += written;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_executor::block_on;
    use isobath_qcow2::NewImage;
    use isobath_storage::memory::MemoryHost;
    use isobath_storage_test::careless::{ANOTHERS, CarelessHost, Slip};

    #[test]
    fn a_host_that_empties_what_is_to_be_spared_is_noticed() {
        let (host, name) = (CarelessHost::around(MemoryHost::new()), Path::new("image"));
        host.slips().set(Slip::SparesNone);
        let new = NewDisk::new(1 << 20);
        let source = block_on(host.create(name, OpenMode::default())).unwrap().id();
        match block_on(create_held_beside(&host, name, &new, &[source])) {
            Err(DiskError::Internal { violated, .. }) => {
                assert_eq!(violated, "a file that an image is made from is not emptied for it");
            }
            other => panic!("{:?}", other.map(|created| created.size())),
        }
    }

    #[test]
    fn what_takes_the_place_of_a_new_image_is_not_removed_with_it() {
        let (host, name) = (CarelessHost::around(MemoryHost::new()), Path::new("image"));
        let created = block_on(create_held(&host, name, &NewDisk::new(1 << 20))).unwrap();
        host.slips().set(Slip::ReplacedBeforeRemoval);
        assert!(!block_on(created.remove()));
        assert_eq!(host.inner().contents(name).unwrap(), ANOTHERS);
    }

    #[test]
    fn a_new_image_is_removed_by_its_name() {
        let (host, name) = (MemoryHost::new(), Path::new("image"));
        let created = block_on(create_held(&host, name, &NewDisk::new(1 << 20))).unwrap();
        assert!(block_on(created.remove()));
        assert_eq!(host.names(), [] as [PathBuf; 0]);
    }

    #[test]
    fn an_encryption_header_is_as_long_as_was_planned() {
        let (host, name, new) = (MemoryHost::new(), Path::new("image"), NewDisk::new(1 << 20));
        let mut image = NewImage::new(1 << 20);
        image.encryption = Some(1024);
        let plan = image.plan().unwrap();
        let write = |keys: &[u8]| {
            let files = Vec::new();
            let mut created = Created {
                host: &host,
                size: 1 << 20,
                index_left: false,
                layout: Layout::default(),
                sources: Vec::new(),
                chain: Arc::default(),
                on_device: false,
                fresh: false,
                files,
            };
            let contents = Contents { plan: &plan, index: &[], keys };
            block_on(Box::pin(write_qcow2(&mut created, name, &new, contents)))
        };
        write(&[0; 1024]).unwrap();
        match write(&[0; 1023]) {
            Err(DiskError::Internal { violated, .. }) => {
                assert_eq!(violated, "an encryption header has its own length");
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_new_images_own_file_comes_before_its_data_file() {
        let (host, name, new) = (MemoryHost::new(), Path::new("image"), NewDisk::new(1 << 20));
        let plan = NewImage::new(1 << 20).plan().unwrap();
        let mut created = Created {
            host: &host,
            size: 1 << 20,
            index_left: false,
            layout: Layout::default(),
            sources: Vec::new(),
            chain: Arc::default(),
            on_device: false,
            fresh: false,
            files: Vec::new(),
        };
        block_on(created.file(Path::new("data"))).unwrap();
        let contents = Contents { plan: &plan, index: &[], keys: &[] };
        match block_on(Box::pin(write_qcow2(&mut created, name, &new, contents))) {
            Err(DiskError::Internal { violated, .. }) => {
                assert_eq!(violated, "the first file of a new image is its own");
            }
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn no_file_is_made_or_written_in_place_of_a_device() {
        let (host, name) = (MemoryHost::new(), Path::new("image"));
        let mut new = NewDisk::new(1 << 20);
        new.on_device = true;
        assert!(block_on(create(&host, name, &new)).is_err());
        assert_eq!(host.names(), [] as [PathBuf; 0]);
        block_on(create(&host, name, &NewDisk::new(1 << 20))).unwrap();
        let before = host.contents(name).unwrap();
        assert!(block_on(create(&host, name, &new)).is_err());
        assert_eq!(host.contents(name).unwrap(), before);
    }
}
