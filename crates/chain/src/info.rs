//! Image information.

use crate::index::{IndexInfo, IndexState, examine};
use crate::open::{
    below_kept, check_named_format, check_replaced, format_beneath, format_of_given, open_layers,
    unnamed_format,
};
use isobath_formats::VmdkInfo;
use isobath_image::encryption::{self, Secrets};
use isobath_image::index_area::read_root;
use isobath_image::layer::ImageFormat;
use isobath_image::luks;
use isobath_image::name::{backing_format, check_backing_kind};
use isobath_image::open::{format_kept, open_foreign, referenced_file};
use isobath_image::options::{BackingFile, Below, OpenOptions, Trust};
use isobath_image::probe::format_of;
use isobath_image::snapshot_table::read_snapshots;
use isobath_image::{DiskError, Result};
use isobath_qcow2::header::ParseMode;
use isobath_qcow2::{
    AutoclearFeatures, Bitmap, BitmapFlags, CompatibleFeatures, CompressionType, Geometry, Header,
    IncompatibleFeatures, Snapshot,
};
use isobath_storage::{FileId, Host, IoBuf, Locking, OpenMode, Storage, StorageExt};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Options of [`info`].
#[derive(Clone, Debug, Default)]
pub struct InfoOptions {
    /// Image locks to take.
    pub locking: Locking,
    /// The image's format; `None` probes.
    pub format: Option<ImageFormat>,
    /// How far names in headers are trusted.
    pub trust: Trust,
    /// The image itself is named by another's header: see [`OpenOptions::named`].
    pub named: bool,
    /// What is below the image, and below each of its backing files, if not what the headers name.
    pub backing_files: Vec<Below>,
}

/// Image information. Names are as stored: hostile text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageInfo {
    /// The name under which it was opened.
    pub filename: PathBuf,
    /// Its format.
    pub format: ImageFormat,
    /// The disk's size in bytes.
    pub virtual_size: u64,
    /// Bytes that the file uses in its file system; `None` if it is in none, as an export of a server.
    pub actual_size: Option<u64>,
    /// The backing file's name, as the image has it.
    pub backing_filename: Option<String>,
    /// The path under which the backing file is opened.
    pub full_backing_filename: Option<PathBuf>,
    /// The backing file's format, as the image has it.
    pub backing_format: Option<String>,
    /// The internal snapshots.
    pub snapshots: Vec<Snapshot>,
    /// Properties of qcow2 images only.
    pub qcow2: Option<Qcow2Info>,
    /// Properties of images in other programs' formats only.
    pub foreign: Option<ForeignInfo>,
    /// The header of a file that is encrypted as a whole.
    pub luks: Option<encryption::Info>,
}

/// Properties of images in other programs' formats only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignInfo {
    /// Bytes in a block, if the image consists of such.
    pub cluster_size: Option<u64>,
    /// It says that it was not closed.
    pub dirty: bool,
    /// What a VMDK says about itself.
    pub vmdk: Option<VmdkInfo>,
}

/// Properties of qcow2 images only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Qcow2Info {
    /// The version, 2 or 3.
    pub version: u32,
    /// Bytes in a cluster.
    pub cluster_size: u64,
    /// The compression of compressed clusters.
    pub compression_type: CompressionType,
    /// Refcounts may be updated late.
    pub lazy_refcounts: bool,
    /// Bits in a refcount.
    pub refcount_bits: u32,
    /// It was not closed, and its refcounts may be wrong.
    pub dirty: bool,
    /// It was not closed, and its journal holds changes that are not in place yet.
    pub journal: bool,
    /// It is marked corrupt.
    pub corrupt: bool,
    /// L2 entries have subclusters.
    pub extended_l2: bool,
    /// The external data file's name, as the image has it.
    pub data_file: Option<String>,
    /// The external data file alone holds the disk's contents; `None` without one.
    pub data_file_raw: Option<bool>,
    /// Whether the data is encrypted.
    pub encrypted: bool,
    /// The encryption header, if it is one that can be used.
    pub encryption: Option<encryption::Info>,
    /// The persistent bitmaps.
    pub bitmaps: Vec<BitmapInfo>,
    /// The direct-access index.
    pub index: Option<IndexInfo>,
}

impl Qcow2Info {
    /// What a header says; without the bitmaps and the encryption header.
    pub fn of(header: &Header, geometry: &Geometry) -> Self {
        let has = |feature| header.incompatible.contains(feature);
        let data_file = has(IncompatibleFeatures::DATA_FILE);
        Self {
            version: header.version,
            cluster_size: geometry.cluster_size(),
            compression_type: header.compression_type,
            lazy_refcounts: header.compatible.contains(CompatibleFeatures::LAZY_REFCOUNTS),
            refcount_bits: geometry.refcount_bits(),
            dirty: has(IncompatibleFeatures::DIRTY),
            journal: has(IncompatibleFeatures::JOURNAL),
            corrupt: has(IncompatibleFeatures::CORRUPT),
            extended_l2: geometry.extended_l2(),
            data_file: header.data_file().filter(|_| data_file).map(str::to_owned),
            data_file_raw: data_file
                .then(|| header.autoclear.contains(AutoclearFeatures::DATA_FILE_RAW)),
            encrypted: header.encryption().is_some(),
            encryption: None,
            bitmaps: Vec::new(),
            index: header.index().map(IndexInfo::unchecked),
        }
    }
}

/// A persistent bitmap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BitmapInfo {
    /// Its name, made safe to print.
    pub name: String,
    /// Guest bytes per bit.
    pub granularity: u64,
    /// It was not saved, and may be wrong.
    pub in_use: bool,
    /// It records writes.
    pub auto: bool,
}

/// Reads the information of one image. Its backing file need not exist.
///
/// # Errors
/// If the file cannot be opened, locked or read, or its header, snapshot table or bitmap directory
/// cannot be used.
pub async fn info<H: Host>(host: &H, name: &Path, options: &InfoOptions) -> Result<ImageInfo> {
    let mut info = look(host, name, None, options).await?.0;
    check_index(host, &mut info, options).await;
    Ok(info)
}

/// Checks whether an image's index matches the layers below, which are those that the headers name: no others are
/// opened where these are not to be.
async fn check_index<H: Host>(host: &H, info: &mut ImageInfo, options: &InfoOptions) {
    if options.trust != Trust::Full
        || options.backing_files.iter().any(|below| *below != Below::Named)
    {
        return;
    }
    if let Some(index) = info.qcow2.as_mut().and_then(|qcow2| qcow2.index.as_mut()) {
        *index = index_info(host, &info.filename, index, options.locking).await;
    }
}

/// Reads the information of an image and its backing chain, from the image down.
///
/// # Errors
/// As [`info`], for any of them; or if the chain has a loop.
pub async fn backing_chain_info<H: Host>(
    host: &H,
    name: &Path,
    options: &InfoOptions,
) -> Result<Vec<ImageInfo>> {
    let mut chain: Vec<ImageInfo> = Vec::new();
    let mut seen: HashSet<FileId> = HashSet::new();
    let mut next = Some((name.to_owned(), options.clone()));
    while let Some((name, options)) = next.take() {
        let overlay: Option<&ImageInfo> = chain.last().filter(|_| options.named);
        let (info, id) = look(host, &name, overlay, &options).await?;
        if !seen.insert(id) {
            return Err(DiskError::Refused {
                image: name,
                reason: "the backing chain has a loop: this image is its own backing file, \
                         directly or through others"
                    .into(),
            });
        }
        let below = options.backing_files.get(chain.len()).cloned().unwrap_or_default();
        if host.kept(&name).is_some() {
            let file = below_kept(host, &name, &below)?;
            next = file.map(|BackingFile { name, format }| {
                (name, InfoOptions { format, named: false, ..options.clone() })
            });
        } else if let Below::Given(file) = below {
            check_replaced(&name, info.backing_filename.is_some())?;
            let named = info.backing_filename.as_deref().unwrap_or_default();
            let named = (named, info.backing_format.as_deref());
            let format = format_of_given(&name, &file, named, &options.trust)?;
            next = Some((file.name, InfoOptions { format, named: false, ..options.clone() }));
        } else if let Below::Beneath(file) = below {
            let format = Some(format_beneath(&name, &file)?);
            next = Some((file.name, InfoOptions { format, named: false, ..options.clone() }));
        } else if let (Some(backing), false) = (&info.backing_filename, below == Below::Nothing) {
            let named = backing_format(&name, backing, info.backing_format.as_deref())?;
            let backing = referenced_file(host, &name, "backing file", backing, &options.trust)?;
            let format = match (below, named) {
                (Below::NamedWithFormat(format), _) => Some(format),
                (_, Some(format)) => {
                    let Some(format) = ImageFormat::of_backing(&format) else {
                        return Err(DiskError::Refused {
                            image: name,
                            reason: format!("Unknown driver '{}'", format.escape_debug()),
                        });
                    };
                    check_named_format(host, &name, &backing, format)?;
                    Some(format)
                }
                (_, None) if options.trust != Trust::Full => return Err(unnamed_format(name)),
                (_, None) => None,
            };
            next = Some((backing, InfoOptions { format, named: true, ..options.clone() }));
        }
        chain.push(info);
    }
    if let Some(active) = chain.first_mut() {
        check_index(host, active, options).await;
    }
    Ok(chain)
}

/// Looks at an image, which may be the backing file of `overlay`.
async fn look<H: Host>(
    host: &H,
    name: &Path,
    overlay: Option<&ImageInfo>,
    options: &InfoOptions,
) -> Result<(ImageInfo, FileId)> {
    let mode = OpenMode { writable: false, direct: false, locking: options.locking };
    let file = host.open(name, mode).await?;
    if options.named {
        options.trust.check_place(&file).await?;
    }
    if let Some((above, named)) =
        overlay.and_then(|above| Some((above, above.backing_filename.as_ref()?)))
    {
        check_backing_kind(&above.filename, named, &file)?;
    }
    let length = file.len().await?;
    let elsewhere = host.protocol_name(&name.to_string_lossy());
    let actual_size = if elsewhere { None } else { Some(file.allocated().await?) };
    let start = file.read_at(0, IoBuf::zeroed(4096)).await?;
    let format = format_of(name, format_kept(host, name, options.format)?, &start)?;
    let mut info = ImageInfo {
        filename: name.to_owned(),
        format: ImageFormat::Raw,
        virtual_size: length.next_multiple_of(512),
        actual_size,
        backing_filename: None,
        full_backing_filename: None,
        backing_format: None,
        snapshots: Vec::new(),
        qcow2: None,
        foreign: None,
        luks: None,
    };
    if let ImageFormat::Foreign(foreign) = format {
        let file = Arc::new(file);
        let open = OpenOptions::new().locking(options.locking).trust(options.trust.clone());
        let image = Box::pin(open_foreign(host, name, foreign, &open, &file)).await?;
        info.format = format;
        info.virtual_size = image.size();
        // Extents are files of their own.
        for extent in image.storages().skip(1) {
            let own = extent.allocated().await?;
            info.actual_size = info.actual_size.map(|size| size + own);
        }
        info.foreign = Some(ForeignInfo {
            cluster_size: image.cluster_size(),
            dirty: image.is_dirty(),
            vmdk: image.vmdk(),
        });
        return Ok((info, file.id()));
    }
    if format == ImageFormat::Luks {
        let (header, size) = luks::info(&file, name).await?;
        info.format = format;
        info.virtual_size = size.next_multiple_of(512);
        info.luks = Some(header);
        return Ok((info, file.id()));
    }
    if format == ImageFormat::Raw {
        return Ok((info, file.id()));
    }
    let error = |source| DiskError::Format { image: name.to_owned(), source };
    let head = Header::probe_length(&start).map_err(error)?.min(length as usize);
    let bytes = file.read_at(0, IoBuf::zeroed(head)).await?;
    let header = Header::parse_for(&bytes, ParseMode::Check).map_err(error)?;
    let geometry = header.geometry().map_err(error)?;
    header.validate(ParseMode::Read).map_err(error)?;
    let snapshots = read_snapshots(&file, name, &header, length).await?;
    let encryption = encryption::read_header(&file, &header).await?;
    let bitmaps = read_bitmaps(&file, name, &header, length).await?;
    info.format = ImageFormat::Qcow2;
    info.virtual_size = header.disk_size();
    info.full_backing_filename =
        header.backing_file.as_ref().map(|backing| full_name(host, name, backing));
    // A format without a name has no meaning.
    let named = header.backing_file.is_some();
    info.backing_format = header.backing_format().filter(|_| named).map(str::to_owned);
    info.qcow2 = Some(Qcow2Info { encryption, bitmaps, ..Qcow2Info::of(&header, &geometry) });
    info.backing_filename = header.backing_file;
    info.snapshots = snapshots;
    Ok((info, file.id()))
}

/// The path of a backing file; a `json:` or `protocol:` name stands for itself.
pub fn full_name<H: Host>(host: &H, name: &Path, backing: &str) -> PathBuf {
    let first = backing.split('/').next().unwrap_or_default();
    if first.contains(':') { PathBuf::from(backing) } else { host.resolve(name, backing) }
}

async fn read_bitmaps<S: Storage>(
    file: &S,
    name: &Path,
    header: &Header,
    length: u64,
) -> Result<Vec<BitmapInfo>> {
    let error = |source| DiskError::Format { image: name.to_owned(), source };
    let consistent = header.autoclear.contains(AutoclearFeatures::BITMAPS);
    let Some(extension) = header.bitmaps().filter(|_| consistent) else { return Ok(Vec::new()) };
    let geometry = header.geometry().map_err(error)?;
    extension.validate(&geometry).map_err(error)?;
    let at = extension.directory_offset.get();
    let there = extension.directory_size.min(length.saturating_sub(at));
    let directory = file.read_at(at, IoBuf::zeroed(there as usize)).await?;
    let bitmaps = Bitmap::parse_directory(&directory, extension.count).map_err(error)?;
    let size = header.disk_size();
    bitmaps.iter().try_for_each(|bitmap| bitmap.validate(&geometry, size)).map_err(error)?;
    Ok(bitmaps
        .iter()
        .map(|bitmap| BitmapInfo {
            name: bitmap.name_text(),
            granularity: 1u64.checked_shl(bitmap.granularity_bits.into()).unwrap_or(0),
            in_use: bitmap.flags.contains(BitmapFlags::IN_USE),
            auto: bitmap.flags.contains(BitmapFlags::AUTO),
        })
        .collect())
}

/// The status of the index `unchecked` of the image `name`, after examining the layers that it describes.
async fn index_info<H: Host>(
    host: &H,
    name: &Path,
    unchecked: &IndexInfo,
    locking: Locking,
) -> IndexInfo {
    let mut info = unchecked.clone();
    let options =
        OpenOptions::new().format(ImageFormat::Qcow2).locking(locking).secrets(Secrets::unneeded());
    let chain = match open_layers(host, name, &options).await {
        Ok(chain) => chain,
        Err(error) => {
            let reason = format!("its chain cannot be opened: {error}");
            return IndexInfo { state: IndexState::Invalid(reason), ..info };
        }
    };
    if let Some(root) = read_root(chain.active()).await {
        info.layers = root.covers;
        info.granularity = 1 << root.unit_bits;
    }
    info.state = match examine(&chain).await {
        Ok(examined) => {
            info.undigested = examined.undigested;
            IndexState::Valid
        }
        Err(reason) => IndexState::Invalid(reason),
    };
    info
}
