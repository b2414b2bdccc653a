//! Opening one image.

use crate::check::{Amount, repair_dirty};
use crate::encryption::{Key, Protection, unlock};
use crate::index_area::{has_stamp, is_plain};
use crate::l1_table::L1Table;
use crate::layer::{ImageFormat, Layer, OpeningId, Qcow2, ShownLog};
use crate::luks;
use crate::memory::Reserved;
use crate::name::name_in_header;
use crate::options::{OpenOptions, SnapshotChoice, Trust};
use crate::probe::format_of;
use crate::recovery::{Purpose, Recovered, overlay, recover};
use crate::replayed::Replayed;
use crate::restart_log::{FoundLog, LogUse};
use crate::sabotage::{self, Sabotage};
use crate::snapshot_table::read_snapshots;
use crate::{DiskError, Result, invariant};
use isobath_formats::{Format, Image};
use isobath_qcow2::head::MAX_HEAD_L1_ENTRIES;
use isobath_qcow2::index::LayerStamp;
use isobath_qcow2::l1::L1_ENTRY_SIZE;
use isobath_qcow2::{Extension, Head, Header, IncompatibleFeatures, L1Entry, ParseMode};
use isobath_storage::{Access, Host, IoBuf, Storage, StorageExt, is_descriptor_set};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The path of a file that the image `referrer` names, after checking that it may be opened.
pub fn referenced_file<H: Host>(
    host: &H,
    referrer: &Path,
    field: &str,
    name: &str,
    trust: &Trust,
) -> Result<PathBuf> {
    let path = host.resolve(referrer, &name_in_header(host, referrer, field, name, trust)?);
    if let Trust::Within(directories) = trust {
        if is_descriptor_set(&path) {
            return Err(DiskError::Refused {
                image: referrer.to_owned(),
                reason: format!(
                    "its {field} is '{}': an untrusted image may not name a descriptor that was handed in",
                    name.escape_debug()
                ),
            });
        }
        let inside =
            |real: PathBuf| directories.iter().any(|directory| real.starts_with(directory));
        // Where nothing is allowed nothing is looked for: whether a file exists there is nobody's business.
        let real = if directories.is_empty() { None } else { Some(host.canonical(&path)) };
        let is_inside = match real {
            None => false,
            Some(Ok(real)) => inside(real),
            Some(Err(error)) => {
                let parent = match path.parent() {
                    Some(parent) if parent.as_os_str().is_empty() => Some(Path::new(".")),
                    parent => parent,
                };
                if parent.and_then(|parent| host.canonical(parent).ok()).is_some_and(inside) {
                    return Err(error.into());
                }
                false
            }
        };
        if !is_inside {
            return Err(DiskError::Refused {
                image: referrer.to_owned(),
                reason: format!(
                    "its {field} '{}' lies outside the directories allowed to an untrusted image{}",
                    name.escape_debug(),
                    trust.way_out()
                ),
            });
        }
    }
    Ok(path)
}

/// Checks that a data file with a relative name, which is found in the directory of the image `referrer`, is the one
/// that QEMU takes, which looks in the directory that it runs in.
///
/// # Errors
/// If that directory has another file by the name.
pub fn check_data_file<H: Host>(
    host: &H,
    referrer: &Path,
    name: &str,
    path: &Path,
    data: &H::File,
) -> Result<()> {
    let here = name_in_header(host, referrer, DATA_FILE, name, &Trust::Full)?;
    let here = Path::new(&*here);
    // What cannot be found there is no file that a program may take for this one.
    match host.find(here) {
        Ok(Some(other)) if here.is_relative() && other != data.id() => Err(DiskError::Refused {
            image: referrer.to_owned(),
            reason: format!(
                "its {DATA_FILE} is '{}', which Isobath takes for '{}', in the image's directory, but QEMU for \
                 another file of that name, in the current directory; give the image the absolute path of the right \
                 one with 'isobath amend --data-file FILE -o data_file=PATH {}', or, for a command that opens it as \
                 its active image, name that one with --data-file FILE",
                name.escape_debug(),
                isobath_storage::shown(path),
                isobath_storage::word(referrer),
            ),
        }),
        _ => Ok(()),
    }
}

/// Refuses an external data file for an image that keeps its data itself, in QEMU's words.
fn check_keeps_data(image: &Path, options: &OpenOptions) -> Result<()> {
    if options.data_file.is_none() {
        return Ok(());
    }
    Err(DiskError::Refused {
        image: image.to_owned(),
        reason: "'data-file' can only be set for images with an external data file".into(),
    })
}

/// Why an image is refused of which only its log could show that nobody else has written to it.
fn unknown(name: &Path, why: &str) -> DiskError {
    DiskError::Refused {
        image: name.to_owned(),
        reason: format!(
            "nobody knows whether it was written to since its server was killed: {why}, which would show that it was \
             not"
        ),
    }
}

/// The field that names an external data file.
pub const DATA_FILE: &str = "data file";

/// The format in which the image `name` is opened if it is to be opened in `format`: a layer that the host
/// [keeps](Host::kept) has the format that the host says.
///
/// # Errors
/// If it is such a layer, and is to be opened in another format.
pub fn format_kept<H: Host>(
    host: &H,
    name: &Path,
    format: Option<ImageFormat>,
) -> Result<Option<ImageFormat>> {
    let Some(kept) = host.kept(name) else { return Ok(format) };
    let own = ImageFormat::from_name(kept.format);
    match format {
        Some(format) if own != Some(format) => Err(DiskError::Refused {
            image: name.to_owned(),
            reason: format!(
                "it was to be opened as {}, but the manifest of its chain says that this layer is {}: leave out the \
                 format, or give this one",
                format.name(),
                kept.format
            ),
        }),
        _ => Ok(own),
    }
}

/// How one image of a chain is opened.
#[derive(Clone, Copy, Debug)]
pub struct Opening<'a> {
    /// What it is taken for; `None` if its first bytes decide.
    pub format: Option<ImageFormat>,
    /// Whether it may be changed, whatever `options` say, which are the chain's.
    pub writable: bool,
    /// Everything else.
    pub options: &'a OpenOptions,
    /// What decrypts its data if it is encrypted.
    pub key: &'a Key,
}

impl<'a> Opening<'a> {
    /// Opens an image without a key, as these options say.
    pub fn of(options: &'a OpenOptions) -> Self {
        Self { format: options.format, writable: options.writable, options, key: &Key::Unneeded }
    }
}

/// Opens one image, without its backing files.
pub async fn open_layer<H: Host>(
    host: &H,
    name: &Path,
    opening: Opening<'_>,
) -> Result<Layer<H::File>> {
    let file = host.open(name, opening.options.mode(opening.writable)).await?;
    opening.options.check_locked(&file)?;
    if opening.options.named {
        opening.options.trust.check_place(&file).await?;
    }
    let layer = load(host, name, opening, file).await?;
    Ok(if opening.format.is_none() { layer.detected() } else { layer })
}

/// What an index says of a layer: its head, and the stamp that its file had then.
#[derive(Clone, Copy, Debug)]
pub struct Known<'a> {
    /// The stamp.
    pub stamp: LayerStamp,
    /// The head.
    pub head: &'a Head,
}

/// As [`open_layer`], of an image of which an index says something. If its file has the stamp, what the index says is
/// what the file says, and nothing is read. Returns whether that was so.
pub async fn open_known_layer<H: Host>(
    host: &H,
    name: &Path,
    opening: Opening<'_>,
    known: Known<'_>,
) -> Result<(Layer<H::File>, bool)> {
    let options = opening.options;
    let asked = opening.writable
        || options.snapshot.is_some()
        || options.data_file.is_some()
        || opening.format != Some(ImageFormat::Qcow2);
    if asked {
        return Ok((open_layer(host, name, opening).await?, false));
    }
    let file = host.open(name, options.mode(false)).await?;
    options.check_locked(&file)?;
    if options.named {
        options.trust.check_place(&file).await?;
    }
    let qcow2 = if has_stamp(&file, known.stamp).await { of_head(known) } else { None };
    let Some(mut qcow2) = qcow2 else {
        return Ok((load(host, name, opening, file).await?, false));
    };
    check_entries(&qcow2, known.head, name)?;
    let memory = reserve(options, name, &qcow2.header.read())?;
    qcow2.memory = memory;
    let (name, file, length) = (name.to_owned(), Arc::new(file), known.stamp.length);
    Ok((Layer::qcow2(name, file, None, length, qcow2, None, Protection::None), true))
}

/// Whether the file of a layer that was opened by its head says the same as the head. So does that of any other layer.
///
/// # Errors
/// If the file cannot be read, or is not a valid image.
pub async fn is_as_its_file<S: Storage>(layer: &Layer<S>) -> Result<bool> {
    let Some(qcow2) = layer.as_qcow2() else { return Ok(true) };
    let mut known = qcow2.header.read().clone();
    // Others have no head.
    if !is_plain(&known) {
        return Ok(true);
    }
    drop_unneeded(&mut known);
    let (storage, name) = (&**layer.storage(), layer.name());
    let length = storage.len().await?;
    let start = storage.read_at(0, IoBuf::zeroed(4096)).await?;
    let mut header = read_header(storage, name, start, length, ParseMode::Read).await?;
    drop_unneeded(&mut header);
    if header != known {
        return Ok(false);
    }
    let l1 = read_l1(storage, name, &header, (length, false), None).await?;
    let known = qcow2.l1.read();
    Ok(l1.is_same(&known))
}

/// The image that a head is of; `None` if an image like that is refused, or has no head.
fn of_head(Known { stamp, head }: Known<'_>) -> Option<Qcow2> {
    let mut header = head.header().filter(is_plain)?;
    if header.l1_size as usize > MAX_HEAD_L1_ENTRIES {
        return None;
    }
    check_l1(Path::new(""), &header, stamp.length, true).ok()?;
    let geometry = header.geometry().ok()?;
    let mut l1 = L1Table::default();
    l1.grow(header.l1_size as usize);
    for (index, entry) in head.l1() {
        l1.set(*index as usize, *entry)?;
    }
    drop_unneeded(&mut header);
    Some(Qcow2 {
        opening: OpeningId::next(),
        header: header.into(),
        geometry,
        opened_length: stamp.length.into(),
        l1: l1.into(),
        memory: None,
    })
}

/// Reserves what an image with this header takes as a layer, if there is a limit.
fn reserve(options: &OpenOptions, name: &Path, header: &Header) -> Result<Option<Reserved>> {
    let limit = options.memory.as_ref();
    limit.map(|limit| limit.reserve_layer(name, u64::from(header.l1_size) * 8)).transpose()
}

/// Checks that the L1 table of an image is that of its head.
fn check_entries(qcow2: &Qcow2, head: &Head, name: &Path) -> Result<()> {
    let same = qcow2.l1.read().allocated().count() == head.l1().len();
    invariant(same, name, "an L1 table has the entries of its head")
}

/// Removes the names of features, which are needed only to explain a refusal, and the padding: there may be thousands
/// of layers.
fn drop_unneeded(header: &mut Header) {
    if header.unknown_fields.iter().all(|byte| *byte == 0) {
        header.unknown_fields = Vec::new();
    }
    header.extensions.retain(|extension| !matches!(extension, Extension::FeatureNames(_)));
    header.extensions.shrink_to_fit();
}

/// Reads what a layer is from its open file.
async fn load<H: Host>(
    host: &H,
    name: &Path,
    opening: Opening<'_>,
    file: H::File,
) -> Result<Layer<H::File>> {
    // A header here, a table there: nothing else of thousands of layers is needed yet.
    file.advise(Access::Random).await;
    let layer = Box::pin(load_layer(host, name, opening, file)).await?;
    layer.storage().advise(Access::Normal).await;
    Ok(layer)
}

/// Opens once more, for writing, an image that is open as `layer`: with the format that it was taken for, however it
/// begins now, the same key, and the data file that was given.
pub async fn open_again<H: Host>(
    host: &H,
    layer: &Layer<H::File>,
    options: &OpenOptions,
) -> Result<Layer<H::File>> {
    let format = Some(layer.format());
    let options = &options.clone().data_file(layer.given_data_file().map(Path::to_owned));
    let name = layer.name();
    let file = host.open(name, options.mode(true)).await?;
    // Before anything is read of it: what is read may have to be recovered first.
    if file.id() != layer.storage().id() {
        return Err(DiskError::Refused {
            image: name.to_owned(),
            reason: "its name has come to mean another file since it was opened".into(),
        });
    }
    let opening = Opening { format, writable: true, options, key: &layer.key() };
    let again = load(host, name, opening, file).await?;
    Ok(if layer.is_detected_raw() { again.detected() } else { again })
}

async fn load_layer<H: Host>(
    host: &H,
    name: &Path,
    opening: Opening<'_>,
    file: H::File,
) -> Result<Layer<H::File>> {
    let Opening { format, writable, options, key } = opening;
    let length = file.len().await?;
    let start = file.read_at(0, IoBuf::zeroed(4096)).await?;
    let format = format_of(name, format_kept(host, name, format)?, &start)?;
    if format != ImageFormat::Qcow2 {
        check_keeps_data(name, options)?;
    }
    if format == ImageFormat::Luks && options.snapshot.is_none() {
        return Box::pin(luks::open(name, file, key)).await;
    }
    let storage = &Arc::new(file);
    if format != ImageFormat::Qcow2 {
        if writable && options.only_with_log {
            return Err(unknown(name, "an image of its format has no log"));
        }
        if options.snapshot.is_some() {
            return Err(DiskError::Refused {
                image: name.to_owned(),
                reason: "its format has no internal snapshots".into(),
            });
        }
        let ImageFormat::Foreign(format) = format else {
            return Ok(Layer::raw(name.to_owned(), Arc::clone(storage), length));
        };
        if writable {
            return Err(DiskError::Refused {
                image: name.to_owned(),
                reason: format!(
                    "images in the format {} are only read; open it read-only, or convert it with \
                     'isobath convert -O qcow2'",
                    format.name()
                ),
            });
        }
        let image = Box::pin(open_foreign(host, name, format, options, storage)).await?;
        return Ok(Layer::foreign(name.to_owned(), Arc::clone(storage), image));
    }
    load_qcow2(host, name, opening, storage, (length, start)).await
}

/// Reads what a layer is from the open file of a qcow2 image: its length and its first 4096 bytes are these.
pub(crate) async fn load_qcow2<H: Host>(
    host: &H,
    name: &Path,
    opening: Opening<'_>,
    storage: &Arc<H::File>,
    (mut length, start): (u64, IoBuf),
) -> Result<Layer<H::File>> {
    let Opening { writable, options, key, .. } = opening;
    let mode = if writable { ParseMode::Open } else { ParseMode::Read };
    let mut header = read_header(&**storage, name, start, length, mode).await?;
    let corrupt = header.incompatible.contains(IncompatibleFeatures::CORRUPT);
    if writable && corrupt && !options.repairing {
        return Err(DiskError::Corrupt {
            image: name.to_owned(),
            reason: "its corrupt bit is set, so it can only be opened read-only".into(),
        });
    }
    let journal = header.incompatible.contains(IncompatibleFeatures::JOURNAL);
    if writable && options.only_with_log && !journal {
        return Err(unknown(name, "its log is not in use"));
    }
    let protection = Box::pin(unlock(&**storage, name, &header, key)).await?;
    let purpose = match (writable, options.locking, &options.snapshot) {
        (true, ..) if options.continues => Purpose::Continue,
        (true, ..) => Purpose::Write,
        // Restart logs know nothing of internal snapshots.
        (false, _, Some(_)) => Purpose::Examine,
        _ if sabotage::is(Sabotage::UnseenLog) => Purpose::Examine,
        (false, locking, None) if !locking.denies_writing() => Purpose::View(LogUse::Glance),
        (false, _, None) => Purpose::View(LogUse::Look),
    };
    let Recovered { view: replayed, restart_log: found_log, unfit } =
        recover(&**storage, name, &header, purpose).await?;
    if header.incompatible.contains(IncompatibleFeatures::JOURNAL) {
        length = storage.len().await?;
        let mut start = storage.read_at(0, IoBuf::zeroed(4096)).await?;
        if let Some(replayed) = &replayed {
            length = length.max(replayed.end());
            replayed.put_over(0, &mut start);
        }
        header = read_header(&**storage, name, start, length, mode).await?;
    }
    let unclean = found_log.as_ref().is_some_and(FoundLog::is_unclean);
    if writable && (unclean || header.incompatible.contains(IncompatibleFeatures::DIRTY)) {
        let memory = options.memory.as_ref();
        let amount = match (&options.trust, memory) {
            _ if options.unbounded_repair => Amount::Any,
            (Trust::Within(_), memory) => Amount::Bounded(memory),
            (Trust::Full, Some(memory)) => Amount::Within(memory),
            (Trust::Full, None) => Amount::Any,
        };
        repair_dirty(storage, name, amount).await?;
        length = storage.len().await?;
        let start = storage.read_at(0, IoBuf::zeroed(4096)).await?;
        header = read_header(&**storage, name, start, length, mode).await?;
    }
    if !writable {
        drop_unneeded(&mut header);
    }
    let geometry =
        header.geometry().map_err(|source| DiskError::Format { image: name.to_owned(), source })?;
    if let Some(choice) = &options.snapshot {
        show_snapshot(&**storage, name, &mut header, (length, writable), choice).await?;
    }
    let memory = reserve(options, name, &header)?;
    let l1 = read_l1(&**storage, name, &header, (length, writable), replayed.as_ref()).await?;
    let data = if header.incompatible.contains(IncompatibleFeatures::DATA_FILE) {
        let path = match (&options.data_file, header.data_file()) {
            (Some(path), _) => path.clone(),
            (None, Some(file)) if options.trust != Trust::Full => {
                return Err(DiskError::Refused {
                    image: name.to_owned(),
                    reason: format!(
                        "it keeps its data in an external file, '{}', which an untrusted image \
                         does not choose; 'isobath convert' and 'isobath serve' take the file's name \
                         as --data-file",
                        file.escape_debug()
                    ),
                });
            }
            (None, Some(file)) => referenced_file(host, name, DATA_FILE, file, &options.trust)?,
            (None, None) => {
                return Err(DiskError::Refused {
                    image: name.to_owned(),
                    reason:
                        "it keeps its data in an external file but does not name it; name it with \
                             'qemu-img amend -o data_file=NAME'"
                            .into(),
                });
            }
        };
        let data = host.open(&path, options.mode(writable)).await?;
        options.check_locked(&data)?;
        if let (None, Some(file)) = (&options.data_file, header.data_file()) {
            check_data_file(host, name, file, &path, &data)?;
        }
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
        check_keeps_data(name, options)?;
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
        memory,
    };
    let (name, storage) = (name.to_owned(), Arc::clone(storage));
    let layer = Layer::qcow2(name, storage, data, file_length, qcow2, replayed, protection)
        .with_data_file(options.data_file.clone());
    if unfit {
        layer.note_log(ShownLog::Unfit);
    }
    match found_log {
        // A snapshot leaves an empty one to the former active image until that is closed.
        Some(found_log) if !writable && found_log.is_empty() => Ok(layer),
        Some(found_log) if !writable => Box::pin(overlay(layer, &found_log)).await,
        found_log => {
            layer.set_found_log(found_log);
            Ok(layer)
        }
    }
}

/// Opens an image of another program, with the files that it names.
pub async fn open_foreign<H: Host>(
    host: &H,
    name: &Path,
    format: Format,
    options: &OpenOptions,
    storage: &Arc<H::File>,
) -> Result<Image<H::File>> {
    Image::open(format, name, Arc::clone(storage), async |extent: &str| {
        let path = referenced_file(host, name, "extent", extent, &options.trust)?;
        let file = host.open(&path, options.mode(false)).await?;
        options.trust.check_place(&file).await?;
        Ok::<_, DiskError>((path, Arc::new(file)))
    })
    .await
}

/// Puts a snapshot's L1 table and size in place of the current ones.
async fn show_snapshot<S: Storage>(
    storage: &S,
    name: &Path,
    header: &mut Header,
    (length, writable): (u64, bool),
    choice: &SnapshotChoice,
) -> Result<()> {
    let refused =
        |reason: &str| DiskError::Refused { image: name.to_owned(), reason: reason.to_owned() };
    if writable {
        return Err(refused("an internal snapshot can only be opened read-only"));
    }
    let snapshots = read_snapshots(storage, name, header, length).await?;
    let snapshot = choice.find(&snapshots).and_then(|index| snapshots.get(index));
    let snapshot = snapshot.ok_or_else(|| refused("Can't find snapshot"))?;
    let error = |source| DiskError::Format { image: name.to_owned(), source };
    snapshot.check(&header.geometry().map_err(error)?).map_err(error)?;
    header.l1_table_offset = snapshot.l1_table_offset;
    header.l1_size = snapshot.l1_size;
    header.size = snapshot.disk_size.unwrap_or(header.size);
    Ok(())
}

/// Reads the header cluster, of which `start` is the beginning, as strictly as `mode` says.
pub async fn read_header<S: Storage>(
    storage: &S,
    name: &Path,
    start: IoBuf,
    file_length: u64,
    mode: ParseMode,
) -> Result<Header> {
    let error = |source| DiskError::Format { image: name.to_owned(), source };
    let head = Header::probe_length(&start).map_err(error)?.min(file_length as usize);
    let enough = head <= start.len() || Header::ends_in(&start);
    let bytes = if enough { start } else { storage.read_at(0, IoBuf::zeroed(head)).await? };
    Header::parse_for(bytes.get(..head).unwrap_or(&bytes), mode).map_err(error)
}

/// Bytes of an L1 table that are read at once.
const L1_PIECE: u64 = 1 << 20;

/// The entries of the active L1 table that are in the file: all of them, or for reading at least those of the disk.
/// Those of a virtual machine's state come after them. A snapshot's table may have fewer, if the disk has grown since.
fn check_l1(name: &Path, header: &Header, file_length: u64, writable: bool) -> Result<u64> {
    let offset = header.l1_table_offset;
    let all = u64::from(header.l1_size);
    let there = all.min(file_length.saturating_sub(offset.get()) / L1_ENTRY_SIZE as u64);
    let geometry =
        header.geometry().map_err(|source| DiskError::Format { image: name.to_owned(), source })?;
    let needed = if writable { all } else { geometry.l1_size_for(header.disk_size()).min(all) };
    if there >= needed {
        return Ok(there);
    }
    Err(DiskError::Refused {
        image: name.to_owned(),
        reason: format!(
            "its L1 table (l1_table_offset {offset}, l1_size {}) reaches past the end of the \
             file ({file_length} bytes): the file is truncated; restore it from a backup",
            header.l1_size
        ),
    })
}

/// Reads the active L1 table.
async fn read_l1<S: Storage>(
    storage: &S,
    name: &Path,
    header: &Header,
    (file_length, writable): (u64, bool),
    replayed: Option<&Replayed>,
) -> Result<L1Table> {
    let bytes = check_l1(name, header, file_length, writable)? * L1_ENTRY_SIZE as u64;
    let offset = header.l1_table_offset;
    let mut table = L1Table::default();
    let mut at = 0;
    while at < bytes {
        let length = L1_PIECE.min(bytes - at) as usize;
        let mut piece = storage.read_at(offset.get() + at, IoBuf::zeroed(length)).await?;
        if let Some(replayed) = replayed {
            replayed.put_over(offset.get() + at, &mut piece);
        }
        let entries = (0..length / L1_ENTRY_SIZE).map(|index| L1Entry::read(&piece, index));
        let entries: Vec<_> = entries.map(Option::unwrap_or_default).collect();
        table.extend(&entries);
        at += length as u64;
    }
    // Whoever reads there gets an error.
    table.end_missing(header.l1_size as usize);
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::broken::{NAME, host, layer, must_violate};

    #[test]
    fn a_layer_has_the_l1_table_of_its_head() {
        let start = &host().contents(NAME).unwrap()[..4096];
        let of = |l1: u64| Head::new(start, &l1.to_be_bytes()).unwrap();
        let layer = layer();
        let check = |head: &Head| check_entries(layer.as_qcow2().unwrap(), head, Path::new(NAME));
        check(&of(0)).unwrap();
        must_violate(check(&of(1 << 16)), "an L1 table has the entries of its head");
    }
}
