//! Opening a chain: from the active layer down, by the names in the headers.

use super::name::plain_file_name;
use super::probe::format_of;
use super::{Chain, ImageFormat, Layer, MAX_LAYERS, OpeningId, Qcow2};
use crate::check::repair_dirty;
use crate::durability::journal::{self, Replayed};
use crate::durability::survive::Survived;
use crate::index::{self, Ahead};
use crate::write::Writer;
use crate::{DiskError, MetadataMode, Result};
use futures_util::stream::{self, StreamExt};
use isobath_qcow2::{Extension, Header, IncompatibleFeatures, L1Entry};
use isobath_storage::{Access, FileId, Host, IoBuf, Locking, OpenMode, Storage};
use parking_lot::RwLock;
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Layers opened together.
const OPENED_AT_ONCE: usize = 128;

/// How far the names in an image's header are believed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Trust {
    /// The image comes from its user: any file that it names is opened, and a backing file without
    /// a named format is probed, as QEMU does.
    #[default]
    Full,
    /// The image may come from a stranger: it may only name files below these directories (links
    /// followed), and must name their format. Direct-access indexes are not used.
    Within(Vec<PathBuf>),
}

/// How to open a disk.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// Allow writes to the active layer.
    pub writable: bool,
    /// Bypass the page cache (`--cache none`).
    pub direct: bool,
    /// Image locks to take.
    pub locking: Locking,
    /// The active layer's format; `None` probes.
    pub format: Option<ImageFormat>,
    /// Whether to open the backing chain; without it, what it holds reads as zeroes.
    pub backing: bool,
    /// How far names in headers are believed.
    pub trust: Trust,
    /// How changes of metadata reach the file.
    pub metadata: MetadataMode,
    /// Bytes of the journal, if there is one; `None` takes 1/32 of the disk's size, 1 to 4 MiB.
    pub journal_size: Option<u64>,
    /// Bytes of a zone, in mode `embedded`: as many whole clusters as that has, 1 to 4,096; `None` takes
    /// 64 MiB.
    pub zone_size: Option<u64>,
    /// Zones in use at most, in mode `embedded`: a recovery looks for records in all of them, and a
    /// close makes them plain. `None` takes 8; with 0 nothing is embedded.
    pub zones: Option<u32>,
    /// Bytes of memory for the map; `None` takes what the disk needs, up to
    /// [`DEFAULT_MAP_CACHE`](crate::DEFAULT_MAP_CACHE).
    pub map_cache: Option<usize>,
    /// What a request was answered for outlives this process being killed, flushed or not, as it does
    /// with a file: who opens the image for writing next on this machine, before that is started again,
    /// finds it. Not in mode `ordered`, nor where the image can have no journal; the others set it up
    /// with the first change, and nothing is embedded.
    pub survive: bool,
}

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            writable: false,
            direct: false,
            locking: Locking::default(),
            format: None,
            backing: true,
            trust: Trust::default(),
            metadata: MetadataMode::default(),
            journal_size: None,
            zone_size: None,
            zones: None,
            map_cache: None,
            survive: false,
        }
    }
}

impl OpenOptions {
    /// Whether an index is believed. One made to harm could show parts of the files below that no
    /// guest may see.
    fn may_use_index(&self) -> bool {
        self.trust == Trust::Full
    }

    fn mode(&self, writable: bool) -> OpenMode {
        OpenMode { writable, direct: self.direct, locking: self.locking }
    }
}

/// Opens `name` and everything below it, and the index that describes it, if one holds.
pub(crate) async fn open_chain<H: Host>(
    host: &H,
    name: &Path,
    options: &OpenOptions,
) -> Result<Chain<H::File>> {
    let chain = open_layers(host, name, options).await?;
    if options.backing && options.may_use_index() {
        chain.set_index(index::find(&chain).await);
    }
    Ok(chain)
}

/// Opens `name` and everything below it, together where an index says what there is.
pub(crate) async fn open_layers<H: Host>(
    host: &H,
    name: &Path,
    options: &OpenOptions,
) -> Result<Chain<H::File>> {
    let mut layers: Vec<Arc<Layer<H::File>>> = Vec::new();
    let mut seen: HashSet<FileId> = HashSet::new();
    let mut next = Some((name.to_owned(), options.format));
    let mut visible = u64::MAX;
    let mut ahead = OpenedAhead::default();
    while let Some((name, format)) = next.take() {
        if layers.len() == MAX_LAYERS {
            return Err(DiskError::Refused {
                image: name,
                reason: format!("its chain has more than {MAX_LAYERS} layers"),
            });
        }
        let writable = options.writable && layers.is_empty();
        let opened = match ahead.take(&name, format) {
            Some(layer) => Ok(layer),
            None => open_layer(host, &name, format, writable, options).await,
        };
        let layer = match (opened, layers.last()) {
            (Ok(layer), _) => Arc::new(layer),
            (Err(error), None) => return Err(error),
            (Err(error), Some(above)) => {
                return Err(DiskError::Backing {
                    overlay: above.name().to_owned(),
                    source: Box::new(error),
                });
            }
        };
        if !seen.insert(layer.storage().id()) {
            return Err(DiskError::Refused {
                image: layer.name().to_owned(),
                reason: "it is its own backing file, directly or through others; mend the chain \
                         with 'qemu-img rebase -u'"
                    .into(),
            });
        }
        layer.limit_visible(visible);
        visible = layer.visible();
        if options.backing {
            next = backing_of(host, &layer, &options.trust)?;
            if next.is_some() && ahead.is_empty() && options.may_use_index() {
                ahead = open_ahead(host, &layer, options).await;
            }
        }
        layers.push(layer);
    }
    layers.reverse();
    Ok(Chain { layers, index: RwLock::default() })
}

/// Layers opened because an index names them, the next one of the chain last. Each is used only
/// where the header above it names the very same file.
struct OpenedAhead<S> {
    layers: Vec<Layer<S>>,
}

impl<S> Default for OpenedAhead<S> {
    fn default() -> Self {
        Self { layers: Vec::new() }
    }
}

impl<S: Storage> OpenedAhead<S> {
    fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// The next layer, if it is what the chain asks for; otherwise nothing that follows is, either.
    fn take(&mut self, name: &Path, format: Option<ImageFormat>) -> Option<Layer<S>> {
        let layer = self.layers.pop()?;
        // What is not named is probed, which finds qcow2 where it is.
        let expected = format.unwrap_or(ImageFormat::Qcow2);
        if layer.name() != name || layer.format() != expected {
            self.layers.clear();
            return None;
        }
        Some(layer)
    }
}

/// Opens the layers below `holder` that its index names, many at once.
async fn open_ahead<H: Host>(
    host: &H,
    holder: &Arc<Layer<H::File>>,
    options: &OpenOptions,
) -> OpenedAhead<H::File> {
    let mut opened = OpenedAhead::default();
    let Some(root) = index::read_root(holder).await else { return opened };
    if root.covers != root.position {
        return opened;
    }
    let (position, covers) = (root.position as usize, root.covers as usize);
    let mut ahead = Ahead::new(root);
    let mut referrer = holder.name().to_owned();
    // From the top down, as the names are known.
    let mut layers: Vec<Layer<H::File>> = Vec::with_capacity(covers);
    while ahead.next_chapter().is_some_and(|chapter| chapter.layer as usize == position) {
        if !ahead.read_chapter(holder).await {
            return opened;
        }
    }
    loop {
        let mut wanted = Vec::new();
        for number in (ahead.lowest()..covers - layers.len()).rev() {
            let Some(record) = ahead.record(number) else { break };
            let path =
                referenced_file(host, &referrer, "backing file", &record.name, &options.trust);
            let Ok(path) = path else { break };
            referrer.clone_from(&path);
            wanted.push((path, record.format.into()));
        }
        let opening = wanted
            .iter()
            .map(|(path, format)| open_layer(host, path, Some(*format), false, options));
        let mut opening = stream::iter(opening).buffered(OPENED_AT_ONCE);
        while let Some(layer) = opening.next().await {
            // Whoever asks for one that fails by the header's name finds out why.
            let Ok(layer) = layer else { break };
            layers.push(layer);
        }
        if covers - layers.len() != ahead.lowest() {
            break;
        }
        let Some(chapter) = ahead.next_chapter().map(|chapter| chapter.layer as usize) else {
            break;
        };
        let read = match layers.get((covers - 1).wrapping_sub(chapter)) {
            Some(layer) => ahead.read_chapter(layer).await,
            None => false,
        };
        if !read {
            break;
        }
    }
    layers.reverse();
    opened.layers = layers;
    opened
}

/// The name and format of a layer's backing file.
fn backing_of<H: Host>(
    host: &H,
    layer: &Layer<H::File>,
    trust: &Trust,
) -> Result<Option<(PathBuf, Option<ImageFormat>)>> {
    let Some(header) = layer.header() else { return Ok(None) };
    let Some(name) = &header.backing_file else { return Ok(None) };
    let path = referenced_file(host, layer.name(), "backing file", name, trust)?;
    let format = match header.backing_format() {
        Some(format) => Some(ImageFormat::from_name(format).ok_or_else(|| DiskError::Refused {
            image: layer.name().to_owned(),
            reason: format!(
                "its backing file format is '{}'; only qcow2 and raw are supported",
                format.escape_debug()
            ),
        })?),
        None if *trust != Trust::Full => {
            return Err(DiskError::Refused {
                image: layer.name().to_owned(),
                reason: "it does not name its backing file's format, and an untrusted image's \
                         backing file is not probed; name it with 'qemu-img rebase -u -F FORMAT'"
                    .into(),
            });
        }
        None => None,
    };
    Ok(Some((path, format)))
}

/// Brings into an image what a killed process left of it, if there is anything.
///
/// # Errors
/// If the image cannot be opened for writing.
pub(crate) async fn bring_in<H: Host>(
    host: &H,
    name: &Path,
    format: Option<ImageFormat>,
    locking: Locking,
) -> Result<()> {
    let options = OpenOptions { writable: true, locking, ..OpenOptions::default() };
    let storage = host.open(name, options.mode(true)).await?;
    let length = storage.len().await?;
    let start = storage.read_at(0, IoBuf::zeroed(4096)).await?;
    // What has no header that can be used has no log either.
    let header = read_header(&storage, name, start, length).await.ok();
    let header =
        header.filter(|header| header.incompatible.contains(IncompatibleFeatures::JOURNAL));
    let left = match &header {
        Some(header) => Survived::find(&storage, name, header).await?,
        None => None,
    };
    drop(storage);
    if left.is_none() {
        return Ok(());
    }
    drop(left);
    let layer = Arc::new(open_layer(host, name, format, true, &options).await?);
    if let Some(qcow2) = layer.as_qcow2() {
        let alone = qcow2.header.read().backing_file.is_none();
        Writer::open(&layer, qcow2, &options, alone).await?;
    }
    Ok(())
}

/// The path of a file that the image `referrer` names, once it may be opened.
fn referenced_file<H: Host>(
    host: &H,
    referrer: &Path,
    field: &str,
    name: &str,
    trust: &Trust,
) -> Result<PathBuf> {
    let path = host.resolve(referrer, plain_file_name(referrer, field, name)?);
    if let Trust::Within(directories) = trust {
        let real = host.canonical(&path)?;
        if !directories.iter().any(|directory| real.starts_with(directory)) {
            return Err(DiskError::Refused {
                image: referrer.to_owned(),
                reason: format!(
                    "its {field} '{}' lies outside the directories allowed to an untrusted image",
                    name.escape_debug()
                ),
            });
        }
    }
    Ok(path)
}

/// Opens one image, without what is below it.
pub(crate) async fn open_layer<H: Host>(
    host: &H,
    name: &Path,
    format: Option<ImageFormat>,
    writable: bool,
    options: &OpenOptions,
) -> Result<Layer<H::File>> {
    let storage = Arc::new(host.open(name, options.mode(writable)).await?);
    // A header here, a table there: of thousands of layers nothing else is wanted yet.
    storage.advise(Access::Random).await;
    let layer = load_layer(host, name, format, writable, options, &storage).await?;
    storage.advise(Access::Normal).await;
    Ok(layer)
}

async fn load_layer<H: Host>(
    host: &H,
    name: &Path,
    format: Option<ImageFormat>,
    writable: bool,
    options: &OpenOptions,
    storage: &Arc<H::File>,
) -> Result<Layer<H::File>> {
    let mut length = storage.len().await?;
    let start = storage.read_at(0, IoBuf::zeroed(4096)).await?;
    if format_of(name, format, &start)? == ImageFormat::Raw {
        return Ok(Layer::raw(name.to_owned(), Arc::clone(storage), length));
    }
    let mut header = read_header(&**storage, name, start, length).await?;
    if writable && header.incompatible.contains(IncompatibleFeatures::CORRUPT) {
        return Err(DiskError::Corrupt {
            image: name.to_owned(),
            reason: "its header says so (corrupt bit); it can be read, not written".into(),
        });
    }
    let mut replayed = None;
    let mut survived = None;
    if header.incompatible.contains(IncompatibleFeatures::JOURNAL) {
        if writable {
            let found = Survived::find(&**storage, name, &header).await?;
            let follows = |durable, last| {
                let Some(found) = &found else { return false };
                let follows = found.follows(durable);
                if follows {
                    // The record that empties the journal comes next.
                    found.goes_on_behind(last);
                } else {
                    tracing::warn!(
                        image = %isobath_storage::shown(name),
                        "it was put back to what it was before its server was killed: what that had \
                         answered since is not brought in"
                    );
                }
                follows
            };
            let kept = journal::recover(&**storage, name, &header, follows).await?;
            survived = found.filter(|_| kept);
        } else {
            replayed = Some(journal::examine(&**storage, name, &header).await?);
        }
        length = storage.len().await?;
        let mut start = storage.read_at(0, IoBuf::zeroed(4096)).await?;
        if let Some(replayed) = &replayed {
            length = length.max(replayed.end());
            replayed.put_over(0, &mut start);
        }
        header = read_header(&**storage, name, start, length).await?;
    }
    let unclean = survived.as_ref().is_some_and(Survived::is_unclean);
    if writable && (unclean || header.incompatible.contains(IncompatibleFeatures::DIRTY)) {
        repair_dirty(storage, name, survived.is_none()).await?;
        length = storage.len().await?;
        let start = storage.read_at(0, IoBuf::zeroed(4096)).await?;
        header = read_header(&**storage, name, start, length).await?;
    }
    if !writable {
        // Of use only to explain a refusal; there may be thousands of layers.
        header.extensions.retain(|extension| !matches!(extension, Extension::FeatureNames(_)));
        header.extensions.shrink_to_fit();
    }
    let geometry =
        header.geometry().map_err(|source| DiskError::Format { image: name.to_owned(), source })?;
    let l1 = read_l1(&**storage, name, &header, length, replayed.as_ref()).await?;
    let data = if header.incompatible.contains(IncompatibleFeatures::DATA_FILE) {
        let Some(file) = header.data_file() else {
            return Err(DiskError::Refused {
                image: name.to_owned(),
                reason: "it keeps its data in an external file but does not name it; name it with \
                         'qemu-img amend -o data_file=NAME'"
                    .into(),
            });
        };
        let path = referenced_file(host, name, "data file", file, &options.trust)?;
        let data = host.open(&path, options.mode(writable)).await?;
        if data.id() == storage.id() {
            return Err(DiskError::Refused {
                image: name.to_owned(),
                reason:
                    "it is named as its own external data file: guest data would overwrite its \
                         tables"
                        .into(),
            });
        }
        Some(Arc::new(data))
    } else {
        None
    };
    let file_length = match &data {
        Some(data) => data.len().await?,
        None => length,
    };
    let qcow2 = Qcow2 {
        opening: OpeningId::next(),
        header: header.into(),
        geometry,
        opened_length: length.into(),
        l1: l1.into(),
    };
    let layer =
        Layer::qcow2(name.to_owned(), Arc::clone(storage), data, file_length, qcow2, replayed);
    layer.set_survived(survived);
    Ok(layer)
}

/// Reads the header cluster, of which `start` is the beginning.
async fn read_header<S: Storage>(
    storage: &S,
    name: &Path,
    start: IoBuf,
    file_length: u64,
) -> Result<Header> {
    let error = |source| DiskError::Format { image: name.to_owned(), source };
    let head = Header::probe_length(&start).map_err(error)?.min(file_length as usize);
    let enough = head <= start.len() || Header::ends_in(&start);
    let bytes = if enough { start } else { storage.read_at(0, IoBuf::zeroed(head)).await? };
    Header::parse(bytes.get(..head).unwrap_or(&bytes)).map_err(error)
}

/// Reads the active L1 table.
async fn read_l1<S: Storage>(
    storage: &S,
    name: &Path,
    header: &Header,
    file_length: u64,
    replayed: Option<&Replayed>,
) -> Result<Vec<L1Entry>> {
    let bytes = u64::from(header.l1_size) * 8;
    let offset = header.l1_table_offset;
    if offset.get().checked_add(bytes).is_none_or(|end| end > file_length) {
        return Err(DiskError::Refused {
            image: name.to_owned(),
            reason: format!(
                "its L1 table (l1_table_offset {offset}, l1_size {}) reaches past the end of the \
                 file ({file_length} bytes): the file was cut short; restore it from a copy",
                header.l1_size
            ),
        });
    }
    let mut table = storage.read_at(offset.get(), IoBuf::zeroed(bytes as usize)).await?;
    if let Some(replayed) = replayed {
        replayed.put_over(offset.get(), &mut table);
    }
    Ok((0..header.l1_size as usize)
        .map(|index| L1Entry::read(&table, index).unwrap_or(L1Entry::unallocated()))
        .collect())
}
